"""The reuse of keys and values: sequences of a causal model that begin alike compute what they share once."""
