"""Choose the heads and records that may be reused inside a quality budget, measured on probes."""
