"""What survives between a disk and a store: run against a folder and against a real S3 server."""

import json
import os
import random
import subprocess
import threading
import time
import tracemalloc
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import ClassVar

import pytest

from runner import tasks
from runner.facts import Machine
from runner.job import OffloadPolicy
from runner.keeper import LEASE, expect_ours
from runner.policy.ledger import dump_machine
from runner.storage.checkpoints import MAX_MANIFEST_BYTES, CheckpointDir
from runner.storage.disk import Disk, has_bytes
from runner.storage.offsite import (
    OffsiteError,
    comparing,
    dump_place,
    open_store,
    restoring,
    surveying,
    tidying,
    uploading,
)
from runner.storage.offsite.file import FileStore
from runner.storage.offsite.known import Known
from tests.fakes import FaultyDisk, Loss, PowerLoss
from tests.farmhouse import wait_until
from tests.s3server import BUCKET
from tests.storage.examples import SHARDS, commit
from tests.storage.moving import contents, elsewhere, ignore, move
from vramfarm.checksum import crc32
from vramfarm.protocol import CHUNK_BYTES, MANIFEST, Shard, dump_manifest, seal


class _Asked(FileStore):
    """A folder that keeps what it was asked, until the first shard begins to be sent."""

    def __init__(self, root):
        super().__init__(root, Disk())
        self.before, self._lock, self._sends = [], threading.Lock(), False

    def _note(self, what, key):
        with self._lock:
            if not self._sends and (what, key.rpartition("/")[2]) != ("head", MANIFEST):  # a get of a folder asks it
                self.before.append((what, key.rpartition("/")[2]))

    def list(self, prefix, *more):
        self._note("list", prefix)
        return super().list(prefix, *more)

    def head(self, key):
        self._note("head", key)
        return super().head(key)

    def get(self, key, *more, **limits):
        self._note("get", key)
        return super().get(key, *more, **limits)

    def put_file(self, key, path, shard, sent):
        self._sends = True
        super().put_file(key, path, shard, sent)


@pytest.mark.parametrize(
    ("large", "asked"),
    [(False, [("list", "")]), (True, [("get", MANIFEST), ("get", MANIFEST), ("list", "")])],
    ids=["small shards", "shards that may be copied"],
)
def test_a_first_byte_leaves_after_one_list_and_the_manifests_that_are_copied_from(directory, tmp_path, large, asked):
    """
    What the store does not list is not asked for shard by shard: on a long way each question is a tenth of a second.
    """
    store = _Asked(tmp_path / "store")
    for step in (300, 400):
        uploaded(store, directory, step)
    store.before, store._sends = [], False
    manifest = commit(directory, 500, shards={FIRST: os.urandom(CHUNK_BYTES + 1 if large else 9)})

    uploading.upload(store, "job", directory, manifest.ref, ignore)

    assert asked == sorted(store.before)
    assert [300, 400, 500] == steps(store)


FOLDER = "job/checkpoints"
FIRST = next(iter(SHARDS))


def uploaded(store, directory, step=500, **kind):
    manifest = commit(directory, step, **kind)
    uploading.upload(store, "job", directory, manifest.ref, ignore)
    return manifest


def steps(store):
    return [checkpoint.ref.step for checkpoint in surveying.survey(store, "job").checkpoints]


# ---------------------------------------------------------------------------------- there and back


def test_a_checkpoint_comes_back_as_it_went(store, directory, tmp_path):
    """
    On another machine every byte is the same, and it is committed there.
    """
    manifest, told = uploaded(store, directory), []
    there = elsewhere(tmp_path)
    checkpoint = restoring.restore(store, "job", manifest.ref, there, lambda fraction, note: told.append(fraction))

    assert directory.committed() == there.committed() == (checkpoint,)
    assert contents(directory, manifest.ref) == contents(there, manifest.ref)
    assert ((), 1.0) == (there.leftovers(), told[-1])


def test_a_survey_knows_what_the_disk_knew(store, directory):
    """
    The store alone is enough to go on from, in the order of age.
    """
    for step, lineage in ((1000, 1), (300, 2)):
        uploaded(store, directory, step, lineage=lineage)

    found = surveying.survey(store, "job")

    assert directory.committed() == found.checkpoints
    assert ((), None) == (found.unusable, found.outcome)


def test_nobody_commits_to_a_run_that_is_anothers_by_now(store, directory):
    """
    A machine that was suspended in the middle of an upload goes on with it when it wakes, before it looks at the clock.
    """
    manifest = commit(directory)
    store.put(f"job/{LEASE}", json.dumps({"holder": "b", "life": "l", "fence": 2, "who": "machine b"}).encode())

    with pytest.raises(OffsiteError, match="another runner has this run by now: machine b") as caught:
        uploading.upload(store, "job", directory, manifest.ref, ignore, (), partial(expect_ours, store, "job", "a"))
    before = steps(store)
    uploading.upload(store, "job", directory, manifest.ref, ignore, (), partial(expect_ours, store, "job", "b"))

    assert (False, [], [500]) == (caught.value.final, before, steps(store))


def test_an_upload_is_safe_to_repeat(store, directory):
    """
    A lost acknowledgement, even of the manifest, is no conflict with ourselves.
    """
    manifest = uploaded(store, directory)
    before = {entry.key: entry.modified_at for entry in store.list("job/")}
    uploading.upload(store, "job", directory, manifest.ref, ignore)

    assert before == {entry.key: entry.modified_at for entry in store.list("job/")}


def test_a_restored_checkpoint_may_be_uploaded_again(store, directory, tmp_path):
    """
    Its manifest need not be spelled as the first one was; it must say the same.
    """
    manifest = commit(directory)
    path = directory.path(manifest.ref) / MANIFEST
    fields = json.loads(path.read_bytes())
    del fields["crc32"]  # as an earlier version wrote it
    path.write_text(json.dumps(fields, indent=4))
    uploading.upload(store, "job", directory, manifest.ref, ignore)
    there = elsewhere(tmp_path)
    restoring.restore(store, "job", manifest.ref, there, ignore)

    uploading.upload(store, "job", there, manifest.ref, ignore)

    assert [500] == steps(store)


def test_anothers_checkpoint_under_our_name_is_an_error(store, directory):
    """
    Two runs with one name would mix: the second is told, and nothing is overwritten.
    """
    manifest = commit(directory)
    theirs = dump_manifest(replace(manifest, attempt=7))
    store.put(f"{FOLDER}/{manifest.ref.name}/{MANIFEST}", theirs)

    with pytest.raises(OffsiteError, match="got another one") as caught:
        uploading.upload(store, "job", directory, manifest.ref, ignore)

    assert caught.value.final
    assert theirs == store.get(f"{FOLDER}/{manifest.ref.name}/{MANIFEST}")


@pytest.mark.parametrize(
    "spoilt",
    [b"", b"garbage", b"[" * 100_000, b'{"format": 9}', b"x" * (17 << 20)],
    ids=["nothing", "garbage", "deep", "another format", "huge"],
)
def test_a_spoilt_manifest_in_the_store_is_replaced_by_ours(store, directory, spoilt):
    """
    Nobody can use it, and what lies here is good: nothing about this disk is called damaged.
    """
    manifest = uploaded(store, directory)
    store.put(f"{FOLDER}/{manifest.ref.name}/{MANIFEST}", spoilt)
    before = surveying.survey(store, "job")

    uploading.upload(store, "job", directory, manifest.ref, ignore)

    assert ((), 1) == (before.checkpoints, len(before.unusable))
    assert manifest == comparing.verify(store, "job", manifest.ref)


class _Spoilt:
    """A store in which another checkpoint's manifest is garbage."""

    def __init__(self, inner, key):
        self._inner, self._key, self._reads = inner, key, 0

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def get(self, key, **limits):
        self._reads += key == self._key
        return b"garbage" if key == self._key else self._inner.get(key, **limits)


def test_another_checkpoint_that_is_spoilt_there_does_not_keep_ours_here(store, directory):
    """
    It is only looked at to send less.
    """
    older = uploaded(store, directory, 400)
    manifest = commit(directory, 500, shards={**SHARDS, FIRST: bytes(CHUNK_BYTES + 1)})
    spoilt = _Spoilt(store, f"{FOLDER}/{older.ref.name}/{MANIFEST}")

    uploading.upload(spoilt, "job", directory, manifest.ref, ignore)

    assert spoilt._reads > 0
    assert [400, 500] == steps(store)


def test_a_checkpoint_that_is_damaged_here_does_not_go_there(store, directory):
    """
    A good copy of bad bytes would be trusted later.
    """
    manifest = commit(directory)
    Disk().write_at(directory.path(manifest.ref) / FIRST, 7, b"!")

    with pytest.raises(OffsiteError, match="they are not stored") as caught:
        uploading.upload(store, "job", directory, manifest.ref, ignore)

    assert (True, True, []) == (caught.value.final, caught.value.damaged, steps(store))


def test_a_checkpoint_without_its_manifest_does_not_exist(store, directory):
    """
    Shards of an upload that has not ended are neither offered nor a problem.
    """
    uploaded(store, directory, 400)
    store.put(f"{FOLDER}/step-00000500-000001f4/{FIRST}", b"half")

    found = surveying.survey(store, "job")

    assert ([400], ()) == ([c.ref.step for c in found.checkpoints], found.unusable)


@pytest.mark.parametrize("nonsense", [b"[" * 100_000, b" " * ((1 << 20) + 1)])
def test_an_outcome_is_read_and_nonsense_is_reported(store, nonsense):
    """
    A job that is over is not begun again; what cannot be read is said, and hides no checkpoint.
    """
    uploading.publish(store, "job", {"outcome.json": b'{"outcome": "succeeded"}'})
    good = surveying.survey(store, "job")
    uploading.publish(store, "job", {"outcome.json": nonsense, surveying.LOOKED: nonsense})
    bad = surveying.survey(store, "job")

    assert ({"outcome": "succeeded"}, ()) == (good.outcome, good.unusable)
    assert (None, ("outcome.json: expected a JSON object",)) == (bad.outcome, bad.unusable)
    assert None is surveying.read_abilities(store, "job")


# ----------------------------------------------------------------------------------------- damage


def test_damage_in_the_store_is_found_by_verify(store, directory):
    """
    The same size is not enough.
    """
    manifest = uploaded(store, directory)
    whole = comparing.verify(store, "job", manifest.ref)
    store.put(f"{FOLDER}/{manifest.ref.name}/{FIRST}", b"ZERO" * 50)

    with pytest.raises(OffsiteError, match=FIRST) as caught:
        comparing.verify(store, "job", manifest.ref)

    assert (manifest, True) == (whole, caught.value.damaged)


def test_damage_in_the_store_is_not_restored(store, directory, tmp_path):
    """
    The caller is told to take the next older, and nothing is committed here.
    """
    manifest = uploaded(store, directory)
    store.put(f"{FOLDER}/{manifest.ref.name}/{FIRST}", b"ZERO" * 50)
    there = elsewhere(tmp_path)

    with pytest.raises(OffsiteError, match="chunk 0: expected crc32") as caught:
        restoring.restore(store, "job", manifest.ref, there, ignore)

    assert (True, True, ()) == (caught.value.final, caught.value.damaged, there.committed())


def test_damage_in_the_store_is_repaired_by_an_upload(store, directory):
    """
    As long as the good bytes are here.
    """
    manifest = uploaded(store, directory)
    store.put(f"{FOLDER}/{manifest.ref.name}/{FIRST}", b"ZERO" * 50)
    uploading.upload(store, "job", directory, manifest.ref, ignore)

    assert manifest == comparing.verify(store, "job", manifest.ref)


@pytest.mark.parametrize("paths", [("a", "a/b"), ("a/b", "a"), ("n" * 300,), ("n/" * 2000 + "n",)], ids=len)
def test_a_manifest_that_no_disk_could_hold_is_damage(directory, tmp_path, paths):
    """
    The next older checkpoint is taken: the fault is not this disk's. A place that is wrong is, and costs no checkpoint.
    """
    manifest = replace(
        directory.manifest(commit(directory, 100).ref), shards=tuple(Shard(path, 0, ()) for path in paths)
    )
    (tmp_path / "file").write_bytes(b"")
    wrong = CheckpointDir(tmp_path / "file" / "checkpoints", Disk())
    with pytest.raises(OffsiteError, match="expected what can be a file here") as poisoned:
        restoring.bring(manifest, None, elsewhere(tmp_path), ignore)
    with pytest.raises(OffsiteError, match="Not a directory") as misplaced:
        restoring.bring(manifest, None, wrong, ignore)

    assert [(True, True), (True, False)] == [(e.value.final, e.value.damaged) for e in (poisoned, misplaced)]
    assert "correct checkpoint.dir" in misplaced.value.hint


def test_a_restore_that_does_not_fit_is_refused_before_it_begins(store, tmp_path):
    """
    With the numbers; a full disk would stop more than the restore.
    """
    chunks = 200_000
    manifest = commit(CheckpointDir(tmp_path, Disk()))
    huge = replace(manifest, shards=(Shard("huge", chunks * CHUNK_BYTES, (0,) * chunks),))
    store.put(f"{FOLDER}/{manifest.ref.name}/{MANIFEST}", dump_manifest(huge))

    with pytest.raises(OffsiteError, match=r"expected 1677\.789 GB free") as caught:
        restoring.restore(store, "job", manifest.ref, elsewhere(tmp_path), ignore)

    assert (True, False) == (caught.value.final, caught.value.damaged)
    assert [] == list(elsewhere(tmp_path).root.iterdir())


def test_a_checkpoint_is_safe_though_nothing_else_of_the_run_can_be_written_there(tmp_path):
    """
    Its upload has not failed because journal or ledger is refused: a task of its own tells of that.
    """
    store, directory = FileStore(tmp_path / "store", Disk()), CheckpointDir(tmp_path / "run" / "checkpoints", Disk())
    directory.root.mkdir(parents=True)
    manifest = commit(directory)
    now = datetime(2026, 1, 1, tzinfo=UTC)
    machine = dump_machine(Machine(id="m", opened_at=now, paid_from=now, seen_at=now))
    (tmp_path / "store" / "job").mkdir(parents=True)
    (tmp_path / "store" / "job" / "ledger.json").symlink_to("/etc/passwd")
    arguments = {
        "subject": manifest.ref.name,
        "job": "job",
        "place": dump_place(OffloadPolicy(to=f"file://{tmp_path}/store")),
        "run_dir": str(tmp_path / "run"),
        "checkpoint_dir": str(directory.root),
        "machine": machine,
        "is_leaving": False,
        "conclusion": None,
        "holder": "m",
        "unusable": [],
        "spoilt": {},
        "given_up": False,
    }
    with pytest.raises(OffsiteError):
        tasks.publish({**arguments, "subject": "joined"}, ignore)

    told = tasks.upload(arguments, ignore)

    assert [manifest.ref.step] == [one["ref"]["step"] for one in told["checkpoints"]]
    assert store.get(f"{FOLDER}/{manifest.ref.name}/{MANIFEST}")


def test_a_restore_that_has_all_its_space_needs_no_more(store, tmp_path):
    """
    It was killed after it had taken it, and somebody filled the rest of the disk.
    """
    source, target = CheckpointDir(tmp_path / "source", Disk()), elsewhere(tmp_path)
    manifest = commit(source)
    uploading.upload(store, "job", source, manifest.ref, ignore)
    target.root.mkdir(parents=True)
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", target.root], check=False).returncode:
        pytest.skip("this user may not mount a filesystem")
    try:
        with pytest.raises(OffsiteError, match=r"expected 0\.067 GB free to restore .*, found 0\.001"):
            restoring.restore(store, "job", manifest.ref, target, ignore)
        for shard in manifest.shards:
            restoring._make_file(Disk(), target.begin_restore(manifest.ref), shard)
        found = restoring.restore(store, "job", manifest.ref, target, ignore)
    finally:
        subprocess.run(["umount", "-l", target.root], check=True)

    assert manifest.ref == found.ref


class UnreliableStore(FileStore):
    """A folder to which something happens: after a file was stored, or to what is read."""

    def __init__(self, root):
        super().__init__(root, Disk())
        self.after_put_file = lambda key: None
        self.on_read = lambda content: content
        self.num_reads = 0
        self.seen = set()

    def head(self, key):
        found = super().head(key)
        if found is not None:
            self.seen.add(key)
        return found

    def put_file(self, key, path, shard, sent):
        super().put_file(key, path, shard, sent)
        self.after_put_file(key)

    def read(self, key, offset, num_bytes):
        self.num_reads += 1
        return self.on_read(super().read(key, offset, num_bytes))

    def stream(self, key, offset, num_bytes):
        self.num_reads += 1
        return (self.on_read(block) for block in super().stream(key, offset, num_bytes))


@pytest.fixture
def unreliable(tmp_path):
    return UnreliableStore(tmp_path / "store")


def remove_first(store, key):
    """The first shard, as soon as it was seen to be there: shards go at once, in any order."""
    first = f"{key.partition('extra/')[0]}{FIRST}"
    wait_until(lambda: first in store.seen)
    store.delete(first)


@pytest.mark.parametrize(
    ("happens", "says"),
    [
        pytest.param(lambda store, key: store.put(key, b"ZERO" * 50), "stored, but", id="garbled"),
        pytest.param(lambda store, key: store.delete(key), "stored, but it is not there", id="lost"),
        pytest.param(
            lambda store, key: "extra/" in key and remove_first(store, key),
            "expected 200 bytes, found none|No such file or directory",
            id="removed by somebody else",
        ),
    ],
)
def test_what_the_store_did_not_keep_gets_no_manifest(unreliable, directory, happens, says):
    """
    What was sent is not what counts; what the store confirms is. Trying again helps.
    """
    manifest = commit(directory)
    unreliable.after_put_file = lambda key: happens(unreliable, key)

    with pytest.raises(OffsiteError, match=says) as caught:
        uploading.upload(unreliable, "job", directory, manifest.ref, ignore)
    first = (caught.value.final, steps(unreliable))
    unreliable.after_put_file = lambda key: None
    uploading.upload(unreliable, "job", directory, manifest.ref, ignore)

    assert (False, []) == first
    assert manifest == comparing.verify(unreliable, "job", manifest.ref)


def test_bytes_that_are_damaged_on_their_way_are_read_again(unreliable, directory, tmp_path):
    """
    One flipped bit on the network costs one chunk, not the checkpoint.
    """
    manifest, flips = uploaded(unreliable, directory), iter([b"zerO"])
    unreliable.on_read = lambda content: (
        content.replace(b"zero", next(flips, b"zero")) if b"zero" in content else content
    )
    there = elsewhere(tmp_path)
    restoring.restore(unreliable, "job", manifest.ref, there, ignore)

    assert () == there.verify(manifest.ref)


def test_a_restore_goes_on_where_it_was_cut_short(unreliable, directory, tmp_path):
    """
    Chunks that are here and right are not read again; nobody takes the folder for a leftover meanwhile.
    """
    manifest, there = uploaded(unreliable, directory), elsewhere(tmp_path)
    half = there.root / f".tmp-restore-{manifest.ref.name}"
    half.mkdir(parents=True)
    (half / FIRST).write_bytes(SHARDS[FIRST])
    (half / "extra").mkdir()
    (half / manifest.shards[1].path).write_bytes(b"longer than it should be" * 50)
    (there.root / ".tmp-restore-step-00000001-00000001").mkdir()
    leftovers, unreliable.num_reads = there.leftovers(), 0
    restoring.restore(unreliable, "job", manifest.ref, there, ignore)

    assert ((), 2) == (leftovers, unreliable.num_reads)  # the manifest and one chunk
    assert [manifest.ref.name] == [path.name for path in there.root.iterdir()]
    assert contents(directory, manifest.ref) == contents(there, manifest.ref)


def test_a_checkpoint_of_another_age_is_not_restored(store, directory, tmp_path):
    """
    The same name with another lineage is another checkpoint.
    """
    manifest = uploaded(store, directory)

    with pytest.raises(OffsiteError, match="expected Ref"):
        restoring.restore(store, "job", replace(manifest.ref, lineage=9), elsewhere(tmp_path), ignore)


# --------------------------------------------------------------------------------------- hostility


def _spoiled(**changes):
    def spoil(fields):
        return seal(fields | changes)

    return spoil


def _shard(**changes):
    def spoil(fields):
        fields["shards"][0] |= changes
        return seal(fields)

    return spoil


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda fields: b"\x80\x04.", id="not JSON"),
        pytest.param(lambda fields: b"[" * 200_000, id="JSON that is too deep"),
        pytest.param(lambda fields: b" " * ((16 << 20) + 1), id="larger than any manifest"),
        pytest.param(_spoiled(step=501), id="manifest of another checkpoint"),
        pytest.param(_spoiled(written_at="soon"), id="no time"),
        pytest.param(_spoiled(algorithm="md5"), id="unknown checksum"),
        pytest.param(_spoiled(framework="\x1b]0;title\x07"), id="a framework that a terminal would obey"),
        pytest.param(_spoiled(world_size=0), id="of nobody"),
        pytest.param(_spoiled(shards=[{"path": str(n)} for n in range(70_000)]), id="too many shards"),
        pytest.param(_spoiled(shards=10**9), id="a number of shards"),
        pytest.param(_shard(path="../../../../etc/passwd"), id="path that climbs out"),
        pytest.param(_shard(path="/etc/passwd"), id="absolute path"),
        pytest.param(_shard(path="not-there"), id="shard that is not there"),
        pytest.param(lambda _: b" " * (MAX_MANIFEST_BYTES + 1), id="endless"),
        pytest.param(_shard(size_bytes=201), id="shard of another size"),
        pytest.param(_shard(size_bytes=-1), id="shard of no size"),
        pytest.param(_shard(size_bytes=10**18, checksums=[1]), id="shard larger than its checksums"),
    ],
)
def test_what_is_broken_or_hostile_in_a_store_is_named_and_passed_over(store, directory, tmp_path, spoil):
    """
    Nothing out of a bucket is trusted, nothing of it is written here, and the good ones stay usable.
    """
    good, bad = uploaded(store, directory, 400), uploaded(store, directory, 500)
    store.put(f"{FOLDER}/{bad.ref.name}/{MANIFEST}", spoil(json.loads(dump_manifest(bad))))

    found = surveying.survey(store, "job")

    assert [good.ref] == [checkpoint.ref for checkpoint in found.checkpoints]
    assert [bad.ref.name] == [problem.partition(":")[0] for problem in found.unusable]
    assert not (tmp_path / "elsewhere").exists()


class _Counting:
    """A store that knows what was read."""

    def __init__(self, inner):
        self._inner, self.read = inner, []

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def get(self, key, **limits):
        self.read.append(key)
        return self._inner.get(key, **limits)


def test_a_bucket_full_of_manifests_that_explode_in_memory_is_looked_at_in_little(store, directory):
    """
    Two hundred megabytes, whatever lies there; and what was found to be nonsense is not fetched with each look.
    """
    good, hostile = uploaded(store, directory), b'{"shards":[' + b",".join([b'{"":{}}'] * 2_000_000) + b"]}"
    for number in range(4):
        store.put(f"{FOLDER}/step-{number:08d}-0000000{number}/{MANIFEST}", hostile)
    counting = _Counting(store)
    tracemalloc.start()

    found = surveying.survey(counting, "job")
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    before = len(counting.read)
    again = surveying.survey(counting, "job", spoilt=found.spoilt)

    assert [good.ref] == [checkpoint.ref for checkpoint in found.checkpoints]
    assert ["expected a manifest that takes at most 120 MiB of memory" in why for why in found.unusable] == [True] * 4
    assert most < 100 << 20
    assert again == found
    assert [f"{FOLDER}/{good.ref.name}/{MANIFEST}"] == [k for k in counting.read[before:] if k.endswith(MANIFEST)]


class _Keeping:
    """A store that keeps an object to itself, as one does that is archived, or sealed with a key of somebody's."""

    def __init__(self, inner, name, error=None):
        self._inner, self._key = inner, f"{FOLDER}/{name}/{MANIFEST}"
        self.error = error or OffsiteError("403 InvalidObjectState", final=True, curable=True)

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def get(self, key, **limits):
        if key == self._key:
            raise self.error
        return self._inner.get(key, **limits)


def test_a_newest_manifest_that_the_store_refuses_is_no_missing_one(store, directory):
    """
    The last training is behind it: to go on from an older one, or to begin anew, would throw it away.
    """
    older, newest = uploaded(store, directory, 400), uploaded(store, directory, 500)
    keeping = _Keeping(store, newest.ref.name)

    with pytest.raises(OffsiteError) as caught:
        surveying.survey(keeping, "job")
    found = surveying.survey_readable(keeping, "job")

    assert (True, False, False) == (caught.value.final, caught.value.curable, caught.value.damaged)
    assert [older.ref] == [
        c.ref for c in surveying.survey(keeping, "job", here={newest.ref.name}).checkpoints
    ]  # nothing is behind it that this disk lacks
    assert f"{newest.ref.name}: its manifest cannot be read" in str(caught.value)
    assert "begin anew under another name" in caught.value.hint
    assert ([older.ref], (), [newest.ref.name]) == (
        [c.ref for c in found.checkpoints],
        found.unusable,
        list(found.refused),
    )
    assert [older.ref] == [c.ref for c in surveying.survey(keeping, "job", wanted=older.ref.name).checkpoints]
    with pytest.raises(OffsiteError):
        tidying.tidy(keeping, "job", keep_last=1)
    assert [400, 500] == steps(store)


def test_a_newest_manifest_that_the_store_fails_at_is_waited_for_and_then_lost(store, directory):
    """
    Nothing begins anew for it: it is named among what the run had. An older one is in nobody's way.
    """
    oldest, older, newest = (uploaded(store, directory, step) for step in (300, 400, 500))
    failing = _Keeping(store, newest.ref.name, OffsiteError("500", final=False, of_server=True))

    with pytest.raises(OffsiteError) as caught:
        surveying.survey(failing, "job")
    found = surveying.survey(failing, "job", given_up=True)
    beside = surveying.survey(_Keeping(store, oldest.ref.name, failing.error), "job")

    assert (False, True, True) == (caught.value.final, caught.value.of_server, caught.value.of_object)
    assert ([oldest.ref, older.ref], [newest.ref.name], {}) == (
        [c.ref for c in found.checkpoints],
        list(found.spoilt),
        found.refused,
    )
    assert [older.ref, newest.ref] == [c.ref for c in beside.checkpoints]


def test_an_older_manifest_that_the_store_refuses_is_in_nobodys_way(store, directory):
    """
    It is named, never removed, and what is newer is resumed from and sent as ever.
    """
    older, newer = uploaded(store, directory, 400), uploaded(store, directory, 500)
    keeping = _Keeping(store, older.ref.name)
    newest = uploaded(keeping, directory, 600)

    found = surveying.survey(keeping, "job")
    removed = tidying.tidy(keeping, "job", keep_last=1)

    assert [newer.ref, newest.ref] == [c.ref for c in found.checkpoints]
    assert [older.ref.name] == [problem.partition(":")[0] for problem in found.problems]
    assert ((newer.ref.name,), [400, 600]) == (removed, steps(store))


def test_names_that_are_none_are_not_looked_at(s3_offload, s3server, directory):
    """
    A bucket may hold anything beside our checkpoints.
    """
    store = open_store(s3_offload, s3server.env)
    good = uploaded(store, directory)
    prefix = f"{s3_offload.to.removeprefix(f's3://{BUCKET}/')}/{FOLDER}"
    names = (f"/{MANIFEST}", f"step-1-x/{MANIFEST}", "loose", f"step-00000900-0000000a//{MANIFEST}", "a b/\nc")
    for name in names:
        s3server.client().put_object(Bucket=BUCKET, Key=f"{prefix}/{name}", Body=b"{}")

    found = surveying.survey(store, "job")

    assert [good.ref] == [checkpoint.ref for checkpoint in found.checkpoints]
    assert all(problem.startswith("step-00000900") for problem in found.unusable)  # this server joins slashes


# -------------------------------------------------------------------------------------------- tidy


def test_tidy_keeps_the_newest(store, directory):
    """
    Even when nothing is to be kept.
    """
    manifests = [uploaded(store, directory, step) for step in (100, 200, 300)]
    removed = tidying.tidy(store, "job", keep_last=2)
    kept = steps(store)
    tidying.tidy(store, "job", keep_last=0)

    assert ((manifests[0].ref.name,), [200, 300], [300]) == (removed, kept, steps(store))
    assert {manifests[2].ref.name} == {entry.key.split("/")[2] for entry in store.list(f"{FOLDER}/")}


def test_what_is_known_as_unusable_takes_no_place_of_a_good_one(store, directory):
    """
    A damaged newest looks whole in a listing. It is left alone, too: the fault may be of the machine that found it.
    """
    manifests = [uploaded(store, directory, step) for step in (100, 200, 300)]
    removed = tidying.tidy(store, "job", keep_last=1, unusable=[manifests[2].ref.name])

    assert ((manifests[0].ref.name,), [200, 300]) == (removed, steps(store))


def test_what_is_unusable_goes_with_its_age(store, directory):
    """
    Older than all that are kept it is worth nothing, and would cost money for ever.
    """
    manifests = [uploaded(store, directory, step) for step in (100, 200, 300)]
    removed = tidying.tidy(store, "job", keep_last=1, unusable=[manifests[0].ref.name])

    assert (tuple(m.ref.name for m in manifests[:2]), [300]) == (removed, steps(store))


class KeepsSums(FileStore):
    """A folder that keeps a checksum beside each file, as an object store does, and tells that, whatever becomes of the bytes."""

    sums: ClassVar[dict[str, int]] = {}

    def put_file(self, key, path, shard, sent):
        super().put_file(key, path, shard, sent)
        self.sums[key] = crc32(path.read_bytes())

    def head(self, key):
        found = super().head(key)
        return found and replace(found, crc32=self.sums.get(key))

    def copy(self, source, key, shard):
        self.sums[key] = self.sums[source]
        return super().copy(source, key, shard)


def test_what_rotted_in_the_store_is_sent_anew_whatever_the_store_says_of_it(directory, tmp_path):
    """
    A store tells the checksum that it was given, not that of its bytes. Whoever knows that they are wrong reads
    them: what is right there is not sent again, what is wrong is, and no other checkpoint takes it over.
    """
    store, large = KeepsSums(tmp_path / "store", Disk()), {"frozen": bytes(CHUNK_BYTES + 1), **SHARDS}
    bad = uploaded(store, directory, 400, shards=large)
    rotten = tmp_path / "store" / FOLDER / bad.ref.name / "frozen"
    rotten.write_bytes(b"x" + bytes(CHUNK_BYTES))
    newer, known = commit(directory, 500, shards=large), [bad.ref.name]
    inodes = {path.name: path.stat().st_ino for path in rotten.parent.iterdir()}

    believed = uploading.upload(store, "job", directory, bad.ref, ignore)
    still_rotten = rotten.read_bytes()[:1]
    copied = uploading.upload(store, "job", directory, newer.ref, ignore, known)
    uploading.upload(store, "job", directory, bad.ref, ignore, known)

    assert (0, b"x", 0, bytes(CHUNK_BYTES + 1)) == (believed, still_rotten, copied, rotten.read_bytes())
    anew = {path.name for path in rotten.parent.iterdir() if inodes[path.name] != path.stat().st_ino}
    assert {"frozen", MANIFEST} == anew
    for checkpoint in (bad, newer):
        restoring.restore(store, "job", checkpoint.ref, elsewhere(tmp_path), ignore)


def test_without_a_whole_checkpoint_nothing_is_removed(store, directory):
    """
    Then whatever there is may be all there is.
    """
    manifest = uploaded(store, directory)
    store.delete(f"{FOLDER}/{manifest.ref.name}/{MANIFEST}")
    tidying.sweep(store, "job")

    assert () == tidying.tidy(store, "job", keep_last=1)
    assert len(SHARDS) == len(list(store.list("job/")))


def test_what_an_upload_left_behind_goes_with_the_next_one(store, directory):
    """
    Shards without a manifest, of a machine that is no more; not those that came later, and no whole checkpoint.
    """
    dead, later = "step-00000100-0000000a", "step-00000900-0000000a"
    store.put(f"{FOLDER}/{dead}/shard", b"orphan")
    first = uploaded(store, directory, 200)
    time.sleep(1.1)  # a server's clock ticks in seconds
    second = uploaded(store, directory, 500)
    store.put(f"{FOLDER}/{later}/shard", b"orphan")
    tidying.sweep(store, "job")

    assert {first.ref.name, second.ref.name, later} == {entry.key.split("/")[2] for entry in store.list(f"{FOLDER}/")}


def test_uploads_of_the_dead_are_aborted(s3_offload, s3server, directory):
    """
    Of checkpoints with the next one that is complete, wherever they belonged; of logs and outputs when the run is over.
    """
    store, client = open_store(s3_offload, s3server.env), s3server.client()
    for key in (f"{FOLDER}/step-00000100-0000000a/shard", "job/outputs/board/huge", "other/outputs/board/huge"):
        client.create_multipart_upload(Bucket=BUCKET, Key=f"{store._prefix}{key}")

    def left():
        found = client.list_multipart_uploads(Bucket=BUCKET, Prefix=store._prefix).get("Uploads", [])
        return sorted(upload["Key"].removeprefix(store._prefix).partition("/")[0] for upload in found)

    time.sleep(1.1)  # a server's clock ticks in seconds
    manifest = uploaded(store, directory)
    tidying.sweep(store, "job")
    client.create_multipart_upload(Bucket=BUCKET, Key=f"{store._prefix}{FOLDER}/{manifest.ref.name}/begun-twice")
    after_upload = left()
    store.put("job/preflight/killed", b"of a look")
    time.sleep(1.1)
    uploading.publish(store, "job", {surveying.OUTCOME: b"{}"})
    tidying.close(store, "job")

    assert [] == list(store.list("job/preflight/"))
    assert ["job", "job", "other"] == after_upload
    assert ["other"] == left()


# ----------------------------------------------------------------------------------------- publish


def test_a_published_file_that_has_not_changed_is_not_sent_again(s3_offload, s3server, tmp_path):
    """
    Logs of past attempts are offered every time, and cost nothing, or one question if the notes of it are lost.
    """
    store, sent, log = open_store(s3_offload, s3server.env), [], tmp_path / "log"
    store.probe()
    store._client.meta.events.register("before-parameter-build.s3.PutObject", lambda params, **_: sent.append(params))
    log.write_bytes(b"1\n")
    for notes in ("known", "known", "lost"):
        known = Known(tmp_path / notes, store)
        uploading.publish_file(store, "job/log", log, 100, known)
        known.save()

    assert 1 == len(sent)


def test_of_a_long_log_the_end_goes_first_and_the_whole_later(store, tmp_path):
    """
    While the attempt runs its last lines are enough; a whole log is never replaced by its end.
    """
    log, known, found = tmp_path / "log", Known(tmp_path / "known", store), []
    log.write_bytes(b"first line\nlast line\n")
    for limit_bytes in (10, 100, 10):
        uploading.publish_file(store, "job/log", log, limit_bytes, known)
        found.append(store.get("job/log"))
    with log.open("ab") as file:
        file.write(b"more\n")
    uploading.publish_file(store, "job/log", log, 100, known)

    whole = b"first line\nlast line\n"
    assert [b"[the first 11 bytes are not in the store]\nlast line\n", whole, whole] == found
    assert whole + b"more\n" == store.get("job/log")


def test_published_files_are_there_under_the_jobs_name(store, tmp_path):
    """
    Small ones, large ones, and bytes; one that is gone, or cannot be read, costs nothing; a later version replaces
    an earlier one.
    """
    known = Known(tmp_path / "known", store)
    (tmp_path / "unreadable.log").mkdir()
    (tmp_path / "large.log").write_bytes(b"x" * (CHUNK_BYTES + 1))
    for lines in (b"1\n", b"1\n2\n"):
        (tmp_path / "journal.jsonl").write_bytes(lines)
        for name in ("journal.jsonl", "gone.log", "unreadable.log", "large.log"):
            uploading.publish_file(store, f"job/{name}", tmp_path / name, CHUNK_BYTES + 1, known)
        uploading.publish(store, "job", {"status.json": b"{}"})

    sizes = {entry.key: entry.size_bytes for entry in store.list("job/")}

    assert {"job/journal.jsonl": 4, "job/large.log": CHUNK_BYTES + 1, "job/status.json": 2} == sizes


# --------------------------------------------------------------------------- kills and power losses


@pytest.mark.parametrize("loss", list(Loss))
@pytest.mark.parametrize("fail_at", range(20))
def test_a_restore_that_loses_power_is_whole_or_absent_and_can_go_on(tmp_path, directory, fail_at, loss):
    """
    After a power loss at any operation nothing half-restored is listed, and the next restore succeeds.
    """
    store = open_store(OffloadPolicy(to=f"file://{tmp_path}/store"), {})
    manifest = uploaded(store, directory)
    root = tmp_path / "elsewhere"
    root.mkdir()
    disk = FaultyDisk(root, fail_at)
    try:
        restoring.restore(store, "job", manifest.ref, CheckpointDir(root, disk), ignore)
    except PowerLoss:
        disk.lose(loss, seed=fail_at)
    else:
        disk.lose(loss)
        assert 1 == len(CheckpointDir(root, Disk()).committed())

    after = CheckpointDir(root, Disk())
    listed = [after.verify(checkpoint.ref) for checkpoint in after.committed()]
    restoring.restore(store, "job", manifest.ref, after, ignore)

    assert [()] * len(listed) == listed
    assert contents(directory, manifest.ref) == contents(after, manifest.ref)
    assert ((), ()) == (after.leftovers(), after.problems())


class _AfterAnother:
    """A source that keeps one shard to itself until another is durable."""

    def __init__(self, source, kept, is_durable):
        self.manifest, self.read = source.manifest, source.read
        self._source, self._kept, self._is_durable = source, kept, is_durable

    def stream(self, shard, first, num_chunks):
        if shard.path == self._kept:
            assert self._is_durable.wait(timeout=30), "the other shard was not synced meanwhile"
        return self._source.stream(shard, first, num_chunks)


class _Telling(Disk):
    def __init__(self, name):
        self._name, self.synced = name, threading.Event()

    def sync(self, path):
        super().sync(path)
        if path.name == self._name:
            self.synced.set()


def test_a_shard_that_is_whole_is_durable_while_others_still_come(store, directory, tmp_path):
    """
    A disk that writes late does not do it all at the end of a restore.
    """
    manifest = uploaded(store, directory)
    first, second = (shard.path for shard in manifest.shards[:2])
    disk = _Telling(first)
    source = _AfterAnother(restoring.StoreSource(store, "job", manifest.ref), second, disk.synced)

    restoring.bring(manifest, source, CheckpointDir(tmp_path / "elsewhere", disk), ignore)

    assert contents(directory, manifest.ref) == contents(CheckpointDir(tmp_path / "elsewhere", Disk()), manifest.ref)


def test_reserved_space_is_a_files_own_and_holds_no_bytes_yet(tmp_path):
    """
    A full disk is met before the first byte is fetched, and what was only reserved is not read when it goes on.
    """
    path = tmp_path / "shard"
    Disk().reserve(path, 1 << 20)
    reserved, before = path.stat(), has_bytes(path)
    Disk().write_at(path, 1 << 19, b"x" * 4096)
    Disk().reserve(path, 1 << 20)

    assert (1 << 20, False) == (reserved.st_blocks * 512, before)
    assert has_bytes(path)
    assert b"x" * 4096 == path.read_bytes()[1 << 19 : (1 << 19) + 4096]


@pytest.mark.storm
@pytest.mark.parametrize("kind", ["file", "s3"])
def test_moving_a_checkpoint_survives_being_killed_again_and_again(request, directory, tmp_path, kind):
    """
    Killed at random moments and started again, an upload and a restore end with the same bytes, and never look whole before.
    """
    offload, env = OffloadPolicy(to=f"file://{tmp_path}/store"), {}
    if kind == "s3":
        offload, env = request.getfixturevalue("s3_offload"), request.getfixturevalue("s3server").env
        offload = offload.model_copy(update={"max_bandwidth": 60_000_000})
    chance = random.Random(seed := int.from_bytes(os.urandom(4), "big"))
    print(f"seed {seed}")
    shards = {"large": chance.randbytes(5 * CHUNK_BYTES + 1), "small": b"small", "empty": b""}
    ref = commit(directory, shards=shards).ref
    store, there = open_store(offload, env), elsewhere(tmp_path)

    for _ in range(4):
        move("upload", (offload, env), directory.root, ref, kill_after_s=chance.uniform(0, 0.8))
        for checkpoint in surveying.survey(store, "job").checkpoints:
            comparing.verify(store, "job", checkpoint.ref)
    assert 0 == move("upload", (offload, env), directory.root, ref)
    assert shards == {shard.path: _download(store, ref, shard) for shard in comparing.verify(store, "job", ref).shards}

    for _ in range(4):
        move("restore", (offload, env), there.root, ref, kill_after_s=chance.uniform(0, 0.2))
        assert all(() == there.verify(checkpoint.ref) for checkpoint in there.committed())
    assert 0 == move("restore", (offload, env), there.root, ref)
    assert contents(directory, ref) == contents(there, ref)


def _download(store, ref, shard):
    return store.read(f"{FOLDER}/{ref.name}/{shard.path}", 0, shard.size_bytes) if shard.size_bytes else b""
