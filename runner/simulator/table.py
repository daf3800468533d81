"""
What a person who watches the farm sees: its servers, their bills, its emails. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from decimal import Decimal
from typing import Final

from runner.simulator.model import Billing, Email, Server

_HEADS: Final = ("SERVER", "MACHINE", "STATE", "STARTS", "MINUTES", "EUR", "WHERE")
_EMAILS: Final = 5  # the newest


def table(servers: Sequence[tuple[Server, Billing, str]], emails: Sequence[Email], balance: Decimal) -> Iterator[str]:
    """Lines. Each server comes with its bill, and with that by which it is found on this machine."""
    rows = [_HEADS, *(_row(*shown) for shown in servers)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
    billed = sum((bill.cost for _, bill, _ in servers), Decimal(0))
    yield f"billed {billed} EUR, balance {balance} EUR"
    for email in emails[-_EMAILS:]:
        yield f"email {email.at:%Y-%m-%d %H:%M:%S} UTC: {email.subject}"


def _row(server: Server, bill: Billing, where: str) -> tuple[str, ...]:
    starts = server.container.restart_count + (server.container.state != "none")
    return (
        server.id,
        f"{server.machine.count} x {server.machine.gpu_name}",
        f"{server.state} ({server.state_reason})" if server.state_reason else str(server.state),
        str(starts),
        str(bill.billed_minutes),
        str(bill.cost),
        where,
    )
