"""How far a database's quality budget holds for texts unlike its corpus.

    python benchmarks/other_texts.py DATABASE FILE:COLUMN [FILE:COLUMN ...]

For each file: hit rate, and the cosine of the hits' embeddings to the full model's.
"""

import argparse
from pathlib import Path

import numpy as np

from attncache_core import AttentionDatabase, Outcome, PrefillEngine, find_checkpoint
from attncache_core.corpus.reading import read_rows
from attncache_core.outputs import cosines

_BATCH = 64
_MOST_TEXTS = 2000


def outputs(engine: PrefillEngine, sequences: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Embeddings [n, d] and whether each sequence hit, bool [n]."""
    batches = [sequences[at : at + _BATCH] for at in range(0, len(sequences), _BATCH)]
    results = [engine.run(batch, [True] * len(batch)) for batch in batches]
    hits = [outcome == Outcome.HIT for result in results for outcome in result.outcomes]
    return np.concatenate([result.outputs for result in results]), np.array(hits)


def main() -> None:
    """Print a line per file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("database", type=Path)
    parser.add_argument("texts", nargs="+", help="FILE:COLUMN")
    arguments = parser.parse_args()
    database = AttentionDatabase.open(arguments.database)
    checkpoint = find_checkpoint(database.manifest.model)
    full = PrefillEngine.load(checkpoint)
    reusing = PrefillEngine.load(checkpoint, database=database)
    print(f"{'texts':<28} {'number':>6} {'hit rate':>9} {'mean cosine':>12} {'5th percentile':>15}")
    for source in arguments.texts:
        path, _, column = source.rpartition(":")
        texts = list(dict.fromkeys(row[0] for row in read_rows(path, (column,))))[:_MOST_TEXTS]
        sequences = full.tokenize(texts)
        computed, _ = outputs(full, sequences)
        reused, hits = outputs(reusing, sequences)
        cosine = cosines(reused, computed)[hits]
        mean, low = (cosine.mean(), np.percentile(cosine, 5)) if hits.any() else (np.nan, np.nan)
        print(f"{Path(path).stem:<28} {len(texts):>6} {hits.mean():>9.3f} {mean:>12.4f} {low:>15.4f}")


if __name__ == "__main__":
    main()
