"""Prompts of segments: their tokens, where the segments are, and what fits."""

import pytest
from core_decoders import write_llama
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer

from attncache_core.checkpoints.description import read_checkpoint
from attncache_core.checkpoints.template import Template
from attncache_core.errors import InputTooLong
from attncache_core.text.prompts import Frame
from attncache_core.text.segments import segmented, split, split_at
from attncache_core.text.tokenizer import TextTokenizer

# Special tokens 1 and 2 open every text; the template adds 3 in front of the query and 4, 5 behind it.
FRAME = Frame([1, 2, 3], [4, 5], room=100, opening=2)


@pytest.mark.parametrize(
    ("segments", "separator", "headings", "middle", "spans"),
    [
        ([[10, 11], [20], [30, 31]], [7], None, [10, 11, 7, 20, 7, 30, 31, 7], [(2, 4), (5, 6), (7, 9)]),
        # Without a separator they touch each other.
        ([[10, 11], [20]], [], None, [10, 11, 20], [(2, 4), (4, 5)]),
        # Headings do not belong to segments.
        ([[10, 11], [20]], [7], [[60], [61, 62]], [60, 10, 11, 7, 61, 62, 20, 7], [(3, 5), (8, 9)]),
        # Segments without tokens leave no trace.
        ([[], [10], [], [20]], [7], [[60], [61], [62], [63]], [61, 10, 7, 63, 20, 7], [(3, 4), (6, 7)]),
        ([[]], [7], None, [], []),
    ],
    ids=["plain", "no-separator", "headings", "empty", "nothing"],
)
def test_segments_stand_behind_the_opening_and_the_template_stands_around_the_query(
    segments, separator, headings, middle, spans
):
    found = segmented(FRAME, segments, [90, 91], separator, headings)
    assert found == ([1, 2, *middle, 3, 90, 91, 4, 5], spans, [1, 2])


def test_the_frame_and_the_segments_stay_as_they_are():
    before, segments, headings = [1, 2, 3], [[10], [20]], [[60], [61]]
    frame = Frame(before, [4], room=100, opening=2)
    found = segmented(frame, segments, [90], [7], headings)
    found.ids.append(5)
    found.opening.append(6)
    assert (before, segments, headings) == ([1, 2, 3], [[10], [20]], [[60], [61]])


tokens = st.lists(st.integers(10, 99), max_size=6)


@given(
    segments=st.lists(tokens, max_size=6),
    query=tokens,
    separator=st.lists(st.just(7), max_size=2),
    has_headings=st.booleans(),
    opening=st.integers(0, 2),
)
def test_every_span_holds_its_segment_and_the_rest_does_not_depend_on_segments(
    segments, query, separator, has_headings, opening
):
    frame = Frame([1, 2, 3], [4, 5], room=1000, opening=opening)
    headings = [[60 + index] for index in range(len(segments))] if has_headings else None
    found = segmented(frame, segments, query, separator, headings)
    with_tokens = [segment for segment in segments if segment]
    assert [found.ids[first:end] for first, end in found.spans] == with_tokens
    assert found.opening == frame.before[:opening] == found.ids[:opening]
    tail = [*frame.before[opening:], *query, *frame.after]
    assert found.ids[len(found.ids) - len(tail) :] == tail
    ends = [opening, *(end for _, end in found.spans)]
    assert all(end <= first for end, (first, _) in zip(ends, found.spans, strict=False))
    extra = len(with_tokens) * (len(separator) + has_headings)
    assert len(found.ids) == len(frame.around(query)) + sum(map(len, with_tokens)) + extra


def test_as_many_tokens_fit_as_the_frame_has_room_for():
    frame = Frame([1, 2, 3], [4, 5], room=9, opening=2)
    # Two segments of two tokens, two separators, two headings, and a query of one token.
    arguments = [[10, 11], [20, 21]], [90], [7], [[60], [61]]
    assert len(segmented(frame, *arguments).ids) == 9 + 5
    for more in (([[10, 11, 12], [20, 21]], *arguments[1:]), (arguments[0], [90, 91], *arguments[2:])):
        with pytest.raises(
            InputTooLong, match=r"segments have [89] tokens, the query has [12], and 9 fit together"
        ) as refused:
            segmented(frame, *more)
        assert refused.value.field == "segments"
    with pytest.raises(InputTooLong) as refused:
        segmented(frame, [[10]], [90] * 10, [7])
    assert refused.value.field == "query"


def test_a_real_tokenizer_gives_a_segment_the_same_tokens_wherever_it_stands(tmp_path):
    tokenizer = TextTokenizer(read_checkpoint(write_llama(tmp_path)))
    frame = tokenizer.frame(tokenizer.prompt(Template("Question: ", "\nAnswer:")))
    assert frame.before[: frame.opening] == AutoTokenizer.from_pretrained(tmp_path)("").input_ids
    *segments, query, separator = tokenizer.turns(["my card", "is lost", " the bank", "where is it", "\n\n"])
    found = segmented(frame, segments, query, separator)
    again = segmented(frame, segments[::-1], query, separator)
    places = [[one.ids[first:end] for first, end in one.spans] for one in (found, again)]
    assert places[0] == places[1][::-1] == segments
    text = "<s>my card\n\nis lost\n\n the bank\n\nQuestion: where is it\nAnswer:"
    assert AutoTokenizer.from_pretrained(tmp_path).decode(found.ids) == text


@pytest.mark.parametrize(
    ("length", "opening", "size", "spans"),
    [
        (10, 1, 3, [(1, 4), (4, 7)]),  # the rest is what a third segment would hold: 7 to 9
        (11, 1, 3, [(1, 4), (4, 7), (7, 10)]),
        (10, 0, 3, [(0, 3), (3, 6), (6, 9)]),
        (10, 0, 5, [(0, 5)]),
        (11, 0, 5, [(0, 5), (5, 10)]),
        (10, 0, 10, []),
        (11, 0, 10, [(0, 10)]),
        (2, 1, 4, []),
        (4, 0, 1, [(0, 1), (1, 2), (2, 3)]),
    ],
)
def test_a_text_is_split_into_segments_of_one_size_and_a_rest(length, opening, size, spans):
    ids = list(range(100, 100 + length))
    assert split(ids, opening, size) == (ids, spans, ids[:opening])


@given(length=st.integers(1, 60), opening=st.integers(0, 3), size=st.integers(1, 20))
def test_the_rest_of_a_split_text_has_between_one_token_and_a_segments_size(length, opening, size):
    found = split(range(length), opening, size)
    assert found.ids == list(range(length))
    ends = [opening, *(end for _, end in found.spans)]
    assert [first for first, _ in found.spans] == ends[:-1]
    assert all(end - first == size for first, end in found.spans)
    if length > opening:
        assert 1 <= length - ends[-1] <= size


WRITTEN = {7: "\n", 8: ".\n", 9: "\n\n"}  # tokens that hold a separator; others are words


def divided(ids, frame, separator="\n"):
    return split_at(ids, frame, [WRITTEN.get(token, f" {token}") for token in ids], separator)


words = st.lists(st.integers(10, 99), max_size=6)


@given(
    pieces=st.lists(words, min_size=1, max_size=6), between=st.lists(st.sampled_from([7, 8, 9]), min_size=5)
)
def test_a_text_is_divided_at_its_separators_and_not_at_those_of_its_template(pieces, between):
    frame = Frame([1, 2, 7, 3], [7, 5], room=100, opening=2)
    *segments, rest = pieces
    text = [token for piece, end in zip(segments, between, strict=False) for token in (*piece, end)]
    ids = frame.around([*text, *rest])
    found = divided(ids, frame)
    assert (found.ids, found.opening) == (ids, [1, 2])
    assert all(len(frame.before) <= first < end for first, end in found.spans)
    if rest:
        assert [ids[first:end] for first, end in found.spans] == [segment for segment in segments if segment]


def test_a_token_that_holds_a_part_of_a_separator_belongs_to_no_segment():
    # A separator of two line breaks is in one token, in two, or in parts of two.
    for between in ([9], [7, 7], [8, 7]):
        ids = FRAME.around([10, 11, *between, 20, *between, 30])
        found = divided(ids, FRAME, "\n\n")
        assert [ids[first:end] for first, end in found.spans] == [[10, 11], [20]]


def test_a_text_that_holds_no_separator_in_front_of_its_end_is_not_divided():
    for text in ([10, 11], [], [10, 7], [10, 8], [7]):
        assert divided(FRAME.around(text), FRAME).spans == []
    assert divided(FRAME.around([10, 7, 11]), FRAME, "\n\n").spans == []


def test_a_separator_is_found_where_the_decoder_removes_the_first_space_of_a_text(tmp_path):
    file = str(write_llama(tmp_path) / "tokenizer.json")
    as_published = Tokenizer.from_file(file)
    # As Llama 2's decoder: a token alone loses the space that begins it.
    as_published.decoder = decoders.Sequence(
        [decoders.Replace("\u0120", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    as_published.save(file)
    tokenizer = TextTokenizer(read_checkpoint(tmp_path))
    frame = tokenizer.frame(tokenizer.default_prompt)
    (ids,) = tokenizer.turns(["my card ### is lost ### where is it"])
    ids = frame.around(ids)
    found = split_at(ids, frame, tokenizer.written_behind(ids), " ###")
    assert tokenizer.decode([ids[first:end] for first, end in found.spans]) == ["my card", "is lost"]
    assert split_at(ids, frame, tokenizer.written(ids), " ###").spans == []


def test_a_separator_is_found_behind_a_character_of_several_tokens(tmp_path):
    tokens = {"<s>": 0, **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)}, "a": 257, "b": 258}
    by_bytes = Tokenizer(models.BPE(tokens, [], byte_fallback=True))
    by_bytes.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    write_llama(tmp_path)
    by_bytes.save(str(tmp_path / "tokenizer.json"))
    tokenizer = TextTokenizer(read_checkpoint(tmp_path))
    (ids,) = tokenizer.turns(["a\U0001f600\n\nb"])
    assert tokenizer.decode([ids]) == ["a\U0001f600\n\nb"]
    assert tokenizer.written_behind(ids)[-3:] == ["\n", "\n", "b"]
