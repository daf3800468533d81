"""What a script gave us: looked at once, so that what would fail at the first save is refused now, and the same from then on."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import torch
from torch import nn

from vramfarm import arguments, metadata, optim, run, state
from vramfarm.epochs import World
from vramfarm.staging import Meshes

NO_OPTIMIZER: Final = (
    "no optimizer was given, and the model has weights that want gradients: if one trains them, its state is not saved; "
    "give it, Checkpointer(model, optimizer)"
)


@dataclass(frozen=True, kw_only=True)
class Training:
    """
    One rank's part of a training. `named` are the objects that have names of the script's, modules among them.

    `data_world` are the ranks that see different data. All ranks together say by `meshes` what a rank's share of
    each tensor depends on, and `of_any_rank` which objects there are: an average is often kept by the first only.
    """

    model: nn.Module
    optimizers: Sequence[tuple[str, torch.optim.Optimizer]]
    named: Mapping[str, Any]
    loader: Iterable[Any] | None
    seed: int
    allow_pickle: bool
    world: World
    data_world: World
    meshes: Meshes
    of_any_rank: frozenset[str]

    @cached_property
    def models(self) -> dict[str, nn.Module]:
        return _models(self.model, self.named)

    @cached_property
    def objects(self) -> dict[str, Any]:
        """Those that are no modules."""
        return _objects(self.named)

    @property
    def names(self) -> list[str]:
        return [state.MODEL, *dict(self.optimizers), *self.named]

    def lacks_optimizer(self) -> bool:
        """Not refused: the model may only be looked at, or its optimizer be kept by an object that was given."""
        is_there = self.optimizers or any(hasattr(thing, "param_groups") for thing in self.named.values())
        return not is_there and any(one.requires_grad for one in self.model.parameters())

    def say(self, text: str) -> None:
        """Once for all ranks, in the script's log."""
        if self.world.rank == 0:
            print(f"vramfarm: {text}", file=sys.stderr, flush=True)  # noqa: T201  # see above


def parse(  # noqa: PLR0913  # as Checkpointer was given it
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    named: Mapping[str, Any],
    loader: Iterable[Any] | None,
    *,
    seed: int,
    allow_pickle: bool,
    data_parallel: tuple[int, int] | None,
    keywords: Collection[str],
) -> Training:
    """Return what was given; a line for people of what is no training. The ranks wait for each other."""
    optimizers = _named_optimizers(optimizer)
    named = {name: thing for name, thing in named.items() if thing is not None}
    seed = arguments.parse_whole("seed", seed, "a whole number")
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model: expected a torch.nn.Module, got {type(model).__qualname__}; others by a name of their own"
        )
    for _, one in optimizers:
        optim.check_optimizer(one)
    arguments.check_objects(named, metadata.RESERVED | {name for name, _ in optimizers}, keywords)
    models, objects = _models(model, named), _objects(named)
    arguments.check_shapes(models)
    optim.check_held(optimizers, list(models.values()), objects.values())
    if loader is not None:
        arguments.check_loader(loader, "loader")
    world = run.current_world()
    data_world = world if data_parallel is None else arguments.parse_world(data_parallel, world)
    if data_parallel is None and world.size > 1 and state.is_tensor_parallel(model):
        raise ValueError("a tensor-parallel model: say which ranks see different data: data_parallel=(rank, size)")
    told = run.share(world, [state.outline(models), [*objects]])
    return Training(
        model=model,
        optimizers=optimizers,
        named=named,
        loader=loader,
        seed=seed,
        allow_pickle=allow_pickle,
        world=world,
        data_world=data_world,
        meshes=state.compare([outline for outline, _ in told], world.rank),
        of_any_rank=frozenset(name for _, names in told for name in names),
    )


def _models(model: nn.Module, named: Mapping[str, Any]) -> dict[str, nn.Module]:
    return {state.MODEL: model} | {name: thing for name, thing in named.items() if isinstance(thing, nn.Module)}


def _objects(named: Mapping[str, Any]) -> dict[str, Any]:
    return {name: thing for name, thing in named.items() if not isinstance(thing, nn.Module)}


def _named_optimizers(
    given: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
) -> list[tuple[str, torch.optim.Optimizer]]:
    several = [given] if hasattr(given, "param_groups") or not isinstance(given, Iterable) else list(given)
    for one in several:
        if not hasattr(one, "param_groups"):
            raise TypeError(
                f"optimizer: expected an optimizer or a list of them, got {type(one).__qualname__} in {type(given).__qualname__}"
            )
    return [("optimizer" if i == 0 else f"optimizer_{i + 1}", _unwrapped(one)) for i, one in enumerate(several)]


def _unwrapped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer that does the work: accelerate wraps it in one that was never initialised."""
    inner = getattr(optimizer, "optimizer", None)
    return _unwrapped(inner) if isinstance(inner, torch.optim.Optimizer) else optimizer
