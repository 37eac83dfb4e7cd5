"""`benchmarks evaluate mmlu` scores the letters of a decoder by number of shots, with and without reuse."""

import re
from collections import Counter
from functools import partial

import numpy as np
import pytest
import torch
from command_line import assert_one_line, run, succeeded
from core_decoders import write_decoder_tokenizer, write_llama
from transformers import AutoModelForCausalLM, AutoTokenizer

from attncache_core import AttentionDatabase, BuildOptions
from attncache_core.corpus.reading import spread
from benchmarks.__main__ import main
from benchmarks.papers.mmlu import LETTERS, Prompts, read_questions
from service.commands import evaluation

HEADER = "subject\tquestion\tA\tB\tC\tD\tanswer\n"
SUBJECTS = ("sums", "world_history")


def write_questions(path, count, seed):
    random = np.random.default_rng(seed)
    rows = [
        "\t".join([subject, f"q{random.integers(9)}?", *map(str, random.integers(0, 9, 4)), "ABCD"[row % 4]])
        for subject in SUBJECTS
        for row in range(count)
    ]
    path.write_text(HEADER + "\n".join(rows) + "\n")
    return path


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    folder = write_llama(tmp_path_factory.mktemp("decoders") / "tiny")
    write_decoder_tokenizer(folder, words=["questions", *"ABCD", "Answer:"] * 2)
    return folder


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mmlu")
    write_questions(folder / "test.tsv", 6, seed=1)
    write_questions(folder / "dev.tsv", 2, seed=2)
    write_questions(folder / "more.tsv", 10, seed=3)
    return folder


def mmlu(decoder, files, *arguments):
    options = ("--data", files / "test.tsv", "--examples", files / "dev.tsv", "--rounds", 1)
    return run(
        "evaluate", "mmlu", "--model", decoder, "--dtype", "float32", *options, *arguments, program=main
    )


def rows_of(text):
    """Return the figures of the last table by (shots, method)."""
    table = text[text.index("MMLU, ") :]
    return {
        (cells[0], cells[1]): cells[2:]
        for line in table.splitlines()
        if len(cells := [cell.strip() for cell in re.split("[│|]", line) if cell.strip()]) > 2
    }


@torch.inference_mode()
def letters_by_the_reference(folder, prompts):
    """Return the most probable letter after each prompt, by Hugging Face's model and tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = [tokenizer(f" {letter}", add_special_tokens=False).input_ids for letter in LETTERS]
    logits = [model(torch.tensor([tokenizer(prompt).input_ids])).logits[0, -1] for prompt in prompts]
    return [LETTERS[int(of_all[[tokens[0] for tokens in tokens]].argmax())] for of_all in logits]


def test_accuracy_is_computed_from_the_logits_of_the_letters(decoder, files):
    rows = rows_of(succeeded(mmlu(decoder, files, "--shots", "0..2", "--methods", "full")))
    questions = read_questions(str(files / "test.tsv"))
    prompts = Prompts(read_questions(str(files / "dev.tsv")))
    for shots in range(3):
        letters = letters_by_the_reference(decoder, [prompts.of(asked, shots) for asked in questions])
        right = [letter == asked.answer for letter, asked in zip(letters, questions, strict=True)]
        assert float(rows[str(shots), "full"][2]) == pytest.approx(np.mean(right), abs=1e-4)


def test_each_number_of_shots_has_a_database_of_its_own(decoder, files, tmp_path, monkeypatch):
    # The projector's training is not what is tested, and takes most of the time.
    monkeypatch.setattr(evaluation, "BuildOptions", partial(BuildOptions, training_steps=20))
    arguments = ("--database", tmp_path / "db", "--recorded", files / "more.tsv", "--shots", "1..2")
    arguments += ("--heads", "4")  # one mask to measure
    rows = rows_of(succeeded(mmlu(decoder, files, *arguments)))
    assert sorted(path.name for path in (tmp_path / "db").iterdir() if path.is_dir()) == [
        "shots-1",
        "shots-2",
    ]
    assert list(rows) == [(shots, method) for shots in "12" for method in ("full", "attncache")]
    # By default, evaluations record only shorter texts.
    assert max(AttentionDatabase.open(tmp_path / "db" / "shots-2").search.store.segments) > 128


def test_what_cannot_be_measured_is_refused_in_one_line(decoder, tiny_checkpoint, files, tmp_path):
    assert_one_line(mmlu(decoder, files, "--shots", "3"), "2 examples of sums", "3 shots")
    assert_one_line(mmlu(decoder, files, "--shots", "2..1"), "shots must be a number")
    assert_one_line(mmlu(decoder, files, "--subjects", "sums,alchemy"), "no subject alchemy")
    assert_one_line(mmlu(write_llama(tmp_path / "other"), files), "one token")
    assert_one_line(mmlu(tiny_checkpoint.folder, files), "attend to later tokens", "label-logits")


def test_questions_with_too_long_prompts_are_skipped_and_counted(decoder, files):
    tokenizer = AutoTokenizer.from_pretrained(decoder)
    prompts = Prompts(read_questions(str(files / "dev.tsv")))
    lengths = [
        len(tokenizer(prompts.of(asked, 0)).input_ids) for asked in read_questions(str(files / "test.tsv"))
    ]
    most = sorted(lengths)[4]
    left = sum(length <= most for length in lengths)
    assert left < len(lengths)
    arguments = ("--methods", "full", "--shots", "0", "--max-tokens", most)
    rows = rows_of(succeeded(mmlu(decoder, files, *arguments)))
    assert rows["0", "full"][0] == str(left)
    assert max(length for length in lengths if length <= most) >= float(rows["0", "full"][1])
    refused = mmlu(decoder, files, "--methods", "full", "--shots", "1", "--max-tokens", most)
    assert_one_line(refused, "every prompt of 1 shots", "fewer shots")


def test_limited_questions_cover_all_subjects(decoder, files):
    arguments = ("--methods", "full", "--shots", "0", "--questions", 8)
    output = succeeded(mmlu(decoder, files, *arguments))
    assert rows_of(output)["0", "full"][0] == "8"
    questions = spread(read_questions(str(files / "test.tsv")), 8)
    assert Counter(question.subject for question in questions) == dict.fromkeys(SUBJECTS, 4)
