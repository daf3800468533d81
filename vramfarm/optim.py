"""
What optimizers keep of each parameter: under the parameter's name, so that it is found again in another order and on other ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from vramfarm import staging, state
from vramfarm.flat import Range
from vramfarm.loading import Reader
from vramfarm.state import Snapshot, Then
from vramfarm.typed import StateError


def parameters_of(*optimizers: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Yield what they train, group after group."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            yield from group["params"]


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    if type(optimizer).__name__ == "ZeroRedundancyOptimizer":
        raise StateError("ZeroRedundancyOptimizer cannot be saved: its state lies on one rank; use fully_shard")


def check_held(
    optimizers: Iterable[tuple[str, torch.optim.Optimizer]], models: Sequence[nn.Module], objects: Iterable[Any]
) -> None:
    """`StateError` if an optimizer trains what nobody saves: after a resume its state would be there, and its value lost."""
    known = {number for model in models for number in state.parameter_names(model)}
    lost = [
        (f"{name}: parameter {i} of group {g}, of shape {tuple(parameter.shape)},", parameter)
        for name, optimizer in optimizers
        for g, group in enumerate(optimizer.param_groups)
        for i, parameter in enumerate(group["params"])
        if parameter.requires_grad and id(parameter) not in known
    ]
    if not lost:
        return
    saved = _memory_of([v for model in models for _, v in state.named_state(model) if isinstance(v, Tensor)])
    saved |= _memory_of([v for thing in objects for v in state.tensors_by_path(thing).values()])
    lost = [(what, parameter) for what, parameter in lost if not _memory_of([parameter]) & saved]
    if lost:
        more = f" (and {len(lost) - 1} more)" if len(lost) > 1 else ""
        raise StateError(
            f"{lost[0][0]} is in no module given to Checkpointer, so its value would not be saved{more}: "
            "give the module that holds it by a name, Checkpointer(..., head=head), or put it into one"
        )


def _memory_of(tensors: Iterable[Tensor]) -> set[int]:
    """Where their bytes are; nothing of those that have none."""
    strided = [local for one in tensors if (local := staging.local_of(one)).layout is torch.strided]
    return {int(one.untyped_storage().data_ptr()) for one in strided} - {0}


Names = Sequence[tuple[str, ...]]
"""Of an optimizer's parameters, as it numbers them: one each, but a flat parameter has those of all that is in it."""


def optimizer_names(optimizer: torch.optim.Optimizer, models: Sequence[nn.Module]) -> Names:
    names: dict[int, tuple[str, ...]] = {}
    for model in models:
        names |= {k: v for k, v in state.parameter_names(model).items() if k not in names}
    found: list[tuple[str, ...]] = []
    for g, group in enumerate(optimizer.param_groups):
        found += [names.get(id(p), (f"unnamed.{g}.{i}",)) for i, p in enumerate(group["params"])]
    return found


def collect_states(
    snapshot: Snapshot, prefix: str, names: Names, ranges: Mapping[str, Range], states: Mapping[Any, Any]
) -> list[list[Any]]:
    """Return JSON of what an optimizer keeps of each parameter, under the parameters' names."""
    named = [(name, inner) for i, inner in states.items() for name in (names[i] if isinstance(i, int) else (i,))]
    return [
        [name, snapshot.encode(inner, f"{prefix}.state.{name}", spread=True, beside=ranges.get(name))]
        for name, inner in named
    ]


def merge_states(rank_0: Sequence[Sequence[Any]], others: Iterable[Sequence[Sequence[Any]]]) -> list[list[Any]]:
    """Return the states of all tensors: of those in flat parameters each rank knows some."""
    found = {name: inner for states in others for name, inner in states} | dict(map(tuple, rank_0))
    return [[name, inner] for name, inner in found.items()]


def plan_optimizer(reader: Reader, optimizer: torch.optim.Optimizer, models: Sequence[nn.Module], saved: Any) -> Then:  # noqa: ANN401  # JSON
    """Ask for an optimizer's state, matched by parameter name, in the precision it was saved in."""
    names = optimizer_names(optimizer, models)
    parameters = [*parameters_of(optimizer)]
    groups = state.decode(saved["groups"], reader.whole)
    _check_class(optimizer, saved.get("class"), groups)
    _check_groups(optimizer, names, groups)
    ranges, known = state.ranges_of(models), dict(map(tuple, saved["state"]))
    found: dict[Any, Any] = {}
    for i, (parameter, several) in enumerate(zip(parameters, names, strict=True)):
        there = {name: known.pop(name) for name in several if name in known}
        if not there:
            continue
        if several[0] in ranges:
            inner = _states_of_ranges(reader, {name: ranges[name] for name in there}, there)
        else:
            inner = state.decode(there[several[0]], partial(_state_tensor, reader, parameter))
        if inner is not None:
            found[i] = inner
    found |= {name: state.decode(inner, reader.whole) for name, inner in known.items()}  # of no parameter

    def then() -> None:
        numbers = iter(range(len(names)))
        numbered = [
            {**group, "params": [next(numbers) for _ in now["params"]]}
            for group, now in zip(groups, optimizer.param_groups, strict=True)
        ]
        optimizer.load_state_dict({"state": found, "param_groups": numbered})
        for i, inner in found.items():
            if isinstance(i, int):
                _restore_precision(optimizer.state[parameters[i]], inner)

    return then


def _states_of_ranges(reader: Reader, ranges: Mapping[str, Range], saved: Mapping[str, Any]) -> Any:  # noqa: ANN401  # JSON
    """Return what an optimizer keeps of a parameter with these ranges in it; None if this rank has nothing of them."""
    made: dict[str, Tensor] = {}

    def tensor(name: str, key: str) -> Tensor:
        found, what = ranges[name], key.partition(f".state.{name}")[2]
        if reader.shape(key) != found.shape:
            whole = reader.whole(key)
            if whole.numel() != 1 and not found.is_whole:
                raise StateError(f"{key}: {tuple(whole.shape)} cannot be split over the ranks that hold {name}")
            return whole
        if what not in made:
            made[what] = torch.zeros(found.extent, dtype=reader.dtype(key), device=found.holder.device)
        state.fill_from(reader, key, found, made[what])
        return made[what]

    if all(math.prod(one.extent) == 0 for one in ranges.values()):
        return None
    decoded = [state.decode(inner, partial(tensor, name)) for name, inner in saved.items()]
    return decoded[0]


def _check_class(optimizer: torch.optim.Optimizer, saved: str | None, groups: Sequence[Mapping[str, Any]]) -> None:
    """Another name alone may be a kind of the script's own, and other options alone a newer torch."""
    ours, theirs = (set().union(*several) for several in (optimizer.param_groups, groups))
    now, names = type(optimizer).__qualname__, {kind.__qualname__ for kind in type(optimizer).__mro__}
    if saved is not None and saved not in names and ours != theirs:
        raise StateError(
            f"optimizer: the checkpoint has the state of a {saved}, which is of no use to a {now}: give it the same class as then, "
            "or start over (resume: never) from exported weights"
        )


def _check_groups(optimizer: torch.optim.Optimizer, names: Names, groups: Sequence[Mapping[str, Any]]) -> None:
    rest = iter(names)
    ours = [{name for _ in group["params"] for name in next(rest)} for group in optimizer.param_groups]
    theirs = [set(group["params"]) for group in groups]
    if ours != theirs:
        nothing: set[str] = set()
        lines = [
            f"group {i}: only here: {state.some(a - b)}; only in the checkpoint: {state.some(b - a)}"
            for i, (a, b) in enumerate(zip_longest(ours, theirs, fillvalue=nothing))
            if a != b
        ]
        count = f"{len(ours)} here, {len(theirs)} in the checkpoint; give the optimizer the same parameters as then"
        raise StateError("\n  ".join([f"optimizer: the parameter groups differ: {count}", *lines]))


def _state_tensor(reader: Reader, parameter: Tensor | None, key: str) -> Tensor:
    """Return a state tensor, laid out over the ranks as its parameter is."""
    if parameter is not None and parameter.dim() and tuple(parameter.shape) == reader.shape(key):
        tensor = torch.empty_like(parameter, dtype=reader.dtype(key), requires_grad=False)
        state.fill_from(reader, key, tensor)
        return tensor
    return reader.whole(key)


def _restore_precision(now: dict[str, Any], saved: Mapping[str, Any]) -> None:
    """torch casts state to its parameter's type while loading: exact only where the two are the same."""
    for name, value in saved.items():
        if isinstance(value, Tensor) and isinstance(now.get(name), Tensor) and now[name].dtype != value.dtype:
            now[name] = value.to(now[name].device)
