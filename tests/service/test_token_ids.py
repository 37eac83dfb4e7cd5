"""Token ids instead of texts, and texts that are cut at their beginning."""

from types import SimpleNamespace

import numpy as np
import pytest
from core_models import SEP, write_json, write_sentence_transformer
from fake_engine import serving
from hypothesis import example, given, settings
from hypothesis import strategies as st
from published_tokenizers import (
    CORPUS,
    write_gemma_tokenizer,
    write_modernbert_tokenizer,
    write_qwen_tokenizer,
    write_xlm_roberta_tokenizer,
)
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from attncache_core import InputTooLong, InvalidInput, PrefillEngine, Template
from attncache_core import normalize as unit_length
from attncache_core.checkpoints.description import read_checkpoint
from attncache_core.text.tokenizer import TextTokenizer
from service.batching.sources import Texts, TokenSequences, bare_prompt, cut_left


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = write_sentence_transformer(tmp_path_factory.mktemp("models") / "tiny")
    checkpoint = read_checkpoint(folder).adapted(template=Template("my ", " ?"))
    return PrefillEngine.load(checkpoint, dtype="float32", max_tokens=12)


def made(engine, source, prompt=None, max_total_tokens=10**6):
    parts = source.tokenize(engine, prompt or engine.tokenizer.default_prompt, b"", max_total_tokens)
    return [list(ids) for part in parts for ids in part.sequences]


@pytest.mark.parametrize("direction", ["right", "left"])
async def test_token_ids_are_the_tokens_of_the_text_without_the_template(tmp_path, direction):
    folder = write_sentence_transformer(tmp_path / "tiny")
    plain = PrefillEngine.load(read_checkpoint(folder), dtype="float32", max_tokens=12)
    texts = ["where is my card", "the bank is where my card was lost when I was at the bank ?"]
    ids = PrefillEngine.load(read_checkpoint(folder), dtype="float32").tokenize(texts)
    in_template = read_checkpoint(folder).adapted(template=Template("my ", " ?"))
    async with (
        serving(PrefillEngine.load(in_template, dtype="float32", max_tokens=12)) as of_ids,
        serving(plain) as of_texts,
    ):
        cut = {"truncate": True, "truncation_direction": direction}
        found = (await of_ids.post("/embed", json={"inputs": ids, **cut})).json()
        expected = (await of_texts.post("/embed", json={"inputs": texts, **cut})).json()
        single = (await of_ids.post("/embed", json={"inputs": ids[0], "dimensions": 8})).json()
        refused = await of_ids.post("/embed", json={"inputs": ids[0], "prompt_name": "ask"})
    np.testing.assert_allclose(found, expected, atol=1e-6)
    np.testing.assert_allclose(single, unit_length(np.array(expected)[:1, :8]), atol=1e-6)
    assert (refused.status_code, refused.json()["error"]["field"]) == (400, "prompt_name")


def test_long_sequences_are_cut_at_a_side_or_refused(engine):
    prompt, ids = bare_prompt(engine), list(range(5, 25))
    for cut, kept in (("right", ids[:12]), ("left", ids[-12:])):
        assert made(engine, TokenSequences([[7], ids], True, cut), prompt) == [[7], kept]
    for cut, kept in (("right", [*ids[:11], SEP]), ("left", [*ids[-11:], SEP])):
        assert made(engine, TokenSequences([[*ids, SEP]], True, cut), prompt) == [kept]
    with pytest.raises(InputTooLong) as caught:
        made(engine, TokenSequences([[7], ids], False), prompt)
    assert caught.value.field == "inputs[1]"


def test_sequences_come_in_parts_and_are_limited_together(engine):
    source = TokenSequences([[5] * 10] * 250, True)
    parts = list(source.tokenize(engine, bare_prompt(engine), b"", 2500))
    assert [len(part.sequences) for part in parts] == [102, 102, 46]
    assert (source.count, source.characters) == (250, 10_000)
    with pytest.raises(InputTooLong, match="a request may have 2499"):
        made(engine, source, bare_prompt(engine), 2499)


def test_number_that_is_no_token_id_is_refused_with_its_sequence(engine):
    assert made(engine, TokenSequences([[engine.vocabulary - 1]], True), bare_prompt(engine))
    with pytest.raises(InvalidInput, match=f"0 to {engine.vocabulary - 1}") as caught:
        made(engine, TokenSequences([[7], [engine.vocabulary, 7]], True), bare_prompt(engine))
    assert caught.value.field == "inputs[1]"


def write_tokenizer_of_numbers(folder):
    """Write a tokenizer that divides a number into threes from its beginning on, as Llama 3's does."""
    words = ["?", *(f"{number:0{width}}" for width in (1, 2, 3) for number in range(10**width))]
    tokenizer = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), "isolated")
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})


TOKENIZERS = {
    "qwen": write_qwen_tokenizer,
    "gemma": write_gemma_tokenizer,
    "modernbert": write_modernbert_tokenizer,
    "xlm-roberta": lambda folder: write_xlm_roberta_tokenizer(folder, 512),
    "numbers": write_tokenizer_of_numbers,
}


@pytest.fixture(params=TOKENIZERS, scope="module")
def tokenizer(request, tmp_path_factory):
    """The tokenizer of a model with sequences of 16 tokens."""
    folder = write_sentence_transformer(tmp_path_factory.mktemp("models") / "tiny")
    (folder / "tokenizer_config.json").unlink()
    TOKENIZERS[request.param](folder)
    return TextTokenizer(read_checkpoint(folder), 16)


@settings(max_examples=20)
@given(
    parts=st.lists(st.sampled_from([*CORPUS, " ", "?", "!?" * 20, "中文" * 10, "1234567"]), min_size=1),
    times=st.integers(1, 60),
    template=st.sampled_from([Template(), Template("a: ", "\nQuery:"), Template("", " ?")]),
)
@example(["1234567890"], 100, Template())
@example(["where is it?"], 30, Template("", "\nQuery:"))
def test_left_cut_keeps_the_last_tokens_of_the_whole_text_in_its_template(tokenizer, parts, times, template):
    text, prompt = "".join(parts) * times, tokenizer.prompt(template)
    engine = SimpleNamespace(
        tokenizer=tokenizer,
        tokenize=lambda texts, truncate, prompt: tokenizer.tokenize(texts, truncate=truncate, prompt=prompt),
    )
    [found] = cut_left(engine, [text], prompt, 10**6)
    whole = tokenizer._tokenizer.encode(template.around(text))
    of_front = len(template.prefix)
    front = (
        [token for token, (_, stop) in zip(whole.ids[:16], whole.offsets, strict=False) if stop <= of_front]
        if len(whole.ids) > 16
        else []
    )
    assert found == [*front, *whole.ids[max(0, len(whole.ids) - 16) + len(front) :]]


def test_limit_of_a_request_is_named_also_if_a_later_part_exceeds_it(engine):
    with pytest.raises(InputTooLong, match="with 501 tokens or more, and a request may have 500:"):
        made(engine, Texts(["where is my card " * 9] * 200, True), max_total_tokens=500)


def test_left_cut_obeys_the_same_limits(engine):
    with pytest.raises(InputTooLong, match="a request may have 20"):
        made(engine, Texts(["where is my card " * 9] * 2, True, "left"), max_total_tokens=20)
    with pytest.raises(InputTooLong) as caught:
        made(engine, Texts(["card", "where is my card " * 9], False, "left"))
    assert caught.value.field == "inputs[1]"
    with pytest.raises(InvalidInput) as refused:
        made(engine, Texts([("a", "b")], True, "left"))
    assert refused.value.field == "truncation_direction"


@pytest.mark.parametrize("front", ["where is my card ? " * 5000, "x" * 60_000 + " ", "x " * 9], ids=len)
def test_end_of_a_text_fills_the_room_in_the_template_whatever_is_in_front_of_it(engine, front):
    end = "when was the money sent to the bank"
    ids, short = made(engine, Texts([front + end, "where ?"], True, "left"))
    [of_end, of_short] = engine.tokenizer.turns([end, "where ?"])
    frame = engine.tokenizer.frame(engine.tokenizer.default_prompt)  # [CLS], the template and [SEP]
    assert [ids, short] == [frame.around(of_end[-8:]), frame.around(of_short)]


def test_end_of_a_text_with_long_tokens_fills_the_room(engine):
    # Unknown words are one token each, however long they are.
    text = " ".join("x" * 90 for _ in range(50))
    [ids] = made(engine, Texts([text], True, "left"))
    assert len(ids) == 12
    with pytest.raises(InputTooLong, match="characters") as caught:
        made(engine, Texts(["where", "x" * 10**6 + " card" * 3], True, "left"))
    assert caught.value.field == "inputs[1]"


@pytest.mark.parametrize("given", ["left", "right"])
async def test_direction_is_refused_for_a_conversation(given):
    body = {"session_id": "a", "transcript": "b", "truncation_direction": given}
    async with serving() as client:
        refused = await client.post("/embed", json=body)
    assert (refused.status_code, refused.json()["error"]["field"]) == (400, "truncation_direction")
