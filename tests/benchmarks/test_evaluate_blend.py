"""`python -m benchmarks evaluate blend` measures chunks in any order beside full recomputation."""

import csv
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from command_line import assert_one_line, run, succeeded
from core_decoders import write_decoder_tokenizer, write_llama
from scipy.special import logsumexp, softmax
from transformers import AutoModelForCausalLM, AutoTokenizer

from attncache_core import InvalidInput, PrefillEngine, find_checkpoint
from attncache_core.checkpoints.template import Template
from attncache_core.reuse.blend.chunks import Recomputation
from attncache_core.reuse.kv.opening import KeyValueOptions
from benchmarks.__main__ import main
from benchmarks.papers.blend_cases import Labelled, Question, example_cases, question_cases
from benchmarks.papers.blending import (
    MAP_RERANK,
    PREFIX_CACHING,
    RECOMPUTED,
    MethodReport,
    Ways,
    compare_blending,
    smallest_ratio,
)

LABELS = ("yes", "no")
WORDS = ["parcel", "card", "late", "lost", "bank", "money", "transfer", "pending"]
REDUCTIONS = {
    "map-reduce, mean": lambda rows: rows.mean(axis=0),
    "map-reduce, max": lambda rows: rows.max(axis=0),
    "map-reduce, log-sum-exp": lambda rows: logsumexp(rows, axis=0),
}


def words(random, count):
    return " ".join(random.choice(WORDS, count))


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    folder = write_llama(tmp_path_factory.mktemp("decoders") / "tiny")
    write_decoder_tokenizer(folder, words=[*LABELS, "Text:", "Answer:"] * 3)
    return folder


@pytest.fixture(scope="module")
def engine(decoder):
    """The tiny Llama in float32, which decides between two labels."""
    checkpoint = find_checkpoint(str(decoder)).adapted(
        label_logits=True, labels=LABELS, template=Template.parse("Text: {}\nAnswer:")
    )
    options = KeyValueOptions(memory_bytes=1 << 24)
    return PrefillEngine.load(checkpoint, dtype="float32", threads=1, key_values=options)


@pytest.fixture(scope="module")
def cases(engine):
    random = np.random.default_rng(0)
    examples, texts = (
        [Labelled(words(random, 5), LABELS[number % 2]) for number in range(count)] for count in (8, 4)
    )
    return example_cases(engine, examples, texts, shots=3, pool=6)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A table of questions, one of labelled examples, one of labelled texts, and a template."""
    folder = tmp_path_factory.mktemp("tables")
    random = np.random.default_rng(1)
    for name, count in (("examples", 8), ("texts", 22)):
        rows = [f"{words(random, 4)}\t{LABELS[number % 2]}" for number in range(count)]
        (folder / f"{name}.tsv").write_text("\n".join(["text\tlabel", *rows]) + "\n")
    rows = ["question\tparagraphs_json"]
    for _ in range(3):
        paragraphs = [{"title": words(random, 1), "text": words(random, 9)} for _ in range(6)]
        rows.append(f"where is it?\t{json.dumps(paragraphs)}")
    (folder / "questions.tsv").write_text("\n".join(rows) + "\n")
    (folder / "template.txt").write_text("Text: {}\nAnswer:\n")
    return folder


def labelled(files):
    return (
        *("--task", "label-logits", "--labels", ",".join(LABELS), "--template", files / "template.txt"),
        *("--examples", f"{files / 'examples.tsv'}:text,label"),
        *("--data", f"{files / 'texts.tsv'}:text,label"),
    )


def evaluate(decoder, *arguments):
    shared = ("--model", decoder, "--dtype", "float32", "--threads", 1, "--rounds", 1)
    return run("evaluate", "blend", *shared, *arguments, program=main)


@torch.inference_mode()
def reference(folder, sequences):
    """Return the last states [n, hidden] and logits [n, labels] by Hugging Face's eager float32 model."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = [tokenizer(f" {label}", add_special_tokens=False).input_ids[0] for label in LABELS]
    found = [model(torch.tensor([ids]), output_hidden_states=True) for ids in sequences]
    states = np.stack([output.hidden_states[-1][0, -1].numpy() for output in found])
    return states, np.stack([output.logits[0, -1, tokens].numpy() for output in found])


def test_prompt_is_the_examples_in_their_template_and_the_text_as_it_is_alone(engine, cases):
    for case in cases:
        ids, spans, opening = case.sequence
        assert opening == [0]
        assert len(spans) == 3
        text = engine.tokenizer.decode([ids])[0]
        assert text.count("Text:") == text.count("Answer:") == 4
        assert [text.count(f"Answer: {label}") for label in LABELS] != [0, 0]
        # Behind the last separator, the tokens are those of the text alone.
        (alone,) = engine.tokenize([text.rsplit("Text: ", 1)[1].removesuffix("\nAnswer:")])
        assert ids[-len(alone) + 1 :] == alone[1:]
        assert [chunk[1:] for chunk in case.chunks] == [ids[first:end] for first, end in spans]


def test_examples_show_the_names_of_numbered_labels(engine):
    examples = [Labelled("lost card", "1"), Labelled("late card", "0")]
    (case,) = example_cases(engine, examples, [Labelled("it is", "1")], shots=2)
    shown = sorted(engine.tokenizer.decode(case.chunks))
    assert shown == ["Text: late card\nAnswer: yes", "Text: lost card\nAnswer: no"]


def test_paragraphs_are_cut_and_as_many_as_fit_are_taken_evenly(engine):
    asked = Question("where?", tuple(f"{number}\n" + "lost card " * 10 for number in range(9)))
    (case,) = question_cases(engine, [asked], chunk_tokens=7)
    assert [end - first for first, end in case.sequence.spans] == [7] * 9
    (case,) = question_cases(engine, [asked], chunk_tokens=7, chunks=3)
    shown = [engine.tokenizer.decode([chunk])[0][0] for chunk in case.chunks]
    assert shown == ["0", "4", "8"]
    (whole,) = question_cases(engine, [asked])
    assert 2 <= len(whole.sequence.spans) < 9
    assert len(whole.sequence.ids) <= engine.tokenizer.max_tokens
    with pytest.raises(InvalidInput, match="never fit") as refused:
        question_cases(engine, [Question("where?", ("card " * 300, "lost " * 300))])
    assert refused.value.field == "chunk_tokens"


def test_exact_methods_equal_the_reference_model(engine, decoder, cases):
    ways = Ways(engine)
    for case in cases:
        ways.store(case)
        states, logits = reference(decoder, [case.sequence.ids])
        for way in (ways.recomputed, ways.prefix_caching, ways.blended(Recomputation(1.0))):
            (answer,) = way(case).values()
            np.testing.assert_allclose(answer.outputs, states[0], atol=2e-4, rtol=2e-4)
            np.testing.assert_allclose(answer.logits, logits[0], atol=2e-3, rtol=2e-3)


def test_chunks_alone_are_exact_and_joined_as_numpy_does(engine, decoder, cases):
    ways = Ways(engine)
    for case in cases:
        ways.store(case)
        answers = ways.chunks_alone(case)
        states, logits = reference(decoder, [[*chunk, *case.end] for chunk in case.chunks])
        assert list(answers) == [MAP_RERANK, *REDUCTIONS]
        for name, reduce in REDUCTIONS.items():
            np.testing.assert_allclose(answers[name].outputs, reduce(states), atol=2e-4, rtol=2e-4)
            np.testing.assert_allclose(answers[name].logits, reduce(logits), atol=2e-3, rtol=2e-3)
        best = softmax(logits, axis=1).max(axis=1).argmax()
        np.testing.assert_allclose(answers[MAP_RERANK].logits, logits[best], atol=2e-3, rtol=2e-3)
        # Only what stands behind the chunks is computed.
        assert answers[MAP_RERANK].tokens <= len(case.chunks) * (len(case.end) + 1)


def test_methods_compute_the_tokens_that_their_names_say(engine, cases):
    ways = Ways(engine)
    for case in cases:
        ids, spans, _ = case.sequence
        ways.store(case)
        for _ in range(2):  # nothing that a method computes is found by the next one
            assert ways.recomputed(case)[RECOMPUTED].tokens == len(ids)
            assert ways.prefix_caching(case)[PREFIX_CACHING].tokens == len(ids) - spans[0][1]
            always = len(ids) - sum(end - first for first, end in spans) - 1
            assert ways.blended(Recomputation(0.0))(case)["ratio 0"].tokens == always


def test_reports_compare_every_method_with_recomputing(engine, cases):
    done = []
    reports = compare_blending(
        engine, cases, ratios=(0, 0.5, 1), random_ratio=0.5, rounds=2, on_case=lambda *step: done.append(step)
    )
    assert done == [(1, 4), (2, 4), (3, 4), (4, 4)]
    by_name = {report.method: report for report in reports}
    assert list(by_name) == [
        *(RECOMPUTED, PREFIX_CACHING, "ratio 0", "ratio 0.5", "ratio 1", "ratio 0.5, random tokens"),
        *(MAP_RERANK, *REDUCTIONS),
    ]
    for exact in (RECOMPUTED, PREFIX_CACHING, "ratio 1"):
        assert by_name[exact].cosine == pytest.approx(1, abs=1e-6)
        assert by_name[exact].agreement == 1
        low, high = by_name[exact].accuracy_difference  # of 4 cases, none of which changed
        assert -low == pytest.approx(high) == pytest.approx(1.96**2 / (4 + 1.96**2), abs=1e-6)
    assert by_name[RECOMPUTED].time_ratio == 1
    assert by_name["ratio 0"].cosine < by_name["ratio 0.5"].cosine < 1 - 1e-4
    assert [report.ratio for report in reports] == [None, None, 0, 0.5, 1, 0.5, *[None] * 4]
    assert [report.method for report in reports if report.random] == ["ratio 0.5, random tokens"]
    truth = [case.label for case in cases]
    for report in reports:
        assert report.cases == 4
        assert math.isnan(report.cosine_bound)  # too few cases
        assert sum(report.decisions.values()) == pytest.approx(1)
        assert 0 <= report.accuracy <= 1
        assert report.seconds > 0
    logits = np.stack([Ways(engine).recomputed(case)[RECOMPUTED].logits for case in cases])
    right = [LABELS[index] == label for index, label in zip(logits.argmax(axis=1), truth, strict=True)]
    assert by_name[RECOMPUTED].accuracy == np.mean(right)


def test_first_tokens_of_chunks_and_check_layer_are_as_asked(engine, cases):
    like = Recomputation(0.15, check_layer=2, first_tokens=2)
    first, none, checked = (
        compare_blending(engine, cases[:1], ratios=(0, 0.5), random_ratio=None, like=other, rounds=1)
        for other in (replace(like, check_layer=1), Recomputation(0.15), replace(like, first_tokens=0))
    )
    # The first chunk is exact and never computed again.
    assert first[2].computed_tokens == none[2].computed_tokens + 2 * 2
    assert checked[3].computed_tokens > none[3].computed_tokens


def report_of(ratio, agreement, bound=0.0, random=False):
    figures = dict.fromkeys(MethodReport.__slots__, 0.0)
    return MethodReport(
        **{**figures, "ratio": ratio, "agreement": agreement, "agreement_bound": bound, "random": random}
    )


def test_the_smallest_ratio_keeps_decisions_from_there_on():
    reports = [
        report_of(None, 1.0),
        report_of(0.0, 0.99),  # better by chance than the next one
        report_of(0.1, 0.97),
        report_of(0.3, 0.98, 0.97),
        report_of(0.3, 0.1, random=True),
        report_of(1.0, 1.0, 0.99),
    ]
    assert smallest_ratio(reports, 0.98) == 0.3
    assert smallest_ratio(reports, 0.98, confident=True) == 1.0
    assert smallest_ratio(reports, 0.995, confident=True) is None
    assert smallest_ratio([report_of(1.0, math.nan)], 0.5) is None


def test_command_measures_labelled_texts_behind_examples(decoder, files, tmp_path):
    written = ("--json", tmp_path / "report.json", "--markdown", tmp_path / "table.md")
    plots = ("--output", tmp_path / "plots")
    shown = succeeded(evaluate(decoder, *labelled(files), "--shots", 2, "--ratios", "0,1", *written, *plots))
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["machine"]["questions"], report["machine"]["chunks"]) == (22, 2)
    exact = next(method for method in report["methods"] if method["method"] == "ratio 1")
    assert exact["agreement"] == 1
    assert exact["agreement_bound"] == pytest.approx(0.05 ** (1 / 22))
    assert report["smallest_ratio"]["mean"] is not None
    assert report["smallest_ratio"]["confident"] is None
    assert "with 95 % confidence, no ratio does" in shown
    assert len((tmp_path / "table.md").read_text().splitlines()) == 2 + len(report["methods"])
    names = ["blend.csv", "blend_quality.png", "blend_time.png"]
    assert sorted(path.name for path in (tmp_path / "plots").iterdir()) == names
    with (tmp_path / "plots" / "blend.csv").open(newline="") as file:
        in_plots = [row["method"] for row in csv.DictReader(file)]
    assert in_plots == [method["method"] for method in report["methods"]]


def test_command_measures_questions_that_fit_by_their_last_state(decoder, files, tmp_path):
    long = json.dumps([{"title": "a", "text": "late card " * 60}] * 9)
    with_long = tmp_path / "long.tsv"
    with_long.write_text((files / "questions.tsv").read_text() + f"who?\t{long}\n")
    arguments = ("--pooling", "lasttoken", "--data", with_long, "--chunks", 2, "--max-tokens", 300)
    written = ("--ratios", "0.2", "--json", tmp_path / "report.json")
    shown = succeeded(evaluate(decoder, *arguments, *written))
    assert "1 of 4 questions do not fit" in shown
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["machine"]["questions"], report["machine"]["chunks"]) == (3, 2)
    names = [method["method"] for method in report["methods"]]
    assert names == [RECOMPUTED, PREFIX_CACHING, "ratio 0.2", "ratio 0.15, random tokens", *REDUCTIONS]
    assert all(method["agreement"] is method["accuracy"] is None for method in report["methods"])
    assert "agreement" not in shown  # there are no classes


def test_what_cannot_be_measured_is_refused_in_one_line(decoder, files, tiny_checkpoint):
    for arguments, expected in (
        (("--shots", 9, "--pool", 9), ("8 examples", "9 shots")),
        (("--shots", 5, "--pool", 4), ("pool of 4", "5 shots")),
        (("--shots", 8, "--max-tokens", 30), ("every prompt of 8 shots", "fewer shots")),
        (("--labels", "yes,Text"), ("labels of the data", "2 classes")),
        (("--labels", "yes,never"), ("labels of several tokens",)),
    ):
        assert_one_line(evaluate(decoder, *labelled(files), *arguments), *expected)
    questions = ("--data", files / "questions.tsv")
    assert_one_line(evaluate(decoder, *questions), "last token", "--pooling lasttoken")
    assert_one_line(evaluate(tiny_checkpoint.folder, *questions, "--chunk-tokens", 5), "bidirectional")
