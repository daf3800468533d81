"""A diagnosis in one line for a human: who, what, and the log to read."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from runner.facts import Exit, Kills
from runner.supervise.logs import find_streams, read_tail
from runner.supervise.process import signal_name
from runner.supervise.triage.evidence import Evidence, Suspect
from runner.supervise.triage.lines import LogLine
from runner.supervise.triage.refine import Chosen
from runner.supervise.triage.table import CALLED, Kind

_SECRET: Final = re.compile(
    r"\b(?:hf_|sk-|gh[pousr]_|glpat-|AKIA|xox[bp]-)[\w-]{12,}|(?i:(?<=bearer )\S{12,})"
)  # lines are sent to people
_INNER: Final = re.compile(r"\bgot (?P<inner>\w*(?:Error|Exception)\(.*\))\s*$")  # as torch.compile quotes it
_SAYS_LITTLE: Final = re.compile(r"^[\w.]+:?\s*$|^(?:SyntaxError|IndentationError|TabError|KeyError)\b|^torch\._")
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
        words = f"; the last words: {_cut(seen.words.text.strip())}" if seen.words and ended and ended.code else ""
        return f"{_only_code(ended)}{words}; see {log}"
    code = next((code for rank, code in seen.exits.items() if seen.exit_lines[rank].place == line.place), None)
    if code is not None:
        rank = line.rank if chosen.rank is None else chosen.rank
        return f"{_silent(line, code, chosen)}{_last_words(folder, rank)}; see {log}"
    who = f"{chosen.said}: " if chosen.said else _who(line, chosen.rank, log)
    return f"{who}{_said(line, seen.suspect(line))}{_became(seen.suspect(line), seen)}; see {log}"


def _said(line: LogLine, known: Suspect | None) -> str:
    """The error, what else its message says, and the script's line that raised it."""
    text = _cut(line.text.strip())
    if known is None:
        return text
    inner = _INNER.search(known.detail)
    detail = _cut(inner["inner"] if inner else known.detail)
    told = f"{text}{' ' if text.endswith(':') else ': '}{detail}" if detail else text
    told += f"; before it: {_cut(known.before.strip())}" if CALLED.search(text) and known.before else ""
    return f"{told}{_at(known)}"


def _became(known: Suspect | None, seen: Evidence) -> str:
    """Of an error that a library raised another out of: that may say what the first means for the job."""
    if known is None or not known.chain or known.kind is not Kind.ERROR:
        return ""
    family = [s for s in seen.suspects if (s.line.source, s.chain) == (known.line.source, known.chain) and s.ended]
    last = family[-1] if family else known
    return f"; it became {_cut(last.line.text.strip())}{_at(last)}" if last.line.place > known.line.place else ""


def _at(known: Suspect) -> str:
    if not known.at:
        return ""
    is_wanted = known.statement and _SAYS_LITTLE.search(known.line.text)
    return f" ({known.at}{': ' + _cut(known.statement) if is_wanted else ''})"


def _out_of_memory(chosen: Chosen, kills: Kills) -> str:
    return kills.describe("a process" if chosen.rank is None else f"rank {chosen.rank}")


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
    why = " (out of memory? the kernel does that)" if code == -signal.SIGKILL else ""
    return f"{who} was killed by {signal_name(-code)}{why}"


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
        return "nobody saw how the launcher ended: its shim was killed too, as in a container out of memory, or its disk accepted no write"
    if ended.code < 0:
        return f"the launcher was killed by {signal_name(-ended.code)}"
    return f"the launcher exited with code {ended.code}"


def _cut(message: str) -> str:
    message = _SECRET.sub("(secret)", _LINK.sub("(link)", message))
    return message if len(message) <= _MAX_MESSAGE else message[: _MAX_MESSAGE - 1] + "…"
