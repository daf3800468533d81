"""
A small training under every way of spreading a model, for the tests that start it.

    train_small.py KIND STEPS OUT [--stop-after N] [--interval S] [--resume R]

KIND: plain, ddp, fsdp2, compile. OUT gets one line a step: step, loss as hexadecimal, the samples of the batch.
"""

import argparse
import json
import os
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from vramfarm import Checkpointer

warnings.simplefilter("ignore")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(7, 13)
        self.norm = nn.BatchNorm1d(13)
        self.drop = nn.Dropout(0.2)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.last = nn.Linear(13, 3)
        self.gain = nn.Parameter(torch.ones(5, dtype=torch.bfloat16))

    def forward(self, x):
        x = self.drop(torch.relu(self.norm(self.first(x))))
        return self.last(x) * self.scale * self.gain.float().mean()


def spread(kind, model):
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if kind == "compile":
        return torch.compile(model, backend="eager")
    if kind == "fsdp2":
        from torch.distributed.fsdp import fully_shard  # noqa: PLC0415  # 2 s that the other kinds need not pay

        model.scale = nn.Parameter(model.scale.detach().reshape(1))  # fully_shard takes no 0-dim parameters
        model.gain = nn.Parameter(model.gain.detach().float())  # nor two types
        fully_shard(model.first)
        return fully_shard(model)
    return model


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("kind")
    parser.add_argument("steps", type=int)
    parser.add_argument("out", type=Path)
    parser.add_argument("--stop-after", type=int, default=10**9)
    parser.add_argument("--interval", default="1000s")
    parser.add_argument("--resume", default="auto")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    rank = int(os.environ.get("RANK", "0"))
    torch.manual_seed(0)
    model = spread(args.kind, Net())
    torch.manual_seed(100 + rank)  # dropout differs from rank to rank
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [9, 17], gamma=0.5)
    x = torch.arange(92 * 7).reshape(92, 7).float().sin()
    loader = DataLoader(TensorDataset(torch.arange(92), x), batch_size=4, shuffle=True, num_workers=0)
    ckpt = Checkpointer(
        model,
        optimizer,
        scheduler=scheduler,
        loader=loader,
        save_interval=args.interval,
        keep_last=5,
        resume=args.resume,
    )
    with (args.out.parent / f"{args.out.name}.{rank}").open("a") as out:
        for step, (index, batch) in ckpt.steps(loader, max_steps=args.steps):
            loss = model(batch).square().mean() + model(batch).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            print(json.dumps([step, loss.item().hex(), index.tolist()]), file=out, flush=True)
            if step + 1 == args.stop_after:
                ckpt.finish()
                return
    print(f"restored {ckpt.restored}", file=sys.stderr)


if __name__ == "__main__":
    main()
    if dist.is_initialized():
        dist.destroy_process_group()
