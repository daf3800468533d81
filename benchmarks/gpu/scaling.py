"""
One card against all at the same global batch: time of a step, tokens a second, and what `plan` expects.

    python benchmarks/gpu/scaling.py FOLDER [--layers 16 --hidden 2048]

The transformer of memory.py, about 1B parameters, AdamW, bf16 compute. One card accumulates as many micro-batches as there are
cards, where all cards take one each. Without cards two processes on the CPU, small, where the plan knows of no link: only that it runs.
"""

import argparse
import json
import os
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

import memory
import page
import torch
import torch.distributed as dist
from torch.nn import functional

from runner.policy.fleet import find_card, link_gb_per_s
from runner.policy.planning import GB, Strategy, Workload, compute_s, speed_up, traffic_bytes

WARM_UP, STEPS = 4, 15


def options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    memory.add_model(parser, layers=16)
    parser.add_argument("--limit-s", type=float, default=100, help="of the processes on the cards")
    args = parser.parse_args()
    args.cards = page.num_ranks()
    return args


def steps_of(args, strategy, device, cards):
    """Parameters, and the time of each optimizer step."""
    accumulation = args.cards // cards
    torch.manual_seed(0)
    with torch.device(device):
        model = memory.Model(args.layers, args.hidden, args.vocabulary, recompute=False)
    count = sum(p.numel() for p in model.parameters())
    model = memory.spread(model, strategy, device) if cards > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")
    tokens = torch.randint(args.vocabulary, (args.per_card, args.sequence), device=device)
    took = []
    for _ in range(WARM_UP + STEPS):
        began = time.perf_counter()
        for _ in range(accumulation):
            with torch.autocast(device.type, torch.bfloat16):
                logits = model(tokens)
            functional.cross_entropy(logits.float().flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if device.type == "cuda":
            torch.cuda.synchronize()
        took.append(time.perf_counter() - began)
    return count, took[WARM_UP:]


def work(args):
    """On each rank: what rank 0 measures goes to FOLDER/scaling.json. While it works alone, the others' cards idle."""
    device, rank, found = memory.join(), int(os.environ["RANK"]), []
    dist.barrier()
    for cards, strategy in ((1, Strategy.DDP), (args.cards, Strategy.DDP), (args.cards, Strategy.FULL_SHARD)):
        if rank < cards:
            count, took = steps_of(args, strategy, device, cards)
            found.append({"cards": cards, "strategy": strategy, "parameters": count, "steps_s": took})
        elif device.type == "cuda":
            wait_for_file(args.folder / "scaling.json")
        if rank == 0:
            print(f"{cards} x {strategy}: {statistics.median(took):.4f} s a step", flush=True)
            (args.folder / "scaling.json").write_text(json.dumps(found))
        dist.barrier()
    dist.destroy_process_group()
    return 0


def wait_for_file(path):
    """Not at a barrier: that would keep the card busy."""
    deadline = time.monotonic() + 120
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.1)


def row_of(args, strategy, cards, found, alone_s):
    step_s = statistics.median(found["steps_s"])
    spread = f"{min(found['steps_s']):.4f} to {max(found['steps_s']):.4f}"
    tokens = args.cards * args.per_card * args.sequence
    gain = alone_s / step_s
    row = ["1 card" if cards == 1 else f"{cards} cards, {strategy}", f"{step_s:.4f} ({spread})", f"{tokens / step_s:,.0f}", f"{gain:.2f}"]  # fmt: skip
    names = page.cards()
    card, speeds = (find_card(names[0]), link_gb_per_s(names[0], cards)) if names else (None, None)
    whole = Workload(
        parameters=found["parameters"], per_card=args.per_card, sequence=args.sequence, accumulation=args.cards // cards,
        layers=args.layers, hidden=args.hidden, vocabulary=args.vocabulary, recompute=False,
    )  # fmt: skip
    work = replace(whole, strategy=strategy)
    if card is None:
        return [*row, "-", "-", "-"], True
    computing = compute_s(work, card.teraflops)
    row.append(f"{computing:.4f}")
    if cards == 1 or speeds is None:
        return [*row, "-", "-"], True
    # gradients are fp32 here: twice the bytes of the plan's bf16
    sent = traffic_bytes(work, cards) * (2 if strategy is Strategy.DDP else 1)
    low, _ = speed_up(cards, computing_s=computing, sending_s=sent / (speeds[0] * GB))
    _, high = speed_up(cards, computing_s=computing, sending_s=sent / (speeds[1] * GB))
    return [*row, f"{sent / GB:.1f}", f"{low:.2f} to {high:.2f}"], low * 0.95 <= gain <= cards * 1.05


def main() -> int:
    args = options()
    if "RANK" in os.environ:
        return work(args)
    args.folder.mkdir(parents=True, exist_ok=True)
    path = args.folder / "scaling.json"
    path.unlink(missing_ok=True)
    arguments = [str(args.folder.resolve()), *sys.argv[2:]]
    began, rows = time.monotonic(), []
    code = memory.on_every_card(Path(__file__), arguments, limit_s=args.limit_s)
    print(f"exit code {code}, {time.monotonic() - began:.0f} s", flush=True)
    found = json.loads(path.read_text()) if path.exists() else []
    wrong = [] if code == 0 and len(found) == 3 else [f"exit code {code}, {len(found)} of 3 measured"]
    for measured in found:
        alone_s = statistics.median(found[0]["steps_s"])
        row, is_as_planned = row_of(args, Strategy(measured["strategy"]), measured["cards"], measured, alone_s)
        rows.append(row)
        wrong += [] if is_as_planned else [row[0]]
    head = [
        "",
        "a step, s (range)",
        "tokens/s",
        "speed-up",
        "plan: computing, s",
        "plan: sent a card, GB",
        "plan: speed-up",
    ]
    page.write(
        args.folder,
        "scaling",
        f"## One card and {args.cards}, at one global batch",
        page.machine() + f". {args.cards * args.per_card} x {args.sequence} tokens a step.",
        page.table(head, rows),
        f"not as planned: {', '.join(wrong)}" if wrong else "",
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
