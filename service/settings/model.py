"""The model, its use, and the processor that runs it."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field, field_validator

from attncache_core import DEFAULT_MODEL, Quantization
from attncache_core.checkpoints.checkpoint import Device, Dtype, PoolingMode
from service.settings.names import Group, refused

ChosenTask = Literal["label-logits"]
_MAX_WORKERS = 256


class Model(Group):
    """The model and what it is used for."""

    title: ClassVar[str] = "Model"

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
    served_model_name: str | None = Field(
        None,
        min_length=1,
        description="Names, separated by commas, by which clients of the paths under /v1 may call the model; "
        "/v1/models shows the first one. * accepts every name. Default: the name of the model.",
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
        description="File with a template that holds {} once, where each input is inserted, or {query} and "
        "{document} for pairs. Or the name of a template of this package: qwen3-reranker, mxbai-rerank-v2. "
        "Default: the model's default prompt.",
    )
    pooling: PoolingMode | None = Field(
        None, description="How token vectors become an embedding. Default: the model's own way."
    )
    classifier: Path | None = Field(
        None, description="Folder of a classifier that was fitted on the model's embeddings. Default: none."
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


class Processor(Group):
    """What runs the model."""

    title: ClassVar[str] = "Processor"

    device: Device = Field(
        "cpu", description="Device that runs the model. Records and search stay in main memory."
    )
    workers: int | Literal["auto"] = Field(
        1,
        description="Processes that serve one address and share threads and limits; auto chooses 1 for every "
        "8 processors.",
    )
    threads: int | None = Field(
        None,
        ge=1,
        description="Threads of the model and the index. Default, and at most: as many as the processor "
        "quota allows.",
    )

    @field_validator("workers", mode="before")
    @classmethod
    def _is_a_number_of_workers(cls, workers: object) -> object:
        if workers == "auto" or (str(workers).isdecimal() and 1 <= int(str(workers)) <= _MAX_WORKERS):
            return workers
        raise refused(f"give a number from 1 to {_MAX_WORKERS}, or auto")
