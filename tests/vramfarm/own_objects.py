"""
Two ranks with objects that are the same on both, and some that are not, for the test that starts it.

    own_objects.py FOLDER

Trains, saves, resumes in a new Checkpointer and saves again; FOLDER/out.RANK says what each rank was given back.
"""

import json
import sys
import warnings
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from vramfarm import Checkpointer

warnings.simplefilter("ignore")


class Kept:
    """Has a state, and takes any other."""

    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def objects(rank):
    """Each differs from rank to rank in a way of its own, but for the last."""
    one_in_many = torch.zeros(100_000)
    one_in_many[77_777] = rank
    return {
        "replay": Kept({"seen": np.full(20_000 * (rank + 1), rank, np.float32), "at": 5}),
        "order": Kept({"order": torch.arange(200).roll(rank)}),
        "one": Kept({"values": one_in_many}),
        "numbers": Kept({"rewards": [float(rank)], "keys": {f"key{n}": n for n in range(rank + 1)}}),
        "average": Kept({"weights": torch.arange(50_000.0), "n": 3}),
    }


def told(things):
    replay, average = things["replay"].state, things["average"].state
    return {
        "replay": [type(replay["seen"]).__name__, len(replay["seen"]), float(replay["seen"].max())],
        "order": things["order"].state["order"][:3].tolist(),
        "one": things["one"].state["values"].sum().item(),
        "numbers": things["numbers"].state,
        "average": average["weights"].long().sum().item(),
    }


def train(folder, things, rank, max_steps):
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(300, 300))
    optimizer = torch.optim.Adam(model.parameters())
    ckpt = Checkpointer(model, optimizer, dir=folder / "checkpoints", **things)
    with (folder / f"out.{rank}").open("a") as out:
        print(json.dumps(told(things)), file=out)
    for _, batch in ckpt.steps([torch.ones(1, 300)] * 2, max_steps=max_steps):
        model(batch).sum().backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    folder, rank = Path(sys.argv[1]), dist.get_rank()
    train(folder, objects(rank), rank, 2)
    train(folder, objects(7), rank, 4)  # of no rank: all of it is to be given back
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
