"""
A small training under every way of spreading a model, for the tests that start it.

    train_small.py KIND FOLDER:STEPS ...

KIND: plain, ddp, fsdp2, compile. One training after the other, each resuming what is in its folder; FOLDER/out.RANK
gets one line a step: step, loss as hexadecimal, the samples of the batch.
"""

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


def train(kind, folder, steps, rank):
    torch.manual_seed(0)
    model = spread(kind, Net())
    torch.manual_seed(100 + rank)  # dropout differs from rank to rank
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [9, 17], gamma=0.5)
    x = torch.arange(92 * 7).reshape(92, 7).float().sin()
    loader = DataLoader(TensorDataset(torch.arange(92), x), batch_size=4, shuffle=True)
    ckpt = Checkpointer(model, optimizer, scheduler=scheduler, loader=loader, dir=folder / "checkpoints", keep_last=5)
    with (folder / f"out.{rank}").open("a") as out:
        for step, (index, batch) in ckpt.steps(loader, max_steps=steps):
            loss = model(batch).square().mean() + model(batch).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            print(json.dumps([step, loss.item().hex(), index.tolist()]), file=out, flush=True)


def main():
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    for folder, steps in (argument.split(":") for argument in sys.argv[2:]):
        Path(folder).mkdir(exist_ok=True)
        train(sys.argv[1], Path(folder), int(steps), int(os.environ.get("RANK", "0")))


if __name__ == "__main__":
    main()
    if dist.is_initialized():
        dist.destroy_process_group()
