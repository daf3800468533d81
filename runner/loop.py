"""The loop: look, decide, write down, act. Starting and recovering are the same thing."""

from collections.abc import Callable
from typing import Protocol, assert_never

from runner.facts import Attempt, Conclusion, History, Observed, TaskKind
from runner.job import Job
from runner.policy.actions import (
    LEFT,
    Accept,
    Action,
    Begin,
    Cease,
    Conclude,
    Discard,
    Distrust,
    End,
    GoOn,
    Interrupt,
    Join,
    Kill,
    Launch,
    Leave,
    Notify,
    Prune,
    RecordExit,
    Refused,
    SetAside,
    TrimLogs,
    Wait,
)
from runner.policy.finish import tell_stuck_outputs
from runner.policy.notices import decide_and_tell
from runner.policy.waiting import Waiting, tell_waiting
from runner.storage import journal as events
from runner.storage.journal import Journal
from vramfarm.protocol import Ref


class World(Protocol):
    """Everything that is not a decision."""

    def observe(self, history: History) -> Observed: ...
    def new_id(self) -> str: ...
    def begin(self, kind: TaskKind, subject: str) -> None: ...
    def cease(self, kind: TaskKind) -> None: ...
    def discard(self, name: str) -> None: ...
    def prune(self, ref: Ref) -> None: ...
    def set_aside(self, ref: Ref) -> None: ...
    def trim_logs(self, max_bytes: int) -> None: ...
    def check_launch(self) -> None: ...
    def launch(self, attempt: Attempt) -> None: ...
    def interrupt(self) -> None: ...
    def kill(self, *, savers: bool, hung: bool) -> None: ...
    def forget(self) -> None: ...
    def notify(self, event: str, text: str) -> None: ...
    def wait(self) -> None: ...


Tell = Callable[[Action | Refused | None, Observed, History], None]


def run(job: Job, journal: Journal, world: World, tell: Tell) -> End:
    """Return the last word: how the job ended, or that only this boot did (code 75)."""
    refused: Action | None = None
    waits: Waiting | None = None
    stuck = ""
    while True:
        history = journal.history
        seen = world.observe(history)
        history = _remember_first_step(history, seen, journal)
        history = _remember_unusable(history, seen, journal)
        waits = _note_waiting(waits, tell_waiting(job, history, seen), seen, journal)
        stuck = _note_stuck(stuck, tell_stuck_outputs(seen), seen, journal)
        action = decide_and_tell(job, history, seen)
        if isinstance(action, Launch):
            world.check_launch()  # before anybody is told of a launch that cannot be
        tell(None if action == refused else action, seen, history)
        match action:
            case Leave():
                return End(
                    code=LEFT,
                    stop=False,
                    keep=True,
                    reason="asked to leave (SIGTERM or Ctrl-C); start it again to go on",
                )
            case End():
                journal.append(events.stop_sent(seen.life, keep=action.keep, at=seen.now))
                return action
            case _:
                error = _perform(action, seen, journal, world)
                if error and action != refused:
                    tell(Refused(action, error), seen, history)
                refused = action if error else None


def _perform(action: Action, seen: Observed, journal: Journal, world: World) -> str:
    """Why that could not be done while an attempt lives: a disk that fails is its saves' trouble, and no reason to end it."""
    try:
        perform(action, seen, journal, world)
    except OSError as error:
        if seen.live is None:
            raise
        world.wait()
        return f"{error.filename or 'this machine'}: {error.strerror or error}"
    return ""


def _remember_first_step(history: History, seen: Observed, journal: Journal) -> History:
    """A runner that dies hours later must not take them for the start."""
    running = history.running
    if running is None or running.first_step_at or seen.first_step_at is None:
        return history
    return journal.note(events.stepped(running.number, seen.first_step_at))


def _remember_unusable(history: History, seen: Observed, journal: Journal) -> History:
    """To find it out again costs a restore; who does not know it deletes good ones for it."""
    if seen.unusable == history.unusable:
        return history
    return journal.append(events.found_unusable(seen.unusable))


def _note_waiting(before: Waiting | None, now: Waiting | None, seen: Observed, journal: Journal) -> Waiting | None:
    """Once an outage: an hour that is paid for, and in which nothing began, has its line among those of the others."""
    if now and (before is None or (before.kind, before.since) != (now.kind, now.since)):
        journal.note(events.waiting(now.line, now.until, seen.now))
    return now


def _note_stuck(before: str, now: str, seen: Observed, journal: Journal) -> str:
    if now and now != before:
        journal.note(events.stuck(now, seen.now))
    return now


def perform(  # noqa: C901, PLR0912  # one arm an action; assert_never checks that none is missing
    action: Action, seen: Observed, journal: Journal, world: World
) -> None:
    """Write down what cannot be observed again, then act."""
    match action:
        case Accept():
            journal.append(events.accepted(seen.now))
        case Begin(kind=kind, subject=subject):
            world.begin(kind, subject)
        case Join(machine=machine, earlier=earlier):
            journal.append(events.joined(machine, earlier, seen.now))
        case Cease(kind=kind):
            world.cease(kind)
        case Discard(name=name):
            world.discard(name)
        case Prune(ref=ref):
            world.prune(ref)
        case Distrust(number=number, step=step, reason=reason):
            journal.note(events.distrusted(number, step, reason))
        case SetAside(ref=ref):
            world.set_aside(ref)
        case TrimLogs(max_bytes=max_bytes):
            world.trim_logs(max_bytes)
        case Launch():
            attempt = _attempt(action, seen, world)
            journal.append(events.launched(attempt))
            world.launch(attempt)
        case RecordExit(ending=ending, exit=exit_, step=step, reason=reason, diagnosis=diagnosis):
            rate = seen.progress.steps_per_s
            journal.append(
                events.exited(
                    ending,
                    exit_,
                    step=step,
                    reason=reason,
                    at=seen.now,
                    diagnosis=diagnosis,
                    steps_per_s=rate,
                    from_log=seen.progress.from_log and step == seen.progress.step,
                )
            )
            world.forget()
        case Interrupt(reason=reason):
            journal.note(events.interrupted(journal.history.attempts[-1].number, reason, seen.now))
            world.interrupt()
        case Kill(savers=savers, hung=hung):
            _write_down_kill(action, seen, journal)
            world.kill(savers=savers, hung=hung)
        case Conclude(outcome=outcome, reason=reason):
            journal.append(events.concluded(Conclusion(outcome=outcome, reason=reason, at=seen.now)))
        case GoOn():
            journal.append(events.gone_on(seen.now))
        case Notify(event=event, key=key, text=text):
            journal.note(events.notified(key, seen.now))
            world.notify(event, text)
        case Wait():
            world.wait()
        case Leave() | End():
            pass  # run() returns them
        case _:
            assert_never(action)


def _write_down_kill(kill: Kill, seen: Observed, journal: Journal) -> None:
    """The first reason is the one; it may take many turns."""
    attempt = journal.history.attempts[-1]
    if kill.is_the_end and not attempt.killed:
        journal.note(events.killed(attempt.number, kill.reason, seen.now))
    elif kill.left and not attempt.left:
        journal.note(events.left_behind(attempt.number, kill.reason, seen.now))


def _attempt(launch: Launch, seen: Observed, world: World) -> Attempt:
    return Attempt(
        number=launch.number,
        id=world.new_id(),
        resume=launch.resume,
        origin=launch.origin,
        lineage=launch.lineage,
        boot_id=seen.boot_id,
        launched_at=seen.now,
        env=launch.env,
        world_size=seen.num_procs,
        global_batch=seen.global_batch,
    )
