"""The report for a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from decimal import Decimal

from runner.facts import Attempt
from runner.figures import span
from runner.policy.goodput import Share, Spending, useful_cost
from runner.report.model import Report
from runner.words import describe_goodput


def text(report: Report) -> Iterator[str]:
    """Lines: the run, each machine with its attempts, the checkpoints."""
    status = report.status
    yield f"{status.get('job', '?')}  {headline(report)}"
    if report.command:
        yield f"  {report.command}"
    if report.spendings:
        yield f"  {describe_goodput(report.spendings)}"
    if money := describe_money(report):
        yield f"  {money}"
    if after := report.status.get("afterwards"):
        yield f"  {after}"
    for number, spending in enumerate(report.spendings, 1):
        yield from _machine(number, spending, is_last=number == len(report.spendings))
    yield f"checkpoints  {len(report.checkpoints)}"
    yield from (
        f"  {saved.name}  in {saved.where or 'no place'}  {saved.written_at[:19]}" for saved in report.checkpoints
    )


def headline(report: Report) -> str:
    """How it ended, or how it is."""
    status = report.status
    outcome = status.get("outcome")
    how = f"{outcome} (exit code {status.get('exit_code')})" if outcome else str(status.get("phase", "unknown")).lower()
    reason = f": {status['reason']}" if status.get("reason") else ""
    total = f"/{status['max_steps']}" if status.get("max_steps") else ""
    return f"{how} at step {last_step(report)}{total}{reason}"


def last_step(report: Report) -> int:
    """The status may be older than what the last machine told the ledger, and the other way round."""
    told = report.status.get("step")
    attempts = [attempt for spending in report.spendings for attempt in spending.machine.attempts]
    return max(told if isinstance(told, int) else 0, *(attempt.step for attempt in attempts[-1:]), 0)


def describe_money(report: Report) -> str:
    """What was paid, and for what; empty where nobody bills."""
    spendings = [spending for spending in report.spendings if spending.machine.price_per_hour]
    if not spendings:
        return ""
    paid = sum((spending.cost for spending in spendings), Decimal(0))
    useful = sum((useful_cost(spending) for spending in spendings), Decimal(0))
    currency = spendings[-1].machine.currency
    return f"{paid} {currency} by the providers' prices, {useful} of it for training that was kept"


def _machine(number: int, spending: Spending, *, is_last: bool) -> Iterator[str]:
    machine = spending.machine
    price = f" at {machine.price_per_hour} {machine.currency}/h: {spending.cost}" if machine.price_per_hour else ""
    ended = f", {machine.outcome}" if machine.outcome else ""
    yield f"machine {number}  {machine.where}  {clock(machine.opened_at)}, {span(spending.total_s)}{price}{ended}"
    for attempt, share in zip(machine.attempts, spending.shares, strict=True):
        yield f"  attempt {attempt.number}  {describe_attempt(attempt, share, is_last=is_last)}"
        yield from (f"    {told}" for told in (attempt.reason, attempt.left and f"killed: {attempt.left}") if told)


def describe_attempt(attempt: Attempt, share: Share, *, is_last: bool) -> str:
    """`failed at step 300 (exit 1), from step 200: 12m 00s kept, 3m 10s in vain, 40s starting`."""
    begin = attempt.resume.step if attempt.resume else 0
    code = attempt.exit.code if attempt.exit else None
    how = f" (exit {code})" if code is not None else ""
    parts = ((share.useful_s, "kept"), (share.lost_s, "in vain"), (share.startup_s, "starting"))
    times = ", ".join(f"{span(seconds)} {what}" for seconds, what in parts if seconds >= 1)
    unknown = "runs" if is_last else "was lost with its machine"
    return f"{attempt.ending or unknown} at step {attempt.step}{how}, from step {begin}" + (
        f": {times}" if times else ""
    )


def clock(moment: datetime) -> str:
    return f"{moment:%Y-%m-%d %H:%M} UTC"
