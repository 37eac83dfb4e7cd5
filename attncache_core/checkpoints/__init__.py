"""Find, describe and fingerprint the models on disk. No weights are read here."""
