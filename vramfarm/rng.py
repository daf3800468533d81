"""
Random numbers: of every generator that a script uses by default on a rank, saved, put back, and seeded.
"""

from __future__ import annotations

import contextlib
import random  # noqa: TID251  # the script's own generator is part of its state
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from vramfarm import typed


def collect() -> dict[str, Any]:
    """Return the state of every generator that a script uses by default on this rank."""
    state = _collect_host_rng()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _collect_host_rng() -> dict[str, Any]:
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if (numpy := typed.numpy_module()) is not None:
        state["numpy"] = numpy.random.get_state()
    return state


def put_back(state: Mapping[str, Any]) -> None:
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "numpy" in state and (numpy := typed.numpy_module()) is not None:
        numpy.random.set_state(state["numpy"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def check(found: Mapping[str, Any] | None) -> None:
    """Raise what `put_back` would, before anything is touched. Ranks whose number has changed have nothing of their own."""
    if found is None:
        return
    random.Random().setstate(found["python"])  # noqa: S311  # the script's own
    try:
        torch.Generator("cpu").set_state(found["torch"])
    except RuntimeError as error:
        raise ValueError(f"rng: {error}") from None
    if "numpy" in found and (numpy := typed.numpy_module()) is not None:
        numpy.random.RandomState().set_state(found["numpy"])


def reseed(seed: int, step: int, rank: int) -> None:
    """Start other random numbers on every rank: what was saved belongs to another world size."""
    mixed = mix(seed, step, rank)
    random.seed(mixed)
    torch.manual_seed(mixed)
    if (numpy := typed.numpy_module()) is not None:
        numpy.random.seed(mixed % 2**32)


def seed_host(seed: int) -> None:
    """Seed what is drawn from on the processor. Not the cards': torch notes such a wish with a stack trace, in a loader's worker for each batch."""
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    if (numpy := typed.numpy_module()) is not None:
        numpy.random.seed(seed % 2**32)


@contextlib.contextmanager
def others(seed: int) -> Iterator[None]:
    """Draw other random numbers for a while; on the cards nothing changes, since nobody would put them back."""
    before = _collect_host_rng()
    seed_host(seed)
    try:
        yield
    finally:
        put_back(before)


def mix(*numbers: int) -> int:
    """Return one seed for several numbers; near numbers give unrelated seeds."""
    mixed = 0x9E3779B97F4A7C15
    for number in numbers:
        mixed = (mixed ^ (number & (2**64 - 1))) * 0xBF58476D1CE4E5B9 % 2**64
        mixed ^= mixed >> 31
    return mixed % 2**63
