"""
The part of a training's state that stays where it is: weights, buffers, optimizer state.

Walking a model for each save takes longer than copying it. So it is walked once; before each save
it is only checked that every tensor is the same one, at the same place in memory.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vramfarm import flat, optim, staging, state
from vramfarm.staging import Piece
from vramfarm.state import Snapshot

_Named = Sequence[tuple[str, torch.optim.Optimizer]]


class Still:
    """
    Weights, buffers and optimizer states as of one walk.

    `models` and `states` are their JSON; `names` are those of each optimizer's parameters. `own_states` are those of
    tensors in flat parameters that this rank has the first element of: no rank has all of them. `owned` are the
    keys of tensors that nothing but `optimizer.step()` changes, `frozen` those of weights that nothing changes:
    they want no gradient, and are none of the `restless`, which did so and changed all the same.
    """

    def __init__(  # noqa: PLR0913  # all of a training
        self,
        models: Mapping[str, nn.Module],
        optimizers: _Named,
        *,
        rank: int,
        world_size: int,
        meshes: staging.Meshes | None = None,
        restless: frozenset[str] = frozenset(),
    ) -> None:
        self._modules, self._optimizers = models, optimizers
        snapshot = Snapshot(rank, world_size, meshes or {})
        self.models = {name: state.collect_module(snapshot, name, module) for name, module in models.items()}
        self.names = {n: optim.optimizer_names(o, list(models.values())) for n, o in optimizers}
        raw = {name: optimizer.state_dict() for name, optimizer in optimizers}
        ranges = state.ranges_of(list(models.values()))
        self.states = {
            n: optim.collect_states(snapshot, n, self.names[n], ranges, raw[n]["state"]) for n, _ in optimizers
        }
        firsts = {name for name, one in ranges.items() if one.has_first}
        self.own_states = {n: [one for one in states if one[0] in firsts] for n, states in self.states.items()}
        self._groups = {name: raw[name]["param_groups"] for name, _ in optimizers}
        self.pieces: list[Piece] = snapshot.pieces
        self._watched = list(_parts(models, optimizers))
        tensors = [one for one in self._watched if isinstance(one, Tensor)]
        self._sharded = [one for one in tensors if staging.is_dtensor(one)]
        self._plain = [one for one in tensors if not staging.is_dtensor(one)]
        self._addresses = self._look()
        self._is_plain = all(map(_is_plain, dict(optimizers).values())) and not any(self.models.values())
        self._is_known = self._covers(self.pieces)
        owned = {_address(one) for one in _owned(optimizers)}
        self.owned = frozenset(p.box.key for p in self.pieces if p.address in owned and self._is_known)
        self.guards = tuple(one for module in models.values() for found in flat.flats(module) for one in found.guards())
        self.restless = restless
        addresses = {p.box.key: p.address for p in self.pieces}
        self._frozen = {
            key: (parameter, _version(parameter))
            for key, parameter in _parameters(models)
            if not parameter.requires_grad and key not in restless and addresses.get(key) == _address(parameter)
        }
        self.frozen = frozenset(self._frozen)
        self.frozen_bytes = sum(staging.whole_bytes(p) for p in self.pieces if p.box.key in self.frozen)

    def thawed(self) -> set[str]:
        """Return those of the frozen that want a gradient now, or were changed in place."""
        return {k for k, (p, version) in self._frozen.items() if p.requires_grad or _version(p) != version}

    def holds(self) -> bool:
        """Whether all of it is still as it was found, except for what is in the tensors."""
        if not (self._is_plain and self._is_known):
            return False
        now = list(_parts(self._modules, self._optimizers))
        return (
            len(now) == len(self._watched)
            and all(map(operator.is_, now, self._watched))
            and self._look() == self._addresses
            and not self.thawed()
        )

    def groups(self, name: str) -> list[dict[str, Any]]:
        """Return an optimizer's groups as they are now, with names in place of parameters."""
        groups = dict(self._optimizers)[name].param_groups if self._is_plain else self._groups[name]
        rest = iter(self.names[name])
        return [
            {
                **{k: v for k, v in group.items() if k != "params"},
                "params": [n for _ in group["params"] for n in next(rest)],
            }
            for group in groups
        ]

    def _look(self) -> list[int]:
        return [one.data_ptr() for one in self._plain] + [one._local_tensor.data_ptr() for one in self._sharded]  # noqa: SLF001  # to_local() may wait

    def _covers(self, pieces: Sequence[Piece]) -> bool:
        """A state_dict may give other tensors than those that are there, made for the occasion."""
        known = set(self._addresses)
        return all(piece.local.numel() == 0 or piece.address in known for piece in pieces)


def _parts(models: Mapping[str, nn.Module], optimizers: _Named) -> Iterator[object]:
    """Yield everything whose identity says that nothing was exchanged."""
    for model in models.values():
        for module in model.modules():
            yield module
            yield from module._parameters.values()  # noqa: SLF001  # named_parameters() takes ten times as long
            if module._buffers:  # noqa: SLF001
                temporary = module._non_persistent_buffers_set  # noqa: SLF001
                yield from (one for name, one in module._buffers.items() if name not in temporary)  # noqa: SLF001
    for _, optimizer in optimizers:
        yield from optim.parameters_of(optimizer)
        for inner in optimizer.state.values():
            yield from inner.values() if isinstance(inner, dict) else (inner,)


def _owned(optimizers: _Named) -> Iterator[Tensor]:
    for _, optimizer in optimizers:
        yield from optim.parameters_of(optimizer)
        for inner in optimizer.state.values():
            yield from (one for one in inner.values() if isinstance(one, Tensor))


def _parameters(models: Mapping[str, nn.Module]) -> Iterator[tuple[str, Tensor]]:
    for prefix, model in models.items():
        for name, parameter in state.named_parameters(model):
            yield f"{prefix}.{name}", parameter


def _version(tensor: Tensor) -> int:
    """Every change in place counts it up, but for one through `.data`."""
    return int(staging.local_of(tensor)._version)  # noqa: SLF001


def _address(tensor: Tensor) -> int:
    return int(staging.local_of(tensor).data_ptr())


def _is_plain(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its state is tensors only, given out as it is."""
    hooks = ("_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks")
    return (
        getattr(type(optimizer), "state_dict", None) is torch.optim.Optimizer.state_dict
        and not any(getattr(optimizer, name, None) for name in hooks)
        and all(
            isinstance(inner, dict) and all(isinstance(one, Tensor) for one in inner.values())
            for inner in optimizer.state.values()
        )
    )
