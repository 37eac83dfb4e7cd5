"""Conversations that the server keeps between requests."""
