"""The saver, the agreement and the ranks' side of it, with real processes and no torch."""

import json
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from vramfarm import folder, memory, protocol
from vramfarm.agreement import Rank
from vramfarm.arenas import Arenas
from vramfarm.committing import Committer, SaveError, Staged
from vramfarm.protocol import (
    LAST_RANK_S,
    LATE_S,
    Arena,
    ControlPage,
    Decision,
    Ended,
    Env,
    Phase,
    Reason,
    Slot,
    Told,
    Word,
)
from vramfarm.saver import Orders, Save, Saver, Wait
from vramfarm.seat import Seat, remove_left_pages
from vramfarm.tending import SaverProcess

TRAINER = Path(__file__).parents[1] / "fake_trainer.py"
sys.path.insert(0, str(TRAINER.parent))
from fake_trainer import content  # noqa: E402  # the path is set above

BYTES = 100_000


STARTED = []


@pytest.fixture(autouse=True)
def _nobody_is_left():
    """Where a test fails half way, no rank trains on for hours."""
    yield
    while STARTED:
        STARTED.pop().kill()


class Attempt:
    """A supervisor's part of one attempt: the page, the environment, and an eye on every process."""

    def __init__(self, folder, number=1, *, world_size=2, interval_s=0.1, resume="none", **more):
        self.folder = folder
        self.checkpoints = folder / "checkpoints"
        self.world_size = world_size
        self.end_file = folder / f"end-{number}.json"
        self.page = ControlPage.create(folder / f"page-{number}", num_ranks=world_size)
        self.id = os.urandom(8).hex()
        self.env = os.environ | {
            Env.CONTROL: str(self.page.path),
            Env.CHECKPOINT_DIR: str(self.checkpoints),
            Env.SAVE_INTERVAL_S: str(interval_s),
            Env.LINEAGE: "0",
            Env.ATTEMPT: str(number),
            Env.ATTEMPT_ID: self.id,
            Env.RESUME: str(resume),
            Env.END_FILE: str(self.end_file),
            **more,
        }
        self.ranks = []

    def start(self, *arguments):
        STARTED.append(self)
        for rank in range(self.world_size):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(self.world_size)}
            argv = (sys.executable, str(TRAINER), "--bytes", str(BYTES), *arguments)
            with (self.folder / f"rank-{rank}.log").open("ab") as log:
                self.ranks.append(subprocess.Popen(argv, env=self.env | place, stdout=log, stderr=log))
        return self

    def wait(self, timeout_s=20):
        codes = [rank.wait(timeout_s) for rank in self.ranks]
        until(lambda: not self.saver_lives(), timeout_s)
        return codes

    def saver(self):
        """Its process id; never 0, which would mean ourselves."""
        until(lambda: self.page[Word.SAVER_PID])
        return self.page[Word.SAVER_PID]

    def saver_lives(self):
        pid = self.page[Word.SAVER_PID]
        return pid != 0 and protocol.process_started(pid) == self.page[Word.SAVER_STARTED]

    def kill(self):
        for rank in self.ranks:
            rank.kill()

    def end(self):
        return protocol.parse_end(self.end_file.read_bytes())

    def steps(self):
        return [s.manifest.step for s in folder.committed(self.checkpoints)]


def until(condition, timeout_s=10.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.005)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def wrong(checkpoints):
    """Whatever is wrong with what is committed: broken folders, bytes that differ from what was staged."""
    found = folder.broken(checkpoints)
    for stored in folder.committed(checkpoints):
        found += [f"{stored.path.name}/{s.path}" for s in stored.manifest.shards if not is_as_staged(stored, s)]
    return found


def is_as_staged(stored, shard):
    raw = (stored.path / shard.path).read_bytes()
    rank = int(shard.path.split("-")[1])
    chunks = [raw[i : i + protocol.CHUNK_BYTES] for i in range(0, len(raw), protocol.CHUNK_BYTES)]
    return content(rank, stored.manifest.step, BYTES) == raw and [zlib.crc32(c) for c in chunks] == list(
        shard.checksums
    )


def test_training_is_saved_by_the_clock_and_at_its_end(tmp_path):
    """
    All ranks save at the same steps, the last step is saved, and `done` is recorded.
    """
    attempt = Attempt(tmp_path).start(
        "--steps", "150", "--step-time", "0.03"
    )  # long enough for a saver that starts slowly

    codes = attempt.wait()

    assert [0, 0] == codes
    assert ("done", 150) == (attempt.end().kind, attempt.end().step)
    assert 150 == attempt.steps()[0]
    assert len(attempt.steps()) > 1
    assert [] == wrong(attempt.checkpoints)


def test_a_request_to_leave_saves_and_ends_all_ranks(tmp_path):
    """
    Ranks that are asked to leave save at one step, the end is recorded as `left`, and all exit 0.
    """
    attempt = Attempt(tmp_path, interval_s=1000).start("--steps", "100000")
    until(lambda: attempt.page.get(1, Slot.STEP) > 3)

    attempt.page[Word.REQUEST_LEAVE] = 1
    codes = attempt.wait()

    assert [0, 0] == codes
    assert ["left", attempt.steps()] == [attempt.end().kind, [attempt.end().step]]
    assert [Phase.LEFT, Phase.LEFT] == [attempt.page.get(r, Slot.PHASE) for r in range(2)]
    assert [] == wrong(attempt.checkpoints)


@pytest.mark.parametrize("steps", [1, 2])
def test_leaving_at_the_end_is_being_done(tmp_path, steps):
    """
    A request to leave that comes when training is over does not make it look unfinished.
    """
    attempt = Attempt(tmp_path, interval_s=1000)
    attempt.page[Word.REQUEST_LEAVE] = 1
    attempt.start("--steps", str(steps), "--step-time", "0.3")

    codes = attempt.wait()

    assert [0, 0] == codes
    assert ("done", steps, 0) == (attempt.end().kind, attempt.end().step, attempt.page[Word.NUM_FAILED])


def test_a_request_to_save_is_answered_while_training_goes_on(tmp_path):
    """
    One save for one request, and the answer is on the page.
    """
    attempt = Attempt(tmp_path, interval_s=1000).start("--steps", "100000")
    until(lambda: attempt.page.get(0, Slot.STEP) > 3)

    attempt.page[Word.REQUEST_SAVE] = 7
    until(lambda: attempt.page[Word.SERVED_SAVE] == 7)
    step = attempt.page.get(0, Slot.STEP)
    until(lambda: attempt.page.get(0, Slot.STEP) > step + 5)
    attempt.kill()
    attempt.wait()

    assert 1 == len(attempt.steps())
    assert ["asked"] == [s.manifest.reason for s in folder.committed(attempt.checkpoints)]


def test_resuming_at_the_end_saves_nothing_more(tmp_path):
    """
    The checkpoint resumed from is the final one: no second copy is written.
    """
    first = Attempt(tmp_path, interval_s=1000).start("--steps", "5")
    first.wait()
    resume = folder.committed(first.checkpoints)[0].path

    second = Attempt(tmp_path, 2, resume=resume).start("--steps", "5")
    second.wait()

    assert [5] == second.steps()
    assert ("done", 5) == (second.end().kind, second.end().step)


def test_state_staged_by_all_ranks_commits_after_their_death(tmp_path):
    """
    Ranks killed right after staging lose nothing: the saver holds their memory.
    """
    attempt = Attempt(tmp_path, interval_s=1000).start("--steps", "100000", "--step-time", "0.1")
    until(lambda: attempt.page.get(0, Slot.STEP) > 0)
    attempt.page[Word.REQUEST_SAVE] = 1
    until(lambda: attempt.page[Word.SERVED_SAVE] == 1)  # the saver knows the memory from now on
    attempt.page[Word.REQUEST_SAVE] = 2
    until(lambda: attempt.page[Word.DECISION] == Decision.COMMITTED)
    saver = attempt.saver()
    os.kill(saver, signal.SIGSTOP)  # so that nothing is written before the ranks are dead
    until(lambda: all(attempt.page.get(r, Slot.ARENA_STATE) == Arena.READY for r in range(2)))

    attempt.kill()
    [rank.wait() for rank in attempt.ranks]
    assert 1 == len(attempt.steps())
    os.kill(saver, signal.SIGCONT)
    attempt.wait()

    assert 2 == len(attempt.steps())
    assert [] == wrong(attempt.checkpoints)


def test_a_save_is_void_when_a_rank_dies_before_it_staged(tmp_path):
    """
    Half a state is no checkpoint, and nothing of it stays on the disk.
    """
    attempt = Attempt(tmp_path, interval_s=1000, world_size=2).start("--steps", "100000")
    until(lambda: min(attempt.page.get(r, Slot.STEP) for r in range(2)) > 3)
    os.kill(attempt.ranks[1].pid, signal.SIGSTOP)
    attempt.page[Word.REQUEST_SAVE] = 1
    until(lambda: attempt.page.get(0, Slot.ARENA_STATE) == Arena.READY)

    attempt.kill()
    attempt.wait()

    assert [] == attempt.steps()
    assert 1 == attempt.page[Word.NUM_FAILED]
    assert [protocol.SAVER_LOCK] == names(attempt.checkpoints)


def test_ranks_train_on_while_their_state_is_copied(tmp_path):
    """
    A copy that takes as long as many steps is waited for by the saver alone; what is committed is the save's step.
    """
    attempt = Attempt(tmp_path).start("--steps", "100000", "--step-time", "0.002", "--copy-time", "0.05")

    until(lambda: attempt.page[Word.NUM_COMMITTED] > 2)
    attempt.page[Word.REQUEST_LEAVE] = 1

    assert [0, 0] == attempt.wait()
    assert 0 == attempt.page[Word.NUM_FAILED]
    assert [] == wrong(attempt.checkpoints)


def test_a_copy_that_its_rank_does_not_live_to_see_is_no_checkpoint(tmp_path):
    """
    Bytes that are still on their way when the rank dies are not there.
    """
    attempt = Attempt(tmp_path, interval_s=1000).start("--steps", "100000", "--copy-time", "60")
    until(lambda: attempt.page.get(0, Slot.STEP) > 3)
    attempt.page[Word.REQUEST_SAVE] = 1
    until(lambda: all(attempt.page.get(r, Slot.ARENA_STATE) == Arena.FILLING for r in range(2)))
    step = attempt.page.get(0, Slot.STEP)
    until(lambda: attempt.page.get(0, Slot.STEP) > step + 5)

    attempt.kill()
    attempt.wait()

    assert [] == attempt.steps()
    assert 1 == attempt.page[Word.NUM_FAILED]


def test_without_memory_to_stage_training_goes_on(tmp_path):
    """
    More than there is would end in the kernel's killing of the training: it is refused, and told.
    """
    attempt = Attempt(tmp_path, interval_s=1000).start("--steps", "100000")
    until(lambda: attempt.page.get(0, Slot.STEP) > 3)
    too_much = (memory.available_bytes() or 0) + (1 << 33)
    attempt.ranks[1].kill()
    attempt.ranks[1].wait()
    seat = Seat(attempt.page, 1)
    seat.start(attempt.page.get(0, Slot.STEP))

    seat.prepare(too_much)
    until(lambda: seat.is_mapped() is None)

    assert "no staging memory: [Errno 12]" in attempt.page.error()
    step = attempt.page.get(0, Slot.STEP)
    until(lambda: attempt.page.get(0, Slot.STEP) > step)
    seat._arena.close()
    attempt.page.put(1, Slot.PID, 0)
    attempt.kill()
    attempt.wait()


def test_a_saver_that_is_killed_is_started_again(tmp_path):
    """
    Its successor goes on with the cadence; training never stops.
    """
    attempt = Attempt(tmp_path).start("--steps", "100000")
    until(lambda: attempt.page[Word.NUM_COMMITTED] > 0)
    first = attempt.saver()

    os.kill(first, signal.SIGKILL)
    before = attempt.page[Word.NUM_COMMITTED]
    until(lambda: attempt.page[Word.NUM_COMMITTED] > before)

    assert first != attempt.page[Word.SAVER_PID]
    attempt.page[Word.REQUEST_LEAVE] = 1
    assert [0, 0] == attempt.wait()
    assert [] == wrong(attempt.checkpoints)


def test_a_saver_that_dies_in_a_save_of_several_windows_fails_that_one_and_not_the_next(tmp_path):
    """
    What was in the first window is gone with it: that save is told as failed, training goes on, and the next is whole.
    """
    page = ControlPage.create(tmp_path / "page", num_ranks=1)
    env = {Env.CONTROL: str(page.path), Env.CHECKPOINT_DIR: str(tmp_path / "checkpoints"), **os.environ}
    seat = Seat(page, 0, SaverProcess(page, env, tmp_path / "saver.log"))
    seat.start(0)

    def image():
        return content(0, step, memory.WINDOW_BYTES)

    def put(to, number, at):
        if at and page[Word.NUM_FAILED] == 0:
            os.kill(page[Word.SAVER_PID], signal.SIGKILL)
        to[:] = image()[at : at + len(to)]

    step, deadline, said = 0, time.monotonic() + 60, set()
    while page[Word.NUM_COMMITTED] == 0 and time.monotonic() < deadline:
        step += 1
        page[Word.REQUEST_SAVE] = page[Word.NUM_FAILED] + 1
        if seat.finished(step) is not None:
            seat.stage_by_window(step, [len(image())], b"{}", put)
        said.add(page.error())
        time.sleep(0.005)
    [stored] = folder.committed(tmp_path / "checkpoints")
    page[Word.ENDED] = Ended.LEFT
    seat.saver.see_off()

    failed = [one for one in said if "the saver was started again while the ranks staged piece by piece" in one]
    killed = [one for one in said if "the saver was killed by signal 9" in one]
    assert (1, 1, 2) == (len(failed), len(killed), page[Word.NUM_FAILED])
    step = stored.manifest.step
    assert image() == (stored.path / stored.manifest.shards[0].path).read_bytes()


def test_a_saver_that_is_stopped_is_replaced_for_good(tmp_path):
    """
    In the middle of a save: it is told, its successor takes that save over and answers what was asked meanwhile, and
    it never wakes up beside it.
    """
    attempt = Attempt(tmp_path).start("--steps", "1000000", "--saver-silence", "1")
    until(lambda: attempt.page[Word.NUM_COMMITTED] > 0)
    first = attempt.saver()
    until(lambda: attempt.page[Word.SAVING_STEP])
    os.kill(first, signal.SIGSTOP)
    step = attempt.page.get(0, Slot.STEP)
    attempt.page[Word.REQUEST_LEAVE] = 1

    until(lambda: "(stopped by a signal): it is killed, and started again" in attempt.page.error(), 60)
    went_on = attempt.page.get(0, Slot.STEP) > step
    codes = attempt.wait(60)

    assert (True, [0, 0], "left") == (went_on, codes, attempt.end().kind)
    assert (0, 1) == (protocol.process_started(first), attempt.page[Word.NUM_FAILED])
    assert attempt.end().step == attempt.steps()[0]
    assert [] == wrong(attempt.checkpoints)
    assert not [name for name in names(attempt.checkpoints) if name.startswith(protocol.TEMPORARY)]


@pytest.mark.parametrize("when", ["before it stages", "while it stages"])
def test_a_save_waits_for_a_rank_that_is_stopped(tmp_path, when):
    """
    What was committed stays, nothing new looks committed, the others train on. If the rank goes on, so does the save.
    """
    slowly = ("--copy-time", "1") if when == "while it stages" else ()
    attempt = Attempt(tmp_path, interval_s=1000).start("--steps", "1000000", *slowly)
    until(lambda: min(attempt.page.get(r, Slot.STEP) for r in range(2)) > 3)
    attempt.page[Word.REQUEST_SAVE] = 1
    until(lambda: attempt.page[Word.NUM_COMMITTED] == 1, 30)
    before = attempt.steps()
    if when == "before it stages":
        os.kill(attempt.ranks[1].pid, signal.SIGSTOP)
    attempt.page[Word.REQUEST_SAVE] = 2
    if when == "while it stages":
        until(lambda: attempt.page.get(1, Slot.ARENA_STATE) == Arena.FILLING)
        os.kill(attempt.ranks[1].pid, signal.SIGSTOP)
    until(lambda: attempt.page.get(0, Slot.ARENA_STATE) == Arena.READY)
    step = attempt.page.get(0, Slot.STEP)
    until(lambda: attempt.page.get(0, Slot.STEP) > step + 20)

    assert before == attempt.steps()
    assert [] == [name for name in names(attempt.checkpoints) if name.startswith(protocol.TEMPORARY)]
    os.kill(attempt.ranks[1].pid, signal.SIGCONT)
    until(lambda: attempt.page[Word.NUM_COMMITTED] == 2, 30)
    attempt.kill()
    attempt.wait()
    assert 0 == attempt.page[Word.NUM_FAILED]
    assert 2 == len(attempt.steps())
    assert [] == wrong(attempt.checkpoints)


@pytest.mark.parametrize(("told", "more"), [(Told.HINDRANCE, " (rank 1: no room)"), (Told.FAILURE, "")])
def test_a_save_that_a_rank_cannot_stage_is_explained_by_its_own_words(tmp_path, told, more):
    """
    What else is told of a rank explains another failure, whatever it begins with.
    """
    page = ControlPage.create(tmp_path / "page", num_ranks=1)
    saver = Saver(Orders.parse({Env.CONTROL: str(page.path), Env.CHECKPOINT_DIR: str(tmp_path)}), page)
    saver._save = Save(7, Reason.ASKED, 1)
    page.put(0, Slot.VOID_STEP, 7)
    page.set_error("rank 1: no room", told)
    saver._turn()

    why = "a rank ended, or could not take part, before its state was staged"
    assert f"save of step 7 failed: {why}{more}" == page.error()


def test_no_save_is_asked_of_memory_in_the_making_when_one_rank_has_stepped_and_the_other_has_not(tmp_path):
    """
    The two minutes for which it is waited begin with the first step of the last rank.
    """
    page = ControlPage.create(tmp_path / "page", num_ranks=2)
    saver = Saver(Orders.parse({Env.CONTROL: str(page.path), Env.CHECKPOINT_DIR: str(tmp_path)}), page)
    page[Word.REQUEST_SAVE] = 1
    begun = [[Rank(True, True, step, Phase.TRAINING, warming=warming) for step in (1, 0)] for warming in (True, False)]

    saver._consider(begun[0])
    assert saver._save is None
    saver._consider(begun[1])
    assert saver._save is not None


@pytest.mark.parametrize(("told", "count"), [(Told.DEATH, 0), (Told.FAILURE, 1)])
def test_a_saver_that_said_why_it_dies_is_not_told_again(tmp_path, told, count):
    """
    Its own last words say more than its exit code.
    """
    page = ControlPage.create(tmp_path / "page", num_ranks=1)
    env = {Env.CONTROL: str(page.path), Env.CHECKPOINT_DIR: str(tmp_path), Env.SAVER_PYTHON: "/bin/false"}
    saver = SaverProcess(page, env, tmp_path / "saver.log")
    saver._start()
    saver._child.wait()
    page.set_error("no room", told)
    saver._tell_death()

    assert count == page[Word.NUM_FAILED]
    assert count == page.error().startswith("the saver ended with exit code 1")


@pytest.mark.parametrize("staging", ["full", "chunked"])
def test_a_rank_that_a_save_waits_for_is_named_once(tmp_path, staging):
    """
    Which one, where it is, and what it does, told by the operating system; also one that has staged a part of it.
    """
    page = ControlPage.create(tmp_path / "page", num_ranks=2)
    orders = Orders.parse({Env.CONTROL: str(page.path), Env.CHECKPOINT_DIR: str(tmp_path)})
    with subprocess.Popen(["sleep", "60"]) as stopped:
        page.put(1, Slot.STEP, 6)
        page.put(1, Slot.STARTED, protocol.process_started(stopped.pid))
        page.put(1, Slot.PID, stopped.pid)
        os.kill(stopped.pid, signal.SIGSTOP)
        until(lambda: protocol.process_state(stopped.pid))
        said = said_of_the_late(page, orders) if staging == "full" else said_of_the_half(page, orders)
        stopped.kill()

    who = f"rank 1, process {stopped.pid}, stopped by a signal, at step 6"
    words = "has not staged the save of step 7 for 120 s; what was committed before stays"
    assert [f"waiting: {who}, {words}", ""] == said


def said_of_the_late(page, orders):
    saver = Saver(orders, page)
    ranks = [
        Rank(attached=True, alive=True, step=9, phase=Phase.TRAINING, arena=Arena.READY, arena_step=7),
        Rank(attached=True, alive=True, step=6, phase=Phase.TRAINING),
    ]
    save = Save(7, Reason.ASKED, 1, staged_at=time.monotonic() - LATE_S)
    saver._wait_for_ranks(save, ranks)
    said = page.error()
    page.set_error("")
    saver._wait_for_ranks(save, ranks)
    return [said, page.error()]


def said_of_the_half(page, orders):
    """A rank that is stopped after its second window."""
    with ThreadPoolExecutor(2) as pool:
        committer = Committer(orders, page, Arenas(page, pool, orders.directory), pool, late_s=0.1)
        staged = Staged(memoryview(bytes(8)), [(0, 24)], {}, 0, memoryview(b""), 0, window_bytes=8)
        page.put(1, Slot.WINDOWS, 2)
        windows = committer._windows(7, 1, staged)
        next(windows)
        next(windows)
        third = pool.submit(next, windows)
        until(page.error, 60)
        said = page.error()
        page.set_error("")
        time.sleep(0.5)
        page.put(1, Slot.VOID_STEP, 7)
        assert isinstance(third.exception(60), SaveError)
    return [said, page.error()]


def test_what_was_staged_too_late_is_in_nobodys_way(tmp_path):
    """
    A copy for a save that was given up comes to its end when the next save is on its way: the rank can stage that.
    """
    attempt = Attempt(tmp_path, interval_s=1000, world_size=1).start("--steps", "1000000", "--step-time", "0.3")
    until(lambda: attempt.page.get(0, Slot.STEP) > 0)
    attempt.page[Word.REQUEST_SAVE] = 1
    until(lambda: attempt.page[Word.NUM_COMMITTED] == 1)
    attempt.page[Word.REQUEST_SAVE] = 2
    until(lambda: attempt.page[Word.SAVING_STEP])
    os.kill(attempt.ranks[0].pid, signal.SIGSTOP)
    assert attempt.page.get(0, Slot.STEP) < attempt.page[Word.SAVING_STEP]
    attempt.page.put(0, Slot.ARENA_STEP, 1)
    attempt.page.put(0, Slot.ARENA_STATE, Arena.READY)
    os.kill(attempt.ranks[0].pid, signal.SIGCONT)
    until(lambda: attempt.page[Word.NUM_COMMITTED] == 2, 30)
    attempt.kill()
    attempt.wait()

    assert [] == wrong(attempt.checkpoints)


def test_the_end_is_not_waited_for_without_bound(tmp_path):
    """
    At the interpreter's exit another rank may be stopped for good.
    """
    page = ControlPage.create(tmp_path / "page", num_ranks=2)
    env = {Env.CONTROL: str(page.path), Env.CHECKPOINT_DIR: str(tmp_path / "checkpoints"), **os.environ}
    saver = SaverProcess(page, env, tmp_path / "saver.log")
    seat = Seat(page, 0, saver)
    with subprocess.Popen(["sleep", "60"]) as other:
        page.put(1, Slot.STARTED, protocol.process_started(other.pid))
        page.put(1, Slot.PID, other.pid)
        os.kill(other.pid, signal.SIGSTOP)
        until(lambda: page[Word.SAVER_PID])
        seat.start(3)
        started = time.monotonic()
        ended = seat.finish(lambda step: None, timeout_s=0.5, recorded=False)
        took_s = time.monotonic() - started
        other.kill()
    page.put(0, Slot.PID, 0)
    page.put(0, Slot.STARTED, 0)
    saver.see_off()

    assert Ended.NO == ended
    assert took_s < 20
    assert [] == folder.committed(tmp_path / "checkpoints")


def test_ranks_that_are_done_do_not_wait_for_one_that_is_dead(tmp_path):
    """
    It never comes to its end, and no launcher need be there to end the others: they end with its name, and what was
    committed before stays.
    """
    attempt = Attempt(tmp_path).start("--steps", "200", "--step-time", "0.01")
    until(lambda: attempt.page[Word.NUM_COMMITTED], 30)
    os.kill(attempt.ranks[1].pid, signal.SIGSTOP)
    until(lambda: attempt.page.get(0, Slot.PHASE) == Phase.DONE, 30)
    before = attempt.steps()

    attempt.ranks[1].kill()
    codes = attempt.wait(60)

    assert ([1, -signal.SIGKILL], False) == (codes, attempt.end_file.exists())
    assert f"rank 1, process {attempt.ranks[1].pid}, at step " in attempt.page.error()
    assert "ended before all were done" in attempt.page.error()
    assert before == attempt.steps()[-len(before) :]
    assert [] == wrong(attempt.checkpoints)


@pytest.mark.parametrize(
    ("waited_s", "words", "ended"),
    [
        (LATE_S - 20, "", Ended.NO),
        (
            LATE_S + 20,
            "waiting: rank 1, process 1, at step 6, has not come to its end; others have, 140 s ago",
            Ended.NO,
        ),
        (
            LAST_RANK_S + 20,
            "rank 1, process 1, at step 6, has not come to its end for 3620 s; others have",
            Ended.FAILED,
        ),
    ],
    ids=["not yet", "told", "given up"],
)
def test_ranks_that_are_done_wait_an_hour_for_the_last_one(tmp_path, waited_s, words, ended):
    """
    One may evaluate for long. It is named after two minutes, once.
    """
    page = ControlPage.create(tmp_path / "page", num_ranks=2)
    saver = Saver(Orders.parse({Env.CONTROL: str(page.path), Env.CHECKPOINT_DIR: str(tmp_path)}), page)
    page.put(1, Slot.PID, 1)
    page.put(1, Slot.STEP, 6)
    ranks = [
        Rank(attached=True, alive=True, step=9, phase=Phase.DONE),
        Rank(attached=True, alive=True, step=6, phase=Phase.TRAINING),
    ]
    saver._wait = Wait(rank=1, is_dead=False, began=time.monotonic() - waited_s)
    saver._consider(ranks)
    said = page.error()
    page.set_error("")
    saver._consider(ranks)

    assert words == said[: len(words)] if words else not said
    assert ended == page[Word.ENDED]
    assert "" == page.error()


def test_pages_are_taken_in_time_that_nobody_else_wants(tmp_path):
    """
    A kernel that puts huge pages together is busy for a second a GB. Threads that write and sum do not inherit that.
    """
    attempt = Attempt(tmp_path).start("--steps", "1000000")
    until(lambda: attempt.page[Word.NUM_COMMITTED], 30)

    found = {scheduled(task) for task in Path(f"/proc/{attempt.saver()}/task").iterdir()}
    attempt.kill()
    attempt.wait()

    ours = os.getpriority(os.PRIO_PROCESS, 0)  # which it inherits
    assert {(os.SCHED_OTHER, ours), (os.SCHED_OTHER, 10), (os.SCHED_IDLE, ours)} == found


def test_pages_are_taken_at_the_lowest_priority_until_a_save_waits_for_them(tmp_path):
    """
    Or for a minute: where all processors are busy they would never be there. Of the whole session: where the kernel shares out
    processors among sessions, a thread's own policy counts among its own only.
    """
    page, wanted = ControlPage.create(tmp_path / "page", num_ranks=1), []
    seat = Seat(page, 0)
    with ThreadPoolExecutor(1) as pool:
        arenas = Arenas(page, pool, tmp_path)
        arenas._priority = Wanted(wanted)
        with arenas._taking:
            seat.prepare(64 << 20)
            arenas.look()
            seat.enter(Phase.SAVING)
            arenas.look()
            seat.enter(Phase.TRAINING)
            arenas.look()
            arenas._announced_at -= 60
            arenas.look()
        until(lambda: arenas.look() and seat.is_mapped())
        small = len(wanted)
        with arenas._taking:
            seat.prepare(1 << 20)
            arenas.look()
    seat.release()

    assert ([19, 0, 19, 0], {0}) == (wanted[:4], set(wanted[small:]))


@pytest.mark.parametrize(("act", "code"), [("print", 0), ("sorted", 1)])
def test_a_saver_that_is_done_does_not_wait_for_its_threads(act, code):
    """
    On a busy machine one that takes pages when nobody else wants the processor needs minutes, and the next saver waits for the lock.
    """
    text = f"import threading, time; from vramfarm.saver import leave; threading.Thread(target=time.sleep, args=(60,)).start(); leave({act})"
    done = subprocess.run([sys.executable, "-c", text], timeout=30, check=False, capture_output=True, text=True)

    assert (code, code == 1) == (done.returncode, "TypeError" in done.stderr)


class Wanted:
    """A priority that only notes what it is to be."""

    def __init__(self, noted):
        self.be = noted.append


@pytest.mark.skipif(not Path("/proc/self/autogroup").exists(), reason="this kernel does not know sessions")
def test_the_priority_is_of_a_session_of_its_own_only(tmp_path):
    """
    Where a saver has none, its session is the script's, or a person's shell.
    """
    code = "from vramfarm.arenas import Priority; p = Priority(); p.be(19); p.be(19); print(open('/proc/self/autogroup').read())"
    found = [
        subprocess.run([sys.executable, "-c", code], start_new_session=own, capture_output=True, text=True, check=True)
        for own in (True, False)
    ]

    assert [True, False] == [" nice 19" in one.stdout for one in found]


def test_a_priority_that_the_kernel_does_not_take_yet_is_asked_for_again(tmp_path):
    """
    It takes few a second. A kernel that has no such thing is asked once.
    """
    code = """
import errno, sys
from vramfarm.arenas import Priority
class File:
    def __init__(self, *errors): self.errors, self.asked = list(errors), 0
    def write_text(self, text):
        self.asked += 1
        if self.errors: raise OSError(self.errors.pop(0), "no")
for file in (File(errno.EAGAIN), File(errno.ENOENT)):
    priority = Priority(file)
    for niceness in (19, 19, 19): priority.be(niceness)
    print(file.asked)
"""
    found = subprocess.run(
        [sys.executable, "-c", code], start_new_session=True, capture_output=True, text=True, check=True
    )

    assert ["2", "1"] == found.stdout.split()


def scheduled(task):
    """How the kernel schedules a thread, and its niceness."""
    fields = (task / "stat").read_text().rpartition(")")[2].split()
    return int(fields[38]), int(fields[16])


def test_the_saver_ignores_polite_signals(tmp_path):
    """
    A preemption sends SIGTERM to everything; the saver must outlive it.
    """
    attempt = Attempt(tmp_path, interval_s=1000).start("--steps", "100000")
    until(lambda: attempt.page.get(0, Slot.STEP) > 3)
    saver = attempt.saver()

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(saver, number)
    attempt.page[Word.REQUEST_LEAVE] = 1
    attempt.wait()

    assert saver == attempt.page[Word.SAVER_PID]
    assert "left" == attempt.end().kind


def test_a_full_disk_stops_saving_and_not_training(tmp_path):
    """
    A write that fails half way leaves nothing, is told, and the next save tries again.
    """
    attempt = Attempt(tmp_path, interval_s=0.2).start("--steps", "100000")
    until(lambda: attempt.page[Word.NUM_COMMITTED] > 0)
    resource.prlimit(attempt.saver(), resource.RLIMIT_FSIZE, (BYTES // 2, -1))  # EFBIG, as ENOSPC would
    until(lambda: attempt.page[Word.NUM_FAILED] > 0)

    error, step = attempt.page.error(), attempt.page.get(0, Slot.STEP)
    committed = set(attempt.steps())
    assert [] == [name for name in names(attempt.checkpoints) if name.startswith(protocol.TEMPORARY)]
    resource.prlimit(attempt.saver(), resource.RLIMIT_FSIZE, (-1, -1))
    until(lambda: set(attempt.steps()) - committed)

    assert "File too large" in error
    assert attempt.page.get(0, Slot.STEP) > step
    attempt.kill()
    attempt.wait()


def test_without_a_supervisor_the_newest_stay(tmp_path):
    """
    Alone, the saver removes the old ones itself, and takes its page away at the end.
    """
    env = os.environ | {Env.SAVE_INTERVAL_S: "0.1", Env.KEEP_LAST: "2"}
    argv = (sys.executable, str(TRAINER), "--steps", "60", "--bytes", str(BYTES))
    trainer = subprocess.Popen(argv, cwd=tmp_path, env=env, stdout=subprocess.DEVNULL)
    pages = Path("/dev/shm")

    assert 0 == trainer.wait(20)
    until(lambda: not list(pages.glob(f"vramfarm-{trainer.pid}-*")))
    steps = [s.manifest.step for s in folder.committed(tmp_path / "checkpoints")]
    assert (60, 2) == (steps[0], len(steps))
    assert [] == wrong(tmp_path / "checkpoints")


def test_who_looks_while_checkpoints_come_and_go_sees_as_many_as_are_kept(tmp_path):
    """
    One that is removed between the listing and the reading has newer ones, which the listing lacked.
    """
    seen = []

    def save(step):
        temporary = tmp_path / f".tmp-{step}"
        temporary.mkdir()
        (temporary / "shard").write_bytes(b"x")
        shards = (protocol.Shard("shard", 1, (zlib.crc32(b"x"),)),)
        folder.commit(temporary, protocol.Manifest("job", 0, step, "0123abcd", 1, 1, "", "crc32", shards))
        folder.prune(tmp_path, 2)
        time.sleep(0.003)  # a look is shorter than ten saves

    save(1)
    save(2)
    with ThreadPoolExecutor(1) as pool:
        saving = pool.submit(lambda: [save(step) for step in range(3, 200)])
        while not saving.done():
            seen.append(len(folder.committed(tmp_path)))
        saving.result()

    assert {2, 3} >= set(seen)


def test_one_writer_to_a_folder(tmp_path):
    """
    A second attempt's saver waits until the first one's is gone.
    """
    first = Attempt(tmp_path, 1, interval_s=1000).start("--steps", "100000")
    until(lambda: first.page.get(0, Slot.STEP) > 3)
    second = Attempt(tmp_path, 2, interval_s=0.05).start("--steps", "100000")
    until(lambda: second.page.get(0, Slot.STEP) > 30)

    assert 0 == second.page[Word.NUM_COMMITTED]
    first.kill()
    first.wait()
    until(lambda: second.page[Word.NUM_COMMITTED] > 0)
    second.kill()
    second.wait()


@pytest.mark.storm
def test_kills_at_random_moments_lose_no_committed_checkpoint(tmp_path):
    """
    Ranks and savers killed at any moment: what is committed is whole and equals what was staged,
    the newest never gets older, and the run still comes to its end.

    STORM_ROUNDS makes it longer.
    """
    seed = int(os.environ.get("STORM_SEED", time.time_ns() % 2**32))
    print(f"STORM_SEED={seed}")
    dice = random.Random(seed)
    newest = 0
    for number in range(1, int(os.environ.get("STORM_ROUNDS", "25")) + 1):
        best = folder.committed(tmp_path / "checkpoints")
        attempt = Attempt(tmp_path, number, interval_s=0.03, resume=best[0].path if best else "none")
        attempt.start("--steps", "1000000", "--step-time", "0.002")
        wreak(attempt, dice)
        attempt.wait()
        assert [] == wrong(attempt.checkpoints)
        assert newest <= max(attempt.steps(), default=0)
        newest = max(attempt.steps(), default=0)
        folder.discard_leftovers(attempt.checkpoints)
        folder.prune(attempt.checkpoints, 3)
        attempt.page.path.unlink()
    assert newest > 0
    last = Attempt(tmp_path, 10**6, resume=folder.committed(tmp_path / "checkpoints")[0].path)
    assert [0, 0] == last.start("--steps", str(newest + 5)).wait()
    assert newest + 5 == last.steps()[0]


def wreak(attempt, dice):
    """Let it run for a moment, kill something, perhaps let it live on, kill the ranks."""
    if dice.random() < 0.8:
        attempt.saver()
    if dice.random() < 0.5:  # however slow the machine is, half of the rounds get as far as a commit
        until = time.monotonic() + 20
        while not attempt.page[Word.NUM_COMMITTED] and time.monotonic() < until:
            time.sleep(0.005)
    time.sleep(0.02 + dice.random() * 0.4)
    saver = attempt.page[Word.SAVER_PID]  # 0 where it is not up yet
    if dice.random() < 0.4 and saver:
        os.kill(saver, signal.SIGKILL)
        time.sleep(dice.choice([0, 0.01, 1.2]))
    if dice.random() < 0.3:
        attempt.page[Word.REQUEST_LEAVE] = 1
    first = dice.choice(attempt.ranks)
    first.kill()
    time.sleep(dice.random() * 0.02)
    attempt.kill()


def test_what_is_committed_names_its_contents(tmp_path):
    """
    The manifest says who wrote it and carries the ranks' JSON untouched.
    """
    attempt = Attempt(tmp_path, 3, interval_s=1000, **{Env.JOB: "llama"}).start("--steps", "4")
    attempt.wait()

    manifest = folder.committed(attempt.checkpoints)[0].manifest

    assert ("llama", 0, 4, 3, 2) == (
        manifest.job,
        manifest.lineage,
        manifest.step,
        manifest.attempt,
        manifest.world_size,
    )
    assert ("final", ("fake",), "crc32") == (manifest.reason, manifest.contents, manifest.algorithm)
    assert {"0": {"step": 4}, "1": {"step": 4}} == {
        rank: {"step": json.loads(json.dumps(state))["step"]} for rank, state in manifest.state["ranks"].items()
    }


def test_a_folder_that_cannot_be_written_is_told_and_training_goes_on(tmp_path):
    """
    The reason is on the page at once, not when training is over.
    """
    (tmp_path / "checkpoints").write_text("a file")
    attempt = Attempt(tmp_path).start("--steps", "100000")

    until(lambda: attempt.page[Word.NUM_FAILED])
    step = attempt.page.get(0, Slot.STEP)
    until(lambda: attempt.page.get(0, Slot.STEP) > step)
    attempt.kill()
    attempt.wait()

    assert "no checkpoint can be written" in attempt.page.error()


def test_who_leaves_waits_for_a_rank_that_is_late_longer_than_for_a_disk(tmp_path):
    """
    Training on past the agreed step, beside a save that ends the others, would leave the ranks at different steps.
    """
    page = ControlPage.create(tmp_path / "page", num_ranks=2)
    page[Word.DECISION], page[Word.PROPOSED_STEP] = Decision.COMMITTED, 10
    seat, left = Seat(page, 0, disk_s=0.2), []
    waiting = threading.Thread(target=lambda: left.append(seat.leave(10)))
    waiting.start()
    for _ in range(15):
        page[Word.SAVER_BEAT_NS] = time.monotonic_ns()
        time.sleep(0.1)
    too_soon = list(left)
    page[Word.ENDED] = Ended.LEFT
    waiting.join(20)

    assert ([], [True]) == (too_soon, left)


def test_pages_of_runs_that_were_killed_are_removed_by_the_next(tmp_path):
    """
    Only of those of whom nobody is there, nor was lately: what lives in another container is not to be seen, but to be heard.
    """
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    now, here = time.monotonic_ns(), os.getpid()
    alive = protocol.process_started(here)
    cases = {  # creator, a rank, when it was started, how long ago it was heard, how old its page is
        "00000001": (gone.pid, gone.pid, 5, 61, 61),
        "00000002": (gone.pid, here, alive, 61, 61),
        "00000003": (gone.pid, here, alive + 1, 61, 61),  # a process id that somebody else has now
        "00000004": (gone.pid, gone.pid, 5, 1, 61),
        "00000005": (gone.pid, gone.pid, 5, 61, 1),
        "00000006": (here, gone.pid, 5, 61, 61),
        "run-0000": (gone.pid, gone.pid, 5, 61, 61),
    }
    for name, (creator, pid, started, silent_s, age_s) in cases.items():
        page = ControlPage.create(tmp_path / f"vramfarm-{creator}-{name}", num_ranks=2)
        page.put(1, Slot.PID, pid)
        page.put(1, Slot.STARTED, started)
        page.put(1, Slot.BEAT_NS, now - silent_s * 10**9)
        page.close()
        os.utime(page.path, (time.time() - age_s,) * 2)
    os.mkfifo(tmp_path / f"vramfarm-{gone.pid}-00000007")

    remove_left_pages(tmp_path, 60.0)

    left = {path.name.split("-", 2)[2] for path in tmp_path.iterdir()}
    assert {*cases, "00000007"} - {"00000001", "00000003"} == left
