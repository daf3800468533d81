"""What slow work answered, as facts: JSON of tasks in, and what this life knows of machine, lease and store."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from typing import Any, Final

from runner.errors import one_line
from runner.facts import (
    Checkpoint,
    Conclusion,
    Failed,
    Finding,
    Finished,
    Lease,
    LeaseState,
    Machine,
    Outcome,
    Preflight,
    Running,
    Severity,
    TaskKind,
    TaskState,
    Vacancy,
)
from runner.policy import ledger
from runner.policy.findings import warn
from runner.policy.lease import Pace, may_write
from runner.policy.preflight import decide_verdict
from runner.policy.slow import is_lost_there
from runner.supervise import process
from vramfarm.protocol import Ref

_COMPARES: Final = frozenset({TaskKind.RESTORE, TaskKind.VERIFY})
_PROVES: Final = frozenset({TaskKind.RESTORE, TaskKind.UPLOAD})  # not VERIFY: that may go by the store's word


class Checked:
    """What preflight found in this life, part by part."""

    def __init__(self, *, users: frozenset[str]) -> None:
        self.verdict: Preflight | None = None
        self._users = users
        self._known: TaskState = None

    def learn(self, state: TaskState) -> None:
        if state is self._known or not isinstance(state, Finished | Failed):
            return
        self._known = state
        before = self.verdict.findings if self.verdict else ()
        self.verdict = decide_verdict((*before, *_findings(state)), users=self._users)


def _findings(state: Finished | Failed) -> tuple[Finding, ...]:
    """A task that died has found nothing out: that is said, and refuses nothing."""
    if isinstance(state, Failed):
        return (warn("time_limit", f"not checked: {state.error}"),)
    return tuple(parse_finding(fields) for fields in state.result.get("findings", ()))


def parse_finding(fields: Mapping[str, Any]) -> Finding:
    """The inverse of `dataclasses.asdict`, after JSON."""
    return Finding(**{**fields, "severity": Severity(fields["severity"])})


class StoreView:
    """What tasks told of the store in this life."""

    def __init__(self, keep_last: int = 1) -> None:
        self._keep_last = keep_last
        self.checkpoints: tuple[Checkpoint, ...] | None = None
        self.spoilt: Mapping[str, Any] = {}  # by name, as a task told it; for the next one
        self.vanished: frozenset[str] = frozenset()
        self.outputs_stuck = ""
        self.conclusion: Conclusion | None = None
        self._is_damaged: dict[str, bool] = {}  # by name, as the last one found that had to do with its bytes
        self.job: Mapping[str, Any] = {}
        self.ledger: tuple[Machine, ...] | None = None
        self.abilities: Mapping[str, Any] | None = None
        self.last_upload_s = 0.0
        self.last_commit_s = 0.0  # a copy of what a framework saved
        self._known: dict[TaskKind, TaskState] = {}

    def learn(self, tasks: Mapping[TaskKind, TaskState]) -> None:
        for kind, state in tasks.items():
            if state is self._known.get(kind) or state == self._known.get(kind):
                continue
            if isinstance(state, Finished):
                self._finished(kind, state, self._known.get(kind))
            elif isinstance(state, Failed) and kind in _COMPARES and is_lost_there(state):
                self._is_damaged[state.subject] = True
            self._known[kind] = state

    def unusable_now(self) -> frozenset[str]:
        """Names of checkpoints whose bytes in the store were found to be others, in this life."""
        return frozenset(name for name, is_damaged in self._is_damaged.items() if is_damaged)

    def unusable(self, before: frozenset[str]) -> frozenset[str]:
        """The same, with what was known `before`; but for what has been sent anew, or came back whole, since."""
        return frozenset(name for name in before if self._is_damaged.get(name, True)) | self.unusable_now()

    def global_batch(self) -> int:
        """Of the job that is there; 0 where it has none, or makes no sense."""
        batch = self.job.get("batch")
        samples = batch.get("global") if isinstance(batch, Mapping) else 0
        return samples if isinstance(samples, int) else 0

    def _finished(self, kind: TaskKind, state: Finished, before: TaskState) -> None:
        started = getattr(before, "started_at", None)
        if kind in _PROVES:
            self._is_damaged[state.subject] = False
        if kind is TaskKind.UPLOAD and started:
            self.last_upload_s = (state.at - started).total_seconds()
        if kind is TaskKind.COMMIT and started:
            self.last_commit_s = (state.at - started).total_seconds()
        if "checkpoints" in state.result:
            self._listed(state.result)
        if kind is TaskKind.SURVEY:
            self.ledger = ledger.parse(state.result.get("ledger"))
            identity = (state.result.get("job") or {}).get("identity")
            self.job = identity if isinstance(identity, Mapping) else {}
            self.abilities = state.result.get("abilities")
        if kind is TaskKind.OUTPUTS:
            self.outputs_stuck = str(state.result.get("stuck", ""))
        if "outcome" in state.result:
            self.conclusion = parse_conclusion(state.result["outcome"] or {})

    def _listed(self, result: Mapping[str, Any]) -> None:
        had = {c.ref.name for c in (self.checkpoints or ())[-self._keep_last :]}  # older ones are ours to remove
        self.checkpoints = tuple(parse_checkpoint(fields) for fields in result["checkpoints"])
        self.spoilt = result.get("spoilt", {})
        there = {c.ref.name for c in self.checkpoints} | {*self.spoilt, *result.get("refused", ())}
        self.vanished = frozenset((self.vanished | had) - there)


class LeaseView:
    """What the keeper told, and for how long it holds."""

    def __init__(self, *, is_needed: bool) -> None:
        self._told: Mapping[str, Any] = {"state": LeaseState.UNKNOWN if is_needed else LeaseState.NOT_NEEDED}
        self._renewed_s: float | None = None

    def look(self, task: TaskState) -> Lease:
        trouble = ""
        if isinstance(task, Running):
            self._learn(task.told)
            trouble = task.note
        elif isinstance(task, Finished):
            self._learn(task.result.get("told", {}))
        elif isinstance(task, Failed):
            trouble = task.error
        state = LeaseState(self._told["state"])
        if self._renewed_s is not None and state in {LeaseState.HELD, LeaseState.UNKNOWN}:
            is_fresh = may_write(self._renewed_s, process.boot_time_s(), Pace())
            state = LeaseState.HELD if is_fresh else LeaseState.LAPSED
        told = self._told
        return Lease(
            state=state,
            fence=int(told.get("fence", 0)),
            who=one_line(str(told.get("who", ""))[:200]),
            until=one_line(str(told.get("until", ""))[:40]),
            trouble=trouble,
            vacancy=Vacancy(told.get("vacancy", Vacancy.SILENT)),
        )

    def _learn(self, told: Mapping[str, Any]) -> None:
        if told.get("state"):
            self._told = told
        if told.get("renewed_s") is not None:
            self._renewed_s = float(told["renewed_s"])


def parse_checkpoint(fields: Mapping[str, Any]) -> Checkpoint:
    """The inverse of `dump_checkpoint`, which the tasks use."""
    return Checkpoint(
        ref=Ref(**fields["ref"]),
        size_bytes=fields["size_bytes"],
        world_size=fields["world_size"],
        written_at=datetime.fromisoformat(fields["written_at"]),
        framework=fields["framework"],
        origin=fields.get("origin", ""),
    )


def dump_conclusion(conclusion: Conclusion, *, attempt: int, missing: str = "") -> dict[str, Any]:
    """`outcome.json` of the store; `parse_conclusion` reads it. `attempt`: number of the last one."""
    at = conclusion.at.isoformat()
    told = {"outcome": conclusion.outcome, "reason": conclusion.reason, "at": at, "attempt": attempt}
    return {**told, "missing": missing} if missing else told


def parse_conclusion(fields: Mapping[str, Any]) -> Conclusion | None:
    with suppress(KeyError, ValueError, TypeError):  # of a newer runner, or not ours: nothing to go by
        return Conclusion(
            outcome=Outcome(fields["outcome"]),
            reason=one_line(str(fields["reason"])[:500]),
            at=datetime.fromisoformat(fields["at"]),
            attempt=last_attempt(fields),
            missing=one_line(str(fields.get("missing", ""))[:500]),
        )
    return None


def last_attempt(outcome: Mapping[str, Any]) -> int | None:
    """Before the end, as `dump_conclusion` has it; None: it does not say."""
    number = outcome.get("attempt")
    return number if type(number) is int else None
