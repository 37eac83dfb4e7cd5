"""Ways are combined only from parts that keep the budget and pay, and the choice wastes no quality."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attncache_core import Budget, Measure, Quantization
from attncache_core.calibration.quality import Quality
from attncache_core.evaluation.tuning.measuring import MeasuredWay
from attncache_core.evaluation.tuning.search import Search, choose
from attncache_core.evaluation.tuning.ways import Way

BUDGET = Budget(Measure.COSINE, 0.98)
INT8, INT4 = Way(quantization=Quantization.INT8), Way(quantization=Quantization.INT4)
MAPS = Way(maps=True)


def attention(*layers: int) -> Way:
    return Way(drop_attention=layers)


def blocks(*layers: int) -> Way:
    return Way(drop_blocks=layers)


def figures(way: Way, quality: float, speed: float, alone: float = 1.0) -> MeasuredWay:
    return MeasuredWay(
        way, Quality(quality, quality, None), None, speed, alone, 100.0, 1.0, 10**6, float(way.maps)
    )


class Machine:
    """A machine on which losses add up and speeds multiply, part by part. Remembers what it measured."""

    def __init__(self, **parts: tuple[float, float]):
        """parts: name -> (loss, speed); the loss and speed of dropped layers are per layer."""
        self.parts, self.measured = parts, []

    def __call__(self, way: Way) -> MeasuredWay | None:
        self.measured.append(way)
        used = [
            *([way.quantization.name.lower()] if way.quantization else []),
            *["attention"] * len(way.drop_attention),
            *["blocks"] * len(way.drop_blocks),
            *(["maps"] if way.maps else []),
        ]
        if not set(used) <= self.parts.keys():
            return None
        loss, speed = 0.0, 1.0
        for name in used:
            loss, speed = loss + self.parts[name][0], speed * self.parts[name][1]
        return figures(way, 1 - loss, speed)


def search(machine: Machine) -> None:
    searching = Search(machine, BUDGET, 0.05)
    searching.try_each([INT8, INT4, MAPS])
    searching.try_dropping(lambda dropped: Way(drop_attention=dropped), range(6))
    searching.try_dropping(lambda dropped: Way(drop_blocks=dropped), range(6))
    searching.combine()


def test_way_that_breaks_the_budget_or_saves_no_time_is_in_no_combination():
    machine = Machine(
        int8=(0.001, 1.5), int4=(0.03, 1.2), maps=(0.008, 1.02), attention=(0.006, 1.1), blocks=(0.04, 1.2)
    )
    search(machine)
    singles = [INT8, INT4, MAPS, attention(0), attention(0, 1), attention(0, 1, 2, 3), attention(0, 1, 2)]
    combined = INT8.with_part(attention(0, 1, 2))
    # Four modules lose 0.024. Three lose 0.018, so three and int8 fit into the budget of 0.02.
    assert machine.measured == [*singles, blocks(0), combined]


def test_smaller_part_is_combined_if_the_largest_one_breaks_the_budget_together():
    machine = Machine(int8=(0.008, 1.5), attention=(0.006, 1.1), blocks=(0.05, 1.2))
    search(machine)
    broken, kept = machine.measured[-2:]
    assert broken == INT8.with_part(attention(0, 1, 2))
    assert kept == INT8.with_part(attention(0, 1))


def test_three_parts_are_combined_if_each_one_pays():
    machine = Machine(int8=(0.001, 1.5), maps=(0.001, 1.2), attention=(0.012, 1.1), blocks=(0.05, 1.2))
    search(machine)
    everything = INT8.with_part(MAPS).with_part(attention(0))
    assert machine.measured.count(everything) == 1
    assert len(set(machine.measured)) == len(machine.measured)


def test_way_that_cannot_be_measured_is_in_no_combination():
    machine = Machine(int8=(0.001, 1.5), attention=(0.05, 1.1), blocks=(0.05, 1.1))
    search(machine)
    assert machine.measured == [INT8, INT4, MAPS, attention(0), blocks(0)]


@given(layers=st.integers(1, 40), allowed=st.integers(0, 40))
def test_most_layers_are_dropped_that_keep_the_budget(layers, allowed):
    """And at least one layer is left."""
    machine = Machine(attention=(0.02 / (allowed + 0.5), 1.1))
    Search(machine, BUDGET, 0.05).try_dropping(lambda dropped: Way(drop_attention=dropped), range(layers))
    counts = [len(way.drop_attention) for way in machine.measured]
    most = min(allowed, layers - 1)
    assert max((count for count in counts if count <= allowed), default=0) == most
    assert len(counts) == len(set(counts)) <= 2 * layers.bit_length()
    assert all(count < layers for count in counts)
    assert all(set(a.drop_attention) ^ set(b.drop_attention) for a, b in pairwise(machine.measured))


EXACT = figures(Way(), 1.0, 1.0)


@pytest.mark.parametrize(
    ("others", "chosen"),
    [
        ([], Way()),
        ([figures(INT8, 0.99, 1.04)], Way()),
        ([figures(INT8, 0.99, 1.5)], INT8),
        ([figures(INT8, 0.97, 1.5)], Way()),
        # Half a per cent of quality for two per cent of time, which may be noise.
        ([figures(INT8, 0.995, 1.5), figures(INT4, 0.99, 1.53)], INT8),
        ([figures(INT8, 0.995, 1.5), figures(INT4, 0.99, 1.7)], INT4),
        # A text alone becomes too slow.
        ([figures(INT8, 0.995, 1.5, alone=0.8)], Way()),
        ([figures(INT8, 0.995, 1.5, alone=0.97)], INT8),
        ([figures(MAPS, 1.0, 1.5)], MAPS),
        # No text took maps, so the gain is noise.
        ([replace(figures(MAPS, 1.0, 1.5), hit_rate=0.0)], Way()),
    ],
)
def test_fastest_way_inside_the_budget_is_chosen_unless_its_gain_may_be_noise(others, chosen):
    assert choose([EXACT, *others], BUDGET, 0.05).way == chosen


def test_slower_way_is_chosen_if_the_exact_model_breaks_the_budget():
    exact = figures(Way(), 0.97, 1.0)
    float32 = figures(Way(dtype="float32"), 1.0, 0.5, alone=0.5)
    assert choose([exact, float32], BUDGET, 0.05) is float32
    assert choose([exact], BUDGET, 0.05) is None
