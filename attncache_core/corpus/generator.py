"""Sentences from templates and slots.

templates.txt and slots.txt are lines under ``# headings``: a template's heading is its topic, a
filler's its slot. Each template gives up to SENTENCES_PER_TEMPLATE sentences; they carry its id,
so that a split by source never parts sentences of one mould.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from random import Random

SENTENCES_PER_TEMPLATE = 10

# {name} or {one|other}; an alternative may hold slots in its turn, but those no further ones.
_SLOT = re.compile(r"\{((?:[^{}]|\{[^{}]*\})+)\}")
_BAR_OUTSIDE_BRACES = re.compile(r"\|(?![^{]*\})")
_NAMED_SLOT = re.compile(r"\{([^{}|]*)\}")


@dataclass(frozen=True, slots=True)
class CorpusSentence:
    """A sentence and the id of the template it came from, such as "card_lost-03"."""

    text: str
    source: str


def default_corpus() -> list[CorpusSentence]:
    """The corpus shipped with the package: no text twice, and the same on every machine."""
    files = resources.files("attncache_core.corpus")
    return generate_corpus(
        files.joinpath("templates.txt").read_text(encoding="utf-8"),
        files.joinpath("slots.txt").read_text(encoding="utf-8"),
    )


def generate_corpus(templates: str, slots: str) -> list[CorpusSentence]:
    """The sentences of the two files' contents; a text of two templates belongs to the first.

    An unknown slot or a brace without its partner raises ValueError with the line in templates.txt.
    """
    fillers = _fillers(slots)
    sources: dict[str, str] = {}  # text -> source
    places: dict[str, int] = {}  # topic -> its templates so far
    for number, topic, template in _lines(templates, "templates.txt"):
        _check_template(template, fillers, f"templates.txt:{number}")
        places[topic] = places.get(topic, 0) + 1
        source = f"{topic}-{places[topic]:02}"
        for text in _sentences(template, fillers, source):
            sources.setdefault(text, source)
    return [CorpusSentence(text, source) for text, source in sources.items()]


def _lines(content: str, file_name: str) -> Iterator[tuple[int, str, str]]:
    """(line number, heading, line) of each line under a heading; ## opens a comment."""
    heading = None
    for number, line in enumerate(map(str.strip, content.splitlines()), start=1):
        if not line or line.startswith("##"):
            continue
        if line.startswith("#"):
            heading = line.removeprefix("#").strip()
        elif heading is None:
            raise ValueError(f"{file_name}:{number}: a line before the first '# heading'")
        else:
            yield number, heading, line


def _fillers(slots: str) -> dict[str, list[str]]:
    """Slot name -> fillers; each slot also under its capitalised name, with capitalised fillers."""
    fillers: dict[str, list[str]] = {}
    for _, name, line in _lines(slots, "slots.txt"):
        fillers.setdefault(name, []).extend(filler.strip() for filler in line.split("|"))
    capitalised = {_capitalised(name): list(map(_capitalised, fillers[name])) for name in fillers}
    return capitalised | fillers


def _check_template(template: str, fillers: dict[str, list[str]], place: str) -> None:
    for name in _NAMED_SLOT.findall(template):
        if name not in fillers:
            raise ValueError(f"{place}: unknown slot {{{name}}}: slots.txt has no '# {name}'")
    if re.search(r"[{}]", _SLOT.sub("", template)):
        raise ValueError(f"{place}: a brace without its partner, or braces nested too deep")


def _sentences(template: str, fillers: dict[str, list[str]], source: str) -> list[str]:
    # Only random() is promised to be the same in every Python version; shuffle() is not.
    random = Random(source)
    deals: dict[str, Iterator[str]] = {}  # what stands between braces -> its deal
    picks: list[tuple[str, str]] = []  # (what stands between braces, the filler) of one sentence

    def pick(match: re.Match[str]) -> str:
        slot = match[1]
        if slot not in deals:
            deals[slot] = _deal(fillers.get(slot) or _BAR_OUTSIDE_BRACES.split(slot), random)
        filler = next(deals[slot])
        picks.append((slot, filler))
        return _SLOT.sub(pick, filler)

    sentences: dict[str, None] = {}  # an ordered set
    tries = 20 * SENTENCES_PER_TEMPLATE  # bounded, for a template may have few combinations
    while tries and len(sentences) < SENTENCES_PER_TEMPLATE:
        tries -= 1
        picks.clear()
        sentence = _SLOT.sub(pick, template)
        if len(set(picks)) == len(picks):  # a slot that stands twice took two fillers
            sentences[sentence] = None
    return list(sentences)


def _deal(options: list[str], random: Random) -> Iterator[str]:
    """The options for ever, shuffled anew each round: none comes up twice before all did once."""
    while True:
        yield from sorted(options, key=lambda _: random.random())


def _capitalised(text: str) -> str:
    return text[:1].upper() + text[1:]
