"""What reuse costs in quality and saves in time, measured on labelled data."""
