"""The HTTP microservice: JSON in, embeddings and classes out, and numbers about both.

    bytes -> bodies -> schemas -> routes -> batcher -> attncache_core -> routes -> bytes

The service is thin: it knows HTTP, queues and metrics, and nothing of attention.
"""

from attncache_core.version import __version__ as __version__
