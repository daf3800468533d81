"""What a check says, by how much it matters."""

from __future__ import annotations

from typing import Final

from runner.facts import Finding, Severity

EXIT_CODE: Final = "exit_code"  # among the facts of such a finding


def ok(name: str, message: str, hint: str = "") -> Finding:
    return Finding(name, Severity.OK, message, hint)


def warn(name: str, message: str, hint: str = "") -> Finding:
    return Finding(name, Severity.WARN, message, hint)


def refuse(name: str, message: str, hint: str = "", *, exit_code: int = 0) -> Finding:
    """`exit_code`: of a fault that is not this machine's, and that another one would have, too."""
    return Finding(name, Severity.REFUSE, message, hint, {EXIT_CODE: exit_code} if exit_code else {})


def swap(name: str, message: str) -> Finding:
    """Training here would fail, and only somebody at the machine can mend that."""
    return refuse(name, message, "swap this machine and tell support")
