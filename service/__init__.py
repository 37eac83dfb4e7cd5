"""The HTTP microservice: JSON in, embeddings and classes out, and metrics about both.

    bytes -> calls -> schemas -> routes -> batcher -> attncache_core -> routes -> bytes

The service handles HTTP, queues and metrics. It computes nothing of a model itself.
"""
