"""
Disks in trouble in the middle of a save: training goes on, it is said once with what to do, the next save tries
again, and two good checkpoints stay. And power that is lost between any two operations of the saver.
"""

import contextlib
import errno
import fcntl
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes import FaultyDisk, Loss, _restore
from vramfarm import folder, protocol
from vramfarm.protocol import ControlPage, Ended, Env, Reason, Slot, Word
from vramfarm.seat import Seat

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from test_saver import Attempt, names, until, wrong  # noqa: E402  # the path is set above

PATIENCE_S = 60


@pytest.fixture
def attempt(tmp_path):
    """Two ranks that save ten times a second, and two checkpoints that are kept."""
    started = []

    def start(*arguments, number=1, **env):
        one = Attempt(tmp_path, number, **{Env.KEEP_LAST: "2", **env})
        started.append(one)
        return one.start("--steps", "1000000", *arguments)

    yield start
    for one in started:
        one.kill()
        one.wait()


class Trouble:
    """Orders for the shim."""

    def __init__(self, tmp_path, library):
        self.orders = tmp_path / "orders"
        self.log = tmp_path / "operations"
        self.root = tmp_path / "checkpoints"
        self.env = {"LD_PRELOAD": str(library), "TROUBLE_ROOT": str(self.root), "TROUBLE_ORDERS": str(self.orders)}

    def give(self, text):
        partial = self.orders.with_suffix(".new")
        partial.write_text(text + "\n")
        partial.rename(self.orders)

    def end(self):
        self.orders.unlink()


@pytest.fixture
def trouble(tmp_path, library):
    return Trouble(tmp_path, library)


def wait_for(attempt, word, more=1):
    """Until a count on the page is larger by `more`."""
    before = attempt.page[word]
    until(lambda: attempt.page[word] >= before + more, PATIENCE_S)


def goes_on(attempt):
    """Whether ranks make steps now."""
    before = attempt.page.get(0, Slot.STEP)
    until(lambda: attempt.page.get(0, Slot.STEP) > before + 20, PATIENCE_S)
    return True


def left_behind(attempt):
    """What is wrong when all have ended: checkpoints that are not what was staged, and halves of some."""
    attempt.kill()
    attempt.wait(PATIENCE_S)
    return wrong(attempt.checkpoints) + halves(attempt)


def said(attempt):
    return [line for line in (attempt.folder / "saver.log").read_text().splitlines() if "failed" in line]


TROUBLES = {
    "fsync fails": ("fsync", errno.EIO, "Input/output error; the disk, or the server behind it, fails"),
    "a write fails": ("write", errno.EIO, "the disk, or the server behind it, fails"),
    "a stale handle": ("open", errno.ESTALE, "Stale file handle; the disk, or the server behind it, fails"),
    "the quota is used up": ("write", errno.EDQUOT, "Disk quota exceeded; free some space there"),
    "the disk is full": ("write", errno.ENOSPC, "No space left on device; free some space there"),
    "read-only": ("mkdir", errno.EROFS, "Read-only file system; it has been mounted read-only"),
    "a close fails": ("close", errno.EIO, "Input/output error; the disk, or the server behind it, fails"),
    "stale at its end": ("truncate", errno.ESTALE, "Stale file handle; the disk, or the server behind it, fails"),
    "no answer": ("fsync", errno.ETIMEDOUT, "the disk, or the server behind it, fails"),
    "the commit fails": ("rename", errno.EIO, "the disk, or the server behind it, fails"),
}


@pytest.mark.parametrize("kind", TROUBLES)
def test_trouble_with_the_disk_stops_saving_and_not_training(attempt, trouble, kind):
    """
    Whichever operation fails: what is said says where and what to do, once a try; nothing half-written stays; the two
    good ones do; and when it is over the next save is there.
    """
    operation, code, words = TROUBLES[kind]
    training = attempt(**trouble.env)
    wait_for(training, Word.NUM_COMMITTED, 2)

    trouble.give(f"{operation} {code} 0")
    until(lambda: words in training.page.error(), PATIENCE_S)
    error = training.page.error()
    went_on, kept = goes_on(training), training.steps()
    trouble.end()
    wait_for(training, Word.NUM_COMMITTED)

    assert str(trouble.root) in error
    assert len(said(training)) == len(set(said(training)))
    assert (True, 2) == (went_on, len(kept))
    assert [] == left_behind(training)


UNSYNCED = f"a power loss may take it: {{}}: Input/output error; {folder._BROKEN}"


@pytest.mark.parametrize("who", ["the saver that wrote it", "its successor"])
def test_a_checkpoint_whose_name_may_be_lost_is_none_that_counts_and_stays(attempt, trouble, who):
    """
    After the rename everybody sees it, and starts go on from it, so it is not removed; but durable is what its folder's
    sync confirms, and without that it is not called committed: not by the saver that renamed it, nor by one that finds it.
    """
    training = attempt(**trouble.env)
    wait_for(training, Word.NUM_COMMITTED, 2)
    if who == "its successor":
        saver = training.saver()
        trouble.give("fsync -1 0 .")
        until(lambda: training.page[Word.SAVING_STEP] in training.steps(), PATIENCE_S)
        os.kill(saver, signal.SIGKILL)
    committed = training.page[Word.NUM_COMMITTED]
    trouble.give(f"fsync {errno.EIO} 0 .")
    until(lambda: "a power loss may take it" in training.page.error(), PATIENCE_S)
    error = training.page.error()
    step = int(error.split()[1])
    there, counted, went_on = training.steps(), training.page[Word.NUM_COMMITTED], goes_on(training)
    trouble.end()
    wait_for(training, Word.NUM_COMMITTED)

    assert f"step {step} is written, and starts go on from it, but {UNSYNCED.format(trouble.root)}" == error
    assert (True, True) == (step in there, went_on)
    assert counted - committed <= (who != "its successor")  # one may have been on its way when the orders came
    assert [] == left_behind(training)


def test_an_end_that_is_recorded_ends_training_though_its_folder_cannot_be_synced(attempt, trouble, tmp_path):
    """
    The record is there for whoever looks: ranks that trained on would contradict it. Lost with the power it costs a start.
    """
    end = tmp_path / "end" / "end.json"
    end.parent.mkdir()
    training = attempt(**trouble.env | {"TROUBLE_ROOT": str(tmp_path), Env.END_FILE: str(end)})
    wait_for(training, Word.NUM_COMMITTED)
    trouble.give(f"fsync {errno.EIO} 0 end")

    training.page[Word.REQUEST_LEAVE] = 1

    assert [0, 0] == training.wait(PATIENCE_S)
    assert ("left", training.steps()[0]) == (
        protocol.parse_end(end.read_bytes()).kind,
        training.page[Word.COMMITTED_STEP],
    )


def test_an_end_that_cannot_be_recorded_is_not_told_as_a_save_that_failed(attempt, tmp_path):
    """
    The checkpoint is committed, and says so; what is missing is named, and training goes on.
    """
    end = tmp_path / "end.json"
    end.mkdir()
    training = attempt(**{Env.END_FILE: str(end)})
    wait_for(training, Word.NUM_COMMITTED)

    training.page[Word.REQUEST_LEAVE] = 1
    until(lambda: "the record of the end" in training.page.error(), PATIENCE_S)

    step = training.page[Word.COMMITTED_STEP]
    assert f"the record of the end could not be written, step {step} itself is saved: " in training.page.error()
    assert goes_on(training)
    assert step in training.steps()


def test_a_slow_disk_slows_no_step(attempt, trouble):
    """
    At 0.1 MB/s a save takes seconds: steps are made all the while, none waits for it, and a second save that is due
    meanwhile waits for its turn.
    """
    training = attempt("--step-time", "0.005", **trouble.env)
    wait_for(training, Word.NUM_COMMITTED)
    trouble.give("write 0 10000000")
    until(lambda: training.page[Word.SAVING_STEP], PATIENCE_S)
    wait_for(training, Word.NUM_COMMITTED)
    until(lambda: training.page[Word.SAVING_STEP], PATIENCE_S)
    step, committed = training.page.get(0, Slot.STEP), training.page[Word.NUM_COMMITTED]

    wait_for(training, Word.NUM_COMMITTED)

    assert committed + 1 == training.page[Word.NUM_COMMITTED]
    assert training.page[Word.SAVE_NS] > 0.9e9
    assert training.page.get(0, Slot.STEP) - step > 3
    trouble.end()
    assert [] == left_behind(training)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("--disk-patience", "step 30 is not on the disk after 2 s: the disk, or the server behind it, does not answer"),
        ("--exit-patience", "step 30 is not on the disk"),
    ],
)
def test_the_end_is_not_waited_for_where_the_disk_does_not_answer(attempt, trouble, how, words):
    """
    The saver lives, beats, and waits for its disk: ranks that are done do not wait with it for ever. They say so and
    end; when the disk answers, the saver commits what they staged.
    """
    trouble.give("fsync -1 0")
    training = attempt("--steps", "30", how, "2", **{Env.SAVE_INTERVAL_S: "1000"}, **trouble.env)
    codes = [rank.wait(PATIENCE_S) for rank in training.ranks]
    saver_lived, before = training.saver_lives(), training.steps()
    trouble.end()

    assert ([1, 1], True, []) == (codes, saver_lived, before)
    assert words in (training.folder / "rank-0.log").read_text()
    until(lambda: not training.saver_lives(), PATIENCE_S)
    assert [30] == training.steps()
    assert [] == left_behind(training)


def test_a_notice_of_seconds_and_a_slow_disk_leave_what_was_committed(attempt, trouble):
    """
    All ranks and the saver are killed in the middle of the last save, which would take ten times the notice: what was
    committed verifies, the half is nobody's checkpoint, and the next attempt clears it away.
    """
    training = attempt(**trouble.env)
    wait_for(training, Word.NUM_COMMITTED, 2)
    trouble.give("write 0 500000000")
    training.page[Word.REQUEST_LEAVE] = 1
    until(lambda: halves(training) and training.page[Word.REASON] == Reason.LEAVE, PATIENCE_S)
    before = training.steps()
    os.kill(training.saver(), signal.SIGKILL)
    training.kill()
    training.wait(PATIENCE_S)
    trouble.end()

    assert (before, [], False) == (training.steps(), wrong(training.checkpoints), training.end_file.exists())
    assert 1 == len(halves(training))
    again = attempt(number=2, resume=folder.committed(training.checkpoints)[0].path)
    wait_for(again, Word.NUM_COMMITTED, 1)
    assert again.steps()[0] > before[0]
    assert [] == left_behind(again)


def halves(attempt):
    return [name for name in names(attempt.checkpoints) if name.startswith((protocol.TEMPORARY, protocol.REMOVED))]


@pytest.fixture
def small_disk(tmp_path):
    """A filesystem of a few MB below `checkpoints`, which a test may fill."""
    place = tmp_path / "checkpoints"
    place.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", place], check=False, capture_output=True)
    if done.returncode:
        pytest.skip("this user may not mount a filesystem")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def test_a_disk_that_somebody_fills_keeps_both_checkpoints(small_disk, attempt):
    """
    A real one: what does not fit even without the older checkpoint is no reason to remove that one. When there is
    room again, saves go on.
    """
    training = attempt()
    wait_for(training, Word.NUM_COMMITTED, 3)
    stop_between_saves(training)
    space = os.statvfs(small_disk)
    (small_disk / "filler").write_bytes(b"x" * (space.f_bavail - 1) * space.f_frsize)
    os.kill(training.saver(), signal.SIGCONT)
    until(lambda: "free some space there" in training.page.error(), PATIENCE_S)
    went_on, kept = goes_on(training), training.steps()
    (small_disk / "filler").unlink()
    wait_for(training, Word.NUM_COMMITTED)

    assert (True, 2) == (went_on, len(kept))
    assert [] == left_behind(training)


def fill(place):
    """To the last byte, as `dd` does."""
    with (place / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass


def test_a_disk_that_is_full_before_the_first_save_is_told_and_the_saver_lives(small_disk, attempt):
    """
    Its log is on that disk, too: not even a word fits. The page has the reason, the ranks go on with the saver that
    they began with, and as soon as there is room there is a checkpoint.
    """
    fill(small_disk)
    training = attempt(**{Env.END_FILE: str(small_disk / "end.json")})
    saver = training.saver()
    until(lambda: "free some space there" in training.page.error(), PATIENCE_S)
    failed, went_on = training.page[Word.NUM_FAILED], goes_on(training)
    until(lambda: training.page[Word.NUM_FAILED] > failed, PATIENCE_S)
    (small_disk / "filler").unlink()
    wait_for(training, Word.NUM_COMMITTED)

    assert (True, saver) == (went_on, training.saver())
    assert [] == left_behind(training)


def test_a_disk_that_stays_full_to_the_end_ends_training_with_the_reason(small_disk, attempt):
    """
    The last save is tried a few times, and then the ranks end with what was in its way: nobody waits for ever.
    """
    fill(small_disk)
    training = attempt("--steps", "50", **{Env.END_FILE: str(small_disk / "end.json")})

    codes = training.wait(PATIENCE_S)

    assert Ended.FAILED == training.page[Word.ENDED]
    assert 0 not in codes
    assert "free some space there" in training.page.error()


def stop_between_saves(attempt):
    """Stop the saver where two checkpoints are there and nothing is being written or removed."""

    def is_quiet():
        os.kill(attempt.saver(), signal.SIGSTOP)
        if [protocol.SAVER_LOCK, "step", "step"] == [
            name[:11] if name[0] == "." else "step" for name in names(attempt.checkpoints)
        ]:
            return True
        os.kill(attempt.saver(), signal.SIGCONT)
        return False

    until(is_quiet, PATIENCE_S)


@pytest.mark.parametrize("how", ["removed", "renamed"])
def test_a_folder_that_goes_while_training_runs_is_made_again_and_locked(attempt, tmp_path, how):
    """
    Nothing is wrong with the disk, so saves go on; it is said once, and no second run may write beside this one.
    """
    training = attempt()
    wait_for(training, Word.NUM_COMMITTED, 2)
    stop_between_saves(training)
    before = training.steps()
    if how == "removed":
        shutil.rmtree(training.checkpoints)
    else:
        training.checkpoints.rename(tmp_path / "elsewhere")
    os.kill(training.saver(), signal.SIGCONT)
    wait_for(training, Word.NUM_COMMITTED, 3)
    log = (tmp_path / "saver.log").read_text()

    assert min(training.steps()) > max(before)
    assert 1 == log.count(f"{training.checkpoints}: was removed or renamed while training ran: it is made again")
    with (training.checkpoints / protocol.SAVER_LOCK).open() as lock, pytest.raises(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    assert [] == left_behind(training)


def test_a_disk_with_space_and_no_name_left_is_told_as_that(small_disk):
    """
    `df` shows space, so "free some" sends whoever looks the wrong way.
    """
    subprocess.run(["mount", "-o", "remount,nr_inodes=3", small_disk], check=True)
    (small_disk / "a").touch()
    (small_disk / "b").touch()

    with pytest.raises(OSError, match="No space left") as caught:
        (small_disk / "c").touch()

    assert f"{small_disk}: No space left on device; {folder._FEWER}" == folder.describe_error(small_disk, caught.value)


def test_a_limit_on_files_that_bounds_memory_is_no_want_of_memory(tmp_path):
    """
    `ulimit -f` counts for staging memory, too: told is which limit it is.
    """
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    seat = Seat(ControlPage.create(tmp_path / "page", num_ranks=1), 0)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        staged = seat.stage(1, 8 << 20, b"{}", lambda _, __: None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    assert (False, True) == (staged, seat.page.error().endswith("is less: ulimit -f unlimited"))


def test_a_saver_that_gets_no_more_memory_is_not_stuck(attempt):
    """
    A save then succeeds with what it has, or fails, or the saver dies and has a successor; training goes on, and
    when there is memory again saves go on.
    """
    training = attempt()
    wait_for(training, Word.NUM_COMMITTED, 3)
    saver, page = training.saver(), training.page
    before = page[Word.NUM_COMMITTED] + page[Word.NUM_FAILED]
    until(lambda: page[Word.SAVING_STEP], PATIENCE_S)

    resource.prlimit(saver, resource.RLIMIT_AS, (1 << 20, -1))
    until(
        lambda: page[Word.NUM_COMMITTED] + page[Word.NUM_FAILED] > before + 2 or page[Word.SAVER_PID] != saver,
        PATIENCE_S,
    )
    went_on, kept = goes_on(training), training.steps()
    with contextlib.suppress(ProcessLookupError):
        resource.prlimit(saver, resource.RLIMIT_AS, (-1, -1))
    wait_for(training, Word.NUM_COMMITTED)

    assert went_on
    assert len(kept) >= 2
    assert [] == left_behind(training)


# ------------------------------------------------------------------------------- power


def operations(log):
    """(operation, path, other, offset, bytes) as the saver made them."""
    raw, at, found = log.read_bytes(), 0, []
    while at < len(raw):
        end = raw.index(b"\n", at)
        name, path, other, offset, size = raw[at:end].decode().split("\t")
        at = end + 1 + int(size)
        found.append((name, Path(path), Path(other), int(offset), raw[end + 1 : at]))
    return found


class Replayed:
    """What the saver did, done again one by one, on a disk that knows what is durable."""

    def __init__(self, before, after):
        after.mkdir()
        self.before, self.after = before, after
        self.disk = FaultyDisk(after)
        self.durable, self._named = set(), set()

    def do(self, operation, path, other, offset, content):
        path = self._here(path)
        match operation:
            case "mkdir":  # the next save: the one before was called committed
                self.disk.make_folder(path)
                self.durable |= self._named
            case "create" | "empty":
                self.disk.write_at(path, 0, b"")
                if operation == "empty":
                    os.truncate(path, 0)
            case "write":
                self.disk.write_at(path, offset, content)
            case "truncate":
                os.truncate(path, offset)
            case "fsync":
                self.disk.sync(path)
                if path == self.after:
                    self.durable |= self._named
                    self._named = set()
            case "rename":
                self.disk.rename(path, self._here(other))
                self._named = (self._named | {self._here(other).name}) - {path.name}
                self.durable.discard(path.name)
            case "remove":
                self.disk.remove(path)
        self.disk._notice()

    def _here(self, path):
        return self.after / path.relative_to(self.before)

    def lose(self, loss, place, seed):
        place.mkdir()
        _restore(self.disk._tree, place, loss, random.Random(seed))


def test_power_lost_at_any_operation_of_a_save_loses_no_checkpoint(attempt, trouble, tmp_path):
    """
    Whatever a filesystem makes of what was not synced, between any two operations of four saves and the removal of
    older ones: what has a checkpoint's name is whole and what was staged, and what was committed is there.
    """
    training = attempt(TROUBLE_LOG=str(trouble.log), **trouble.env)
    until(lambda: training.page[Word.NUM_COMMITTED] >= 4, PATIENCE_S)
    training.kill()
    training.wait(PATIENCE_S)
    replayed, seen, found = Replayed(trouble.root, tmp_path / "replayed"), set(), []

    for number, operation in enumerate(operations(trouble.log)[1:]):  # the first makes the folder itself
        replayed.do(*operation)
        seen.add(operation[0])
        for loss in Loss:
            place = tmp_path / "lost"
            replayed.lose(loss, place, number)
            there = {s.path.name for s in folder.committed(place)}
            found += [(number, operation[:2], loss, w) for w in wrong(place)]
            lost = {n for n in replayed.durable if n.startswith("step-")} - there
            found += [(number, operation[:2], loss, f"{name} is gone") for name in lost]
            shutil.rmtree(place)

    assert [] == found
    assert {"mkdir", "create", "write", "truncate", "fsync", "rename", "remove"} <= seen
    assert number > 60
