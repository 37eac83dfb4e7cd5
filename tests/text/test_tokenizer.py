"""TextTokenizer gives the same tokens as the library that made the checkpoint."""

import json

import numpy as np
import pytest
from core_decoders import write_decoder_tokenizer, write_llama
from core_models import CLS, PLAIN_WORDS, SEP, WORDS, write_json, write_sentence_transformer, write_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from sentence_transformers import SentenceTransformer
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer

from attncache_core.checkpoints.description import read_checkpoint
from attncache_core.checkpoints.template import Template
from attncache_core.engine.prefill import PrefillEngine
from attncache_core.errors import InputTooLong, InvalidInput, UnsupportedModel
from attncache_core.text.pairs import truncated_sequences
from attncache_core.text.prompts import Prompt, SequencePlan
from attncache_core.text.tokenizer import TextTokenizer

PROMPT = {"prompts": {"ask": "query: ", "other": "my "}, "default_prompt_name": "ask"}
texts_of_words = st.lists(st.sampled_from([*WORDS, "Card", "cards", "zebra"]), max_size=30).map(" ".join)
any_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


def write(folder, **parts):
    checkpoint = read_checkpoint(write_sentence_transformer(folder, **parts))
    return checkpoint, TextTokenizer(checkpoint)


@pytest.fixture(scope="module")
def both(tiny_checkpoint):
    """The tiny model's tokenizer, and the same by transformers."""
    return TextTokenizer(tiny_checkpoint), AutoTokenizer.from_pretrained(tiny_checkpoint.folder)


@given(st.lists(st.one_of(texts_of_words, any_text), min_size=1, max_size=5))
def test_tokens_are_those_of_the_hugging_face_tokenizer(both, texts):
    ours, theirs = both
    assert ours.tokenize(texts, truncate=True) == theirs(texts)["input_ids"]


@pytest.mark.parametrize(
    ("of_folder", "of_tokenizer", "config", "expected"),
    [
        (20, 512, {}, 20),
        (None, 512, {}, 512),
        (None, 33, {}, 33),
        (None, 512, {"max_position_embeddings": 64}, 64),
        (400, 512, {"max_position_embeddings": 64}, 64),
    ],
)
def test_longest_sequence_is_the_smallest_of_the_limits(tmp_path, of_folder, of_tokenizer, config, expected):
    write_sentence_transformer(tmp_path, settings={"max_seq_length": of_folder}, **config)
    write_tokenizer(tmp_path, longest=of_tokenizer)
    assert TextTokenizer(read_checkpoint(tmp_path)).max_tokens == expected


@pytest.mark.parametrize(("limit", "longest"), [(3, 3), (5, 5), (19, 19), (20, 20), (21, 20), (None, 20)])
def test_operators_limit_applies_if_it_is_below_the_models(tmp_path, limit, longest):
    checkpoint, _ = write(tmp_path, settings={"max_seq_length": 20})
    tokenizer = TextTokenizer(checkpoint, limit)
    words = [5 + WORDS.index(word) for word in ["my", "card"] * 20]
    assert tokenizer.max_tokens == longest
    assert tokenizer.tokenize(["my card " * 20], truncate=True) == [[CLS, *words[: longest - 2], SEP]]


def test_engine_cuts_to_the_operators_limit(tiny_checkpoint):
    engine = PrefillEngine.load(tiny_checkpoint, dtype="float32", max_tokens=6)
    (ids,) = engine.tokenize(["my card is lost where is it"])
    assert engine.tokenizer.max_tokens == engine.info().max_tokens == len(ids) == 6
    assert ids[-1] == SEP
    assert truncated_sequences([ids, *engine.tokenize(["my card is lost", "card"])]) == 1


@pytest.mark.parametrize(("words", "refused"), [(4, False), (5, True), (50, True)])
def test_text_that_is_too_long_is_refused_with_its_index_if_truncation_is_declined(tmp_path, words, refused):
    _, tokenizer = write(tmp_path, settings={"max_seq_length": 6})
    texts = ["card", " ".join(PLAIN_WORDS[:1] * words)]
    if not refused:
        assert [len(ids) for ids in tokenizer.tokenize(texts, truncate=False)] == [3, 6]
        return
    with pytest.raises(InputTooLong, match=r"inputs\[1\] has more than 6 tokens") as caught:
        tokenizer.tokenize(texts, truncate=False)
    assert caught.value.field == "inputs[1]"
    assert PLAIN_WORDS[0] not in str(caught.value)
    # Refusing does not change later calls.
    assert len(tokenizer.tokenize(texts, truncate=True)[1]) == 6


@pytest.fixture(scope="module")
def prompted(tmp_path_factory):
    """The tokenizer of the tiny model with a default prompt."""
    _, tokenizer = write(tmp_path_factory.mktemp("prompted"), prompts=PROMPT)
    return tokenizer


@given(texts_of_words)
def test_default_prompt_stands_before_every_text(both, prompted, text):
    _, plain = both
    assert prompted.tokenize([text], truncate=True) == [plain("query: " + text)["input_ids"]]
    assert prompted.prompt_tokens == 3  # [CLS] query :, without the closing token


@pytest.mark.parametrize("prompts", [None, {"prompts": {"ask": "query: "}, "default_prompt_name": None}])
def test_no_default_prompt_takes_no_tokens(tmp_path, prompts):
    _, tokenizer = write(tmp_path, prompts=prompts)
    assert tokenizer.prompt_tokens == 0
    assert tokenizer.tokenize(["card"], truncate=True) == [[CLS, 5 + WORDS.index("card"), SEP]]


@pytest.mark.parametrize("lowercase", [True, False])
def test_texts_are_lowercased_if_the_folder_says_so_but_for_special_tokens(tmp_path, lowercase):
    write_sentence_transformer(tmp_path, settings={"do_lower_case": lowercase})
    write_tokenizer(tmp_path, lowercase=False)
    tokenizer, theirs = (
        TextTokenizer(read_checkpoint(tmp_path)),
        SentenceTransformer(str(tmp_path), device="cpu"),
    )
    for text, same in (
        ("LOST Card", "lost card" if lowercase else "zebra zebra"),
        ("LOST [MASK] card", "lost [MASK] card" if lowercase else "zebra [MASK] card"),
    ):
        ours = tokenizer.tokenize([text], truncate=True)
        assert ours == theirs.preprocess([text])["input_ids"].tolist()
        assert ours == tokenizer.tokenize([same], truncate=True)


@pytest.mark.parametrize(
    ("files", "settings", "words"),
    [
        (
            {"vocab.json": b'{"a": 0}', "merges.txt": b"#version: 0.2\n"},
            {"tokenizer_class": "CTRLTokenizer"},
            "a-model has no fast tokenizer",
        ),
        (
            {"spm.model": b"\x0a\x0e\x0a\x05"},
            {"tokenizer_class": "DebertaV2Tokenizer"},
            "packages sentencepiece and protobuf",
        ),
        ({}, {"truncation_side": "left"}, "set truncation_side to right"),
    ],
    ids=["slow", "sentencepiece", "cuts-the-beginning"],
)
def test_tokenizer_that_is_not_supported_is_refused_with_the_reason(tmp_path, files, settings, words):
    folder = write_sentence_transformer(tmp_path / "a-model")
    path = folder / "tokenizer_config.json"
    if files:
        (folder / "tokenizer.json").unlink()
    else:
        settings = json.loads(path.read_text(encoding="utf-8")) | settings
    for name, content in files.items():
        (folder / name).write_bytes(content)
    write_json(path, settings)
    with pytest.raises(UnsupportedModel, match=words):
        TextTokenizer(read_checkpoint(folder))


@pytest.mark.parametrize("closing", [True, False])
def test_turns_in_a_frame_are_the_tokens_of_the_text_between_prefix_and_suffix(tmp_path, closing):
    folder = write_llama(tmp_path)
    write_decoder_tokenizer(folder, closing=closing)
    tokenizer = TextTokenizer(read_checkpoint(folder), max_tokens=40)
    prompt = tokenizer.prompt(Template("ask:\n", "\nanswer:"))
    frame = tokenizer.frame(prompt)
    turns = ["where is my card", " money"]
    ids = [token for turn in tokenizer.turns(turns) for token in turn]
    # A line break ends the words on both sides, so here the text has the same tokens as a whole.
    assert tokenizer.tokenize(["".join(turns)], truncate=False, prompt=prompt) == [frame.around(ids)]
    assert frame.before[0] == 0
    assert (frame.after[-1] == 1) == closing
    assert len(frame.before) == prompt.sequence_plans[0].prompt_tokens
    assert len(frame.before) + frame.room + len(frame.after) == 40


def test_turn_has_the_same_tokens_whatever_surrounds_it(tiny_checkpoint):
    tokenizer = TextTokenizer(tiny_checkpoint)
    turns = ["my lost card", "Cards", " ", "help"]
    assert tokenizer.turns(turns) == [tokenizer.turns([turn])[0] for turn in turns]
    assert tokenizer.turns([" "]) == [[]]
    frame = tokenizer.frame(tokenizer.default_prompt)
    assert (frame.before, frame.after) == ([CLS], [SEP])


def test_frame_without_room_for_a_text_is_refused(tmp_path):
    tokenizer = TextTokenizer(read_checkpoint(write_llama(tmp_path)), max_tokens=12)
    prompt = tokenizer.prompt(Template("", " card"), continuation_tokens=9)
    plan = SequencePlan(0, continuation=(5,) * 9)
    assert tokenizer.frame(Prompt(prompt.template, (plan,))).room == 1
    with pytest.raises(InvalidInput) as refused:
        tokenizer.frame(Prompt(Template("card", " card"), (plan,)))
    assert refused.value.field == "template"


def test_half_of_a_surrogate_pair_is_refused_as_invalid_input(both):
    ours, _ = both
    for text in ("\ud800", "\ud800" + "a" * 100_000, ("my", "\ud800" + "a" * 100_000)):
        with pytest.raises(InvalidInput, match="halves of surrogate pairs") as refused:
            ours.tokenize(["my card", text], truncate=True)
        assert refused.value.field == "inputs[1]"


@pytest.mark.parametrize("text", [None, 5, float("nan"), b"my", ("my", 5), ("my",), ["my", "card"]])
def test_what_is_no_text_is_refused_with_its_index(both, text):
    ours, _ = both
    with pytest.raises(InvalidInput, match=r"inputs\[1\] must be a string") as refused:
        ours.tokenize(["my card", text], truncate=True)
    assert refused.value.field == "inputs[1]"


def test_texts_of_any_iterable_are_tokenised(tiny_checkpoint):
    texts = ["my card", "help"]
    engine = PrefillEngine.load(tiny_checkpoint, dtype="float32")
    for listed in (iter(texts), np.array(texts), dict.fromkeys(texts).keys()):
        assert engine.tokenizer.tokenize(listed, truncate=True) == engine.tokenize(texts)
    for listed in (iter(texts), np.array(texts)):
        np.testing.assert_array_equal(engine.embed(listed), engine.embed(texts))


def with_tokenizer(folder, tokenizer, **settings):
    """Write the tiny model with another tokenizer, and return its description."""
    write_sentence_transformer(folder, **settings)
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})
    return read_checkpoint(folder)


def closed(model, kind=0):
    """A tokenizer that puts [CLS] and [SEP] around a text, whose tokens have this type."""
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["[CLS]", "[SEP]"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"[CLS] $A:{kind} [SEP]", special_tokens=[("[CLS]", 0), ("[SEP]", 1)]
    )
    return tokenizer


FEW_WORDS = {"[CLS]": 0, "[SEP]": 1, "A": 2, "C": 3}


def test_text_that_the_tokenizer_has_no_token_for_is_refused_with_its_index(tmp_path):
    tokenizer = TextTokenizer(with_tokenizer(tmp_path, closed(models.WordLevel(FEW_WORDS))))
    assert tokenizer.tokenize(["A", "C A"], truncate=True) == [[0, 2, 1], [0, 3, 2, 1]]
    pairs, template = [("A", "C"), ("C", "what")], Template("", "", " A")
    for refused, field in (
        (lambda: tokenizer.tokenize(["A", "C what"], truncate=True), "inputs[1]"),
        (lambda: tokenizer.tokenize(["what"], truncate=True), "inputs[0]"),
        (lambda: tokenizer.tokenize(pairs, truncate=True), "inputs[1]"),
        (lambda: tokenizer.pieces(["A", "what"]), "inputs[1]"),
        (lambda: tokenizer.turns(["A", "what"], "segments"), "segments"),
        (lambda: tokenizer.continuations(template, ["C", "what"]), "labels[1]"),
        (lambda: tokenizer.prompt(Template("what ")), "template"),
    ):
        with pytest.raises(InvalidInput, match="the model's tokenizer has no token for") as caught:
            refused()
        assert caught.value.field == field


def test_text_that_is_too_long_to_be_tokenised_as_a_whole_is_refused_with_its_index(tmp_path):
    tokenizer = TextTokenizer(with_tokenizer(tmp_path, closed(models.WordLevel(FEW_WORDS))))
    with pytest.raises(InputTooLong, match=r"inputs\[1\] has a text of 70000 characters") as refused:
        tokenizer.pieces(["A", "A" * 70_000])
    assert refused.value.field == "inputs[1]"


def test_equal_texts_have_equal_tokens_whatever_dropout_the_file_names(tmp_path):
    merges = [("A", "C"), ("AC", "AC"), ("ACAC", "AC")]
    model = models.BPE(FEW_WORDS | {"AC": 4, "ACAC": 5, "ACACAC": 6}, merges, dropout=0.5)
    tokenizer = TextTokenizer(with_tokenizer(tmp_path, closed(model)))
    assert tokenizer.tokenize(["ACACAC"] * 64, truncate=True) == [[0, 6, 1]] * 64


@pytest.mark.parametrize(
    ("normalizer", "kind", "warned"),
    [
        (normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()]), "BertTokenizer", "such as ﬁ"),
        (normalizers.Lowercase(), "PreTrainedTokenizerFast", None),
        (normalizers.BertNormalizer(lowercase=True), "BertTokenizer", None),
        (normalizers.BertNormalizer(lowercase=False), "BertTokenizer", "texts with capital letters"),
    ],
)
def test_tokens_that_are_not_those_of_tokenizer_json_are_warned_about(
    tmp_path, caplog, normalizer, kind, warned
):
    letters = [chr(code) for code in range(33, 127)]
    ids = {"[PAD]": 0, "[UNK]": 1} | {"[CLS]": 2, "[SEP]": 3, "[MASK]": 4}
    ids |= {piece: 5 + number for number, piece in enumerate([*letters, *("##" + x for x in letters)])}
    tokenizer = Tokenizer(models.WordPiece(ids, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, pre_tokenizers.BertPreTokenizer()
    tokenizer.enable_truncation(3)
    checkpoint = with_tokenizer(tmp_path, tokenizer, vocab_size=len(ids))
    write_json(tmp_path / "tokenizer_config.json", {"tokenizer_class": kind})
    TextTokenizer(checkpoint)
    assert warned in caplog.text if warned else not caplog.text


@pytest.mark.parametrize(
    ("tokenizer", "settings", "message"),
    [
        (closed(models.WordLevel({"[CLS]": 0, "[SEP]": 1})), {}, "has special tokens only"),
        (closed(models.WordLevel(FEW_WORDS)), {"settings": {"max_seq_length": 1}}, "allow longer texts by"),
        (closed(models.WordLevel(FEW_WORDS)), {"settings": {"max_seq_length": 2}}, "allow longer texts by"),
        (closed(models.WordLevel(FEW_WORDS), kind=1), {}, "other types than 0"),
    ],
)
def test_tokenizer_that_can_give_no_right_answer_is_refused(tmp_path, tokenizer, settings, message):
    checkpoint = with_tokenizer(tmp_path, tokenizer, **settings)
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    write_json(
        tmp_path / "tokenizer_config.json", named | {"model_input_names": ["input_ids", "token_type_ids"]}
    )
    with pytest.raises(UnsupportedModel, match=message) as refused:
        TextTokenizer(checkpoint)
    assert refused.value.field == "model"


@given(text=texts_of_words)
def test_text_cut_at_its_beginning_is_cut_as_by_transformers(spaced, text):
    ours, theirs = spaced
    for longest, tokenizer in ours.items():
        expected = theirs(text, truncation=True, max_length=longest)["input_ids"]
        assert tokenizer.cut_at_beginning(text, tokenizer.default_prompt, "inputs")[0] == expected


@pytest.fixture(scope="module")
def spaced(tmp_path_factory):
    """Tokenizers for three lengths, and that of transformers, which loads slowly.

    They put a space before each text, which becomes a token without a character.
    """
    alphabet = {
        letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()), 2)
    }
    tokenizer = Tokenizer(models.BPE({"<s>": 0, "</s>": 1} | alphabet, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 1), ("<s>", 0), trim_offsets=True)
    checkpoint = with_tokenizer(tmp_path_factory.mktemp("spaced"), tokenizer)
    theirs = AutoTokenizer.from_pretrained(checkpoint.folder, truncation_side="left")
    return {longest: TextTokenizer(checkpoint, max_tokens=longest) for longest in (4, 6, 9)}, theirs


def test_tokenizer_that_has_no_token_for_the_word_text_has_frames_and_pairs(tmp_path):
    letters = closed(models.BPE(FEW_WORDS, []))
    letters.post_processor = processors.BertProcessing(("[SEP]", 1), ("[CLS]", 0))
    tokenizer = TextTokenizer(with_tokenizer(tmp_path, letters))
    frame = tokenizer.frame(tokenizer.default_prompt)
    assert (frame.before, frame.after) == ([0], [1])
    assert list(tokenizer.tokenize([("AC", "C")], truncate=True)[0]) == [0, 2, 3, 1, 3, 1]
