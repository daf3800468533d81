"""
What a model takes: memory on each card, bytes between cards, space on disk, system memory, time.

Estimates before anything runs, from the size of the model and the way it is spread. GB are 10^9 bytes.

- States (weights, gradients, optimizer) by strategy: "ZeRO: Memory Optimizations Toward Training
  Trillion Parameter Models", arXiv:1910.02054; 16 bytes a parameter with AdamW in mixed precision.
- Activations: "Reducing Activation Recomputation in Large Transformer Models", arXiv:2205.05198:
  34 s·b·h bytes a layer where attention keeps no scores (flash attention), 2 s·b·h a layer and one
  whole layer at a time with activation checkpointing. On top the logits, 8 s·b·v: fp32, and their gradient.
- Layers and width, where they are not told: 12·l·h² parameters and h = 128·l, about the shape of
  published models ("Scaling Laws for Neural Language Models", arXiv:2001.08361).
- Arithmetic: 6 operations a parameter and token, 8 when activations are computed again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from fractions import Fraction
from typing import Final

from runner.job import ModelSize

GB: Final = 10**9
CONTEXT_BYTES: Final = 2 * GB  # CUDA context, NCCL's buffers, what the allocator cannot use
UTILIZATION: Final = 0.4  # of the card's peak, what good training code reaches
LORA_SHARE: Final = Fraction(1, 100)  # of the parameters, what adapters train: a generous rank
_NF4_BYTES: Final = Fraction(516, 1000)  # 4 bits and doubly quantized constants, arXiv:2305.14314
_DDP_CAP: Final[Mapping[int, tuple[float, float]]] = {1: (1, 1), 2: (0.85, 0.95), 4: (0.75, 0.925), 8: (0.7, 0.9)}
_ASPECT: Final = 128  # width by layers
_CARDS_OF_ONE_MACHINE: Final = 8


class Strategy(StrEnum):
    """How a model is spread over cards: job.yaml's words, and inference (tensor parallel)."""

    DDP = "ddp"
    ZERO1 = "zero1"
    ZERO2 = "zero2"
    ZERO3 = "zero3"
    SHARD_GRAD_OP = "fsdp_shard_grad_op"
    FULL_SHARD = "fsdp_full_shard"
    LORA = "lora"
    QLORA = "qlora"
    INFERENCE = "inference"


class Optimizer(StrEnum):
    """SGD is with momentum; the 8-bit AdamW updates weights of their own precision, without an fp32 copy."""

    ADAMW = "adamw"
    ADAMW_8BIT = "adamw_8bit"
    SGD = "sgd"
    ADAFACTOR = "adafactor"


class Precision(StrEnum):
    """Of the weights. FP8 and INT4 are for inference only."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"
    FP8 = "fp8"
    INT4 = "int4"


TRAINED_IN: Final = frozenset({Precision.FP32, Precision.BF16, Precision.FP16})
SHARDED: Final = frozenset({Strategy.ZERO3, Strategy.FULL_SHARD})  # weights, too
_SHARDS_GRADIENTS: Final = SHARDED | {Strategy.ZERO2, Strategy.SHARD_GRAD_OP}
_SHARDS_OPTIMIZER: Final = _SHARDS_GRADIENTS | {Strategy.ZERO1}
_ADAPTERS: Final = frozenset({Strategy.LORA, Strategy.QLORA})


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """
    What is computed on each card. `per_card` samples of `sequence` tokens at once, `accumulation` times a step.

    `recompute`: activation checkpointing. `offload`: optimizer states lie in system memory.
    `layers` and `hidden` of 0 are estimated from the number of parameters.
    """

    parameters: int
    strategy: Strategy = Strategy.DDP
    optimizer: Optimizer = Optimizer.ADAMW
    precision: Precision = Precision.BF16
    per_card: int = 1
    accumulation: int = 1
    sequence: int = 2048
    layers: int = 0
    hidden: int = 0
    vocabulary: int = 128_000
    recompute: bool = True
    offload: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes on one card, and `host` bytes in system memory for all cards of the machine together."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    working: int  # layers that are gathered, buckets of gradients
    host: int = 0

    @property
    def states(self) -> int:
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        return self.states + self.activations + self.working


def workload(model: ModelSize, *, per_card: int = 1, accumulation: int = 1) -> Workload:
    """What job.yaml's `model` says."""
    return Workload(
        parameters=round(model.parameters),
        strategy=Strategy(model.strategy),
        optimizer=Optimizer(model.optimizer),
        precision=Precision(model.precision),
        per_card=per_card,
        accumulation=accumulation,
        sequence=model.sequence,
        layers=model.layers or 0,
        hidden=model.hidden or 0,
        recompute=model.activation_checkpointing,
        offload=model.cpu_offload,
    )


# ------------------------------------------------------------------------------------ memory


def memory(work: Workload, cards: int) -> Memory:
    """What each of `cards` cards holds. No card holds less than its share: the shards together are the whole."""
    weights, gradients, optimizer = _whole(work)
    by_weights = cards if work.strategy in SHARDED or work.strategy is Strategy.INFERENCE else 1
    by_gradients = cards if work.strategy in _SHARDS_GRADIENTS else 1
    by_optimizer = cards if work.strategy in _SHARDS_OPTIMIZER else 1
    shard = -(-optimizer // by_optimizer)
    copies = cards if by_optimizer == 1 else 1
    return Memory(
        weights=-(-weights // by_weights),
        gradients=-(-gradients // by_gradients),
        optimizer=0 if work.offload else shard,
        activations=_kv_cache(work, cards) if work.strategy is Strategy.INFERENCE else activations(work),
        working=_working(work, cards),
        host=optimizer * copies if work.offload else 0,
    )


def fits(work: Workload, cards: int, card_bytes: int) -> bool:
    """Whether a card of that size holds its part, with room for CUDA and NCCL."""
    return memory(work, cards).total + CONTEXT_BYTES <= card_bytes


def activations(work: Workload) -> int:
    """What the backward pass needs of the forward pass, on one card."""
    layers, hidden = shape(work)
    tokens = work.per_card * work.sequence
    element = 2 if work.precision is Precision.FP32 else 1  # the formula counts two bytes an element
    layer = 34 * tokens * hidden * element
    logits = 8 * tokens * work.vocabulary
    if work.recompute:
        return 2 * layers * tokens * hidden * element + layer + logits
    return layers * layer + logits


def shape(work: Workload) -> tuple[int, int]:
    """Return (layers, width), estimated where they are not told."""
    if work.layers and work.hidden:
        return work.layers, work.hidden
    if work.layers:
        return work.layers, max(round(math.sqrt(work.parameters / (12 * work.layers))), 1)
    hidden = work.hidden or round((work.parameters * _ASPECT / 12) ** (1 / 3))
    return max(round(work.parameters / (12 * hidden * hidden)) if work.hidden else round(hidden / _ASPECT), 1), hidden


def _whole(work: Workload) -> tuple[int, int, int]:
    """Bytes of all weights, all gradients and all optimizer states, in one copy."""
    count = work.parameters
    element = _element(work.precision)
    match work.strategy:
        case Strategy.INFERENCE:
            return math.ceil(count * element), 0, 0
        case Strategy.LORA | Strategy.QLORA:
            trained = math.ceil(count * LORA_SHARE)
            frozen = _NF4_BYTES if work.strategy is Strategy.QLORA else element
            return math.ceil(count * frozen) + 4 * trained, 4 * trained, trained * _states(work.optimizer, 0)
        case _:
            master = 0 if work.precision is Precision.FP32 else 4
            whole = math.ceil(count * element)
            return whole, whole, count * _states(work.optimizer, master)


def _element(precision: Precision) -> Fraction:
    sizes = {Precision.FP32: 4, Precision.BF16: 2, Precision.FP16: 2, Precision.FP8: 1}
    return Fraction(sizes[precision]) if precision in sizes else _NF4_BYTES


def _states(optimizer: Optimizer, master: int) -> int:
    """Bytes a parameter; `master`: of an fp32 copy of weights that are themselves of lower precision."""
    match optimizer:
        case Optimizer.ADAMW:
            return master + 8
        case Optimizer.ADAMW_8BIT:
            return 2
        case Optimizer.SGD:
            return master + 4
        case Optimizer.ADAFACTOR:
            return master  # its own states are rows and columns: next to nothing


def _working(work: Workload, cards: int) -> int:
    """What communication needs: DDP's buckets are a second copy of the gradients, FULL_SHARD gathers two layers."""
    if cards == 1 or work.strategy is Strategy.INFERENCE:
        return 0
    weights, gradients, _ = _whole(work)
    if work.strategy in SHARDED:
        layers, _ = shape(work)
        return weights * min(2, layers) // layers
    if work.strategy in _SHARDS_OPTIMIZER:
        return min(gradients, GB)
    return gradients


def _kv_cache(work: Workload, cards: int) -> int:
    """Keys and values of every token, of grouped-query attention with a quarter of the width; shared by all cards."""
    layers, hidden = shape(work)
    element = 4 if work.precision is Precision.FP32 else 2
    return -(-2 * layers * hidden * element * work.per_card * work.sequence // (4 * cards))


# -------------------------------------------------------------------------- disk and machine


def checkpoint_bytes(work: Workload) -> int:
    """Weights and optimizer states, as the library saves them; frozen weights, too. Gradients are not saved."""
    weights, _, optimizer = _whole(work)
    return weights + optimizer


def disk_bytes(work: Workload, *, keep_last: int) -> int:
    """Checkpoints that are kept, one being written and one being uploaded. They share what is frozen."""
    frozen = _frozen(work)
    return frozen + (checkpoint_bytes(work) - frozen) * (keep_last + 2)


def _frozen(work: Workload) -> int:
    """Of an adapter's model, all but the adapter; written once, and linked to by later checkpoints."""
    weights, gradients, _ = _whole(work)
    return weights - gradients if work.strategy in _ADAPTERS else 0


def host_bytes(work: Workload, cards: int, card_bytes: int) -> int:
    """System memory to ask for: as much as all cards have, or what a staged checkpoint and offloaded states take."""
    needed = checkpoint_bytes(work) + memory(work, cards).host + cards * CONTEXT_BYTES
    return max(cards * card_bytes, needed)


# ------------------------------------------------------------------------------ between cards


def traffic_bytes(work: Workload, cards: int) -> int:
    """
    What each card sends in one optimizer step, in rings.

    Averaging gradients costs two times their size, a gather or a scatter once; of each a ring
    saves the card's own share. ZeRO-3 and FULL_SHARD gather the weights for forward and for
    backward and scatter gradients, with every micro-batch.
    """
    if cards == 1 or work.strategy is Strategy.INFERENCE:
        return 0
    weights, gradients, _ = _whole(work)
    micro = work.accumulation
    match work.strategy:
        case Strategy.ZERO3 | Strategy.FULL_SHARD:
            sent = micro * (2 * weights + gradients)
        case Strategy.SHARD_GRAD_OP:
            sent = micro * (weights + gradients)
        case Strategy.ZERO2:
            sent = weights + micro * gradients
        case Strategy.ZERO1:
            sent = weights + gradients
        case _:
            sent = 2 * gradients
    return sent * (cards - 1) // cards


def compute_s(work: Workload, teraflops: float) -> float:
    """How long one card computes for one optimizer step of its own share of the batch."""
    operations = 8 if work.recompute else 6
    tokens = work.per_card * work.accumulation * work.sequence
    return operations * work.parameters * tokens / (teraflops * 1e12 * UTILIZATION)


def speed_up(cards: int, *, computing_s: float, sending_s: float) -> tuple[float, float]:
    """
    How many times faster than one card, from nothing of the sending hidden behind computing to all of it.

    Never more than what is seen with small models: 1.7 to 1.9 on two cards, 3 to 3.7 on four.
    """
    low, high = _cap(cards)
    hidden = computing_s / max(computing_s, sending_s)
    exposed = computing_s / (computing_s + sending_s)
    return cards * min(low, exposed), cards * min(high, hidden)


def _cap(cards: int) -> tuple[float, float]:
    return _DDP_CAP[max(n for n in _DDP_CAP if n <= cards)]


# ------------------------------------------------------------------------------- what to take


def cheapest(work: Workload, cards: int, card_bytes: int) -> Workload | None:
    """The same job with the strategy that sends least among those that fit; as it is where it need not change."""
    return next((one for one in _ladder(work, cards) if fits(one, cards, card_bytes)), None)


def _ladder(work: Workload, cards: int) -> tuple[Workload, ...]:
    """From the cheapest on: everything on every card, then less and less; states in system memory last."""
    if work.strategy in _ADAPTERS or work.strategy is Strategy.INFERENCE:
        return (work,)
    alone = replace(work, strategy=Strategy.DDP, offload=False)
    if cards == 1:
        return (alone, replace(alone, offload=True))
    steps = (Strategy.DDP, Strategy.ZERO1, Strategy.ZERO2, Strategy.FULL_SHARD)
    plain = tuple(replace(alone, strategy=step) for step in steps)
    return (*plain, replace(plain[-1], offload=True))


def is_one_machine(cards: int) -> bool:
    return cards <= _CARDS_OF_ONE_MACHINE
