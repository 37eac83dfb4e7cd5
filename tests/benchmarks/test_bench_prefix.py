"""`python -m benchmarks prefix` measures few-shot prompts, and compares what it measures with recomputing."""

import importlib.util
import json

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from command_line import assert_one_line, succeeded
from core_decoders import write_llama
from transformers import AutoModel, AutoModelForCausalLM

from attncache_core import InvalidInput, PrefillEngine, find_checkpoint
from benchmarks.__main__ import main
from benchmarks.commands import prefix as command
from benchmarks.measuring import prefix
from benchmarks.measuring.few_shot import distinct_prompts, mmlu_prompts, shared_prefixes, synthetic_prompts
from benchmarks.measuring.prefix import RECOMPUTED, Method, OnDisk, Recomputed, Warm, methods
from benchmarks.measuring.prefix_peers import PREFIX_PEERS
from benchmarks.measuring.stores import open_store
from benchmarks.papers.mmlu import read_questions

STORED_METHODS = ("shared in the batch", "first visit, stored", "from memory", "from disk", "known texts")
METHODS = [RECOMPUTED, *STORED_METHODS]


@pytest.fixture
def engine(tiny_llama):
    """The tiny Llama in float32, for one test."""
    return PrefillEngine.load(find_checkpoint(str(tiny_llama)), dtype="float32", threads=1)


def run(*arguments: object):
    shared = ["prefix", "--threads", "1", "--dtype", "float32", "--rounds", "2", "--texts", "4"]
    return CliRunner().invoke(main, [*shared, *map(str, arguments)], env={"COLUMNS": "200"})


@pytest.mark.usefixtures("forked_peers")
def test_command_reports_every_method_and_each_peer_that_is_installed_alone_and_in_batches(
    tiny_llama, tmp_path, hide_libraries
):
    hide_libraries("llama_cpp", "gguf")
    (tmp_path / "here").mkdir()
    file = tmp_path / "report.json"
    options = ("--prefix-tokens", 40, "--text-tokens", 9, "--batch", 4, "--memory-bytes", 1 << 20)
    options += ("--peer", "transformers", "--peer", "llama.cpp", "--folder", tmp_path / "here")
    result = run("--model", tiny_llama, *options, "--json", file)
    assert "llama.cpp cache fp32 is left out" in result.stderr
    assert "pip install llama-cpp-python gguf" in result.stderr
    shown = succeeded(result)
    assert "llama.cpp" not in shown
    report = json.loads(file.read_text("utf-8"))
    assert report["machine"]["threads"] == 1
    assert report["machine"]["dtype"] == "float32"
    assert (report["rounds"], report["texts"], report["tokens"]) == (2, 4, 49)
    assert report["disk_read_bytes_per_second"] > 0
    peer = "transformers cache fp32"
    assert [(row["batch"], row["method"]) for row in report["rows"]] == [
        (batch, method) for batch in (1, 4) for method in (*METHODS, peer)
    ]
    for row in report["rows"]:
        assert row["texts_per_second"] > 0
        if row["method"] == peer:
            assert row["computed_tokens"] is row["difference"] is None
            continue
        assert 0 < row["least_speed_up"] <= row["speed_up"]
        assert row["difference"] < 1e-5
        assert row["cosine"] > 0.99999
    computed = {(row["method"], row["batch"]): row["computed_tokens"] for row in report["rows"]}
    # Two blocks of the prefix are shared; what is behind them is computed for each text.
    assert computed[RECOMPUTED, 1] == computed[RECOMPUTED, 4] == computed["shared in the batch", 1] == 49
    assert computed["from memory", 1] == 49 - 32
    # It depends on the machine whether loading is faster.
    assert 49 - 32 <= computed["from disk", 1] <= 49
    assert computed["known texts", 1] == computed["known texts", 4] == 0
    # Two prefixes of 40 tokens and four texts of 9 tokens; texts may begin alike by chance.
    assert computed["shared in the batch", 4] == pytest.approx(29, abs=1)
    assert [overhead["batch"] for overhead in report["overhead"]] == [1, 4]
    assert [overhead["pairs"] for overhead in report["overhead"]] == [8, 2]
    for overhead in report["overhead"]:
        assert 0 < overhead["lower_quartile"] <= overhead["ratio"] <= overhead["upper_quartile"]
    assert list((tmp_path / "here").iterdir()) == []


def test_prompts_of_a_file_and_of_mmlu_are_measured(engine, tiny_llama, tmp_path, monkeypatch):
    measured = []

    def measure(_methods, rounds, sizes, _report):
        measured.append((rounds, sizes))
        raise InvalidInput("enough")

    monkeypatch.setattr(prefix, "measure", measure)
    monkeypatch.setattr(command, "read_bytes_per_second", lambda _: 1.0)
    monkeypatch.setattr(command, "measured_prefill_speed", lambda _: 1.0)
    file = tmp_path / "prompts.txt"
    examples = "the parcel is late, the answer is delivery; " * 3
    prompts = [f"{examples}question {number}" for number in range(9)]
    file.write_text("\n".join(prompts), encoding="utf-8")
    run("--model", tiny_llama, "--prompts", file, "--batch", 2)
    tokens = engine.tokenize(prompts)
    assert measured.pop() == ([tokens[:4], tokens[4:8]], [1, 2])

    rows = [f"history\tWho was {name}?\ta\tb\tc\td\tA" for name in "abcdefghi"]
    table = ["subject\tquestion\tA\tB\tC\tD\tanswer", *rows]
    file = tmp_path / "questions.tsv"
    file.write_text("\n".join(table) + "\n", encoding="utf-8")
    tables = ("--mmlu-dev", file, "--mmlu-test", file)
    run("--model", tiny_llama, *tables, "--shots", 1, "--batch", 1)
    questions = read_questions(str(file))
    tokens = engine.tokenize(mmlu_prompts(questions, questions, 2, 1))
    assert measured.pop() == ([tokens[:4], tokens[4:8]], [1])
    assert_one_line(run("--model", tiny_llama, *tables[:2]), "--mmlu-dev")


def test_models_and_prompts_that_cannot_be_measured_are_refused(tiny_llama, tiny_checkpoint, tmp_path):
    # Prompts that the model accepts.
    options = ("--prefix-tokens", 10, "--text-tokens", 5)
    assert_one_line(run("--model", tiny_checkpoint.folder, *options), "bidirectional", "decoder")
    file = tmp_path / "prompts.txt"
    file.write_text("one\ntwo\n", encoding="utf-8")
    assert_one_line(run("--model", tiny_llama, "--prompts", file), "2 prompts", "the rounds need 8")
    assert_one_line(run("--model", tiny_llama, "--prefix-tokens", 600), "660 tokens", "accepts 512")


def test_shared_prefixes_are_whole_blocks_that_another_sequence_has_and_distinct_prompts_share_none():
    front = list(range(40))
    assert shared_prefixes([[*front, 100], [*front, 101]]) == [front[:32]]
    assert shared_prefixes([front, [1, 2, 3]]) == []
    # The third sequence shares more with the second than with the first.
    longer = [*front[:16], *range(200, 240)]
    assert sorted(shared_prefixes([front, longer, [*longer, 7]])) == sorted([front[:16], longer[:48]])
    prompts = distinct_prompts([[0] * 20, [0] * 30], 400, seed=3)
    assert [len(ids) for ids in prompts] == [20, 30]
    assert shared_prefixes(prompts) == []


def test_methods_compute_what_their_names_say(engine, tmp_path):
    texts = synthetic_prompts(4, 2, 32, 8, 400)
    prefixes = shared_prefixes(texts)
    chosen = methods(engine, prefixes, 1 << 20, tmp_path / "kv", 1 << 24)
    assert list(chosen) == METHODS
    computed = {}
    for name, method in chosen.items():
        method.prepare(texts)
        method.before_batch()
        result = method.run(texts)
        computed[name] = (result.report.tokens, int(result.cached_tokens.sum()))
    assert computed == {
        RECOMPUTED: (160, 0),
        "shared in the batch": (96, 0),
        "first visit, stored": (96, 0),
        "from memory": (32, 128),
        "from disk": (32, 128),
        "known texts": (0, 160),
    }
    assert isinstance(chosen["from disk"], OnDisk)
    chosen["from disk"].close()


def test_each_pass_begins_with_the_prefixes_alone_and_leaves_no_store_to_another_method(engine):
    texts = synthetic_prompts(4, 2, 32, 8, 400)
    warm = Warm(engine, open_store(engine, memory_bytes=1 << 20), shared_prefixes(texts))
    for _ in range(2):
        warm.prepare(texts)
        assert warm.run(texts).cached_tokens.tolist() == [32] * 4
    texts = synthetic_prompts(2, 1, 32, 8, 400)
    stored = Warm(engine, open_store(engine, memory_bytes=1 << 20), [])
    for method in (stored, Recomputed(engine), Method(engine)):
        method.prepare(texts)
        assert method.run(texts).cached_tokens.tolist() == [0, 0]
    assert stored.run(texts).cached_tokens.tolist() == [40, 40]


def test_transformers_computes_what_stands_behind_a_kept_prefix(tiny_llama):
    texts = synthetic_prompts(5, 2, 32, 8, 400)
    peer = PREFIX_PEERS["transformers cache fp32"](find_checkpoint(str(tiny_llama)), 1, [])
    with torch.inference_mode():
        expected = AutoModel.from_pretrained(tiny_llama)(torch.tensor(texts)).last_hidden_state.mean(1)
    peer.embed_tokens(shared_prefixes(texts))
    # Twice, because a prefix serves again after the texts behind it.
    for batch in ([0, 1, 2, 3, 4], [3], [4, 0]):
        found = peer.embed_tokens([texts[index] for index in batch])
        np.testing.assert_allclose(found, expected[batch].numpy(), atol=1e-4, rtol=1e-4)
    assert len(peer._kept) == 2


@pytest.mark.skipif(
    not (importlib.util.find_spec("llama_cpp") and importlib.util.find_spec("gguf")),
    reason="llama-cpp-python or gguf is not installed",
)
@pytest.mark.parametrize("rope", [{}, {"rope_type": "llama3"}])
def test_llama_cpp_runs_the_same_model(rope, tmp_path):
    parameters = {"rope_theta": 10000.0, "rope_type": "default"}
    if rope:
        scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        parameters |= {**rope, **scaling, "original_max_position_embeddings": 32}
    # llama.cpp has no heads of fewer than 32 numbers in some of its kernels.
    folder = write_llama(tmp_path / "llama", hidden_size=128, rope_parameters=parameters)
    texts = synthetic_prompts(3, 1, 32, 40, 400)
    peer = PREFIX_PEERS["llama.cpp cache fp32"](find_checkpoint(str(folder)), 1, [])
    with torch.inference_mode():
        expected = (
            AutoModelForCausalLM.from_pretrained(folder)(torch.tensor(texts)).logits[:, -1, :64].numpy()
        )
    peer.embed_tokens(shared_prefixes(texts))
    for _ in range(2):
        found = peer.embed_tokens(texts)
        # llama.cpp keeps keys and values in 16 bits.
        assert np.abs(found - expected).max() < 0.01 * np.abs(expected).max()
