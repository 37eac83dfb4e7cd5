"""The shipped corpus has enough well-formed sentences and is the same on every machine."""

import os
import re
import subprocess
import sys
from collections import Counter
from importlib import resources

import pytest

from attncache_core.corpus import CorpusSentence, default_corpus, generate_corpus


@pytest.fixture(scope="module")
def corpus():
    return default_corpus()


def words(text):
    return len(text.split())


def test_corpus_has_at_least_3000_sentences_and_none_twice(corpus):
    assert len({sentence.text for sentence in corpus}) == len(corpus) >= 3000


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
        "Good day, Ann 2",
        "Hello, Cy 1",
        "Hello, Bo 2",
        "Good day, Cy 1",
        "Hello, Ann 1",
        "Good day, Bo 2",
        "Hello, Bo 1",
        "Good day, Ann 1",
        "Hello, Cy 2",
        "Good day, Bo 1",
    ]


def test_every_source_is_a_topic_and_a_number_and_gives_2_to_24_sentences(corpus):
    counts = Counter(sentence.source for sentence in corpus)
    assert len(counts) >= 220
    assert all(re.fullmatch(r"[a-z_]+-\d\d", source) for source in counts)
    assert all(2 <= count <= 24 for count in counts.values())


def test_sentences_are_clean_text(corpus):
    for sentence in corpus:
        assert not re.search(r"[{}|#]|\s\s| [,.?!;:]|^\s|\s$", sentence.text), sentence
        assert not re.search(r"\b(an [^aeiouAEIOUh8]|a [aeio])", sentence.text), sentence


def test_lengths_spread_from_search_queries_to_long_complaints(corpus):
    lengths = sorted(words(sentence.text) for sentence in corpus)
    assert 9 <= lengths[len(lengths) // 2] <= 12
    assert sum(length < 5 for length in lengths) > 200
    assert sum(length > 20 for length in lengths) > 200


def test_questions_statements_and_lower_case_are_all_well_represented(corpus):
    for trait in (
        lambda text: text.endswith("?"),
        lambda text: text.endswith("."),
        lambda text: text[0].islower(),
    ):
        assert sum(trait(sentence.text) for sentence in corpus) > len(corpus) / 5


def test_every_slot_is_used():
    slots, templates = (
        resources.files("attncache_core.corpus").joinpath(name).read_text(encoding="utf-8")
        for name in ("slots.txt", "templates.txt")
    )
    for name in re.findall(r"^# (\w+)$", slots, re.MULTILINE):
        assert f"{{{name}}}" in templates, name


def test_capitalised_slot_gives_a_capitalised_filler():
    assert generate_corpus("# t\n{City}!", "# city\nle Havre") == [CorpusSentence("Le Havre!", "t-01")]


def test_slot_that_occurs_twice_gets_two_fillers():
    texts = {sentence.text for sentence in generate_corpus("# t\n{city} to {city}", "# city\nRome | Bonn")}
    assert texts == {"Rome to Bonn", "Bonn to Rome"}


def test_alternatives_may_hold_slots_and_may_be_empty():
    texts = {sentence.text for sentence in generate_corpus("# t\nfly{ to {city}| home|}", "# city\nRome")}
    assert texts == {"fly to Rome", "fly home", "fly"}


def test_text_from_two_templates_belongs_to_the_first():
    sentences = generate_corpus("# t\n{hi|ho}\n{ho|hey}", "")
    assert {sentence.text: sentence.source for sentence in sentences} == {
        "hi": "t-01",
        "ho": "t-01",
        "hey": "t-02",
    }


@pytest.mark.parametrize("template", ["a {town} ", "{hot|{town}}", "an {}", "{one word}"])
def test_unknown_slot_is_refused_with_file_and_line(template):
    with pytest.raises(ValueError, match=r"^templates\.txt:3: unknown slot \{"):
        generate_corpus(f"## a comment\n# t\n{template}", "# city\nRome")


@pytest.mark.parametrize("template", ["an {city", "a city}", "{a|{b|{c|d}}}"])
def test_brace_without_partner_and_deep_nesting_are_refused_with_file_and_line(template):
    with pytest.raises(ValueError, match=r"^templates\.txt:2: a brace"):
        generate_corpus(f"# t\n{template}", "# city\nRome")


def test_line_before_the_first_heading_is_refused_with_file_and_line():
    with pytest.raises(ValueError, match=r"^slots\.txt:1: "):
        generate_corpus("# t\nhello", "Rome | Bonn")


@pytest.mark.parametrize("templates", ["# t\nto {town}", "# t\nto {town", "hello\n# t"])
def test_errors_name_the_file_of_the_templates(templates):
    with pytest.raises(ValueError, match=r"^unfamiliar\.txt:[12]: "):
        generate_corpus(templates, "", file_name="unfamiliar.txt")
