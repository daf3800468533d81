"""
What pydantic found wrong with a job, in plain words and at lines of job.yaml.

Values of `secrets`, `notify` and `env` are never repeated: somebody may have put a secret
where its name belongs.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any, Final

from pydantic import ValidationError

from runner.cli.document import Listed, Mapped, Node, Problem, Scalar
from runner.job import Job

Path = tuple[str, ...]

_ALIKE: Final = 0.72  # `max_hours` is no `max_cost`
_UNTOLD: Final = {"secrets", "notify", "env"}


def complaints(error: ValidationError, root: Node) -> tuple[Problem, ...]:
    """Every problem once, in the order of the lines."""
    by_place: dict[tuple[Path, int], list[str]] = {}
    got: dict[tuple[Path, int], str] = {}
    for found in error.errors(include_url=False):
        place = _place(found["loc"], found["type"], root)
        by_place.setdefault(place[:2], []).append(_expected(found, place[0]))
        got[place[:2]] = _got(place[0], place[2])
    problems = (Problem(line, _sentence(path, by_place[path, line], got[path, line])) for path, line in by_place)
    return tuple(sorted(problems, key=lambda problem: problem.line))


def _place(loc: tuple[int | str, ...], kind: str, root: Node) -> tuple[Path, int, Node | None]:
    """
    Where it is: the path as a user would say it, the line of its key, the value.

    A part of `loc` that is not in the document is pydantic's name for one side of a union,
    unless it is the key that is missing.
    """
    node: Node | None = root
    path: Path = ()
    line = root.line
    for index, part in enumerate(loc):
        is_last = index == len(loc) - 1
        if isinstance(node, Mapped) and part in node.entries:
            line, node = node.lines[str(part)], node.entries[str(part)]
            path = (*path, str(part))
        elif isinstance(node, Listed) and isinstance(part, int):
            node = node.items[part]
            line = node.line
            path = (*path[:-1], f"{path[-1]}[{part + 1}]") if path else (f"[{part + 1}]",)
        elif is_last and kind == "missing":
            path, node = (*path, str(part)), None
    return path, line, node


def _sentence(path: Path, expected: list[str], got: str) -> str:
    name = ".".join(path)
    texts = list(dict.fromkeys(expected))
    if any(not text.startswith("must be ") for text in texts):
        return f"{name}: {next(text for text in texts if not text.startswith('must be '))}"
    wanted = " or ".join(text.removeprefix("must be ") for text in texts)
    return f"{name}: must be {wanted}, got {got}"


def _expected(found: Mapping[str, Any], path: Path) -> str:
    """`must be …` without what was got, or a whole sentence that says it all."""
    kind: str = found["type"]
    if say := _SAY.get(kind):
        return say(path, found.get("ctx", {}))
    return _TYPES.get(kind.split("_", maxsplit=1)[0]) or str(found["msg"])


_SAY: Final[Mapping[str, Callable[[Path, Mapping[str, Any]], str]]] = {
    "extra_forbidden": lambda path, _: f"unknown key{_did_you_mean(path)}",
    "missing": lambda path, _: _missing(path),
    "string_pattern_mismatch": lambda _, __: "must hold names of secrets (letters, digits, _), not their values",
    "string_too_short": lambda _, __: "must not be empty",
    "value_error": lambda _, context: str(context["error"]).split(", got ", maxsplit=1)[0],
    "literal_error": lambda _, context: f"must be {context['expected'].replace(chr(39), '')}",
    "enum": lambda _, context: f"must be {context['expected'].replace(chr(39), '')}",
    "greater_than": lambda _, context: f"must be more than {context['gt']:g}",
    "greater_than_equal": lambda _, context: f"must be at least {context['ge']:g}",
    "less_than": lambda _, context: f"must be less than {context['lt']:g}",
    "less_than_equal": lambda _, context: f"must be at most {context['le']:g}",
}
_TYPES: Final = {
    "string": "must be text",
    "int": "must be a whole number",
    "float": "must be a number such as 0.5 or 8e9",
    "finite": "must be a finite number",
    "bool": "must be true or false",
    "model": "must be a section of keys and values",
    "mapping": "must be a section of keys and values",
    "dict": "must be a section of keys and values",
    "tuple": "must be a list",
}


def _missing(path: Path) -> str:
    return "missing; say what to run, such as command: train.py" if path == ("command",) else "missing"


def _got(path: Path, node: Node | None) -> str:
    if isinstance(node, Mapped):
        return "a section"
    if isinstance(node, Listed):
        return "a list"
    if node is None or (isinstance(node, Scalar) and node.value is None):
        return "nothing"
    if path and path[0].split("[")[0] in _UNTOLD:
        return "something else"
    text = node.text if len(node.text) <= 80 else f"{node.text[:77]}…"  # noqa: PLR2004  # a line of a terminal
    return repr(text) if isinstance(node.value, str) else text


def _did_you_mean(path: Path) -> str:
    *above, key = path
    known = _known_keys()
    here = known.get(tuple(name.split("[")[0] for name in above), ())
    if close := difflib.get_close_matches(key.lower(), here, n=1, cutoff=_ALIKE):
        return f", did you mean '{close[0]}'?"
    if homes := [".".join(home) for home, keys in known.items() if key in keys]:
        return f", it belongs under '{homes[0]}'" if homes[0] else ", it belongs at the top level"
    return f"; known here: {', '.join(here)}" if here else ""


@cache
def _known_keys() -> dict[Path, tuple[str, ...]]:
    """The keys of every section of job.yaml."""
    return {path: tuple(keys) for path, keys in _sections((), Job.model_json_schema(), {})}


def _sections(path: Path, schema: dict[str, Any], definitions: dict[str, Any]) -> Iterator[tuple[Path, Iterable[str]]]:
    definitions = schema.get("$defs", definitions)
    properties: dict[str, Any] = schema.get("properties", {})
    if properties:
        yield path, properties
    for key, value in properties.items():
        inner: dict[str, Any] = {}
        for model in _models(value, definitions):
            inner |= model["properties"]
        if inner:
            yield from _sections((*path, key), {"properties": inner}, definitions)


def _models(schema: dict[str, Any], definitions: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The sections a field may hold: itself, one of several, or items of a list."""
    if "$ref" in schema:
        model = definitions[schema["$ref"].rsplit("/", 1)[1]]
        if "properties" in model:
            yield model
    for part in (*schema.get("anyOf", ()), *schema.get("oneOf", ()), *filter(None, [schema.get("items")])):
        yield from _models(part, definitions)
