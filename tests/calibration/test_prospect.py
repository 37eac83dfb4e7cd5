"""Made-up maps are given like records, and the upper bound of the gain decides whether a database can pay."""

from __future__ import annotations

import pytest
import torch

from attncache_core.calibration import prospect
from attncache_core.calibration.paired import PairedGain
from attncache_core.calibration.prospect import MadeUpMaps, could_pay
from attncache_core.calibration.savings import with_reused
from attncache_core.engine.layers import run_layers
from attncache_core.engine.prefill import PrefillEngine
from attncache_core.text.token_batch import pack

LENGTHS = {4: 2, 7: 5}


@pytest.fixture
def engine(tiny_checkpoint) -> PrefillEngine:
    return PrefillEngine.load(tiny_checkpoint, dtype="float32")


@torch.inference_mode()
def test_every_token_takes_the_mean_of_all_values(engine: PrefillEngine) -> None:
    batch = pack([[1, 2, 3], [4, 5, 6, 7], [8, 9, 1, 2]])
    layers, heads = len(engine.model.layers), engine.model.layers[0].heads
    maps = MadeUpMaps(batch, layers, heads)
    value = torch.randn(int(batch.offsets[-1]), heads, 4)
    context = torch.empty_like(value)
    maps.apply(layers - 1, value, context)
    for first, last in zip(batch.offsets[:-1].tolist(), batch.offsets[1:].tolist(), strict=True):
        # 1 / L has 11 bits in the records.
        torch.testing.assert_close(
            context[first:last], value[first:last].mean(0).expand(last - first, -1, -1), atol=2e-3, rtol=0
        )


@torch.inference_mode()
def test_compiled_stack_and_plain_loop_compute_the_same_with_made_up_maps(engine: PrefillEngine) -> None:
    if engine.model.stack is None:
        pytest.skip("nothing is compiled for this processor")
    batch = pack([[1, 2, 3], [4, 5, 6, 7], [8, 9, 1, 2]])
    layers, heads = len(engine.model.layers), engine.model.layers[0].heads // 2
    masked = with_reused(engine, [tuple(range(2 * heads))] * layers, [heads] * layers)
    maps = MadeUpMaps(batch, layers, heads)
    by_stack, _ = run_layers(masked, batch, None, maps)
    maps.records = lambda: None  # type: ignore[method-assign]
    plain, _ = run_layers(masked, batch, None, maps)
    torch.testing.assert_close(by_stack, plain, atol=2e-3, rtol=0)
    exact, _ = run_layers(engine.model, batch, None, prospect.NO_REUSED_MAPS)
    assert (exact - plain).abs().max() > 0.01


@pytest.mark.parametrize(("upper", "pays"), [(0.049, False), (0.05, True), (0.3, True)])
def test_upper_bound_decides(
    engine: PrefillEngine, monkeypatch: pytest.MonkeyPatch, upper: float, pays: bool
) -> None:
    timed = []

    def measured(passes, limit, idle_mark) -> PairedGain:
        for without, with_maps in passes:
            without()
            with_maps()
            timed.append(idle_mark())
        assert limit == 0.05
        return PairedGain(0.0, -1.0, upper)

    monkeypatch.setattr(prospect, "compare", measured)
    assert could_pay(engine, LENGTHS, 0.05, engine.runs.idle_mark) == pays
    assert timed == [0, 0, 0]
