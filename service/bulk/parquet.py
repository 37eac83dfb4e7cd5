"""pyarrow, which is an extra."""

from __future__ import annotations

from typing import Any

from attncache_core import InvalidInput


def pyarrow_parquet() -> Any:
    """Return the module pyarrow.parquet. Raises InvalidInput if pyarrow is not installed."""
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise InvalidInput(
            "Parquet files need pyarrow: pip install 'attncache[parquet]'", field="input"
        ) from error
    return parquet
