"""NaN and infinity are reported for exactly the texts in which they occur.

The models are real models with damaged weights: the embedding of one word is NaN.
"""

import shutil
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
    prefill,
    random_sequences,
    random_text,
    write_model,
    write_sentence_transformer,
)
from families import CASES, FULL
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

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
    native,
)
from attncache_core.calibration.trial import full_outputs
from attncache_core.checkpoints.description import read_checkpoint
from attncache_core.checkpoints.template import Template
from attncache_core.evaluation.comparison import compare
from attncache_core.evaluation.methods import Methods
from attncache_core.evaluation.tasks import AgreementTask
from attncache_core.heads.comparator import Measure, OutputComparator
from attncache_core.heads.vectors import finite_sequences, normalize
from attncache_core.text.token_batch import pack

WORD = "?"  # not a plain word, so corpora of plain words are sound
TOKEN = VOCABULARY.index(WORD)
SOUND = ["my card", "where is the bank", "why was my money late today"]
DAMAGED = ["my card ?", "? where is the bank", "why was my ? late today"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of a tiny encoder in which the embedding of one word is NaN."""
    return damage_weights(write_sentence_transformer(tmp_path_factory.mktemp("models") / "damaged"), TOKEN)


@pytest.fixture(scope="module")
def engine(folder):
    return PrefillEngine.load(read_checkpoint(folder), dtype="float32")


def finite(engine, texts):
    return prefill(engine, engine.tokenize(texts), reuse=False).finite.tolist()


@pytest.mark.parametrize("computing", COMPUTING)
@pytest.mark.parametrize("kind", QUANTIZATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_exactly_the_texts_with_a_damaged_word_are_not_finite(
    folder, tiny_checkpoint, dtype, kind, computing
):
    with attention_by(computing):
        damaged, sound = (
            # Both models are calibrated with sound texts, so both have the same factors.
            PrefillEngine.load(
                replace(checkpoint, quantization=kind, quantization_texts=tuple(SOUND)), dtype=dtype
            )
            for checkpoint in (read_checkpoint(folder), tiny_checkpoint)
        )
        mixed = [text for pair in zip(SOUND, DAMAGED, strict=True) for text in pair]
        result = prefill(damaged, damaged.tokenize(mixed), reuse=False)
        alone = prefill(sound, sound.tokenize(SOUND), reuse=False)
    assert result.finite.tolist() == [True, False] * 3
    # The other texts have the same outputs as in a batch without damaged texts.
    tolerance = {"atol": 1e-5} if dtype == "float32" else {"atol": 0.1}
    np.testing.assert_allclose(result.outputs[::2], alone.outputs, **tolerance)
    assert alone.finite.all()


@pytest.mark.parametrize("family", FULL)
def test_every_kind_of_layer_reports_a_damaged_word(tmp_path, family):
    CASES[family].written(tmp_path)
    words = {"?": np.nan, ":": np.inf, ".": -np.inf}
    for word, number in words.items():
        damage_weights(tmp_path, VOCABULARY.index(word), number)
    engine = PrefillEngine.load(read_checkpoint(tmp_path), dtype="float32")
    damaged = [text.replace(WORD, word) for word in words for text in DAMAGED]
    assert finite(engine, SOUND + damaged) == [True] * 3 + [False] * 9


@pytest.mark.parametrize("kind", QUANTIZATIONS[:2])
@pytest.mark.parametrize(
    ("part", "activation"),
    [
        ("attention.self.query", "gelu"),
        ("attention.self.key", "gelu"),
        ("attention.self.value", "gelu"),
        ("attention.output.dense", "gelu"),
        # The activation follows.
        ("intermediate.dense", "gelu"),
        ("intermediate.dense", "relu"),
        ("intermediate.dense", "silu"),
        ("output.dense", "gelu"),
    ],
)
def test_a_single_nan_in_any_layer_is_reported_for_every_text(tmp_path, part, activation, kind):
    """The NaN must not be lost in a softmax, an activation or a rounding."""
    write_sentence_transformer(tmp_path, hidden_act=activation)
    damage_weights(tmp_path, (5, 3), names=(f"layer.1.{part}.weight",))
    checkpoint = replace(read_checkpoint(tmp_path), quantization=kind, quantization_texts=tuple(SOUND))
    if native.kernel():
        engine = PrefillEngine.load(checkpoint)
        for computing in ("stack", "kernel"):
            with attention_by(computing):
                assert not any(finite(engine, SOUND)), computing
    with attention_by("operators"):
        assert not any(finite(PrefillEngine.load(checkpoint), SOUND))


def test_damage_in_a_token_outside_the_pooling_is_reported(tmp_path):
    """The model is causal, and the output is the first token's, so it does not depend on the last token."""
    folder = damage_weights(write_llama(tmp_path), 300)
    engine = PrefillEngine.load(read_checkpoint(folder).adapted(pooling="cls"), dtype="float32")
    # The damaged token is far from the first token, because products with V combine neighbouring rows.
    sequences = [[0, *range(260, 299), 301], [0, *range(260, 299), 300]]
    result = prefill(engine, sequences, reuse=False)
    assert np.isfinite(result.outputs).all()
    assert result.finite.tolist() == [True, False]


def test_last_norm_that_overflows_for_some_tokens_is_reported_by_max_pooling(tmp_path):
    """The maximum must not leave out the tokens whose norm is NaN, also where prefixes are shared."""
    checkpoint = read_checkpoint(write_llama(tmp_path)).adapted(pooling="max")
    sequences = [[0, *range(260, 290)], [0, *range(260, 280), 300]]
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    branch = model.model.layers[-1].mlp
    sizes = []
    branch.register_forward_hook(lambda _, __, made: sizes.append(made[0].norm(dim=-1)))
    with torch.inference_mode():
        model(torch.tensor(sequences[:1]))
    # Squares of rows that are longer than 2^64 sum to more than float32 has.
    branch.down_proj.weight.data *= 2.0**64 / sizes[0].median()
    model.save_pretrained(tmp_path)
    engine = PrefillEngine.load(checkpoint, dtype="float32")
    for share in (True, False):
        result = prefill(replace(engine, share_prefixes=share), sequences, reuse=False)
        assert result.finite.tolist() == [False, False], share


def test_damage_in_the_padding_word_is_not_reported_for_texts_without_it(tmp_path):
    """Products of fixed numbers of rows may need more rows than there are tokens; these are not tokens."""
    folder = damage_weights(write_sentence_transformer(tmp_path), SPECIAL.index("[PAD]"))
    engine = PrefillEngine.load(read_checkpoint(folder), dtype="float32")
    result = prefill(engine, engine.tokenize(SOUND), reuse=False)
    assert result.report.tokens == sum(map(len, engine.tokenize(SOUND)))
    assert result.finite.all()


def test_damaged_classification_head_is_reported_for_every_text(tmp_path):
    folder = write_model(tmp_path, labels=["one", "two", "three"], problem_type="multi_label_classification")
    assert finite(PrefillEngine.load(read_checkpoint(folder)), SOUND) == [True] * 3
    damage_weights(folder, (1, 3), names=("classifier.weight",))
    assert finite(PrefillEngine.load(read_checkpoint(folder)), SOUND) == [False] * 3


numbers = st.sampled_from([0.0, 1.0, -3.5, 3e38, -3e38, np.nan, np.inf, -np.inf])


@given(
    st.lists(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=6), min_size=1, max_size=5), st.data()
)
def test_a_sequence_is_finite_if_its_hidden_states_and_its_output_are(lengths, data):
    order = sorted(lengths, key=len)
    outputs = data.draw(st.lists(st.tuples(numbers, numbers), min_size=len(order), max_size=len(order)))
    batch = pack(random_sequences([len(tokens) for tokens in order]))
    hidden = torch.tensor([token for tokens in order for token in tokens])
    expected = [
        np.isfinite(tokens).all() and np.isfinite(output).all()
        for tokens, output in zip(order, outputs, strict=True)
    ]
    assert finite_sequences(batch, hidden, np.array(outputs, np.float32)).tolist() == expected


def test_vectors_with_overflowing_squares_are_normalised():
    found = normalize(np.array([[3e30, -4e30], [0, 0], [3, 4]], np.float32))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, [[0.6, -0.8], [0, 0], [0.6, 0.8]], rtol=1e-6)


@pytest.mark.parametrize("measure", Measure)
@pytest.mark.parametrize("multi_label", [False, True])
@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_outputs_that_are_not_finite_have_fidelity_zero(measure, multi_label, number):
    full = np.array([[1, 2, 3], [1, 2, 3], [1, 2, 3], [1, 2, 3]], np.float32)
    reused = full.copy()
    reused[1, 0] = full[2, 0] = reused[3, 2] = full[3, 2] = number
    for class_logits in (lambda outputs: outputs, None)[: 1 + (measure is Measure.COSINE)]:
        fidelity = OutputComparator(measure, class_logits, multi_label).fidelity(reused, full)
        np.testing.assert_allclose(fidelity, [1, 0, 0, 0], atol=1e-6)


def test_logits_that_are_not_finite_have_fidelity_zero():
    def damaged(outputs):
        return np.where(outputs == 5, np.nan, outputs)

    outputs = np.array([[1, 2], [5, 2]], np.float32)
    assert OutputComparator(Measure.AGREEMENT, damaged).fidelity(outputs, outputs).tolist() == [1, 0]


def test_embed_names_the_first_text_that_is_not_finite(engine):
    with pytest.raises(NotFinite, match=r"NaN or infinity for inputs\[1\]") as refused:
        engine.embed([SOUND[0], DAMAGED[0], SOUND[1], DAMAGED[1]])
    assert (refused.value.field, refused.value.index) == ("inputs[1]", 1)
    assert np.isfinite(engine.embed(SOUND)).all()


def test_label_with_an_embedding_that_is_not_finite_is_refused(folder):
    with pytest.raises(NotFinite) as refused:
        PrefillEngine.load(read_checkpoint(folder).adapted(labels=["card", "bank", "lost ?"]))
    assert refused.value.field == "labels[2]"


def test_classifier_is_not_fitted_on_embeddings_that_are_not_finite():
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


def test_evaluation_names_the_text_that_is_not_finite(engine, folder):
    sequences = engine.tokenize([*SOUND, DAMAGED[0]])
    with pytest.raises(NotFinite, match=r"data\[3\]"):
        full_outputs(engine, sequences, batch_size=2)
    comparator = engine.decisions.comparator(Measure.COSINE)
    task = AgreementTask("texts", comparator, sequences, full_outputs(engine, sequences[:3]))
    methods = Methods(engine, read_checkpoint(folder), None, [], dtype="float32")
    with pytest.raises(NotFinite, match=r"data\[3\]"):
        compare({"full": methods.make("full")}, task, comparator, rounds=1)


# With a database.


@pytest.fixture(scope="module")
def corpus():
    random = np.random.default_rng(7)
    texts = [random_text(random, words) for words in np.repeat(np.arange(3, 7), 20)]
    return [CorpusSentence(text, text) for text in texts]


OPTIONS = BuildOptions(heads="all", threshold=0.0, training_steps=5)


@pytest.mark.parametrize("kind", QUANTIZATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_damaged_texts_do_not_affect_hits_of_their_batch(corpus, tmp_path, folder, dtype, kind):
    checkpoint = replace(read_checkpoint(folder), quantization=kind, quantization_texts=tuple(SOUND))
    plain = PrefillEngine.load(checkpoint, dtype=dtype)
    build_database(plain, corpus, tmp_path / "a.db", OPTIONS)
    opened = AttentionDatabase.open(tmp_path / "a.db")
    sound = plain.tokenize([sentence.text for sentence in corpus[::8]])
    damaged = plain.tokenize([f"{WORD} {sentence.text}" for sentence in corpus[::8]])
    mixed = [ids for pair in zip(sound, damaged, strict=True) for ids in pair]
    for computing in COMPUTING if native.kernel() else ["operators"]:
        with attention_by(computing):
            reusing = PrefillEngine.load(checkpoint, database=opened, dtype=dtype)
            result = prefill(reusing, mixed)
            alone = prefill(reusing, sound)
        assert result.finite.tolist() == [True, False] * len(sound)
        assert result.outcomes[::2] == alone.outcomes
        assert set(alone.outcomes) <= {Outcome.HIT, Outcome.PROTOTYPE_HIT}
        tolerance = 1e-5 if dtype == "float32" else 0.1
        np.testing.assert_allclose(result.outputs[::2], alone.outputs, atol=tolerance)


def test_maps_that_are_not_finite_are_not_recorded(engine, corpus, tmp_path):
    with pytest.raises(BuildFailed, match="NaN or infinity for a text of 6 tokens") as refused:
        build_database(engine, [*corpus, CorpusSentence("my new card ?", "")], tmp_path / "a.db", OPTIONS)
    assert refused.value.field == "corpus"
    assert not (tmp_path / "a.db").exists()


# Labels that are scored by their tokens.


def scoring(folder, labels):
    adapted = {"template": Template("", "\nanswer:"), "label_logits": True, "labels": labels}
    checkpoint = read_checkpoint(folder).adapted(**adapted)
    return PrefillEngine.load(checkpoint, dtype="float32")


def test_damage_of_a_label_does_not_reach_the_labels_computed_beside_it(tiny_llama, tmp_path):
    """All labels are one tree, and the tokens of different labels are computed together."""
    labels = ["bank account lost", "zebra", "bank lost zebra", "bank lost money"]
    account = scoring(tiny_llama, labels).decisions.label_tokens.tokens[0][1]
    engine = scoring(damage_weights(shutil.copytree(tiny_llama, tmp_path / "damaged"), account), labels)
    prompt = engine.decisions.label_tokens.prompt
    sequences = engine.tokenize(["money", "my account"], prompt=prompt)
    requests = engine.requests(sequences, prompt, engine.decisions.label_tokens, reuse=False)
    shared = engine.run(requests)
    alone = replace(engine, share_prefixes=False).run(requests)
    assert shared.report.tokens < alone.report.tokens
    assert shared.finite.tolist() == [account not in ids for ids in sequences] == alone.finite.tolist()
    finite = shared.finite
    np.testing.assert_allclose(shared.outputs[finite], alone.outputs[finite], atol=1e-4)


def test_damaged_language_head_is_reported_for_every_sequence(tiny_llama, tmp_path):
    """The outputs are finite, but the log-probabilities are not, because of the sum over the vocabulary."""
    folder = shutil.copytree(tiny_llama, tmp_path / "damaged")
    damage_weights(folder, 417, names=("lm_head.weight",))
    engine = scoring(folder, ["bank account lost", "card"])
    prompt = engine.decisions.label_tokens.prompt
    sequences = engine.tokenize(["money"], prompt=prompt)
    result = prefill(engine, sequences, reuse=False, plans=prompt.sequence_plans)
    assert np.isfinite(result.outputs).all()
    assert not result.finite.any()


# On the command line.


def test_fitting_names_the_text_by_its_index_in_the_file(folder, tmp_path):
    lines = ["text\tlabel", *(f"{WORD if row == 70 else 'my'} card\t{row % 2}" for row in range(80))]
    (tmp_path / "data.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    arguments = model_arguments(read_checkpoint(folder))
    result = run("fit-classifier", *arguments, "--data", tmp_path / "data.tsv", "--output", tmp_path / "out")
    assert result.exit_code != 0
    assert "NaN or infinity for data[70]" in result.output
    assert not (tmp_path / "out").exists()
