"""Whether the cards that are there hold the job. An estimate: it warns, and refuses nothing."""

from __future__ import annotations

from runner.facts import Finding
from runner.job import Job
from runner.policy.batch import accumulation
from runner.policy.findings import ok, warn
from runner.policy.fleet import strategy_name
from runner.policy.planning import CONTEXT_BYTES, GB, cheapest, fits, memory, workload

_NAME = "cards.fit"


def judge_fit(job: Job, *, num_procs: int, card_bytes: int) -> tuple[Finding, ...]:
    """`card_bytes`: memory of the smallest card. Nothing where job.yaml has no `model`, or no card says its size."""
    if job.model is None or not card_bytes:
        return ()
    per_card = job.batch.per_card if job.batch else 1
    work = workload(job.model, per_card=per_card, accumulation=accumulation(job, num_procs))
    needed = memory(work, num_procs).total + CONTEXT_BYTES
    told = (
        f"{strategy_name(work.strategy)} is expected to take {needed / GB:.0f} of the {card_bytes / GB:.0f} GB of each card "
        f"({per_card} x {work.sequence} tokens at once)"
    )
    if fits(work, num_procs, card_bytes):
        return (ok(_NAME, told),)
    found = cheapest(work, num_procs, card_bytes)
    cure = "a smaller per_card, shorter sequences, an 8-bit optimizer, or bigger cards"
    if found is not None:
        offload = " with the optimizer in system memory" if found.offload else ""
        cure = f"{strategy_name(found.strategy)}{offload} fits here"
    message = f"{told}: out of memory within the first steps"
    return (warn(_NAME, message, cure),)
