"""
Frozen weights: staged and written once, and looked at in every save that leaves them out.

The rule: no save relies on weights being frozen because nobody asked for a gradient. Scripts change such weights all
the same, some in ways that torch does not count (`.data`). So all their bytes are summed where they are, in each
save; what changed is saved with the others from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

LEAST_BYTES: Final = 1 << 20  # of a rank's frozen weights, to be worth a file of their own
_WIDTHS: Final = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))

Sums = Mapping[torch.device, Tensor]


def sums(tensors: Sequence[Tensor]) -> dict[torch.device, Tensor]:
    """Return one number for each tensor, on its device: the sum of its bytes as whole numbers. Starts there, waits for nothing."""
    found: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        found.setdefault(tensor.device, []).append(words_of(tensor).sum(dtype=torch.int64))
    return {device: torch.stack(several) for device, several in found.items()}


def words_of(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor as whole numbers, as wide as they fit."""
    flat = tensor.reshape(-1).view(torch.uint8)
    width, dtype = next((w, d) for w, d in _WIDTHS if flat.numel() % w == 0 and flat.data_ptr() % w == 0)
    return flat.view(dtype) if flat.storage_offset() % width == 0 else flat


def differing(keys: Sequence[str], tensors: Sequence[Tensor], before: Sums, now: Sums) -> Callable[[], set[str]]:
    """Return what says, once the devices are done, which tensors differ."""
    flags = {device: _to_host(before[device] != now[device]) for device in before}

    def names() -> set[str]:
        rest = {device: iter(found.tolist()) for device, found in flags.items()}
        return {key for key, tensor in zip(keys, tensors, strict=True) if next(rest[tensor.device])}

    return names


def _to_host(flags: Tensor) -> Tensor:
    if flags.device.type != "cuda":
        return flags
    return torch.empty(flags.shape, dtype=flags.dtype, device="cpu", pin_memory=True).copy_(flags, non_blocking=True)
