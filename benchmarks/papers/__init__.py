"""The papers' baselines and experiments."""
