"""The whole life of a job in simulated time, losing power after every single disk operation."""

import shutil
from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from runner.committed import MAX_LINEAGE
from runner.facts import (
    Attempt,
    Checkpoint,
    Conclusion,
    Decision,
    Diagnosis,
    Earlier,
    Ending,
    Exit,
    Failed,
    Finished,
    Hang,
    History,
    Lease,
    LeaseState,
    Live,
    Machine,
    Observed,
    Outcome,
    Preflight,
    Progress,
    Running,
    Stage,
    TaskKind,
    Verdict,
)
from runner.job import Job
from runner.policy import ledger
from runner.policy.actions import (
    EXIT_CODES,
    Begin,
    Cease,
    Conclude,
    Discard,
    End,
    Interrupt,
    Join,
    Kill,
    Launch,
    Prune,
    RecordExit,
    SetAside,
    TrimLogs,
    Wait,
)
from runner.policy.divergence import is_distrusted
from runner.policy.finish import ALL_OUTPUTS, Draining, tell_draining, tell_missing
from runner.policy.house import OUTPUTS_EVERY, tidy
from runner.policy.lifecycle import decide
from runner.policy.slow import NO_WORD, REFUSED_AGAIN, STOPPED, STORE_PATIENCE, STUCK
from runner.storage import journal as events
from runner.storage.checkpoints import CheckpointDir
from runner.storage.disk import Disk
from tests.fakes import Loss
from tests.simworld import DAMAGED, START, TURN, Elsewhere, boot, shard_bytes
from vramfarm.protocol import EndRecord, Ref

JOB = Job.model_validate({"name": "tiny", "command": "train.py", "offload": {"to": "s3://bucket/runs"}})
HERE_ONLY = JOB.model_copy(update={"offload": Job.model_validate({"command": "x"}).offload})
GPU_ECC = Diagnosis(
    label="gpu_ecc",
    category="machine",
    rank=1,
    primary_line="CUDA error: uncorrectable ECC error encountered",
    primary_line_no=7,
    cause="a card's memory is wrong",
    remedy="leave",
    decision=Decision.GIVE_UP_MACHINE,
    env={},
    confidence="high",
)
P2P_HANG = replace(
    GPU_ECC, label="p2p_hang", category="nccl", decision=Decision.RETRY_ENV, env={"NCCL_P2P_DISABLE": "1"}
)


ATTEMPT = Attempt(number=1, id="a", resume=None, lineage=1, boot_id="b", launched_at=START)
ACCEPTED = History(accepted_at=START, opened_at=START)
DONE = {TaskKind.PREFLIGHT: Finished(subject="machine and code", at=START)}
CHECKPOINT = Checkpoint(ref=Ref(1, 100, 1, "0" * 8), size_bytes=1, world_size=1, written_at=START)
HALF_AN_HOUR = timedelta(minutes=30)


def at(turns):
    return START + turns * TURN


def history_of(root):
    return events.read(root / "journal.jsonl")


def check_invariants(root, elsewhere):
    """What holds at every instant, recovered or not."""
    directory = CheckpointDir(root / "checkpoints", Disk())
    local = directory.committed()
    for checkpoint in local:
        assert () == directory.verify(checkpoint.ref)
        for rank, shard in enumerate(directory.manifest(checkpoint.ref).shards):
            assert shard_bytes(checkpoint.ref.step, rank) == (directory.path(checkpoint.ref) / shard.path).read_bytes()
    assert elsewhere.promised <= {c.ref for c in local}, "a commit was lost"


def check_finished(root, elsewhere):
    history = history_of(root)
    assert Outcome.SUCCEEDED is history.conclusion.outcome
    assert [True] == [end.stop for end in elsewhere.ends[-1:]]
    assert 500 == max(ref.step for ref in elsewhere.store)
    numbers = [number for number, _ in elsewhere.launches]
    assert numbers == sorted(set(numbers)), "an attempt number was used twice"
    steps = [step or 0 for _, step in elsewhere.launches]
    assert steps == sorted(steps), "a resume went back"


def test_no_trouble(tmp_path):
    """
    A job without trouble launches once and ends with everything in the store and nothing to keep.
    """
    elsewhere = Elsewhere()

    end, _ = boot(JOB, tmp_path / "job", elsewhere)

    check_finished(tmp_path / "job", elsewhere)
    assert (0, True, False) == (end.code, end.stop, end.keep)
    assert [(1, None)] == elsewhere.launches
    assert 2 == len(elsewhere.store)
    assert 2 == len(CheckpointDir(tmp_path / "job" / "checkpoints", Disk()).committed())


def test_without_a_store_the_folder_is_kept(tmp_path):
    """
    What exists only on this disk is never thrown away with the server.
    """
    end, _ = boot(HERE_ONLY, tmp_path / "job", Elsewhere())

    assert (0, True, True) == (end.code, end.stop, end.keep)


def test_crashes_resume_and_progress_forgives_them(tmp_path):
    """
    Attempts that die resume from the newest checkpoint.
    """
    elsewhere = Elsewhere(crash_at_step={1: 300, 2: 400, 3: 500})

    boot(JOB, tmp_path / "job", elsewhere)

    check_finished(tmp_path / "job", elsewhere)
    assert [(1, None), (2, 200), (3, 300), (4, 400)] == elsewhere.launches


def test_no_progress_gives_up_and_stops_the_server(tmp_path):
    """
    Three attempts in a row that never get past the same step end the job with code 6.
    """
    elsewhere = Elsewhere(crash_at_step=dict.fromkeys(range(1, 20), 100))

    end, _ = boot(JOB, tmp_path / "job", elsewhere)

    assert (6, True) == (end.code, end.stop)
    assert [1, 2, 3] == [number for number, _ in elsewhere.launches]


def test_a_machine_at_fault_ends_with_its_checkpoint_in_the_store(tmp_path):
    """
    The server is stopped after everything is off it, with code 3, so that the job can go on elsewhere.
    """
    elsewhere = Elsewhere(crash_at_step={1: 300}, diagnoses={1: GPU_ECC})

    end, _ = boot(JOB, tmp_path / "job", elsewhere)

    assert (3, True, False) == (end.code, end.stop, end.keep)
    assert 200 == max(ref.step for ref in elsewhere.store)
    assert "refused" == elsewhere.outcome.outcome


def test_a_new_machine_goes_on_where_another_was_given_up(tmp_path):
    """
    What was wrong with that machine is no word about the job.
    """
    elsewhere = Elsewhere(crash_at_step={1: 300}, diagnoses={1: GPU_ECC})
    boot(JOB, tmp_path / "bad", elsewhere)
    elsewhere.crash_at_step, elsewhere.diagnoses = {}, {}

    end, _ = boot(JOB, tmp_path / "good", elsewhere)

    assert 0 == end.code
    assert [(1, None), (2, 200)] == elsewhere.launches


def test_a_folder_that_moved_to_a_new_machine_goes_on(tmp_path):
    """
    The fault is of one boot of one machine: the same boot only stops it again, another one trains.
    """
    elsewhere = Elsewhere(crash_at_step={1: 300}, diagnoses={1: GPU_ECC})
    boot(JOB, tmp_path / "job", elsewhere)
    assert 3 == boot(JOB, tmp_path / "job", elsewhere)[0].code
    elsewhere.boots += 1

    end, _ = boot(JOB, tmp_path / "job", elsewhere)

    assert 0 == end.code
    assert [(1, None), (2, 200)] == elsewhere.launches


def test_a_retry_changes_one_thing_and_the_journal_has_it(tmp_path):
    """
    The change is in the environment of the next attempt and of those after it, and survives the runner.
    """
    elsewhere = Elsewhere(crash_at_step={1: 300, 2: 400}, diagnoses={1: P2P_HANG})

    boot(JOB, tmp_path / "job", elsewhere)

    check_finished(tmp_path / "job", elsewhere)
    change = {"NCCL_P2P_DISABLE": "1"}
    assert [{}, change, change] == elsewhere.environments
    attempts = history_of(tmp_path / "job").attempts
    assert elsewhere.environments == [dict(a.env) for a in attempts]
    assert P2P_HANG == attempts[0].diagnosis


def test_sigterm_ends_the_boot_and_not_the_job(tmp_path):
    """
    A preempted job saves, leaves with 75, stops nothing, and goes on in the next boot.
    """
    elsewhere = Elsewhere(sigterms={at(4)})

    end, _ = boot(JOB, tmp_path / "job", elsewhere)
    assert (75, False) == (end.code, end.stop)
    elsewhere.boots += 1
    boot(JOB, tmp_path / "job", elsewhere)

    check_finished(tmp_path / "job", elsewhere)
    assert Ending.INTERRUPTED is history_of(tmp_path / "job").attempts[0].ending


def test_a_new_machine_leaves_what_the_store_says_of_a_finished_job(tmp_path):
    """
    It has done nothing itself, so it publishes nothing over the journal of the machine that did.
    """
    elsewhere = Elsewhere()
    boot(JOB, tmp_path / "job", elsewhere)
    published = elsewhere.outcome

    end, _ = boot(JOB, tmp_path / "another machine", elsewhere)

    assert (0, True, False) == (end.code, end.stop, end.keep)
    assert published is elsewhere.outcome


def test_five_sigterms_before_a_checkpoint_are_not_five_failures(tmp_path):
    """
    An interrupted attempt is not a failed one.
    """
    elsewhere = Elsewhere()
    for _ in range(5):
        elsewhere.sigterms = {elsewhere.now + 2 * TURN}
        assert 75 == boot(JOB, tmp_path / "job", elsewhere)[0].code
    elsewhere.sigterms = set()

    assert 0 == boot(JOB, tmp_path / "job", elsewhere)[0].code


def test_an_interrupted_exit_zero_is_not_success(tmp_path):
    """
    A script that exits 0 because it was asked to leave has not finished.
    """
    elsewhere = Elsewhere(stop_at=at(4))

    end, _ = boot(JOB, tmp_path / "job", elsewhere)

    assert 8 == end.code
    assert Outcome.STOPPED is history_of(tmp_path / "job").conclusion.outcome


def test_a_deaf_attempt_is_killed_after_the_grace_period(tmp_path):
    """
    Ranks that do not leave are ended, and the job stops all the same.
    """
    elsewhere = Elsewhere(stop_at=at(4), deaf=True)

    end, _ = boot(JOB, tmp_path / "job", elsewhere, last_step=10_000)

    assert 8 == end.code


def test_a_boot_after_the_end_stops_again_and_does_not_train(tmp_path):
    """
    A container that is started again after the job is done goes straight on with stopping.
    """
    elsewhere = Elsewhere()
    boot(JOB, tmp_path / "job", elsewhere)

    end, _ = boot(JOB, tmp_path / "job", elsewhere)

    assert (0, True) == (end.code, end.stop)
    assert [(1, None)] == elsewhere.launches


def test_a_new_machine_goes_on_from_the_store(tmp_path):
    """
    With the disk gone, journal and all, training goes on from the newest offsite copy.
    """
    elsewhere = Elsewhere(sigterms={at(5)})
    boot(JOB, tmp_path / "job", elsewhere)
    shutil.rmtree(tmp_path / "job")
    elsewhere.promised.clear()
    newest = max(ref.step for ref in elsewhere.store)

    boot(JOB, tmp_path / "job", elsewhere)

    assert (1, newest) == elsewhere.launches[-1]
    assert 500 == max(ref.step for ref in elsewhere.store)


def test_a_new_machine_for_a_job_that_is_done_ends_at_once(tmp_path):
    """
    The store says that the job is over: nothing is trained twice.
    """
    elsewhere = Elsewhere()
    boot(JOB, tmp_path / "job", elsewhere)
    shutil.rmtree(tmp_path / "job")
    elsewhere.promised.clear()

    end, _ = boot(JOB, tmp_path / "job", elsewhere)

    assert (0, True, False) == (end.code, end.stop, end.keep)
    assert [(1, None)] == elsewhere.launches


def test_a_damaged_offsite_copy_falls_back_to_the_older_one_in_a_new_lineage(tmp_path):
    """
    A roll-back opens a lineage, so that the older step is the newest from now on.
    """
    elsewhere = Elsewhere(sigterms={at(6)})
    boot(JOB, tmp_path / "job", elsewhere)
    shutil.rmtree(tmp_path / "job")
    elsewhere.promised.clear()
    older, newest = sorted(ref.step for ref in elsewhere.store)[-2:]
    elsewhere.damaged_there = {newest}

    boot(JOB, tmp_path / "job", elsewhere)

    assert (1, older) == elsewhere.launches[-1]
    assert 2 == max(elsewhere.store).lineage


def test_a_good_checkpoint_in_the_store_is_not_tidied_away_for_a_damaged_newer_one(tmp_path):
    """
    Neither before it was found damaged, nor after: the store always has one that can be restored, and in the end the new one.
    """
    elsewhere = Elsewhere(sigterms={at(6)})
    boot(JOB, tmp_path / "job", elsewhere)
    shutil.rmtree(tmp_path / "job")
    elsewhere.promised.clear()
    older, newest = sorted(elsewhere.store)[-2:]
    elsewhere.damaged_there = {newest.step}
    only_one = JOB.model_copy(update={"offload": JOB.offload.model_copy(update={"keep_last": 1})})

    boot(only_one, tmp_path / "job", elsewhere)

    assert older not in elsewhere.store
    assert (2, 500) == (max(elsewhere.store).lineage, max(elsewhere.store).step)


def test_what_is_found_damaged_at_the_end_is_sent_again_and_compared_again(tmp_path):
    """
    The copy here is good: nobody loses it for what the store made of the first one.
    """
    elsewhere = Elsewhere(rots={500: 1})

    end, _ = boot(JOB, tmp_path / "job", elsewhere)

    check_finished(tmp_path / "job", elsewhere)
    assert (0, False, set()) == (end.code, end.keep, elsewhere.damaged_there)
    assert frozenset() == history_of(tmp_path / "job").unusable


def test_a_store_that_damages_every_copy_keeps_the_folder(tmp_path):
    """
    It is tried three times, not for ever, and the end says so.
    """
    elsewhere = Elsewhere(rots={500: 100})

    end, _ = boot(JOB, tmp_path / "job", elsewhere)

    assert (4, True, True) == (end.code, end.stop, end.keep)
    assert end.reason.endswith(f"but the store does not have it: {DAMAGED}")
    assert 97 == elsewhere.rots[500]


def test_a_later_life_knows_what_an_earlier_one_found_damaged(tmp_path):
    """
    It does not fetch it again, and what is better than that is sent.
    """
    elsewhere = Elsewhere(sigterms={at(6)})
    boot(JOB, tmp_path / "job", elsewhere)
    older, newest = sorted(elsewhere.store)[-2:]
    elsewhere.promised.clear()
    elsewhere.damaged_there, elsewhere.crash_at_step = {newest.step}, {2: older.step + 100, 3: older.step + 100}
    elsewhere.sigterms = {elsewhere.now + 6 * TURN}
    boot(JOB, tmp_path / "other", elsewhere)
    elsewhere.damaged_there, elsewhere.crash_at_step = set(), {}  # whoever asked again would get it

    end, _ = boot(JOB, tmp_path / "other", elsewhere)

    assert frozenset({newest.name}) == history_of(tmp_path / "other").unusable
    assert {older.step} == {step for _, step in elsewhere.launches[1:]}
    assert 0 == end.code


def test_what_an_earlier_life_found_damaged_is_tried_again_before_there_is_none(tmp_path):
    """
    The fault may have been its network or its memory: a run that was refused for it goes on when that is cured.
    """
    elsewhere = Elsewhere(sigterms={at(6)})
    boot(JOB, tmp_path / "job", elsewhere)
    shutil.rmtree(tmp_path / "job")
    elsewhere.promised.clear()
    elsewhere.damaged_there = {ref.step for ref in elsewhere.store}
    refused, _ = boot(JOB, tmp_path / "job", elsewhere)
    newest, elsewhere.damaged_there = max(elsewhere.store), set()

    end, _ = boot(JOB, tmp_path / "job", elsewhere)

    assert (4, 0) == (refused.code, end.code)
    assert (1, newest.step) == elsewhere.launches[-1]


def test_on_an_empty_disk_a_store_in_which_every_checkpoint_is_damaged_is_not_taken_for_an_empty_one(tmp_path):
    """
    Whoever began anew there by himself would throw a training away; who asks for it may.
    """
    elsewhere = Elsewhere(spoilt=("step-00000500-0123abcd",))

    refused, _ = boot(JOB, tmp_path / "job", elsewhere)

    assert (4, []) == (refused.code, elsewhere.launches)
    assert "step-00000500-0123abcd" in refused.reason
    assert "--start-over" in refused.reason
    never = JOB.model_copy(update={"checkpoint": JOB.checkpoint.model_copy(update={"resume": "never"})})
    assert 0 == boot(never, tmp_path / "other", elsewhere)[0].code


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(rots={}, losses=[(8, False), (4, False), (4, False)], sigterms=set(), keep_last=1)
@given(
    rots=st.dictionaries(st.integers(1, 5).map(lambda n: n * 100), st.integers(1, 2), max_size=3),
    losses=st.lists(st.tuples(st.integers(0, 120), st.booleans()), max_size=3),
    sigterms=st.sets(st.integers(1, 40), max_size=3),
    keep_last=st.integers(1, 3),
)
def test_whatever_rots_in_the_store_what_it_is_trusted_with_is_whole(tmp_path, rots, losses, sigterms, keep_last):
    """
    Any mix of copies that are damaged on arrival, crashes of the runner, lost disks and preemptions: exit 0
    means that the store has the end whole, and what could be restored is never tidied away for what could not.
    """
    root = tmp_path / "job"
    shutil.rmtree(root, ignore_errors=True)
    elsewhere = Elsewhere(rots=rots, sigterms={at(n) for n in sigterms})
    job = JOB.model_copy(update={"offload": JOB.offload.model_copy(update={"keep_last": keep_last})})
    for fail_at, machine_lost in losses:
        boot(job, root, elsewhere, fail_at=fail_at)
        if machine_lost:
            shutil.rmtree(root)
            elsewhere.promised.clear()
        else:
            check_invariants(root, elsewhere)
    for _ in range(6):
        end, _ = boot(job, root, elsewhere)
        if end.code != 75:
            break

    if end.code == 6:  # the runner died before each launch: nobody trained, and nothing was lost
        assert ([], [False] * 3) == (elsewhere.launches, [machine_lost for _, machine_lost in losses])
    elif end.code:
        assert (4, True) == (end.code, end.keep or "--start-over" in end.reason)
    else:
        newest = max(elsewhere.store)
        assert (500, False) == (newest.step, newest.step in elsewhere.damaged_there)


def test_it_never_starts_over_silently(tmp_path):
    """
    Checkpoints exist and none can be used: code 4, and the words say how to start over.
    """
    elsewhere = Elsewhere(sigterms={at(6)})
    boot(JOB, tmp_path / "job", elsewhere)
    shutil.rmtree(tmp_path / "job")
    elsewhere.promised.clear()
    elsewhere.damaged_there = {ref.step for ref in elsewhere.store}

    end, _ = boot(JOB, tmp_path / "job", elsewhere)

    assert 4 == end.code
    assert end.reason.endswith("): checksum mismatch; --start-over begins at step 0"), "why is said, too"


def test_a_store_that_is_down_for_twenty_minutes_does_not_lose_the_night(tmp_path):
    """
    The upload is tried again until the store is back, and the server waits for it.
    """
    elsewhere = Elsewhere(store_down=(at(3), at(23)))

    end, _ = boot(JOB, tmp_path / "job", elsewhere)

    check_finished(tmp_path / "job", elsewhere)
    assert not end.keep


def test_a_store_that_never_comes_back_keeps_the_folder(tmp_path):
    """
    After half an hour the server is stopped with its folder kept, not thrown away, not billed for ever.
    """
    elsewhere = Elsewhere(store_down=(at(3), at(100_000)))

    end, _ = boot(JOB, tmp_path / "job", elsewhere)

    assert (4, True, True) == (end.code, end.stop, end.keep)
    assert elsewhere.now < at(60)


def test_a_store_that_refuses_is_said_before_training(tmp_path):
    """
    403 at the start ends with code 4 and no launch.
    """
    elsewhere = Elsewhere(store_refuses=True)

    end, _ = boot(JOB, tmp_path / "job", elsewhere)

    assert (4, True) == (end.code, end.stop)
    assert [] == elsewhere.launches


def test_a_lease_that_the_store_refuses_ends_it_before_training():
    """
    A read-only or full store is not waited for: nothing would be safe, and the server costs money.
    """
    refused = Failed(subject="of the run", at=START, error="read-only", final=True, failures=1, hint="mount it")
    seen = Observed(now=START, boot_id="b", life="l", tasks={TaskKind.LEASE: refused})
    seen = replace(seen, lease=Lease(state=LeaseState.UNKNOWN))

    end = decide(JOB, ACCEPTED, seen)

    assert (4, "read-only; mount it") == (end.code, end.reason)


@pytest.mark.parametrize(
    ("local", "curable", "expected"),
    [
        pytest.param((), True, End(code=4, stop=True, keep=False, reason="expired; renew it"), id="a first start"),
        pytest.param((CHECKPOINT,), True, None, id="a later life"),
        pytest.param(
            (CHECKPOINT,), False, End(code=4, stop=True, keep=True, reason="expired; renew it"), id="no such bucket"
        ),
    ],
)
@pytest.mark.parametrize("kind", [TaskKind.LEASE, TaskKind.SURVEY])
def test_a_later_life_goes_on_where_a_first_start_is_refused(kind, local, curable, expected):
    """
    Expired credentials are said at once to whoever starts a run. A life that begins in the night has work on its
    disk: it trains on, tells a person, and asks again every two minutes.
    """
    holds = LeaseState.UNKNOWN if kind is TaskKind.LEASE else LeaseState.HELD
    subject = {TaskKind.LEASE: "of the run", TaskKind.SURVEY: "store"}[kind]
    refused = Failed(
        subject=subject, at=START, error="expired", hint="renew it", final=True, curable=curable, failures=1
    )
    seen = Observed(now=START, boot_id="b", life="l", local=local, lease=Lease(state=holds))
    keeps = Running(subject="of the run", started_at=START)
    seen = replace(seen, tasks={**DONE, TaskKind.LEASE: keeps, kind: refused}, preflight=Preflight(verdict=Verdict.GO))

    action = decide(JOB, ACCEPTED, seen)

    assert expected == action if expected else isinstance(action, Launch)


@pytest.mark.parametrize(
    ("local", "minutes", "expected"),
    [((), 0, End), ((CHECKPOINT,), 0, Wait), ((CHECKPOINT,), 2, Begin), ((CHECKPOINT,), 30, End)],
)
def test_what_a_launch_needs_is_waited_for_half_an_hour_where_work_is_here(local, minutes, expected):
    """
    A newer checkpoint that the store does not hand out now is worth the wait; for ever it would be paid for in vain.
    """
    newer = replace(CHECKPOINT, ref=Ref(1, 200, 1, "1" * 8))
    refused = Failed(subject=newer.ref.name, at=START, error="expired", final=True, curable=True, failures=1)
    seen = Observed(now=at(minutes), boot_id="b", life="l", local=local, offsite=(newer,), ledger=())
    seen = replace(seen, tasks={**DONE, TaskKind.RESTORE: refused}, preflight=Preflight(verdict=Verdict.GO))

    assert isinstance(decide(JOB, ACCEPTED, seen), expected)


@pytest.mark.parametrize("kind", [TaskKind.LEASE, TaskKind.UPLOAD, TaskKind.SURVEY])
def test_a_store_that_refuses_while_it_trains_is_asked_again(kind):
    """
    A full store may be emptied, a right corrected: training goes on, and copies do with the next answer but one.
    """
    checkpoint = Checkpoint(ref=Ref(1, 100, 1, "0" * 8), size_bytes=1, world_size=1, written_at=START)
    subject = {TaskKind.LEASE: "of the run", TaskKind.SURVEY: "store"}.get(kind, checkpoint.ref.name)
    holds = LeaseState.LAPSED if kind is TaskKind.LEASE else LeaseState.HELD
    seen = Observed(now=START, boot_id="b", life="l", live=Live(attempt_id="a", trainers=(1,), savers=()))
    seen = replace(seen, local=(checkpoint,), offsite=None if kind is TaskKind.SURVEY else ())
    refused = Failed(subject=subject, at=START, error="full", final=True, failures=1)
    others = {} if kind is TaskKind.LEASE else {TaskKind.LEASE: Running(subject="of the run", started_at=START)}
    seen = replace(seen, lease=Lease(state=holds), tasks={kind: refused} | others)

    assert isinstance(decide(JOB, ACCEPTED, seen), Wait)
    assert Begin(kind, subject) == decide(JOB, ACCEPTED, replace(seen, now=START + REFUSED_AGAIN))


def test_what_preflight_finds_of_the_store_ends_it_as_the_store_does():
    """
    Exit code 4, not 3: another machine would not help.
    """
    found = Preflight(verdict=Verdict.REFUSE, reasons=("the store is full; free some space",))

    end = decide(ALONE, ACCEPTED, Observed(now=START, boot_id="b", life="l", preflight=found, tasks=DONE))

    assert (4, "the store is full; free some space") == (end.code, end.reason)


OVER = replace(
    History(accepted_at=START, opened_at=START),
    conclusion=Conclusion(outcome=Outcome.STOPPED, reason="asked to stop", at=START),
)
AWAY = Failed(subject="of the run", at=START, error="no answer", final=False, failures=3, since=START)
WAITS = replace(
    Observed(now=START, boot_id="b", life="l", tasks={TaskKind.LEASE: AWAY}), lease=Lease(state=LeaseState.UNKNOWN)
)


def test_a_stop_with_nothing_to_save_does_not_wait_for_a_store_that_is_away():
    """
    Nothing was trained and nothing is only here: half an hour more would be paid for nothing.
    """
    end = decide(JOB, OVER, WAITS)

    assert (8, True, False) == (end.code, end.stop, end.keep)
    assert isinstance(decide(JOB, OVER, replace(WAITS, only_here=("outputs/log.txt",))), Wait)


def test_what_can_not_be_done_holds_up_no_end():
    """
    An upload that the store refuses is not waited for: the journal is published, and the server is stopped.
    """
    refused = Failed(subject=CHECKPOINT.ref.name, at=START, error="403", final=True, failures=1)
    full = Observed(now=START, boot_id="b", life="l", local=(CHECKPOINT,), offsite=(), tasks={TaskKind.UPLOAD: refused})

    assert Begin(TaskKind.PUBLISH, "stopped") == decide(JOB, OVER, full)


@pytest.mark.parametrize(
    ("minutes", "expected"),
    [(1, Wait()), (2, Begin(TaskKind.UPLOAD, CHECKPOINT.ref.name)), (30, Begin(TaskKind.PUBLISH, "stopped"))],
    ids=["refused just now", "tried again", "nobody came"],
)
def test_a_refusal_that_somebody_may_cure_is_waited_for_as_an_outage_is(minutes, expected):
    """
    A key that expired after hours, a store that is full: new credentials within half an hour save the last checkpoint.
    """
    name, now = CHECKPOINT.ref.name, START + timedelta(minutes=minutes)
    expired = Failed(subject=name, at=START, since=START, error="403", final=True, curable=True, failures=1)
    if minutes == 30:
        expired = replace(expired, at=now)
    tasks = {TaskKind.UPLOAD: expired}
    seen = Observed(now=now, boot_id="b", life="l", local=(CHECKPOINT,), offsite=(), tasks=tasks)

    assert expected == decide(JOB, OVER, seen)
    until = START + STORE_PATIENCE
    assert Draining(f"upload {name} (403)", until, is_held_up=True) == tell_draining(JOB, OVER, seen)


def test_a_run_that_another_runner_has_is_left_to_it():
    """
    Nothing of it is launched here, whatever is on this disk.
    """
    taken = Lease(state=LeaseState.TAKEN, who="server srv_b", fence=3)

    end = decide(JOB, ACCEPTED, Observed(now=START, boot_id="b", life="l", local=(CHECKPOINT,), lease=taken))

    assert (5, "another runner has this run: server srv_b (lease 3)") == (end.code, end.reason)


@pytest.mark.parametrize(("reopened_on", "is_over"), [("m", False), ("another", True), ("", True)])
def test_only_where_a_run_was_reopened_the_stores_word_counts_no_more(reopened_on, is_over):
    """
    A folder that was copied from elsewhere does not bring the order with it.
    """
    there = Conclusion(outcome=Outcome.STOPPED, reason="asked to stop", at=START)
    seen = Observed(now=START, boot_id="b", life="l", machine="m", offsite=(), ledger=(), concluded_elsewhere=there)

    action = decide(JOB, replace(ACCEPTED, machine="m", reopened_on=reopened_on), seen)

    assert is_over is (action == Conclude(Outcome.STOPPED, "asked to stop (on an earlier machine)"))


def test_what_an_end_waits_for_is_known_and_until_when():
    """
    The task that fails, and the end of patience or the deadline, whichever is first.
    """
    held_up = replace(WAITS, only_here=("outputs/log.txt",))
    near = replace(held_up, deadline_at=START + timedelta(minutes=5))

    expected = Draining("lease of the run (no answer)", START + STORE_PATIENCE, is_held_up=True)
    assert expected == tell_draining(JOB, OVER, held_up)
    assert near.deadline_at == tell_draining(JOB, OVER, near).until
    assert None is tell_draining(JOB, replace(OVER, stop_sent_in="l"), held_up)
    assert None is tell_draining(JOB, ACCEPTED, held_up)
    assert None is tell_draining(JOB, OVER, WAITS), "with nothing to save it waits for nothing"


def test_the_end_does_not_say_that_it_waits_for_a_right_to_delete():
    """
    Old checkpoints stay where the key may not remove them, and the run ends all the same.
    """
    refused = Failed(subject="x", at=START, since=START, error="403", final=True, curable=True, failures=1)
    seen = replace(WAITS, only_here=("log",), lease=Lease(state=LeaseState.HELD), tasks={TaskKind.TIDY: refused})

    assert not tell_draining(JOB, OVER, seen).is_held_up


def test_the_time_limit_saves_first(tmp_path):
    """
    Before the deadline the attempt is interrupted, saved, uploaded; code 7; a new machine may go on.
    """
    job = JOB.model_copy(update={"limits": JOB.limits.model_copy(update={"max_duration": 30 * TURN})})
    elsewhere = Elsewhere()

    end, _ = boot(job, tmp_path / "job", elsewhere, last_step=50_000)

    assert (7, True, False) == (end.code, end.stop, end.keep)
    assert elsewhere.now <= at(30)
    assert max(ref.step for ref in elsewhere.store) >= 300


def test_start_over_uses_nothing_of_before(tmp_path):
    """
    --start-over trains from step 0 in a new lineage, and a crash later resumes within it.
    """
    elsewhere = Elsewhere(crash_at_step={2: 300})
    boot(JOB, tmp_path / "job", elsewhere)

    boot(
        JOB,
        tmp_path / "job",
        elsewhere,
        before=lambda journal: journal.append(events.reopened(start_over=True, order="o", at=elsewhere.now)),
    )

    assert [(1, None), (2, None), (3, 200)] == elsewhere.launches
    assert 2 == max(elsewhere.store).lineage


def test_go_on_after_a_stop(tmp_path):
    """
    --go-on reopens a stopped run where it was.
    """
    elsewhere = Elsewhere(stop_at=at(4))
    boot(JOB, tmp_path / "job", elsewhere)
    elsewhere.stop_at = None

    end, _ = boot(
        JOB,
        tmp_path / "job",
        elsewhere,
        before=lambda journal: journal.append(events.reopened(start_over=False, order="o", at=elsewhere.now)),
    )

    assert 0 == end.code
    assert elsewhere.launches[-1][1] is not None


@pytest.mark.parametrize(("ended", "start_over"), [({}, True), ({"stop_at": at(4)}, False), ({"stop_at": at(4)}, True)])
def test_a_run_that_was_reopened_goes_on_on_the_next_machine(tmp_path, ended, start_over):
    """
    Done or stopped, then reopened: when that machine vanishes, the next one resumes and does not say that it is over.
    """
    elsewhere = Elsewhere(**ended)
    boot(JOB, tmp_path / "job", elsewhere)
    elsewhere.stop_at, elsewhere.sigterms = None, {elsewhere.now + 6 * TURN}
    reopened = events.reopened(start_over=start_over, order="o", at=elsewhere.now)
    assert 75 == boot(JOB, tmp_path / "job", elsewhere, last_step=2000, before=lambda j: j.append(reopened))[0].code
    elsewhere.promised.clear()

    end, _ = boot(JOB, tmp_path / "next", elsewhere, last_step=2000)

    assert (0, "training is done") == (end.code, end.reason)
    assert [1, 2, 3] == [number for number, _ in elsewhere.launches]
    assert elsewhere.launches[-1][1]


def test_a_store_that_comes_back_hears_that_the_run_goes_on_before_anything_else():
    """
    An attempt that was launched without the store takes its end back there, and then uploads; once it is there, never.
    """
    over = Conclusion(outcome=Outcome.SUCCEEDED, reason="", at=START, attempt=1)
    checkpoint = Checkpoint(ref=Ref(2, 100, 2, "0" * 8), size_bytes=1, world_size=1, written_at=START)
    history = History(accepted_at=START, opened_at=START, attempts=(ATTEMPT,))
    lease = {TaskKind.LEASE: Running(subject="of the run", started_at=START)}
    seen = Observed(
        now=at(1),
        boot_id="b",
        life="l",
        live=Live(attempt_id="a", trainers=(1,), savers=()),
        local=(checkpoint,),
        offsite=(),
        tasks=lease,
    )

    again = decide(JOB, history, replace(seen, concluded_elsewhere=over))

    assert TaskKind.REOPEN is again.kind
    assert Begin(TaskKind.UPLOAD, checkpoint.ref.name) == decide(JOB, history, seen)


def test_a_run_that_is_over_in_the_store_is_not_trained_without_the_lease():
    """
    It could not be opened again there, and a machine that vanished would leave behind that it is over.
    """
    over = Conclusion(outcome=Outcome.LIMIT, reason="24 hours", at=START)
    refused = Failed(subject="of the run", at=START, error="403 Forbidden", final=True, failures=1)
    lapsed = Lease(state=LeaseState.LAPSED)
    seen = preflighted(
        DONE[TaskKind.PREFLIGHT], offsite=(), ledger=(), machine="m", concluded_elsewhere=over, lease=lapsed
    )

    end = decide(JOB, replace(ACCEPTED, machine="m"), replace(seen, tasks={**seen.tasks, TaskKind.LEASE: refused}))

    assert (4, "403 Forbidden") == (end.code, end.reason)


def test_what_is_on_its_way_to_the_store_stays_on_this_disk():
    """
    Although newer ones are there by now; without that the oldest goes.
    """
    local = tuple(replace(CHECKPOINT, ref=replace(CHECKPOINT.ref, step=step)) for step in (100, 200, 300))
    sent = {TaskKind.UPLOAD: Running(subject=local[0].ref.name, started_at=START)}

    assert Wait() == decide(HERE_ONLY, *hung(hang=None, local=local, tasks=sent))
    assert Prune(local[0].ref, "the newest 2 are kept") == decide(HERE_ONLY, *hung(hang=None, local=local))


@pytest.mark.parametrize(
    ("steps", "says"),
    [
        ((), ""),
        ((100,), ""),
        ((200,), ""),
        ((50, 300), "; it never left this machine: a newer one did"),
        ((50,), "; it never left this machine"),
    ],
    ids=["nothing there", "it is there", "it was there once", "it was passed over", "the store is away since"],
)
def test_a_checkpoint_that_was_passed_over_is_told_when_it_goes(steps, says):
    """
    Only the newest is sent: one that a newer one overtook was only here, and whoever reads the log sees that.
    """
    local, there = (
        tuple(replace(CHECKPOINT, ref=replace(CHECKPOINT.ref, step=step)) for step in numbers)
        for numbers in ((100, 200, 300), steps)
    )
    seen = Observed(now=START, boot_id="b", life="l", local=local, offsite=there)

    assert Prune(local[0].ref, f"the newest 2 are kept{says}") == tidy(JOB, ACCEPTED, seen)


@pytest.mark.parametrize("how", ["this life", "an earlier life", "its manifest"])
def test_a_checkpoint_that_the_store_lost_is_not_told_as_one_that_never_left(how):
    """
    It was confirmed there, which is another trouble: whoever reads the log looks into the bucket.
    """
    local, there = (
        tuple(replace(CHECKPOINT, ref=replace(CHECKPOINT.ref, step=step)) for step in numbers)
        for numbers in ((100, 200, 300), (50, 300))
    )
    name, history = local[0].ref.name, ACCEPTED
    seen = Observed(now=START, boot_id="b", life="l", local=local, offsite=there)
    if how == "this life":
        seen = replace(seen, vanished=frozenset({name}))
    elif how == "an earlier life":
        history = replace(history, notified={f"vanished {name}": START})
    else:
        seen = replace(seen, spoilt=frozenset({name}))

    says = "" if how == "its manifest" else "; the store had it, and has it no more"
    assert Prune(local[0].ref, f"the newest 2 are kept{says}") == tidy(JOB, history, seen)


@pytest.mark.parametrize(("attempts", "is_void"), [((), False), ((1,), False), ((1, 2), True)])
def test_an_end_is_void_once_somebody_trained_after_it(attempts, is_void):
    """
    By the numbers of attempts in the ledger, which go on over machines; an end without a number stands.
    """
    made = tuple(replace(ATTEMPT, number=number) for number in attempts)
    machine = Machine(id="m", opened_at=START, paid_from=START, seen_at=START, attempts=made)

    assert [is_void, False] == [ledger.is_void(attempt, (machine,)) for attempt in (1, None)]


def test_a_failing_set_up_is_the_jobs_own_fault(tmp_path):
    """
    Code 6, the error in the reason, nothing launched.
    """
    job = JOB.model_copy(update={"setup": ("pip install nonsense",)})
    elsewhere = Elsewhere(setup_fails=True)

    end, _ = boot(job, tmp_path / "job", elsewhere)

    assert (6, "setup: exit 1") == (end.code, end.reason)
    assert [] == elsewhere.launches


@pytest.mark.parametrize(
    ("failures", "final", "expected"),
    [(4, False, Begin(TaskKind.SETUP, "d")), (5, False, None), (1, True, None)],
    ids=["it is tried again", "five times", "nothing can help"],
)
def test_a_set_up_is_tried_five_times_where_that_may_help(failures, final, expected):
    """
    A package index that is away comes back; an idle machine is paid for meanwhile.
    """
    failed = Failed(subject="d", at=START - HALF_AN_HOUR, error="exit 1", final=final, failures=failures)
    tasks = {TaskKind.SETUP: failed, TaskKind.PREFLIGHT: Finished(subject="machine", at=START)}

    action = decide(HERE_ONLY, ACCEPTED, Observed(now=START, boot_id="b", life="l", setup_digest="d", tasks=tasks))

    assert (expected or Conclude(Outcome.GAVE_UP, "exit 1")) == action


@pytest.mark.parametrize("local", [(), (CHECKPOINT,)], ids=["nothing is here", "a checkpoint is here"])
def test_a_store_that_does_not_answer_is_waited_for_only_where_nothing_is_here(local):
    """
    For half an hour: the run may be in there. With something to go on from it is trained on.
    """
    away = Failed(subject="store", at=START, error="no answer", final=False, failures=9, since=START - HALF_AN_HOUR)
    tasks = DONE | {TaskKind.SURVEY: away, TaskKind.LEASE: Running(subject="of the run", started_at=START)}
    seen = Observed(now=START, boot_id="b", life="l", local=local, tasks=tasks)

    action = decide(JOB, ACCEPTED, seen)

    assert local or (4, "no answer for 30 min: no answer") == (action.code, action.reason)
    assert not local or isinstance(action, Launch)


def test_a_success_whose_last_checkpoint_the_store_refused_is_not_zero():
    """
    An older one is verified there, and that is not what was trained: the folder is kept.
    """
    older = replace(CHECKPOINT, ref=replace(CHECKPOINT.ref, step=50))
    over = Conclusion(outcome=Outcome.SUCCEEDED, reason="training is done", at=START)
    tasks = {
        TaskKind.UPLOAD: Failed(subject=CHECKPOINT.ref.name, at=START, error="403", final=True, failures=1),
        TaskKind.VERIFY: Finished(subject=older.ref.name, at=START),
        TaskKind.PUBLISH: Finished(subject="succeeded", at=START),
    }
    seen = Observed(now=START, boot_id="b", life="l", local=(CHECKPOINT,), offsite=(older,), tasks=tasks)

    end = decide(JOB, replace(ACCEPTED, conclusion=over), seen)

    assert (4, True, "training is done, but the store does not have it: 403") == (end.code, end.keep, end.reason)


TROUBLE = {"crash_at_step": {1: 300}}


def num_operations(tmp_path):
    return boot(JOB, tmp_path / "dry", Elsewhere(**TROUBLE))[1].num_operations


@pytest.mark.parametrize("loss", [None, *Loss], ids=lambda loss: loss or "process only")
def test_power_loss_after_every_operation(tmp_path, loss):
    """
    Wherever the first boot dies, the second finishes the job and nothing is damaged.
    """
    for fail_at in range(num_operations(tmp_path)):
        root, elsewhere = tmp_path / f"job-{fail_at}", Elsewhere(**TROUBLE)
        end, disk = boot(JOB, root, elsewhere, fail_at=fail_at)
        assert end is None
        if loss:
            disk.lose(loss, seed=fail_at)
            elsewhere.boots += 1
        check_invariants(root, elsewhere)

        boot(JOB, root, elsewhere)

        check_invariants(root, elsewhere)
        check_finished(root, elsewhere)
        shutil.rmtree(root)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    crashes=st.dictionaries(st.integers(1, 6), st.integers(1, 5).map(lambda n: n * 100), max_size=4),
    losses=st.lists(st.tuples(st.integers(0, 120), st.sampled_from([None, *Loss]), st.booleans()), max_size=4),
    sigterms=st.sets(st.integers(1, 40), max_size=3),
    down=st.none() | st.tuples(st.integers(0, 20), st.integers(1, 25)),
)
@example(  # an outage that begins late after the end has its half hour, too
    crashes={1: 100}, losses=[(3, None, False), (1, None, False), (0, None, False)], sigterms={1, 13, 15}, down=(17, 23)
)
def test_whatever_happens_the_server_stops_and_nothing_is_lost(tmp_path, crashes, losses, sigterms, down):
    """
    Any mix of crashes, power losses, lost disks, preemptions and an outage of the store ends
    with every byte in the store and the server asked to stop.
    """
    root = tmp_path / "job"
    shutil.rmtree(root, ignore_errors=True)
    elsewhere = Elsewhere(crash_at_step=crashes, sigterms={at(n) for n in sigterms})
    elsewhere.store_down = (at(down[0]), at(down[0] + down[1])) if down else None
    for fail_at, loss, machine_lost in losses:
        _, disk = boot(JOB, root, elsewhere, fail_at=fail_at)
        if loss:
            disk.lose(loss, seed=fail_at)
        if machine_lost:
            shutil.rmtree(root)
            elsewhere.promised.clear()
        else:
            check_invariants(root, elsewhere)
        elsewhere.boots += 1
    for _ in range(6):
        end, _ = boot(JOB, root, elsewhere)
        if end.code != 75:
            break

    assert end.stop
    if end.code == 0:
        assert 500 == max(ref.step for ref in elsewhere.store)
        assert not end.keep
    else:
        assert 6 == end.code
    assert elsewhere.now < START + timedelta(hours=3)


def test_a_limit_that_was_raised_lets_the_run_go_on(tmp_path):
    """
    The same folder with a later deadline trains on; with the same deadline it stops again.
    """
    short = JOB.model_copy(update={"limits": JOB.limits.model_copy(update={"max_duration": 30 * TURN})})
    elsewhere = Elsewhere()
    assert 7 == boot(short, tmp_path / "job", elsewhere, last_step=4000)[0].code
    assert 7 == boot(short, tmp_path / "job", elsewhere, last_step=4000)[0].code

    end, _ = boot(JOB, tmp_path / "job", elsewhere, last_step=4000)

    assert 0 == end.code
    assert [1, 2] == [number for number, _ in elsewhere.launches]


NO_CARD = Observed(
    now=START, boot_id="b", life="l", refusal="no card found", machine="m", lease=Lease(state=LeaseState.HELD)
)
WATCHED = replace(NO_CARD, lease=Lease(state=LeaseState.WATCHING))
LONG_AGO = START - timedelta(seconds=90)


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        pytest.param(replace(NO_CARD, lease=Lease(state=LeaseState.UNKNOWN)), Begin(TaskKind.LEASE, "of the run"), id="first the lease"),
        pytest.param(NO_CARD, Begin(TaskKind.SURVEY, "store"), id="what others did"),
        pytest.param(replace(NO_CARD, ledger=(), lease=Lease(state=LeaseState.LAPSED)), Begin(TaskKind.LEASE, "of the run"), id="not without the lease"),
        pytest.param(replace(NO_CARD, ledger=()), Join("m", Earlier()), id="it joins"),
        pytest.param(replace(WATCHED, tasks={TaskKind.LEASE: Running(subject="", started_at=START)}), Wait(), id="one that vanished"),
        pytest.param(replace(WATCHED, tasks={TaskKind.LEASE: Running(subject="", started_at=LONG_AGO)}), None, id="not for ever"),
        pytest.param(replace(NO_CARD, tasks={TaskKind.SURVEY: Failed(subject="", at=START, error="", final=False, failures=1)}), None, id="a store that is away"),
        pytest.param(replace(NO_CARD, tasks={TaskKind.SURVEY: Finished(subject="", at=START)}), None, id="a store that says nothing"),
        pytest.param(replace(NO_CARD, ledger=(), machine=""), None, id="it has joined"),
        pytest.param(replace(NO_CARD, machine="", lease=Lease(state=LeaseState.LAPSED)), Begin(TaskKind.LEASE, "of the run"), id="it has joined and lost the lease"),
    ],
)  # fmt: skip
def test_a_machine_that_can_do_nothing_joins_the_ledger_before_it_ends(seen, expected):
    """
    It is paid for; and no longer than a minute or two more for that.
    """
    history = History(accepted_at=START, opened_at=START)
    found = [decide(JOB, history, one) for one in (seen, replace(seen, refusal="", wrong_job="no value for a secret"))]

    codes = [one.code if isinstance(one, End) else one for one in found]
    assert [expected or 3, expected or 2] == codes


ENDED_EARLY = replace(ATTEMPT, ending=Ending.INTERRUPTED, exit=Exit(code=0), ended_at=START)
UNFIT = replace(
    NO_CARD,
    refusal="",
    machine="",
    offsite=(),
    preflight=Preflight(verdict=Verdict.SWAP, reasons=("the fabric is down",)),
    tasks={
        TaskKind.LEASE: Running(subject="of the run", started_at=START),
        TaskKind.PREFLIGHT: Finished(subject="machine and code", at=START),
    },
)


@pytest.mark.parametrize(
    ("lease", "publishing", "expected"),
    [
        pytest.param(LeaseState.HELD, None, Begin(TaskKind.PUBLISH, "verdict"), id="it is told"),
        pytest.param(LeaseState.HELD, Running(subject="verdict", started_at=START), Wait(), id="a moment"),
        pytest.param(LeaseState.HELD, Running(subject="verdict", started_at=LONG_AGO), 3, id="not for ever"),
        pytest.param(LeaseState.HELD, Finished(subject="verdict", at=START), 3, id="it was told"),
        pytest.param(LeaseState.WATCHING, None, 3, id="the run is another's"),
    ],
)
def test_a_machine_that_is_to_be_swapped_says_so_in_the_store(lease, publishing, expected):
    """
    Whoever rented it from outside takes another one; nobody writes there without the lease, or waits for it.
    """
    seen = replace(UNFIT, lease=Lease(state=lease), tasks={**UNFIT.tasks, TaskKind.PUBLISH: publishing})

    found = decide(JOB, History(accepted_at=START, opened_at=START, attempts=(ENDED_EARLY,)), seen)

    assert expected == (found.code if isinstance(found, End) else found)


def test_a_refusal_is_looked_at_again(tmp_path):
    """
    A store that was wrong and is right now is no reason to stay away from the job.
    """
    elsewhere = Elsewhere(store_refuses=True)
    assert 4 == boot(JOB, tmp_path / "job", elsewhere)[0].code
    elsewhere.store_refuses = False

    assert 0 == boot(JOB, tmp_path / "job", elsewhere)[0].code


def test_no_room_to_restore_is_no_reason_to_roll_back(tmp_path):
    """
    A disk that cannot hold the newest checkpoint ends with code 4, not with older weights.
    """
    elsewhere = Elsewhere(sigterms={at(6)})
    boot(JOB, tmp_path / "job", elsewhere)
    shutil.rmtree(tmp_path / "job")
    elsewhere.promised.clear()
    elsewhere.disk_full = True

    end, _ = boot(JOB, tmp_path / "job", elsewhere)

    assert (4, "not enough room") == (end.code, end.reason)


def test_what_no_store_has_is_kept(tmp_path):
    """
    A file beside the checkpoints, a model that the script wrote at its end, keeps the folder.
    """
    elsewhere = Elsewhere(only_here=("model.pt",))

    end, _ = boot(JOB, tmp_path / "job", elsewhere)

    assert (0, True, True) == (end.code, end.stop, end.keep)


def test_a_disk_that_holds_only_two_keeps_one_and_goes_on_saving(tmp_path):
    """
    Without room for one more, one less is kept; the newest never goes, nor one that is being uploaded. What is damaged goes first.
    """
    checkpoints = tuple(
        Checkpoint(ref=Ref(1, step, 1, f"{step:08x}"), size_bytes=10**9, world_size=1, written_at=START)
        for step in (100, 200)
    )
    seen = Observed(now=START, boot_id="b", life="l", live=Live(attempt_id="a", trainers=(1,), savers=()))
    seen = replace(seen, local=checkpoints, offsite=checkpoints, free_bytes=10**9)
    history = History(accepted_at=START, opened_at=START)

    tight = decide(JOB, history, seen)
    roomy = decide(JOB, history, replace(seen, free_bytes=2 * 10**9))
    last = decide(JOB, history, replace(seen, local=checkpoints[1:]))
    spoilt = replace(seen, damaged=(".damaged-step-00000050-00000032",))

    assert Discard(".damaged-step-00000050-00000032") == decide(JOB, history, spoilt)
    assert isinstance(decide(JOB, history, replace(spoilt, free_bytes=2 * 10**9)), Wait)
    assert isinstance(tight, Prune)
    assert 100 == tight.ref.step
    assert isinstance(roomy, Wait)
    assert isinstance(last, Wait)


def test_nothing_is_launched_onto_a_full_disk():
    """
    The disk is named, with what to do, and with code 3; when there is room the same run goes on. What may go goes
    first; after an attempt that died of it, room for one more checkpoint is asked for.
    """
    two = tuple(
        Checkpoint(ref=Ref(1, s, 1, f"{s:08x}"), size_bytes=10**9, world_size=1, written_at=START) for s in (1, 2)
    )
    done = {TaskKind.PREFLIGHT: Finished(subject="machine and code", at=START, result={})}
    seen = Observed(now=START, boot_id="b", life="l", free_bytes=0, tasks=done)
    history = History(accepted_at=START, opened_at=START)
    died = Attempt(
        number=1, id="a", resume=None, lineage=1, boot_id="b", launched_at=START, ending=Ending.FAILED, ended_at=START
    )
    died = replace(died, step=2, diagnosis=replace(GPU_ECC, label="disk_full", category="disk"))

    full = decide(HERE_ONLY, history, seen)
    roomy = decide(HERE_ONLY, history, replace(seen, free_bytes=10**6))
    crowded = decide(HERE_ONLY, history, replace(seen, local=two, free_bytes=10**8))
    helpless = decide(HERE_ONLY, history, replace(seen, local=two))
    after = decide(HERE_ONLY, replace(history, attempts=(died,)), replace(seen, local=two[1:], free_bytes=10**6))

    assert (3, "the disk of this run is full: 0.0 MB are free") == (full.code, full.reason.partition(";")[0])
    assert "free some space there" in full.reason
    assert isinstance(roomy, Launch)
    assert isinstance(crowded, Prune)
    assert 3 == helpless.code, "where one more does not fit without the older one either, both stay"
    assert (3, "the disk of this run is full: 1.0 MB are free") == (after.code, after.reason.partition(";")[0])


def test_another_job_of_the_same_name_is_refused(tmp_path):
    """
    What the store has under this name belongs to a job with another command: nothing is trained or resumed.
    """
    elsewhere = Elsewhere()
    boot(JOB, tmp_path / "theirs", elsewhere)
    elsewhere.outcome, elsewhere.other_job = None, 'command: there "a.py", here "b.py"'
    elsewhere.launches.clear()

    end, _ = boot(JOB, tmp_path / "job", elsewhere)

    assert (2, True) == (end.code, end.stop)
    assert "--accept-change" in end.reason
    assert [] == elsewhere.launches


def test_a_corrected_command_goes_on_where_nothing_was_trained(tmp_path):
    """
    The store knows the job, and no attempt of it: there are no weights that could be the wrong ones.
    """
    end, _ = boot(JOB, tmp_path / "job", Elsewhere(other_job='command: there "trian.py", here "train.py"'))

    assert 0 == end.code, end.reason


def test_done_but_not_in_the_store_is_not_zero(tmp_path):
    """
    Code 0 promises that the weights are where offload.to says; without that it is 4, and the folder is kept.
    """
    elsewhere = Elsewhere(store_down=(at(3), at(100_000)))

    end, _ = boot(JOB, tmp_path / "job", elsewhere)

    assert (4, True, True) == (end.code, end.stop, end.keep)
    assert "connection refused" in end.reason


@pytest.mark.parametrize(
    ("told", "saved", "expected"),
    [
        pytest.param({"step": 50, "max_steps": 100}, None, Ending.FAILED, id="nothing was saved"),
        pytest.param({"step": 50}, 37, Ending.FAILED, id="thirteen steps are lost"),
        pytest.param({"step": 50, "max_steps": 100}, 50, Ending.FAILED, id="half way, and nobody was told"),
        pytest.param({"step": 51, "max_steps": 100, "ended": True}, 50, Ending.SUCCEEDED, id="it left the loop early"),
        pytest.param({"step": 100, "max_steps": 100}, 100, Ending.SUCCEEDED, id="all steps are saved"),
        pytest.param({"step": 50}, 50, Ending.SUCCEEDED, id="saved where it ended, of unknown length"),
        pytest.param({"step": 0}, None, Ending.SUCCEEDED, id="it only looked"),
    ],
)
def test_exit_0_without_the_last_save_is_no_success(told, saved, expected):
    """
    A library that could not save at the end (os._exit, a full disk) leaves work that is nowhere: success would throw it away.
    """
    local = (Checkpoint(ref=Ref(1, saved, 1, "0" * 8), size_bytes=1, world_size=1, written_at=START),) if saved else ()
    attempt = Attempt(number=1, id="a", boot_id="b", launched_at=START, lineage=1, resume=None)
    history = History(accepted_at=START, opened_at=START, attempts=(attempt,))
    seen = Observed(now=START, boot_id="b", life="l", local=local, exit=Exit(code=0))
    seen = replace(seen, progress=Progress(attached=True, **told))

    action = decide(JOB, history, seen)

    assert isinstance(action, RecordExit)
    assert expected == action.ending
    assert action.step == told["step"]


@pytest.mark.parametrize(
    ("saved", "expected"),
    [
        pytest.param([Ref(3, 60, 2, "0" * 8)], Ending.SUCCEEDED, id="it is there"),
        pytest.param([Ref(1, 60, 1, "0" * 8)], Ending.SUCCEEDED, id="it began with it"),
        pytest.param([Ref(1, 5, 1, "0" * 8)], Ending.FAILED, id="only an older one is"),
        pytest.param([Ref(2, 60, 1, "f" * 8)], Ending.FAILED, id="one of that step is, of another line"),
        pytest.param([], Ending.FAILED, id="nothing is"),
    ],
)
def test_done_without_a_checkpoint_of_its_last_step_is_no_success(saved, expected):
    """
    The saver wrote it, and nobody can read it, or it was set aside since: the server must not be stopped for that.
    """
    resume = Ref(1, 60, 1, "0" * 8)
    attempt = Attempt(number=2, id="a", boot_id="b", launched_at=START, lineage=3, resume=resume)
    history = replace(ACCEPTED, attempts=(attempt,))
    local = tuple(replace(CHECKPOINT, ref=ref) for ref in saved)
    seen = Observed(now=START, boot_id="b", life="l", local=local, exit=Exit(code=0), end=EndRecord("done", 60))

    action = decide(JOB, history, seen)

    assert isinstance(action, RecordExit)
    assert (expected, 60) == (action.ending, action.step)
    assert (expected is Ending.FAILED) == ("done at step 60" in action.reason)


def test_a_run_whose_last_state_is_in_no_checkpoint_a_second_time_ends_and_keeps_its_disk():
    """
    To train it once more would come to the same; what was written may still be of use to a person. The older
    checkpoint is safe in the store, and proves nothing.
    """
    attempt = replace(ATTEMPT, world_size=1)
    seen = Observed(now=START, boot_id="b", life="l", local=(CHECKPOINT,), offsite=(CHECKPOINT,))
    seen = replace(seen, exit=Exit(code=0), end=EndRecord("done", 600), tasks=DONE)
    found = decide(JOB, replace(ACCEPTED, attempts=(attempt,)), seen)
    ended = replace(attempt, ending=found.ending, ended_at=START, step=found.step, diagnosis=found.diagnosis)
    history = replace(ACCEPTED, attempts=(ended, replace(ended, number=2, reason=found.reason)))

    over = decide(JOB, history, seen)

    assert isinstance(over, Conclude)
    assert (Outcome.GAVE_UP, True) == (over.outcome, "done at step 600" in over.reason)
    verified = {TaskKind.VERIFY: Finished(subject=CHECKPOINT.ref.name, at=START)}
    history = replace(history, conclusion=Conclusion(outcome=over.outcome, reason=over.reason, at=START))
    told = {TaskKind.PUBLISH: Finished(subject=f"{over.outcome}", at=START)}
    end = decide(JOB, history, replace(seen, tasks={**DONE, **verified, **told}))
    assert (EXIT_CODES[Outcome.GAVE_UP], True) == (end.code, end.keep)


def test_a_last_checkpoint_that_is_found_damaged_after_the_end_is_no_success():
    """
    Its upload reads it, and sets it aside: an older one that is safe in the store is not what was trained.
    """
    attempt = replace(ATTEMPT, ending=Ending.SUCCEEDED, exit=Exit(code=0), step=600, ended_at=START)
    over = Conclusion(outcome=Outcome.SUCCEEDED, reason="training is done", at=START)
    history = replace(ACCEPTED, attempts=(attempt,), conclusion=over)
    seen = Observed(now=START, boot_id="b", life="l", local=(CHECKPOINT,), offsite=(CHECKPOINT,))
    verified = Finished(subject=CHECKPOINT.ref.name, at=START)
    told = Finished(subject=f"{over.outcome}", at=START)
    seen = replace(seen, tasks={**DONE, TaskKind.VERIFY: verified, TaskKind.PUBLISH: told})

    whole = decide(JOB, history, replace(seen, end=EndRecord("done", 100)))
    lost = decide(JOB, history, replace(seen, end=EndRecord("done", 600)))

    elsewhere = decide(JOB, history, replace(seen, local=(), end=EndRecord("done", 100)))

    assert (0, False) == (whole.code, whole.keep) == (elsewhere.code, elsewhere.keep)
    assert (EXIT_CODES[Outcome.STORE], True) == (lost.code, lost.keep)
    assert "done at step 600" in lost.reason


@pytest.mark.parametrize(
    ("unusable", "orders"), [((CHECKPOINT.ref.name,), 0), ((), 1)], ids=["it rolls back", "it starts over"]
)
def test_nothing_is_trained_that_no_lineage_is_left_for(unusable, orders):
    """
    A manifest may claim the last lineage there is: what is saved after it would be no checkpoint to anybody.
    """
    last = replace(CHECKPOINT, ref=replace(CHECKPOINT.ref, lineage=MAX_LINEAGE))
    older = replace(CHECKPOINT, ref=replace(CHECKPOINT.ref, step=5, id="1" * 8))
    seen = Observed(now=START, boot_id="b", life="l", local=(older,), offsite=(older, last), tasks=DONE)
    seen = replace(seen, unusable=frozenset(unusable), unusable_now=frozenset(unusable))

    end = decide(JOB, replace(ACCEPTED, fresh_from=orders), seen)

    assert isinstance(end, End)
    assert (EXIT_CODES[Outcome.STORE], True) == (end.code, end.keep)
    assert end.reason.startswith(f"{last.ref.name}: its manifest claims lineage {MAX_LINEAGE}")


def test_nothing_is_uploaded_while_the_store_is_tidied():
    """
    The tidying's listing would come after the upload's, and not have it.
    """
    checkpoint = Checkpoint(ref=Ref(1, 100, 1, "0" * 8), size_bytes=1, world_size=1, written_at=START)
    seen = Observed(now=START, boot_id="b", life="l", live=Live(attempt_id="a", trainers=(1,), savers=()))
    seen = replace(seen, local=(checkpoint,), offsite=())
    tidying = {TaskKind.TIDY: Running(subject="x", started_at=START)}
    history = History(accepted_at=START, opened_at=START)

    assert Begin(TaskKind.UPLOAD, checkpoint.ref.name) == decide(JOB, history, seen)
    assert isinstance(decide(JOB, history, replace(seen, tasks=tidying)), Wait)


@pytest.mark.parametrize(
    ("num_there", "tasks", "leaves", "expected"),
    [
        pytest.param(4, {}, False, TaskKind.UPLOAD, id="an upload goes first"),
        pytest.param(5, {}, False, TaskKind.VERIFY, id="too many: is the newest whole?"),
        pytest.param(5, {TaskKind.VERIFY: Running}, False, None, id="it is being compared"),
        pytest.param(5, {TaskKind.VERIFY: Finished}, False, TaskKind.TIDY, id="it is whole: older ones go"),
        pytest.param(5, {TaskKind.VERIFY: Failed}, False, TaskKind.UPLOAD, id="it cannot be told"),
        pytest.param(5, {TaskKind.VERIFY: Finished, TaskKind.TIDY: Failed}, False, TaskKind.UPLOAD, id="none goes"),
        pytest.param(5, {TaskKind.VERIFY: Finished, TaskKind.TIDY: Finished}, False, TaskKind.UPLOAD, id="a late list"),
        pytest.param(5, {}, True, TaskKind.UPLOAD, id="while leaving there may be time for one thing"),
    ],
)
def test_uploads_that_follow_one_another_do_not_fill_the_store(num_there, tasks, leaves, expected):
    """
    On a line where each takes as long as the next save nothing would ever be tidied while training goes on.
    """
    saved = [replace(CHECKPOINT, ref=Ref(1, step, 1, f"{step:08x}")) for step in range(1, num_there + 2)]
    there, newest = tuple(saved[:-1]), saved[-2].ref.name
    states = {
        Running: Running(subject=newest, started_at=START),
        Finished: Finished(subject=newest, at=START),
        Failed: Failed(subject=newest, at=START, error="down", final=False, failures=1),
    }
    seen = Observed(now=START, boot_id="b", life="l", live=Live(attempt_id="a", trainers=(1,), savers=()))
    seen = replace(seen, local=tuple(saved[-2:]), offsite=there, leave_sent_at=START if leaves else None)
    found = {TaskKind.UPLOAD: Finished(subject=newest, at=START)} | {kind: states[of] for kind, of in tasks.items()}

    action = decide(JOB, History(accepted_at=START, opened_at=START), replace(seen, tasks=found))

    assert expected == (action.kind if isinstance(action, Begin) else None)


@pytest.mark.parametrize(("log_bytes", "expected"), [(1000, Wait), (1001, TrimLogs)])
def test_logs_that_grow_too_large_are_trimmed_while_it_trains_and_at_the_end(log_bytes, expected):
    """
    A script that prints a thousand lines a second for a night must not fill the disk of the checkpoints, nor leave it full.
    """
    job = Job.model_validate({"command": "train.py", "logs": {"max_size": "1kB"}})
    history = History(accepted_at=START, opened_at=START)
    seen = Observed(
        now=START,
        boot_id="b",
        life="l",
        live=Live(attempt_id="a", trainers=(1,), savers=()),
        log_bytes=log_bytes,
    )

    assert isinstance(decide(job, history, seen), expected)
    over = replace(history, conclusion=Conclusion(outcome=Outcome.SUCCEEDED, reason="training is done", at=START))
    assert (log_bytes > 1000) is isinstance(decide(job, over, replace(seen, live=None)), TrimLogs)


# --------------------------------------------------------------------------------- preflight

ALONE = Job.model_validate({"name": "tiny", "command": "train.py"})


def preflighted(state=None, *, verdict=None, env=None, **seen):
    tasks = {} if state is None else {TaskKind.PREFLIGHT: state}
    found = None if verdict is None else Preflight(verdict=verdict, reasons=("why",), env=env or {})
    return Observed(now=START, boot_id="b", life="l", tasks=tasks, preflight=found, **seen)


def test_the_machine_is_looked_at_before_anything_is_launched():
    """
    Once a life, and the code with it where that is in place already.
    """
    over = Finished(subject="machine and code", at=START)

    assert Begin(TaskKind.PREFLIGHT, "machine and code") == decide(ALONE, ACCEPTED, preflighted())
    assert isinstance(decide(ALONE, ACCEPTED, preflighted(Running(subject="machine", started_at=START))), Wait)
    assert isinstance(decide(ALONE, ACCEPTED, preflighted(over)), Launch)


def test_what_needs_the_code_waits_for_it():
    """
    A wrong machine is found before set-up takes its minutes; imports are looked for after it.
    """
    machine = Finished(subject="machine", at=START)
    bare = {"setup_digest": "d", "set_up": False}

    assert Begin(TaskKind.PREFLIGHT, "machine") == decide(ALONE, ACCEPTED, preflighted(**bare))
    assert Begin(TaskKind.SETUP, "d") == decide(ALONE, ACCEPTED, preflighted(machine, **bare))
    assert Begin(TaskKind.PREFLIGHT, "code") == decide(
        ALONE, ACCEPTED, preflighted(machine, setup_digest="d", set_up=True)
    )


# -------------------------------------------------------------------------- data and outputs


def staging(state=None, **seen):
    tasks = {TaskKind.PREFLIGHT: Finished(subject="machine and code", at=START), TaskKind.STAGE: state}
    return Observed(now=START, boot_id="b", life="l", data_digest="d", tasks=tasks, **seen)


def failed(*, final, since=START, at=START):
    return Failed(subject="d", at=at, error="data: no", final=final, failures=3, hint="mend it", since=since)


def test_data_comes_in_beside_the_set_up_and_a_launch_waits_for_both():
    """
    Neither waits for the other; a paid minute is a paid minute.
    """
    coming, bare = Running(subject="d", started_at=START), {"setup_digest": "s", "set_up": False}

    assert Begin(TaskKind.STAGE, "d") == decide(ALONE, ACCEPTED, staging(**bare))
    assert Begin(TaskKind.SETUP, "s") == decide(ALONE, ACCEPTED, staging(coming, **bare))
    assert isinstance(decide(ALONE, ACCEPTED, staging(coming)), Wait)
    assert isinstance(decide(ALONE, ACCEPTED, staging(Finished(subject="d", at=START), staged=True)), Launch)


def test_data_that_is_not_there_ends_the_job_early_and_a_store_that_is_away_does_not():
    """
    With the error and its cure; nothing is trained without the data, and nothing is journaled: the next start looks again.
    """
    long_ago = START - STORE_PATIENCE
    away = decide(ALONE, ACCEPTED, staging(failed(final=False)))
    retried = decide(ALONE, ACCEPTED, staging(failed(final=False, at=START - timedelta(minutes=2))))
    gone = decide(ALONE, ACCEPTED, staging(failed(final=False, since=long_ago)))
    wrong = decide(ALONE, ACCEPTED, staging(failed(final=True)))

    assert isinstance(away, Wait)
    assert Begin(TaskKind.STAGE, "d") == retried
    assert End(code=4, stop=True, keep=False, reason="data: no; mend it") == wrong == gone


WITH_OUTPUTS = JOB.model_copy(update={"outputs": ("/board",)})


def training(*, local=(), **tasks):
    known = {
        TaskKind.SURVEY: Finished(subject="store", at=START),
        **{TaskKind[name]: state for name, state in tasks.items()},
    }
    live = Live(attempt_id="a", trainers=(1,), savers=())
    return Observed(now=START, boot_id="b", life="l", live=live, offsite=(), local=local, tasks=known)


def test_outputs_are_copied_again_and_again_while_it_trains():
    """
    First at once, then every few minutes, a failure like any other after a pause.
    """
    recent, old = (Finished(subject="so far", at=START - ago) for ago in (OUTPUTS_EVERY / 2, OUTPUTS_EVERY))
    broken = Failed(subject="so far", at=START, error="away", final=False, failures=1)

    assert Begin(TaskKind.OUTPUTS, "so far") == decide(WITH_OUTPUTS, ACCEPTED, training())
    assert isinstance(decide(WITH_OUTPUTS, ACCEPTED, training(OUTPUTS=recent)), Wait)
    assert Begin(TaskKind.OUTPUTS, "so far") == decide(WITH_OUTPUTS, ACCEPTED, training(OUTPUTS=old))
    assert isinstance(decide(WITH_OUTPUTS, ACCEPTED, training(OUTPUTS=broken)), Wait)
    assert isinstance(decide(JOB, ACCEPTED, training()), Wait)


def test_outputs_are_never_in_the_way_of_a_checkpoint():
    """
    They share the line and the limit of it: a copy that runs makes way, and none begins beside an upload.
    """
    copying = Running(subject="so far", started_at=START)
    uploading = Running(subject=CHECKPOINT.ref.name, started_at=START)
    makes_way = decide(WITH_OUTPUTS, ACCEPTED, training(local=(CHECKPOINT,), OUTPUTS=copying))
    waits = decide(WITH_OUTPUTS, ACCEPTED, training(local=(CHECKPOINT,), UPLOAD=uploading))

    assert Cease(TaskKind.OUTPUTS, "a checkpoint goes first") == makes_way
    assert isinstance(waits, Wait)


@pytest.mark.parametrize(("silent", "expected"), [(STUCK / 2, Wait), (STUCK, Cease)], ids=["slow", "stuck"])
def test_what_moves_nothing_is_begun_again(silent, expected):
    """
    A server that trickles breaks no time limit; half an hour without a piece does.
    """
    moved = Running(subject=CHECKPOINT.ref.name, started_at=START - 4 * STUCK, moved_at=START - silent)

    assert isinstance(decide(JOB, ACCEPTED, training(local=(CHECKPOINT,), UPLOAD=moved)), expected)
    assert isinstance(decide(ALONE, ACCEPTED, staging(replace(moved, subject="d"))), expected)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        pytest.param({"has_spoken": False}, Wait, id="it starts"),
        pytest.param({"has_spoken": False, "started_at": START - NO_WORD}, Cease, id="it has not begun"),
        pytest.param({"stopped_at": START - STOPPED / 2}, Wait, id="somebody looks into it"),
        pytest.param({"stopped_at": START - STOPPED}, Cease, id="it was stopped"),
    ],
)
@pytest.mark.parametrize("kind", [TaskKind.UPLOAD, TaskKind.PUBLISH, TaskKind.LEASE])
def test_a_process_that_does_nothing_is_replaced_soon(kind, fields, expected):
    """
    Stopped, or never begun: another one does its work, whatever it is.
    """
    state = Running(**{"subject": "x", "started_at": START, "moved_at": START} | fields)

    assert isinstance(decide(JOB, ACCEPTED, training(**{kind.name: state})), expected)


@pytest.mark.parametrize("fields", [{"started_at": START - STUCK}, {"stopped_at": START - STOPPED}])
def test_an_end_is_not_held_up_by_what_is_stuck(fields):
    """
    Begun again while the store has its half hour; after that the server is stopped, and the folder kept.
    """
    silent = Running(**{"subject": CHECKPOINT.ref.name, "started_at": START} | fields)

    def end(ago):
        over = replace(ACCEPTED, conclusion=Conclusion(outcome=Outcome.SUCCEEDED, reason="done", at=START - ago))
        return decide(JOB, over, replace(training(local=(CHECKPOINT,), UPLOAD=silent), live=None))

    assert isinstance(end(STORE_PATIENCE / 2), Cease)
    assert not isinstance(end(STORE_PATIENCE), Cease | Wait)


def test_outputs_go_once_more_at_the_end_before_the_stop():
    """
    When nobody writes to them any more, after the checkpoint and before the last word.
    """
    over = replace(ACCEPTED, conclusion=Conclusion(outcome=Outcome.STOPPED, reason="asked", at=START))
    seen = replace(training(OUTPUTS=Finished(subject="so far", at=START)), live=None)

    assert Begin(TaskKind.OUTPUTS, ALL_OUTPUTS) == decide(WITH_OUTPUTS, over, seen)
    done = replace(seen, tasks={**seen.tasks, TaskKind.OUTPUTS: Finished(subject=ALL_OUTPUTS, at=START)})
    assert Begin(TaskKind.PUBLISH, "stopped") == decide(WITH_OUTPUTS, over, done)


NOT_ALL = "not all outputs are in the store: "
AGAIN = "; run it again there: it copies them and trains nothing"
COPIED = Finished(subject=ALL_OUTPUTS, at=START)
NOT_COPIED = Failed(subject=ALL_OUTPUTS, at=START, error="refused", final=True, failures=1)


@pytest.mark.parametrize(
    ("state", "elsewhere", "expected"),
    [
        pytest.param(COPIED, "", "", id="all are there"),
        pytest.param(replace(COPIED, result={"not_there": "x: no"}), "", f"{NOT_ALL}x: no{AGAIN}", id="one is left"),
        pytest.param(NOT_COPIED, "", f"{NOT_ALL}refused{AGAIN}", id="refused"),
        pytest.param(COPIED, f"{NOT_ALL}y", f"{NOT_ALL}y", id="left on an earlier machine"),
    ],
)
@pytest.mark.parametrize("outcome", [Outcome.SUCCEEDED, Outcome.LIMIT])
def test_a_run_is_done_when_its_outputs_are_in_the_store(outcome, state, elsewhere, expected):
    """
    Training that ended well ends as no success where the store has not all of them: with 4 and the reason, here, and
    for whoever asks the store. What ends otherwise keeps its code.
    """
    over = replace(ACCEPTED, conclusion=Conclusion(outcome=outcome, reason="done", at=START))
    told = Finished(subject=f"{outcome}", at=START)
    there = Conclusion(outcome=outcome, reason="done", at=START, missing=elsewhere)
    seen = replace(training(OUTPUTS=state, PUBLISH=told), live=None, concluded_elsewhere=there)

    end = decide(WITH_OUTPUTS, over, seen)

    missing = expected if outcome is Outcome.SUCCEEDED else ""
    code, reason = (4, f"done, but {missing}") if missing else (EXIT_CODES[outcome], "done")
    assert missing == tell_missing(WITH_OUTPUTS, over, seen)
    assert (code, reason, True) == (end.code, end.reason, end.stop)


@pytest.mark.parametrize(("outcome", "code"), [(Outcome.SUCCEEDED, 4), (Outcome.GAVE_UP, 6)])
def test_what_a_run_came_to_is_in_the_store_or_its_disk_is_kept(outcome, code):
    """
    Journal, logs and the word that it is over: else nobody reads why it failed, and another machine is rented for it.
    """
    over = replace(
        ACCEPTED,
        attempts=(replace(ATTEMPT, ending=Ending.SUCCEEDED),),
        conclusion=Conclusion(outcome=outcome, reason="done", at=START),
    )
    refused = Failed(subject=f"{outcome}", at=START, error="403", final=True, failures=1)
    seen = replace(training(PUBLISH=refused), live=None)

    lost, kept = (
        decide(JOB, over, replace(seen, tasks={**seen.tasks, TaskKind.PUBLISH: state}))
        for state in (refused, Finished(subject=f"{outcome}", at=START))
    )

    assert (code, True) == (lost.code, lost.keep)
    assert (outcome is Outcome.SUCCEEDED) is ("its end and its logs are not in the store: 403" in lost.reason)
    assert (EXIT_CODES[outcome], False) == (kept.code, kept.keep)


def test_a_machine_that_is_to_be_swapped_is_refused():
    """
    With the reasons, exit code 3, and the stop of the server; nothing is launched.
    """
    over = Finished(subject="machine and code", at=START)

    end = decide(ALONE, ACCEPTED, preflighted(over, verdict=Verdict.SWAP))

    assert End(code=3, stop=True, keep=False, reason="why") == end


def test_changes_are_part_of_every_attempt():
    """
    And go to the journal with it.
    """
    over = Finished(subject="machine and code", at=START)

    action = decide(ALONE, ACCEPTED, preflighted(over, verdict=Verdict.CHANGES, env={"NCCL_SHM_DISABLE": "1"}))

    assert isinstance(action, Launch)
    assert {"NCCL_SHM_DISABLE": "1"} == action.env


def test_checks_that_fail_or_hang_keep_no_job_from_starting():
    """
    No verdict is no refusal.
    """
    failed = Failed(subject="machine and code", at=START, error="died", final=False, failures=1)
    hanging = Running(subject="machine and code", started_at=START - timedelta(minutes=10))

    assert isinstance(decide(ALONE, ACCEPTED, preflighted(failed)), Launch)
    assert isinstance(decide(ALONE, ACCEPTED, preflighted(hanging)), Launch)


def test_a_job_that_is_over_elsewhere_is_not_refused_for_its_machine():
    """
    There is nothing left to train here.
    """
    over = Finished(subject="machine and code", at=START)
    there = Conclusion(outcome=Outcome.SUCCEEDED, reason="training is done", at=START)

    action = decide(JOB, ACCEPTED, preflighted(over, verdict=Verdict.SWAP, offsite=(), concluded_elsewhere=there))

    assert Outcome.SUCCEEDED is action.outcome


# ------------------------------------------------------------------------------------- hangs

HANG = Hang(rank=1, stage=Stage.TRAINING, step=300, waited_s=200.0, limit_s=180.0, reason="no step for 200 s")


def hung(**more):
    """One more look at an attempt that hangs."""
    history = History(
        accepted_at=START,
        opened_at=START,
        attempts=(Attempt(number=1, id="a", resume=None, lineage=1, boot_id="b", launched_at=START),),
    )
    live = Live(attempt_id="a", trainers=(1,), savers=())
    return history, replace(Observed(now=at(9), boot_id="b", life="l", live=live, hang=HANG), **more)


def test_what_hangs_is_looked_at_and_then_killed():
    """
    Evidence first; a look that takes too long, or fails, does not save the attempt.
    """
    looks = {
        "at first": {},
        "looking": {TaskKind.EVIDENCE: Running(subject="attempt-0001", started_at=at(9))},
        "it hangs, too": {TaskKind.EVIDENCE: Running(subject="attempt-0001", started_at=at(5))},
        "done": {TaskKind.EVIDENCE: Finished(subject="attempt-0001", at=at(9))},
        "of an earlier attempt": {TaskKind.EVIDENCE: Finished(subject="attempt-0000", at=at(1))},
        "failed": {TaskKind.EVIDENCE: Failed(subject="attempt-0001", at=at(9), error="e", final=False, failures=1)},
    }

    actions = {name: decide(HERE_ONLY, *hung(tasks=tasks)) for name, tasks in looks.items()}

    look, kill = Begin(TaskKind.EVIDENCE, "attempt-0001"), Kill("it hangs: no step for 200 s", hung=True)
    assert {
        "at first": look,
        "looking": Wait(),
        "it hangs, too": kill,
        "done": kill,
        "of an earlier attempt": look,
        "failed": kill,
    } == actions


def test_a_hang_does_not_keep_a_boot_from_leaving():
    """
    Who is asked to leave gets its grace period, hung or not.
    """
    assert Interrupt("asked to leave (SIGTERM or Ctrl-C)") == decide(HERE_ONLY, *hung(leaving=True))


@pytest.mark.parametrize(
    ("terminated", "seconds", "expected"),
    [
        pytest.param(False, 1, Wait, id="nobody asked, a moment ago"),
        pytest.param(False, 3, Kill, id="nobody asked"),
        pytest.param(True, 3, Wait, id="its ranks got SIGTERM"),
        pytest.param(True, 119, Wait, id="and save for long"),
        pytest.param(True, 121, Kill, id="for longer than the grace period"),
    ],
)
def test_a_trainer_that_may_save_on_sigterm_has_the_grace_period(terminated, seconds, expected):
    """
    One that nobody could ask has nothing to wait for: it costs money.
    """
    sent = {"leaving": True, "leave_sent_at": at(9) - timedelta(seconds=seconds), "terminated": terminated}

    assert isinstance(decide(HERE_ONLY, *hung(hang=None, **sent)), expected)


@pytest.mark.parametrize(
    ("seen", "seconds", "expected"),
    [
        pytest.param({"asked_live": True}, 119, Wait(), id="one that was asked saves"),
        pytest.param({"asked_live": True}, 121, Kill, id="for longer than the grace period"),
        pytest.param({"unasked": True}, 5, Interrupt, id="one that nobody asked yet"),
        pytest.param({}, 5, Kill("the launcher ended, these did not", left=True), id="they have saved and gone"),
        pytest.param({"asked_live": True, "leaving": False}, 5, Kill, id="the reason is gone"),
    ],
)
def test_a_trainer_that_outlives_its_launcher_is_asked_and_waited_for(seen, seconds, expected):
    """
    A shell script ends at SIGTERM, and what it started saves: that is no straggler.
    """
    ended = {"exit": Exit(code=-15), "exit_seen_at": at(9) - timedelta(seconds=seconds)}
    sent = {"leaving": True, "leave_sent_at": at(9) - timedelta(seconds=seconds), "terminated": True}

    found = decide(HERE_ONLY, *hung(hang=None, **{**ended, **sent, **seen}))

    assert expected in {found, type(found)}


def test_who_comes_while_it_leaves_is_asked_too():
    """
    A script that goes on to its next program, or one that only now can save.
    """
    sent = {"leaving": True, "leave_sent_at": at(9) - timedelta(seconds=60), "terminated": True, "unasked": True}

    assert Interrupt("asked to leave (SIGTERM or Ctrl-C)") == decide(HERE_ONLY, *hung(hang=None, **sent))


@pytest.mark.parametrize(
    ("left", "seconds", "expected"),
    [
        pytest.param(15, 15, Wait, id="there is time"),
        pytest.param(10, 20, Kill, id="just enough for the last words"),
        pytest.param(5, 1, Wait, id="a short limit, asked a moment ago"),
        pytest.param(4, 2, Kill, id="a short limit"),
    ],
)
def test_a_trainer_that_ignores_sigterm_does_not_cost_the_last_words(left, seconds, expected):
    """
    At the deadline the guardian ends all of the run, and nobody would say what it came to, nor give the lease back.
    """
    sent = {"leave_sent_at": at(9) - timedelta(seconds=seconds), "terminated": True}
    limit = {"deadline_at": at(9) + timedelta(seconds=left)}

    assert isinstance(decide(HERE_ONLY, *hung(hang=None, **sent, **limit)), expected)


@pytest.mark.parametrize(
    ("seconds", "expected"), [(1, Wait()), (2, Kill("the launcher ended, these did not", left=True))]
)
def test_what_an_ended_launcher_left_behind_is_ended(seconds, expected):
    """
    After the moment that its children may need to go by themselves.
    """
    ended = {"exit": Exit(code=0), "exit_seen_at": at(9) - timedelta(seconds=seconds)}

    assert expected == decide(HERE_ONLY, *hung(hang=None, **ended))


def test_what_is_left_behind_is_named():
    """
    Whatever holds a card's memory would be the next attempt's out-of-memory error: a person wants to know who it was.
    """
    ended = {"exit": Exit(code=0), "exit_seen_at": at(7)}
    left = tuple(f"{pid} python3 logger.py" for pid in range(4711, 4717))
    live = Live(attempt_id="a", trainers=tuple(range(4711, 4717)), savers=(), left=left)

    action = decide(HERE_ONLY, *hung(hang=None, live=live, **ended))

    named = ", ".join(left[:4])
    assert Kill(f"the launcher ended, these did not: {named} and 2 more", left=True) == action


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(119, Wait()), (120, Kill("the saver did not finish in the grace period", savers=True))],
)
def test_a_saver_without_ranks_has_the_grace_period(seconds, expected):
    """
    What it has staged is committed; one that cannot is not waited for for ever.
    """
    alone = {"live": Live(attempt_id="a", trainers=(), savers=(2,)), "trainers_gone_at": at(9)}

    assert expected == decide(HERE_ONLY, *hung(hang=None, now=at(9) + timedelta(seconds=seconds), **alone))


@pytest.mark.parametrize(
    "meanwhile",
    [
        pytest.param({"hang": None}, id="it trains"),
        pytest.param({"hang": None, "leaving": True, "leave_sent_at": at(9), "terminated": True}, id="it leaves"),
        pytest.param({"tasks": {TaskKind.EVIDENCE: Running(subject="attempt-0001", started_at=at(9))}}, id="it hangs"),
        pytest.param(
            {"hang": None, "live": Live(attempt_id="a", trainers=(), savers=(2,))}, id="only the saver is left"
        ),
    ],
)
def test_a_checkpoint_goes_into_the_store_whatever_the_attempt_is_at(meanwhile):
    """
    It may be the last that leaves this machine.
    """
    assert Begin(TaskKind.UPLOAD, CHECKPOINT.ref.name) == decide(
        JOB, *hung(local=(CHECKPOINT,), offsite=(), **meanwhile)
    )


def test_a_save_of_the_frameworks_own_is_committed_while_it_trains():
    """
    As soon as it is whole.
    """
    assert Begin(TaskKind.COMMIT, "checkpoint-50@7") == decide(HERE_ONLY, *hung(hang=None, ready="checkpoint-50@7"))


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        pytest.param(None, Begin(TaskKind.COMMIT, "last@7"), id="not yet"),
        pytest.param(Running(subject="last@7", started_at=at(9)), Wait(), id="under way"),
        pytest.param(Running(subject="older@6", started_at=at(9)), Wait(), id="an older one is"),
        pytest.param(Finished(subject="last@7", at=at(9)), None, id="done"),
        pytest.param(Failed(subject="last@7", at=at(1), error="e", final=False, failures=2), Begin(TaskKind.COMMIT, "last@7"), id="it failed twice"),
        pytest.param(Failed(subject="last@7", at=at(9), error="e", final=False, failures=2), Wait(), id="a moment ago"),
        pytest.param(Failed(subject="last@7", at=at(1), error="e", final=False, failures=3), None, id="it failed three times"),
        pytest.param(Failed(subject="last@7", at=at(1), error="e", final=True, failures=1), None, id="it is gone"),
    ],
)  # fmt: skip
def test_the_last_save_of_a_framework_is_committed_before_the_end_of_its_attempt_counts(state, expected):
    """
    Else a success could outlive its checkpoint; one that cannot be committed holds nothing up.
    """
    action = decide(
        HERE_ONLY, *hung(live=None, hang=None, exit=Exit(code=0), ready="last@7", tasks={TaskKind.COMMIT: state})
    )

    assert (expected or RecordExit(Ending.SUCCEEDED, Exit(code=0), 0, "")) == action


def test_checkpoints_that_are_spoilt_are_set_aside_when_nobody_adds_to_them():
    """
    Not under an attempt that is still being ended.
    """
    history, seen = hung(hang=None, local=(CHECKPOINT,))
    spoilt = replace(history, distrusted=((1, 100),))

    assert not isinstance(decide(HERE_ONLY, spoilt, seen), SetAside)
    assert isinstance(decide(HERE_ONLY, spoilt, replace(seen, live=None)), SetAside)


def test_the_reason_of_an_end_is_the_first_error():
    """
    In one line; it is what a person reads first.
    """
    found = replace(GPU_ECC, summary="rank 1: uncorrectable ECC error; see stderr.log")

    action = decide(HERE_ONLY, *hung(live=None, hang=None, exit=Exit(code=1), diagnosis=found))

    assert RecordExit(Ending.FAILED, Exit(code=1), 0, found.summary, found) == action


def test_an_end_by_sigterm_that_was_asked_for_is_no_first_error():
    """
    The ranks of a script that does not know SIGTERM die of it, and the launcher calls that a failure.
    """
    history, seen = hung(hang=None, exit=Exit(code=1), diagnosis=GPU_ECC)

    asked = decide(HERE_ONLY, replace(history, interrupted=1), replace(seen, live=None))
    failed = decide(HERE_ONLY, history, replace(seen, live=None))

    assert (Ending.INTERRUPTED, None, "") == (asked.ending, asked.diagnosis, asked.reason)
    assert (Ending.FAILED, GPU_ECC) == (failed.ending, failed.diagnosis)


# ------------------------------------------------------------------------ a loss that goes wrong

GUARDED = Job.model_validate({**JOB.model_dump(mode="json", by_alias=True), "guard": {"nan_patience": 250}})


def test_a_loss_that_is_no_number_ends_the_run_with_the_good_checkpoint(tmp_path):
    """
    Saved every 100 steps, two kept, NaN from 400 on, given up at 700: 300 may be spoilt already, 200 is kept.
    """
    elsewhere = Elsewhere(nan_from={1: 400})

    end, _ = boot(GUARDED, tmp_path / "job", elsewhere, last_step=2000)

    directory = CheckpointDir(tmp_path / "job" / "checkpoints", Disk())
    assert (6, True, False) == (end.code, end.stop, end.keep)
    assert f"go on from {max(c.ref for c in directory.committed()).name}" in end.reason
    assert [200] == [c.ref.step for c in directory.committed()]
    assert 200 == max(ref.step for ref in elsewhere.store if not is_distrusted(ref, history_of(tmp_path / "job")))


@pytest.mark.parametrize(
    ("job", "trouble", "expected"),
    [
        (GUARDED, {"nan_from": {1: 400}}, "the runner killed it: guard.nan_patience: the loss is nan since step 400"),
        (JOB, {"stop_at": at(4), "deaf": True}, "the runner killed it: asked to stop: it "),
    ],
    ids=["guard", "stop"],
)
def test_an_attempt_that_the_runner_killed_says_why(tmp_path, job, trouble, expected):
    """
    And not that its launcher was killed by SIGKILL: nobody else did it.
    """
    by_signal = replace(GPU_ECC, summary="the launcher was killed by SIGKILL; see launcher.log")
    elsewhere = Elsewhere(diagnoses={1: by_signal}, **trouble)

    boot(job, tmp_path / "job", elsewhere, last_step=2000)

    (attempt,) = history_of(tmp_path / "job").attempts
    assert expected == attempt.reason[: len(expected)]
    assert attempt.diagnosis is None


def test_going_on_after_that_begins_at_the_good_checkpoint(tmp_path):
    """
    In a new line of descent, so that what is spoilt is never the newest again, wherever it lies.
    """
    elsewhere = Elsewhere(nan_from={1: 400})
    boot(GUARDED, tmp_path / "job", elsewhere, last_step=2000)

    def go_on(journal):
        journal.append(events.reopened(start_over=False, order="x", at=elsewhere.now))

    end, _ = boot(GUARDED, tmp_path / "job", elsewhere, last_step=2000, before=go_on)

    assert 0 == end.code
    assert [(1, None), (2, 200)] == elsewhere.launches
    assert 2000 == max(elsewhere.store).step


def test_a_loss_that_recovers_is_let_be(tmp_path):
    """
    Fewer steps than the guard's patience change nothing.
    """
    patient = Job.model_validate({**JOB.model_dump(mode="json", by_alias=True), "guard": {"nan_patience": 10_000}})
    elsewhere = Elsewhere(nan_from={1: 400})

    end, _ = boot(patient, tmp_path / "job", elsewhere)

    assert 0 == end.code


# -------------------------------------------------------------------------------- another run

OTHER = "s3://bucket/runs/other"
FORKED = JOB.model_copy(update={"checkpoint": JOB.checkpoint.model_copy(update={"resume": OTHER})})
NEWEST = f"{OTHER}/checkpoints/step-00000200-0123abcd"


def test_a_run_begins_with_the_checkpoint_of_another(tmp_path):
    """
    Steps go on counting from it; a restart goes on with the run's own, and so does another machine.
    """
    elsewhere = Elsewhere(other_run=NEWEST, crash_at_step={1: 300, 2: 500}, sigterms={at(40)})

    boot(FORKED, tmp_path / "job", elsewhere, last_step=5000)
    shutil.rmtree(tmp_path / "job")
    elsewhere.other_run = ""  # it is not needed any more
    end, _ = boot(FORKED, tmp_path / "other machine", elsewhere, last_step=5000)

    assert (0, 5000) == (end.code, max(elsewhere.store).step)
    assert [(1, 200), (2, 200), (3, 400)] == elsewhere.launches[:3]
    assert [4] == [number for number, step in elsewhere.launches[3:] if step > 400]


def test_without_the_checkpoint_of_the_other_run_nothing_is_trained(tmp_path):
    """
    Never silently from step 0; cured, it goes on.
    """
    elsewhere = Elsewhere()

    refused, _ = boot(FORKED, tmp_path / "job", elsewhere)
    elsewhere.other_run = NEWEST
    end, _ = boot(FORKED, tmp_path / "job", elsewhere)

    assert (4, "expected a whole checkpoint: none is there") == (refused.code, refused.reason)
    assert ([(1, 200)], 0) == (elsewhere.launches, end.code)


def test_where_there_can_be_no_checkpoint_job_yaml_is_at_fault():
    """
    A folder that is not here, or one of another framework: 2, not 4.
    """
    job = ALONE.model_copy(update={"checkpoint": FORKED.checkpoint})
    looked = {TaskKind.PREFLIGHT: Finished(subject="machine and code", at=START)}
    failed = Failed(subject=f"1 {OTHER}", at=START, error="no folder", final=True, failures=1, exit_code=2)
    seen = Observed(now=START, boot_id="b", life="l", tasks=looked)

    assert Begin(TaskKind.FORK, f"1 {OTHER}") == decide(job, ACCEPTED, seen)
    assert End(code=2, stop=True, keep=False, reason="no folder") == decide(
        job, ACCEPTED, replace(seen, tasks={**looked, TaskKind.FORK: failed})
    )


def test_starting_over_is_from_the_checkpoint_of_the_other_run(tmp_path):
    """
    `--start-over` is back to where job.yaml says the run begins, once: a crash after it goes on.
    """
    elsewhere = Elsewhere(other_run=NEWEST, crash_at_step={2: 500})
    boot(FORKED, tmp_path / "job", elsewhere, last_step=400)

    def start_over(journal):
        journal.append(events.reopened(start_over=True, order="1", at=elsewhere.now))

    end, _ = boot(FORKED, tmp_path / "job", elsewhere, last_step=600, before=start_over)

    assert 0 == end.code
    assert [(1, 200), (2, 200), (3, 400)] == elsewhere.launches
    assert [2, 2] == [c.ref.lineage for c in CheckpointDir(tmp_path / "job" / "checkpoints", Disk()).committed()]


def test_another_place_in_job_yaml_is_another_beginning(tmp_path):
    """
    As long as nothing was trained; without a place the copy that is there is the beginning.
    """
    elsewhere = Elsewhere(other_run=NEWEST.replace("other", "wrong"), crash_at_step={1: 300, 2: 300, 3: 300})
    wrong = FORKED.model_copy(
        update={"checkpoint": JOB.checkpoint.model_copy(update={"resume": OTHER.replace("other", "wrong")})}
    )
    assert 6 == boot(wrong, tmp_path / "job", elsewhere)[0].code
    shutil.copytree(tmp_path / "job", tmp_path / "auto")
    elsewhere.other_run = NEWEST

    def go_on(journal):
        journal.append(events.reopened(start_over=False, order="1", at=elsewhere.now))

    boot(JOB, tmp_path / "auto", replace(elsewhere, store=dict(elsewhere.store), launches=(kept := [])), before=go_on)
    boot(FORKED, tmp_path / "job", elsewhere, before=go_on)

    journals = [(tmp_path / name / "journal.jsonl").read_text() for name in ("auto", "job")]
    assert [0, 1] == [journal.count(f'"origin": "{NEWEST}"') for journal in journals]
    assert ([(4, 200)], (4, 200)) == (kept, elsewhere.launches[3])


def test_a_copy_in_the_store_of_what_job_yaml_does_not_name_any_more_is_not_restored():
    """
    Its place was corrected before anything was trained.
    """
    copy = replace(CHECKPOINT, origin="s3://bucket/runs/wrong/checkpoints/step-00000100-0000abcd")
    tasks = DONE | {TaskKind.PUBLISH: Finished(subject="joined, 0", at=START)}
    seen = Observed(now=START, boot_id="b", life="l", machine="m", offsite=(copy,), ledger=(), tasks=tasks)

    action = decide(FORKED, replace(ACCEPTED, machine="m"), seen)

    assert (TaskKind.FORK, OTHER) == (action.kind, action.subject.partition(" ")[2])


def test_no_power_loss_takes_a_run_back_to_step_0(tmp_path):
    """
    Wherever the first boot dies, the second begins at the other run's checkpoint, or later.
    """
    dry = boot(FORKED, tmp_path / "dry", Elsewhere(other_run=NEWEST), last_step=300)[1].num_operations
    for fail_at in range(0, dry, 2):
        elsewhere, root = Elsewhere(other_run=NEWEST), tmp_path / f"job-{fail_at}"
        _, disk = boot(FORKED, root, elsewhere, last_step=300, fail_at=fail_at)
        disk.lose(Loss.UNSYNCED, seed=fail_at)
        elsewhere.boots += 1

        end, _ = boot(FORKED, root, elsewhere, last_step=300)

        assert (0, True) == (end.code, all(step for _, step in elsewhere.launches))
        shutil.rmtree(root)


def test_a_checkpoint_that_came_back_and_is_gone_again_is_brought_once_more():
    """
    Set aside, or removed by hand: waiting for it would cost money until the limit.
    """
    checkpoint = Checkpoint(ref=Ref(1, 100, 1, "0" * 8), size_bytes=1, world_size=1, written_at=START)
    history = History(accepted_at=START, opened_at=START)
    seen = Observed(now=START, boot_id="b", life="l", offsite=(checkpoint,), lease=Lease(state=LeaseState.HELD))
    lease = Running(subject="of the run", started_at=START)
    done = {TaskKind.LEASE: lease, TaskKind.PREFLIGHT: Finished(subject="machine and code", at=START)}
    there = {**done, TaskKind.RESTORE: Finished(subject=checkpoint.ref.name, at=START)}

    assert Begin(TaskKind.RESTORE, checkpoint.ref.name) == decide(JOB, history, replace(seen, tasks=done))
    assert Begin(TaskKind.RESTORE, checkpoint.ref.name) == decide(JOB, history, replace(seen, tasks=there))
    assert isinstance(decide(JOB, history, replace(seen, tasks=there, local=(checkpoint,))), Launch)
