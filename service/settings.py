"""What `serve` can be told, in one typed object: the options, their variables and their defaults.

    ATTNCACHE_PORT=8081 attncache serve --threads 2   ->   Settings(port=8081, threads=2, ...)

A field here is an option `--kebab-case` and a variable `ATTNCACHE_<NAME>`. Whatever is not accepted is
refused at start, by name.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from attncache_core import DEFAULT_MODEL, Fetch, Quantization
from attncache_core.attention_maps.policy import Preset
from attncache_core.checkpoint import PoolingMode
from attncache_core.devices import Device, Dtype
from service.errors import InvalidSettings

ChosenTask = Literal["label-logits"]
ENVIRONMENT_PREFIX = "ATTNCACHE_"


class Settings(BaseModel):
    """How one server runs. Read once, never changed."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    host: str = Field("127.0.0.1", min_length=1, description="Address to listen on.")
    port: int = Field(8080, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    model: str = Field(
        DEFAULT_MODEL,
        min_length=1,
        description="Model: a folder, an installed one's name, or a hub id.",
    )
    revision: str | None = Field(
        None,
        min_length=1,
        description="Branch, tag or commit of a model on the Hugging Face Hub; without it, its main branch.",
    )
    drop_attention: str = Field(
        "",
        description="Layers to run without their attention, like 10,12 or 8-11. A database is bound to it.",
    )
    drop_block: str = Field(
        "", description="Layers to leave out as a whole, like 10,12 or 8-11. A database is bound to it."
    )
    task: ChosenTask | None = Field(
        None,
        description="label-logits: choose among labels by the logits that a decoder gives their tokens; "
        "without it, as the model is.",
    )
    labels: str | None = Field(
        None,
        min_length=1,
        description="Labels to choose from, with commas between; compared by embedding, unless --task says "
        "otherwise.",
    )
    template: Path | None = Field(
        None,
        description="File with a text that holds {} once, where each input goes, instead of the model's "
        "default prompt.",
    )
    pooling: PoolingMode | None = Field(
        None, description="How token vectors become an embedding, instead of the model's own way."
    )
    database: Path | None = Field(
        None, description="Attention database; without it the default one, built on the first start."
    )
    reuse: bool = Field(True, description="Reuse attention maps; without it no database is opened.")
    threshold: float | None = Field(
        None, allow_inf_nan=False, description="Least similarity θ of a hit, instead of the database's own."
    )
    policy: Preset | None = Field(
        None,
        description="θ = 0.995, 0.99 or 0.95, as the papers have it, instead of the database's own "
        "thresholds; no budget is kept then.",
    )
    heads: str | None = Field(
        None,
        min_length=1,
        description="Heads to reuse (all, layers:0-3), instead of the database's own.",
    )
    search_always: bool = Field(
        False, description="Compare every text with the records, also where that is measured not to pay."
    )
    min_gain: float = Field(
        0.05,
        ge=0,
        allow_inf_nan=False,
        description="Reuse only where it makes whole passes faster by at least this share, measured on this "
        "machine; 0: wherever the budget holds.",
    )
    verify_rate: float = Field(
        0.01, ge=0, le=1, description="Share of hits that are computed in full too, once answered."
    )
    reuse_headers: bool = Field(
        True, description="Tell clients in headers how many of their texts reused maps."
    )
    fetch: Fetch = Field(Fetch.AUTO, description="How the maps of hits are read; auto takes the fastest.")
    classifier: Path | None = Field(None, description="Fitted classifier to serve on the embeddings.")
    dtype: Dtype = Field("auto", description="Compute dtype; auto takes what this processor is best at.")
    quantize: Quantization | None = Field(
        None, description="Round the layers' weights; int8 is the fast one. A database is bound to it."
    )
    device: Device = Field("cpu", description="Where the model runs; records and search stay in memory.")
    threads: int | None = Field(
        None,
        ge=1,
        description="Threads of model and index; without it, as the processor quota allows.",
    )
    truncate: bool = Field(True, description="Cut texts that are too long, unless a request says otherwise.")
    max_tokens: int | None = Field(
        None, ge=2, description="Longest text in tokens; without it, as the model takes."
    )
    max_batch_tokens: int = Field(1024, ge=1, description="Tokens in one batch; a longer text goes alone.")
    max_batch_sequences: int = Field(64, ge=1, description="Texts in one batch.")
    max_queue_sequences: int = Field(
        2048, ge=1, description="Texts that may wait; beyond it, requests get a 429."
    )
    max_request_inputs: int = Field(256, ge=1, description="Texts in one request.")
    max_request_tokens: int = Field(
        2**19,
        ge=1,
        description="Tokens of all sequences of one request; labels of several tokens make a text many.",
    )
    max_body_bytes: int = Field(2 * 1024 * 1024, ge=1, description="Bytes in one request's body.")
    cache_dir: Path | None = Field(
        None, description="Where default databases live; without it, in the user's cache folder."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least level logged.")

    @model_validator(mode="after")
    def _fits_together(self) -> Settings:
        if self.max_request_inputs > self.max_queue_sequences:
            # Such a request would be told to come again for ever.
            raise _refused("--max-request-inputs must be at most --max-queue-sequences, which is smaller")
        if self.classifier and self.labels:
            raise _refused("--classifier and --labels both say what to choose from; leave one of them out")
        if self.policy and self.threshold is not None:
            raise _refused("--policy and --threshold both say what a hit is; leave one of them out")
        for name in (
            "database",
            "threshold",
            "policy",
            "heads",
            "fetch",
            "search_always",
            "min_gain",
            "verify_rate",
        ):
            if not self.reuse and getattr(self, name) != type(self).model_fields[name].default:
                raise _refused(f"{option_name(name)} has no effect with --no-reuse; leave one of them out")
        return self


def option_name(field: str) -> str:
    """max_batch_tokens -> --max-batch-tokens."""
    return "--" + field.replace("_", "-")


def environment_name(field: str) -> str:
    """max_batch_tokens -> ATTNCACHE_MAX_BATCH_TOKENS."""
    return ENVIRONMENT_PREFIX + field.upper()


def read_settings(values: Mapping[str, object]) -> Settings:
    """The settings of these values by field name; raises InvalidSettings, naming option and variable."""
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
    """Raise InvalidSettings if a variable with our prefix is none of ours: a slip that would go unseen."""
    known = [environment_name(field) for field in Settings.model_fields]
    for name in sorted(environment):
        if name.startswith(ENVIRONMENT_PREFIX) and name not in known:
            closest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
            raise InvalidSettings(f"environment variable {name} is not known; did you mean {closest}?")


def _refused(sentence: str) -> PydanticCustomError:
    return PydanticCustomError("refused", "{sentence}", {"sentence": sentence})
