"""The shipped corpus has enough well-formed sentences and is the same on every machine."""

import os
import re
import subprocess
import sys
from collections import Counter
from importlib import resources
from itertools import permutations

import pytest

from attncache_core.corpus import default_corpus, generate_corpus


@pytest.fixture(scope="module")
def corpus():
    return default_corpus()


def test_corpus_has_at_least_3000_different_sentences_of_many_sources_lengths_and_kinds(corpus):
    assert len({sentence.text for sentence in corpus}) == len(corpus) >= 3000
    counts = Counter(sentence.source for sentence in corpus)
    assert len(counts) >= 220
    # A source is a topic and a number.
    assert all(re.fullmatch(r"[a-z_]+-\d\d", source) for source in counts)
    assert all(2 <= count <= 24 for count in counts.values())
    # From search queries to long complaints.
    lengths = sorted(len(sentence.text.split()) for sentence in corpus)
    assert 9 <= lengths[len(lengths) // 2] <= 12
    assert sum(length < 5 for length in lengths) > 200
    assert sum(length > 20 for length in lengths) > 200
    for trait in (
        lambda text: text.endswith("?"),
        lambda text: text.endswith("."),
        lambda text: text[0].islower(),
    ):
        assert sum(trait(sentence.text) for sentence in corpus) > len(corpus) / 5


def test_another_process_with_another_hash_seed_makes_the_same_corpus(corpus):
    # The generator alone, because importing the whole library takes seconds.
    files = str(resources.files("attncache_core.corpus"))
    program = (
        f"import sys, pathlib; sys.path.insert(0, {files!r}); from generator import generate_corpus;"
        "read = lambda name: pathlib.Path(sys.path[0], name).read_text('utf-8');"
        "corpus = generate_corpus(read('templates.txt'), read('slots.txt'));"
        "print(ascii([(sentence.text, sentence.source) for sentence in corpus]))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "4711"}
    output = subprocess.check_output([sys.executable, "-c", program], env=environment, text=True)
    assert output.strip() == ascii([(sentence.text, sentence.source) for sentence in corpus])


def test_every_python_version_chooses_the_same_sentences():
    sentences = generate_corpus("# greeting\n{Hello|Good day}, {name} {1|2}", "# name\nAnn | Bo | Cy")
    # A fixed list: a Python version that draws or sorts differently would change the default corpus.
    assert [sentence.text for sentence in sentences] == [
        *("Good day, Ann 2", "Hello, Cy 1", "Hello, Bo 2", "Good day, Cy 1", "Hello, Ann 1"),
        *("Good day, Bo 2", "Hello, Bo 1", "Good day, Ann 1", "Hello, Cy 2", "Good day, Bo 1"),
    ]


def test_sentences_are_clean_text(corpus):
    for sentence in corpus:
        assert not re.search(r"[{}|#]|\s\s| [,.?!;:]|^\s|\s$", sentence.text), sentence
        assert not re.search(r"\b(an [^aeiouAEIOUh8]|a [aeio])", sentence.text), sentence


def test_every_slot_is_used():
    slots, templates = (
        resources.files("attncache_core.corpus").joinpath(name).read_text(encoding="utf-8")
        for name in ("slots.txt", "templates.txt")
    )
    for name in re.findall(r"^# (\w+)$", slots, re.MULTILINE):
        assert f"{{{name}}}" in templates, name


@pytest.mark.parametrize(
    ("templates", "slots", "expected"),
    [
        ("# t\n{City}!", "# city\nle Havre", {"Le Havre!": "t-01"}),
        (
            "# t\n{city} to {city}",
            "# city\nRome | Bonn | Oslo",
            {f"{one} to {other}": "t-01" for one, other in permutations(["Rome", "Bonn", "Oslo"], 2)},
        ),
        (
            "# t\nfly{ to {city}| home|}",
            "# city\nRome",
            dict.fromkeys(["fly to Rome", "fly home", "fly"], "t-01"),
        ),
        # A text from two templates belongs to the first.
        ("# t\n{hi|ho}\n{ho|hey}", "", {"hi": "t-01", "ho": "t-01", "hey": "t-02"}),
    ],
    ids=["capitalised", "slot-twice", "slot-in-alternative", "two-templates"],
)
def test_templates_are_filled_in_every_way(templates, slots, expected):
    sentences = generate_corpus(templates, slots)
    assert {sentence.text: sentence.source for sentence in sentences} == expected
    assert len(sentences) == len(expected)


@pytest.mark.parametrize(
    ("templates", "slots", "words"),
    [
        *(
            (f"## a comment\n# t\n{template}", "# city\nRome", r"FILE:3: unknown slot \{")
            for template in ("a {town} ", "{hot|{town}}", "an {}", "{one word}")
        ),
        *(
            (f"# t\n{template}", "# city\nRome", "FILE:2: a brace")
            for template in ("an {city", "a city}", "{a|{b|{c|d}}}")
        ),
        ("hello\n# t", "", "FILE:1: "),
        ("# t\nhello", "Rome | Bonn", "slots.txt:1: "),
    ],
)
def test_error_in_a_file_is_refused_with_its_name_and_line(templates, slots, words):
    for name, options in (("templates.txt", {}), ("other.txt", {"file_name": "other.txt"})):
        with pytest.raises(ValueError, match="^" + words.replace("FILE", name)):
            generate_corpus(templates, slots, **options)
