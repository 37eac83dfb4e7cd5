"""Reuse of earlier results instead of computing: plans, strategies, and the data that strategies read."""
