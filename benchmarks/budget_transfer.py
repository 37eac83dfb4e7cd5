"""Test whether a budget holds on texts that were not used for its calibration.

    python -m benchmarks budget-transfer --database banking77.db --data banking77_test_a.tsv \\
        --other STSB_test.tsv:sentence1,sentence2

All masks are measured once on all texts. Then mask and policy are chosen on a random half of the texts and
applied to the other half, for several random splits. With --other, mask and policy are also chosen on one set
of texts and applied to the other set. A length group fails if it has at least 20 hits and their mean fidelity
is below the budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click
import numpy as np

from attncache_core import AttentionDatabase, PrefillEngine, find_checkpoint
from attncache_core.calibration.calibrate import candidate_masks
from attncache_core.calibration.database import unrecorded
from attncache_core.calibration.policy_selection import Calibrated, Terms, apply_policy, choose_policy
from attncache_core.calibration.probes import Measured, Probes, find_probes, measure
from attncache_core.calibration.savings import measure_savings
from attncache_core.calibration.thresholds import MIN_PROBES
from attncache_core.corpus.reading import read_texts
from attncache_core.heads.comparator import Measure
from attncache_core.reuse.maps.policy import Budget
from attncache_core.reuse.storage.layout import RecordKind
from service.commands.report import machine, show_machine, show_table

Measurements = list[dict[RecordKind, Measured]]


@click.command()
@click.option("--model", default="all-MiniLM-L6-v2", show_default=True)
@click.option("--database", type=click.Path(path_type=Path), required=True)
@click.option("--data", required=True, help="FILE or FILE:column,column with the texts.")
@click.option("--other", help="FILE or FILE:column,column with a second set of texts.")
@click.option("--min-cosine", default=0.985, show_default=True)
@click.option("--min-agreement", default=0.98, show_default=True)
@click.option("--splits", default=20, show_default=True, help="Number of random splits into halves.")
def main(
    model: str,
    database: Path,
    data: str,
    other: str | None,
    min_cosine: float,
    min_agreement: float,
    splits: int,
) -> None:
    """Print how often the budget fails, and by how much."""
    opened = AttentionDatabase.open(database)
    engine = PrefillEngine.load(find_checkpoint(model))
    budget = (
        Budget(Measure.AGREEMENT, min_agreement)
        if engine.decisions.labels
        else Budget(Measure.COSINE, min_cosine)
    )
    rank = np.array(opened.manifest.rank)
    masks = candidate_masks(rank)
    sets = {}
    for source in filter(None, (data, other)):
        sequences = engine.tokenize(read_texts(source))
        probes = find_probes(engine.model, opened.search, unrecorded(opened, sequences, field="data"))
        measured = measure(
            engine.model, opened.search.store, probes, masks, engine.decisions.comparator(budget.measure)
        )
        sets[Path(source.partition(":")[0]).stem] = (probes, measured)
    first, _ = next(iter(sets.values()))
    savings = measure_savings(engine, opened.search, first, opened.mask.order)

    def transfer(calibration: tuple[Probes, Measurements], target: tuple[Probes, Measurements]) -> Calibrated:
        """Choose mask and policy on `calibration`, and apply them to `target`."""
        terms = Terms.of(calibration[0], budget, savings, shortest=min(opened.search.store.segments))
        chosen, _ = choose_policy(terms, masks, calibration[1])
        of_mask = target[1][masks.index(chosen.mask)]
        return apply_policy(target[0], of_mask, chosen.mask, chosen.policy)

    rows = []
    for name, (probes, measured) in sets.items():
        results = []
        for seed in range(splits):
            shuffled = np.random.default_rng(seed).permutation(len(probes.sequences))
            halves = np.sort(shuffled[::2]), np.sort(shuffled[1::2])
            one, two = (_part(probes, measured, half) for half in halves)
            results += [(transfer(one, two), two[0]), (transfer(two, one), one[0])]
        rows.append(_row(f"{name}, half to half", results, budget))
    if other:
        (one_name, one), (two_name, two) = sets.items()
        rows.append(_row(f"{one_name} to {two_name}", [(transfer(one, two), two[0])], budget))
        rows.append(_row(f"{two_name} to {one_name}", [(transfer(two, one), one[0])], budget))
    show_machine({**machine(engine.threads), "budget": f"{budget.measure} {budget.least}"})
    columns = (
        "calibrated on, applied to",
        "runs",
        "heads",
        "hits",
        "mean",
        "runs below",
        "least",
        "groups below",
        "least",
    )
    show_table("budget on texts that were not used for calibration", columns, rows)


def _part(probes: Probes, measured: Measurements, indices: np.ndarray) -> tuple[Probes, Measurements]:
    """Return the probes with these indices, and their measurements."""
    of_masks = [
        {kind: Measured(each.damage[indices], each.fidelity[indices]) for kind, each in of_mask.items()}
        for of_mask in measured
    ]
    return probes.at(indices), of_masks


def _row(name: str, results: Sequence[tuple[Calibrated, Probes]], budget: Budget) -> list[object]:
    """Return the table row of several transfers."""
    means, groups = [], []
    for result, probes in results:
        if result.served.any():
            means.append(float(result.fidelity[result.served].mean()))
        group_of = result.policy.group_indices(probes.lengths)
        for group in range(len(result.policy.groups)):
            hits = result.served & (group_of == group)
            if hits.sum() >= MIN_PROBES:
                groups.append(float(result.fidelity[hits].mean()))
    below = [mean for mean in means if mean < budget.least]
    groups_below = [mean for mean in groups if mean < budget.least]
    return [
        name,
        len(results),
        f"{np.mean([result.mask.total for result, _ in results]):.0f}",
        f"{np.mean([result.served.mean() for result, _ in results]):.3f}",
        f"{np.mean(means):.4f}" if means else "",
        f"{len(below)} of {len(means)}",
        f"{min(means):.4f}" if means else "",
        f"{len(groups_below)} of {len(groups)}",
        f"{min(groups):.4f}" if groups else "",
    ]
