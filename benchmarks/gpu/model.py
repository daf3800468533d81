"""The transformer that the scripts here train, how it is spread over the cards, and on what all of it ran."""

import os
import platform
from datetime import datetime, timezone
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.heads = max(hidden // 128, 1)
        self.before, self.between = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x):
        size = (*x.shape[:2], self.heads, -1)
        q, k, v = (part.view(size).transpose(1, 2) for part in self.qkv(self.before(x)).chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.down(functional.gelu(self.up(self.between(x))))


class Model(nn.Module):
    def __init__(self, layers: int, hidden: int, vocabulary: int, *, recompute: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        self.embed = nn.Embedding(vocabulary, hidden)
        self.blocks = nn.ModuleList(Block(hidden) for _ in range(layers))
        self.head = nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(x)


def shard(model, *, reshard_after_forward=True):
    """FSDP2: fp32 weights and optimizer state on each rank, its part of them; bf16 where it computes."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for part in (*model.blocks, model):
        fully_shard(part, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    return model


def loss_of(model, tokens):
    """The loss of guessing each next token."""
    logits = model(tokens[:, :-1])
    return functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def join():
    """This rank's device, with the process group up: gloo beside NCCL, and alone without cards."""
    has_card = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_card else torch.device("cpu")
    if has_card:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("cpu:gloo,cuda:nccl" if has_card else "gloo")
    return device


def about():
    """Date, torch, driver and card, for the head of a table."""
    date = datetime.now(timezone.utc).strftime("%Y-%m-%d")
    if not torch.cuda.is_available():
        return f"{date}, torch {torch.__version__}, no card, {os.cpu_count()} cores ({platform.machine()})"
    count, name = torch.cuda.device_count(), torch.cuda.get_device_name()
    return f"{date}, {count} × {name}, {os.cpu_count()} cores, torch {torch.__version__} (CUDA {torch.version.cuda}), driver {driver()}"


def driver():
    try:
        line = Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    except OSError:
        return "unknown"
    return next((word for word in line.split() if word[:1].isdigit() and "." in word), line)
