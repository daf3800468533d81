"""
The first real error of an attempt, in one line for a human.

When one rank dies the others complain louder: what they print is secondary and is never
chosen while anything better is there. Torchrun itself always exits 1, and what it names as
the root cause is only the first it noticed.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from runner.facts import Exit
from runner.supervise.logs import find_streams, read_tail

_MAX_MESSAGE: Final = 300
_NO_LIMIT: Final = 1 << 60  # cgroup 1 has a number for it, near 2^63
_TERMINATED: Final = -int(signal.SIGTERM)  # in torchrun's table: it ended that rank itself

_PREFIX: Final = re.compile(r"^(?:\[default\d+\]:)?(?:\[rank\d+\]:\s?)?")
_TRACEBACK: Final = "Traceback (most recent call last):"
_LAST_ERROR: Final = "Last error:"  # NCCL's: the next line is the cause
_EXCEPTION: Final = re.compile(r"^(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?::|$)")
_NAMED_ERROR: Final = re.compile(r"^(?:[A-Za-z_]\w*\.)*\w*(?:Error|Exception|Interrupt)(?::|$)")
_OTHER_ERROR: Final = re.compile(
    r"^Fatal Python error: |^\S*python\S*: can't open file |^\S+: error: |^vramfarm-runner: cannot start |"
    r"^\S*python\S*: (?:No module named|Error while finding module) |^fatal error: | NCCL WARN |"
    r"Watchdog caught collective operation timeout|Heartbeat monitor timed out"
)
_TABLE: Final = re.compile(r"rank\s+: (?P<rank>\d+) \(local_rank: \d+\)\s+exitcode\s+: (?P<code>-?\d+)")

_SECONDARY_TEXTS: Final = (
    "ChildFailedError|SignalException|Sending process|exitcode : -15",  # the agent's summary
    "Watchdog caught collective operation timeout|Some NCCL operations have failed or timed out",
    "taking the entire process down|last enqueued NCCL work",  # somebody did not arrive
    "watchdog got stuck for|Heartbeat monitor timed out",  # follows a hang
    "NCCL watchdog thread terminated with exception",  # an echo; the traceback is better
    r"NCCL error in:|ProcessGroup.*is still running",  # says where; "Last error:" says what
    "exitcode : -6|terminate called after throwing",  # the abort of NCCL's watchdog
    "Fatal Python error: Aborted",
    "ncclRemoteError|remote process exited or there was a network error",  # the peer died
    r"[Cc]onnection closed by (?:remote )?peer|Connection closed by localRank",
    "ncclInternalError|Socket recv failed while polling",
    r"store->get\('\d+'\) got error|Connection reset by peer",  # rank 0 died
    'Failed to check the "should dump" flag|sendBytes failed|recvBytes|Broken pipe|DistNetworkError',
    "process group has NOT been destroyed|destroy_process_group",  # noise, in good runs too
    r"DataLoader worker \(pid.*exited unexpectedly|killed by signal: Terminated",
    "One or more background workers are no longer alive",
    "The current process just got forked|OMP_NUM_THREADS|FutureWarning|UserWarning",
    "Failed to execute operation",  # NCCL's helper threads say it after the cause
    "unexpected pos",  # cleaning up after another error
    "Timed out waiting .*ms for (?:recv|send) operation",
    "^KeyboardInterrupt$|^SystemExit",
)
_SECONDARY: Final = re.compile("|".join(_SECONDARY_TEXTS))


@dataclass(frozen=True, slots=True)
class _Error:
    rank: int
    message: str
    path: Path
    written_ns: int  # when its file was last written: who died first stopped first

    @property
    def is_secondary(self) -> bool:
        return _SECONDARY.search(self.message) is not None


def first_error(folder: Path, ended: Exit) -> str:
    """Return one line: which rank, its error, and the log to read. Reads the ends of the logs only."""
    errors = _rank_errors(folder)
    real = sorted((e for e in errors if not e.is_secondary), key=lambda e: (e.written_ns, e.rank))
    launcher = folder / "launcher.log"
    lines = read_tail(launcher)
    codes = _exit_codes(lines)
    killed = -signal.SIGKILL in {*codes.values(), ended.code}
    if (not real or killed) and (out_of_memory := _out_of_memory(folder, codes, launcher)):
        return out_of_memory
    if real:
        return _tell(real[0], alike=[e for e in real if e.message == real[0].message], errors=errors)
    return (
        _killed(codes, launcher)
        or _silent(codes, errors, launcher)
        or _launchers_own(lines, launcher)
        or (_tell(errors[0], alike=[], errors=errors) if errors else "")
        or _only_code(ended, launcher)
    )


def _rank_errors(folder: Path) -> list[_Error]:
    found = []
    for stream in find_streams(folder):
        if stream.rank < 0:
            continue
        message = find_error(read_tail(stream.path))
        if message:
            with suppress(FileNotFoundError):
                found.append(_Error(stream.rank, message, stream.path, stream.path.stat().st_mtime_ns))
    return found


def find_error(lines: Sequence[str]) -> str:
    """Return the last line that names an error; if all are secondary, the first; or nothing."""
    messages = _messages([_PREFIX.sub("", line) for line in lines])
    real = [message for message in messages if not _SECONDARY.search(message)]
    return real[-1] if real else next(iter(messages), "")


def _messages(lines: Sequence[str]) -> list[str]:
    messages = []
    in_traceback = False
    for before, line in zip(("", *lines), lines, strict=False):
        if _TRACEBACK in line:
            in_traceback = True
        elif before.rstrip() == _LAST_ERROR:
            messages.append(line.strip())
        elif in_traceback and line[:1] not in {" ", "\t", ""} and _EXCEPTION.match(line):
            messages.append(line.strip())
            in_traceback = False
        elif _NAMED_ERROR.match(line) or _OTHER_ERROR.search(line):
            messages.append(line.strip())
    return messages


def _exit_codes(lines: Sequence[str]) -> dict[int, int]:
    """Exit code by rank, from torchrun's table."""
    return {int(match["rank"]): int(match["code"]) for match in _TABLE.finditer("\n".join(lines))}


def _out_of_memory(folder: Path, codes: dict[int, int], log: Path) -> str:
    """The shim asked the kernel, which counts whom it killed."""
    try:
        record = json.loads((folder / "exit.json").read_bytes())
        kills, limit = int(record["oom_kills"]), int(record["memory_limit"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    rank = next((f"rank {rank}" for rank, code in sorted(codes.items()) if code == -signal.SIGKILL), "a process")
    more = f" and {kills - 1} more" if kills > 1 else ""
    had = f"the container may have {limit / 1e9:.1f} GB" if 0 < limit < _NO_LIMIT else "the container has no limit"
    cure = "give it more (docker run --memory), or use fewer data workers or smaller batches"
    return f"out of memory: the kernel killed {rank}{more}; {had}: {cure}; see {log}"


def _killed(codes: dict[int, int], log: Path) -> str:
    for rank, code in sorted(codes.items()):
        if code < 0 and code != _TERMINATED:
            why = " (out of memory? the kernel kills so)" if code == -signal.SIGKILL else ""
            return f"rank {rank} was killed by {_signal_name(-code)}{why}; see {log}"
    return ""


def _silent(codes: dict[int, int], errors: Sequence[_Error], log: Path) -> str:
    talked = {error.rank for error in errors}
    for rank, code in sorted(codes.items()):
        if code > 0 and rank not in talked:
            return f"rank {rank} exited with code {code} and no error message; see {log}"
    return ""


def _launchers_own(lines: Sequence[str], log: Path) -> str:
    message = find_error(lines)
    return "" if not message or _SECONDARY.search(message) else f"launcher: {_cut(message)}; see {log}"


def _only_code(ended: Exit, log: Path) -> str:
    if ended.code is None:
        return f"nobody saw how the launcher ended: its shim was killed too; see {log}"
    if ended.code < 0:
        return f"the launcher was killed by {_signal_name(-ended.code)}; see {log}"
    return f"the launcher exited with code {ended.code}; see {log}"


def _tell(error: _Error, *, alike: Sequence[_Error], errors: Sequence[_Error]) -> str:
    ranks = sorted({e.rank for e in alike})
    everyone = len(ranks) > 1 and ranks == sorted({e.rank for e in errors})
    who = "all ranks" if everyone else f"rank {error.rank}"
    return f"{who}: {_cut(error.message)}; see {error.path}"


def _cut(message: str) -> str:
    return message if len(message) <= _MAX_MESSAGE else message[: _MAX_MESSAGE - 1] + "…"


def _signal_name(number: int) -> str:
    with suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"
