"""Generate texts that do not resemble a corpus, for calibration to try reuse on.

A kind of text is a function that takes a random number generator and the corpus and returns one text.
Many kinds choose from texts in unfamiliar.txt, which are templates like those in templates.txt. The other
kinds change texts of the corpus or put random characters together.

The two tables at the end list all kinds. Calibration may fit a familiarity test on the kinds in FITTED.
The kinds in MEASURED only measure such a test, so that its measured quality holds for kinds it never saw.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib import resources
from itertools import pairwise
from random import Random
from typing import TypeVar

from attncache_core.corpus.generator import generate_corpus

T = TypeVar("T")
Kind = Callable[[Random, Sequence[str]], str]

TRIES_PER_TEXT = 20  # a kind may have too few distinct texts, so the number of tries is limited
CHARACTERS = 240  # maximum length of a text, and how much of a corpus text is read


@dataclass(frozen=True, slots=True)
class UnfamiliarText:
    """A generated text and the kind of text that it is."""

    text: str
    kind: str  # such as "german" or "stack_traces"
    fitted: bool  # True: may be used to fit a familiarity test; False: only to measure one


def unfamiliar_texts(corpus: Sequence[str], per_kind: int = 40, seed: int = 0) -> list[UnfamiliarText]:
    """Return up to `per_kind` texts of each kind; the kinds follow the order of FITTED and MEASURED.

    The same arguments give the same texts on every machine and with every Python version. No text is
    blank, occurs twice or is in the corpus, surrounding white space aside. A kind that has fewer than
    `per_kind` distinct texts gives fewer. The corpus may be empty and may hold blank texts: kinds that
    change texts of the corpus then give fewer texts, or none.
    """
    seen = {"", *(text.strip() for text in corpus)}
    sources = [text for text in corpus if text.strip()] or [""]
    texts = []
    for kinds in (FITTED, MEASURED):
        for name, kind in kinds.items():
            for text in _distinct(kind, Random(f"{seed} {name}"), sources, per_kind, seen):
                texts.append(UnfamiliarText(text, name, kinds is FITTED))
    return texts


def _distinct(kind: Kind, random: Random, corpus: list[str], count: int, seen: set[str]) -> Iterator[str]:
    """Yield up to `count` texts that are not in `seen`, and add them to `seen`."""
    found = 0
    for _ in range(TRIES_PER_TEXT * count):
        text = kind(random, corpus)[:CHARACTERS].strip()
        if text not in seen:
            seen.add(text)
            found += 1
            yield text
        if found == count:
            return


# Random choices. Python guarantees the same numbers in every version for random() only.


def _below(random: Random, bound: int) -> int:
    return int(bound * random.random())


def _pick(random: Random, options: Sequence[T]) -> T:
    return options[_below(random, len(options))]


def _shuffled(random: Random, items: Sequence[T]) -> list[T]:
    return sorted(items, key=lambda _: random.random())


def _length(random: Random, maximum: int) -> int:
    """Return a number from 3 to `maximum`. Small numbers are more likely."""
    draw = random.random()
    return 3 + int((maximum - 2) * draw * draw)


def _characters(random: Random, alphabet: str, count: int) -> str:
    return "".join(_pick(random, alphabet) for _ in range(count))


# Kinds that choose from the texts in unfamiliar.txt.

_FILE = "unfamiliar.txt"


@cache
def _written_texts() -> dict[str, list[str]]:
    """Return the texts in unfamiliar.txt by kind."""
    file = resources.files("attncache_core.corpus").joinpath(_FILE)
    kinds: dict[str, list[str]] = {}
    for sentence in generate_corpus(file.read_text(encoding="utf-8"), slots="", file_name=_FILE):
        kinds.setdefault(sentence.source.rpartition("-")[0], []).append(sentence.text)
    return kinds


def _written(*names: str) -> dict[str, Kind]:
    """Return the kinds that have these headings in unfamiliar.txt."""
    return {name: partial(_written_text, name) for name in names}


def _written_text(name: str, random: Random, _: Sequence[str]) -> str:
    text = re.sub("9", lambda _: _pick(random, DIGITS), _pick(random, _written_texts()[name]))
    return text.translate(_SIGNS)


_SIGNS = str.maketrans("‹›¶", "{}\n")


def _prose(*names: str) -> dict[str, Kind]:
    """Return the kinds of English texts that have these headings in unfamiliar.txt."""
    return {name: partial(_prose_text, name) for name in names}


def _prose_text(name: str, random: Random, corpus: Sequence[str]) -> str:
    """Join one to three texts, because sentences of other corpora are often long."""
    return " ".join(_written_text(name, random, corpus) for _ in range(_pick(random, (1, 2, 3))))


# Kinds that change texts of the corpus.


def _words(random: Random, corpus: Sequence[str]) -> list[str]:
    """Return the words of a random text of the corpus, at least one (which may be empty)."""
    return _pick(random, corpus)[:CHARACTERS].split() or [""]


def _words_shuffled(random: Random, corpus: Sequence[str]) -> str:
    words = _words(random, corpus)
    return " ".join(_shuffled(random, words)) if len(words) > 1 else "".join(_shuffled(random, words[0]))


def _letters_corrupted(random: Random, corpus: Sequence[str]) -> str:
    """Drop, double or replace 5 % to 50 % of the letters of a text."""
    text = " ".join(_words(random, corpus))
    strength = _pick(random, (0.05, 0.1, 0.2, 0.35, 0.5))
    letters = list(text)
    for index, letter in enumerate(letters):
        if random.random() < strength:
            letters[index] = _pick(random, ("", letter * 2, _characters(random, LETTERS, 1)))
    return "".join(letters)


def _spliced(random: Random, corpus: Sequence[str]) -> str:
    """Join the first words of one text and the last words of another."""
    first, second = _words(random, corpus), _words(random, corpus)
    return " ".join(first[: 1 + _below(random, len(first))] + second[_below(random, len(second)) :])


def _word_repeated(random: Random, corpus: Sequence[str]) -> str:
    return " ".join([_pick(random, _words(random, corpus))] * _length(random, 50))


def _phrase_repeated(random: Random, corpus: Sequence[str]) -> str:
    words = _words(random, corpus)
    start = _below(random, len(words))
    return _pick(random, (" ", ", ", ". ")).join(
        [" ".join(words[start : start + 2 + _below(random, 4)])] * _length(random, 15)
    )


def _bag_of_words(random: Random, corpus: Sequence[str]) -> str:
    """Join words of different texts."""
    return " ".join(_pick(random, _words(random, corpus)) for _ in range(_length(random, 40)))


def _common_words(random: Random, corpus: Sequence[str]) -> str:
    """Join words that are frequent in the corpus, in any order."""
    counts = Counter(word for _ in range(50) for word in _words(random, corpus))
    frequent = [word for word, _ in counts.most_common(_pick(random, (4, 8, 16, 32)))]
    return " ".join(_pick(random, frequent) for _ in range(_length(random, 30)))


def _short_words(random: Random, corpus: Sequence[str]) -> str:
    """Join words of at most three letters, which say little, of different texts."""
    short = [word for _ in range(30) for word in _words(random, corpus) if len(word) <= 3] or [""]
    return " ".join(_pick(random, short) for _ in range(_length(random, 30)))


def _few_words(random: Random, corpus: Sequence[str]) -> str:
    """Join two to five words of different texts."""
    return " ".join(_pick(random, _words(random, corpus)) for _ in range(2 + _below(random, 4)))


def _punctuated(random: Random, corpus: Sequence[str]) -> str:
    """Put a mark behind most words of a text."""
    mark, often = _pick(random, (",", ";", " -", " /", ".")), _pick(random, (0.6, 1))
    return " ".join(word + mark * (random.random() < often) for word in _words(random, corpus))


def _begun_with_repetition(random: Random, corpus: Sequence[str]) -> str:
    """Put a repeated word of another text before or behind a text."""
    repeated = [_pick(random, _words(random, corpus))] * (_length(random, 18) - 1)
    words = _words(random, corpus)
    return " ".join(_pick(random, (repeated + words, words + repeated)))


def _interrupted(random: Random, corpus: Sequence[str]) -> str:
    """Put a repeated phrase of one or two words of the corpus into the middle of a text."""
    words, others = _words(random, corpus), _words(random, corpus)
    at, start = _below(random, len(words)), _below(random, len(others))
    phrase = others[start : start + 1 + _below(random, 2)] * (_length(random, 12) - 1)
    return " ".join(words[:at] + phrase + words[at:])


def _stuttered(random: Random, corpus: Sequence[str]) -> str:
    """Repeat a word of a text several times where it stands."""
    words = _words(random, corpus)
    at = _below(random, len(words))
    return " ".join(words[:at] + words[at : at + 1] * _length(random, 12) + words[at + 1 :])


def _interleaved(random: Random, corpus: Sequence[str]) -> str:
    """Take the words of two texts in turn."""
    first, second = _words(random, corpus), _words(random, corpus)
    return " ".join(word for pair in zip(first, second, strict=False) for word in pair)


def _words_sorted(random: Random, corpus: Sequence[str]) -> str:
    return " ".join(sorted(_words(random, corpus) + _words(random, corpus)[: _below(random, 12)]))


def _words_doubled(random: Random, corpus: Sequence[str]) -> str:
    """Write each word of a text two or three times."""
    times = _pick(random, (2, 3))
    return " ".join(" ".join([word] * times) for word in _words(random, corpus)[: _length(random, 16)])


def _parts_joined(random: Random, corpus: Sequence[str]) -> str:
    """Join two to five parts of texts, of one to three words each."""
    parts = []
    for _ in range(2 + _below(random, 4)):
        words = _words(random, corpus)
        start = _below(random, len(words))
        parts += words[start : start + 1 + _below(random, 3)]
    return " ".join(parts)


def _words_marked(random: Random, corpus: Sequence[str]) -> str:
    """Put each word of a text between marks or behind a mark."""
    before, behind = _pick(random, (("(", ")"), ('"', '"'), ("", ":"), ("", " |"), ("", "...")))
    return " ".join(before + word + behind for word in _words(random, corpus)[: _length(random, 20)])


def _capitals(random: Random, corpus: Sequence[str]) -> str:
    marks = _pick(random, ("!", "!!!", "?!", "...", " -", "!?!?", "***", " !!"))
    often = _pick(random, (0.1, 0.4, 1))
    words = [word.upper() + marks * (random.random() < often) for word in _words(random, corpus)]
    return " ".join(words) + marks


def _letters_reversed(random: Random, corpus: Sequence[str]) -> str:
    return " ".join(_words(random, corpus))[::-1]


def _leetspeak(random: Random, corpus: Sequence[str]) -> str:
    words = _words(random, corpus)[: _length(random, 20)]
    return " ".join(words).lower().translate(_pick(random, _LEET))


_LEET = (
    str.maketrans("aeio", "4310"),
    str.maketrans("aeiost", "431057"),
    str.maketrans("abegilostz", "@836!10572"),
)


def _letters_spaced(random: Random, corpus: Sequence[str]) -> str:
    words = _words(random, corpus)
    return _pick(random, (" ", "-", ".", "_")).join("".join(words[: _length(random, 9)]))


def _letters_stretched(random: Random, corpus: Sequence[str]) -> str:
    """Repeat the last letter of at least one word and of about a third of the others."""
    words = _words(random, corpus)[: _length(random, 14)]
    chosen = _below(random, len(words))
    shout = " ".join(
        _stretched(random, word) if index == chosen or random.random() < 0.3 else word
        for index, word in enumerate(words)
    )
    return _pick(random, (shout, shout.upper() + "!!!", shout + "..."))


def _stretched(random: Random, word: str) -> str:
    return re.sub(r"(\w)(?=\W*$)", lambda match: match[1] * _length(random, 9), word)


def _languages_mixed(random: Random, corpus: Sequence[str]) -> str:
    """Join a few words each of the corpus and of two to four languages."""
    languages = _shuffled(random, LANGUAGES)[: 2 + _below(random, 3)]
    parts = [_words(random, corpus), *(_written_text(name, random, ()).split() for name in languages)]
    return " ".join(" ".join(part[: 1 + _below(random, 4)]) for part in _shuffled(random, parts))


LANGUAGES = ("french", "spanish", "arabic", "japanese", "greek", "hindi", "korean", "turkish")


# Kinds that put common words together.

# By a sign: question words, auxiliaries, pronouns, verbs, adverbs, prepositions and determiners.
COMMON_WORDS = {
    "w": ("what", "who", "why", "how", "where", "when", "which"),
    "a": ("is", "are", "was", "do", "does", "did", "can", "could", "will", "would", "should", "has"),
    "p": ("it", "this", "that", "I", "you", "he", "she", "they", "we", "one", "them", "me"),
    "v": ("go", "get", "make", "see", "say", "know", "want", "need", "come", "be", "have", "work"),
    "r": ("now", "here", "there", "then", "not", "too", "so", "again", "just", "well", "never", "up"),
    "o": ("of", "to", "in", "with", "for", "on", "at", "from", "out", "about", "and", "or"),
    "d": ("the", "a", "my", "your", "any", "all", "some", "no"),
}
_QUESTIONS = ("w", "wap", "wapv", "wav", "ap", "apv", "apr", "apvp")
_REMARKS = ("r", "v", "pv", "pvp", "par", "parv", "vp", "vpr", "rpa", "pvpr")
_SENTENCES = (
    *("wapvop", "wapvr", "wapvpop", "wavopr", "wapovp", "apvopr", "apvrop", "wapvovp", "apvdpov", "wapvopr"),
    *("pavop", "pvopr", "pavpr", "rpavop", "pvovp", "papvop", "vpordp", "pavrovp", "dpavrop", "pvowpv"),
)


def _of_common_words(patterns: Sequence[str], random: Random, _: Sequence[str]) -> str:
    """Return common words in one of the patterns, with or without a mark behind them."""
    said = " ".join(_pick(random, COMMON_WORDS[sign]) for sign in _pick(random, patterns))
    return _pick(random, (said, said.capitalize())) + _pick(random, ("", "?", ".", "!"))


# Kinds that put random characters and syllables together.

LETTERS = "abcdefghijklmnopqrstuvwxyz"
DIGITS = "0123456789"
SYLLABLES = ("ha", "he", "hi", "ho", "la", "na", "mwa", "ja", "bla", "yeah", "no", "tick", "boo")
CRIES = ("lol", "omg", "hmm", "wow", "ugh", "argh", "yay", "brr", "oh", "ah", "psst", "eww", "zzz", "aww")
CODES = ("AA-0000", "A00-000-0", "000.000.0000", "AAAA0000AA", "AA00 0000 0000 0000", "#00000")
KEYS = ("qwertyuiop", "asdfghjkl;'", "zxcvbnm,./", "asdfjkl;", "1234567890-=")


def _letters_random(random: Random, _: Sequence[str]) -> str:
    return " ".join(
        _characters(random, LETTERS, 1 + _below(random, 10)) for _ in range(_length(random, 14) - 2)
    )


def _hex_hashes(random: Random, _: Sequence[str]) -> str:
    digits = _characters(random, DIGITS + "abcdef", _pick(random, (7, 8, 12, 32, 40, 64)))
    return _pick(random, ("", "", "0x", "sha256:", "commit ", "#", "md5 = ")) + digits


def _base64(random: Random, _: Sequence[str]) -> str:
    body = _characters(random, LETTERS + LETTERS.upper() + DIGITS + "+/", 4 * _length(random, 18))
    head = _pick(random, ("", "", "data:image/png;base64,", "Authorization: Basic ", "ssh-rsa AAAA"))
    return head + body + _pick(random, ("", "=", "=="))


def _order_numbers(random: Random, _: Sequence[str]) -> str:
    """Return a UUID, or one to four codes of capital letters and digits."""
    if random.random() < 0.3:
        return "-".join(_characters(random, DIGITS + "abcdef", count) for count in (8, 4, 4, 4, 12))
    signs = {"A": LETTERS.upper(), "0": DIGITS}
    pattern = _pick(random, CODES)
    codes = (
        "".join(_pick(random, signs.get(sign, sign)) for sign in pattern)
        for _ in range(1 + _below(random, 4))
    )
    return _pick(random, ("", "", "ref ", "No. ", "SN: ")) + _pick(random, (", ", " ", " / ")).join(codes)


def _emoji(random: Random, corpus: Sequence[str]) -> str:
    """Repeat one to four emoji in random order, some after the first words of a corpus text."""
    words = _words(random, corpus)[: _below(random, 4)]
    signs = [_pick(random, _written_texts()["emoji"]) for _ in range(_pick(random, (1, 2, 4)))]
    run = [_pick(random, signs) for _ in range(_length(random, 30))]
    return " ".join([*words, _pick(random, (" ", " ", "")).join(run)])


def _interjections(random: Random, _: Sequence[str]) -> str:
    """Return laughter such as "ha ha ha", or stretched words such as "lolllll wowww"."""
    if random.random() < 0.5:
        count = _length(random, 30)
        return _pick(random, (" ", "", "-", ", ")).join([_pick(random, SYLLABLES)] * count)
    cries = [_stretched(random, _pick(random, CRIES)) for _ in range(_length(random, 12) - 2)]
    return " ".join(cries) + _pick(random, ("", "!", "!!1", "..."))


def _ascii_art(random: Random, _: Sequence[str]) -> str:
    """Return one to three lines, each a repeated pattern of punctuation marks."""
    marks = _characters(random, "-=+*#~_/\\|.:;^<>()[]o ", 1 + _below(random, 4))
    rows = (_characters(random, marks, _length(random, 6)) * _length(random, 8) for _ in range(3))
    return "\n".join(list(rows)[_below(random, 3) :])


def _keyboard_mash(random: Random, _: Sequence[str]) -> str:
    """Return random keys of one row of the keyboard, then of another row."""
    return _pick(random, ("", " ")).join(
        _characters(random, _pick(random, KEYS)[_below(random, 5) :], _length(random, 9))
        for _ in range(_length(random, 16) - 2)
    )


def _invented_language(random: Random, _: Sequence[str]) -> str:
    """Return a sentence of words that can be pronounced, made of few consonants and vowels."""
    consonants = _shuffled(
        random, ("b", "d", "f", "g", "k", "l", "m", "n", "p", "r", "s", "t", "v", "sh", "th")
    )
    vowels = _shuffled(random, ("a", "e", "i", "o", "u", "ai", "eo"))

    def word() -> str:
        pairs = (
            (_pick(random, consonants[:7]), _pick(random, vowels[:4])) for _ in range(1 + _below(random, 3))
        )
        return "".join(map("".join, pairs)) + _pick(random, ("", "", "n", "s", "r", "us", "um"))

    sentence = " ".join(word() for _ in range(_length(random, 18) - 1))
    return sentence.capitalize() + _pick(random, (".", "?", "", "!"))


# English of many subjects and styles.
PROSE = (
    "headlines",
    "captions",
    "forum_answers",
    "film_reviews",
    "encyclopedia",
    "exam_questions",
    "maths_problems",
    "trivia_questions",
    "definitions",
    "fiction",
    "dialogue",
    "law",
    "science",
    "sports",
    "business_news",
    "opinions",
    "biographies",
    "instructions",
    "travel_writing",
    "remarks",
    "letters",
    "nature",
    "history",
    "medicine",
    "war_and_crime",
    "academic_talk",
    "tokenised_phrases",
)
MEASURED_PROSE = (
    "weather_and_tides",
    "social_posts",
    "sermons_and_philosophy",
    "diary",
    "product_data",
    "music_and_art",
)

FITTED: dict[str, Kind] = {
    **_written("german", "russian", "chinese", "python", "json", "urls", "log_lines", "sums"),
    "words_shuffled": _words_shuffled,
    "letters_corrupted": _letters_corrupted,
    "spliced": _spliced,
    "word_repeated": _word_repeated,
    "phrase_repeated": _phrase_repeated,
    "bag_of_words": _bag_of_words,
    "common_words": _common_words,
    "short_words": _short_words,
    "few_words": _few_words,
    "short_questions": partial(_of_common_words, _QUESTIONS),
    "short_remarks": partial(_of_common_words, _REMARKS),
    "common_sentences": partial(_of_common_words, (*_SENTENCES, *map("".join, pairwise(_SENTENCES)))),
    "punctuated": _punctuated,
    "begun_with_repetition": _begun_with_repetition,
    "interrupted": _interrupted,
    "capitals": _capitals,
    "letters_random": _letters_random,
    "hex_hashes": _hex_hashes,
    **_prose(*PROSE),
}

MEASURED: dict[str, Kind] = {
    **_written(*LANGUAGES),
    **_written("sql", "html", "c_and_javascript", "stack_traces"),
    **_written("dates_and_phones", "csv_rows", "formulas", "paths_and_commands"),
    "stuttered": _stuttered,
    "interleaved": _interleaved,
    "words_sorted": _words_sorted,
    "words_doubled": _words_doubled,
    "parts_joined": _parts_joined,
    "words_marked": _words_marked,
    "letters_reversed": _letters_reversed,
    "leetspeak": _leetspeak,
    "letters_spaced": _letters_spaced,
    "letters_stretched": _letters_stretched,
    "languages_mixed": _languages_mixed,
    "base64": _base64,
    "order_numbers": _order_numbers,
    "emoji": _emoji,
    "interjections": _interjections,
    "ascii_art": _ascii_art,
    "keyboard_mash": _keyboard_mash,
    "invented_language": _invented_language,
    **_written("replies"),
    **_prose(*MEASURED_PROSE),
}
