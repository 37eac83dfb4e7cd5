"""Store records of attention maps in checksummed, memory-mapped files."""
