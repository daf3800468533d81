"""
Which optimizers stepped, and whether they are those whose state is saved.

Those that we were given tell us by themselves, through torch's hooks; where they have none, they have stepped if their
weights changed. At the start, and in a step after each save, all others of the process are listened to as well: one
that was made anew, or forgotten, trains on, and nobody would see that its state is saved nowhere.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook

from vramfarm import state
from vramfarm.optim import parameters_of

_all_given: Final[weakref.WeakSet[Optimizer]] = weakref.WeakSet()  # to any Checkpointer of this process
_STRANGER: Final = (
    "{kind}, which Checkpointer was not given, trains {what}: its state is not saved, and begins anew at a restart; "
    "make it before Checkpointer and give it, Checkpointer(model, optimizer)"
)


class Stepping:
    """The optimizers of one training. `objects` may be GradScalers, which leave steps out; `num_done` says how many steps are finished."""

    def __init__(
        self, optimizers: Sequence[tuple[str, Optimizer]], objects: Mapping[str, Any], num_done: Callable[[], int]
    ) -> None:
        self._optimizers = [one for _, one in optimizers]
        self._objects, self._num_done = objects, num_done
        self._last = -1  # how many steps were finished when one stepped last
        # Of each, how many steps were finished when it stepped last, and how many since the time before.
        self._stepped = dict.fromkeys(range(len(self._optimizers)), (-1, 0))
        self._unhooked: dict[int, list[int]] = {}
        self._scalers = [(one, one._per_optimizer_states) for one in objects.values() if _is_scaler(one)]  # noqa: SLF001  # nothing else tells
        self._own_hooks: list[Any] = []
        self._hook: Any = None
        self._others: list[Optimizer] = []
        self._told: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def begin(self) -> None:
        for number, optimizer in enumerate(self._optimizers):
            if hasattr(optimizer, "register_step_post_hook"):
                note = torch.compiler.disable(partial(self.note, number))
                self._own_hooks.append(optimizer.register_step_post_hook(note))
            else:
                self._unhooked[number] = _versions(optimizer)
        _all_given.update(one for one in self._held() if isinstance(one, Optimizer))
        self.listen()

    # ----------------------------------------------------------------- those we were given

    @property
    def tells_all(self) -> bool:
        """Whether each of them says by itself when it steps, or is left out."""
        return not self._unhooked and not self._scalers

    def note(self, number: int, *_: object) -> None:
        """That one steps now."""
        self._last = now = self._num_done()
        self._count(number, now)

    def has_stepped_before(self) -> bool:
        """Whether one called us in the step that was finished last."""
        return self._last == self._num_done() - 1

    def is_made(self) -> bool:
        """Whether one has stepped in the step that is being made, or a GradScaler has left it out."""
        is_scaled = any(_has_scaled(scaler, before) for scaler, before in self._scalers)
        self.look()
        has_stepped = any(last == self._num_done() for last, _ in self._stepped.values())
        return has_stepped or (is_scaled and not self.is_one_missing())

    def is_one_missing(self) -> bool:
        """Whether one has not stepped that was due by how often it did so before, and that no GradScaler has left out."""
        now = self._num_done()
        due = [n for n, (last, gap) in self._stepped.items() if last < now and 0 < gap <= now - last]
        return any(not self._is_left_out(self._optimizers[number]) for number in due)

    def look(self) -> None:
        """Those that tell nobody when they step have stepped if their weights have changed. What scalers know by now is of steps that are finished."""
        self._scalers = [(one, one._per_optimizer_states) for one, _ in self._scalers]  # noqa: SLF001  # as above
        for number, before in self._unhooked.items():
            now = _versions(self._optimizers[number])
            if now != before:
                self._unhooked[number] = now
                self._count(number, self._num_done())

    def drop_gradients(self) -> None:
        for parameter in parameters_of(*self._optimizers):
            parameter.grad = None

    def _count(self, number: int, now: int) -> None:
        last = self._stepped[number][0]
        if last != now:
            self._stepped[number] = (now, now - last if last >= 0 else 0)

    def _is_left_out(self, optimizer: Optimizer) -> bool:
        """A GradScaler that found an infinite gradient makes no step, and knows that until its update; then its count begins anew."""
        for scaler, _ in self._scalers:
            told = scaler._per_optimizer_states  # noqa: SLF001  # as above
            if not told and scaler.state_dict().get("_growth_tracker") == 0:
                return True
            found = told[id(optimizer)].get("found_inf_per_device", {}) if id(optimizer) in told else {}
            if any(float(one) for one in found.values()):
                return True
        return False

    # ---------------------------------------------------------------------------- strangers

    @property
    def is_listening(self) -> bool:
        return self._hook is not None

    def listen(self) -> None:
        """To all optimizers, until `hear`: it costs each of their steps a call."""
        if self._hook is None:
            self._hook = register_optimizer_step_post_hook(torch.compiler.disable(self._see))

    def close(self) -> None:
        """The training has ended; its optimizers may live on."""
        self._hush()
        for hook in self._own_hooks:
            hook.remove()

    def _hush(self) -> None:
        if self._hook is not None:
            self._hook.remove()
        self._hook, self._others = None, []

    def hear(self, models: Mapping[str, nn.Module]) -> Iterator[str]:
        """After a step: say of each that it is a stranger, once, and listen no more."""
        others = [one for one in self._others if one not in self._told and one not in _all_given]
        self._hush()
        # One that does the work for another is no stranger: what it trains is that one's.
        before = self._num_done() - 1
        stepped = [
            one for n, one in enumerate(self._optimizers) if self._stepped[n][0] == before or n in self._unhooked
        ]
        ours = {id(one) for one in parameters_of(*stepped)}
        for other in others:
            its = [one for one in parameters_of(other) if id(one) not in ours]
            if its:
                self._told.add(other)
                yield _STRANGER.format(kind=type(other).__qualname__, what=_names_of(its, models))

    def _see(self, optimizer: Optimizer, *_: object) -> None:
        if optimizer not in _all_given and not any(one is optimizer for one in self._others):
            self._others.append(optimizer)

    def _held(self) -> Iterator[object]:
        """Yield the optimizers that are saved, those that an object keeps among them; a scheduler does not save the one it has."""
        yield from self._optimizers
        for thing in self._objects.values():
            yield thing
            if not isinstance(thing, LRScheduler):
                yield from getattr(thing, "__dict__", {}).values()


def _is_scaler(thing: object) -> bool:
    return getattr(thing, "_per_optimizer_states", None) is not None


def _has_scaled(scaler: Any, before: Any) -> bool:  # noqa: ANN401  # duck-typed
    """Whether its `update` has begun anew what it knows since then, or an optimizer was stepped through it and it has yet to."""
    told = scaler._per_optimizer_states  # noqa: SLF001  # nothing else tells
    return told is not before or any(one["stage"].name == "STEPPED" for one in told.values())


def _names_of(parameters: Sequence[Tensor], models: Mapping[str, nn.Module]) -> str:
    names = {number: f"{p}.{n[0]}" for p, model in models.items() for number, n in state.parameter_names(model).items()}
    first = names.get(
        id(parameters[0]), f"a parameter of shape {tuple(parameters[0].shape)} in no module that was given"
    )
    return first + (f" and {len(parameters) - 1} more" if len(parameters) > 1 else "")


def _versions(optimizer: Optimizer) -> list[int]:
    """Every change of a weight in place counts one of these up, but for those through `.data`."""
    return [one._version for one in parameters_of(optimizer)]  # noqa: SLF001
