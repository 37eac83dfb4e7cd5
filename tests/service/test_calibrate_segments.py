"""`attncache calibrate --segments`, from a file of prompts to a server that blends."""

import json

import numpy as np
import pytest
from command_line import assert_one_line, run, succeeded
from core_models import random_text

from attncache_core.reuse.blend.gate import read_gate
from service.loading.checkpoints import checkpoint_of
from service.loading.engines import load_engine
from service.settings import read_settings


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    random, path = np.random.default_rng(0), tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    pool = [random_text(random, words) for words in range(5, 15)]
    lines = [
        {"segments": random.permutation(pool)[:3].tolist(), "query": random_text(random, 3)}
        for _ in range(20)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def calibrate(folder, *arguments):
    model = ("--model", folder, "--dtype", "float32", "--pooling", "lasttoken", "--threads", 2)
    return run("calibrate", *model, *arguments)


def test_calibrated_file_is_shown_written_and_served(folder, prompts, tmp_path):
    output = tmp_path / "blend.json"
    # A file that calibrate has written is replaced, also one of another version.
    output.write_text('{"format": 0, "measured": []}')
    budget = ("--min-cosine", 0.01, "--min-text-cosine", 0)
    shown = succeeded(calibrate(folder, "--segments", prompts, "--output", output, *budget))
    gate = read_gate(output)
    assert gate.prompts == 20
    assert [measured.ratio for measured in gate.measured] == [0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.7]
    assert "under load" in shown
    assert gate.shapes.chunks == (3, 3)
    shape = "measured: 3 chunks, each of {} to {} tokens, on".format(*gate.shapes.chunk_tokens)
    assert shape in " ".join(shown.split())
    assert str(output) in shown
    how = {"model": str(folder), "pooling": "lasttoken", "dtype": "float32", "kv_memory_bytes": 2**24}
    settings = read_settings({**how, "blend": str(output)})
    engine = load_engine(settings, checkpoint_of(settings))
    assert engine.info().blending["ratio"] == gate.ratio
    other = read_settings({**how, "blend": str(output), "segment_separator": " "})
    with pytest.raises(Exception, match="measured with the separator"):
        load_engine(other, checkpoint_of(other))


def test_options_that_do_not_fit_are_refused_in_one_line(folder, prompts, tmp_path):
    assert_one_line(calibrate(folder, "--segments", prompts), "--output")
    assert_one_line(calibrate(folder), "--segments", "--texts")
    both = calibrate(folder, "--segments", prompts, "--output", tmp_path / "a", "--texts", "b")
    assert_one_line(both, "not both")
    absent = calibrate(folder, "--segments", prompts, "--output", tmp_path / "absent" / "a")
    assert_one_line(absent, "does not exist")


def test_nothing_that_calibrate_has_not_written_is_overwritten(folder, prompts, tmp_path):
    for written, output in (("in.jsonl", "in.jsonl"), ("in.json.measured", "in.json")):
        mine = tmp_path / written
        mine.write_bytes(prompts.read_bytes())
        assert_one_line(
            calibrate(folder, "--segments", mine, "--output", tmp_path / output), "overwrite", str(mine)
        )
        assert mine.read_bytes() == prompts.read_bytes()
        mine.unlink()
    notes = tmp_path / "notes.json"
    notes.write_text('{"buy": "milk"}')
    assert_one_line(calibrate(folder, "--segments", prompts, "--output", notes), "overwrite", "notes.json")
    assert notes.read_text() == '{"buy": "milk"}'
