"""
YAML 1.2 as a tree that knows its lines. It refuses what a configuration has no use for.

YAML 1.1 reads `8e9` as text, `1:30` as 90 and `no` as false; this reads a number and two
texts. The tree is built from the parser's events, so a hostile document costs no more than
its size: depth is limited, and an alias counts as all it stands for.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import (
    AliasEvent,
    DocumentStartEvent,
    Event,
    MappingEndEvent,
    MappingStartEvent,
    NodeEvent,
    ScalarEvent,
    SequenceEndEvent,
    SequenceStartEvent,
)

MAX_DEPTH: Final = 20
MAX_NODES: Final = 20_000

_TEXT_TAGS: Final = {"!", "tag:yaml.org,2002:str"}
_INT: Final = re.compile(r"[-+]?[0-9]{1,40}")
_FLOAT: Final = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_WORDS: Final = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}

ScalarValue = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with a document, at a line of it; 0: none in particular."""

    line: int
    text: str


class DocumentError(Exception):
    """The text is no document of ours; `problems` has every reason found."""

    def __init__(self, *problems: Problem) -> None:
        super().__init__("; ".join(problem.text for problem in problems))
        self.problems = problems


@dataclass(frozen=True, slots=True)
class Scalar:
    """`text` is what was written, `value` what YAML 1.2 makes of it."""

    line: int
    text: str
    value: ScalarValue
    size: int = 1


@dataclass(frozen=True, slots=True)
class Listed:
    line: int
    items: tuple[Node, ...]
    size: int


@dataclass(frozen=True, slots=True)
class Mapped:
    """`lines` has the line of each key: an entry's value may start further down."""

    line: int
    entries: dict[str, Node]
    lines: dict[str, int]
    size: int


Node = Scalar | Listed | Mapped


def parse_document(text: str) -> Node:
    """Return the tree; `DocumentError` names every duplicate key, or the first thing that is not YAML."""
    builder = _Builder(YAML(typ="safe", pure=True).parse(text))
    try:
        return builder.document()
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = 0 if mark is None else mark.line + 1
        raise DocumentError(Problem(line, f"not YAML: {_in_words(error, line)}")) from None
    except YAMLError as error:
        raise DocumentError(Problem(0, f"not YAML: {str(error).splitlines()[0]}")) from None
    except RecursionError:
        raise DocumentError(Problem(0, f"nested more than {MAX_DEPTH} deep")) from None


def plain(node: Node) -> Any:  # noqa: ANN401  # what YAML can say
    """The tree as dicts, lists and scalars."""
    match node:
        case Scalar():
            return node.value
        case Listed():
            return [plain(item) for item in node.items]
        case Mapped():
            return {key: plain(value) for key, value in node.entries.items()}


def _in_words(error: MarkedYAMLError, line: int) -> str:
    """What the parser says, and where what it could not end begins."""
    problem, begun = error.problem or "cannot be read", error.context_mark
    if "\\t" in problem:
        return "a tab; YAML is indented with spaces"
    if problem.startswith("mapping values"):
        return "a second ': ' in one line, or a line that is indented too far; text with ': ' in it needs quotes"
    since = begun.line + 1 if begun is not None else line
    if problem == "found unexpected end of stream":
        return f"the quote of line {since} is never closed"
    if "flow" in (error.context or "") and "'" in problem:
        return f"{problem}, in the brackets of line {since}; text with {{ or [ in it wants quotes"
    return problem


class _Builder:
    def __init__(self, events: Iterator[Event]) -> None:
        self._events = events
        self._anchors: dict[str, Node] = {}
        self._problems: list[Problem] = []
        self._num_nodes = 0

    def document(self) -> Node:
        root: Node | None = None
        for event in self._events:
            if isinstance(event, NodeEvent):
                root = self._node(event, 1)
            elif isinstance(event, DocumentStartEvent) and root is not None:
                raise DocumentError(Problem(_line(event), "a second document starts here; one file is one job"))
        if self._problems:
            raise DocumentError(*self._problems)
        return root or Scalar(0, "", None)

    def _node(self, event: Event, depth: int) -> Node:
        if depth > MAX_DEPTH:
            raise DocumentError(Problem(_line(event), f"nested more than {MAX_DEPTH} deep"))
        node = self._bare_node(event, depth)
        self._num_nodes += node.size if isinstance(event, AliasEvent) else 1
        if self._num_nodes > MAX_NODES:
            raise DocumentError(Problem(_line(event), f"more than {MAX_NODES} values"))
        if isinstance(event, NodeEvent) and event.anchor and not isinstance(event, AliasEvent):
            self._anchors[event.anchor] = node
        return node

    def _bare_node(self, event: Event, depth: int) -> Node:
        match event:
            case AliasEvent():
                return self._alias(event)
            case ScalarEvent():
                return _scalar(event)
            case SequenceStartEvent():
                return self._list(event, depth)
            case _:
                return self._mapping(event, depth)

    def _alias(self, event: AliasEvent) -> Node:
        found = self._anchors.get(event.anchor)
        if found is None:
            raise DocumentError(Problem(_line(event), f"*{event.anchor}: nothing above is called &{event.anchor}"))
        return found

    def _list(self, start: SequenceStartEvent, depth: int) -> Listed:
        _no_tag(start)
        items = []
        while not isinstance(event := next(self._events), SequenceEndEvent):
            items.append(self._node(event, depth + 1))
        return Listed(_line(start), tuple(items), 1 + sum(item.size for item in items))

    def _mapping(self, start: Event, depth: int) -> Mapped:
        assert isinstance(start, MappingStartEvent), start
        _no_tag(start)
        entries: dict[str, Node] = {}
        lines: dict[str, int] = {}
        while not isinstance(event := next(self._events), MappingEndEvent):
            key = self._key(event, depth)
            if key == "<<":
                self._problems.append(Problem(_line(event), "<<: nothing is merged here; write the keys out"))
            if key in entries:
                self._problems.append(Problem(_line(event), f"{key}: written twice, first in line {lines[key]}"))
            lines.setdefault(key, _line(event))
            entries[key] = self._node(next(self._events), depth + 1)
        return Mapped(_line(start), entries, lines, 1 + sum(value.size for value in entries.values()))

    def _key(self, event: Event, depth: int) -> str:
        node = self._node(event, depth + 1)
        if not isinstance(node, Scalar):
            raise DocumentError(Problem(_line(event), "a key must be text"))
        return node.text


def _scalar(event: ScalarEvent) -> Scalar:
    text: str = event.value
    if not event.implicit[0]:
        if event.tag is not None and event.tag not in _TEXT_TAGS:
            _no_tag(event)
        return Scalar(_line(event), text, text)
    return Scalar(_line(event), text, _value(text))


def _value(text: str) -> ScalarValue:
    """A plain scalar, by the core schema of YAML 1.2."""
    if text in _WORDS:
        return _WORDS[text]
    if _INT.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    return text


def _no_tag(event: ScalarEvent | SequenceStartEvent | MappingStartEvent) -> None:
    if event.tag is not None and str(event.tag) not in {"tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"}:
        raise DocumentError(Problem(_line(event), f"{event.tag}: tags mean nothing here; leave it out"))


def _line(event: Event) -> int:
    return int(event.start_mark.line) + 1
