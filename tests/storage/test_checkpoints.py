"""The promises of a checkpoint folder: what is listed is whole, whatever happened to the machine."""

import json
import os
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from runner.committed import MAX_LINEAGE
from runner.errors import StoreError
from runner.storage.checkpoints import CheckpointDir
from runner.storage.disk import Disk, pages, write_durable
from tests.fakes import FaultyDisk, Loss, PowerLoss
from tests.storage.examples import SHARDS, commit, fill
from vramfarm.protocol import CHUNK_BYTES, MANIFEST, dump_manifest, seal

OPERATIONS = range(14)
LOSSES = [(loss, seed) for loss in Loss for seed in (range(6) if loss is Loss.MIXED else range(1))]


def test_checkpoints_are_listed_by_age_not_by_number(directory):
    """
    The newest is the last of the newest lineage, even if an older lineage got further.
    """
    for step, lineage in [(1000, 1), (300, 2), (500, 1)]:
        commit(directory, step, lineage=lineage)

    found = [(c.ref.lineage, c.ref.step) for c in directory.committed()]

    assert [(1, 500), (1, 1000), (2, 300)] == found


def test_no_folder_is_no_checkpoint(tmp_path):
    """
    Before the first save there is nothing, and that is no error.
    """
    directory = CheckpointDir(tmp_path / "not-yet", Disk())

    assert ((), (), ()) == (directory.committed(), directory.problems(), directory.leftovers())


def test_adopt_refuses_a_name_that_is_taken(directory):
    """
    Nothing ever overwrites a committed checkpoint.
    """
    manifest = commit(directory)
    again = directory.root / ".tmp-again"
    fill(again, shards=dict.fromkeys(SHARDS, b"different"))

    with pytest.raises(StoreError, match="taken"):
        directory.adopt(again, manifest)

    assert () == directory.verify(manifest.ref)


def test_adopt_refuses_a_folder_that_lacks_a_shard(directory):
    """
    A manifest names only shards that are there.
    """
    temporary = directory.root / ".tmp-short"
    manifest = fill(temporary)
    (temporary / manifest.shards[1].path).unlink()

    with pytest.raises(StoreError, match="cannot be committed"):
        directory.adopt(temporary, manifest)

    assert () == directory.committed()


@pytest.mark.parametrize("place", [0, CHUNK_BYTES - 1, CHUNK_BYTES, 2 * CHUNK_BYTES + 4])
def test_one_flipped_bit_is_found_and_named(directory, place):
    """
    Every byte is under a checksum: first, last, and on both sides of a chunk's border.
    """
    temporary = directory.root / ".tmp-large"
    manifest = fill(temporary, shards={"large": bytes(2 * CHUNK_BYTES + 5)})
    directory.adopt(temporary, manifest)
    Disk().write_at(directory.path(manifest.ref) / "large", place, b"\x01")

    (problem,) = directory.verify(manifest.ref)

    assert problem.startswith(f"large: chunk {place // CHUNK_BYTES}: expected crc32")


def test_a_change_is_seen_at_the_next_look(directory):
    """
    What is remembered of a manifest never hides what became of the folder.
    """
    manifest = commit(directory)
    path = directory.path(manifest.ref)
    before = len(directory.committed())
    with (path / manifest.shards[0].path).open("ab") as shard:
        shard.write(b"more")
    longer = len(directory.committed())
    os.truncate(path / manifest.shards[0].path, manifest.shards[0].size_bytes)
    whole = len(directory.committed())
    (path / MANIFEST).write_bytes(dump_manifest(replace(manifest, lineage=7)))

    assert (1, 0, 1, [7]) == (before, longer, whole, [c.ref.lineage for c in directory.committed()])


def test_set_aside_keeps_the_bytes_and_is_no_checkpoint(directory):
    """
    Damage stays for a human to look at, even when the same checkpoint is damaged twice.
    """
    for _ in range(2):
        manifest = commit(directory)
        directory.set_aside(manifest.ref)

    assert () == directory.committed()
    assert (directory.root / f".damaged-{manifest.ref.name}" / MANIFEST).exists()


def test_discard_takes_only_what_is_no_checkpoint(directory):
    """
    A name that is not of a half-written or damaged folder is refused.
    """
    manifest = commit(directory)
    fill(directory.root / ".tmp-left")
    fill(directory.root / ".damaged-left")
    leftovers = directory.leftovers()
    directory.discard(".tmp-left")
    directory.discard(".damaged-left")

    for name in (manifest.ref.name, ".tmp-x/../" + manifest.ref.name):
        with pytest.raises(StoreError, match="folder to discard"):
            directory.discard(name)

    assert ((".tmp-left",), ()) == (leftovers, directory.leftovers())
    assert () == directory.look().damaged
    assert [manifest.ref] == [c.ref for c in directory.committed()]


# ------------------------------------------------------------------------ what is not trusted


def _no_manifest(path, outside):
    (path / MANIFEST).unlink()


def _not_json(path, outside):
    (path / MANIFEST).write_bytes(b"\xff not json")


def _endless_lineage(path, outside):
    fields = json.loads((path / MANIFEST).read_text())
    (path / MANIFEST).write_bytes(seal({**fields, "lineage": MAX_LINEAGE + 1}))


def _deep(path, outside):
    (path / MANIFEST).write_bytes(b"[" * 200_000)


def _other_name(path, outside):
    manifest = json.loads((path / MANIFEST).read_bytes())
    (path / MANIFEST).write_bytes(seal(manifest | {"step": 501}))


def _bad_time(path, outside):
    manifest = json.loads((path / MANIFEST).read_bytes())
    (path / MANIFEST).write_bytes(seal(manifest | {"written_at": "yesterday"}))


def _bad_path(spelled):
    def spoil(path, outside):
        manifest = json.loads((path / MANIFEST).read_bytes())
        manifest["shards"][0]["path"] = spelled.format(outside=outside)
        (path / MANIFEST).write_bytes(seal(manifest))

    return spoil


def _short_shard(path, outside):
    os.truncate(path / next(iter(SHARDS)), 3)


def _linked_shard(path, outside):
    shard = path / next(iter(SHARDS))
    shard.replace(outside / shard.name)
    shard.symlink_to(outside / shard.name)


def _linked_folder(path, outside):
    (path / "extra").rename(outside / "extra")
    (path / "extra").symlink_to(outside / "extra")


def _linked_manifest(path, outside):
    (path / MANIFEST).rename(outside / MANIFEST)
    (path / MANIFEST).symlink_to(outside / MANIFEST)


def _linked_checkpoint(path, outside):
    path.rename(outside / path.name)
    path.symlink_to(outside / path.name)


def _pipe_for_a_shard(path, outside):
    shard = path / next(iter(SHARDS))
    shard.unlink()
    os.mkfifo(shard)


def _file_for_a_folder(path, outside):
    path.rename(outside / path.name)
    path.write_bytes(b"")


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(_no_manifest, id="no manifest"),
        pytest.param(_not_json, id="not JSON"),
        pytest.param(_deep, id="JSON that is too deep"),
        pytest.param(_other_name, id="manifest of another checkpoint"),
        pytest.param(_bad_time, id="no time"),
        pytest.param(_endless_lineage, id="later lineage than a run can have"),
        pytest.param(_bad_path("../../outside/x"), id="path that climbs out"),
        pytest.param(_bad_path("{outside}/x"), id="absolute path"),
        pytest.param(_bad_path("\ud800"), id="path that is no text"),
        pytest.param(_bad_path("x" * 4000), id="path that is too long"),
        pytest.param(_bad_path(f"{MANIFEST}/x"), id="path below the manifest"),
        pytest.param(_short_shard, id="shard that is short"),
        pytest.param(_linked_shard, id="shard that is a link"),
        pytest.param(_linked_folder, id="folder that is a link"),
        pytest.param(_linked_manifest, id="manifest that is a link"),
        pytest.param(_linked_checkpoint, id="checkpoint that is a link"),
        pytest.param(_pipe_for_a_shard, id="shard that is a pipe"),
        pytest.param(_file_for_a_folder, id="file with a checkpoint's name"),
    ],
)
def test_what_is_broken_or_hostile_is_reported_and_passed_over(directory, tmp_path, spoil):
    """
    Nothing in the folder is trusted, and one bad checkpoint does not hide the good ones.
    """
    (tmp_path / "outside").mkdir()
    good, bad = commit(directory, 400), commit(directory, 500)
    spoil(directory.path(bad.ref), tmp_path / "outside")

    (problem,) = directory.problems()

    assert [good.ref] == [c.ref for c in directory.committed()]
    assert problem.startswith(f"{bad.ref.name}: ")


# --------------------------------------------------------------------------------- power loss


@pytest.mark.parametrize(("loss", "seed"), LOSSES)
@pytest.mark.parametrize("fail_at", OPERATIONS)
def test_a_commit_that_loses_power_is_whole_or_absent(tmp_path, fail_at, loss, seed):
    """
    After a power loss at any operation what is listed verifies, and what was there stays.
    """
    disk = FaultyDisk(tmp_path)
    commit(CheckpointDir(tmp_path, disk), 400)
    disk = FaultyDisk(tmp_path, fail_at)
    returned = run_until_power_loss(lambda: commit(CheckpointDir(tmp_path, disk), 500))
    disk.lose(loss, seed)

    after = CheckpointDir(tmp_path, Disk())
    steps = [c.ref.step for c in after.committed()]

    assert steps == ([400, 500] if returned or 500 in steps else [400])
    assert [()] * len(steps) == [after.verify(c.ref) for c in after.committed()]
    assert () == after.problems()


@pytest.mark.parametrize(("loss", "seed"), LOSSES)
@pytest.mark.parametrize("fail_at", OPERATIONS)
def test_a_removal_that_loses_power_never_looks_like_a_checkpoint(tmp_path, fail_at, loss, seed):
    """
    After a power loss at any operation the checkpoint is whole or out of sight, and `sweep` finishes the rest.
    """
    manifest = commit(CheckpointDir(tmp_path, Disk()))
    disk = FaultyDisk(tmp_path, fail_at)
    returned = run_until_power_loss(lambda: CheckpointDir(tmp_path, disk).remove(manifest.ref))
    disk.lose(loss, seed)

    after = CheckpointDir(tmp_path, Disk())
    after.sweep()
    found = [c.ref for c in after.committed()]

    assert found in ([[]] if returned else [[], [manifest.ref]])
    assert [()] * len(found) == [after.verify(ref) for ref in found]
    assert () == after.problems()
    assert [ref.name for ref in found] == [path.name for path in tmp_path.iterdir()]


@pytest.mark.parametrize(("loss", "seed"), LOSSES)
@pytest.mark.parametrize("fail_at", range(5))
def test_a_durable_write_that_loses_power_leaves_the_old_or_the_new(tmp_path, fail_at, loss, seed):
    """
    Never a mixture; and once it has returned, the new.
    """
    (tmp_path / "file").write_bytes(b"old")
    disk = FaultyDisk(tmp_path, fail_at)
    returned = run_until_power_loss(lambda: write_durable(disk, tmp_path / "file", b"new bytes"))
    disk.lose(loss, seed)

    found = (tmp_path / "file").read_bytes()

    assert found in ([b"new bytes"] if returned else [b"old", b"new bytes"])


def test_the_tables_reach_past_the_last_operation(tmp_path):
    """
    The tables above lose power at every operation, and also after the last.
    """
    disk = FaultyDisk(tmp_path)
    manifest = commit(CheckpointDir(tmp_path, disk))
    num_commit = disk.num_operations
    CheckpointDir(tmp_path, disk).remove(manifest.ref)

    assert max(num_commit, disk.num_operations - num_commit) in OPERATIONS


def run_until_power_loss(change) -> bool:
    """Whether it returned before the power went."""
    try:
        change()
    except PowerLoss:
        return False
    return True


@pytest.mark.parametrize("folder", ["/dev/shm", None], ids=["in memory", "on a disk"])
def test_blocks_of_any_size_are_written_where_they_belong(tmp_path, folder):
    """
    Directly or not: whole pages, the end of a file, and a place that is no whole number of pages.
    """
    content = os.urandom((2 << 20) + 4096 + 77)
    with tempfile.TemporaryDirectory(dir=folder or tmp_path) as name:
        path = Path(name) / "shard"
        memory = pages(1 << 20)
        memory[:] = content[: 1 << 20]
        Disk().write_blocks(path, 8192, [memory, content[1 << 20 :]])
        Disk().write_blocks(path, 3, [b"abc", b"", b"de"])

        assert bytes(3) + b"abcde" + bytes(8184) + content == path.read_bytes()
