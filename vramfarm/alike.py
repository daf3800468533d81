"""
Whether the ranks are given different data.

A stream that nobody splits, or a sampler that draws the same on every rank, makes every card learn the
same; nothing fails, and the cards are paid for in vain. So each rank says on the control page what its
first batches are, and the first rank compares. Nobody waits, and after that nothing is done any more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from vramfarm.checksum import crc32
from vramfarm.protocol import Slot
from vramfarm.seat import Seat

SAME: Final = (
    "every rank was given the same first batches: the loader is not split over the ranks, and every card learns the same; "
    "give it a DistributedSampler, or split the stream by rank"
)
_SLOTS: Final = (Slot.FIRST_BATCH, Slot.SECOND_BATCH)
_MOST_BYTES: Final = 1 << 20


class Watch:
    """The first two batches of each rank: one that is always the same tells nothing."""

    def __init__(self, seat: Seat) -> None:
        self._seat = seat
        self._left = list(_SLOTS)

    def see(self, batch: Any) -> None:  # noqa: ANN401  # the script's
        if self._left:
            self._seat.page.put(self._seat.rank, self._left.pop(0), digest(batch))

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
        part = tensor.detach().reshape(-1)[: _MOST_BYTES // tensor.element_size()].contiguous()
        total = crc32(part.view(torch.uint8).numpy().tobytes(), total)
    return total + 1


def _tensors(batch: Any) -> Iterator[Tensor]:  # noqa: ANN401  # the script's
    if isinstance(batch, Tensor):
        if batch.device.type == "cpu" and batch.layout is torch.strided:
            yield batch
    elif isinstance(batch, Mapping | list | tuple):
        for part in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _tensors(part)
