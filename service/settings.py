"""The settings of `serve` in one typed object: options, environment variables and defaults.

    ATTNCACHE_PORT=8081 attncache serve --threads 2   ->   Settings(port=8081, threads=2, ...)

Each field is an option `--kebab-case` and a variable `ATTNCACHE_<NAME>`. A name or value that is not accepted
is refused at the start, with its name.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import PydanticCustomError

from attncache_core import DEFAULT_MODEL, Fetch, Quantization
from attncache_core.checkpoints.checkpoint import PoolingMode
from attncache_core.runtime.devices import Device, Dtype
from service.conversations.conversation import OverflowWay
from service.errors import InvalidSettings

ChosenTask = Literal["label-logits"]
ENVIRONMENT_PREFIX = "ATTNCACHE_"
# Fields whose options are accepted but not shown: --fetch selects the baselines of the benchmark.
HIDDEN_FIELDS = frozenset({"fetch"})
# Fields that say how attention maps, or keys and values, are reused.
_OF_MAPS = ("database", "threshold", "heads", "fetch", "search_always", "min_gain", "verify_rate")
_OF_KEY_VALUES = (
    "kv_memory_bytes",
    "kv_dir",
    "kv_disk_bytes",
    "kv_disk_dtype",
    "kv_eviction",
    "warm",
)
# Former field -> what to use instead. The option and its variable are refused.
REMOVED_FIELDS = {
    "policy": "use --threshold 0.995 (conservative), 0.99 (moderate) or 0.95 (aggressive)",
}


class Settings(BaseModel):
    """The settings of one server. Read once and never changed."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    host: str = Field("127.0.0.1", min_length=1, description="Address to listen on.")
    port: int = Field(8080, ge=0, le=65535, description="Port to listen on; 0 selects a free port.")
    model: str = Field(
        DEFAULT_MODEL,
        min_length=1,
        description="Model to serve: a folder, the name of an installed model, or a Hugging Face Hub id.",
    )
    revision: str | None = Field(
        None,
        min_length=1,
        description="Branch, tag or commit of a model on the Hugging Face Hub. Default: the main branch.",
    )
    drop_attention: str = Field(
        "",
        description="Layers that run without their attention, like 10,12 or 8-11. A database is bound to "
        "this choice. Default: none.",
    )
    drop_block: str = Field(
        "",
        description="Layers that are skipped as a whole, like 10,12 or 8-11. A database is bound to this "
        "choice. Default: none.",
    )
    task: ChosenTask | None = Field(
        None,
        description="label-logits: classify among labels by the logits that a decoder gives to their tokens. "
        "Default: embed or classify, depending on the model.",
    )
    labels: str | None = Field(
        None,
        min_length=1,
        description="Labels to choose from, separated by commas. Labels are compared by embedding, unless "
        "--task is label-logits. Default: none.",
    )
    template: Path | None = Field(
        None,
        description="File with a template that holds {} once, where each input is inserted. Default: the "
        "model's default prompt.",
    )
    pooling: PoolingMode | None = Field(
        None, description="How token vectors become an embedding. Default: the model's own way."
    )
    database: Path | None = Field(
        None,
        description="Folder of the attention database. Default: the default database of the model, which "
        "the first start builds.",
    )
    reuse: bool = Field(
        True,
        description="Reuse anything. --no-reuse switches off every kind of reuse, and opens no database.",
    )
    maps: bool = Field(
        True,
        description="Reuse attention maps, from --database or the default database. A causal model has no "
        "default database.",
    )
    kv: bool = Field(
        True,
        description="Store keys and values and reuse them: exactly, and only for causal models.",
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
        description="Numbers of saved keys and values: as computed, or in 8 bits, which takes half of the "
        "bytes and is approximate.",
    )
    kv_eviction: Literal["look-ahead", "lru", "fifo"] = Field(
        "look-ahead",
        description="Which keys and values leave first when there is no room: those that no waiting request "
        "will use (look-ahead), the least recently used, or the oldest.",
    )
    warm: Path | None = Field(
        None,
        description="File of texts whose keys and values are computed before the server is ready: .txt, one "
        'text per line, or .jsonl, one {"text" or "template", "salt", "pin"} per line. Default: none.',
    )
    admin: bool = Field(
        False,
        description="Serve the routes under /cache, which show and change the stored keys and values of all "
        "clients.",
    )
    threshold: float | None = Field(
        None,
        allow_inf_nan=False,
        description="Least similarity θ of a hit, for all lengths. Default: the thresholds of the database, "
        "which keep its quality budget.",
    )
    heads: str | None = Field(
        None,
        min_length=1,
        description="Heads to reuse (all, layers:0-3, or a number). Default: the heads that the database "
        "was calibrated with.",
    )
    search_always: bool = Field(
        False, description="Compare every text with the records, even where reuse was measured not to pay."
    )
    min_gain: float = Field(
        0.05,
        ge=0,
        allow_inf_nan=False,
        description="Reuse only where reuse makes whole passes faster by at least this share, measured on "
        "this machine; 0 reuses wherever the quality budget holds.",
    )
    verify_rate: float = Field(
        0.01,
        ge=0,
        le=1,
        description="Compute this share of the hits again in full, after the response was sent.",
    )
    reuse_headers: bool = Field(
        True, description="Send headers that tell how many texts of a request reused maps."
    )
    fetch: Fetch = Field(
        Fetch.AUTO, description="How the maps of hits are read. auto selects the fastest way."
    )
    classifier: Path | None = Field(
        None, description="Folder of a fitted classifier to serve on the embeddings. Default: none."
    )
    dtype: Dtype = Field(
        "auto", description="Data type of the computation. auto selects the best type of this processor."
    )
    quantize: Quantization | None = Field(
        None,
        description="Quantise the weights of the layers; int8 is the fast way. A database is bound to this "
        "choice. Default: no quantisation.",
    )
    quantize_texts: str | None = Field(
        None,
        min_length=1,
        description="File of texts to calibrate int8 with, FILE or FILE:column, such as your own traffic. A "
        "database is bound to this choice. Default: 100 texts of the shipped corpus.",
    )
    device: Device = Field(
        "cpu", description="Device that runs the model. Records and search stay in main memory."
    )
    threads: int | None = Field(
        None,
        ge=1,
        description="Threads of the model and the index. Default: as many as the processor quota allows.",
    )
    truncate: bool = Field(
        True,
        description="Cut texts that are too long. With --no-truncate such texts are refused. A request may "
        "override the setting.",
    )
    max_tokens: int | None = Field(
        None, ge=2, description="Longest text in tokens. Default: the longest text that the model accepts."
    )
    max_batch_tokens: int = Field(
        1024,
        ge=1,
        description="Most tokens in one batch. A prefix that is computed once counts once. A longer text is "
        "a batch of its own.",
    )
    max_batch_sequences: int = Field(64, ge=1, description="Most texts in one batch.")
    max_queue_sequences: int = Field(
        2048, ge=1, description="Most texts that may wait. Further requests get status 429."
    )
    max_request_inputs: int = Field(256, ge=1, description="Most texts in one request.")
    max_request_tokens: int = Field(
        2**19,
        ge=1,
        description="Most tokens of all sequences of one request. Labels of several tokens make several "
        "sequences of each text.",
    )
    max_body_bytes: int = Field(2 * 1024 * 1024, ge=1, description="Most bytes in the body of one request.")
    max_sessions: int = Field(
        10_000, ge=1, description="Most sessions; beyond this number, the least recently used are dropped."
    )
    session_ttl_seconds: float = Field(
        3600.0,
        gt=0,
        allow_inf_nan=False,
        description="Drop the history of a session this long after its last request.",
    )
    session_overflow: OverflowWay = Field(
        "recompute",
        description="What to do if a conversation does not fit into the model's window: cut its oldest "
        "tokens and compute the rest again (recompute), refuse the request, or cut and use the stored keys "
        "and values of the rest, which is approximate (truncate; keep-sinks keeps the first 4 tokens too).",
    )
    session_keep_ratio: float = Field(
        0.5,
        gt=0,
        le=1,
        description="Share of the window that a conversation fills after it was cut.",
    )
    cache_dir: Path | None = Field(
        None, description="Folder of default databases. Default: a folder in the user's cache folder."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Least level of messages that are logged."
    )

    @field_validator("kv_dir", mode="before")
    @classmethod
    def _is_named(cls, folder: object) -> object:
        if folder == "":
            # Path("") would be the current folder.
            raise _refused("accepted is the name of a folder")
        return folder

    @model_validator(mode="after")
    def _fits_together(self) -> Settings:
        if self.max_request_inputs > self.max_queue_sequences:
            # Otherwise such a request would get status 429 for ever.
            raise _refused("--max-request-inputs must be at most --max-queue-sequences, which is smaller")
        if self.classifier and self.labels:
            raise _refused("--classifier and --labels both set the labels; leave one of them out")
        self._refuse_without("maps", _OF_MAPS)
        self._refuse_without("kv", _OF_KEY_VALUES)
        for name in ("kv_disk_bytes", "kv_disk_dtype"):
            if self.kv_dir is None and getattr(self, name) != type(self).model_fields[name].default:
                raise _refused(f"{option_name(name)} has no effect without --kv-dir; give both or none")
        self._refuse_without("reuse", ("maps", *_OF_MAPS, "kv", *_OF_KEY_VALUES))
        return self

    def _refuse_without(self, switch: str, options: Iterable[str]) -> None:
        """Refuse options that have no effect because a switch is off."""
        for name in options:
            if not getattr(self, switch) and getattr(self, name) != type(self).model_fields[name].default:
                raise _refused(f"{option_name(name)} has no effect with --no-{switch}; leave one of them out")


def option_name(field: str) -> str:
    """Return the option of a field: max_batch_tokens -> --max-batch-tokens."""
    return "--" + field.replace("_", "-")


def environment_name(field: str) -> str:
    """Return the environment variable of a field: max_batch_tokens -> ATTNCACHE_MAX_BATCH_TOKENS."""
    return ENVIRONMENT_PREFIX + field.upper()


def read_settings(values: Mapping[str, object]) -> Settings:
    """Return the settings from values by field name.

    Raises InvalidSettings, which names the option and the variable.
    """
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        if not first["loc"]:
            raise InvalidSettings(first["msg"]) from error
        field = str(first["loc"][0])
        names = f"{option_name(field)} ({environment_name(field)})"
        accepted = first["msg"].replace("Input should be", "accepted is", 1)
        raise InvalidSettings(f"{names} cannot be {first['input']!r}: {accepted}", field=field) from error


def refuse_unknown_variables(environment: Iterable[str]) -> None:
    """Raise InvalidSettings for an unknown variable with the prefix of this program.

    Without this check, a misspelt variable would be ignored silently.
    """
    known = [environment_name(field) for field in Settings.model_fields]
    removed = {environment_name(field): remedy for field, remedy in REMOVED_FIELDS.items()}
    for name in sorted(environment):
        if name in removed:
            raise InvalidSettings(f"environment variable {name} was removed; {removed[name]}")
        if name.startswith(ENVIRONMENT_PREFIX) and name not in known:
            closest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
            raise InvalidSettings(f"environment variable {name} is not known; did you mean {closest}?")


def _refused(sentence: str) -> PydanticCustomError:
    return PydanticCustomError("refused", "{sentence}", {"sentence": sentence})
