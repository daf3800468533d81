"""
What `plan` says a card holds, beside what torch.cuda.max_memory_allocated says it held.

    python benchmarks/gpu/memory.py FOLDER [--layers 24 --hidden 2048]

It starts a process for each card. A plain transformer of 1 to 3B parameters, three steps each of DDP, FSDP2 as SHARD_GRAD_OP
(reshard_after_forward=False) and as FULL_SHARD, with torch's usual AdamW and with the fused one. Weights, gradients and moments
are fp32, compute is bf16: 16 bytes a parameter, as with bf16 weights and an fp32 copy of them. The plan knows the usual
AdamW and is to be within 10 % of it; the fused one holds less. Without cards it runs on the CPU and small, where nothing is measured: only that it runs.
"""

from __future__ import annotations

import argparse
import gc
import json
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

STRATEGIES = (Strategy.DDP, Strategy.SHARD_GRAD_OP, Strategy.FULL_SHARD)
CASES = [(strategy, fused) for strategy in STRATEGIES for fused in (False, True)]
"""With torch's usual AdamW, whose step needs room of its own, and with the fused one, which does not."""
HEAD = [
    "strategy",
    "states",
    "activations",
    "working",
    "planned",
    "held before",
    "held in the step",
    "the plan differs by",
]


def spread(model, strategy, device):
    if strategy is Strategy.DDP:
        return DistributedDataParallel(model)
    return shard(model, reshard_after_forward=strategy is Strategy.FULL_SHARD)


def measure(args, strategy, device, *, fused):
    """Parameters, and peak bytes of three steps on this card: before the optimizer's step, and in it."""
    torch.manual_seed(0)
    with torch.device(device):
        model = Model(args.layers, args.hidden, args.vocabulary, recompute=args.recompute)
    count = sum(p.numel() for p in model.parameters())
    model = spread(model, strategy, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=(fused and device.type == "cuda") or None)
    tokens = torch.randint(args.vocabulary, (args.per_card, args.sequence), device=device)
    peaks = {"before": 0, "step": 0}
    _peak(device)
    for _ in range(3):
        with torch.autocast(device.type, torch.bfloat16):
            logits = model(tokens)
        functional.cross_entropy(logits.float().flatten(0, 1), tokens.flatten()).backward()
        del logits
        peaks["before"] = max(peaks["before"], _peak(device))
        optimizer.step()
        peaks["step"] = max(peaks["step"], _peak(device))
        optimizer.zero_grad(set_to_none=True)
    return {"parameters": count, **peaks}


def _peak(device):
    """Of the time since it was asked last; 0 where there is no card."""
    if device.type != "cuda":
        return 0
    peak = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return peak


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


def on_every_card(script, arguments, *, limit_s=240.0):
    """A process a card, ended at its limit; torchrun's exit code."""
    argv = (sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1",
            f"--nproc-per-node={page.num_ranks()}", str(script), *arguments)  # fmt: skip
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
    """On each rank: what the first one held goes to FOLDER/memory.json, case by case."""
    device, found = join(), []
    for strategy, fused in CASES:
        one = {"strategy": strategy, "fused": fused, "cards": dist.get_world_size()}
        try:
            one |= measure(args, strategy, device, fused=fused)
        except torch.OutOfMemoryError as error:
            one["error"] = str(error)[:80]
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        found.append(one)
        if dist.get_rank() == 0:
            print(one, flush=True)
            (args.folder / "memory.json").write_text(json.dumps(found))
    dist.destroy_process_group()
    return 0


def row_of(args, found):
    """A row of the table, and by how much the plan is off: none where nothing was measured."""
    name = f"{found['strategy']}, {'fused' if found['fused'] else 'usual'} AdamW"
    if "error" in found:
        return [name, *"-----", "-", found["error"]], None
    states, kept, working = plan(args, Strategy(found["strategy"]), found["parameters"], found["cards"])
    planned, held = states + kept + working, max(found["before"], found["step"])
    sizes = [f"{size / 1e9:.2f}" for size in (states, kept, working, planned)]
    if not held:
        return [name, *sizes, *"---"], None
    off = planned / held - 1
    return [name, *sizes, *(f"{found[at] / 1e9:.2f}" for at in ("before", "step")), f"{off:+.0%}"], off


def main() -> int:
    args = options()
    if "RANK" in os.environ:
        return work(args)
    args.folder.mkdir(parents=True, exist_ok=True)
    kept = args.folder / "memory.json"
    kept.unlink(missing_ok=True)
    code = on_every_card(Path(__file__), sys.argv[1:], limit_s=args.limit_s)
    found = json.loads(kept.read_text()) if kept.exists() else []
    rows = [row_of(args, one) for one in found]
    wrong = [
        row[0]
        for (row, off), one in zip(rows, found, strict=True)
        if off is not None and not one["fused"] and abs(off) > 0.1
    ]
    said = [f"not within 10 %: {', '.join(wrong)}"] if wrong else []
    if code or len(found) < len(CASES) or any("error" in one for one in found):
        said.append(f"exit code {code}, {sum('error' not in one for one in found)} of {len(CASES)} measured")
    size = f"{found[0].get('parameters', 0) / 1e9:.2f}B parameters on {found[0]['cards']}" if found else "nothing"
    page.write(
        args.folder,
        "memory",
        "## Memory of a card, planned and held",
        f"{page.machine()}. {size}, {args.per_card} x {args.sequence} tokens each, activations "
        f"{'checkpointed' if args.recompute else 'kept'}; GB a card. *Held*: most before the optimizer's step, and in it."
        + ("" if page.cards() else " On the CPU nothing is measured."),
        page.table(HEAD, [row for row, _ in rows]),
        "; ".join(said),
    )
    return 1 if said else 0


if __name__ == "__main__":
    sys.exit(main())
