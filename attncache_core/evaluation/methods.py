"""Make the methods of a comparison by their names.

full                     the model without reuse
attncache                reuse with the policy of the database
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import ClassVar

from attncache_core.checkpoints.checkpoint import Checkpoint, Dtype
from attncache_core.engine.prefill import PrefillEngine
from attncache_core.engine.request import PrefillRequest
from attncache_core.engine.result import PrefillResult
from attncache_core.errors import InvalidInput
from attncache_core.evaluation.comparison import FULL, Method
from attncache_core.reuse.maps.database import AttentionDatabase
from attncache_core.text.labels import LabelTokens

ATTNCACHE = "attncache"
METHODS = (FULL, ATTNCACHE)


def parse_methods(text: str, known: Collection[str] = METHODS) -> list[str]:
    """Return the names in a comma-separated list once each, `full` first. Raises InvalidInput if unknown."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in known:
            raise InvalidInput(
                f"{name!r} is not a known method; the methods are {', '.join(known)}", field="methods"
            )
    return [FULL, *(name for name in dict.fromkeys(names) if name != FULL)]


class Methods:
    """Makes methods by name, for one checkpoint and, optionally, a database."""

    # The methods that change the output of every text, though they search nothing.
    changing_all: ClassVar[Collection[str]] = ()

    def __init__(
        self,
        full: PrefillEngine,
        checkpoint: Checkpoint,
        database: AttentionDatabase | None,
        corpus: Sequence[Sequence[int]],
        *,
        dtype: Dtype = "auto",
        labels: LabelTokens | None = None,
    ) -> None:
        """Prepare to make methods.

        full: the engine without a database. corpus: token sequences of the texts that the database was built
        from. labels: labels of several tokens, read from the sequences; None: the outputs suffice.
        """
        self._full, self._checkpoint, self._database = full, checkpoint, database
        self._corpus, self._dtype = corpus, dtype
        self._prompt = labels.prompt if labels else None
        self.engines: dict[str, PrefillEngine] = {}  # name -> engine of each AttnCache method made so far

    def make(self, name: str) -> Method:
        """Make the method with this name. Raises InvalidInput if the method needs a database and has none."""
        if name == FULL:
            return partial(self._run, self._full, False)
        return self._reusing(name, self._opened(name))

    def _opened(self, name: str) -> AttentionDatabase:
        if self._database is None:
            raise InvalidInput(f"method {name} needs a database", field="database")
        return self._database

    def _reusing(self, name: str, database: AttentionDatabase) -> Method:
        """Make a method that reuses maps in all length groups, even in those where reuse saves no time."""
        engine = self.engines[name] = PrefillEngine.load(
            self._checkpoint, database=database, dtype=self._dtype, threads=self._full.threads
        )
        return partial(self._run, engine, True)

    def _run(self, engine: PrefillEngine, reuse: bool, sequences: Sequence[Sequence[int]]) -> PrefillResult:
        requests = [
            PrefillRequest(ids, reuse, self._prompt.sequence_plan(index) if self._prompt else None)
            for index, ids in enumerate(engine.without_padding(sequences))
        ]
        return engine.run(requests)
