"""
Frozen weights: staged and written once, and looked at in every save that leaves them out.

The rule: no save relies on weights being frozen because nobody asked for a gradient. Scripts change such weights all
the same, some in ways that torch does not count (`.data`). So all their bytes are summed where they are, each by
its place, in each save; what changed is saved with the others from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

LEAST_BYTES: Final = 1 << 20  # of a rank's frozen weights, to be worth a file of their own
_LINE: Final = 4093  # words; a prime, so that what has an order of its own lies askew in it
_MIX: Final = (0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9)  # large odd numbers
_WIDTHS: Final = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))

Sums = Mapping[torch.device, Tensor]


def sums(tensors: Sequence[Tensor]) -> dict[torch.device, Tensor]:
    """Return one number for each tensor, on its device, in which each of its bytes counts by its place. Starts there, waits for nothing."""
    words: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        words.setdefault(tensor.device, []).append(_words_of(tensor))
    found = {}
    for device, several in words.items():
        weights = _weights(max(map(_num_lines, several)), device)
        found[device] = torch.stack([_sum(one, weights) for one in several])
    return found


def _sum(words: Tensor, weights: Tensor) -> Tensor:
    """A plain sum sees no order. A weight for each word would take memory as large as the tensor, so rows and columns have them."""
    rows = words.numel() // _LINE
    if rows:
        lines = words[: rows * _LINE].view(rows, _LINE)
        parts = [lines.sum(dim=axis, dtype=torch.int64) for axis in (0, 1)]
        words = torch.cat([*parts, words[rows * _LINE :].to(torch.int64)])
    return (words * weights[: words.numel()]).sum(dtype=torch.int64)  # it wraps around


def _num_lines(words: Tensor) -> int:
    size: int = words.numel()
    return size if size < _LINE else size // _LINE + _LINE + size % _LINE


def _weights(number: int, device: torch.device) -> Tensor:
    """Odd numbers with no order that one could see: with a ramp, two marks could move towards each other unseen."""
    mixed = torch.arange(1, number + 1, device=device) * _MIX[0]
    mixed = (mixed ^ (mixed >> 29)) * _MIX[1]
    return (mixed ^ (mixed >> 32)) | 1


def _words_of(tensor: Tensor) -> Tensor:
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
