"""What a script hands over by keyword, looked at before anything is trained: one line says which it is, and what it can be."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from numbers import Integral
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from vramfarm.epochs import World
from vramfarm.typed import StateError


def parse_whole(where: str, given: object, what: str, *, least: int | None = None) -> int:
    if isinstance(given, bool) or not isinstance(given, Integral) or (least is not None and given < least):
        bound = "" if least is None else f", {least} at least"
        raise ValueError(f"{where}: expected {what}{bound}, got {given!r}")
    return int(given)


def parse_limits(max_steps: object, epochs: object, accumulate: object) -> tuple[int | None, int | None, int]:
    """Return how long a loop goes on, None where there is no such limit, and of how many batches its steps are."""
    batches = parse_whole("steps: accumulate", accumulate, "a number of batches", least=1)
    if max_steps is not None:
        max_steps = parse_whole("steps: max_steps", max_steps, "a number of steps", least=0)
    if epochs is not None:
        epochs = parse_whole("steps: epochs", epochs, "a number of passes through the loader", least=0)
    return max_steps, epochs, batches


def parse_scalar(name: str, value: float | torch.Tensor | None) -> float | None:
    """A tensor that training has a graph of is read without it: torch warns of anything else."""
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise ValueError(
                f"report: {name}: expected one number, got a tensor of shape {tuple(value.shape)}: give its mean()"
            )
        value = value.detach().item()
    return None if value is None else parse_number(f"report: {name}", value)


def parse_number(where: str, given: Any) -> float:  # noqa: ANN401  # numpy's, too
    try:
        return float(given)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{where}: expected a number, got {str(given)[:80]!r}: {error}") from None


def parse_flags(**given: object) -> tuple[bool, ...]:
    """Return them: `"no"` would count as true."""
    for name, value in given.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name}: expected True or False, got {value!r}")  # noqa: TRY004  # as for the other keywords
    return tuple(value is True for value in given.values())


def parse_world(given: object, world: World) -> World:
    """Return `data_parallel=(rank, size)`."""
    match given:
        case (int(rank), int(size)) if 0 <= rank < size and world.size % size == 0:
            return World(rank, size)
        case (int(rank), int(size)) if 0 <= rank < size:
            raise ValueError(
                f"data_parallel: expected a size that divides {world.size}, the number of ranks that run, got {given!r}: "
                "each part of the data is seen by as many ranks"
            )
    raise ValueError(f"data_parallel: expected (rank, size) with a rank from 0 to size - 1, got {given!r}")


def check_loader(loader: object, where: str) -> None:
    if isinstance(loader, str | bytes | type) or not hasattr(loader, "__iter__"):
        kind = f"the class {loader.__qualname__} itself" if isinstance(loader, type) else type(loader).__qualname__
        raise TypeError(f"{where}: expected a loader, or something else that gives batches, got {kind}")


def check_objects(objects: Mapping[str, Any], taken: Collection[str], keywords: Collection[str]) -> None:
    """Refuse what is no object with a state, and names that make two tensors of one name."""
    for name, thing in objects.items():
        if name in taken:
            raise ValueError(f"{name}: this name is taken")
        if not name.isidentifier():
            raise ValueError(
                f"{name!r}: expected a plain name, of letters, digits and _: dots part the names of tensors, and a resume would take it "
                f"for a part of {name.partition('.')[0]!r}"
            )
        if isinstance(thing, type):
            raise TypeError(f"{name}: expected an object with a state, got the class {thing.__qualname__} itself")
        if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
            near = difflib.get_close_matches(name, keywords, 1)
            hint = f"; is {near[0]}= meant?" if near else ""
            raise StateError(
                f"{name}: expected an object with state_dict and load_state_dict, got {type(thing).__qualname__}{hint}"
            )


def check_shapes(models: Mapping[str, nn.Module]) -> None:
    for model_name, model in models.items():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if is_lazy(tensor):
                raise ValueError(
                    f"{model_name}.{name}: has no shape yet: give the model a batch once before Checkpointer(...), as lazy modules need it"
                )
