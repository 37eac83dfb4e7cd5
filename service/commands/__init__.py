"""The commands of `attncache`, one module each."""
