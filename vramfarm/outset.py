"""
What Checkpointer was given, as it was then: the weights, and which of them optimizers train.

A restart puts what was saved into what is there when Checkpointer is made. What a script changes later is saved as it
is then, so nothing looks wrong until that restart is refused, or puts values where nobody uses them. A save tells it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from vramfarm import optim, state
from vramfarm.typed import StateError

_CURE: Final = (
    "this is saved, and a restart has no place for it unless that is done before Checkpointer(...), in each start"
)


class Outset:
    """Of one training. `objects` are those that are no modules."""

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        optimizers: Sequence[tuple[str, torch.optim.Optimizer]],
        objects: Mapping[str, Any],
    ) -> None:
        self._models, self._optimizers, self._objects = models, optimizers, objects
        self._remember()

    def _remember(self) -> None:
        self._all = [weakref.ref(one) for one in self._look()]
        self._weights = {
            f"{p}.{n}": weakref.ref(w) for p, m in self._models.items() for n, w in state.named_parameters(m)
        }
        self._trained = {
            name: {one for several in optim.optimizer_names(optimizer, list(self._models.values())) for one in several}
            for name, optimizer in self._optimizers
        }

    def changes(self) -> list[str]:
        """Say what is not as it was when we looked last, and what to do."""
        now = list(self._look())
        if len(now) == len(self._all) and all(was() is one for was, one in zip(self._all, now, strict=True)):
            return []
        before, trained = self._weights, self._trained
        self._remember()
        new = [name for name in self._weights if name not in before]
        other = [name for name, was in before.items() if name in self._weights and was() is not self._weights[name]()]
        gone = [name for name in before if name not in self._weights]
        said = [
            f"{_some(names)} {what}"
            for names, what in ((new, "came"), (other, "became another"), (gone, "went"))
            if names
        ]
        for name, names in self._trained.items():
            more = sorted(one for one in names - trained[name] if not one.startswith("unnamed."))
            said += [f"{name} was given {_some(more)}"] if more else []
        lines = (
            [f"after Checkpointer was made {', '.join(said)}: {_CURE}{self._untrained(new + other)}"] if said else []
        )
        if not (other or gone):
            try:
                optim.check_held(self._optimizers, list(self._models.values()), self._objects.values())
            except StateError as error:
                lines.append(str(error))
        return lines

    def _look(self) -> Iterator[Tensor]:
        for model in self._models.values():
            yield from model.parameters()
        yield from optim.parameters_of(*dict(self._optimizers).values())

    def _untrained(self, names: Sequence[str]) -> str:
        trained = {id(one) for one in optim.parameters_of(*dict(self._optimizers).values())}
        weights = [(name, self._weights[name]()) for name in names]
        lost = [name for name, one in weights if one is not None and one.requires_grad and id(one) not in trained]
        return f"; no optimizer that was given trains {_some(lost)}" if lost else ""


def _some(names: Sequence[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")
