"""The HTTP microservice: JSON in, embeddings and classes out, and numbers about both.

    bytes -> bodies -> schemas -> routes -> batcher -> attncache_core -> routes -> bytes

The service is thin: it knows HTTP, queues and metrics, and nothing of attention.
"""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("attncache")
except PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "0+unknown"
