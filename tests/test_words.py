"""What people read: every action has its line, numbers are readable, the summary says where the weights are."""

import itertools
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pytest

from runner.committed import MAX_LINEAGE
from runner.facts import (
    Attempt,
    Checkpoint,
    Conclusion,
    Earlier,
    Ending,
    Exit,
    Failed,
    Finished,
    History,
    Lease,
    LeaseState,
    Live,
    Machine,
    Observed,
    Outcome,
    Progress,
    Running,
    Server,
    TaskKind,
    Vacancy,
)
from runner.job import Job
from runner.policy.actions import LEFT, Begin, Conclude, End, Interrupt, Kill, Launch, Prune, RecordExit, Wait
from runner.policy.finish import ALL_OUTPUTS
from runner.words import (
    Surroundings,
    changes,
    closing,
    cost,
    describe,
    describe_draining,
    grace,
    last_save_s,
    note_refusals,
    opening,
    phase,
    progress_line,
    size,
    span,
    status,
    still_running,
    tell_cadence,
    tell_end,
)
from vramfarm.protocol import Ref

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
REF = Ref(1, 500, 1, "0123abcd")
SEEN = Observed(now=NOW, boot_id="b", life="l")
JOB = Job.model_validate({"name": "j", "command": "train.py", "offload": {"to": "s3://b/runs"}})
SERVER = Server(provider="vramfarm", id="srv_abcdef", price_per_hour="31.20")
AROUND = Surroundings(run_dir="/w/j", server=SERVER, first_boot_at=NOW - timedelta(minutes=61), runner_pid=7)


def checkpoint(ref=REF):
    return Checkpoint(ref=ref, size_bytes=12_400_000_000, world_size=8, written_at=NOW)


@pytest.mark.parametrize(
    ("num_bytes", "expected"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (12.4e9, "12.4 GB"), (3.2e15, "3200.0 TB")],
)
def test_size(num_bytes, expected):
    """
    Decimal units, as disks and bills have them.
    """
    assert expected == size(num_bytes)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(-5, "0s"), (59.4, "59s"), (59.6, "1m 00s"), (3599, "59m 59s"), (11_100, "3h 05m"), (187_200, "2d 04h")],
)
def test_span(seconds, expected):
    """
    The two units that matter.
    """
    assert expected == span(seconds)


@pytest.mark.parametrize(
    ("minutes", "expected"), [(1, "7.80 EUR"), (15, "7.80 EUR"), (20.01, "10.92 EUR"), (61, "31.72 EUR")]
)
def test_cost_is_what_the_bill_will_say(minutes, expected):
    """
    Begun minutes, at least fifteen.
    """
    assert expected == cost(SERVER, NOW - timedelta(minutes=minutes), NOW)


@pytest.mark.parametrize(
    ("action", "expected"),
    [
        (Launch(1, None, 1), "launch attempt 1 from step 0 (lineage 1)"),
        (Launch(2, REF, 1), "launch attempt 2 from step 500 (step-00000500-0123abcd)"),
        (
            Launch(2, REF, 1, {"NCCL_P2P_DISABLE": "1"}),
            "launch attempt 2 from step 500 (step-00000500-0123abcd) with NCCL_P2P_DISABLE=1",
        ),
        (RecordExit(Ending.SUCCEEDED, Exit(code=0), 9, ""), "attempt succeeded at step 9 (exit 0)"),
        (RecordExit(Ending.FAILED, Exit(code=-9), 9, "boom"), "attempt failed at step 9 (signal 9): boom"),
        (RecordExit(Ending.FAILED, Exit(code=None), 9, ""), "attempt failed at step 9 (its exit was not seen)"),
        (RecordExit(Ending.INTERRUPTED, Exit(code=0), 9, "noise"), "attempt interrupted at step 9 (exit 0)"),
        (Interrupt("SIGTERM"), "interrupt: save and leave (SIGTERM)"),
        (Kill("why"), "kill the attempt: why"),
        (Prune(REF, "why"), "prune step-00000500-0123abcd: why"),
        (Conclude(Outcome.GAVE_UP, "why"), "conclude gave_up: why"),
        (Begin(TaskKind.RESTORE, "x"), "restore x from the store: this disk does not have it"),
        (Begin(TaskKind.TIDY, "x"), ""),
        (Wait(), ""),
    ],
)
def test_an_action_in_one_line(action, expected):
    """
    What and why, as decided; nothing for what is not worth a line.
    """
    assert expected == describe(action)


def test_progress_line():
    """
    Step, loss, rate and what is left.
    """
    progress = Progress(step=120, max_steps=400, loss=2.34567, steps_per_s=9.8)

    assert "step 120/400  loss 2.3457  9.80 steps/s  about 29s left" == progress_line(replace(SEEN, progress=progress))
    assert "step 1  20.0 s/step" == progress_line(replace(SEEN, progress=Progress(step=1, steps_per_s=0.05)))


def test_what_came_about_between_two_looks():
    """
    A commit, a save that failed, a task that ended: a line each, once.
    """
    after = replace(
        SEEN,
        local=(checkpoint(),),
        progress=Progress(num_failed=1, save_error="save of step 9 failed: no space"),
        tasks={
            TaskKind.UPLOAD: Failed(subject="x", at=NOW, error="refused", final=False, failures=2, hint="look"),
            TaskKind.VERIFY: Finished(subject="y", at=NOW, result={"summary": "8 shards"}),
        },
    )

    assert [
        "checkpoint step-00000500-0123abcd committed: 12.4 GB",
        "save of step 9 failed: no space; training goes on",
        "upload x failed: refused; look (failure 2; it is tried again)",
        "checkpoint y verified in the store: 8 shards",
    ] == list(changes(SEEN, after))
    assert [] == list(changes(after, after))


@pytest.mark.parametrize(
    ("vacancy", "told"),
    [
        (Vacancy.SILENT, "it is silent"),
        (Vacancy.GIVEN_BACK, "it gave the run back"),
        (Vacancy.GONE, "its lease was removed from the store"),
    ],
    ids=str,
)
def test_why_the_run_could_be_taken_over_is_told(vacancy, told):
    """
    Nobody looks for a machine that died where one ended well.
    """
    watching = replace(SEEN, lease=Lease(state=LeaseState.WATCHING, who="m-1", fence=3))
    held = replace(SEEN, lease=Lease(state=LeaseState.HELD, fence=4, vacancy=vacancy))

    assert [f"{told}; this runner has the run now (lease 4)"] == list(changes(watching, held))


def test_a_refusal_of_the_store_is_said_once_with_the_cure():
    """
    It is tried again as long as it trains, and a night of that is one line.
    """
    live = replace(SEEN, live=Live(attempt_id="a", trainers=(1,), savers=()))
    first = Failed(subject="of the run", at=NOW, error="no space left", final=True, failures=1, hint="free some space")
    after = replace(live, tasks={TaskKind.LEASE: first})
    later = replace(live, tasks={TaskKind.LEASE: replace(first, failures=2)})

    line = "lease of the run failed: no space left; free some space (training goes on; it is tried again every 2m 00s)"
    assert [line] == list(changes(live, after))
    assert [] == list(changes(after, later))


def test_a_refusal_that_meets_each_checkpoint_is_said_once_and_each_hour():
    """
    A key without a right refuses every checkpoint of a night: a line with the cure, then one an hour without. What
    is refused for another reason, or after a success, is told in full.
    """

    def refused(number, why="403"):
        name = f"step-{number:08}-0123ab{number % 90 + 10}"
        failed = Failed(subject=name, at=NOW + number * timedelta(minutes=20), error=f"{name}/x: {why}", final=True, failures=1, hint="cure")  # fmt: skip
        return replace(SEEN, tasks={TaskKind.UPLOAD: failed})

    running = replace(SEEN, tasks={TaskKind.UPLOAD: Running(subject="x", started_at=NOW)})
    stored = replace(SEEN, tasks={TaskKind.UPLOAD: Finished(subject="x", at=NOW, result={"summary": "1 MB"})})
    looks = [SEEN, *(look for number in range(8) for look in (refused(number), running))]
    looks += [refused(8, "507"), stored, refused(9, "507")]
    told, lines = {}, []
    for before, after in itertools.pairwise(looks):
        lines += [line.split(" (")[0] for line in changes(before, after, told)]
        told = note_refusals(told, before, after)

    assert [
        "upload step-00000000-0123ab10 failed: step-00000000-0123ab10/x: 403; cure",
        "again: upload step-00000003-0123ab13: step-00000003-0123ab13/x: 403",
        "again: upload step-00000006-0123ab16: step-00000006-0123ab16/x: 403",
        "upload step-00000008-0123ab18 failed: step-00000008-0123ab18/x: 507; cure",
        "checkpoint x is in the store: 1 MB",
        "upload step-00000009-0123ab19 failed: step-00000009-0123ab19/x: 507; cure",
    ] == lines


def test_an_outage_of_the_store_is_told_ever_more_rarely():
    """
    It is asked every 15 s: two hours of that are nine lines.
    """
    away = Failed(subject="of the run", at=NOW, error="no answer", final=False, failures=1)
    looks = [replace(SEEN, tasks={TaskKind.LEASE: replace(away, failures=count)}) for count in range(1, 481)]
    told = [line for a, b in itertools.pairwise([SEEN, *looks]) for line in changes(a, b)]

    assert [f"(failure {2**n}; it is tried again)" for n in range(9)] == [
        line.partition("no answer ")[2] for line in told
    ]


def test_a_disk_that_stays_full_is_told_ever_more_rarely():
    """
    The first time, then after twice as many; a new reason at once. `status` has it all the while.
    """

    def look(count, why="no room"):
        return replace(SEEN, progress=Progress(num_failed=count, save_error=f"save of step {count} failed: {why}"))

    looks = [look(count) for count in range(1, 9)] + [look(9, "no disk")]
    told = [line.split()[3] for a, b in itertools.pairwise([SEEN, *looks]) for line in changes(a, b)]

    assert ["1", "2", "4", "8", "9"] == told


def test_a_save_that_waits_for_a_rank_is_told_once():
    """
    It has not failed, so no count says that there is news.
    """
    waits = replace(SEEN, progress=Progress(save_error="waiting: rank 1, at step 6", is_waiting=True))
    looks = [SEEN, waits, waits, SEEN]

    assert [[waits.progress.save_error], [], []] == [list(changes(a, b)) for a, b in itertools.pairwise(looks)]


def test_what_the_end_waits_for_is_said_and_until_when():
    """
    Whoever asked for the stop learns why the runner is still there, and when it gives up.
    """
    away = Failed(subject="of the run", at=NOW, error="no answer", final=False, failures=1, since=NOW)
    seen = replace(SEEN, tasks={TaskKind.LEASE: away}, only_here=("log",))
    over = History(conclusion=replace(OVER, at=NOW))

    line = describe_draining(JOB, over, seen)

    assert "until 12:30 UTC at the latest: it waits for lease of the run (no answer); Ctrl-C" in line
    assert "2026-01-01T12:30:00+00:00" == status(JOB, over, seen, AROUND, "")["draining"]["until"]
    assert "" == describe_draining(JOB, History(), seen)


@pytest.mark.parametrize("is_over", [False, True])
def test_a_runner_that_left_says_so_in_its_last_status(is_over):
    """
    From the store alone nobody can see whether it lives: its last word must not be that it copies, or begins.
    """
    left = End(code=LEFT, stop=False, keep=True, reason="asked to leave")
    away = Failed(subject="of the run", at=NOW, error="no answer", final=False, failures=1, since=NOW)
    seen = replace(SEEN, tasks={TaskKind.LEASE: away}, only_here=("log",), leaving=True)

    told = status(JOB, History(conclusion=OVER if is_over else None), seen, AROUND, "", left)

    assert ("LEFT", None) == (told["phase"], told["draining"])


def test_weights_in_a_store_that_refused_are_not_denied():
    """
    Where the store was never read, nobody can say that a checkpoint is only on this disk; and an older one there is not the last.
    """
    end = End(code=4, stop=True, keep=True, reason="403")

    newer = replace(checkpoint(), ref=replace(checkpoint().ref, step=900))
    seen = replace(SEEN, local=(newer,), offsite=(checkpoint(),))
    gone = Failed(subject=newer.ref.name, at=SEEN.now, error="no such bucket", final=True, failures=1)
    behind = "\n".join(closing(JOB, History(), seen, AROUND, end))
    away = "\n".join(closing(JOB, History(), replace(seen, tasks={TaskKind.UPLOAD: gone}), AROUND, end))
    unknown = "\n".join(closing(JOB, History(), replace(SEEN, local=(checkpoint(),)), AROUND, end))
    known = "\n".join(closing(JOB, History(), replace(SEEN, local=(checkpoint(),), offsite=()), AROUND, end))

    assert "(on this disk; what the store has is not known)" in unknown
    assert "(only on this disk)" in known
    assert "step-00000900-0123abcd (only on this disk; the store has step-00000500-0123abcd)" in behind
    assert "(only on this disk; the store had step-00000500-0123abcd when it last answered)" in away


def test_the_summary_counts_what_can_be_used_and_names_the_rest():
    """
    One that a newer one overtook on its way to the store is on this disk only; a manifest that makes no sense, or
    claims a lineage that no run comes to, is nobody's checkpoint.
    """
    end = End(code=0, stop=False, keep=False, reason="done")
    refs = [Ref(1, step, 1, f"{step:08x}") for step in (100, 200, 300)]
    older, newest, damaged = (replace(checkpoint(), ref=ref) for ref in refs)
    hostile = replace(checkpoint(), ref=Ref(MAX_LINEAGE, 7, 1, "0badbad0"))
    seen = replace(SEEN, local=(older, newest), offsite=(newest, damaged, hostile), spoilt=frozenset({"step-x"}))

    (told,) = [
        line
        for line in closing(JOB, History(), replace(seen, unusable=frozenset({refs[2].name})), AROUND, end)
        if line.startswith("checkpoints")
    ]
    (plain,) = [line for line in closing(JOB, History(), SEEN, AROUND, end) if line.startswith("checkpoints")]

    useless = closing(
        JOB, History(), replace(SEEN, offsite=(damaged,), unusable=frozenset({refs[2].name})), AROUND, end
    )
    assert "weights      none that can be used" in useless
    assert "checkpoints  0 kept" == plain
    assert f"checkpoints  2 kept, newest {refs[1].name}" == told.partition(";")[0]
    assert f"; only on this disk, since a newer one went to the store: {refs[0].name};" in told
    assert told.endswith(f"; of no use in the store: {hostile.ref.name}, {refs[2].name}, step-x")


POD = Server(provider="runpod", id="p1", price_per_hour="23.92", currency="USD", keeping="40.00 USD a month (200 GB)")


@pytest.mark.parametrize(
    ("server", "stop", "keep", "told"),
    [
        (POD, True, True, "its volume disk stays and costs 40.00 USD a month (200 GB) until you terminate the pod"),
        (replace(POD, keeping=""), True, True, "costs 0.20 USD per GB and month until you terminate the pod"),
        (POD, True, False, "nothing is billed after it but a network volume"),
        (POD, False, True, "23.92 USD an hour until the deadline, or until you stop it"),
        (SERVER, True, True, "billing ends when it is saved"),
    ],
    ids=["pod, price known", "pod, price unknown", "pod, nothing to keep", "pod that stays", "VRAMfarm"],
)
def test_what_costs_after_the_end_is_in_the_summary_and_in_the_status(server, stop, keep, told):
    """
    A stopped pod's disk is billed for months where nobody knows of it.
    """
    end, around = End(code=4, stop=stop, keep=keep, reason="403"), replace(AROUND, server=server)

    (line,) = [line for line in closing(JOB, History(), SEEN, around, end) if line.startswith("after it ")]

    assert told in line
    assert told in status(JOB, History(), SEEN, around, "", end)["afterwards"]
    assert status(JOB, History(), SEEN, around, "")["afterwards"] is None


def test_slow_work_says_how_far_it_has_got():
    """
    Only when it is slow.
    """
    running = Running(subject="x", started_at=NOW - timedelta(seconds=90), progress=0.43, note="shard 3")
    seen = replace(SEEN, tasks={TaskKind.UPLOAD: running})

    assert ["upload x: 43% after 1m 30s (shard 3)"] == list(still_running(seen, longer_than=timedelta(seconds=5)))
    assert [] == list(still_running(seen, longer_than=timedelta(minutes=5)))


LIVE = Live(attempt_id="a", trainers=(1,), savers=())
FAILED = Attempt(
    number=1, id="a", resume=None, lineage=1, boot_id="b", launched_at=NOW, ending=Ending.FAILED, step=7, ended_at=NOW
)
OVER = Conclusion(outcome=Outcome.SUCCEEDED, reason="training is done", at=NOW)


@pytest.mark.parametrize(
    ("history", "seen", "expected"),
    [
        (History(), SEEN, "PREFLIGHT"),
        (History(), replace(SEEN, live=LIVE), "STARTING"),
        (History(), replace(SEEN, live=LIVE, progress=Progress(step=1, attached=True)), "RUNNING"),
        (History(), replace(SEEN, live=LIVE, leave_sent_at=NOW), "LEAVING"),
        (History(attempts=(FAILED,)), SEEN, "BACKOFF"),
        (History(), replace(SEEN, tasks={TaskKind.RESTORE: Running(subject="x", started_at=NOW)}), "RESTORING"),
        (History(conclusion=OVER), SEEN, "DRAINING"),
        (History(conclusion=OVER, stop_sent_in="l"), SEEN, "STOPPING"),
    ],
)
def test_phase(history, seen, expected):
    """
    One word for what is going on, computed for display.
    """
    assert expected == phase(history, seen)


def test_status_has_what_scripts_ask_for():
    """
    Steps, checkpoints with where they are, money, and the end.
    """
    seen = replace(SEEN, local=(checkpoint(),), offsite=(checkpoint(),))

    told = status(JOB, History(attempts=(FAILED,), conclusion=OVER), seen, AROUND, "hello")

    assert ("j", 500, 1, "31.72 EUR", "srv_abcdef", "succeeded", 0) == tuple(
        told[k] for k in ("job", "step", "attempt", "cost", "server", "outcome", "exit_code")
    )
    where = {"local": True, "offsite": True, "verified": True}
    identity = {"step": 500, "id": "0123abcd", "lineage": 1, "written_at": checkpoint().written_at.isoformat()}
    assert [identity | where] == told["checkpoints"]


def test_status_ends_with_the_runners_last_word():
    """
    Training may have succeeded and the run not: outcome, reason and code are those that the process ends with.
    """
    end = End(code=4, stop=True, keep=True, reason="done, but not all outputs are in the store: x")
    over = History(conclusion=replace(OVER, outcome=Outcome.SUCCEEDED))

    told = [status(JOB, over, SEEN, AROUND, "", last) for last in (None, end)]

    expected = [("succeeded", OVER.reason, 0), ("store", end.reason, 4)]
    assert expected == [(one["outcome"], one["reason"], one["exit_code"]) for one in told]


def test_status_tells_of_slow_work():
    """
    How far an upload is shows from outside.
    """
    running = Running(subject="step-00000500-0123abcd", started_at=NOW, progress=0.4, note="31 MB/s")
    seen = replace(SEEN, tasks={TaskKind.UPLOAD: running, TaskKind.SURVEY: None})

    told = status(JOB, History(), seen, AROUND, "")

    expected = {"kind": "upload", "subject": "step-00000500-0123abcd", "progress": 0.4, "note": "31 MB/s"}
    assert [expected] == told["tasks"]


def test_opening_and_closing_say_where_the_weights_go():
    """
    A person who reads only these knows what will happen, and what did.
    """
    seen = replace(SEEN, local=(checkpoint(),), offsite=(checkpoint(),), deadline_at=NOW)

    begin = "\n".join(opening(JOB, AROUND, "8 cards"))
    end = End(code=0, stop=True, keep=False, reason="training is done")
    finish = "\n".join(closing(JOB, History(attempts=(FAILED,), conclusion=OVER), seen, AROUND, end))

    assert "server srv_abcdef at 31.20 EUR/h; 8 cards" in begin
    assert "copies go to s3://b/runs/j" in begin
    assert "deadline" not in begin, "the guardian says it, who keeps it"
    assert "7 variables are set in every attempt, unless you set them: NCCL_DEBUG, " in begin
    assert "weights      s3://b/runs/j/checkpoints/step-00000500-0123abcd" in finish
    assert "attempts     1 (1 failed)" in finish
    assert "srv_abcdef is being stopped; its disk is thrown away: nothing is only there" in finish


@pytest.mark.parametrize(
    ("only_here", "expected"),
    [
        ((), "kept by the provider: its logs are only there"),
        (("a", "/workspace/b"), "kept by the provider: a, /workspace/b only there"),
        (("a", "/data/x"), "kept by the provider: a only there; not in it, and gone with the server: /data/x"),
        (("/data/x",), "kept by the provider; not in it, and gone with the server: /data/x"),
    ],
)
def test_closing_says_what_the_folder_that_is_kept_does_not_hold(only_here, expected):
    """
    Outputs may lie anywhere; a provider keeps one folder.
    """
    end = End(code=4, stop=True, keep=True, reason="done, but")
    job = JOB.model_copy(update={"finish": JOB.finish.model_copy(update={"save_folder": "/workspace"})})
    lines = closing(job, History(conclusion=OVER), replace(SEEN, only_here=only_here), AROUND, end)

    assert f"server       srv_abcdef is being stopped; its folder is {expected}" in lines


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        pytest.param(
            Finished(
                subject=ALL_OUTPUTS, at=NOW, result={"there": "9 of 10 files in the store", "not_there": "x: too long"}
            ),
            "9 of 10 files in the store; not there: x: too long",
            id="all but one",
        ),
        pytest.param(
            Failed(subject=ALL_OUTPUTS, at=NOW, error="no answer", failures=9, final=False),
            "not all in the store: no answer",
            id="failed",
        ),
        pytest.param(
            Finished(subject="so far", at=NOW, result={"there": "9 of 9 files in the store"}),
            "not all in the store: there was no time for a last copy",
            id="not at the end",
        ),
    ],
)
def test_closing_says_what_became_of_the_outputs(state, expected):
    """
    In the summary, whoever reads nothing else.
    """
    end = End(code=0, stop=False, keep=False, reason="done")
    job = JOB.model_copy(update={"outputs": ("/board",)})
    seen = replace(SEEN, tasks={TaskKind.OUTPUTS: state})

    assert f"outputs      {expected}" in closing(job, History(), seen, AROUND, end)


def test_closing_does_not_claim_a_store_that_has_nothing():
    """
    An early end with nothing saved says so.
    """
    end = End(code=4, stop=True, keep=False, reason="403")

    finish = "\n".join(closing(JOB, History(), SEEN, AROUND, end))

    assert "weights      none on this disk; what the store has is not known" in finish
    assert "all is in the store" not in finish


@pytest.mark.parametrize(
    ("save_s", "stop_timeout", "enough", "line"),
    [
        pytest.param(None, "60", None, "how long a last save takes is known after the first; docker stop waits 1m 00s (RUNNER_STOP_TIMEOUT)", id="before"),
        pytest.param(4.0, "60", True, "a last save takes about 4.0s; docker stop waits 1m 00s (RUNNER_STOP_TIMEOUT): that is enough", id="enough"),
        pytest.param(
            70.0,
            "60s",
            False,
            "a last save takes about 70.0s; docker stop waits 1m 00s (RUNNER_STOP_TIMEOUT): that is too short, the last save "
            "may be lost: start the container with --stop-timeout 150 --env RUNNER_STOP_TIMEOUT=150",
            id="too-short",
        ),
        pytest.param(
            7.0,
            "",
            False,
            "a last save takes about 7.0s; docker stop waits 10s unless --stop-timeout said otherwise: that is too short, the last save "
            "may be lost: start the container with --stop-timeout 120 --env RUNNER_STOP_TIMEOUT=120",
            id="not-told",
        ),
    ],
)  # fmt: skip
def test_whether_the_grace_is_enough_for_a_last_save(save_s, stop_timeout, enough, line):
    """
    The time is compared with what was told, or with Docker's default; the cure is named.
    """
    found = grace(save_s, stop_timeout)

    assert (enough, line) == (found.enough, found.line)


def test_a_last_save_waits_for_the_step_that_is_agreed_on():
    """
    Three steps at the present rate, then what the one before took; before the first nobody can say.
    """
    seen = replace(SEEN, last_save_s=2.0, progress=Progress(step=10, steps_per_s=0.5))

    assert 8.0 == last_save_s(seen)
    assert last_save_s(replace(seen, last_save_s=0.0)) is None


def test_the_summary_advises_another_cadence_only_where_it_matters():
    """
    Uploads that take longer than the interval: the store never has the newest checkpoint.
    """
    hasty = JOB.model_copy(
        update={"checkpoint": JOB.checkpoint.model_copy(update={"save_interval": timedelta(minutes=5)})}
    )
    seen = replace(SEEN, last_save_s=7.0, last_upload_s=3600.0)
    end = End(code=0, stop=True, keep=False, reason="training is done")

    (line,) = [line for line in closing(hasty, History(), seen, AROUND, end) if line.startswith("cadence")]

    assert line.startswith(
        "cadence      checkpoint.save_interval: 1h instead of 5m: an upload takes so long (a save takes 7.0s"
    )
    assert not any(line.startswith("cadence") for line in closing(JOB, History(), SEEN, AROUND, end))
    assert "" == tell_cadence(JOB, History(), replace(seen, last_upload_s=60.0))


def test_a_script_that_saves_for_itself_is_advised_by_what_it_does():
    """
    `checkpoint.save_interval` does not govern it; before two saves were seen nothing is said.
    """
    job = Job.model_validate(JOB.model_dump(mode="json", by_alias=True) | SCRIPT)
    saves = tuple(
        replace(checkpoint(Ref(1, n, 1, f"{n:08x}")), written_at=NOW + timedelta(minutes=5 * n)) for n in (1, 2)
    )
    seen = replace(SEEN, last_save_s=7.0, last_upload_s=3600.0, local=saves)
    attempt = Attempt(number=1, id="a", resume=None, lineage=1, boot_id="b", launched_at=NOW)
    history = History(attempts=(attempt,))

    told = tell_cadence(job, history, seen)

    assert told.startswith(
        "the script (save_steps or the like) may save every 1h instead of 5m: an upload takes so long"
    )
    assert "" == tell_cadence(job, History(), seen)
    hasty = replace(seen, local=(saves[0], replace(saves[1], written_at=saves[0].written_at + timedelta(seconds=0.2))))
    assert " instead of 1s: " in tell_cadence(job, history, hasty)
    assert 300.0 == status(job, history, seen, AROUND, "")["saves_every_s"]


def test_the_end_is_said_before_it_comes_and_what_sets_it():
    """
    An hour and a quarter of an hour before, once each.
    """
    before = replace(SEEN, deadline_at=NOW + timedelta(minutes=16), deadline_why="limits.max_cost")
    after = replace(before, now=NOW + timedelta(minutes=1))

    line = "limits.max_cost ends this run in 15m 00s, at 12:16 UTC: it saves before that; a higher limit in job.yaml (limits) gives it more"
    assert [line] == list(changes(before, after))
    assert [] == list(changes(after, replace(after, now=NOW + timedelta(minutes=2))))


def test_the_status_counts_all_machines():
    """
    What an earlier machine cost and trained is part of the run.
    """
    hour_ago = NOW - timedelta(hours=1)
    trained = Attempt(
        number=1,
        id="a",
        resume=None,
        lineage=1,
        boot_id="b",
        launched_at=hour_ago,
        ended_at=NOW,
        ending=Ending.INTERRUPTED,
        exit=Exit(code=0),
        step=10,
    )
    other = Machine(
        id="other",
        opened_at=hour_ago,
        paid_from=hour_ago,
        seen_at=NOW,
        price_per_hour="10",
        attempts=(trained,),
    )
    seen = replace(SEEN, machine="me", ledger=(other,), offsite=(checkpoint(),))
    history = History(opened_at=NOW, earlier=Earlier(num_machines=1, cost=Decimal("10.00")))

    told = status(JOB, history, seen, replace(AROUND, first_boot_at=NOW), "")

    assert ("17.80 EUR", 2, "17.80", "10.00") == (
        told["cost"],
        *(told["spent"][k] for k in ("machines", "paid", "useful")),
    )


SCRIPT = {"framework": "torch_save", "command": "train.py {resume_args}"}


@pytest.mark.parametrize(
    ("change", "measured", "server", "said"),
    [
        pytest.param(
            {},
            False,
            SERVER,
            "1m 20s is reserved before the limit for a last save and its upload; what",
            id="at the start",
        ),
        pytest.param(
            {}, True, SERVER, "takes about 2m 10s, 1.13 EUR: a save 10s, the upload of 12.4 GB 2m 00s", id="measured"
        ),
        pytest.param({}, True, SERVER, "4m 50s is reserved for it", id="reserve"),
        pytest.param({}, True, SERVER, "which the provider keeps", id="what does not fit"),
        pytest.param({}, True, None, "what does not fit stays on this disk", id="a machine of one's own"),
        pytest.param(
            {"limits": {"on_limit": "stop_anyway"}}, True, SERVER, "what does not fit is lost", id="stop anyway"
        ),
        pytest.param(
            {"offload": {}},
            False,
            SERVER,
            "is reserved before the limit for a last save, without a copy",
            id="no store",
        ),
        pytest.param(
            SCRIPT, True, SERVER, "a save (where the script makes one at SIGTERM) 10s, the upload", id="a script's own"
        ),
    ],
)
def test_what_the_end_will_take_is_said(change, measured, server, said):
    """
    Size, time and price of the last upload, what is kept for it, and what happens if it does not fit.
    """
    job = Job.model_validate(JOB.model_dump(mode="json", by_alias=True) | change)
    seen = replace(SEEN, deadline_at=NOW + timedelta(hours=12), local=(checkpoint(),))
    if measured:
        seen = replace(seen, last_save_s=10.0, last_upload_s=120.0)

    assert said in tell_end(job, History(opened_at=NOW), seen, server)
