"""Whether the loss is still a number, and which checkpoints were written after it was not."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from math import isfinite

from runner.facts import Attempt, Checkpoint, Divergence, History, Progress
from runner.job import GuardPolicy
from vramfarm.protocol import Ref


@dataclass(frozen=True, slots=True, kw_only=True)
class LossWatch:
    """What was seen of the loss of one attempt. Looks are rarer than steps: between two of one kind it was so."""

    step: int = 0
    good_step: int | None = None  # the last with a loss that was fine
    bad_from: int | None = None  # the first after it that was not
    loss: float = 0.0


def watch_loss(before: LossWatch, progress: Progress, policy: GuardPolicy) -> LossWatch:
    """Return the memory after one more look."""
    if progress.loss is None or progress.step in {0, before.step}:
        return before
    now = replace(before, step=progress.step, loss=progress.loss)
    limit = policy.divergence_threshold
    if isfinite(progress.loss) and (limit is None or progress.loss <= limit):
        return replace(now, good_step=progress.step, bad_from=None)
    return replace(now, bad_from=before.bad_from or progress.step)


def divergence(watch: LossWatch) -> Divergence | None:
    """None while the loss is fine, or nothing is known of it."""
    if watch.bad_from is None:
        return None
    return Divergence(
        good_step=watch.good_step,
        since_step=watch.bad_from,
        num_steps=watch.step - watch.bad_from + 1,
        loss=watch.loss,
    )


def first_distrusted(attempt: Attempt, found: Divergence) -> int:
    """
    The step from which on its checkpoints may hold the damage. A loss that was fine at a step
    speaks for the weights before that step, not for those after it.
    """
    if found.good_step is not None:
        return found.good_step
    return attempt.resume.step + 1 if attempt.resume else 0


def is_distrusted(ref: Ref, history: History) -> bool:
    return _is_marked(ref, _marks(history))


def _marks(history: History) -> set[tuple[int, int]]:
    """Of all machines: what one of them saved, the next would resume from."""
    return {*history.distrusted, *history.earlier.distrusted}


def _is_marked(ref: Ref, marks: Collection[tuple[int, int]]) -> bool:
    return any(ref.attempt == number and ref.step >= step for number, step in marks)


def newest_good(local: tuple[Checkpoint, ...], history: History, found: Divergence | None) -> Ref | None:
    """The newest checkpoint from before the loss went wrong; it is what a person goes on from."""
    marks = _marks(history)
    if found and history.running:
        marks.add((history.running.number, first_distrusted(history.running, found)))
    refs = [c.ref for c in local if not _is_marked(c.ref, marks)]
    return max(refs, default=None)
