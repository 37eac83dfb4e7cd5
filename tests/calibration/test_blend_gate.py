"""The gate of blending: which ratio is chosen, how it is measured, and how a stopped measurement
continues.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from itertools import accumulate
from string import ascii_uppercase

import numpy as np
import pytest
from core_decoders import write_decoder_tokenizer, write_llama
from core_models import random_text
from hypothesis import given
from hypothesis import strategies as st
from kv_models import ANY_SHAPE

from attncache_core import InvalidInput, KeyValueOptions, PrefillEngine
from attncache_core.calibration import blending
from attncache_core.calibration.blending import SegmentedText, calibrate_blending, read_segmented
from attncache_core.checkpoints.description import read_checkpoint
from attncache_core.checkpoints.template import Template
from attncache_core.engine.runner import Runner
from attncache_core.heads.comparator import Measure
from attncache_core.reuse.blend.gate import (
    BlendGate,
    MeasuredRatio,
    PromptShapes,
    read_gate,
    tighten,
    write_gate,
)
from attncache_core.reuse.maps.policy import Budget
from attncache_core.text.segments import Segmented

NO_BUDGET = Budget(Measure.COSINE, 0.0)


def gate(*measured: tuple[float, bool, float], **more) -> BlendGate:
    """A gate of (ratio, whether it keeps the budget, time of the exact answer's)."""
    ratios = tuple(MeasuredRatio(ratio, 0.9, 0.9, keeps, seconds) for ratio, keeps, seconds in measured)
    fingerprint, shapes = more.pop("fingerprint", "f"), more.pop("shapes", ANY_SHAPE)
    return BlendGate(fingerprint, Budget(Measure.COSINE, 0.9), "\n", 50, ratios, shapes, **more)


@pytest.mark.parametrize(
    ("measured", "ratios"),
    [
        ([(0.0, True, 0.2), (0.5, True, 0.6)], [0.0, 0.5]),
        ([(0.0, False, 0.2), (0.5, True, 0.6)], [0.5]),
        # A ratio that keeps the budget by chance, below one that does not, is not served.
        ([(0.0, True, 0.2), (0.1, False, 0.3), (0.5, True, 0.6)], [0.5]),
        ([(0.0, False, 0.2), (0.5, True, 1.1)], []),
        ([(0.0, False, 0.2)], []),
    ],
)
def test_least_ratio_is_served_from_which_on_all_keep_the_budget_if_it_saves_time(measured, ratios):
    found = gate(*measured)
    assert found.ratios == ratios
    assert found.ratio == (ratios[0] if ratios else None)
    assert (found.off() is None) == bool(ratios)


def test_ratio_that_saves_time_alone_but_not_under_load_is_not_served():
    one, other = (MeasuredRatio(ratio, 0.9, 0.9, True, 0.4) for ratio in (0.0, 0.5))
    found = replace(gate(), measured=(replace(one, loaded_seconds=0.96), replace(other, loaded_seconds=0.9)))
    assert found.ratios == [0.5]
    assert replace(found, measured=found.measured[:1]).off() == (
        "no recompute ratio that kept the budget saved time"
    )


def test_tightening_goes_to_the_next_ratio_then_off_and_merges_with_other_servers(tmp_path):
    path = tmp_path / "blend.json"
    first = gate((0.0, True, 0.2), (0.5, True, 0.6))
    write_gate(path, first)
    path.chmod(0o600)
    second, is_kept = tighten(path, first)
    assert (second.ratio, is_kept, read_gate(path)) == (0.5, True, second)
    assert path.stat().st_mode & 0o777 == 0o600
    third, _ = tighten(path, second)
    assert third.ratio is None
    assert tighten(path, first) == (third, True)  # another server, which has not read the file since
    other = gate((0.0, True, 0.2))
    write_gate(path, other)  # calibrated again
    assert tighten(path, first) == (second, False)
    assert read_gate(path) == other
    path.unlink()
    assert tighten(path, first) == (second, False)


@pytest.mark.parametrize(
    ("lengths", "behind", "is_blended"),
    [
        ((3, 3), 3, True),
        ((4, 3, 2), 3, True),
        ((3, 3), 2, False),
        ((3, 3), 6, False),
        ((3, 2, 2, 2), 3, False),
        ((1, 5), 3, False),
        ((6, 2, 2), 3, False),
        ((2, 2), 3, False),  # each number of tokens was measured, but not so few together
        ((5, 5, 4), 3, False),
        ((3,), 3, False),
    ],
)
def test_only_prompts_of_the_measured_shapes_are_blended(engine, tmp_path, lengths, behind, is_blended):
    shapes = PromptShapes((2, 3), (2, 5), (2.5, 4.5), (5, 12), (5, 7))
    measured = gate((0.5, True, 0.6), fingerprint=engine.fingerprint, shapes=shapes)
    ends = [2 + sum(lengths[: index + 1]) for index in range(len(lengths))]
    spans = [(end - length, end) for end, length in zip(ends, lengths, strict=True)]
    sequence = Segmented([5] * (ends[-1] + behind), spans, [5])
    path = tmp_path / "blend.json"
    write_gate(path, measured)
    engine.open_gate(read_gate(path))
    assert (engine.blending.blend(sequence, sequence.ids, b"") is not None) == is_blended
    assert engine.info().blending["shapes"] == asdict(shapes)


@given(
    st.lists(st.tuples(st.lists(st.integers(1, 9), min_size=2, max_size=5), st.integers(1, 9)), min_size=3)
)
def test_measured_shapes_are_those_of_all_prompts_but_outliers(prompts):
    def spans(lengths):
        ends = list(accumulate(lengths))
        return [(end - length, end) for end, length in zip(ends, lengths, strict=True)]

    measured = [(spans(lengths), sum(lengths) + behind) for lengths, behind in prompts]
    found = PromptShapes.of(measured)
    for numbers, (least, greatest) in (
        ([len(lengths) for lengths, _ in prompts], found.chunks),
        ([sum(lengths) / len(lengths) for lengths, _ in prompts], found.mean_chunk_tokens),
        ([sum(lengths) for lengths, _ in prompts], found.all_chunk_tokens),
        ([behind for _, behind in prompts], found.other_tokens),
    ):
        assert {least, greatest} <= {*numbers}
        left_out = sum(number < least for number in numbers), sum(number > greatest for number in numbers)
        assert max(left_out) <= math.ceil(len(prompts) / 100)
    shortest, longest = ([chosen(lengths) for lengths, _ in prompts] for chosen in (min, max))
    left_out = math.ceil(len(prompts) / 100)
    assert found.chunk_tokens == (sorted(shortest)[left_out], sorted(longest)[-1 - left_out])
    # One prompt of its own shape opens no gate.
    outlier = (spans([50] * 20), 1100)
    assert PromptShapes.of([*measured, outlier]).outside(*outlier)


@pytest.mark.parametrize(
    ("lengths", "behind", "why"),
    [
        ((10, 20, 30), 5, None),
        ((10, 20), 5, "2 chunks, and 3 to 4"),
        ((9, 20, 31), 5, "9 tokens in the shortest chunk, and 10 to 40"),
        ((10, 10, 41), 5, "41 tokens in the longest chunk, and 10 to 40"),
        ((10, 10, 39), 5, "19.6667 tokens in a chunk on average, and 20 to 30"),
        ((23, 23, 23, 23), 5, "92 tokens in all chunks together, and 60 to 90"),
        ((10, 20, 30), 4, "4 tokens outside the chunks, and 5 to 9"),
    ],
)
def test_prompt_of_another_shape_is_told_by_the_number_that_was_not_measured(lengths, behind, why):
    ends = list(accumulate(lengths))
    spans = [(end - length, end) for end, length in zip(ends, lengths, strict=True)]
    found = PromptShapes((3, 4), (10, 40), (20.0, 30.0), (60, 90), (5, 9)).outside(spans, ends[-1] + behind)
    assert found == (why and f"it has {why} were measured")


def test_server_follows_what_another_one_has_tightened_in_the_file(engine, tmp_path):
    path = tmp_path / "blend.json"
    first = replace(
        gate((0.0, True, 0.2), (0.5, True, 0.6), (0.7, True, 0.7)), fingerprint=engine.fingerprint
    )
    write_gate(path, first)
    engine.open_gate(first, path)
    engine.blending.follow_file()
    assert engine.blending.gate is first
    tighten(path, first.tightened())
    engine.blending.follow_file()
    assert engine.blending.gate.ratio == 0.7
    for other in (first, replace(first, prompts=51, steps=2)):  # looser, or calibrated again
        write_gate(path, other)
        engine.blending.follow_file()
        assert engine.blending.gate.ratio == 0.7
    path.write_text("{")
    engine.blending.follow_file()
    assert engine.blending.gate.ratio == 0.7


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"steps": -1}, "steps"),
        ({"check_layer": 0}, "check_layer"),
        ({"measured": [{"ratio": 5}]}, "measured.0.ratio"),
        ({"measured": [{"ratio": -0.1}]}, "measured.0.ratio"),
        ({"measured": [{"ratio": 0.6}]}, "rise"),
        ({"measured": [{"mean": math.nan}]}, "measured.0.mean"),
        ({"measured": [{"seconds": math.inf}]}, "measured.0.seconds"),
        ({"measured": [{"lower_bound": 0.89}]}, r"keeps_budget of ratio 0\.0 contradicts"),
        ({"measured": [{"keeps_budget": False}]}, "contradicts"),
        ({"budget": {"floor": 0.8}}, "contradicts"),
        ({"steps": True}, "steps"),
        ({"steps": 1}, "was changed since it was written"),
        ({"checksum": 1}, "was changed since it was written"),
        ({"budget": {"least": 7}}, "budget"),
        ({"other": 1}, "other"),
        ({"format": 1, "shapes": None}, "has format 1, and 2 is read"),
    ],
)
def test_changed_file_is_refused_with_the_place(tmp_path, changes, place):
    path = tmp_path / "blend.json"
    write_gate(path, gate((0.0, True, 0.2), (0.5, True, 0.6)))
    content = json.loads(path.read_text())
    for name, value in changes.items():
        if name == "measured":
            content[name][0] |= value[0]
        else:
            content[name] = content[name] | value if isinstance(value, dict) else value
    path.write_text(json.dumps(content))
    with pytest.raises(InvalidInput, match=place):
        read_gate(path)


def test_gate_is_read_behind_a_byte_order_mark_and_not_without_its_checksum(tmp_path):
    path, written = tmp_path / "blend.json", gate((0.0, True, 0.2), (0.5, True, 0.6))
    write_gate(path, written)
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content), encoding="utf-8-sig")
    assert read_gate(path) == written
    del content["checksum"]
    path.write_text(json.dumps(content))
    with pytest.raises(InvalidInput, match="was changed since it was written"):
        read_gate(path)


def test_gate_that_checks_a_layer_that_the_model_lacks_is_refused(engine, prompts, tmp_path):
    absent = replace(gate((0.0, True, 0.2), check_layer=4), fingerprint=engine.fingerprint)
    with pytest.raises(InvalidInput, match=r"layer 4, and .* has 4 layers"):
        engine.open_gate(absent)
    checkpoint = read_checkpoint(write_llama(tmp_path / "llama", num_hidden_layers=1)).adapted(
        pooling="lasttoken"
    )
    one_layer = PrefillEngine.load(checkpoint, key_values=KeyValueOptions(2**24))
    with pytest.raises(InvalidInput, match="a model with 1 layer cannot be blended"):
        calibrate_blending(one_layer, prompts, NO_BUDGET, separator="\n")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_llama(tmp_path_factory.mktemp("models") / "llama", num_hidden_layers=4)


@pytest.fixture(scope="module")
def engine(folder):
    checkpoint = read_checkpoint(folder).adapted(pooling="lasttoken")
    return PrefillEngine.load(checkpoint, dtype="float32", key_values=KeyValueOptions(2**24))


@pytest.fixture(scope="module")
def prompts():
    random = np.random.default_rng(0)
    pool = [random_text(random, words) for words in range(5, 17)]
    return [
        SegmentedText(tuple(random.permutation(pool)[:3].tolist()), random_text(random, 4)) for _ in range(24)
    ]


def labelled(folder):
    checkpoint = read_checkpoint(folder).adapted(
        labels=("card", "bank"), label_logits=True, template=Template.parse("{} Answer:")
    )
    return PrefillEngine.load(checkpoint, dtype="float32", key_values=KeyValueOptions(2**24))


def test_ratio_of_one_is_exact_and_larger_ratios_are_nearer(engine, prompts):
    found = calibrate_blending(engine, prompts, NO_BUDGET, separator="\n", ratios=(0.0, 0.5, 1.0))
    means = [measured.mean for measured in found.measured]
    assert means[2] == pytest.approx(1, abs=1e-6)
    assert means[0] < means[1] < means[2]
    assert [measured.ratio for measured in found.measured] == [0.0, 0.5, 1.0]
    assert found.fingerprint == engine.fingerprint
    strict = calibrate_blending(
        engine, prompts, Budget(Measure.COSINE, 0.99999), separator="\n", ratios=(0.0, 0.5, 1.0)
    )
    assert [measured.keeps_budget for measured in strict.measured] == [False, False, True]


def test_stopped_measurement_continues_and_forgets_what_was_measured_differently(
    engine, prompts, tmp_path, monkeypatch
):
    kept, done = tmp_path / "blend.json.measured", []

    def stop(measured, of_all):
        done.append((measured, of_all))
        if measured == 10:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrate_blending(
            engine, prompts, NO_BUDGET, separator="\n", ratios=(0.0,), kept=kept, on_prompt=stop
        )
    assert done == [(measured, len(prompts)) for measured in range(1, 11)]
    assert len(kept.read_text().splitlines()) == 10
    *whole, last = kept.read_bytes().splitlines(keepends=True)
    changed = last.replace(b'"seconds": [', b'"seconds": [-')
    kept.write_bytes(b"".join([*whole, changed, b"\xff\xfe\n", b'{"key": "cut sho']))
    for text in prompts[0].segments:
        assert text.encode() not in kept.read_bytes()
    measured = []
    measure = blending._Measuring.prompt
    monkeypatch.setattr(
        blending._Measuring,
        "prompt",
        lambda measuring, sequence: measured.append(1) or measure(measuring, sequence),
    )
    calibrate_blending(engine, prompts, NO_BUDGET, separator=" ", ratios=(0.0,), kept=None)
    assert len(measured) == len(prompts)
    measured.clear()
    calibrate_blending(engine, prompts, NO_BUDGET, separator="\n", ratios=(0.0,), kept=kept)
    assert len(measured) == len(prompts) - 9  # the last line was damaged
    assert not kept.exists()


def test_listwise_prompts_are_measured_by_the_letters(tmp_path, prompts):
    folder = write_llama(tmp_path / "llama")
    with pytest.raises(InvalidInput, match="the letters of documents are several tokens"):
        labelled(folder).decisions.comparator(Measure.AGREEMENT, 3)
    write_decoder_tokenizer(folder, words=["card", "bank", *ascii_uppercase])
    engine = labelled(folder)
    found = calibrate_blending(
        engine, prompts, Budget(Measure.AGREEMENT, 0.5), separator="\n", listwise=True, ratios=(1.0,)
    )
    assert found.listwise
    assert found.measured[0].mean == 1
    outputs = np.random.default_rng(0).standard_normal((2, 200, engine.model.hidden_size)).astype(np.float32)
    logits = [engine.decisions.label_logits(engine.decisions.letters, output) for output in outputs]
    for documents in (2, 5):
        agreement = engine.decisions.comparator(Measure.AGREEMENT, documents).fidelity(*outputs)
        one, other = (logit[:, :documents].argmax(axis=1) for logit in logits)
        assert agreement.tolist() == (one == other).tolist()
    engine.open_gate(found)
    assert engine.may_blend(engine.decisions.letters.prompt, engine.decisions.letters)
    assert not engine.may_blend(engine.tokenizer.default_prompt, engine.decisions.label_tokens)


def test_budget_of_decisions_covers_no_embeddings(engine):
    prompt = engine.tokenizer.default_prompt
    for measure, covered in ((Measure.COSINE, {*Measure}), (Measure.AGREEMENT, {Measure.AGREEMENT})):
        opened = replace(engine)
        opened.open_gate(
            replace(gate((0.0, True, 0.2), fingerprint=engine.fingerprint), budget=Budget(measure, 0.9))
        )
        found = {reads for reads in (*Measure, None) if opened.may_blend(prompt, reads=reads)}
        assert found == covered


def test_equal_prompts_count_once(engine, prompts):
    found = calibrate_blending(engine, prompts * 3, NO_BUDGET, separator="\n", ratios=(0.0,))
    assert found.prompts == len(prompts)
    with pytest.raises(InvalidInput, match=r"too few different prompts \(19\)"):
        calibrate_blending(engine, prompts[:19] * 3, NO_BUDGET, separator="\n")


def test_time_is_compared_with_the_exact_answer_behind_the_stored_first_chunk(engine, prompts, monkeypatch):
    results, run = [], blending._Measuring._run

    def noting(measuring, sequence, ratio):
        result, seconds = run(measuring, sequence, ratio)
        if ratio is None:
            results.append((int(result.cached_tokens[0]), sequence.spans[0][1]))
        return result, seconds

    monkeypatch.setattr(blending._Measuring, "_run", noting)
    calibrate_blending(engine, prompts, NO_BUDGET, separator="\n", ratios=(0.0,))
    assert len(results) == 2 * len(prompts)  # a warm-up, and the measured one
    for cached, first_chunk in results[1::2]:
        assert cached == first_chunk


def test_load_is_full_batches_of_the_first_prompts(engine, prompts, monkeypatch):
    batches, run = [], Runner.run

    def noting(runner, requests):
        batches.append(
            (sum(len(request.ids) for request in requests), {request.blend is None for request in requests})
        )
        return run(runner, requests)

    monkeypatch.setattr(blending, "BATCH_TOKENS", 200)
    monkeypatch.setattr(blending, "_LOADED_TOKENS", 500)
    monkeypatch.setattr(Runner, "run", noting)
    measuring = blending._Measuring(engine, Measure.COSINE, False, (0.0, 0.5))
    sequences = list(blending._sequences(engine, prompts, "\n", False))
    shares = measuring.under_load(sequences)
    assert {*shares} == {0.0, 0.5}
    assert all(share > 0 for share in shares.values())
    assert max(tokens for tokens, _ in batches) <= 200
    passes = 1 + 1 + blending._LOADED_ROUNDS * 3
    assert len(batches) % passes == 0
    one_pass = batches[: len(batches) // passes]
    assert (
        400 <= sum(tokens for tokens, _ in one_pass) <= 500 < sum(len(sequence.ids) for sequence in sequences)
    )
    assert [kinds for _, kinds in batches].count({True}) == len(one_pass) * (1 + blending._LOADED_ROUNDS)


def test_what_cannot_be_measured_is_refused_with_the_remedy(engine, folder, prompts):
    with pytest.raises(InvalidInput, match=r"too few different prompts \(24\).*--min-text-cosine"):
        calibrate_blending(engine, prompts, Budget(Measure.COSINE, 0.9, 0.8), separator="\n")
    one = [prompts[0], SegmentedText(("a",), "b", "file, line 2"), *prompts[2:]]
    with pytest.raises(InvalidInput, match="file, line 2 has fewer than two segments"):
        calibrate_blending(engine, one, NO_BUDGET, separator="\n")
    long = [SegmentedText(("word " * 500, "a"), "b"), *prompts[1:]]
    with pytest.raises(InvalidInput, match=r"a prompt: segments have \d+ tokens.*shorten the longer part"):
        calibrate_blending(engine, long, NO_BUDGET, separator="\n")
    mean = PrefillEngine.load(read_checkpoint(folder), dtype="float32", key_values=KeyValueOptions(2**20))
    with pytest.raises(InvalidInput, match="pooling reads all tokens"):
        calibrate_blending(mean, prompts, NO_BUDGET, separator="\n")


@pytest.mark.parametrize(
    "line",
    [
        *("{}", "[]", "x", '{"segments": [], "query": "a"}', '{"segments": ["a"], "query": 1}'),
        *('{"query": "a"}', '{"segments": ["a", "b"], "query": ""}', '{"segments": ["a", ""], "query": "b"}'),
    ],
)
def test_line_that_is_no_prompt_is_named_by_its_number(tmp_path, line):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"segments": ["a", "b"], "query": "c"}\n\n' + line + "\n")
    with pytest.raises(InvalidInput, match="line 3 is no prompt"):
        read_segmented(path)
    path.write_text(path.read_text().rsplit("\n", 2)[0], encoding="utf-8-sig")
    assert read_segmented(path) == [SegmentedText(("a", "b"), "c", f"{path}, line 1")]
    path.write_text("\n\n")
    with pytest.raises(InvalidInput, match="holds no prompts"):
        read_segmented(path)
    with pytest.raises(InvalidInput, match="cannot be read"):
        read_segmented(tmp_path / "absent.jsonl")
