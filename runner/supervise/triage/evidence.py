"""
What the logs of one attempt tell: suspects, deaths, waits, progress and signs, with their lines.

Nothing is chosen here. Structure is read: which line ends a traceback and which only stands in
one, what was handled because training went on, where a second attempt of the launcher begins.
"""

from __future__ import annotations

import math
import re
import signal
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from runner.facts import Kills
from runner.supervise.recorder import Recorded
from runner.supervise.triage.lines import LogLine
from runner.supervise.triage.table import CONTEXTS, ECHO, NOISE, OWN_WORDS, ROWS, SIGNS, WAITS, WATCHDOG, Kind
from runner.supervise.triage.tracebacks import EXCEPTION, FRAME, GROUP, LIBRARY, TRACEBACK, WRAPPER, Beyond, Traceback

_FAMILIAR: Final = 20  # times a line may come, numbers aside, before it is no news
_END: Final = 500  # lines at the end are always news
_MAX_SHAPES: Final = 50_000
_MAX_SUSPECTS: Final = 1_000  # of a source; as many again from its end
_NO_DIGITS: Final = str.maketrans("", "", "0123456789")
_MANY_STEPS: Final = 3  # lines of progress after an error that show it was handled
_DEADLY: Final = frozenset({-4, -7, -8, -9, -11})  # signals that end a rank without a word

_NEXT_LINE: Final = re.compile(r"^(?:Last error:\s*|╭─+ Error ─+╮?)$")  # says what it is
_PANIC: Final = re.compile(r"^(?:thread '.*' (?:\(\d+\) )?panicked at |panic: )")
_WATCHED: Final = "Stack trace of the failed collective"
_WATCHED_FRAME: Final = re.compile(r"^#\d+ (?P<name>\S+) from (?P<file>.+):(?P<line>\d+)$")
_CLOSED: Final = re.compile(r"Sending process \d+ closing signal")
_NAMED_ERROR: Final = re.compile(r"^(?:[A-Za-z_]\w*\.)*\w*(?:Error|Exception|Interrupt)(?::|$)")
_OTHER_ERROR: Final = re.compile(
    r"^\S*python\S*: (?:can't open file|No module named|Error while finding module) |^\S+: error: |"
    r"^vramfarm-runner: cannot start |^(?:.*\[runner\] )?.*setup step .* exit code (?!0)|^fatal error: |"
    r"^thread '.*' (?:\(\d+\) )?panicked at |^panic: |^Could not override '|^Primary config \w+ not found|: line \d+: (?:syntax error|\w+: unbound variable)|^fatal: (?:unable|could not|repository|Authentication)|"
    r"Permission denied \(publickey|^Host key verification|^ERROR: (?:Failed |Could not |Cannot |Exception:|Invalid requirement|THESE PACKAGES)"
)
PROGRESS: Final = re.compile(
    r"(?i)^(?!.*(?:tokeniz|\bmap\b|download|loading|fetching|generating|grouping|packing|filter)).*?"
    r"(?:\b(?:global_?step|step|iter(?:ation)?|epoch)\b\W{0,4}\d+.*loss|'loss':|\d+%\|.*\d+/\d+ \[.*(?:it/s|s/it))"
)
_QUIET: Final = re.compile(
    r"\bWARN(?:ING)?\b|\bINFO\b|\bDEBUG\b|\b[Rr]etry(?:ing)?\b|Warning: |will retry|\bskipping\b"
)
_TOLD: Final = re.compile(r"^\[(?:runner|host|startup-check)\] ")  # by the supervisor, not by a rank
_CHECK: Final = "[startup-check] "  # of the machine, before any rank
_EXACT: Final = 3
_OF_PEERS: Final = "network_reset"  # a connection that a peer closed is none to the outside
_EARLIER: Final = re.compile(r"\b(?:previous|earlier|last) attempt|attempt \d+ (?:ended|was killed)")
_CRASH: Final = re.compile(r"^Fatal Python error: ")
_FINAL: Final = re.compile(r"NVRM: |Fatal Python error")  # nobody survives it, whoever prints after it
_TEARDOWN: Final = re.compile(r"closing signal SIG|failed \(exitcode: |ChildFailedError|Killing subprocess")
_FAILED: Final = re.compile(r"failed \(exitcode: (?P<code>-?\d+)\) local_rank: (?P<rank>\d+)")
_TABLE_RANK: Final = re.compile(r"^\s*rank\s+: (?P<rank>\d+) \(local_rank: \d+\)")
_TABLE_CODE: Final = re.compile(r"^\s*exitcode\s*: (?P<code>-?\d+) ")
_RETURNED: Final = re.compile(
    r"exits with return code = (?P<signal>-\d+)|(?:exited with|exit) code (?P<shell>13[2-9])\b|"
    r"(?:terminated with signal |died with <Signals\.)(?P<name>SIG[A-Z]+)|OOMKilled=(?P<oom>true)|"
    r"process rank (?P<mpi>\d+) with PID \d+ on node \S+ exited on signal (?P<number>\d+)|"
    r": \w+ \d+: +\d+ (?P<killed>Killed|Getötet|Tué|Ucciso|Matado)\b"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """A line that says something is wrong. `ended`: it is how a rank, or a traceback, ended."""

    line: LogLine
    kind: Kind
    label: str = ""
    weight: int = 0
    ended: bool = False
    in_collective: bool = False  # raised while waiting for others
    place: str = ""  # of such a wait: the script's line, and the collective
    at: str = ""  # the script's line, as file:number
    statement: str = ""  # what stands there
    detail: str = ""  # the rest of the message
    before: str = ""  # what was printed last before it
    in_thread: bool = False
    chain: int = 0  # tracebacks that were raised out of each other
    during: bool = False  # raised while another was handled
    code: int = 0  # of a death: minus the signal


@dataclass(frozen=True, slots=True, kw_only=True)
class Waited:
    """A rank that waited until its time ran out."""

    line: LogLine
    how: str  # watchdog, gloo, heartbeat or store
    place: str = ""  # the script's line, and the collective
    seq: str = ""
    operation: str = ""
    size: str = ""
    limit_ms: int = 0
    ran_ms: int = 0


@dataclass(slots=True, kw_only=True)
class Evidence:
    """Everything that was seen, in the order of sources and lines."""

    suspects: list[Suspect] = field(default_factory=list)
    waits: list[Waited] = field(default_factory=list)
    exits: dict[int, int] = field(default_factory=dict)  # by rank, as the launcher says
    exit_lines: dict[int, LogLine] = field(default_factory=dict)
    ranks: set[int] = field(default_factory=set)
    talked: set[int] = field(default_factory=set)  # ranks that said anything about an error
    num_closed: int = 0  # ranks that the launcher asked to end
    progress: list[LogLine] = field(default_factory=list)
    signs: dict[str, LogLine] = field(default_factory=dict)
    memory_gb: list[float] = field(default_factory=list)  # of the host, on lines with a step
    kills: Kills | None = None  # for want of memory
    recorded: Recorded = field(default_factory=Recorded)  # by NCCL's flight recorder
    launcher_code: int | None = None
    words: LogLine | None = None  # the last that were printed, and say nothing of an error

    def suspect(self, line: LogLine | None) -> Suspect | None:
        """What is known of a line that was chosen."""
        return next((s for s in self.suspects if line is not None and s.line is line), None)

    @property
    def first_failed(self) -> int | None:
        """The rank that the launcher noticed first, unless the launcher ended it itself."""
        return next((rank for rank, code in self.exits.items() if code not in {0, -15}), None)


def gather(sources: Iterable[Sequence[LogLine]]) -> Evidence:
    """Read every source by itself; put together what they say about the first attempt."""
    seen = Evidence()
    for lines in sources:
        _Reader(seen).read(lines)
    return seen


class _Reader:
    """Reads one source. Lines of one rank belong together, whatever stands between them."""

    def __init__(self, seen: Evidence) -> None:
        self._seen = seen
        self._tracebacks: dict[str, Traceback] = {}
        self._beyond: dict[str, tuple[LogLine, Beyond]] = {}  # by prefix: the last error, and what follows it
        self._words: LogLine | None = None  # the last that were no progress and no part of a traceback
        self._shapes: dict[str, int] = {}
        self._suspects: list[Suspect] = []
        self._waits: list[Waited] = []
        self._progress: list[LogLine] = []
        self._steps: list[int] = []
        self._teardowns: list[int] = []
        self._row: int | None = None
        self._says_next = False
        self._watched: dict[str, int | None] = {}  # by prefix: the rank whose watchdog prints a stack
        self._chain = 0

    def read(self, lines: Sequence[LogLine]) -> None:
        for at, line in enumerate(lines):
            self._line(line, is_news=self._is_new(line) or at >= len(lines) - _END)
        self._keep_first_attempt()
        self._seen.words = self._words or self._seen.words

    def _is_new(self, line: LogLine) -> bool:
        """Logs repeat themselves; what came often is not looked at again."""
        shape = line.text.translate(_NO_DIGITS)
        count = self._shapes.get(shape, 0)
        if count or len(self._shapes) < _MAX_SHAPES:
            self._shapes[shape] = count + 1
        return count < _FAMILIAR

    def _line(self, line: LogLine, *, is_news: bool) -> None:
        if line.rank is not None:
            self._seen.ranks.add(line.rank)
        if self._is_in_own_words(line):
            self._in_traceback(line, is_news=is_news)
            return
        if self._launcher_says(line):
            return
        if is_news:
            self._look_for_signs(line)
        if PROGRESS.search(line.text):
            self._step(line)
        if self._watchdog_tells(line):
            return
        told = _TOLD.match(line.text) is not None
        if not told and self._in_traceback(line, is_news=is_news):
            return
        if is_news:
            self._ordinary(line, told=told)

    def _is_in_own_words(self, line: LogLine) -> bool:
        """Whether it is what the script raised: whatever it quotes, nobody else says it."""
        state = self._tracebacks.get(line.prefix)
        return state is not None and state.open and state.is_in_own_words and EXCEPTION.match(line.text) is not None

    # -------------------------------------------------------------------- the launcher

    def _launcher_says(self, line: LogLine) -> bool:
        """True if the line is of torchrun's table or clean-up, and is dealt with."""
        text = line.text
        if match := _TABLE_RANK.match(text):
            self._row = int(match["rank"])
            self._seen.ranks.add(self._row)
            return True
        if (match := _TABLE_CODE.match(text)) and self._row is not None:
            self._ended(self._row, int(match["code"]), line)
            return True
        if _TEARDOWN.search(text):
            self._teardowns.append(line.number)
            self._seen.num_closed += _CLOSED.search(text) is not None
        if match := _FAILED.search(text):
            self._ended(int(match["rank"]), int(match["code"]), line)
            return True
        if match := _RETURNED.search(text):
            return self._returned(match, line)
        return False

    def _returned(self, match: re.Match[str], line: LogLine) -> bool:
        """A launcher without a table, or the container engine, says by which signal somebody ended."""
        code = int(match["signal"] or 0) or (128 - int(match["shell"]) if match["shell"] else 0)
        if match["name"]:
            code = -getattr(signal, match["name"], 0)
        if match["mpi"]:
            line, code = replace(line, rank=int(match["mpi"])), -int(match["number"])
        if is_killed := bool(match["oom"] or match["killed"]):
            code = code or -int(signal.SIGKILL)
        if code in _DEADLY:
            self._add(line, Kind.DEATH, code=code)
        return code in _DEADLY or is_killed

    def _ended(self, rank: int, code: int, line: LogLine) -> None:
        self._seen.ranks.add(rank)
        if rank in self._seen.exits:
            return
        said = replace(line, rank=rank)
        self._seen.exits[rank] = code
        self._seen.exit_lines[rank] = said
        if code in _DEADLY:
            self._add(said, Kind.DEATH, code=code)

    # ------------------------------------------------------------------------- a rank

    def _step(self, line: LogLine) -> None:
        self._progress.append(line)
        if match := re.search(r"(?i)(?:rss|mem\w*|ram)\W{0,3}(\d+(?:\.\d+)?) ?G", line.text):
            self._seen.memory_gb.append(float(match[1]))

    def _look_for_signs(self, line: LogLine) -> None:
        for sign, pattern in SIGNS.items():
            if sign not in self._seen.signs and pattern.search(line.text):
                self._seen.signs[sign] = line

    def _watchdog_tells(self, line: LogLine) -> bool:
        """True if the line is of the stack that NCCL's watchdog prints: where its rank called what never ended."""
        if _WATCHED in line.text:
            self._watched[line.prefix] = line.rank
            return True
        match = _WATCHED_FRAME.match(line.text)
        if match is None or line.prefix not in self._watched:
            return False
        if not LIBRARY.search(match["file"]):
            self._place(self._watched.pop(line.prefix), f"{match['file']}:{match['line']}")
        return True

    def _place(self, rank: int | None, place: str) -> None:
        mine = (at for at, wait in enumerate(self._waits) if wait.line.rank == rank and not wait.place)
        if (at := next(mine, None)) is not None:
            self._waits[at] = replace(self._waits[at], place=place)

    def _in_traceback(self, line: LogLine, *, is_news: bool) -> bool:
        """True if the line stands in a traceback, or ends one, or belongs to the error that did."""
        text = line.text
        state = self._tracebacks.setdefault(line.prefix, Traceback())
        if line.prefix in self._beyond and self._after_error(line):
            return True
        state.announces(text)
        if state.in_group and self._in_group(line, state, is_news=is_news):
            return True
        return self._begins(line, state) or (state.open and self._in_open(line, state, is_news=is_news))

    def _begins(self, line: LogLine, state: Traceback) -> bool:
        """True if a traceback begins here, or will, that another one led to."""
        text = line.text
        if TRACEBACK in text or GROUP.search(text) or (not state.open and FRAME.match(text)):
            self._begin(line, state, original="Original " in text)
            return True
        if "During handling of the above exception" in text or "direct cause of the following" in text:
            state.linked, state.during = True, "During" in text
            return True
        return False

    def _in_open(self, line: LogLine, state: Traceback, *, is_news: bool) -> bool:
        text = line.text
        if state.is_inside(text):
            state.see(text)
            return True
        if WRAPPER.search(text):
            return True
        if not EXCEPTION.match(text):
            state.strangers += 1
            state.open = state.strangers < _MANY_STEPS
            return False
        state.open = False
        if is_news:
            self._exception(line, state)
        return True

    def _begin(self, line: LogLine, state: Traceback, *, original: bool) -> None:
        state.follows = state.linked or original
        if not state.follows:
            self._chain += 1
            state.chain, state.during = self._chain, False
        state.linked = False
        said = self._words
        state.begin(line.text, said.text if said and said.rank in {None, line.rank} else "")
        if FRAME.match(line.text):
            state.see(line.text)

    def _in_group(self, line: LogLine, state: Traceback, *, is_news: bool) -> bool:
        """Of a group the first exception that has no exceptions of its own is the error; the others came beside it."""
        text = state.peel(line.text)
        if text is None:
            state.in_group = state.open = False
            return False
        if state.is_inside(text) or TRACEBACK in text:
            state.see(text)
        elif EXCEPTION.match(text) and not state.has_leaf and is_news:
            state.has_leaf = not ECHO.search(text)
            self._exception(replace(line, text=text), state)
        return True

    def _after_error(self, line: LogLine) -> bool:
        """True if the line is of the stack that a compiler prints below its error: where in the user's code it was."""
        told, beyond = self._beyond[line.prefix]
        had = (beyond.detail, beyond.spot.own, beyond.spot.statement)
        is_part = beyond.see(line.text)
        if line.text[:1] in {" ", "\t"} and _is_more_exact(line.text, told.text):
            beyond.detail = line.text.strip()
        if had != (beyond.detail, beyond.spot.own, beyond.spot.statement):
            self._amend(told, beyond)
        if beyond.is_over or (not beyond.is_stack and TRACEBACK in line.text):
            del self._beyond[line.prefix]
        return is_part

    def _amend(self, line: LogLine, beyond: Beyond) -> None:
        at = next((at for at in reversed(range(len(self._suspects))) if self._suspects[at].line is line), None)
        if at is not None:
            known = replace(self._suspects[at], detail=beyond.detail)
            spot = beyond.spot
            self._suspects[at] = replace(known, at=spot.at, statement=spot.statement) if spot.own else known

    def _exception(self, line: LogLine, state: Traceback) -> None:
        if NOISE.search(line.text):
            return
        kind, label, weight = _in_context(line.text, state)
        if kind is Kind.WAIT:
            self._waited(line, state.place)
            return
        if not state.in_group:
            self._beyond[line.prefix] = line, Beyond(line.text)
        self._add(
            line,
            kind,
            label=label,
            weight=weight,
            ended=True,
            in_collective=state.in_collective,
            place=state.place,
            at=state.at,
            statement=state.statement,
            before=state.before,
            in_thread=state.in_thread,
            chain=state.chain,
            during=state.during,
        )

    def _ordinary(self, line: LogLine, *, told: bool) -> None:
        text, said = line.text, self._says_next
        self._says_next = bool(_NEXT_LINE.match(text))
        if (told and _EARLIER.search(text)) or not text:
            return
        self._words = self._words if PROGRESS.search(text) or self._says_next else line
        found = recognise(text)
        if _CRASH.search(text) or _PANIC.match(text):
            self._beyond[line.prefix] = line, Beyond(text, is_stack=not _PANIC.match(text))
        if found is None:
            named = _NAMED_ERROR.match(text)
            if NOISE.search(text):
                return
            if (named or _OTHER_ERROR.search(text) or said) and not told:
                line = replace(line, text=text.strip("│ ")) if said else line
                self._add(line, Kind.ERROR, label="user_exception", weight=1, ended=bool(named))
            return
        kind, label, weight = found
        if kind is Kind.WAIT:
            self._waited(line)
            return
        if told and kind is Kind.CAUSE and weight < _EXACT:
            return  # a summary in somebody's words
        is_quiet = bool(_QUIET.search(text)) and " NCCL WARN " not in text
        if kind is Kind.CAUSE and (is_quiet or (told and not text.startswith(_CHECK))):
            kind = Kind.HINT
        self._add(line, kind, label=label, weight=weight, ended=_NAMED_ERROR.match(text) is not None)

    def _add(self, line: LogLine, kind: Kind, **more: object) -> None:
        self._suspects.append(Suspect(line=line, kind=kind, **more))  # type: ignore[arg-type]  # fields of Suspect
        if len(self._suspects) > 2 * _MAX_SUSPECTS:
            del self._suspects[_MAX_SUSPECTS]

    def _waited(self, line: LogLine, place: str = "") -> None:
        how = next(name for name, pattern in WAITS if pattern.search(line.text))
        match = WATCHDOG.search(line.text)
        told = match.groupdict(default="") if match else {}
        self._waits.append(
            Waited(
                line=line,
                how=how,
                place=place,
                seq=told.get("seq", ""),
                operation=told.get("op", ""),
                size=told.get("numel", ""),
                limit_ms=int(told.get("limit") or 0),
                ran_ms=int(told.get("ran") or 0),
            )
        )

    # ------------------------------------------------------------------------- the end

    def _keep_first_attempt(self) -> None:
        """Errors after a restart by the launcher are another attempt's; errors that training survived are none."""
        restart = self._restart()
        self._steps = [line.number for line in self._progress]
        suspects = [s for s in self._suspects if s.line.number < restart] or self._suspects
        waits = [w for w in self._waits if w.line.number < restart]
        self._seen.suspects += [s for s in suspects if not self._was_handled(s)]
        self._seen.waits += waits
        self._seen.progress += [line for line in self._progress if line.number < restart]
        told = (*(s.line for s in suspects if s.kind is not Kind.DEATH), *(w.line for w in waits))
        self._seen.talked |= {line.rank for line in told if line.rank is not None}

    def _restart(self) -> float:
        """Number of the first line of progress after the launcher ended its ranks."""
        if not self._teardowns:
            return math.inf
        return next((line.number for line in self._progress if line.number > self._teardowns[0]), math.inf)

    def _was_handled(self, suspect: Suspect) -> bool:
        if suspect.kind not in {Kind.CAUSE, Kind.ERROR, Kind.HINT, Kind.HOST} or suspect.line.prefix.startswith("rank"):
            return False
        if _FINAL.search(suspect.line.text):
            return False
        at = suspect.line.number
        end = next((teardown for teardown in self._teardowns if teardown > at), math.inf)
        survived = bisect_left(self._steps, end) - bisect_right(self._steps, at)
        return survived >= _MANY_STEPS


def recognise(text: str) -> tuple[Kind, str, int] | None:
    """What a line means by itself."""
    if NOISE.search(text):
        return None
    row = next((row for row in ROWS if row.pattern.search(text)), None)
    if row and row.kind is Kind.CALLED:
        return row.kind, row.label, row.weight
    if ECHO.search(text):
        return Kind.ECHO, row.label if row and row.label != _OF_PEERS else "", 0
    if any(pattern.search(text) for _, pattern in WAITS):
        return Kind.WAIT, "", 0
    return (row.kind, row.label, row.weight) if row else None


def _is_more_exact(line: str, error: str) -> bool:
    """A later line of a message that names what its first one only announces."""
    more, said = recognise(line), recognise(error)
    return more is not None and said is not None and more[1] == said[1] and more[2] > said[2]


def _recognise_type(text: str) -> tuple[Kind, str, int] | None:
    """What an error means by its type, or by words that only an author has for it; what it repeats of others it may have heard."""
    end = len(text.partition(":")[0])
    if echo := ECHO.search(text):
        return Kind.ECHO, "" if echo.start() < end else "user_exception", 0
    hits = ((row, match.start()) for row in ROWS if (match := row.pattern.search(text)))
    row = next((row for row, start in hits if start < end or row.label in OWN_WORDS), None)
    return (row.kind, row.label, row.weight) if row else None


def _in_context(text: str, state: Traceback) -> tuple[Kind, str, int]:
    """What ends a traceback, by itself and by where it was raised."""
    if state.aside:
        return Kind.ECHO, "", 0
    found = _recognise_type(text) if state.is_in_own_words else recognise(text)
    found = found or (Kind.ERROR, "user_exception", 1)
    if found[0] is Kind.CALLED and not state.is_of_script:
        return Kind.ECHO, "", 0
    for context in CONTEXTS:
        if context.words.search(text) and context.frames.search(state.frames):
            return context.kind, context.label, context.weight
    return found
