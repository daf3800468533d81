"""
Who we are and what we do: from the supervisor's environment, or, where there is none, decided here.

Without a supervisor local rank 0 makes the control page, takes the newest checkpoint that is
whole, and tells the others through the process group's store. That happens in the constructor
only; later no rank waits for another.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import math
import os
import re
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, NoReturn

import torch.distributed as dist

from vramfarm import folder, protocol, seat
from vramfarm.epochs import World
from vramfarm.folder import Stored
from vramfarm.protocol import ControlPage, Env, Slot, Word

WRITER_PATIENCE_S: Final = 10.0
PATIENCE_S: Final = 3600.0  # for the slowest rank to load its part
LATE_S: Final = 30.0  # that others wait for a rank before it is named
AGAIN_S: Final = 300.0
_COMES: Final = "to come to Checkpointer(...), which is made on every rank and not under `if rank == 0:`"
_UNITS: Final = {"s": 1.0, "m": 60.0, "h": 3600.0}
_rounds = itertools.count()


_RESUME: Final = "resume: expected auto, never or a checkpoint's folder"


class ResumeError(RuntimeError):
    """There are checkpoints, and none can be used; starting over would lose them silently."""


@dataclass(frozen=True)
class Wanted:
    """The keywords. The supervisor's environment wins over all of them."""

    directory: Path
    save_interval_s: float
    keep_last: int
    resume: str
    staging: str


def wanted(directory: object, save_interval: object, keep_last: object, resume: object, staging: object) -> Wanted:
    """Return what a script asks for; `ValueError` says which keyword is not what it can be."""
    if not isinstance(directory, str | Path) or not str(directory) or "\0" in str(directory):
        raise ValueError(f"dir: expected a folder, got {directory!r}")
    if "://" in str(directory):
        raise ValueError(
            f"dir: expected a folder on this machine, got {str(directory)!r}; the runner copies to a bucket (offload.to)"
        )
    if type(keep_last) is not int or keep_last < 1:
        raise ValueError(f"keep_last: expected a number of checkpoints, 1 at least, got {keep_last!r}")
    if not isinstance(resume, str | Path):
        raise ValueError(f"{_RESUME}, got {resume!r}")  # noqa: TRY004  # as for the other keywords
    place = Path(directory).expanduser()
    chosen = str(resume) if str(resume) in {"auto", "never"} else str(Path(str(resume)).expanduser())
    return Wanted(place, parse_interval(save_interval), keep_last, chosen, parse_staging(staging))


@dataclass(frozen=True)
class Choice:
    """What to resume from, `None` at step 0, and the lineage and attempt that begin."""

    resume: Path | None
    lineage: int
    attempt: int


def parse_interval(value: object) -> float:
    """`30m`, `90s`, `1h`, a timedelta, or seconds: more than none of them."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", value.strip()) if isinstance(value, str) else None
    seconds = math.nan
    if match is not None:
        seconds = float(match[1]) * _UNITS[match[2]]
    elif isinstance(value, timedelta):
        seconds = value.total_seconds()
    elif isinstance(value, int | float) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):
            seconds = float(value)
    if not (math.isfinite(seconds) and seconds > 0):
        raise ValueError(f"save_interval: expected something like 30m, 90s or seconds, more than 0, got {value!r}")
    return seconds


def parse_staging(value: object) -> str:
    if not isinstance(value, str) or value not in {"auto", "full", "chunked"}:
        raise ValueError(f"staging: expected auto, full or chunked, got {value!r}")
    return value


def current_world(env: Mapping[str, str] = os.environ) -> World:
    """Return this rank's place; `RuntimeError` where several ranks do not know of each other."""
    if dist.is_available() and dist.is_initialized():
        world = World(dist.get_rank(), dist.get_world_size())
    elif int(env.get("WORLD_SIZE", "1")) > 1:
        raise RuntimeError(
            f"{env['WORLD_SIZE']} ranks: call torch.distributed.init_process_group() before Checkpointer()"
        )
    else:
        return World(0, 1)
    here = int(env.get("LOCAL_WORLD_SIZE", str(world.size)))
    if here != world.size:
        raise RuntimeError(f"{world.size} ranks, {here} of them on this machine: several machines are not supported")
    return world


def share(world: World, value: object, awaited: str = _COMES) -> list[Any]:
    """Return every rank's value, as JSON. Through the store: no device and no kernel takes part. `awaited` says what of a late rank."""
    if world.size == 1:
        return [value]
    store: Any = dist.distributed_c10d._get_default_store()  # noqa: SLF001  # public ways need a device
    prefix = f"vramfarm/{next(_rounds)}"
    store.set(f"{prefix}/{world.rank}", json.dumps(value))
    keys = [f"{prefix}/{rank}" for rank in range(world.size)]
    await_all(store, keys, world.rank, awaited)
    return [json.loads(store.get(key)) for key in keys]


def await_all(  # noqa: PLR0913  # times are for tests
    store: dist.Store,
    keys: Sequence[str],
    rank: int,
    awaited: str,
    *,
    late_s: float = LATE_S,
    again_s: float = AGAIN_S,
    patience_s: float = PATIENCE_S,
) -> None:
    """Wait for each rank's key. The first rank that is there names those that are not, now and then; `RuntimeError` in the end."""
    began, tell_s = time.monotonic(), late_s
    while not store.check(list(keys)):  # its `wait` writes warnings when it takes longer
        waited_s = time.monotonic() - began
        time.sleep(min(max(waited_s / 50, 0.001), 0.02))
        if waited_s < min(tell_s, patience_s):
            continue
        missing = [number for number, key in enumerate(keys) if not store.check([key])]
        who, tell_s = f"rank {', '.join(map(str, missing))} {awaited}", waited_s + again_s
        if missing and waited_s >= patience_s:
            raise RuntimeError(f"waited {waited_s:.0f} s in vain for {who}")
        if missing and rank == min(set(range(len(keys))) - set(missing)):
            print(f"vramfarm: waiting for {who}; {waited_s:.0f} s so far", file=sys.stderr, flush=True)  # noqa: T201  # the script's log


# ---------------------------------------------------------------------------- the environment


def make_env(world: World, wanted: Wanted, env: Mapping[str, str] = os.environ) -> tuple[ControlPage, dict[str, str]]:
    """Return the page and the supervisor's variables, or what stands for them without one."""
    page = seat.open_page(env)
    if page is not None:
        if page.num_ranks != world.size:
            raise RuntimeError(f"the supervisor started {page.num_ranks} ranks, torch.distributed has {world.size}")
        return page, dict(env)
    mine: Any = None
    if world.rank == 0:
        page = seat.create_page(world.size)
        mine = {
            Env.CONTROL: str(page.path),
            Env.CHECKPOINT_DIR: str(wanted.directory.absolute()),
            Env.SAVE_INTERVAL_S: str(wanted.save_interval_s),
            Env.KEEP_LAST: str(wanted.keep_last),
            Env.STAGING: wanted.staging,
        }
    told = share(world, mine)[0]
    return page or ControlPage.open(told[Env.CONTROL]), dict(env) | told


def candidates(directory: Path) -> list[Stored]:
    """Return what this library can resume from, the newest first."""
    return [s for s in folder.committed(directory) if s.manifest.framework == "vramfarm"]


def choose(directory: Path, resume: str) -> Choice:
    """Decide without a supervisor where to begin. Pure but for looking at the folder."""
    found = candidates(directory)
    for stored in found:
        _expect_sane(stored)
    newest = found[0].manifest if found else None
    lineage = newest.lineage if newest else 0
    attempt = 1 + max((s.manifest.attempt for s in found if s.manifest.lineage == lineage), default=0)
    if resume == "never":
        return Choice(None, lineage + 1 if newest else 0, 1)
    if resume != "auto":
        return _choose_path(Path(resume), found, lineage, attempt)
    if found:
        return Choice(found[0].path, lineage, attempt)
    problems = folder.broken(directory)
    if problems:
        listed = "\n  ".join(problems)
        raise ResumeError(f'{directory}: no checkpoint here can be used; resume="never" starts over\n  {listed}')
    return Choice(None, 0, 1)


def _expect_sane(stored: Stored) -> None:
    """`ResumeError` where what comes after it could soon not be counted: no training was there, but somebody's hand."""
    ref = stored.manifest.ref
    for name, number in (("lineage", ref.lineage), ("step", ref.step), ("attempt", ref.attempt)):
        if number >= protocol.MAX_NUMBER // 2:
            raise ResumeError(
                f"{stored.path}: {protocol.MANIFEST}: {name}: {number} is more than any training comes to, and would count before all others; "
                "move that folder away"
            )


def _choose_path(path: Path, found: list[Stored], lineage: int, attempt: int) -> Choice:
    """Going back to an older checkpoint begins a new lineage, so that its future counts as newer."""
    path = path.absolute()
    if not path.is_dir():
        raise ResumeError(f"{_RESUME}, got {str(path)!r}, which is no folder")
    if not (path / protocol.MANIFEST).exists():
        raise ResumeError(
            f"{_RESUME}, got {str(path)!r}, which has no {protocol.MANIFEST}: no checkpoint was committed there"
        )
    stored = folder.read(path)
    if isinstance(stored, str):
        raise ResumeError(f"{_RESUME}; {path}: {stored}")
    _expect_sane(stored)
    if not found or found[0].manifest.ref == stored.manifest.ref:
        return Choice(path, max(lineage, stored.manifest.lineage), attempt)
    return Choice(path, lineage + 1, 1)


def passed_over(directory: Path, resume: Path) -> list[str]:
    """Say what looks newer than the checkpoint to resume from and cannot be used. What was set aside was told then."""
    step, _ = protocol.parse_name(resume.name)
    told = [(reason.partition(":")[0], reason) for reason in folder.broken(directory)]
    return [reason for name, reason in told if protocol.is_name(name) and protocol.parse_name(name)[0] > step]


def told(env: Mapping[str, str]) -> Choice:
    """Return the supervisor's choice."""
    resume = env.get(Env.RESUME, "none")
    path = None if resume == "none" else Path(resume)
    return Choice(path, int(env.get(Env.LINEAGE, "0")), int(env.get(Env.ATTEMPT, "1")))


def is_supervised(env: Mapping[str, str]) -> bool:
    return Env.KEEP_LAST not in env


def grad_accum(env: Mapping[str, str]) -> int:
    """Return how many batches a card takes for one step; 1 where nobody says it."""
    text = env.get(Env.GRAD_ACCUM, "")
    return max(int(text), 1) if text.isascii() and text.isdigit() else 1


def saver_env(env: Mapping[str, str], choice: Choice) -> dict[str, str]:
    """Return what the saver is told: the same, with the choice that was made."""
    return dict(env) | {
        Env.RESUME: str(choice.resume) if choice.resume else "none",
        Env.LINEAGE: str(choice.lineage),
        Env.ATTEMPT: str(choice.attempt),
    }


def num_shards_text(manifest: protocol.Manifest) -> str:
    ranks = "1 rank" if manifest.world_size == 1 else f"{manifest.world_size} ranks"
    return f"step {manifest.step}, {ranks}, {manifest.size_bytes / 1e6:.1f} MB"


def expect_writable(directory: Path) -> None:
    """`ResumeError` if nothing can be saved there: better now than in the morning."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise ResumeError(f"no checkpoint can be saved: {folder.describe_error(directory, error)}") from error


def expect_no_other_writer(
    directory: Path, say: Callable[[str], None], patience_s: float = WRITER_PATIENCE_S, disk_s: float = seat.DISK_S
) -> None:
    """
    `ResumeError` if another run saves into this folder: it would save nothing for us.

    A saver whose ranks are gone still commits what they staged, and is waited for as long as a disk is.
    """
    path, began, told = directory / protocol.SAVER_LOCK, time.monotonic(), False
    if os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode):
        raise ResumeError(f"{path}: expected a plain file, which savers lock, found something else: remove it")
    while _is_locked(path):
        if _is_saved_here(directory):
            raise ResumeError(
                f"{directory}: this very process saves into it, by a Checkpointer that has not ended: call its finish() first; "
                "where it is lost, as in a notebook, restart the process"
            )
        waited_s = time.monotonic() - began
        if waited_s > patience_s:
            if waited_s > disk_s or not _is_left_behind(path):
                raise ResumeError(
                    f"{directory}: another run saves into this folder; end it, or give this one its own: dir="
                )
            if not told:
                say(f"{directory}: waiting for the saver of a run that has ended: it writes the last checkpoint")
                told = True
        time.sleep(0.1)


_saved_here: Final[dict[Path, tuple[int, ControlPage]]] = {}  # by folders; with the process, since a fork is another


def note_saving(directory: Path, page: ControlPage) -> None:
    """Remember where this process saves."""
    _saved_here[directory.resolve()] = (os.getpid(), page)


def _is_saved_here(directory: Path) -> bool:
    pid, page = _saved_here.get(directory.resolve(), (0, None))
    return page is not None and pid == os.getpid() and not page[Word.ENDED]


def _is_locked(path: Path) -> bool:
    try:
        with folder.open_at_once(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False  # no such file yet, or no locks here
    return False


def _is_left_behind(lock: Path) -> bool:
    """Whether the ranks of the saver that has it are gone."""
    try:
        with folder.open_at_once(lock, "rb") as file:
            page = ControlPage.open(os.fsdecode(file.read()))
    except (OSError, ValueError):  # of an older version, or of another machine
        return False
    came = [rank for rank in range(page.num_ranks) if page.get(rank, Slot.PID)]
    is_one_alive = any(protocol.is_rank_alive(page, rank) for rank in came)
    page.close()
    return bool(came) and not is_one_alive


_codes: Final[list[object]] = []  # other than 0, that sys.exit was called with
_errors: Final[list[BaseException | None]] = []  # what had ended something, as at a prompt, before we watched


def watch_for_a_crash() -> None:
    """Remember from now on what ends the process: `atexit` is not told of an exception, nor of the code."""
    _codes.clear()
    _errors[:] = [_last_error()]
    before = sys.exit
    if getattr(before, "watches", False):
        return

    def leave(code: str | int | None = None, /) -> NoReturn:
        if code:
            _codes.append(code)
        before(code)

    leave.watches = True  # type: ignore[attr-defined]  # so that there is one
    sys.exit = leave


def has_crashed() -> bool:
    """Whether an exception, or a code of failure, ends the process. At a prompt it ends none."""
    return not hasattr(sys, "ps1") and (bool(_codes) or _last_error() not in _errors)


def _last_error() -> BaseException | None:
    """The interpreter notes it before any `sys.excepthook`, which may be anybody's."""
    return getattr(sys, "last_value", None)
