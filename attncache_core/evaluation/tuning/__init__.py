"""Measurement of the ways to spend a quality budget, and the choice of the fastest one that keeps it."""
