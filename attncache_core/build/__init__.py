"""Build a database of attention maps from a corpus."""
