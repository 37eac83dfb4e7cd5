"""What is NaN or infinite is told of the texts it came to, of all of them and of no others.

The models are real ones with damaged weights: the embedding of one word is NaN.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from command_line import model_arguments, run
from core_decoders import write_llama
from core_models import (
    COMPUTING,
    DTYPES,
    QUANTIZATIONS,
    SPECIAL,
    VOCABULARY,
    attention_by,
    damage_weights,
    random_sequences,
    random_text,
    write_model,
    write_sentence_transformer,
)
from families import CASES, write_family
from hypothesis import given
from hypothesis import strategies as st

from attncache_core import (
    AttentionDatabase,
    BuildFailed,
    BuildOptions,
    CorpusSentence,
    DatabaseRefused,
    LinearClassifier,
    NotFinite,
    Outcome,
    PrefillEngine,
    build_database,
    fit_classifier,
)
from attncache_core.checkpoint import read_checkpoint
from attncache_core.evaluation.comparison import compare
from attncache_core.evaluation.methods import Methods
from attncache_core.evaluation.tasks import AgreementTask, full_outputs
from attncache_core.native import rows
from attncache_core.outputs import Judge, Measure, finite_sequences, normalize
from attncache_core.prompts import Template
from attncache_core.tokens import pack

WORD = "?"  # no plain word: corpora of these are whole
TOKEN = VOCABULARY.index(WORD)
SOUND = ["my card", "where is the bank", "why was my money late today"]
DAMAGED = ["my card ?", "? where is the bank", "why was my ? late today"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny encoder of which one word's embedding is NaN."""
    return damage_weights(write_sentence_transformer(tmp_path_factory.mktemp("models") / "damaged"), TOKEN)


@pytest.fixture(scope="module")
def engine(folder):
    return PrefillEngine.load(read_checkpoint(folder), dtype="float32")


def finite(engine, texts, reuse=False):
    sequences = engine.tokenize(texts)
    return engine.run(sequences, [reuse] * len(sequences)).finite.tolist()


@pytest.mark.parametrize("computing", COMPUTING)
@pytest.mark.parametrize("kind", QUANTIZATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_exactly_the_texts_with_a_damaged_word_are_not_finite(
    folder, tiny_checkpoint, dtype, kind, computing, monkeypatch
):
    with attention_by(computing):
        if computing == "operators":
            monkeypatch.setattr(rows, "kernel", lambda: None)
        damaged, sound = (
            PrefillEngine.load(replace(checkpoint, quantization=kind), dtype=dtype)
            for checkpoint in (read_checkpoint(folder), tiny_checkpoint)
        )
        mixed = [text for pair in zip(SOUND, DAMAGED, strict=True) for text in pair]
        result = damaged.run(damaged.tokenize(mixed), [False] * 6)
        alone = sound.run(sound.tokenize(SOUND), [False] * 3)
    assert result.finite.tolist() == [True, False] * 3
    # The others are what they are in a batch of their own.
    tolerance = {"atol": 1e-5} if dtype == "float32" else {"atol": 0.1}
    np.testing.assert_allclose(result.outputs[::2], alone.outputs, **tolerance)
    assert alone.finite.all()


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("family", sorted(CASES))
def test_every_family_tells_of_a_damaged_word(tmp_path, family, number):
    case = CASES[family]
    damage_weights(write_family(tmp_path, case.made(), saved_as=case.saved_as), TOKEN, number)
    engine = PrefillEngine.load(read_checkpoint(tmp_path), dtype="float32")
    assert finite(engine, SOUND + DAMAGED) == [True] * 3 + [False] * 3


@pytest.mark.parametrize("computing", COMPUTING)
@pytest.mark.parametrize("kind", QUANTIZATIONS)
@pytest.mark.parametrize("activation", ["gelu", "relu", "silu"])
@pytest.mark.parametrize(
    "part",
    [
        "attention.self.query",
        "attention.self.key",
        "attention.self.value",
        "attention.output.dense",
        "intermediate.dense",
        "output.dense",
    ],
)
def test_one_number_of_any_layer_that_is_none_shows_in_every_text(
    tmp_path, part, activation, kind, computing, monkeypatch
):
    """It must not be lost in a softmax, an activation or a rounding."""
    write_sentence_transformer(tmp_path, hidden_act=activation)
    damage_weights(tmp_path, (5, 3), names=(f"layer.1.{part}.weight",))
    with attention_by(computing):
        if computing == "operators":
            monkeypatch.setattr(rows, "kernel", lambda: None)
        engine = PrefillEngine.load(replace(read_checkpoint(tmp_path), quantization=kind))
        assert not any(finite(engine, SOUND))


def test_a_token_that_pooling_leaves_out_is_seen(tmp_path):
    """Attention looks back only, and the output is the first token's: it knows nothing of the last one."""
    folder = damage_weights(write_llama(tmp_path), 300)
    engine = PrefillEngine.load(read_checkpoint(folder).adapted(pooling="cls"), dtype="float32")
    # Far behind: rows of a map that meet V together share their tokens.
    sequences = [[0, *range(260, 299), 301], [0, *range(260, 299), 300]]
    result = engine.run(sequences, [False] * 2)
    assert np.isfinite(result.outputs).all()
    assert result.finite.tolist() == [True, False]


def test_fillers_of_a_batch_are_no_text(tmp_path):
    folder = damage_weights(write_sentence_transformer(tmp_path), SPECIAL.index("[PAD]"))
    engine = PrefillEngine.load(read_checkpoint(folder), dtype="float32")
    sequences = engine.tokenize(SOUND)
    assert len(pack(sequences).filled().ids) > sum(map(len, sequences))
    assert engine.run(sequences, [False] * 3).finite.all()


def test_head_of_classes_that_is_damaged_shows_in_every_text(tmp_path):
    folder = write_model(tmp_path, labels=["one", "two", "three"], problem_type="multi_label_classification")
    assert finite(PrefillEngine.load(read_checkpoint(folder)), SOUND) == [True] * 3
    damage_weights(folder, (1, 3), names=("classifier.weight",))
    assert finite(PrefillEngine.load(read_checkpoint(folder)), SOUND) == [False] * 3


numbers = st.sampled_from([0.0, 1.0, -3.5, 3e38, -3e38, np.nan, np.inf, -np.inf])


@given(
    st.lists(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=6), min_size=1, max_size=5), st.data()
)
def test_a_sequence_is_finite_if_all_numbers_of_its_tokens_and_its_output_are(lengths, data):
    order = sorted(lengths, key=len)
    outputs = data.draw(st.lists(st.tuples(numbers, numbers), min_size=len(order), max_size=len(order)))
    batch = pack(random_sequences([len(tokens) for tokens in order])).filled()
    fillers = len(batch.ids) - sum(map(len, order))
    hidden = torch.tensor([*(token for tokens in order for token in tokens), *[(np.nan, 0.0)] * fillers])
    expected = [
        np.isfinite(tokens).all() and np.isfinite(output).all()
        for tokens, output in zip(order, outputs, strict=True)
    ]
    assert finite_sequences(batch, hidden, np.array(outputs, np.float32)).tolist() == expected


def test_finite_numbers_whose_squares_overflow_have_a_direction():
    found = normalize(np.array([[3e30, -4e30], [0, 0], [3, 4]], np.float32))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, [[0.6, -0.8], [0, 0], [0.6, 0.8]], rtol=1e-6)


@pytest.mark.parametrize("measure", Measure)
@pytest.mark.parametrize("multi_label", [False, True])
@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_nothing_agrees_with_what_is_not_finite(measure, multi_label, number):
    full = np.array([[1, 2, 3], [1, 2, 3], [1, 2, 3], [1, 2, 3]], np.float32)
    reused = full.copy()
    reused[1, 0] = full[2, 0] = reused[3, 2] = full[3, 2] = number
    for class_logits in (lambda outputs: outputs, None)[: 1 + (measure is Measure.COSINE)]:
        fidelity = Judge(measure, class_logits, multi_label).fidelity(reused, full)
        np.testing.assert_allclose(fidelity, [1, 0, 0, 0], atol=1e-6)


def test_logits_that_are_not_finite_agree_with_nothing():
    def damaged(outputs):
        return np.where(outputs == 5, np.nan, outputs)

    outputs = np.array([[1, 2], [5, 2]], np.float32)
    assert Judge(Measure.AGREEMENT, damaged).fidelity(outputs, outputs).tolist() == [1, 0]


def test_embedding_names_the_first_text_that_it_is_in_vain_for(engine):
    with pytest.raises(NotFinite, match=r"NaN or infinity for inputs\[1\]") as refused:
        engine.embed([SOUND[0], DAMAGED[0], SOUND[1], DAMAGED[1]])
    assert (refused.value.field, refused.value.index) == ("inputs[1]", 1)
    assert np.isfinite(engine.embed(SOUND)).all()


def test_label_whose_embedding_is_not_finite_ends_the_start(folder):
    with pytest.raises(NotFinite) as refused:
        PrefillEngine.load(read_checkpoint(folder).adapted(labels=["card", "bank", "lost ?"]))
    assert refused.value.field == "labels[2]"


def test_classifier_is_not_fitted_on_what_is_not_finite():
    embeddings = np.ones((4, 3), np.float32)
    embeddings[2, 1] = np.inf
    with pytest.raises(NotFinite) as refused:
        fit_classifier(embeddings, ["a", "b", "a", "b"], fingerprint="", model="m")
    assert refused.value.field == "embeddings[2]"


def test_classifier_with_weights_that_are_not_finite_is_refused(tmp_path):
    weight = np.array([[1, np.nan], [0, 1]], np.float32)
    LinearClassifier(("a", "b"), weight, np.zeros(2, np.float32), "f", "m", {}).save(tmp_path)
    with pytest.raises(DatabaseRefused, match="cannot be read"):
        LinearClassifier.load(tmp_path)


def test_evaluation_names_the_text_instead_of_scoring_it(engine, folder):
    sequences = engine.tokenize([*SOUND, DAMAGED[0]])
    with pytest.raises(NotFinite, match=r"data\[3\]"):
        full_outputs(engine, sequences, batch_size=2)
    judge = engine.judge(Measure.COSINE)
    task = AgreementTask("texts", judge, sequences, full_outputs(engine, sequences[:3]))
    for method in ("full", "lazyformer"):
        methods = Methods(engine, read_checkpoint(folder), None, [], dtype="float32")
        with pytest.raises(NotFinite, match=r"data\[3\]"):
            compare({"full": methods.make(method)}, task, judge, rounds=1)


# With a database.


@pytest.fixture(scope="module")
def corpus():
    random = np.random.default_rng(7)
    texts = [random_text(random, words) for words in np.repeat(np.arange(3, 7), 20)]
    return [CorpusSentence(text, text) for text in texts]


OPTIONS = BuildOptions(heads="all", threshold=0.0, training_steps=5)


@pytest.fixture(scope="module")
def database(engine, corpus, tmp_path_factory):
    """Of sound texts; θ = 0: every text of its lengths hits."""
    path = tmp_path_factory.mktemp("databases") / "a.db"
    build_database(engine, corpus, path, OPTIONS)
    return AttentionDatabase.open(path)


@pytest.mark.parametrize("computing", COMPUTING)
@pytest.mark.parametrize("kind", QUANTIZATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_damaged_texts_spoil_no_hits_of_their_batch(corpus, tmp_path, folder, dtype, kind, computing):
    checkpoint = replace(read_checkpoint(folder), quantization=kind)
    with attention_by(computing):
        plain = PrefillEngine.load(checkpoint, dtype=dtype)
        build_database(plain, corpus, tmp_path / "a.db", OPTIONS)
        opened = AttentionDatabase.open(tmp_path / "a.db")
        reusing = PrefillEngine.load(checkpoint, database=opened, dtype=dtype)
        sound = plain.tokenize([sentence.text for sentence in corpus[::8]])
        damaged = plain.tokenize([f"{WORD} {sentence.text}" for sentence in corpus[::8]])
        mixed = [ids for pair in zip(sound, damaged, strict=True) for ids in pair]
        result = reusing.run(mixed, [True] * len(mixed))
        alone = reusing.run(sound, [True] * len(sound))
    assert result.finite.tolist() == [True, False] * len(sound)
    assert result.outcomes[::2] == alone.outcomes
    assert set(alone.outcomes) <= {Outcome.HIT, Outcome.PROTOTYPE_HIT}
    np.testing.assert_allclose(result.outputs[::2], alone.outputs, atol=1e-5 if dtype == "float32" else 0.1)


def test_a_text_that_takes_a_mean_unsearched_is_not_finite_for_all_that(engine, database):
    groups = tuple(replace(group, searched=False) for group in database.search.policy.groups)
    policy = replace(database.search.policy, groups=groups)
    unsearched = replace(database, search=replace(database.search, policy=policy))
    reusing = PrefillEngine.load(engine.checkpoint, database=unsearched, dtype="float32")
    result = reusing.run(reusing.tokenize(["my ? card", "my old card"]), [True] * 2)
    assert result.outcomes == (Outcome.PROTOTYPE_HIT,) * 2
    assert result.finite.tolist() == [False, True]


def test_no_database_is_built_of_maps_that_are_not_finite(engine, corpus, tmp_path):
    with pytest.raises(BuildFailed, match="NaN or infinity for a text of 6 tokens") as refused:
        build_database(engine, [*corpus, CorpusSentence("my new card ?", "")], tmp_path / "a.db", OPTIONS)
    assert refused.value.field == "corpus"
    assert not (tmp_path / "a.db").exists()


# Labels by their tokens.


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return write_llama(tmp_path_factory.mktemp("models") / "llama")


def scoring(folder, labels):
    adapted = {"template": Template("", "\nanswer:"), "label_logits": True, "labels": labels}
    checkpoint = read_checkpoint(folder).adapted(**adapted)
    return PrefillEngine.load(checkpoint, dtype="float32")


def copied(folder, tmp_path):
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def test_sequences_of_a_text_are_not_finite_each_by_itself(llama, tmp_path):
    labels = ["bank account lost", "zebra"]
    account = scoring(llama, labels).label_tokens.tokens[0][1]
    engine = scoring(damage_weights(copied(llama, tmp_path), account), labels)
    sequences = engine.tokenize(["money"], prompt=engine.label_tokens.prompt)
    result = engine.run(sequences, [False] * len(sequences), engine.label_tokens.prompt.readings)
    assert [account in ids for ids in sequences] == [False, True]
    assert result.finite.tolist() == [True, False]


def test_language_head_that_is_damaged_shows_wherever_it_is_read(llama, tmp_path):
    """In the sum over the vocabulary, though the outputs are finite."""
    damage_weights(copied(llama, tmp_path), 417, names=("lm_head.weight",))
    engine = scoring(tmp_path, ["bank account lost", "card"])
    prompt = engine.label_tokens.prompt
    sequences = engine.tokenize(["money"], prompt=prompt)
    result = engine.run(sequences, [False] * len(sequences), prompt.readings)
    assert np.isfinite(result.outputs).all()
    assert not result.finite.any()


# From the command line.


def test_fitting_names_the_text_by_its_place_in_the_file(folder, tmp_path):
    lines = ["text\tlabel", *(f"{WORD if row == 70 else 'my'} card\t{row % 2}" for row in range(80))]
    (tmp_path / "data.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    arguments = model_arguments(read_checkpoint(folder))
    result = run("fit-classifier", *arguments, "--data", tmp_path / "data.tsv", "--output", tmp_path / "out")
    assert result.exit_code != 0
    assert "NaN or infinity for data[70]" in result.output
    assert not (tmp_path / "out").exists()
