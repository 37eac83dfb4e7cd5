"""What is reused: attention maps, keys and values, and the conversations of sessions."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field, SecretStr, field_validator

from service.settings.names import MAX_SECONDS, Group

# What happens if a conversation does not fit into the window of the model.
OverflowWay = Literal["recompute", "refuse", "truncate", "keep-sinks"]


class Reuse(Group):
    """Whether anything is reused, and how attention maps are."""

    title: ClassVar[str] = "Reuse of attention maps"

    reuse: bool = Field(
        True,
        description="Reuse anything. --no-reuse switches off every kind of reuse, and opens no database.",
    )
    maps: bool = Field(
        True,
        description="Reuse attention maps, from --database or the default database. A causal model, and a "
        "model of pairs, has no default database.",
    )
    database: Path | SecretStr | None = Field(
        None,
        description="Folder of the attention database, or the URL (s3, gs, az, http, https, file) to which "
        "`attncache push` has sent it. Default: the default database of the model, which the first start "
        "builds.",
    )
    threshold: float | None = Field(
        None,
        le=1,
        description="Least similarity θ of a hit, for all lengths; with 1, only recorded texts hit. Default: "
        "the thresholds of the database, which keep its quality budget.",
    )
    min_gain: float = Field(
        0.05,
        ge=0,
        description="Reuse only where reuse makes whole passes faster by at least this share, measured on "
        "this machine; 0 reuses wherever the quality budget holds.",
    )
    verify_rate: float = Field(
        0.01,
        ge=0,
        le=1,
        allow_inf_nan=True,  # the range says more
        description="Compute this share of the hits again in full, after the response was sent.",
    )
    cache_dir: Path | None = Field(
        None,
        description="Folder of default databases, and of databases that were downloaded. Default: a folder "
        "in the user's cache folder.",
    )
    sample: bool = Field(
        False,
        description="Keep a sample of the texts that clients ask for, as token ids, in the folder of the "
        "database, so that `attncache renew` can renew the database from the sample.",
    )
    sample_texts: int = Field(
        60_000,
        ge=1,
        le=10_000_000,
        description="Most texts in the sample of each process. One API key holds at most a tenth, and a "
        "renewal needs 3,000.",
    )
    sample_half_life_hours: float = Field(
        168.0,
        gt=0,
        description="A text that was not asked for this long has half the weight of a new text.",
    )
    renew_hours: float | None = Field(
        None,
        gt=0,
        description="Renew the database from the sample every so many hours, in a process of lowest "
        "priority. 24 is usual. Default: only `attncache renew` renews it.",
    )

    @field_validator("database", mode="before")
    @classmethod
    def _url_is_secret(cls, database: object) -> object:
        # A URL may hold secrets, which neither a log nor an error may show.
        return SecretStr(database) if isinstance(database, str) and "://" in database else database


class KeyValues(Group):
    """How keys and values of prefixes are stored."""

    title: ClassVar[str] = "Keys and values"

    kv: bool = Field(
        True,
        description="Store keys and values of causal models and reuse them exactly; on the CPU, and not with "
        "--database.",
    )
    kv_memory_bytes: int | None = Field(
        None,
        ge=0,
        description="Most bytes of memory for stored keys and values. Default: a quarter of the memory that "
        "is available at the start.",
    )
    kv_dir: Path | None = Field(
        None,
        description="Folder where keys and values are saved, for restarts and for more than memory holds. It "
        "holds the tokens of texts. Default: keys and values are kept in memory only.",
    )
    kv_disk_bytes: int = Field(
        16 * 2**30, ge=1, description="Most bytes of saved keys and values in --kv-dir, of all servers."
    )
    kv_disk_dtype: Literal["model", "int8"] = Field(
        "model",
        description="Numbers of saved keys and values: as computed, or in 8 bits, which takes 0.63 of the "
        "bytes of bfloat16 and is approximate.",
    )
    warm: Path | None = Field(
        None,
        description="File of texts whose keys and values are computed before the server is ready: .txt, one "
        'text per line, or .jsonl, one {"text", "template" or "segment", "salt", "key", "pin"} per line. '
        "Default: none.",
    )


class Chunks(Group):
    """How the chunks of a prompt are blended."""

    title: ClassVar[str] = "Chunks in any order"

    blend: Path | None = Field(
        None,
        description="File that `attncache calibrate --segments` has written: how much is computed again when "
        "keys and values of chunks are reused in any order, which is approximate. Default: chunks are "
        "computed exactly.",
    )
    segment_separator: str = Field(
        "\n", description="Text between the segments of a request, and between the last one and the query."
    )
    divide_texts: bool = Field(
        False,
        description="Divide texts of inputs at --segment-separator into segments; what follows the last one "
        "is the query. Only with --blend.",
    )
    segment_tokens: int | None = Field(
        None,
        ge=1,
        description="Divide texts of inputs into segments of this many tokens; the rest is the query. Only "
        "with --blend. Default: texts are not divided.",
    )


class Sessions(Group):
    """How conversations are kept."""

    title: ClassVar[str] = "Sessions"

    max_sessions: int = Field(
        10_000,
        ge=1,
        description="Most sessions; beyond this number, the least recently used are dropped. Sessions in the "
        "store of --shared are not counted.",
    )
    session_ttl_seconds: float = Field(
        3600.0,
        gt=0,
        le=MAX_SECONDS,
        description="Drop the history of a session this long after its last request.",
    )
    session_overflow: OverflowWay = Field(
        "recompute",
        description="What to do if a conversation does not fit into the model's window: cut its oldest "
        "tokens and compute the rest again (recompute), refuse the request, or cut and use the stored keys "
        "and values of the rest, which is approximate (truncate; keep-sinks keeps the first 4 tokens too).",
    )
