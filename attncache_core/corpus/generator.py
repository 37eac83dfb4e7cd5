"""Generate sentences from templates with slots.

templates.txt and slots.txt consist of lines under ``# headings``: the heading of a template is its topic,
the heading of a filler is its slot. Each template gives up to SENTENCES_PER_TEMPLATE sentences. The source of
a sentence is the id of its template, so that a split by source keeps the sentences of a template together.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from random import Random

SENTENCES_PER_TEMPLATE = 10

# {name} or {one|other}. An alternative may contain slots, but these slots contain no further slots.
_SLOT = re.compile(r"\{((?:[^{}]|\{[^{}]*\})+)\}")
_BAR_OUTSIDE_BRACES = re.compile(r"\|(?![^{]*\})")
_NAMED_SLOT = re.compile(r"\{([^{}|]*)\}")


@dataclass(frozen=True, slots=True)
class CorpusSentence:
    """A sentence of a corpus and its source."""

    text: str
    source: str  # for example the id of the template that generated the sentence, such as "card_lost-03"
    token_ids: tuple[int, ...] | None = None  # given if the text is only what these tokens decode to


def default_corpus() -> list[CorpusSentence]:
    """Return the corpus shipped with the package: distinct texts, the same on every machine."""
    files = resources.files("attncache_core.corpus")
    return generate_corpus(
        files.joinpath("templates.txt").read_text(encoding="utf-8"),
        files.joinpath("slots.txt").read_text(encoding="utf-8"),
    )


def generate_corpus(templates: str, slots: str, *, file_name: str = "templates.txt") -> list[CorpusSentence]:
    """Return the distinct sentences of templates and slots, given as the contents of their two files.

    A text that two templates give belongs to the first template.
    file_name: the name of the file that holds the templates, for errors.
    Raises ValueError, with file name and line number, for an unknown slot, a brace without its partner,
    braces nested too deep, and a line before the first heading.
    """
    fillers = _fillers(slots)
    sources: dict[str, str] = {}  # text -> source
    counts: dict[str, int] = {}  # topic -> number of its templates so far
    for number, topic, template in _lines(templates, file_name):
        _check_template(template, fillers, f"{file_name}:{number}")
        counts[topic] = counts.get(topic, 0) + 1
        source = f"{topic}-{counts[topic]:02}"
        for text in _sentences(template, fillers, source):
            sources.setdefault(text, source)
    return [CorpusSentence(text, source) for text, source in sources.items()]


def _lines(content: str, file_name: str) -> Iterator[tuple[int, str, str]]:
    """Yield (line number, heading, line) for each line under a heading. Comment lines start with ##."""
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
    """Return slot name -> fillers. Each slot also has an entry with its name and its fillers capitalised."""
    fillers: dict[str, list[str]] = {}
    for _, name, line in _lines(slots, "slots.txt"):
        fillers.setdefault(name, []).extend(filler.strip() for filler in line.split("|"))
    capitalised = {_capitalised(name): list(map(_capitalised, fillers[name])) for name in fillers}
    return capitalised | fillers


def _check_template(template: str, fillers: dict[str, list[str]], position: str) -> None:
    """Raise ValueError for an unknown slot or wrong braces; position: file name and line number."""
    for name in _NAMED_SLOT.findall(template):
        if name not in fillers:
            raise ValueError(f"{position}: unknown slot {{{name}}}: no heading '# {name}' lists its fillers")
    if re.search(r"[{}]", _SLOT.sub("", template)):
        raise ValueError(f"{position}: a brace without its partner, or braces nested too deep")


def _sentences(template: str, fillers: dict[str, list[str]], source: str) -> list[str]:
    """Return up to SENTENCES_PER_TEMPLATE different sentences of a template; source: the random seed."""
    # Python guarantees the same numbers in every version for random() only, not for shuffle().
    random = Random(source)
    deals: dict[str, Iterator[str]] = {}  # content of a pair of braces -> its endless series of fillers
    picks: list[tuple[str, str]] = []  # (content of a pair of braces, chosen filler) of one sentence

    def pick(match: re.Match[str]) -> str:
        slot = match[1]
        if slot not in deals:
            deals[slot] = _deal(fillers.get(slot) or _BAR_OUTSIDE_BRACES.split(slot), random)
        filler = next(deals[slot])
        picks.append((slot, filler))
        return _SLOT.sub(pick, filler)

    sentences: dict[str, None] = {}  # an ordered set
    tries = 20 * SENTENCES_PER_TEMPLATE  # limited, because a template may have few combinations
    while tries and len(sentences) < SENTENCES_PER_TEMPLATE:
        tries -= 1
        picks.clear()
        sentence = _SLOT.sub(pick, template)
        if len(set(picks)) == len(picks):  # a slot that occurs twice has two different fillers
            sentences[sentence] = None
    return list(sentences)


def _deal(options: list[str], random: Random) -> Iterator[str]:
    """Yield options endlessly in shuffled rounds: all options occur once before an option occurs again."""
    while True:
        yield from sorted(options, key=lambda _: random.random())


def _capitalised(text: str) -> str:
    return text[:1].upper() + text[1:]
