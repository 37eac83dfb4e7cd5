"""Measurement of the quality that reuse costs and of the time it saves, on texts with or without labels."""
