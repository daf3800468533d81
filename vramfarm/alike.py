"""
Whether the ranks are given different data, and have the same weights.

A stream that nobody splits, or a sampler that draws the same on every rank, makes every card learn the
same; nothing fails, and the cards are paid for in vain. So each rank says on the control page what its
first batches are, and the first rank compares. Nobody waits, and after that nothing is done any more. In the same way each says at its first save what some of its weights are: where nobody
averages the gradients every rank trains a model of its own, and the saver takes parts of each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from vramfarm import optim, state
from vramfarm.checksum import crc32
from vramfarm.protocol import ControlPage, Slot
from vramfarm.seat import Seat
from vramfarm.staging import as_bytes

SAME: Final = (
    "every rank was given the same first batches: the loader is not split over the ranks, and every card learns the same; "
    "give it a DistributedSampler, or split the stream by rank"
)
OWN_WEIGHTS: Final = "the ranks have different weights ({}): is DDP or FSDP missing? the checkpoint is a mix of them"
_SLOTS: Final = (Slot.FIRST_BATCH, Slot.SECOND_BATCH)
_MOST_BYTES: Final = 1 << 20
_SAMPLES: Final = 4  # parameters
_ELEMENTS: Final = 256  # of each
_SUM_BITS: Final = 16


class Watch:
    """The first two batches of each rank: one that is always the same tells nothing."""

    def __init__(self, seat: Seat) -> None:
        self._seat = seat
        self._unsaid = list(_SLOTS)

    def see(self, batch: Any) -> None:  # noqa: ANN401  # the script's
        if self._unsaid:
            self._seat.page.put(self._seat.rank, self._unsaid.pop(0), digest(batch))

    def is_same(self) -> bool | None:
        """Whether all ranks were given the same; None as long as not all have said."""
        page = self._seat.page
        told = {tuple(page.get(rank, slot) for slot in _SLOTS) for rank in range(page.num_ranks)}
        if any(0 in sums for sums in told):
            return None
        return page.num_ranks > 1 and len(told) == 1 and all(first != second for first, second in told)


def digest(batch: Any) -> int:  # noqa: ANN401  # the script's
    """Return a number for what is in a batch, never 0; what is on a card is not looked at."""
    total = 0
    for tensor in _tensors(batch):
        part = tensor.detach().reshape(-1)[: _MOST_BYTES // tensor.element_size()]
        total = crc32(as_bytes(part), total)
    return total + 1


def _tensors(batch: Any) -> Iterator[Tensor]:  # noqa: ANN401  # the script's
    if isinstance(batch, Tensor):
        if batch.device.type == "cpu" and batch.layout is torch.strided:
            yield batch
    elif isinstance(batch, Mapping | list | tuple):
        for part in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _tensors(part)


# ------------------------------------------------------------------------------- weights


def whole_weights(
    models: Mapping[str, nn.Module], optimizers: Sequence[tuple[str, torch.optim.Optimizer]]
) -> list[tuple[str, Tensor]]:
    """Return some trained parameters that each rank has all of, from the first to the last, by name."""
    trained = {id(one) for one in optim.parameters_of(*dict(optimizers).values())}
    found: dict[int, tuple[str, Tensor]] = {}
    for prefix, model in models.items():
        spread = state.ranges_of([model])
        for name, parameter in state.named_parameters(model):
            if id(parameter) in trained and name not in spread and _is_plain(parameter):
                found.setdefault(id(parameter), (f"{prefix}.{name}", parameter))
    several, last = list(found.values()), len(found) - 1
    return [several[at] for at in sorted({last * number // (_SAMPLES - 1) for number in range(_SAMPLES)}) if several]


def _is_plain(parameter: Tensor) -> bool:
    """Neither spread over ranks nor of a kind of its own."""
    here = parameter.data
    return type(here) is Tensor and parameter.requires_grad and here.layout is torch.strided and not here.is_meta


def tell_weights(seat: Seat, weights: Sequence[tuple[str, Tensor]]) -> None:
    """Say what they are, before a rank's save is staged. What is on a card is waited for."""
    sums = [_sum(one) << _SUM_BITS * number for number, (_, one) in enumerate(weights)]
    seat.page.put(seat.rank, Slot.WEIGHTS, sum(sums))


def differing(page: ControlPage, weights: Sequence[tuple[str, Tensor]]) -> str:
    """Return the name of the first that is not the same on all ranks; of what they said at the save that was committed first."""
    told = [page.get(rank, Slot.WEIGHTS) for rank in range(page.num_ranks)]
    for number, (name, _) in enumerate(weights):
        if len({(sums >> _SUM_BITS * number) % (1 << _SUM_BITS) for sums in told}) > 1:
            return name
    return ""


def _sum(weight: Tensor) -> int:
    """Of elements from all over it: the first rows of an embedding may be those of words that nobody uses."""
    flat = weight.detach().reshape(-1)
    return crc32(as_bytes(flat[:: max(1, flat.numel() // _ELEMENTS)])) % (1 << _SUM_BITS)
