"""
Going on from a checkpoint: which one, on all ranks the same, and all of it put back or nothing.

Ranks wait for each other here, in the constructor, and nowhere later. Nothing but the bytes of tensors is
touched before all of it was verified.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vramfarm import folder, metadata, optim, rng, run, state, unpickling
from vramfarm.epochs import Position, World
from vramfarm.loading import DamagedError, Reader
from vramfarm.metadata import Metadata, Own
from vramfarm.places import Places
from vramfarm.protocol import MANIFEST, Env, Manifest
from vramfarm.run import Choice, ResumeError
from vramfarm.training import Training
from vramfarm.typed import StateError

Load = Callable[[Reader], None]
Say = Callable[[str], None]


@dataclass(frozen=True)
class Restored:
    """What a checkpoint says beyond what was put back. Each rank has its own of the objects that are `apart`. `rng` is this rank's, None where the ranks are not the same."""

    step: int
    position: Position
    places: Places
    rng: Any
    apart: frozenset[str]
    report: Report


def go_on(env: Mapping[str, str], resume: str, training: Training, load: Load) -> Choice:
    """Restore the newest checkpoint that is whole, on all ranks the same. What is damaged is set aside. A supervisor's word counts, not `resume`."""
    world, is_supervised = training.world, run.is_supervised(env)
    directory = Path(env[Env.CHECKPOINT_DIR])
    while True:
        choice = run.told(env) if is_supervised else agree(world, directory, resume, training.say)
        problem, fatal = ("", False) if choice.resume is None else _try(choice.resume, load)
        said = run.share(world, [problem, fatal], "to load its part of the checkpoint")
        problems = [text for text, _ in said if text]
        if not problems:
            return choice
        if any(is_fatal for _, is_fatal in said):
            raise StateError(problems[0])
        assert choice.resume is not None
        stuck = run.share(world, _set_aside(choice.resume) if world.rank == 0 else "")[0]  # nobody looks before
        if stuck:
            raise ResumeError(f"{problems[0]}; it cannot be set aside: {stuck}")
        if is_supervised or resume != "auto":
            raise ResumeError(
                f"{problems[0]}; set aside as .damaged-{choice.resume.name}, the next attempt takes an older one"
            )
        training.say(f"{problems[0]}; set aside, trying an older one")


def _set_aside(path: Path) -> str:
    """Return why it is still in the way. After a power loss it may be there again, and is found damaged again."""
    try:
        if path.exists():
            folder.set_aside(path)
    except folder.UnsyncedError:
        return ""
    except OSError as error:
        return folder.describe_error(path.parent, error)
    return ""


def agree(world: World, directory: Path, resume: str, say: Say) -> Choice:
    """Without a supervisor: rank 0 chooses; its refusal is everybody's."""
    mine: Any = None
    if world.rank == 0:
        try:
            run.expect_writable(directory)
            run.expect_no_other_writer(directory, say)
            choice = run.choose(directory, resume)
            for reason in run.passed_over(directory, choice.resume) if choice.resume else ():
                say(f"passed over: {reason}")
            mine = [str(choice.resume) if choice.resume else None, choice.lineage, choice.attempt]
        except ResumeError as error:
            mine = str(error)
    told = run.share(world, mine)[0]
    if isinstance(told, str):
        raise ResumeError(told)
    return Choice(Path(told[0]) if told[0] else None, told[1], told[2])


def _try(path: Path, load: Load) -> tuple[str, bool]:
    """Load it. Return what is wrong, and whether an older one could not be any better."""
    stored = folder.read(path)
    if isinstance(stored, str):
        return stored, False
    try:
        load(Reader(stored))
    except DamagedError as error:
        return str(error), False
    except StateError as error:
        return str(error), True
    except Exception as error:  # noqa: BLE001  # whatever the script's own objects raise; the other ranks wait for our word
        traceback.print_exc()
        return f"{path.name}: {error!r}", True
    return "", False


def load(reader: Reader, training: Training) -> Restored:
    """Ask for everything, read it in one go, hand it out."""
    report = Report()
    with _or_damaged(reader.manifest):
        found = _parse(reader.manifest)
        shared, position = found.shared, Position.parse(found.shared.position)
    rest = list(_plan(reader, training, found, report))
    with _or_damaged(reader.manifest):
        own = _plan_own(reader, training.world, found)
    reader.flush()
    with _or_damaged(reader.manifest):
        rng.check(own.rng)
        places = Places.parse(shared, own)
    for name, then in rest:
        with contextlib.nullcontext() if training.allow_pickle else unpickling.forbidden(name):
            then()
    _apply_rng(own, training, shared.step, len(found.own), report)
    apart = frozenset(name for one in found.own for name in one.objects)
    return Restored(shared.step, position, places, own.rng, apart, report)


def _parse(manifest: Manifest) -> Metadata:
    """What the script's own objects are given back is theirs to judge."""
    found = metadata.parse(manifest.state)
    step = found.shared.step
    # Ranks that came to their end after another number of steps are saved all the same: the first's may be less.
    least = 0 if manifest.reason == "final" else manifest.step
    if type(step) is not int or not least <= step <= manifest.step:
        raise ValueError(f"step: expected {manifest.step}, as in its name, got {str(step)[:80]!r}")
    return found


@contextlib.contextmanager
def _or_damaged(manifest: Manifest) -> Iterator[None]:
    """Whatever is raised by JSON that is not as we write it says that the manifest is damaged."""
    try:
        yield
    except (StateError, ValueError) as error:
        raise DamagedError(f"{manifest.ref.name}: {MANIFEST}: state: {error}") from None
    except (TypeError, LookupError, AttributeError, OverflowError) as error:
        raise DamagedError(f"{manifest.ref.name}: {MANIFEST}: state: no rank writes this: {error!r}") from None


def _plan(reader: Reader, training: Training, found: Metadata, report: Report) -> Iterator[tuple[str, state.Then]]:
    """Ask for what all ranks share. Yield whose it is, and what is left to do with it."""
    shared, models = found.shared, training.models
    for name, module in models.items():
        if report.is_there(name, shared.models):
            count, then = state.plan_module(reader, name, module, shared.models[name])
            yield name, then
            report.restored(f"{name} ({count} tensors)")
    for name, optimizer in training.optimizers:
        if report.is_there(name, shared.optimizers):
            saved = shared.optimizers[name]
            others = [own.optimizers.get(name, []) for own in found.own]
            whole = saved | {"state": optim.merge_states(saved["state"], others)}
            yield name, optim.plan_optimizer(reader, optimizer, list(models.values()), whole)
            report.restored(name)
    num_ranks, size = len(found.own), training.world.size
    rank = training.world.rank % num_ranks
    own = found.own[rank].objects
    for name, thing in training.objects.items():
        if name in own:
            yield name, state.plan_object(reader, thing, own[name], name, rank)
            report.restored(f"{name} (each rank's own)")
            if num_ranks != size:
                report.left_out(
                    f"{name}: each of {num_ranks} ranks had its own, now {size}: rank n goes on with that of rank n modulo {num_ranks}"
                )
        elif report.is_there(name, shared.objects):
            yield name, state.plan_object(reader, thing, shared.objects[name], name)
            report.restored(name)
    for name in sorted((shared.names() | own.keys()) - {*training.names}):
        report.left_out(f"{name}: in the checkpoint, but not given to Checkpointer")


def _plan_own(reader: Reader, world: World, found: Metadata) -> Own:
    """Ask for what is this rank's own; nothing where the ranks are not the same."""
    if len(found.own) != world.size:
        return Own(rng=None)
    own = found.own[world.rank]
    numbers, loader, loaders = (state.decode(one, reader.whole) for one in (own.rng, own.loader, own.loaders))
    return Own(rng=numbers, loader=loader, loaders=loaders)


def _apply_rng(own: Own, training: Training, step: int, num_ranks: int, report: Report) -> None:
    """Random numbers: each rank's own, or new ones where the ranks are not the same."""
    world = training.world
    if num_ranks == world.size:
        rng.put_back(own.rng)
        report.restored("random numbers")
        return
    rng.reseed(training.seed, step, world.rank)
    report.left_out(
        f"random numbers: saved by {num_ranks} ranks, now {world.size}; seeded anew from (seed, step, rank)"
    )


class Report:
    """What was restored, what was not, and why."""

    def __init__(self) -> None:
        self._restored: list[str] = []
        self._left_out: list[str] = []

    def is_there(self, name: str, saved: Mapping[str, Any]) -> bool:
        if name not in saved:
            self.left_out(f"{name}: not in the checkpoint, starts afresh")
        return name in saved

    def restored(self, what: str) -> None:
        self._restored.append(what)

    def left_out(self, why: str) -> None:
        self._left_out.append(why)

    def text(self) -> str:
        return "\n".join(
            [f"  restored: {', '.join(self._restored)}", *(f"  not restored: {why}" for why in self._left_out)]
        )
