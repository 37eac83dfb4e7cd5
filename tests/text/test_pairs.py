"""Pairs of texts: tokens and types are those of transformers, also of a pair that is cut."""

import numpy as np
import pytest
import torch
from core_models import write_model
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pair_models import (
    write_bge_reranker_v2_m3,
    write_deberta_v3,
    write_gte_reranker_modernbert,
    write_ms_marco_minilm,
    write_qwen3_reranker,
)
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer

from attncache_core.checkpoints.description import read_checkpoint
from attncache_core.errors import InputTooLong, InvalidInput
from attncache_core.text.pairs import NoRoom, PairTokens, kept_tokens, truncated_sequences
from attncache_core.text.prompts import Prompt
from attncache_core.text.token_batch import pack
from attncache_core.text.tokenizer import TextTokenizer

WRITERS = {
    "bert": write_ms_marco_minilm,
    "xlm-roberta": write_bge_reranker_v2_m3,
    "deberta": write_deberta_v3,
    "modernbert": write_gte_reranker_modernbert,
    "qwen3": write_qwen3_reranker,
}
WORDS = ["where", "is", "my", "parcel", "the", "card", "?", "包裹", "ß", "[SEP]", "</s>", "<|im_end|>"]
a_text = st.lists(st.sampled_from(WORDS), max_size=30).map(" ".join)


@pytest.fixture(scope="module", params=WRITERS)
def checkpoint(request, tmp_path_factory):
    return read_checkpoint(WRITERS[request.param](tmp_path_factory.mktemp("models") / request.param))


@pytest.fixture(scope="module")
def cutting(checkpoint):
    """A tokenizer for each length, and that of transformers. Loading them takes longer than cutting."""
    ours = {longest: TextTokenizer(checkpoint, longest) for longest in (8, 9, 30, 31, 512)}
    return ours, AutoTokenizer.from_pretrained(checkpoint.folder)


@settings(max_examples=30)
@given(a_text, a_text, st.sampled_from([8, 9, 30, 512]))
@example("", "", 512)
@example("where " * 30, "", 9)
def test_tokens_and_types_of_a_pair_are_those_of_transformers(checkpoint, cutting, first, second, longest):
    ours, theirs = cutting
    expected = theirs([(first, second)], truncation=True, max_length=longest)
    (found,) = ours[longest].tokenize([(first, second)], truncate=True)
    assert [list(found)] == expected["input_ids"]
    types = expected.get("token_type_ids", [[0]])[0]
    if checkpoint.token_types < 2:
        types = [0]
    assert found.types == (types if any(types) else None)


# Words of very different numbers of tokens per character, so that more characters may be fewer tokens.
many_words = st.builds(
    lambda words, times: " ".join(words * times),
    st.lists(st.sampled_from(WORDS), min_size=1, max_size=3),
    st.integers(1, 120),
)


@settings(max_examples=8)
@given(many_words, many_words, st.sampled_from([30, 31]))
@example("where " * 200, "? " * 300, 30)
@example("where " * 200, "? " * 300, 31)
@example("? " * 300, "where " * 200, 30)
@example("? " * 300, "where " * 200, 31)
def test_pair_whose_texts_are_cut_before_they_are_tokenised_is_cut_as_by_transformers(
    cutting, first, second, longest
):
    ours, theirs = cutting
    expected = theirs([(first, second)], truncation="longest_first", max_length=longest)
    (found,) = ours[longest].tokenize([(first, second)], truncate=True)
    assert [list(found)] == expected["input_ids"]
    assert truncated_sequences([found]) == (len(theirs([(first, second)])["input_ids"][0]) > longest)


@pytest.mark.parametrize("side", ["longest_first", "only_first"])
@pytest.mark.parametrize("room", range(1, 8))
def test_texts_are_cut_as_the_tokenizers_library_cuts_them(side, room):
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.enable_truncation(room, strategy=side)
    for first, second in np.ndindex(12, 12):
        try:
            ids = tokenizer.encode("a " * first, "b " * second).ids
        except Exception:
            with pytest.raises(NoRoom):
                kept_tokens(first, second, room, "first")
            continue
        kept = kept_tokens(first, second, room, "first" if side == "only_first" else "longest")
        assert kept == (ids.count(0), ids.count(1))


def test_a_pair_that_is_too_long_is_refused_if_truncation_is_declined(checkpoint):
    tokenizer = TextTokenizer(checkpoint, 12)
    tokenizer.tokenize([("my", "card")], truncate=False)
    with pytest.raises(InputTooLong, match="more than 12 tokens") as refused:
        tokenizer.tokenize(["my", ("my", "card"), ("my", "card " * 30)], truncate=False)
    assert refused.value.field == "inputs[2]"


def test_pairs_stand_beside_texts_and_count_with_them(checkpoint):
    tokenizer = TextTokenizer(checkpoint, 20)
    texts = ["my card", ("my", "card"), ("my", "parcel"), "where"]
    found = tokenizer.tokenize(texts, truncate=False)
    alone = [tokenizer.tokenize([text], truncate=False)[0] for text in texts]
    assert list(found) == alone
    assert [isinstance(ids, PairTokens) for ids in found] == [False, True, True, False]
    tokens = sum(map(len, found))
    tokenizer.tokenize(texts, truncate=False, max_total_tokens=tokens)
    with pytest.raises(InputTooLong, match="inputs make sequences with"):
        tokenizer.tokenize(texts, truncate=False, max_total_tokens=tokens - 1)


def test_only_the_first_text_is_cut_if_the_prompt_says_so(checkpoint):
    theirs = AutoTokenizer.from_pretrained(checkpoint.folder)
    tokenizer = TextTokenizer(checkpoint, 30)
    prompt = Prompt(tokenizer.default_prompt.template, tokenizer.default_prompt.sequence_plans, cut="first")
    pair = "where is my parcel " * 10, "the card"
    (found,) = tokenizer.tokenize([pair], truncate=True, prompt=prompt)
    assert list(found) == theirs(*pair, truncation="only_first", max_length=30)["input_ids"]
    with pytest.raises(InvalidInput, match=r"inputs\[1\]: there is no room left") as refused:
        tokenizer.tokenize([pair, ("my", "the card " * 20)], truncate=True, prompt=prompt)
    assert refused.value.field == "inputs[1]"


def test_a_pair_takes_no_template_of_one_text(tmp_path):
    checkpoint = read_checkpoint(write_model(tmp_path))
    tokenizer = TextTokenizer(checkpoint)
    query = tokenizer.prompt(type(checkpoint.template)("query: "))
    with pytest.raises(InvalidInput, match="takes no template") as refused:
        tokenizer.tokenize(["my", ("my", "card")], truncate=True, prompt=query)
    assert refused.value.field == "inputs[1]"


def test_types_of_pairs_are_packed_with_their_tokens_and_move_with_them():
    pairs = [PairTokens([5, 6, 7], [0, 1, 1]), [8, 9], PairTokens([1, 2, 3])]
    batch = pack(pairs)
    assert batch.ids.tolist() == [8, 9, 5, 6, 7, 1, 2, 3]
    assert batch.types.tolist() == [0, 0, 0, 1, 1, 0, 0, 0]
    moved, index = batch.reordered(np.array([1, 2, 0]))
    assert moved.types.tolist() == [0, 1, 1, 0, 0, 0, 0, 0]
    assert torch.equal(batch.types[index], moved.types)
    assert pack([[1, 2], PairTokens([3])]).types is None


def test_a_pair_is_a_sequence_of_its_token_ids():
    pair = PairTokens([5, 6, 7], [0, 0, 1])
    assert (len(pair), list(pair), pair[1], pair[1:]) == (3, [5, 6, 7], 6, [6, 7])
    assert np.asarray(pair).tolist() == [5, 6, 7]
    assert pair != PairTokens([5, 6, 7])
