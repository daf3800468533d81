"""
One attempt: starting it under its shim, finding its processes, reading what it left.

The attempt folder is made here and only here: it exists, so the attempt was started once.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from runner.errors import JobError
from runner.facts import Exit, Live
from runner.job import Batch
from runner.supervise import process
from runner.supervise.asking import whom
from runner.supervise.autopsy import keep_stacks
from runner.supervise.kills import as_kills
from runner.supervise.page import pipes_beside
from runner.supervise.process import Process
from runner.supervise.recorder import DUMP
from vramfarm import protocol
from vramfarm.protocol import EndRecord, Env, ProtocolError, parse_end

SHIM: Final = Path(__file__).with_name("shim.py")
_SHIM_ROLE: Final = "shim"
_SAVER_ROLE: Final = "saver"
_OURS: Final = "VRAMFARM_"
_KILL_S: Final = 30.0
_ABORT_S: Final = 5.0  # for ranks to print their stacks
_TORCH: Final = re.compile(r"torch-(\d+)\.(\d+)")
_NEW_NAMES: Final = (2, 9)
_FREE_PORT: Final = "<free port>"
_RANKS_OWN: Final = "$LOCAL_RANK"  # all ranks have one environment: the folder is fresh at least

PREVENTION: Final[Mapping[str, str]] = {
    "NCCL_DEBUG": "WARN",  # says nothing when all is well, and the cause when it is not
    "PYTHONFAULTHANDLER": "1",  # a crash in native code shows the Python line it came from
    "PYTHONUNBUFFERED": "1",  # the last lines before a SIGKILL are in the log
    "TOKENIZERS_PARALLELISM": "false",  # its threads and DataLoader's fork deadlock
    "TORCH_FR_BUFFER_SIZE": "2000",  # flight recorder: names the rank that did not come to a collective
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",  # and writes that down when the others time out
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "5000",  # of which four pass between the time-out and the end of a rank; torch takes 15 s
}
"""Set in every attempt unless the user, or the image, sets them."""

THREADS: Final = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")
"""Set likewise, to the rank's share of the cores: a rank that takes them all starves the others, and their workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSpec:
    """All that one launch needs. Later fields of the environment win: `changes`, `env`, `secrets`, then ours."""

    number: int
    id: str
    argv: tuple[str, ...]
    cwd: Path
    run_dir: Path
    folder: Path  # logs/attempt-0003
    control: Path  # the control page
    job: str
    checkpoint_dir: Path
    save_interval_s: float
    lineage: int
    num_procs: int = 1
    staging: str = "auto"  # memory for a save
    batch: Batch | None = None
    grad_accum: int = 1  # micro-batches a step: with these cards they make the global batch
    resume: Path | None = None
    num_threads: int = 1  # of arithmetic, in each rank
    python: str = ""  # the training interpreter: its environment is activated
    saver_python: str = sys.executable
    changes: Mapping[str, str] = field(default_factory=dict)  # that earlier failures asked for
    env: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    withhold: frozenset[str] = frozenset()  # names of the supervisor's own secrets


def start(spec: LaunchSpec) -> None:
    """Start the launcher under a shim. It lives on when the runner dies."""
    if not spec.cwd.is_dir():
        raise JobError(
            f"workdir: expected a folder, found none at {spec.cwd}",
            hint="name an existing folder in `workdir`, or bring the code with `source`",
        )
    spec.folder.mkdir(parents=True)
    link_library(spec.run_dir)
    shim = (sys.executable, "-I", str(SHIM.resolve()), str(spec.folder.resolve()), *spec.argv)
    with (spec.folder / "launcher.log").open("ab") as log:
        process.spawn(shim, env=environment(spec, os.environ), cwd=spec.cwd, stdout=log, stderr=log)


def environment(spec: LaunchSpec, outer: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of an attempt; `outer` is the supervisor's."""
    kept = {k: v for k, v in outer.items() if k not in spec.withhold and not k.startswith(_OURS)}
    env = {
        **PREVENTION,
        **dict.fromkeys(THREADS, str(spec.num_threads)),
        **_recorder(spec),
        **_offline_wandb({**kept, **spec.env, **spec.secrets}),
        **kept,
        **_filled(spec),
        **spec.env,
        **spec.secrets,
    }
    env |= activated(env, Path(spec.python)) if spec.python else {}
    env["PYTHONPATH"] = os.pathsep.join(p for p in (env.get("PYTHONPATH"), str(library_dir(spec.run_dir))) if p)
    return env | _protocol(spec)


def _recorder(spec: LaunchSpec) -> dict[str, str]:
    """Where the flight recorder is to write. Older torch has other names for it, of which newer torch would complain."""
    dump = str(spec.folder.resolve() / DUMP)
    told = {"TORCH_FR_DUMP_TEMP_FILE": dump}
    if pipes := pipes_beside(spec.control):
        told["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] = pipes  # who writes into it gets a dump, time-out or not
    if _torch_of(Path(spec.python)) < _NEW_NAMES:
        told |= {
            "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": dump,
            "TORCH_NCCL_TRACE_BUFFER_SIZE": PREVENTION["TORCH_FR_BUFFER_SIZE"],
        }
    return told


def _torch_of(python: Path) -> tuple[int, int]:
    """Version of the torch beside an interpreter, without starting it; as new as can be where none is found."""
    prefix = python.parent.parent
    for base in (prefix, prefix / "local"):
        for folder in base.glob("lib/python3*/*-packages/torch-*.dist-info"):
            if match := _TORCH.match(folder.name):
                return int(match[1]), int(match[2])
    return _NEW_NAMES


def _filled(spec: LaunchSpec) -> dict[str, str]:
    """A change names what only a launch knows: a port that is free now, a folder that is this attempt's own."""
    known = {_FREE_PORT: str(_free_port()), _RANKS_OWN: f"attempt-{spec.number}"} if spec.changes else {}
    return {name: _put(value, known) for name, value in spec.changes.items()}


def _put(text: str, known: Mapping[str, str]) -> str:
    for place, value in known.items():
        text = text.replace(place, value)
    return text


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


def activated(env: Mapping[str, str], python: Path) -> dict[str, str]:
    """What an interpreter's environment changes when it is activated: its programs come first (ninja, pip)."""
    programs = python.parent
    changed = {"PATH": os.pathsep.join((str(programs), env.get("PATH", os.defpath)))}
    if (programs.parent / "pyvenv.cfg").exists():
        changed["VIRTUAL_ENV"] = str(programs.parent)
    return changed


def library_dir(run_dir: Path) -> Path:
    """Folder for PYTHONPATH: it holds the library and nothing that could hide a user's module."""
    return run_dir.resolve() / "lib"


def link_library(run_dir: Path) -> None:
    """Let `<run>/lib/vramfarm` lead to the library of this installation."""
    folder, library = library_dir(run_dir), Path(protocol.__file__).resolve().parent
    link = folder / library.name
    folder.mkdir(parents=True, exist_ok=True)
    if link.is_symlink() and link.readlink() == library:
        return
    fresh = folder / f".{library.name}"
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(library)
    fresh.rename(link)


def live(attempt_id: str, folder: Path | None = None) -> Live | None:
    """Return the processes of the attempt that exist now; None if there is none. With its folder also what it cut loose."""
    found = _find(attempt_id, folder)
    if not found:
        return None
    savers = tuple(p.pid for p in found if p.role == _SAVER_ROLE)
    trainers = tuple(p.pid for p in found if p.pid not in savers)
    has_ended = folder is not None and (folder / "exit.json").exists()
    left = tuple(filter(None, map(process.name, trainers))) if has_ended else ()
    return Live(attempt_id=attempt_id, trainers=trainers, savers=savers, left=left)


def _find(attempt_id: str, folder: Path | None) -> tuple[Process, ...]:
    """By the mark in their environment, or in their parents'; and those without one that the shim saw when it ended."""
    marked = process.find(Env.ATTEMPT_ID, attempt_id)
    strays = [p for p in map(_process, _read_left(folder)) if p is not None] if folder else []
    if not strays:
        return marked
    pids = {p.pid for p in marked}
    return (*marked, *(p for p in process.with_descendants(strays) if p.pid not in pids))


def _read_left(folder: Path) -> list[dict[str, Any]]:
    with suppress(OSError, ValueError, KeyError, TypeError):
        return [{"pid": pid, "started": at} for pid, at in json.loads((folder / "exit.json").read_bytes())["left"]]
    return []


def find_shim(folder: Path) -> Process | None:
    """The shim, if it lives: then the attempt does."""
    shim = _process(_read_shim(folder))
    return shim if shim and process.is_alive(shim) else None


def kill(attempt_id: str, folder: Path | None = None, *, savers: bool = False) -> tuple[int, ...]:
    """
    SIGKILL every trainer process until none is left; return the pids that would not go.

    The shim is spared until it wrote down how the launcher ended. Savers are spared, so that
    what is staged gets committed, unless `savers`.
    """

    def look() -> tuple[Process, ...]:
        found = _find(attempt_id, folder)
        return found if savers else tuple(p for p in found if p.role != _SAVER_ROLE)

    process.end_all(look, timeout_s=_KILL_S, spare=_SHIM_ROLE)
    left = process.end_all(look, timeout_s=1.0)
    process.reap()
    return tuple(p.pid for p in left)


def find_asked(attempt_id: str, folder: Path) -> frozenset[Process]:
    """Whom SIGTERM would ask to save and leave (`asking`), as they are now."""
    launcher = _process(_read_shim(folder).get("launcher"))
    found = {p.pid: p for p in process.find(Env.ATTEMPT_ID, attempt_id) if not p.role}
    return frozenset(found[pid] for pid in whom(found, launcher.pid if launcher else None))


def abort(attempt_id: str, ranks: Sequence[int], *, folder: Path, evidence: Path) -> None:
    """
    SIGABRT, which makes Python print every thread's stack into its log: the ranks first, then
    their workers. A stopped process is woken for it. Whoever is left is for `kill`. The stacks are
    kept in `evidence`, too.
    """
    launcher = _read_shim(folder).get("launcher", {}).get("pid")
    _abort([p for p in process.find(Env.ATTEMPT_ID, attempt_id) if p.pid in ranks], _ABORT_S)
    left = [p for p in process.find(Env.ATTEMPT_ID, attempt_id) if not p.role and p.pid != launcher]
    _abort(left, _ABORT_S / 5)
    keep_stacks(folder, evidence)


def _abort(processes: Sequence[Process], timeout_s: float) -> None:
    process.kill(processes, signal.SIGABRT)
    process.kill(processes, signal.SIGCONT)
    deadline = time.monotonic() + timeout_s
    while any(process.is_alive(p) for p in processes) and time.monotonic() < deadline:
        time.sleep(0.02)


def read_exit(folder: Path) -> Exit | None:
    """
    Return how the launcher ended. None: its shim lives and will say; code None: nobody can say.

    Ask `live` first: a shim that is just being started has not written its name yet.
    """
    shim_lives = find_shim(folder) is not None  # before the record is looked for: it writes, then ends
    try:
        record = json.loads((folder / "exit.json").read_bytes())
        kills = as_kills(int(record.get("oom_kills", 0)), int(record.get("memory_limit", 0)))
        return Exit(code=int(record["code"]), kills=kills)
    except FileNotFoundError:
        return None if shim_lives else Exit(code=None)
    except (ValueError, KeyError, TypeError, AttributeError):  # the disk lost it
        return Exit(code=None)


def is_unwatched(folder: Path) -> bool:
    """
    Whether the launcher and its shim are both gone, and nothing says how it ended: ranks that
    live on wait for each other for ever, and nobody else would notice.
    """
    fields = _read_shim(folder)
    return bool(fields) and not _is_alive(fields) and not _is_alive(fields.get("launcher"))


def read_end(folder: Path) -> EndRecord | None:
    """Return what the saver wrote down; None if it wrote nothing that can be read."""
    with suppress(FileNotFoundError, ProtocolError):  # unreadable: the exit code counts then
        return parse_end((folder / "end.json").read_bytes())
    return None


def _read_shim(folder: Path) -> dict[str, Any]:
    """Who the shim is, and its launcher as soon as there is one; empty before the shim has begun."""
    with suppress(OSError, ValueError):
        return dict(json.loads((folder / "shim.json").read_bytes()))
    return {}


def _is_alive(fields: Any) -> bool:  # noqa: ANN401  # JSON
    found = _process(fields)
    return found is not None and process.is_alive(found)


def _process(fields: Any) -> Process | None:  # noqa: ANN401  # JSON
    try:
        return Process(int(fields["pid"]), int(fields["started"]))
    except (ValueError, KeyError, TypeError):
        return None


def _protocol(spec: LaunchSpec) -> dict[str, str]:
    return {
        Env.CONTROL: str(spec.control),
        Env.RUN: str(spec.run_dir),
        Env.ATTEMPT: str(spec.number),
        Env.ATTEMPT_ID: spec.id,
        Env.ROLE: _SHIM_ROLE,
        Env.JOB: spec.job,
        Env.CHECKPOINT_DIR: str(spec.checkpoint_dir),
        Env.SAVE_INTERVAL_S: str(spec.save_interval_s),
        Env.STAGING: spec.staging,
        Env.LINEAGE: str(spec.lineage),
        Env.RESUME: "none" if spec.resume is None else str(spec.resume),
        Env.END_FILE: str(spec.folder.resolve() / "end.json"),
        Env.SAVER_PYTHON: spec.saver_python,
        Env.WORLD_SIZE: str(spec.num_procs),
    } | _batch(spec)


def _batch(spec: LaunchSpec) -> dict[str, str]:
    """Nothing where job.yaml leaves the batch to the script: a number of ours would be taken for its wish."""
    if spec.batch is None:
        return {}
    return {
        Env.GRAD_ACCUM: str(spec.grad_accum),
        Env.BATCH_PER_CARD: str(spec.batch.per_card),
        Env.GLOBAL_BATCH: str(spec.batch.global_),
    }


def _offline_wandb(env: Mapping[str, str]) -> dict[str, str]:
    """Without a key W&B ends the run, or waits at a prompt: let it write to disk instead."""
    netrc = Path(env.get("NETRC", Path(env.get("HOME", "/root"), ".netrc")))
    with suppress(OSError):
        if "wandb" in netrc.read_text(errors="replace"):
            return {}
    return {} if "WANDB_API_KEY" in env else {"WANDB_MODE": "offline"}
