"""Build a database of attention maps and reuse the maps: python examples/library_reuse.py FOLDER."""

import sys
from itertools import product
from pathlib import Path

from attncache_core import (
    DEFAULT_MODEL,
    AttentionDatabase,
    BuildOptions,
    CorpusSentence,
    PrefillEngine,
    build_database,
    find_checkpoint,
    normalize,
)

FOLDER = Path(sys.argv[1] if len(sys.argv) > 1 else "orders.db")
THINGS = ["parcel", "letter", "book", "lamp", "chair", "phone", "coat", "ticket", "ring", "bike"]
CITIES = ["Paris", "London", "Rome", "Berlin", "Madrid", "Vienna", "Oslo", "Prague", "Lisbon", "Athens"]
VERBS = ["reach", "get to"]
corpus = [f"When will my {thing} {verb} {city}?" for thing, verb, city in product(THINGS, VERBS, CITIES)]

checkpoint = find_checkpoint(DEFAULT_MODEL)
full = PrefillEngine.load(checkpoint)
if not FOLDER.exists():
    # So few texts cannot prove a quality budget, so heads and threshold are given here. With thousands of
    # texts, leave all options out: the build chooses heads and thresholds within the budget.
    options = BuildOptions(heads="24", threshold=0.98, training_steps=50)
    build_database(full, [CorpusSentence(text, source=text) for text in corpus], FOLDER, options)

engine = PrefillEngine.load(checkpoint, database=AttentionDatabase.open(FOLDER))
texts = [corpus[0], "When will my lamp get to Dublin?", "la la la la la la"]
result = engine.run(engine.requests(engine.tokenize(texts)))
cosines = (normalize(result.outputs) * full.embed(texts)).sum(axis=1)
for text, outcome, cosine in zip(texts, result.outcomes, cosines, strict=True):
    print(f"{outcome:>13}  cosine to the full model {cosine:.4f}  {text}")
