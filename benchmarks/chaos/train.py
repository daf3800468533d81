"""
What the storm trains: seconds long, and exact. Two ranks, or one that accumulates, make the same bits of every weight.

Two samples a step, one a micro-batch: a sum of two numbers has no order. CHAOS_TRACE gets a line for each: step, sample, loss.
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from vramfarm import Checkpointer

SAMPLES, WIDTH = 38, 64


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--hidden", type=int, default=256)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(WIDTH, args.hidden),
        nn.GELU(),
        nn.Dropout(args.dropout),
        nn.Linear(args.hidden, args.hidden),
        nn.LayerNorm(args.hidden),
        nn.Linear(args.hidden, 8),
    )
    torch.manual_seed(1 + dist.get_rank())
    if dist.get_world_size() > 1:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    numbers = torch.arange(SAMPLES)
    x = torch.sin(numbers[:, None] * torch.arange(1, WIDTH + 1))
    loader = DataLoader(TensorDataset(numbers, x), batch_size=1, shuffle=True)
    trace = os.open(os.environ["CHAOS_TRACE"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    ckpt = Checkpointer(model, optimizer, scheduler=scheduler, loader=loader)
    for step, (number, batch) in ckpt.steps(loader, max_steps=args.steps, accumulate=ckpt.grad_accum):
        loss = (model(batch) - number.sin()).square().mean()
        (loss / ckpt.grad_accum).backward()
        os.write(trace, f"{step} {number.item()} {loss.item().hex()}\n".encode())
        if ckpt.last_micro_batch:
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            time.sleep(args.pause)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
