"""
The code, brought into the run folder, and its set-up, run once in the training environment.

Everything here may be killed and started again: code is made beside its place and renamed
into it, and a marker is written last. What set-up installs lies in the training environment,
so the marker that counts lies there too: a fresh container has none.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final
from urllib.parse import unquote, urlsplit

from runner.addresses import local_path
from runner.errors import JobError
from runner.job import ArchiveSource, GitSource, PathSource, without_password
from runner.supervise import process
from runner.supervise.archive import MAX_BYTES, unpack
from runner.supervise.attempt import activated
from runner.supervise.logs import read_tail
from vramfarm.protocol import Env

Maker = Callable[[Path], None]
Source = GitSource | PathSource | ArchiveSource | None

RETRY_PAUSES_S: Final = (5.0, 20.0)
_HELPER: Final = """!f() { test "$1" = get && printf 'username=%s\\npassword=%s\\n' "$RUNNER_GIT_USER" "$RUNNER_GIT_PASSWORD"; }; f"""
_GIT_LIMIT_S: Final = 1800.0
_SOCKET_LIMIT_S: Final = 60.0
_CONNECTION: Final = re.compile(
    r"resolve host|name resolution|Name or service not known|Network is unreachable|Connection (?:timed out|reset|refused"
    r"|broken|aborted)|(?:Read|Connect) ?timed out|ReadTimeout|ConnectTimeout|NewConnectionError|IncompleteRead|"
    r"UNEXPECTED_EOF|unexpected disconnect|early EOF|RPC failed|Failed to (?:fetch|connect)|Hash Sum mismatch|"
    r"Could not get lock|HTTP (?:error )?(?:429|50[0234])|(?:429|50[0234]) (?:Client|Server) Error|Too Many Requests",
    re.IGNORECASE,
)


def bring(  # noqa: PLR0913  # called once, all by name
    source: Source,
    setup: Sequence[str],
    *,
    run_dir: Path,
    digest: str,
    config_dir: Path,
    python: Path,
    timeout_s: float,
    withhold: frozenset[str] = frozenset(),
    pauses_s: Sequence[float] = RETRY_PAUSES_S,
) -> Path:
    """
    Return the folder of the code, with `setup` done; `digest` stands for both.

    `JobError` if that cannot work, `ConnectionError` if it may work later. The commands see
    the supervisor's environment without what `withhold` names.
    """
    folder = source_folder(source, run_dir=run_dir, digest=digest, config_dir=config_dir)
    if is_in_place(folder, setup, run_dir=run_dir, digest=digest, python=python):
        return folder
    match source:
        case GitSource():
            _place(folder, lambda place: _clone(source, place, pauses_s))
        case ArchiveSource():
            _place(folder, lambda place: _unpack(source, place, config_dir, pauses_s))
        case _ if not folder.is_dir():
            raise JobError(f"source: expected a folder, found none at {folder}", hint="`path` is relative to job.yaml")
    shell = _Shell(
        folder=folder,
        env=setup_environment(os.environ, python, withhold),
        log=run_dir / "logs" / "setup.log",
        timeout_s=timeout_s,
    )
    for command in setup:
        _set_up(command, shell, pauses_s)
    os.sync()
    for marker in _markers(setup, run_dir, digest, python):
        marker.parent.mkdir(parents=True, exist_ok=True)
        with suppress(PermissionError):  # an environment of another user: set-up runs again, that is all
            marker.touch()
    return folder


def source_folder(source: Source, *, run_dir: Path, digest: str, config_dir: Path) -> Path:
    """Where the code of a source is, or will be. A `path` is used in place."""
    match source:
        case PathSource():
            return (config_dir / source.path).absolute()
        case None:
            return config_dir.absolute()
        case _:
            return run_dir / "source" / digest


def is_in_place(folder: Path, setup: Sequence[str], *, run_dir: Path, digest: str, python: Path) -> bool:
    """Whether code and set-up are there: on this disk, and in this training environment."""
    return folder.is_dir() and all(marker.exists() for marker in _markers(setup, run_dir, digest, python))


def setup_environment(outer: Mapping[str, str], python: Path, withhold: frozenset[str]) -> dict[str, str]:
    """As if the training environment were activated. `python` and `pip` are its own."""
    ours = {Env.RUN, Env.ROLE}  # by these a set-up whose runner died is found
    env = {k: v for k, v in outer.items() if k not in withhold and (not k.startswith("VRAMFARM_") or k in ours)}
    for name in ("PYTHONHOME", "VIRTUAL_ENV"):
        env.pop(name, None)
    quiet = {"PIP_NO_INPUT": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "DEBIAN_FRONTEND": "noninteractive"}
    return {**quiet, **env, **activated(env, python)}


# --------------------------------------------------------------------------------- markers


def _markers(setup: Sequence[str], run_dir: Path, digest: str, python: Path) -> tuple[Path, ...]:
    here = run_dir / "source" / f"{digest}.done"
    there = _packages(python) if setup else None
    return (here,) if there is None else (here, there / f".vramfarm-setup-{digest}")


def _packages(python: Path) -> Path | None:
    """The folder that `pip install` writes to, if we may write there too."""
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    argv = (str(python), "-I", "-c", code)
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=_SOCKET_LIMIT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        raise JobError(f"python: {python}: cannot be run", hint="check `python:` in job.yaml") from None
    folder = Path(done.stdout.strip())
    return folder if folder.is_dir() and os.access(folder, os.W_OK) else None


# ------------------------------------------------------------------------------------ code


def _place(folder: Path, make: Maker) -> None:
    """Make the code beside its place and rename it: a folder with that name is whole."""
    if folder.is_dir():
        return
    beside = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    make(beside)
    beside.rename(folder)


def _clone(source: GitSource, place: Path, pauses_s: Sequence[float]) -> None:
    address = without_password(source.git)
    if address.startswith("-") or source.ref.startswith("-"):
        raise JobError(f"source: expected an address and a ref, got {address!r} and {source.ref!r}")
    _git(source, place, ("init", "--quiet"), pauses_s)
    try:
        _git(source, place, ("fetch", "--quiet", "--depth=1", address, source.ref), pauses_s)
        ref = "FETCH_HEAD"
    except JobError:  # a short commit, or a server that gives whole branches only
        everything = ("+refs/heads/*:refs/remotes/origin/*", "+refs/tags/*:refs/tags/*")
        _git(source, place, ("fetch", "--quiet", address, *everything), pauses_s)
        ref = source.ref
    _git(source, place, ("checkout", "--quiet", "--detach", ref), pauses_s)
    if (place / ".gitmodules").exists():
        _git(source, place, ("submodule", "--quiet", "update", "--init", "--recursive", "--depth=1"), pauses_s)


def _git(source: GitSource, place: Path, arguments: Sequence[str], pauses_s: Sequence[float]) -> None:
    quiet = {"GIT_TERMINAL_PROMPT": "0", "GIT_SSH_COMMAND": "ssh -oBatchMode=yes -oConnectTimeout=20"}
    env = {**os.environ, **quiet, **_credentials(source.git, os.environ)}
    address = without_password(source.git)
    argv = ("git", "-c", "advice.detachedHead=false", "-C", str(place), *arguments)
    for pause_s in (*pauses_s, None):
        try:
            done = subprocess.run(
                argv, env=env, stdin=subprocess.DEVNULL, capture_output=True, timeout=_GIT_LIMIT_S, check=False
            )
        except FileNotFoundError:
            raise JobError("source: git is needed, found none", hint="install git, or give an `archive`") from None
        except subprocess.TimeoutExpired:
            raise _unreachable(address, f"no end within {_GIT_LIMIT_S:.0f}s") from None
        if done.returncode == 0:
            return
        said = _last(done.stderr.decode(errors="replace").splitlines())
        if not _CONNECTION.search(said):
            raise JobError(f"source: {address} at {source.ref}: git {arguments[0]}: {said}", hint=_git_hint(said))
        if pause_s is None:
            raise _unreachable(address, said)
        time.sleep(pause_s)


def _credentials(address: str, outer: Mapping[str, str]) -> Mapping[str, str]:
    """
    User and password of an address, as an environment in which git finds them for this server only: argv is
    everybody's to read, and git hands an address to programs of its own.
    """
    parts = urlsplit(address)
    if parts.scheme not in {"http", "https"} or "@" not in parts.netloc:
        return {}
    login, _, host = parts.netloc.rpartition("@")
    user, _, password = login.partition(":")
    key, first = f"credential.{parts.scheme}://{host}.helper", int(outer.get("GIT_CONFIG_COUNT") or 0)
    given = {
        "GIT_CONFIG_COUNT": str(first + 2),
        "RUNNER_GIT_USER": unquote(user),
        "RUNNER_GIT_PASSWORD": unquote(password),
    }
    for number, value in enumerate(("", _HELPER), first):  # the empty one: ask no other
        given |= {f"GIT_CONFIG_KEY_{number}": key, f"GIT_CONFIG_VALUE_{number}": value}
    return given


def _git_hint(said: str) -> str:
    if re.search(r"could not read Username|Permission denied|Authentication failed|not found", said):
        return "check the address; a private repository needs a token in it, or a key"
    return "check `git` and `ref`"


def _unpack(source: ArchiveSource, place: Path, config_dir: Path, pauses_s: Sequence[float]) -> None:
    parts = urlsplit(source.archive)
    match parts.scheme:
        case "" | "file":
            path = config_dir / (local_path(source.archive) or source.archive)
            if not path.is_file():
                raise JobError(f"source: expected an archive, found none at {path}", hint="check `archive`")
            unpack(path, place)
        case "https" | "http" if _is_safe(source.archive):
            download = place.with_name(f"{place.name}.download")
            _download(source.archive, download, pauses_s)
            unpack(download, place)
            download.unlink()
        case _:
            raise JobError(
                f"source: archive: expected a path, file:// or https://, got {without_password(source.archive)!r}",
                hint="s3:// is not supported here yet: give a presigned https:// address, or use `git`",
            )


def _is_safe(url: str) -> bool:
    """What is fetched is run: nobody on the way may change it."""
    parts = urlsplit(url)
    return parts.scheme == "https" or parts.hostname in {"localhost", "127.0.0.1", "::1"}


def _download(url: str, path: Path, pauses_s: Sequence[float]) -> None:
    shown = without_password(url)
    for pause_s in (*pauses_s, None):
        try:
            _fetch(url, path)
        except urllib.error.HTTPError as error:
            error.close()
            if error.code < 500 and error.code != 429:  # noqa: PLR2004  # the server's own trouble, or too many of us
                raise JobError(f"source: {shown}: the server answered {error.code} {error.reason}") from None
            failure = f"the server answered {error.code} {error.reason}"
        except (OSError, EOFError) as error:
            failure = str(error)
        else:
            return
        if pause_s is None:
            raise _unreachable(shown, failure)
        time.sleep(pause_s)


def _fetch(url: str, path: Path) -> None:
    with urllib.request.urlopen(url, timeout=_SOCKET_LIMIT_S) as answer, path.open("wb") as file:  # noqa: S310  # checked
        if not _is_safe(answer.url):
            raise JobError(
                f"source: {without_password(url)}: leads to {without_password(answer.url)}, expected https://"
            )
        length = int(answer.headers.get("Content-Length") or -1)
        got = 0
        while piece := answer.read(1 << 20):
            file.write(piece)
            got += len(piece)
            if got > MAX_BYTES:
                raise JobError(f"source: {without_password(url)}: larger than {MAX_BYTES / 1e9:.0f} GB")
        if got < length:
            raise EOFError(f"{got} of {length} bytes came")


# ---------------------------------------------------------------------------------- set-up


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shell:
    """Where and how commands run, one after the other."""

    folder: Path
    env: Mapping[str, str]
    log: Path
    timeout_s: float

    def run(self, command: str) -> tuple[int | None, list[str]]:
        """Run one; return its exit code, None if it ran out of time, and the lines it printed last."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as out:
            out.write(f"$ {command}\n".encode())
            out.flush()
            begin = out.tell()
            code = self._wait(command, out)
        size = self.log.stat().st_size - begin
        return code, [line for line in read_tail(self.log, limit_bytes=min(size, 1 << 16)) if line.strip()]

    def _wait(self, command: str, out: IO[bytes]) -> int | None:
        mark = uuid.uuid4().hex
        env = {**self.env, Env.ATTEMPT_ID: mark}
        argv = ("/bin/sh", "-c", command)
        # in our own group: who ends this task ends it too
        with subprocess.Popen(
            argv, cwd=self.folder, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out
        ) as shell:
            try:
                return shell.wait(self.timeout_s)
            except subprocess.TimeoutExpired:
                process.end_all(lambda: process.find(Env.ATTEMPT_ID, mark), grace_s=2.0)
                return None


def _set_up(command: str, shell: _Shell, pauses_s: Sequence[float]) -> None:
    for pause_s in (*pauses_s, None):
        code, lines = shell.run(command)
        if code == 0:
            return
        how = f"took longer than {shell.timeout_s:.0f}s" if code is None else f"ended with exit code {code}"
        told = f"setup: {command!r} {how}: {' | '.join(lines[-3:]) or 'no output'}"
        if code is None or not _CONNECTION.search("\n".join(lines[-50:])):
            raise JobError(told, hint=f"its output is in {shell.log}")
        if pause_s is None:
            raise _unreachable("setup", told)
        time.sleep(pause_s)


def _unreachable(where: str, what: str) -> ConnectionError:
    return ConnectionError(errno.ECONNABORTED, what, where)


def _last(lines: Sequence[str]) -> str:
    told = [line.strip() for line in lines if line.strip()]
    return next((line for line in told if line.startswith("fatal:")), told[-1] if told else "no message")
