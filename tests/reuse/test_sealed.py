"""The files of a database belong together: files of another database and files that do not fit are refused.

The tests forge files carefully: they correct all digests and checksums that can be computed without the key.
"""

import hashlib
import json
import shutil
import struct
import zlib
from functools import partial
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pytest
import torch
from core_models import flip, random_sequences

from attncache_core import PrefillEngine
from attncache_core.build.builder import build_database
from attncache_core.build.options import BuildOptions
from attncache_core.calibration.database import calibrate_database
from attncache_core.errors import CorruptDatabase, DatabaseRefused
from attncache_core.heads.comparator import Measure
from attncache_core.reuse.maps.database import AttentionDatabase
from attncache_core.reuse.maps.index import FeatureIndex
from attncache_core.reuse.maps.policy import Budget
from attncache_core.reuse.maps.projector import FeatureProjector
from attncache_core.reuse.maps.prototypes import PrototypeIndex, prototypes_path
from attncache_core.reuse.storage.seal import Seal

PAGE = 4096
LENGTHS = range(5, 11)
RECORDS, SYNTHETIC = 40, 5  # records per length: sentences; their mean and four prototypes
TABLE = slice(PAGE, PAGE + 24 * (RECORDS + SYNTHETIC))
RECORDS_START = 2 * PAGE
HEADER = struct.Struct("<8sIIQQ16sI16s32s")
CHECKSUM, DATABASE, MODEL = 6, 7, 8  # fields of the header


@pytest.fixture(scope="module")
def twins(tiny_engine, tiny_corpus, tmp_path_factory):
    """Two databases of the same corpus and model."""
    parent = tmp_path_factory.mktemp("twins")
    options = BuildOptions(heads="all", threshold=0.0, prototypes=4, training_steps=10)
    for name in ("a.db", "b.db"):
        build_database(tiny_engine, tiny_corpus, parent / name, options)
    return [parent / "a.db", parent / "b.db"]


@pytest.fixture
def folder(twins, tmp_path) -> Path:
    """A copy of the first twin, for a test to damage."""
    return Path(shutil.copytree(twins[0], tmp_path / "a.db"))


def segment(folder: Path) -> Path:
    return folder / "maps" / "00007.maps"


def adopt(folder: Path, *paths: Path) -> None:
    """Write the current digests of these files to the manifest."""
    manifest = folder / "manifest.json"
    content = json.loads(manifest.read_text(encoding="utf-8"))
    for path in paths:
        # Of a segment, the header and the record table.
        sealed = path.read_bytes()[: RECORDS_START if path.suffix == ".maps" else None]
        assert str(path.relative_to(folder)) in content["files"]
        content["files"][str(path.relative_to(folder))] = hashlib.sha256(sealed).hexdigest()
    manifest.write_text(json.dumps(content), encoding="utf-8")


def change_header(path: Path, field: int, value: bytes | int) -> None:
    content = path.read_bytes()
    fields = list(HEADER.unpack_from(content))
    fields[field] = value
    path.write_bytes(HEADER.pack(*fields) + content[HEADER.size :])


def change_table(path: Path, table: bytes) -> None:
    """Replace the record table, and its checksum in the header."""
    content = path.read_bytes()
    assert len(table) == TABLE.stop - TABLE.start
    path.write_bytes(content[: TABLE.start] + table + content[TABLE.stop :])
    change_header(path, CHECKSUM, zlib.crc32(table))


def refusal(folder: Path) -> str:
    """Return the message of `open`, which must refuse the database."""
    with pytest.raises(CorruptDatabase) as refused:
        AttentionDatabase.open(folder)
    assert refused.value.field == "database"
    message = str(refused.value)
    assert f"remove {folder} and build it again" in message
    return message


def test_twins_have_different_ids_and_equal_maps(twins):
    left, right = (AttentionDatabase.open(folder) for folder in twins)
    assert left.verify() == right.verify() == []
    assert left.manifest.id != right.manifest.id
    assert segment(twins[0]).stat().st_size == segment(twins[1]).stat().st_size
    records = [segment(folder).read_bytes()[RECORDS_START:] for folder in twins]
    assert records[0] == records[1]


def test_segment_of_another_database_or_model_is_refused_even_if_all_digests_fit(folder, twins):
    content = segment(folder).read_bytes()
    shutil.copyfile(segment(twins[1]), segment(folder))
    assert "00007.maps belongs to another database" in refusal(folder)
    change_table(segment(folder), content[TABLE])
    adopt(folder, segment(folder))
    assert segment(folder).read_bytes()[HEADER.size :] == content[HEADER.size :]
    assert "00007.maps belongs to another database" in refusal(folder)
    segment(folder).write_bytes(content)
    change_header(segment(folder), MODEL, bytes(32))
    adopt(folder, segment(folder))
    assert "00007.maps holds maps of another model" in refusal(folder)


def test_key_of_another_database_or_size_is_refused(folder, twins):
    shutil.copyfile(twins[1] / "key", folder / "key")
    assert f"manifest.json and {folder}/key are of two databases" in refusal(folder)
    for size in (0, 31, 33):
        (folder / "key").write_bytes(bytes(size))
        assert "key has" in refusal(folder)


def test_changed_record_table_is_refused_even_if_its_checksum_fits(folder):
    rows = np.frombuffer(segment(folder).read_bytes()[TABLE], dtype="V24")
    change_table(segment(folder), rows[::-1].tobytes())
    assert "header or record table of " in refusal(folder)
    assert "00007.maps were changed" in refusal(folder)


@pytest.mark.parametrize("offset", [HEADER.size, PAGE - 1, TABLE.stop, RECORDS_START - 1])
def test_padding_of_header_and_table_is_sealed_too(folder, offset):
    flip(segment(folder), offset)
    assert "00007.maps were changed" in refusal(folder)


def table_of(folder: Path) -> np.ndarray:
    rows = np.dtype([("kind", "<u4"), ("checksum", "<u4"), ("tokens", "V16")])
    return np.frombuffer(segment(folder).read_bytes()[TABLE], dtype=rows).copy()


@pytest.mark.parametrize(
    ("record", "kind"), [(0, 1), (RECORDS - 1, 2), (RECORDS, 0), (RECORDS, 1), (-1, 2), (-1, 9)], ids=str
)
def test_record_with_another_kind_than_in_the_prototypes_is_refused(folder, record, kind):
    table = table_of(folder)
    table["kind"][record] = kind
    change_table(segment(folder), table.tobytes())
    adopt(folder, segment(folder))
    assert "00007.maps has records of other kinds" in refusal(folder)


def test_two_records_of_one_text_are_found(folder):
    table = table_of(folder)
    table["tokens"][3] = table["tokens"][5]
    change_table(segment(folder), table.tobytes())
    adopt(folder, segment(folder))
    assert AttentionDatabase.open(folder).verify() == [f"length 7: {RECORDS} records of {RECORDS - 1} texts"]


# Parts that are valid on their own and do not fit each other.


def index_of(folder: Path, vectors: int, dimensions: int) -> Path:
    index = FeatureIndex()
    index.add(7, np.zeros((vectors, dimensions), np.float32))
    (path,) = index.write(folder)
    return path


def changed_prototypes(folder: Path, **changes) -> Path:
    path = prototypes_path(folder)
    index = PrototypeIndex.load(path)
    columns = {name: getattr(index, name) for name in ("features", "lengths", "records", "kinds")}
    changes = {name: change(columns[name]) for name, change in changes.items()}
    path.write_bytes(PrototypeIndex(**columns | changes).to_bytes())
    return path


def changed_projector(folder: Path, *sizes: int) -> Path:
    path = folder / "projector.safetensors"
    path.write_bytes(FeatureProjector(*sizes).to_bytes() if sizes else prototypes_path(folder).read_bytes())
    return path


@pytest.mark.parametrize(
    ("misfit", "words"),
    [
        (
            partial(index_of, vectors=RECORDS, dimensions=64),
            "projector and .*00007.faiss differ in the dimensions",
        ),
        (partial(index_of, vectors=RECORDS - 1, dimensions=128), "00007.faiss and .* differ in the number"),
        (
            partial(changed_prototypes, features=lambda x: x[:, :64]),
            "and prototypes .* differ in the dimensions",
        ),
        (partial(changed_prototypes, features=lambda x: x[:, 0]), "prototypes.safetensors cannot be read"),
        (partial(changed_prototypes, lengths=lambda x: x[:3]), "prototypes.safetensors cannot be read"),
        (partial(changed_prototypes, records=lambda x: x + 10**6), "00005.maps has records of other kinds"),
        (lambda folder: changed_projector(folder, 32, 10, 64), "and prototypes .* differ in the dimensions"),
        (lambda folder: changed_projector(folder, 32, 9), "projector .* does not take sequences of 10"),
        (changed_projector, "projector.safetensors cannot be read"),  # which has other tensors
    ],
)
def test_parts_that_do_not_fit_each_other_are_refused_before_anything_is_searched(folder, misfit, words):
    opened = AttentionDatabase.open(folder)
    adopt(folder, misfit(folder))
    with pytest.raises(CorruptDatabase, match=words):
        AttentionDatabase.open(folder)
    (sentence,) = opened.verify()
    assert sentence in refusal(folder)


def test_projector_with_another_width_than_the_model_is_refused_when_the_engine_is_loaded(
    folder, tiny_checkpoint
):
    adopt(folder, changed_projector(folder, 48, 10))
    database = AttentionDatabase.open(folder)
    with pytest.raises(DatabaseRefused, match="48 numbers, and the model's have 32") as refused:
        PrefillEngine.load(tiny_checkpoint, database=database, dtype="float32")
    assert refused.value.field == "database"


@pytest.mark.parametrize(
    "name",
    [
        *("manifest.json", "key", "projector.safetensors", "prototypes.safetensors"),
        *("index/00005.faiss", "index/00010.faiss", "maps/00005.maps", "maps/00010.maps"),
    ],
)
def test_verify_of_an_open_database_finds_a_changed_byte_in_any_file(folder, name):
    database = AttentionDatabase.open(folder)
    for offset in (0, 20, -1):
        assert database.verify() == []
        flip(folder / name, offset, bit=4)
        sentences = database.verify()
        if name.startswith("maps") and offset == -1:
            assert sentences == []  # the last byte is padding after the numbers of the last record
        else:
            assert len(sentences) == 1
            assert Path(name).name in sentences[0]
        flip(folder / name, offset, bit=4)


def test_verify_finds_a_damaged_classifier_of_the_decisions(folder):
    content = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    content["files"]["decisions-0/classifier.json"] = "0" * 64
    (folder / "manifest.json").write_text(json.dumps(content), encoding="utf-8")
    (sentence,) = AttentionDatabase.open(folder).verify()
    assert "decisions-0 cannot be read" in sentence


# What a database reveals about its texts.


def test_digests_of_texts_are_keyed_so_that_no_two_databases_share_one(twins):
    left, right = ({row.tobytes() for row in table_of(folder)["tokens"]} for folder in twins)
    assert len(left) == RECORDS + 1  # all synthetic records have the digest of an empty sequence
    assert not left & right


def test_nobody_without_the_key_can_tell_whether_a_text_is_recorded(twins, tiny_engine, tiny_corpus):
    sequences = tiny_engine.tokenize([sentence.text for sentence in tiny_corpus])
    guessed = {blake2b(struct.pack(f"<{len(ids)}q", *ids), digest_size=16).digest() for ids in sequences}
    held = [path.read_bytes() for path in (twins[0] / "maps").iterdir()]
    assert not any(digest in content for digest in guessed for content in held)


@pytest.mark.usefixtures("fixed_costs")
def test_digests_of_calibration_texts_are_keyed_and_recognised(folder, twins, tiny_engine):
    texts = random_sequences(list(LENGTHS) * 10, seed=31)
    kept = []
    for copy in (folder, Path(shutil.copytree(twins[1], folder.parent / "b.db"))):
        database = AttentionDatabase.open(copy)
        calibrate_database(tiny_engine, database, texts, (), Budget(Measure.COSINE, 0.5))
        kept.append(set(json.loads((copy / "calibrated_on.json").read_bytes())))
        assert AttentionDatabase.open(copy).calibrated_on([*texts, [1, 2, 3]]) == len(texts)
    assert len(kept[0]) == len(texts)
    assert not kept[0] & kept[1]


def test_digest_of_token_ids_does_not_depend_on_their_container():
    seal = Seal(bytes(32), "ab" * 32)
    ids = [101, 7, 30_000, 102]
    forms = (ids, tuple(ids), np.array(ids), torch.tensor(ids).numpy(), np.array(ids, dtype=np.int32))
    assert len({seal.token_digest(form) for form in forms}) == 1
