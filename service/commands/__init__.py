"""The commands of `attncache`, one module per command."""
