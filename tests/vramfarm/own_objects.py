"""
Two ranks with objects that are the same on both, and some that are not, for the test that starts it.

    own_objects.py FOLDER

Trains, saves, resumes in a new Checkpointer and saves again; FOLDER/out.RANK says what each rank was given back.
"""

import json
import sys
import time
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
    """Each differs from rank to rank in a way of its own, but for the average."""
    one_in_many = torch.zeros(1_000_000)
    one_in_many[77_777 + 2 * rank] = 1
    return {
        "replay": Kept({"seen": np.full(20_000 * (rank + 1), rank, np.float32), "at": 5}),
        "order": Kept({"order": torch.arange(200).roll(rank)}),
        "one": Kept({"values": one_in_many}),
        "numbers": Kept({"rewards": [float(rank)], "keys": {f"key{n}": n for n in range(rank + 1)}}),
        "tail": Kept({"at": 0}),  # differs in the last save only
        "average": Kept({"weights": torch.arange(50_000.0), "n": 3, "words": {"a", "set", "of", "words"}}),
        **({"a_first": Kept({"n": 7})} if rank == 0 else {}),  # this rank only has it
        **({"the_second": Kept({"n": 8})} if rank == 1 else {}),
    }


def told(things):
    replay, average = things["replay"].state, things["average"].state
    return {
        "replay": [type(replay["seen"]).__name__, len(replay["seen"]), float(replay["seen"].max())],
        "order": things["order"].state["order"][:3].tolist(),
        "one": things["one"].state["values"].nonzero().tolist(),
        "numbers": things["numbers"].state,
        "tail": things["tail"].state,
        "average": [average["weights"].long().sum().item(), sorted(average["words"])],
        "of one rank": [things[name].state["n"] for name in ("a_first", "the_second") if name in things],
    }


def network():
    """Frozen weights behind one that is trained, enough for each rank to write some."""
    net = nn.Sequential(nn.Linear(300, 300), *(nn.Linear(600, 600) for _ in range(4)))
    net[1:].requires_grad_(False)
    return net


def train(folder, things, rank):
    """Ask for a save, and end when it is there."""
    torch.manual_seed(0)
    net = network()
    model = nn.parallel.DistributedDataParallel(net[0])
    optimizer = torch.optim.Adam(model.parameters())
    ckpt = Checkpointer(net, optimizer, dir=folder / "checkpoints", keep_last=9, **things)
    given = told(things)
    ckpt.save()
    before, deadline, saved = ckpt.saved_step, time.monotonic() + 30, torch.tensor(0)
    while not saved:
        model(torch.ones(1, 300)).sum().backward()
        optimizer.step()
        ckpt.step()
        time.sleep(0.01)
        saved.fill_(ckpt.saved_step > before or time.monotonic() > deadline)
        dist.all_reduce(saved, dist.ReduceOp.MIN)
    things["tail"].state = {"at": rank}
    ckpt.step()  # so that the end is another save
    ckpt.finish()
    with (folder / f"out.{rank}").open("a") as out:
        print(json.dumps(given if ckpt.restored else told(things)), file=out)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    folder, rank = Path(sys.argv[1]), dist.get_rank()
    train(folder, objects(rank), rank)
    of_none = {name: objects(7).get(name, Kept({"n": 0})) for name in objects(rank)}
    train(folder, of_none, rank)  # all of it is to be given back
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
