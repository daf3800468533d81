"""
What `plan` says a card holds, beside what torch.cuda.max_memory_allocated says it held.

    torchrun --standalone --nproc-per-node 2 benchmarks/gpu/memory.py [--layers 24 --hidden 2048] [--markdown FILE]

A plain transformer of 1 to 3B parameters, AdamW, three steps each of DDP, FSDP2 as SHARD_GRAD_OP
(reshard_after_forward=False) and as FULL_SHARD. Weights, gradients and moments are fp32, compute
is bf16: 16 bytes a parameter, as with bf16 weights and an fp32 copy of them. Without cards it runs
on the CPU, where nothing is measured: only that it runs.
"""

from __future__ import annotations

import argparse
import gc
import os
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from model import Model, shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from runner.policy.planning import Precision, Strategy, Workload, activations, memory

STRATEGIES = (Strategy.DDP, Strategy.SHARD_GRAD_OP, Strategy.FULL_SHARD)


def spread(model, strategy, device):
    if strategy is Strategy.DDP:
        return DistributedDataParallel(model)
    return shard(model, reshard_after_forward=strategy is Strategy.FULL_SHARD)


def measure(args, strategy, device):
    """Peak bytes of three steps on this card; 0 where there is none."""
    torch.manual_seed(0)
    with torch.device(device):
        model = Model(args.layers, args.hidden, args.vocabulary, recompute=args.recompute)
    count = sum(p.numel() for p in model.parameters())
    model = spread(model, strategy, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(args.vocabulary, (args.per_card, args.sequence), device=device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        with torch.autocast(device.type, torch.bfloat16):
            logits = model(tokens)
        functional.cross_entropy(logits.float().flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        del logits
    return count, torch.cuda.max_memory_allocated() if device.type == "cuda" else 0


def plan(args, strategy, count, cards):
    """The plan's states, activations and working memory, of this model."""
    work = Workload(
        parameters=count,
        strategy=strategy,
        precision=Precision.BF16,
        per_card=args.per_card,
        sequence=args.sequence,
        layers=args.layers,
        hidden=args.hidden,
        vocabulary=args.vocabulary,
        recompute=args.recompute,
    )
    held = memory(work, cards)
    # fp32 gradients: DDP's buckets are a second fp32 copy of them, and FSDP keeps an fp32 shard of the weights
    working = (
        memory(replace(work, precision=Precision.FP32), cards).working if strategy is Strategy.DDP else held.working
    )
    return held.states, activations(work), working


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--per-card", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument("--no-recompute", dest="recompute", action="store_false")
    parser.add_argument("--markdown", type=Path)
    args = parser.parse_args()
    has_card = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_card else torch.device("cpu")
    if has_card:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if has_card else "gloo")
    cards, rows = dist.get_world_size(), []
    for strategy in STRATEGIES:
        count, peak = measure(args, strategy, device)
        gc.collect()
        if has_card:
            torch.cuda.empty_cache()
        states, kept, working = plan(args, strategy, count, cards)
        total = states + kept + working
        measured = f"{peak / 1e9:.2f} | {peak / total - 1:+.0%}" if peak else "- | -"
        rows.append(
            f"| {strategy} | {states / 1e9:.2f} | {kept / 1e9:.2f} | {working / 1e9:.2f} | {total / 1e9:.2f} | {measured} |"
        )
    dist.destroy_process_group()
    if int(os.environ["RANK"]) == 0:
        card = torch.cuda.get_device_name() if has_card else "CPU, nothing is measured"
        text = (
            f"{count / 1e9:.2f}B parameters on {cards} x {card}, {args.per_card} x {args.sequence} tokens a card, "
            f"activations {'checkpointed' if args.recompute else 'kept'}; GB a card\n\n"
            "| strategy | states | activations | working | planned | measured | differs by |\n|---|---|---|---|---|---|---|\n"
            + "\n".join(rows)
        )
        print(text)
        if args.markdown:
            args.markdown.write_text(text + "\n")


if __name__ == "__main__":
    main()
