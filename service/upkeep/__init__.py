"""What runs beside requests: verification, checks of storage, rebuilding, warming."""
