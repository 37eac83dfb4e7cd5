"""Reuse of attention maps at run time: database, search, policy, fetching and verification."""
