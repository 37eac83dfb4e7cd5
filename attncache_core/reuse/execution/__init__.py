"""Where a pass gets the maps that a plan gives: from records, or from an earlier layer."""
