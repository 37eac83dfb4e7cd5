"""Several processes that serve one address: one supervisor, and workers that are servers of their own."""
