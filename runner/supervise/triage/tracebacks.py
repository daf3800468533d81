"""
Tracebacks as they stand in logs: Python's, those of groups of exceptions, rich's boxes, loguru's arrows.

One is read line by line, as far as it is of one rank. What is kept is the script's own last line,
and whether it was raised in a thread, or where nobody listens.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Final

TRACEBACK: Final = "Traceback (most recent call last)"
FRAME: Final = re.compile(r'^\s*File ".*", line \d+(?:, in |$)')
EXCEPTION: Final = re.compile(
    r"^(?!INFO|WARNING|ERROR|DEBUG)(?:[A-Za-z_]\w*\.)*(?:[A-Z]\w*|gaierror|timeout|error|herror)(?::\s|:$|$)"
)
LIBRARY: Final = re.compile(r"/(?:site|dist)-packages/|/lib/python3\.\d+/|^<")
GROUP: Final = re.compile(r"Exception Group Traceback|^[│╭ ]*─+ Sub-exception #\d")
WRAPPER: Final = re.compile(r"^[\w.]+: backend=.* raised:$")  # of torch.compile: the error is in the next line
USER_CODE: Final = "from user code:"
_IN_COLLECTIVE: Final = re.compile(r"torch/distributed/|deepspeed/comm|torch/nn/parallel/distributed")
_INSIDE: Final = re.compile(r'^(?:[ \t│╭╰|+]|> File "|$)')
_EDGE: Final = re.compile(r"^\s*(?:\+[-+]+(?: \d+ -+)?$|[|│] ?|[╭╰]─)")
_LEAD: Final = re.compile(r"^(?:[│|>]\s?)+")
_AT: Final = re.compile(r'^\s*File "(?P<file>[^"]*)", line (?P<line>\d+)(?:,? in (?P<name>\S+))?')
_AT_IN_BOX: Final = re.compile(r"^(?P<file>\S+\.py):(?P<line>\d+) in (?P<name>\S+)")
_STATEMENT_IN_BOX: Final = re.compile(r"^(?:❱|\\u2771) +\d+ [│ ]*(?P<code>.*)")
_ASIDE: Final = re.compile(
    r"^(?:Exception ignored |Error in atexit|Error in sys\.excepthook|--- Logging error ---)|\b(?:Task|Future) exception was never retrieved$"
)
_RAISES: Final = re.compile(r"(?:raise|assert)\b")
_THREAD: Final = re.compile(r"^Exception in thread ")
_MAX_FRAMES: Final = 16 << 10
_MAX_BEYOND: Final = 60  # lines after the error that may still tell where
_MAX_DETAIL: Final = 60  # a message this long needs no further line
_OF_YAML: Final = re.compile(r"(?:expected|found|could not|did not|mapping values)\b")  # below the place and its line
_MAX_YAML: Final = 6
_LISTS: Final = re.compile(r":\s*$|validation errors? for \S+$")


@dataclass(slots=True)
class Traceback:
    """How far the traceback of one rank is read."""

    open: bool = False
    linked: bool = False
    during: bool = False
    in_collective: bool = False
    in_thread: bool = False
    aside: bool = False  # Python goes on after it
    in_group: bool = False
    has_leaf: bool = False  # of a group the first exception is enough
    strangers: int = 0  # lines of others in between
    chain: int = 0
    own: str = ""  # the last line of the script
    statement: str = ""  # what stands there
    operation: str = ""  # the first function of torch.distributed
    frames: str = ""  # all of them, for what only they tell
    before: str = ""  # what was printed last before it
    heralded: str = ""  # how the next traceback is announced
    wants_statement: bool = False
    boxed: bool = False  # the last frame
    is_own: bool = False  # likewise: it is the script's
    follows: bool = False  # it was raised out of another one

    def begin(self, text: str, before: str) -> None:
        self.open, self.in_collective, self.strangers = True, False, 0
        self.own = self.statement = self.operation = self.frames = ""
        self.is_own = False
        self.before = before
        self.in_thread, self.aside = self.heralded == "thread", self.heralded == "aside"
        self.heralded = ""
        if GROUP.search(text):
            self.in_group, self.has_leaf = True, False

    def announces(self, text: str) -> None:
        """Keep in mind what is said of a traceback before it begins."""
        if _THREAD.match(text):
            self.heralded = "thread"
        elif _ASIDE.match(text):
            self.heralded = "aside"
        elif text.startswith("Original exception was:"):
            self.heralded = ""

    def is_inside(self, text: str) -> bool:
        return _INSIDE.match(text) is not None

    def peel(self, text: str) -> str | None:
        """A line of a group without its edges; None: the group is over."""
        if not text.strip():
            return ""
        if not (edge := _EDGE.match(text)):
            return None
        return text[edge.end() :].rstrip().removesuffix("│").rstrip()

    def see(self, text: str) -> None:
        """Frames come from the outermost on."""
        is_of_torch = _IN_COLLECTIVE.search(text) is not None
        self.in_collective = self.in_collective or is_of_torch
        text = _LEAD.sub("", text) if text[:1] in {"│", "|", ">"} else text
        plain = _AT.match(text)
        match = plain or _AT_IN_BOX.match(text)
        if not match:
            self._see_statement(text)
            return
        self.boxed = plain is None
        self.frames = (self.frames + match[0] + "\n")[-_MAX_FRAMES:]
        self.wants_statement = self.is_own = not LIBRARY.search(match["file"])
        if self.wants_statement:
            self.own, self.statement, self.operation = f"{match['file']}:{match['line']}", "", ""
        elif is_of_torch and match["name"] != "wrapper":
            self.operation = self.operation or match["name"] or ""

    def _see_statement(self, text: str) -> None:
        if not self.wants_statement:
            return
        match = _STATEMENT_IN_BOX.match(text) if self.boxed else None
        code = match["code"].rstrip().rstrip("│|").strip() if match else "" if self.boxed else text.strip()
        if code:
            self.statement, self.wants_statement = code, False

    @property
    def place(self) -> str:
        """Where a rank waits for others: those who wait for each other are at the same place."""
        return f"{self.own} {self.operation}" if self.in_collective else ""

    @property
    def at(self) -> str:
        """The script's own line, as a person looks for it."""
        file, _, line = self.own.rpartition(":")
        return f"{PurePath(file).name}:{line}" if file else ""

    @property
    def is_in_own_words(self) -> bool:
        """The script raised it of itself: what it says is its author's, whatever words of a library are in it."""
        return self.is_own and not self.follows and _RAISES.match(self.statement) is not None

    @property
    def is_of_script(self) -> bool:
        """Not of a program that only starts one, as `accelerate` and `deepspeed` do."""
        return ".py:" in self.own


@dataclass(slots=True)
class Beyond:
    """What stands after an error of one rank: the rest of its message, the user's line that was compiled, the stack of a crash."""

    text: str  # of the error
    detail: str = ""
    spot: Traceback = field(default_factory=Traceback)
    lines: int = 0
    is_stack: bool = False  # innermost frame first
    in_user_code: bool = False

    def see(self, text: str) -> bool:
        """Read on; True if the line belongs to the error."""
        self.lines += 1
        if text.startswith(USER_CODE):
            self.in_user_code = True
        elif self.is_stack:
            self._see_stack(text)
            return False
        elif self.in_user_code:
            self.spot.see(text)
            return text[:1] == " "
        elif self._goes_on(text):
            self.detail = f"{self.detail} {text.strip()}".strip()
        return self.in_user_code

    @property
    def is_over(self) -> bool:
        return self.lines >= _MAX_BEYOND or (self.is_stack and bool(self.spot.own))

    def _goes_on(self, text: str) -> bool:
        wants = self.lines <= (3 if "validation error" in self.text else 1) and _LISTS.search(self.text) is not None
        if self.text.startswith("yaml.") and _OF_YAML.match(text):
            return self.lines < _MAX_YAML
        is_next = self.lines <= 3 and len(self.detail) < _MAX_DETAIL and bool(text.strip())  # noqa: PLR2004  # a few
        return is_next and (wants or text[:1] in {" ", "\t"}) and not FRAME.match(text)

    def _see_stack(self, text: str) -> None:
        if (match := _AT.match(text)) and not LIBRARY.search(match["file"]):
            self.spot.see(text)
