"""The version that runs."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("attncache")
except PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "0+unknown"
