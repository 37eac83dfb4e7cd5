"""Parquet files in shards: the same bytes whatever computes them, and nothing lost when something fails."""

import errno
import json
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from functools import partial
from itertools import chain, count, repeat
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from command_line import PRIVATE, model_arguments, run, succeeded
from core_models import random_text
from forked import fresh
from store_server import object_store

from attncache_core import InvalidInput
from service.bulk import cluster, shards
from service.bulk.sharded import MANIFEST, OPTIONS
from service.bulk.shards import Shard, plan
from service.cli import main
from service.objects import ObjectFolder

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

# Kills of actors, nodes and drivers; 100 takes an hour.
KILLS = int(os.environ.get("ATTNCACHE_RAY_KILLS", "0"))


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    monkeypatch.setattr(shards, "SHARD_ROWS", 8)
    monkeypatch.setattr("service.bulk.rows.CHUNK_ROWS", 3)


@pytest.fixture(scope="module")
def texts():
    """Texts of three files, some of them equal."""
    random = np.random.default_rng(0)
    distinct = [random_text(random, 4) for _ in range(30)]
    return [[distinct[index] for index in random.integers(0, 30, size=30)] for _ in range(3)]


@pytest.fixture
def folder(tmp_path, texts):
    (tmp_path / "in").mkdir()
    for number, of_file in enumerate(texts):
        write(tmp_path / f"in/{number}.parquet", of_file)
    return tmp_path / "in"


def write(path, texts, column="text", rows=20):
    parquet.write_table(
        pyarrow.table({column: pyarrow.array(texts, pyarrow.string())}), path, row_group_size=rows
    )


def embed(checkpoint, inputs, output, *more):
    return run("embed", *model_arguments(checkpoint), inputs, "--output", output, *more)


def bytes_of(output):
    return {path.name: path.read_bytes() for path in output.iterdir()}


def rows_of(output):
    """Return the embeddings in the order of the manifest."""
    manifest = json.loads((output / "manifest.json").read_bytes())
    tables = [parquet.read_table(output / shard["output"]) for shard in manifest["shards"]]
    return np.concatenate([np.stack(table.column("embedding").to_numpy()) for table in tables])


def test_shards_are_every_row_once_in_any_part_and_any_store(
    tiny_checkpoint, tiny_engine, folder, texts, tmp_path
):
    output, parts = tmp_path / "out", tmp_path / "parts"
    assert "15 shards computed (90 rows)" in succeeded(embed(tiny_checkpoint, folder, output))
    np.testing.assert_allclose(rows_of(output), tiny_engine.embed(list(chain(*texts))), atol=1e-5)
    assert "0 shards computed (0 rows), 15 were there" in succeeded(embed(tiny_checkpoint, folder, output))
    parts.mkdir()
    (parts / f".{'0' * 32}.parquet.{'0' * 16}.unfinished").write_bytes(b"left by a process that was killed")
    ends = [succeeded(embed(tiny_checkpoint, folder, parts, "--shard", f"{part}/3")) for part in (3, 1, 2)]
    assert ["not complete" in end for end in ends] == [True, True, False]
    assert bytes_of(parts) == bytes_of(output)
    with object_store() as store:
        for path in folder.iterdir():
            store.objects[f"/bucket/in/{path.name}"] = path.read_bytes()
        succeeded(embed(tiny_checkpoint, (store.s3 % "in").replace("in?", "in/*.parquet?"), store.s3 % "out"))
        stored = {name: content for name, content in store.objects.items() if name.endswith(".parquet")}
        manifest = store.objects["/bucket/out/manifest.json"]
        assert b"endpoint" not in manifest
        made = json.loads(manifest)["shards"]
        ours = json.loads((output / "manifest.json").read_bytes())["shards"]
        assert len(made) == 15
        for shard, our in zip(made, ours, strict=True):
            # Files hold their names, which differ, so they are compared as tables.
            table = parquet.read_table(pyarrow.BufferReader(stored[f"/bucket/out/{shard['output']}"]))
            assert table == parquet.read_table(output / our["output"])


def test_output_that_is_not_whole_or_of_another_shard_is_computed_again(tiny_checkpoint, folder, tmp_path):
    output = tmp_path / "out"
    succeeded(embed(tiny_checkpoint, folder, output))
    expected = bytes_of(output)
    made = json.loads(expected[MANIFEST])["shards"]
    first, second, third, short, *_ = (output / shard["output"] for shard in made)
    assert [shard["rows"] for shard in made[:4]] == [8, 8, 4, 8]
    first.write_bytes(b"")
    second.write_bytes(expected[short.name])  # of another shard with as many rows
    third.write_bytes(expected[third.name][:-50])
    short.write_bytes(b"PAR1")
    # Of runs before names were written, which are known by their rows: right ones, and too few.
    unnamed, fewer = (output / shard["output"] for shard in made[5:7])
    for path, rows in ((unnamed, 8), (fewer, 7)):
        table = parquet.read_table(path).replace_schema_metadata(None)
        parquet.write_table(table[:rows], path)
    kept = unnamed.read_bytes()
    assert "5 shards computed (36 rows), 10 were there" in succeeded(embed(tiny_checkpoint, folder, output))
    assert bytes_of(output) == {**expected, unnamed.name: kept}


def test_output_below_an_input_is_no_input_however_both_are_spelt(tiny_checkpoint, folder, tmp_path):
    inputs = tmp_path / "copy"
    shutil.copytree(folder, inputs)
    link = tmp_path / "link"
    link.symlink_to(inputs)
    again = "0 shards computed (0 rows), 15 were there"
    for given, end in (
        (inputs, "15 shards computed (90 rows), 0 were there"),
        (inputs, again),
        (f"{tmp_path}/link/../copy", again),
        (link, again),
    ):
        assert end in succeeded(embed(tiny_checkpoint, given, inputs / "out"))
        (inputs / "out" / "manifest.json").unlink()  # as if the run had been killed before its end


def test_link_whose_file_is_not_there_is_a_file_that_fails(tiny_checkpoint, folder, tmp_path):
    (folder / "below").mkdir()
    link = folder / "below" / "5.parquet"
    link.symlink_to(tmp_path / "absent.parquet")
    ended = embed(tiny_checkpoint, folder, tmp_path / "out")
    assert ended.exit_code == 3
    (failed,) = (tmp_path / "out" / "failed.jsonl").read_text().splitlines()
    assert json.loads(failed)["input"] == link.as_uri()
    assert "not there" in json.loads(failed)["reason"]
    (folder / "other.txt").symlink_to(tmp_path / "absent.txt")
    shutil.copy(folder / "1.parquet", tmp_path / "absent.parquet")
    assert "5 shards computed (30 rows), 15 were there" in succeeded(
        embed(tiny_checkpoint, folder, tmp_path / "out")
    )


def test_shards_of_inputs_that_were_changed_stay_and_are_told(tiny_checkpoint, folder, texts, tmp_path):
    """The folder may have a name that ends in .parquet, as that of other programs that write in parts."""
    inputs, output = folder.rename(tmp_path / "in.parquet"), tmp_path / "out"
    assert "also has" not in embed(tiny_checkpoint, inputs, output).stderr
    write(inputs / "1.parquet", texts[1][:20])
    result = embed(tiny_checkpoint, inputs, output)
    assert "3 shards computed (20 rows), 10 were there" in succeeded(result)
    assert "also has 5 shards of inputs that were changed or left out" in result.stderr
    assert len(rows_of(output)) == 80


def test_classes_are_sharded_too(tiny_classifier_checkpoint, folder, tmp_path):
    whole, output = tmp_path / "whole.parquet", tmp_path / "out"
    model = ("classify", *model_arguments(tiny_classifier_checkpoint))
    succeeded(run(*model, folder, "--output", output))
    succeeded(run(*model, "--input", folder / "0.parquet", "--output", whole))
    manifest = json.loads((output / "manifest.json").read_bytes())
    tables = [parquet.read_table(output / shard["output"]) for shard in manifest["shards"][:5]]
    sharded, unsharded = pyarrow.concat_tables(tables), parquet.read_table(whole)
    assert sharded.column("label") == unsharded.column("label")
    assert sharded.schema == unsharded.schema
    options = json.loads((output / OPTIONS).read_bytes())
    assert set(sharded.column("label").to_pylist()) <= set(options["labels"])
    # The head is torch's, whose last bit depends on the number of rows.
    np.testing.assert_allclose(sharded.column("score"), unsharded.column("score"), atol=1e-6)


def test_what_fails_is_listed_and_the_rest_is_computed(tiny_checkpoint, folder, texts, tmp_path):
    output = tmp_path / "out"
    write(folder / "1.parquet", [*texts[1][:9], None, *texts[1][10:]])
    (folder / "2.parquet").write_bytes(b"no Parquet")
    write(folder / "3.parquet", [], rows=1)  # no row
    write(folder / "4.parquet", texts[0], column="body")
    ended = embed(tiny_checkpoint, folder, output)
    assert ended.exit_code == 3
    assert "9 shards computed" in ended.stdout
    failed = [json.loads(line) for line in (output / "failed.jsonl").read_bytes().splitlines()]
    assert [Path(line["input"]).name for line in failed] == ["1.parquet", "2.parquet", "4.parquet"]
    for line, word in zip(
        failed, ("row 10 of row group 0", "not a Parquet", "no column 'text'"), strict=True
    ):
        assert word in line["reason"]
    assert (failed[0]["row_group"], failed[0]["first_row"]) == (0, 8)
    assert not (output / "manifest.json").exists()
    assert PRIVATE not in ended.output
    write(folder / "1.parquet", texts[1])
    for number in (2, 4):
        write(folder / f"{number}.parquet", texts[2])
    (output / "failed-2-of-3.jsonl").write_bytes(b"left by a part")
    # The file that was changed has another ETag, so all of its shards are new.
    assert "15 shards computed (90 rows), 5 were there" in succeeded(embed(tiny_checkpoint, folder, output))
    assert not list(output.glob("failed*"))


def test_output_that_is_not_complete_any_more_has_no_manifest(tiny_checkpoint, folder, texts, tmp_path):
    output = tmp_path / "out"
    succeeded(embed(tiny_checkpoint, folder, output))
    complete = (output / MANIFEST).read_bytes()
    (folder / "-.parquet").write_bytes(b"no Parquet")  # the first one
    for _ in range(2):
        ended = embed(tiny_checkpoint, folder, output)
        assert ended.exit_code == 3
        assert "0 shards computed (0 rows), 15 were there, 1 failed; not complete yet" in ended.stdout
        assert not (output / MANIFEST).exists()
        (output / MANIFEST).write_bytes(complete)
    write(folder / "-.parquet", [*texts[0][:9], None])  # a row that cannot be computed
    assert embed(tiny_checkpoint, folder, output).exit_code == 3
    assert not (output / MANIFEST).exists()
    (folder / "-.parquet").unlink()
    succeeded(embed(tiny_checkpoint, folder, output))
    assert (output / MANIFEST).read_bytes() == complete
    # A part whose own shards are all done, while a shard of the other part is not.
    shard = json.loads(complete)["shards"][0]
    (output / shard["output"]).unlink()
    parts = ("1/2", "2/2") if int(shard["output"][:16], 16) % 2 else ("2/2", "1/2")
    assert "0 failed; not complete yet" in succeeded(
        embed(tiny_checkpoint, folder, output, "--shard", parts[0])
    )
    assert not (output / MANIFEST).exists()
    succeeded(embed(tiny_checkpoint, folder, output, "--shard", parts[1]))
    assert (output / MANIFEST).read_bytes() == complete


def test_manifest_is_away_before_the_first_shard_is_computed(
    tiny_checkpoint, folder, texts, tmp_path, monkeypatch
):
    output = tmp_path / "out"
    succeeded(embed(tiny_checkpoint, folder, output))
    write(folder / "3.parquet", texts[0][:9])
    found = []

    def killed(*_):
        found.append((output / MANIFEST).exists())
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shards.ShardWorker, "_compute", killed)
        assert embed(tiny_checkpoint, folder, output).exit_code == 130
    assert found == [False]
    succeeded(embed(tiny_checkpoint, folder, output))
    assert len(json.loads((output / MANIFEST).read_bytes())["shards"]) == 17


def test_output_with_a_file_of_somebody_else_is_refused(tiny_checkpoint, folder, tmp_path):
    output = tmp_path / "out"
    (output / "notes").mkdir(parents=True)
    (output / "notes" / MANIFEST).write_bytes(b"never touched")
    for name in (MANIFEST, "failed.jsonl", "failed-2-of-3.jsonl"):
        (output / name).write_bytes(b"of the user")
        ended = embed(tiny_checkpoint, folder, output)
        assert ended.exit_code == 2
        assert f"--output {output.as_uri()} has a file {name}, " in ended.stderr
        assert "choose another folder for --output" in ended.stderr
        assert sorted(path.name for path in output.iterdir()) == sorted([name, "notes"])
        (output / name).unlink()
    succeeded(embed(tiny_checkpoint, folder, output))
    assert (output / "notes" / MANIFEST).read_bytes() == b"never touched"


@pytest.mark.parametrize("content", [b"of the user", b"[1]"])
def test_output_with_options_of_somebody_else_is_refused(tiny_checkpoint, folder, tmp_path, content):
    output = tmp_path / "out"
    output.mkdir()
    (output / OPTIONS).write_bytes(content)
    ended = embed(tiny_checkpoint, folder, output)
    assert ended.exit_code == 2
    assert f"--output {output.as_uri()} has a file {OPTIONS} that holds no options of a run" in ended.stderr
    assert (output / OPTIONS).read_bytes() == content
    assert not list(output.glob("*.parquet"))


def test_file_that_changes_while_it_is_read_is_never_mixed(
    tiny_checkpoint, folder, texts, tmp_path, monkeypatch
):
    compute = shards.ShardWorker._compute

    def changed(self, shard, output):
        if shard.name == "0.parquet":
            write(folder / "0.parquet", texts[2])
        return compute(self, shard, output)

    monkeypatch.setattr(shards.ShardWorker, "_compute", changed)
    ended = embed(tiny_checkpoint, folder, tmp_path / "out")
    assert ended.exit_code == 3
    assert "10 shards computed" in ended.stdout
    assert (tmp_path / "out/failed.jsonl").read_text().count("changed by somebody else") == 5


def test_shard_that_fails_for_a_moment_is_computed(tiny_checkpoint, folder, tmp_path, monkeypatch):
    compute, failed = shards.ShardWorker._compute, []

    def compute_late(self, shard, output):
        if len(failed) < 2:
            failed.append(shard)
            raise OSError("the store is busy")
        return compute(self, shard, output)

    monkeypatch.setattr(shards.ShardWorker, "_compute", compute_late)
    assert "15 shards computed" in succeeded(embed(tiny_checkpoint, folder, tmp_path / "out"))


def test_run_that_cannot_be_right_is_refused_and_leaves_the_output(tiny_checkpoint, folder, tmp_path):
    output = tmp_path / "out"
    succeeded(embed(tiny_checkpoint, folder, output))
    before = bytes_of(output)
    for to, more, word in (
        (output, ("--dimensions", 16), "begun without --dimensions, not with --dimensions 16"),
        (output, ("--batch-tokens", 8), "--batch-tokens"),
        (output, ("--dtype", "bfloat16"), "dtype float32"),
        (tmp_path / "other", ("--column", "body"), "has no column 'body'"),
        (output, ("--shard", "4/3"), "3/100"),
        (output, ("--input", "x.txt"), "not both"),
        (output, ("--format", "csv"), "Parquet"),
    ):
        ended = embed(tiny_checkpoint, folder, to, *more)
        assert ended.exit_code == 2
        assert word in ended.stderr
        assert bytes_of(output) == before


def test_missing_input_and_missing_packages_are_refused(tiny_checkpoint, folder, tmp_path, monkeypatch):
    output = tmp_path / "out"
    (tmp_path / "empty").mkdir()
    write(tmp_path / "empty/0.parquet", [], rows=1)
    (tmp_path / "texts.txt").write_text("a card\n", encoding="utf-8")
    for inputs, word in (
        (tmp_path / "nowhere", f"input: there is no file or folder {tmp_path / 'nowhere'}"),
        (tmp_path / "nowhere/*.parquet", f"input: there is no file or folder {tmp_path / 'nowhere'}"),
        (folder / "x*", f"there is no .parquet file in {folder / 'x*'}; correct the path"),
        (folder / "x.parquet", "x.parquet: it is not there"),
        (tmp_path / "texts.txt", "texts.txt is not a .parquet file; give it by --input"),
    ):
        for all_inputs in ((inputs,), (folder, inputs)):  # nothing is computed of the good one
            assert word in embed(tiny_checkpoint, all_inputs[0], output, *all_inputs[1:]).stderr
            assert not output.exists()
    assert "no row" in embed(tiny_checkpoint, tmp_path / "empty", output).stderr
    without_output = run("embed", *model_arguments(tiny_checkpoint), tmp_path / "texts.txt")
    assert "texts.txt is not a .parquet file; give it by --input" in without_output.stderr
    assert embed(tiny_checkpoint, folder, output, "--column", "body").exit_code == 2
    assert not output.exists()
    ended = embed(tiny_checkpoint, folder, folder)
    assert f"output: all .parquet files of the input {folder} are in this folder" in ended.stderr
    assert "choose another folder" in ended.stderr
    assert sorted(path.name for path in folder.iterdir()) == ["0.parquet", "1.parquet", "2.parquet"]
    with object_store() as store:
        store.objects["/bucket/0.parquet"] = (folder / "0.parquet").read_bytes()
        succeeded(embed(tiny_checkpoint, store.http % "0.parquet", tmp_path / "etag"))
        shown = "there is no .parquet file in s3://bucket/empty; correct the path"
        assert shown in embed(tiny_checkpoint, store.s3 % "empty", output).stderr
        store.has_etags = False
        assert "has no ETag" in embed(tiny_checkpoint, store.http % "0.parquet", output).stderr
    for secret in (f"s3://user:{PRIVATE}@bucket/in", f"s3://bucket/in?aws_secret_access_key={PRIVATE}"):
        for arguments in ((secret, output), (folder, secret)):
            ended = embed(tiny_checkpoint, *arguments, "--ray", "auto")
            assert "bucket/in is given with a user or a query" in ended.stderr
            assert PRIVATE not in ended.output
    monkeypatch.setitem(sys.modules, "ray", None)
    ended = embed(tiny_checkpoint, folder, output, "--ray", "auto")
    assert "attncache[ray]" in ended.stderr
    assert ended.exit_code == 2


@pytest.mark.parametrize("part", ["1/1", "2/3"])
def test_outputs_that_other_machines_keep_to_themselves_end_the_run_with_the_remedy(
    tiny_checkpoint, folder, tmp_path, monkeypatch, part
):
    monkeypatch.setattr(shards.ShardWorker, "attempt", lambda *_: None)
    ended = embed(tiny_checkpoint, folder, tmp_path / "out", "--shard", part)
    assert ended.exit_code == 2
    assert f"outputs are missing in {(tmp_path / 'out').as_uri()}; give a folder" in ended.stderr
    assert not (tmp_path / "out/manifest.json").exists()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_output_that_takes_no_more_ends_the_run_before_other_shards_are_computed(
    tiny_checkpoint, folder, tmp_path, monkeypatch, number
):
    put, computed = ObjectFolder.put, []

    def put_some(self, name, content):
        computed.append(name)
        if len(computed) > 2:
            raise OSError(number, os.strerror(number), name)
        put(self, name, content)

    with monkeypatch.context() as patched:
        patched.setattr(ObjectFolder, "put", put_some)
        ended = embed(tiny_checkpoint, folder, tmp_path / "out")
    assert ended.exit_code == 2
    assert f"{os.strerror(number)}; " in ended.stderr
    assert "run the same command again to continue" in ended.stderr
    assert len(computed) == 3
    again = succeeded(embed(tiny_checkpoint, folder, tmp_path / "out"))
    assert "2 were there, 0 failed; manifest.json is written" in again


def test_output_that_takes_no_more_ends_a_run_of_ray():
    full = RayOfStarts(repeat(({}, None)))
    failed = RuntimeError()
    failed.cause = OSError(errno.ENOSPC, "no space", "out")
    full.call = lambda outcome: RayOfStarts.call(full, failed if outcome is None else outcome)
    workers = cluster.RayWorkers(full, None, None)
    workers.options()
    with pytest.raises(OSError, match="no space"):
        list(workers.computed((shard, str(shard)) for shard in range(9)))


def test_shards_of_a_row_group_are_planned_one_by_one_and_once(tmp_path):
    write(tmp_path / "a.parquet", ["x"] * 50, rows=20)
    planned = list(plan([str(tmp_path), f"{tmp_path}/a.parquet", f"{tmp_path}/*"], "text"))
    assert all(isinstance(shard, Shard) for shard in planned)
    assert [(shard.group, shard.first, shard.rows) for shard in planned] == [
        *((0, 0, 8), (0, 8, 8), (0, 16, 4)),
        *((1, 0, 8), (1, 8, 8), (1, 16, 4)),
        *((2, 0, 8), (2, 8, 2)),
    ]


def test_folder_whose_name_ends_as_that_of_a_file_is_a_folder_in_any_store(tmp_path):
    folder = tmp_path / "in.parquet"
    folder.mkdir()
    write(folder / "a.parquet", ["x"] * 8)
    assert [shard.name for shard in plan([folder.as_uri()], "text")] == ["a.parquet"]
    with object_store() as store:
        store.objects["/bucket/in.parquet/a.parquet"] = (folder / "a.parquet").read_bytes()
        assert [shard.name for shard in plan([store.s3 % "in.parquet"], "text")] == ["a.parquet"]


KILLER = "kills its process"  # a shard


class Actor:
    """Runs its calls in order, so those behind a shard that kills its process end with the process."""

    def __init__(self, ray):
        self.ray, self.is_dead = ray, False
        self.start = SimpleNamespace(remote=ray.start)
        self.attempt = SimpleNamespace(remote=self.attempted)

    def attempted(self, shard, _output):
        self.is_dead |= shard == KILLER
        return self.ray.call(RuntimeError() if self.is_dead else None)


class RayOfStarts:
    """A cluster whose calls end at once. starts: what the start of each actor ends in."""

    exceptions = SimpleNamespace(RayError=RuntimeError)

    def __init__(self, starts, nodes=2):
        self.starts, self.number_of_nodes = iter(starts), nodes
        self.started, self.outcomes = 0, {}

    def nodes(self):
        return [{"Alive": True, "Resources": {"CPU": 1}}] * self.number_of_nodes

    def remote(self, _kind):
        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda *_: Actor(self)))

    def start(self):
        self.started += 1
        return self.call(next(self.starts))

    def call(self, outcome):
        self.outcomes[call := object()] = outcome
        return call

    def wait(self, calls, **_):
        return calls, []

    def get(self, call):
        outcome = self.outcomes.pop(call)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


QUOTED = f'Ray says\n  File "a.py", line 3, in load\n    x = 1\nModuleNotFoundError: {PRIVATE}'


@pytest.mark.parametrize(
    ("end", "words", "most"),
    [
        ((None, "there is no model"), ["there is no model"], 4),
        (RuntimeError(QUOTED), ['File "a.py", line 3, in load', "ModuleNotFoundError"], 4),
        (RuntimeError(f"killed {PRIVATE}"), ["RuntimeError"], 10),
    ],
)
def test_actors_that_do_not_start_end_the_run_with_the_reason_or_are_logged_once(
    end, words, most, monkeypatch, caplog
):
    monkeypatch.setattr(cluster, "time", SimpleNamespace(monotonic=count().__next__))
    bad = RayOfStarts(repeat(end))
    with pytest.raises(InvalidInput, match="no actor can start") as raised:
        cluster.RayWorkers(bad, None, None).options()
    assert all(word in str(raised.value) for word in words)
    assert bad.started == most
    caplog.clear()
    one_good = RayOfStarts(chain([end, ({}, None)], repeat(end)))
    workers = cluster.RayWorkers(one_good, None, None)
    workers.options()
    due = ((number, str(number)) for number in range(2000))
    assert len(list(workers.computed(due))) == 2000
    assert 3 <= one_good.started < 50
    (line,) = caplog.messages
    assert all(word in line for word in words)
    assert PRIVATE not in f"{line} {raised.value}"


def test_shard_that_kills_every_process_fails_alone_and_the_rest_is_computed():
    ray = RayOfStarts(repeat(({}, None)), nodes=1)
    workers = cluster.RayWorkers(ray, None, None)
    workers.options()
    computed = list(workers.computed((shard, str(shard)) for shard in [KILLER, *range(6)]))
    failed = [(shard, reason) for (shard, _), reason in computed if reason is not None]
    assert failed == [(KILLER, "its process died: RuntimeError")]
    assert sorted(shard for (shard, _), reason in computed if reason is None) == [*range(6)]
    assert ray.started == 11  # the first one, and one after each death


def cluster_of(nodes):
    """Return a Ray cluster of processes on this machine, with a processor for each node."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    for _ in range(nodes - 1):
        cluster.add_node(num_cpus=1)
    return cluster


def parent_of(process):
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def actors():
    """Return the processes of the actors of this test's cluster."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            process = int(path.parent.name)
            # The parent of an actor is its node, which this process has started.
            if path.read_bytes().startswith(b"ray::_Actor") and parent_of(parent_of(process)) == os.getpid():
                found.append(process)
        except OSError:
            continue
    return found


def drive(arguments):
    """Run a command with a Ray cluster, as a process of its own."""
    os.environ["RAY_AUTH_MODE"] = "disabled"
    main(arguments)


def kill_something(chance, cluster, driver):
    """Kill the driver, a node or an actor. Returns what was killed, or None if nothing ran."""
    kind = chance.choices(("actor", "node", "driver"), (6, 2, 2))[0] if KILLS else "actor"
    if kind == "driver":
        driver.kill()
        driver.join()
        return kind
    if kind == "node":
        workers = [node for node in cluster.list_all_nodes() if not node.is_head()]
        cluster.remove_node(chance.choice(workers), allow_graceful=False)
        cluster.add_node(num_cpus=1)
        return kind
    running = actors()
    if not running:
        return None
    try:
        os.kill(chance.choice(running), signal.SIGKILL)
    except ProcessLookupError:
        return None
    return kind


def test_missing_pyarrow_is_named_once_before_any_file_is_read(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(InvalidInput, match=r"pip install 'attncache\[parquet\]'"):
        plan([str(folder)], "text")


@pytest.mark.timeout(0 if KILLS else 600)
def test_ray_gives_the_same_bytes_also_after_kills(tiny_checkpoint, folder, texts, tmp_path, monkeypatch):
    """Without ATTNCACHE_RAY_KILLS, one actor is killed."""
    pytest.importorskip("ray", reason="the extra [ray] is not installed")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    shards_of_run = shards.SHARD_ROWS
    many = [text for of_file in texts for text in of_file] * (40 if KILLS else 4)
    for number in range(3):
        write(folder / f"{number}.parquet", many, rows=shards_of_run)
    expected, output = tmp_path / "expected", tmp_path / "out"
    succeeded(embed(tiny_checkpoint, folder, expected))
    cluster = cluster_of(3 if KILLS else 1)
    command = ["embed", *model_arguments(tiny_checkpoint), folder, "--output", output]
    command += ["--ray", cluster.address, "--threads", "1"]
    start = partial(fresh, drive, list(map(str, command)))
    chance, killed = random.Random(7), Counter()
    driver = start()
    try:
        while killed.total() < max(1, KILLS):
            time.sleep(chance.uniform(0.5, 10) if KILLS else 0.02)
            if not driver.is_alive():
                # A run that ended before all kills begins again.
                assert driver.exitcode in (0, 3, -signal.SIGKILL)
                if driver.exitcode == 0:
                    assert bytes_of(output) == bytes_of(expected)
                    print(f"equal after {dict(killed)}")
                    shutil.rmtree(output)
                driver = start()
                continue
            if not KILLS and not any(output.glob("*.parquet")):
                continue
            if kind := kill_something(chance, cluster, driver):
                killed[kind] += 1
        while driver.join(600) or driver.exitcode != 0:
            assert driver.exitcode in (3, -signal.SIGKILL)
            driver = start()
    finally:
        driver.kill()
        cluster.shutdown()
    print(f"killed {dict(killed)}")
    assert bytes_of(output) == bytes_of(expected)
    assert {OPTIONS, MANIFEST} < set(bytes_of(output))
