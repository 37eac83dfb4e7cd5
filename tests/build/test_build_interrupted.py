"""A stopped build resumes and produces the same database as an uninterrupted build."""

import errno
import secrets
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from core_models import contents_of

from attncache_core import BuildFailed
from attncache_core.build.builder import build_database
from attncache_core.build.options import BuildOptions
from attncache_core.reuse.maps.database import AttentionDatabase
from attncache_core.runtime import files

STAGES = [
    *("measuring heads", "writing records", "comparing maps", "training the projector", "measuring masks"),
    *("refitting weights", "measuring unfamiliar texts", "checking the strangeness limit"),
]
STEPS = 10
pytestmark = pytest.mark.usefixtures("fixed_costs")


class Progress:
    """A progress callback that collects the stages, and stops the build like Ctrl-C at a given step."""

    def __init__(self, stop_at: tuple[str, int] | None = None) -> None:
        self.stop_at = stop_at
        self.stages: list[str] = []

    def __call__(self, stage: str, done: int, _total: int) -> None:
        if stage not in self.stages:
            self.stages.append(stage)
        if (stage, done) == self.stop_at:
            raise KeyboardInterrupt


def build(engine, corpus, folder: Path, stop_at: tuple[str, int] | None = None, **options) -> list[str]:
    """Run a build, which stops at `stop_at` if given, and return the stages that ran."""
    progress = Progress(stop_at)
    # The operator's heads are the only mask, so that little is measured. This budget lets some texts hit.
    few = {"training_steps": STEPS, "prototypes": 4, "heads": "6", "min_cosine": 0.9, "min_text_cosine": 0.0}
    arguments = (engine, corpus, folder, BuildOptions(**{**few, "refit": True, **options}), progress)
    if stop_at:
        with pytest.raises(KeyboardInterrupt):
            build_database(*arguments)
        assert not folder.exists()
    else:
        build_database(*arguments)
        assert AttentionDatabase.open(folder).verify() == []
    return progress.stages


def segment_times(folder: Path) -> dict[str, int]:
    """Return the modification time of each finished segment: its header is written last."""
    return {
        path.name: path.stat().st_mtime_ns
        for path in (folder / "maps").glob("*")
        if path.read_bytes().startswith(b"ATTNMAPS")
    }


@pytest.fixture
def same_key(monkeypatch):
    """Give all databases the same key, so that equal databases have equal bytes."""
    monkeypatch.setattr(secrets, "token_bytes", bytes)


@pytest.fixture(scope="module")
def uninterrupted(tiny_engine, tiny_corpus, tmp_path_factory, fixed_costs):  # noqa: ARG001 - sets the measured costs
    folder = tmp_path_factory.mktemp("uninterrupted") / "a.db"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(secrets, "token_bytes", bytes)
        assert build(tiny_engine, tiny_corpus, folder) == STAGES
    return contents_of(folder)


@pytest.mark.usefixtures("same_key")
@pytest.mark.parametrize(
    ("stop_at", "finished_segments", "stages_left"),
    [
        (("measuring heads", 1), 0, STAGES),
        (("writing records", 1), 0, STAGES[1:]),
        # 40 sentences, their mean and 4 prototypes of each of six lengths. The last segment is closed after
        # its last progress report.
        (("writing records", 100), 2, STAGES[1:]),
        (("writing records", 270), 5, STAGES[1:]),
        (("comparing maps", 1), 6, STAGES[2:]),
        (("training the projector", STEPS), 6, STAGES[2:]),
        (("measuring masks", 1), 6, STAGES[4:]),
    ],
    ids=lambda value: f"{value[0]} {value[1]}" if isinstance(value, tuple) else "",
)
def test_resumed_build_repeats_nothing_that_was_finished_and_ends_in_the_same_database(
    tiny_engine, tiny_corpus, uninterrupted, tmp_path, stop_at, finished_segments, stages_left
):
    build(tiny_engine, tiny_corpus, tmp_path / "a.db", stop_at)
    before = segment_times(tmp_path / ".a.db.partial")
    assert len(before) == finished_segments
    assert build(tiny_engine, tiny_corpus, tmp_path / "a.db") == stages_left
    assert sorted(path.name for path in tmp_path.iterdir()) == [".a.db.lock", "a.db"]
    assert contents_of(tmp_path / "a.db") == uninterrupted
    after = segment_times(tmp_path / "a.db")
    assert len(after) == 6
    assert {name: after[name] for name in before} == before


def test_build_stopped_twice_keeps_its_key_and_another_build_has_another_key(
    tiny_engine, tiny_corpus, tmp_path
):
    keys = []
    for stop_at in (("writing records", 50), ("writing records", 150), ("measuring masks", 1)):
        build(tiny_engine, tiny_corpus, tmp_path / "a.db", stop_at)
        keys.append((tmp_path / ".a.db.partial" / "key").read_bytes())
    assert build(tiny_engine, tiny_corpus, tmp_path / "a.db") == STAGES[4:]
    assert {*keys} == {(tmp_path / "a.db" / "key").read_bytes()}
    build(tiny_engine, tiny_corpus, tmp_path / "b.db")
    ids = {AttentionDatabase.open(tmp_path / name).manifest.id for name in ("a.db", "b.db")}
    assert len(ids) == 2


def test_build_stopped_while_its_files_reach_the_disk_goes_on(
    tiny_engine, tiny_corpus, tmp_path, monkeypatch
):
    def sync(path):
        if path.name == "manifest.json":  # the last one that is written
            raise OSError(errno.ENOSPC, "no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(files, "_sync", sync)
        with pytest.raises(BuildFailed, match="start the same build again to resume"):
            build(tiny_engine, tiny_corpus, tmp_path / "a.db")
    assert build(tiny_engine, tiny_corpus, tmp_path / "a.db") == STAGES[4:]


# A writer that is killed before its file is complete. It loads the module without the package.
WRITER = """
import os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import files
os.fsync = lambda _: os.kill(os.getpid(), 9)
files.write_whole(Path(sys.argv[2]), b"content")
"""


def test_killed_build_leaves_no_unfinished_file_and_segments_are_written_again_if_their_key_was_lost(
    tiny_engine, tiny_corpus, tmp_path
):
    build(tiny_engine, tiny_corpus, tmp_path / "a.db", ("writing records", 100))
    partial = tmp_path / ".a.db.partial"
    arguments = (Path(files.__file__).parent, partial / "projector.safetensors")
    killed = subprocess.run([sys.executable, "-c", WRITER, *map(str, arguments)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert len(list(partial.glob(".projector.safetensors.*.unfinished"))) == 1
    (partial / "key").unlink()
    build(tiny_engine, tiny_corpus, tmp_path / "a.db")
    assert not [path for path in (tmp_path / "a.db").iterdir() if path.name.startswith(".")]


def of_four_sources(corpus):
    return [type(sentence)(sentence.text, str(index // 4)) for index, sentence in enumerate(corpus)]


@pytest.mark.parametrize(
    ("options", "sentences", "named"),
    [
        ({"min_cosine": 0.8}, list, "min_cosine"),  # the records of a build with this budget are the same
        ({"prototypes": 3, "min_cosine": 0.8}, list, "min_cosine, prototypes"),
        ({}, lambda corpus: corpus[1:], "sentences, held_out"),
        ({}, of_four_sources, "held_out"),
    ],
    ids=["budget", "options", "texts", "split"],
)
def test_stopped_build_with_other_inputs_is_begun_anew_and_logged_once_with_what_changed(
    tiny_engine, tiny_corpus, tmp_path, caplog, options, sentences, named
):
    partial, corpus = tmp_path / ".a.db.partial", sentences(tiny_corpus)
    for _ in range(2):
        build(tiny_engine, tiny_corpus, tmp_path / "a.db", ("comparing maps", 1))
    before = segment_times(partial)
    assert caplog.messages == []
    assert build(tiny_engine, corpus, tmp_path / "a.db", ("comparing maps", 1), **options) == STAGES[:3]
    assert build(tiny_engine, corpus, tmp_path / "a.db", **options)[:3] == STAGES[2:5]
    assert caplog.messages == [f"the stopped build in {partial} is begun anew, because this changed: {named}"]
    assert not set(before.items()) & set(segment_times(tmp_path / "a.db").items())
    records = AttentionDatabase.open(tmp_path / "a.db").manifest.records
    assert sum(records.values()) == len(corpus)


@pytest.mark.parametrize(
    "damaged",
    [
        lambda content: content[:-1],
        lambda content: content[:-4096] + bytes([content[-4096] ^ 1]) + content[-4095:],
    ],
    ids=["cut", "last record"],
)
def test_segment_damaged_since_the_stop_is_written_again(tiny_engine, tiny_corpus, tmp_path, damaged):
    build(tiny_engine, tiny_corpus, tmp_path / "a.db", ("comparing maps", 1))
    segment = tmp_path / ".a.db.partial" / "maps" / "00007.maps"
    before = segment_times(segment.parent.parent)
    segment.write_bytes(damaged(segment.read_bytes()))
    assert build(tiny_engine, tiny_corpus, tmp_path / "a.db") == STAGES[1:]
    after = segment_times(tmp_path / "a.db")
    assert {name for name in after if after[name] != before[name]} == {"00007.maps"}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("inputs.json", b"[[1"),
        ("inputs.json", b"\xff\xfe"),
        ("damage.json", b"[[1"),
        ("damage.json", b"\xff\xfe"),
        ("projector.safetensors", b""),
    ],
)
def test_stage_whose_file_is_damaged_is_done_again(tiny_engine, tiny_corpus, tmp_path, caplog, name, content):
    build(tiny_engine, tiny_corpus, tmp_path / "a.db", ("measuring masks", 1))
    (tmp_path / ".a.db.partial" / name).write_bytes(content)
    build(tiny_engine, tiny_corpus, tmp_path / "a.db")
    said = [message for message in caplog.messages if "is begun anew, because" in message]
    why = {"inputs.json": ["the list of its inputs is damaged"], "damage.json": ["damage.json is damaged"]}
    assert [message.rpartition("because ")[2] for message in said] == why.get(name, [])


def test_build_that_is_killed_before_its_last_step_goes_on_without_half_of_what_it_measured(
    tiny_engine, tiny_corpus, tmp_path, monkeypatch
):
    """Records are in the order of the damage that was measured, so none is used after the damage is gone."""
    partial = tmp_path / ".a.db.partial"
    removed = []

    def unlink(path, *arguments, real=Path.unlink, **options):
        if path.parent == partial and path.suffix == ".json":
            removed.append(path.name)
        real(path, *arguments, **options)
        if len(removed) == 1:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", unlink)
        with pytest.raises(KeyboardInterrupt):
            build(tiny_engine, tiny_corpus, tmp_path / "a.db")
    assert removed == ["inputs.json"]
    assert build(tiny_engine, tiny_corpus, tmp_path / "a.db") == STAGES
