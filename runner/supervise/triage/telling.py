"""A diagnosis in one line for a human: who, what, and the log to read."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from runner.facts import Exit
from runner.supervise.logs import find_streams, read_tail
from runner.supervise.triage.evidence import Evidence, Kills
from runner.supervise.triage.lines import LogLine
from runner.supervise.triage.refine import Chosen

_NO_INPUT: Final = re.compile(r"EOFError: EOF when reading a line")
_MAX_MESSAGE: Final = 300
_LINK: Final = re.compile(r"\bhttps?://\S+")  # nobody is sent to an address that a log names


def tell(chosen: Chosen, seen: Evidence, *, files: Sequence[Path], folder: Path, ended: Exit | None) -> str:
    """Return the line; there is always one, and it says where to look."""
    line = chosen.line
    launcher = folder / "launcher.log"  # of a run that has launched nothing there is none
    log = files[line.source] if line else launcher if launcher.is_file() else folder
    if chosen.label.startswith("host_oom") and seen.kills:
        return f"{_out_of_memory(chosen, seen.kills)}; see {log}"
    if line is None:
        return f"{_only_code(ended)}; see {log}"
    code = next((code for rank, code in seen.exits.items() if seen.exit_lines[rank].place == line.place), None)
    what = (
        f"{_who(line, chosen.rank, log)}{_cut(line.text.strip())}{_asked(line.text)}"
        if code is None
        else f"{_silent(line, code, chosen)}{_last_words(folder, line.rank if chosen.rank is None else chosen.rank)}"
    )
    return f"{what}; see {log}"


def _asked(text: str) -> str:
    """Python's error for an answer that never comes says nothing of a question."""
    return " (it asked for input, and nobody answers: use an option or a variable)" if _NO_INPUT.search(text) else ""


def _out_of_memory(chosen: Chosen, kills: Kills) -> str:
    who = "a process" if chosen.rank is None else f"rank {chosen.rank}"
    more = f" and {kills.count - 1} more" if kills.count > 1 else ""
    limit = f"may have {kills.limit_bytes / 1e9:.1f} GB" if kills.limit_bytes else "has no limit"
    cure = "give it more (docker run --memory), or use fewer data workers or smaller batches"
    return f"out of memory: the kernel killed {who}{more}; the container {limit}: {cure}"


def _who(line: LogLine, rank: int | None, log: Path) -> str:
    if rank is not None:
        return f"rank {rank}: "
    if line.rank is not None:
        return "all ranks: "
    return "launcher: " if log.name == "launcher.log" else ""


def _silent(line: LogLine, code: int, chosen: Chosen) -> str:
    who = f"rank {line.rank}" if chosen.rank is None else f"rank {chosen.rank}"
    if code >= 0:
        return f"{who} exited with code {code} and no error message"
    why = " (out of memory? the kernel kills so)" if code == -signal.SIGKILL else ""
    return f"{who} was killed by {_signal_name(-code)}{why}"


def _last_words(folder: Path, rank: int | None) -> str:
    """What `sys.exit("why")` and a logger print has no sign of an error, and is all that is known."""
    streams = find_streams(folder, rank=rank) if rank is not None and folder.is_dir() else ()
    lines = [line.strip() for stream in streams if stream.name == "stderr" for line in read_tail(stream.path)]
    last = next((line for line in reversed(lines) if line), "")
    return f"; the last line of its stderr: {_cut(last)}" if last else ""


def _only_code(ended: Exit | None) -> str:
    if ended is None:
        return "no line names an error"
    if ended.code is None:
        return "nobody saw how the launcher ended: its shim was killed too"
    if ended.code < 0:
        return f"the launcher was killed by {_signal_name(-ended.code)}"
    return f"the launcher exited with code {ended.code}"


def _cut(message: str) -> str:
    message = _LINK.sub("(link)", message)
    return message if len(message) <= _MAX_MESSAGE else message[: _MAX_MESSAGE - 1] + "…"


def _signal_name(number: int) -> str:
    with suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"
