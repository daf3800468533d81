"""
What `plan` says a card holds, beside what torch.cuda.max_memory_allocated says it held.

    python benchmarks/gpu/memory.py FOLDER [--layers 24 --hidden 2048]

It starts a process for each of two cards. A plain transformer of 1 to 3B parameters, AdamW, three steps each of DDP, FSDP2 as SHARD_GRAD_OP
(reshard_after_forward=False) and as FULL_SHARD. Weights, gradients and moments are fp32, compute
is bf16: 16 bytes a parameter, as with bf16 weights and an fp32 copy of them. The plan is to be within
10 %. Without cards it runs on the CPU and small, where nothing is measured: only that it runs.
"""

from __future__ import annotations

import argparse
import gc
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import page

sys.path.insert(0, str(page.ROOT))
import torch
import torch.distributed as dist
from model import Model, shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from runner.policy.planning import Precision, Strategy, Workload, activations, memory

CASES = ((Strategy.DDP, False), (Strategy.DDP, True), (Strategy.SHARD_GRAD_OP, False), (Strategy.FULL_SHARD, False))
"""With torch's usual AdamW, whose step needs room of its own, and once with the fused one, which does not."""


def spread(model, strategy, device):
    if strategy is Strategy.DDP:
        return DistributedDataParallel(model)
    return shard(model, reshard_after_forward=strategy is Strategy.FULL_SHARD)


def measure(args, strategy, device, *, fused):
    """Peak bytes of three steps on this card; 0 where there is none."""
    torch.manual_seed(0)
    with torch.device(device):
        model = Model(args.layers, args.hidden, args.vocabulary, recompute=args.recompute)
    count = sum(p.numel() for p in model.parameters())
    model = spread(model, strategy, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=(fused and device.type == "cuda") or None)
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


def add_model(parser, *, layers):
    """How large a model, and how much each card takes of the data: small without cards."""
    few = not torch.cuda.is_available()
    parser.add_argument("--layers", type=int, default=2 if few else layers)
    parser.add_argument("--hidden", type=int, default=128 if few else 2048)
    parser.add_argument("--vocabulary", type=int, default=500 if few else 32_000)
    parser.add_argument("--per-card", type=int, default=1 if few else 4)
    parser.add_argument("--sequence", type=int, default=64 if few else 2048)


def options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    add_model(parser, layers=24)
    parser.add_argument("--no-recompute", dest="recompute", action="store_false")
    parser.add_argument("--limit-s", type=float, default=240)
    return parser.parse_args()


def on_every_card(script, arguments, *, processes=2, limit_s=240.0):
    """A process a card, ended at its limit; torchrun's exit code."""
    argv = (sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1",
            f"--nproc-per-node={processes}", str(script), *arguments)  # fmt: skip
    child = subprocess.Popen(argv, env=page.environment(OMP_NUM_THREADS="1"), stdin=subprocess.DEVNULL)
    try:
        return child.wait(timeout=limit_s)
    except subprocess.TimeoutExpired:
        child.terminate()
        child.wait(timeout=40)
        return 1


def join():
    """Meet the others; the device of this rank."""
    has_card = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_card else torch.device("cpu")
    if has_card:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if has_card else "gloo")
    return device


def work(args):
    device = join()
    cards, rows, wrong = dist.get_world_size(), [], []
    for strategy, fused in CASES:
        name = f"{strategy}, fused AdamW" if fused else str(strategy)
        try:
            count, peak = measure(args, strategy, device, fused=fused)
        except torch.OutOfMemoryError as error:
            rows.append([name, *"-----", str(error)[:80]])
            wrong.append(name)
            continue
        finally:
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
        states, kept, working = plan(args, strategy, count, cards)
        total = states + kept + working
        measured = [f"{peak / 1e9:.2f}", f"{total / peak - 1:+.0%}"] if peak else ["-", "-"]
        wrong += [name] if peak and abs(total / peak - 1) > 0.1 else []
        rows.append([name, *(f"{size / 1e9:.2f}" for size in (states, kept, working, total)), *measured])
        if int(os.environ["RANK"]) == 0:
            print(*rows[-1], sep=" | ", flush=True)
    dist.destroy_process_group()
    if int(os.environ["RANK"]) == 0:
        kept = "checkpointed" if args.recompute else "kept"
        page.write(
            args.folder,
            "memory",
            "## Memory of a card, planned and held",
            page.machine()
            + f". {count / 1e9:.2f}B parameters on {cards} cards, {args.per_card} x {args.sequence} tokens a card, activations {kept}; GB a card."
            + ("" if peak else " On the CPU nothing is measured."),
            page.table(
                ["strategy", "states", "activations", "working", "planned", "held", "the plan differs by"], rows
            ),
            f"not within 10 %: {', '.join(wrong)}" if wrong else "",
        )
    return 1 if wrong else 0


def main() -> int:
    if "RANK" in os.environ:
        return work(options())
    args = options()
    return on_every_card(Path(__file__), sys.argv[1:], limit_s=args.limit_s) and 1


if __name__ == "__main__":
    sys.exit(main())
