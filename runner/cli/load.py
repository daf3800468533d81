"""
job.yaml, wherever it comes from, as a `Job`; or every problem with it, a line each.

Names of secrets stay names here: nothing in this module reads a secret's value.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
import shlex
import ssl
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Any, Final
from urllib.parse import urlsplit

from pydantic import ValidationError

from runner.addresses import scheme_of
from runner.cli.complaints import complaints
from runner.cli.dates import date_of
from runner.cli.document import DocumentError, Mapped, Node, Problem, Scalar, parse_document, plain
from runner.cli.naming import JOB_VARIABLE, STDIN, workspace_of
from runner.cli.stores import read_object
from runner.errors import JobError
from runner.job import ArchiveSource, Job, PathSource

MAX_BYTES: Final = 1 << 20
_UTF16: Final = frozenset({b"\xff\xfe", b"\xfe\xff"})
FETCH_TIMEOUT_S: Final = 30.0

_PLACEHOLDER: Final = re.compile(r"\{[A-Za-z_]+\}")
_KNOWN: Final = ("{workspace}", "{name}", "{date}", "{config_dir}")
_KNOWN_TEXT: Final = "{workspace}, {name}, {date} or {config_dir}"
CHECK_IT: Final = "vramfarm-runner validate job.yaml checks it without starting anything; "
_EXPLAIN: Final = f"{CHECK_IT}docs/job-yaml.md has every key"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedJob:
    """A job that is ready to run: every placeholder of a folder or name is filled in."""

    job: Job
    written: Job  # the same before any placeholder was filled in: equal on every machine
    text: str  # as written
    path: str  # where it came from, for messages
    folder: Path  # relative names in it start here
    workspace: Path
    date: str  # what `{date}` became
    identity: Mapping[str, Any] | None = None  # of a job that is taken from its run folder


def load_job(source: str | None, env: Mapping[str, str]) -> LoadedJob:
    """
    Return the job at `source`: a path, `-`, an https:// or s3:// address; without one, $RUNNER_JOB.

    `JobError` has one line for every problem.
    """
    name, text, folder = _read(source, env)
    job, root = _parse(name, text)
    workspace = workspace_of(env)
    _refuse(name, [*_unfillable(job, root), *_homeless(job, root), *_unasked(job, root), *_unreadable(job, root)])
    date = date_of(job, env, workspace, datetime.now(UTC))
    filled = job.fill(workspace=str(workspace), date=date, config_dir=str(folder))
    _refuse(name, list(_not_its_own(filled, root)))
    return LoadedJob(job=filled, written=job, text=text, path=name, folder=folder, workspace=workspace, date=date)


def load_accepted(run_dir: Path, source: str | None, env: Mapping[str, str]) -> LoadedJob | None:
    """The job as the runner accepted it, out of its run folder; None if it is not there."""
    path = run_dir / "job.json"
    try:
        record = json.loads(path.read_bytes())
        known = record.pop("identity")
        job = Job.model_validate(record)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    return LoadedJob(
        job=job,
        written=job,
        text="",
        path=str(path),
        folder=_folder_of(source),
        workspace=workspace_of(env),
        date="",
        identity=known,
    )


def place_of(loaded: LoadedJob, key: str) -> str:
    """`job.yaml:3: `, to begin a message about that key with."""
    if not loaded.text:  # a job as it was accepted has no lines
        return f"{loaded.path}: "
    line = _line(parse_document(loaded.text), key)
    return f"{loaded.path}:{line}: " if line else f"{loaded.path}: "


# ------------------------------------------------------------------------------- reading


def _read(source: str | None, env: Mapping[str, str]) -> tuple[str, str, Path]:
    """(name, text, folder of relative names)."""
    if source is None:
        return f"${JOB_VARIABLE}", _from_variable(env), Path.cwd()
    if source == STDIN:
        return "stdin", _text("stdin", sys.stdin.buffer.read(MAX_BYTES + 1)), Path.cwd()
    if source.startswith("https://"):
        return _shown(source), _text(_shown(source), _fetch(source)), Path.cwd()
    if source.startswith("s3://"):
        return source, _text(source, read_object(source, MAX_BYTES)), Path.cwd()
    if "://" in source:
        raise JobError(f"{_shown(source)}: expected a path, - or an https:// or s3:// address")
    path = Path(source).absolute()
    return source, _text(source, _from_file(source, path)), path.parent


def _folder_of(source: str | None) -> Path:
    """Where relative names in it start."""
    is_file = source is not None and source != STDIN and "://" not in source
    return Path(source).absolute().parent if source and is_file else Path.cwd()


def _from_file(source: str, path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(MAX_BYTES + 1)
    except IsADirectoryError:
        raise JobError(f"{source}: expected a file, found a folder", hint=f"name the file: {source}/job.yaml") from None
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise JobError(
            f"{source}: cannot be read: {reason}",
            hint=f"is the path right{_here()}? in a container, mount its folder first",
        ) from None


def _here() -> str:
    """What may have been meant."""
    try:
        found = sorted(path.name for path in Path.cwd().glob("[!.]*.y*ml"))[:5]
    except OSError:
        found = []
    return f" (here: {', '.join(found)})" if found else ""


def _from_variable(env: Mapping[str, str]) -> str:
    value = env.get(JOB_VARIABLE, "").strip()
    if not value:
        raise JobError(
            f"no job: expected JOB, or its text in ${JOB_VARIABLE}, found neither",
            hint=f"name a file{_here()}",
        )
    compact = "".join(value.split())
    if not re.fullmatch(r"[A-Za-z0-9+/_-]+=*", compact):
        return _text(f"${JOB_VARIABLE}", value.encode())
    try:
        raw = base64.b64decode(compact.replace("-", "+").replace("_", "/"), validate=True)
    except binascii.Error as error:
        raise JobError(f"${JOB_VARIABLE}: expected YAML, or base64 of it: {str(error).lower()}") from None
    return _text(f"${JOB_VARIABLE}", raw)


def _fetch(url: str) -> bytes:
    """At most `MAX_BYTES` + 1 within `FETCH_TIMEOUT_S`, however slowly the server talks."""
    shown = _shown(url)
    give_up_at = time.monotonic() + FETCH_TIMEOUT_S
    parts: list[bytes] = []
    try:
        with urllib.request.urlopen(url, timeout=FETCH_TIMEOUT_S / 3) as answer:  # noqa: S310  # https, checked above
            if not answer.url.startswith("https://"):
                raise JobError(f"{shown}: leads to an address that is not https://")
            while sum(map(len, parts)) <= MAX_BYTES and (part := answer.read1(1 << 16)):
                parts.append(part)
                if time.monotonic() > give_up_at:
                    raise JobError(f"{shown}: not read within {FETCH_TIMEOUT_S:g} s")
    except urllib.error.HTTPError as error:
        raise JobError(f"{shown}: expected a file, the server answered {error.code} {error.reason}") from None
    except (OSError, ssl.SSLError, ValueError) as error:
        raise JobError(f"{shown}: cannot be read: {error}") from None
    return b"".join(parts)


def _shown(url: str) -> str:
    """The address without what may be secret in it."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _text(name: str, raw: bytes) -> str:
    if len(raw) > MAX_BYTES:
        raise JobError(
            f"{name}: expected a job.yaml of at most {MAX_BYTES >> 20} MiB, found more",
            hint="name the job itself; data and code are named in it",
        )
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        found = "UTF-16" if raw[:2] in _UTF16 else f"byte 0x{raw[error.start]:02x}"
        raise JobError(f"{name}:{line}: expected UTF-8 text, found {found}", hint="save it as UTF-8") from None


# ------------------------------------------------------------------------------- parsing


def _parse(name: str, text: str) -> tuple[Job, Node]:
    try:
        root = parse_document(text)
        return Job.model_validate(_expect_keys(root)), root
    except DocumentError as error:
        problems = error.problems
    except ValidationError as error:
        problems = complaints(error, root)
    _refuse(name, list(problems))
    raise AssertionError


def _expect_keys(root: Node) -> object:
    if isinstance(root, Mapped):
        return plain(_with_text_env(root))
    found = "a list" if not isinstance(root, Scalar) else f"{root.text[:40]!r}" if root.text else "nothing"
    raise DocumentError(Problem(root.line, f"expected keys and values such as command: train.py, found {found}"))


def _with_text_env(root: Mapped) -> Mapped:
    """Values of `env` as they were written: `OMP_NUM_THREADS: 8` means the text 8, `false` the text false."""
    env = root.entries.get("env")
    if not isinstance(env, Mapped):
        return root
    texts: dict[str, Node] = {
        key: Scalar(value.line, value.text, value.text) if isinstance(value, Scalar) and value.text else value
        for key, value in env.entries.items()
    }
    entries = {**root.entries, "env": Mapped(env.line, texts, env.lines, env.size)}
    return Mapped(root.line, entries, root.lines, root.size)


def _unfillable(job: Job, root: Node) -> Iterator[Problem]:
    """A placeholder that nothing fills would become a folder of that name."""
    texts = [
        ("workdir", job.workdir or ""),
        ("checkpoint.dir", job.checkpoint.dir),
        ("checkpoint.resume", job.checkpoint.resume),
        ("offload.to", job.offload.to or ""),
        ("finish.save_folder", job.finish.save_folder),
        *(("outputs", output) for output in job.outputs),
        *(("data", text) for item in job.data for text in (item.source, item.to)),
        ("source.path", job.source.path if isinstance(job.source, PathSource) else ""),
        ("source.archive", job.source.archive if isinstance(job.source, ArchiveSource) else ""),
    ]
    for name, text in texts:
        for placeholder in set(_PLACEHOLDER.findall(text)).difference(_KNOWN):
            yield Problem(_line(root, name), f"{name}: expected {_KNOWN_TEXT}, found {placeholder}")


def _homeless(job: Job, root: Node) -> Iterator[Problem]:
    if job.outputs and not job.offload.to:
        yield Problem(_line(root, "outputs"), "outputs: expected a store to copy them to (offload.to), found none")


def _unasked(job: Job, root: Node) -> Iterator[Problem]:
    """Data, code or the beginning may come from an S3 server where checkpoints go to a folder."""
    archive = job.source.archive if isinstance(job.source, ArchiveSource) else ""
    places = (*(item.source for item in job.data), job.checkpoint.resume, archive)
    is_asked = any(scheme_of(place) == "s3" for place in places)
    if job.offload.endpoint and scheme_of(job.offload.to or "") == "file" and not is_asked:
        what = "expected an s3:// address that it is for, found none: offload.to is a folder; leave one of them out"
        yield Problem(_line(root, "offload.endpoint"), f"offload.endpoint: {what}")


def _not_its_own(job: Job, root: Node) -> Iterator[Problem]:
    """The runner's records change all the time, and checkpoints go to the store by themselves."""
    for output in job.outputs:
        for what, place in (("run folder", job.run_dir), ("checkpoints", job.checkpoint_dir)):
            folder, own = (PurePosixPath(os.path.realpath(path)) for path in (output, place))
            if own.is_relative_to(folder) or (what == "checkpoints" and folder.is_relative_to(own)):
                found = f"outputs: {output}: expected a folder of the script's own, found one of the {what} ({place})"
                yield Problem(_line(root, "outputs"), f"{found}; name the folders that the script writes")
                break


def _unreadable(job: Job, root: Node) -> Iterator[Problem]:
    try:
        shlex.split(job.command)
    except ValueError as error:  # no closing quotation, no escaped character
        why = str(error)[0].lower() + str(error)[1:]
        yield Problem(_line(root, "command"), f"command: cannot be split into words: {why}; close the quotes")


def _line(root: Node, name: str) -> int:
    node, line = root, 0
    for part in name.split("."):
        if isinstance(node, Mapped) and part in node.entries:
            line, node = node.lines[part], node.entries[part]
    return line


def _refuse(name: str, problems: list[Problem]) -> None:
    """Raise `JobError` if there are problems."""
    if not problems:
        return
    lines = [
        f"{name}:{problem.line}: {problem.text}" if problem.line else f"{name}: {problem.text}" for problem in problems
    ]
    raise JobError("\n".join(lines), hint=_EXPLAIN)
