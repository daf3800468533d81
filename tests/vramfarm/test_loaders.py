"""Loaders that people have, through the whole library: position saved and resumed exactly, epochs shuffled anew."""

import itertools

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset, get_worker_info

from vramfarm import Checkpointer, data, state
from vramfarm.data import Position, Saved, World

torchdata = pytest.importorskip("torchdata.stateful_dataloader")

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata calls it

SAMPLES = 22
BATCH = 4
EPOCH = 6  # batches, the last a short one
WORKERS = {
    "no workers": {},
    "workers": {"num_workers": 2},
    "persistent workers": {"num_workers": 2, "persistent_workers": True},
}


class Counted(IterableDataset):
    """A stream that knows where it is, and is shared among the workers."""

    def __init__(self):
        self.at = 0

    def __iter__(self):
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        while self.at * workers + worker < SAMPLES:
            self.at += 1
            yield (self.at - 1) * workers + worker
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, saved):
        self.at = saved["at"]


def numbers():
    return TensorDataset(torch.arange(SAMPLES))


LOADERS = {
    "torch": lambda more: DataLoader(numbers(), batch_size=BATCH, shuffle=True, **more),
    "stateful": lambda more: torchdata.StatefulDataLoader(numbers(), batch_size=BATCH, shuffle=True, **more),
    "stateful stream": lambda more: torchdata.StatefulDataLoader(Counted(), batch_size=BATCH, **more),
}


def trained(folder, make, stops):
    """The batches of a training that is resumed at each of `stops`, with a loader of its own each time."""
    seen = []
    for steps in stops:
        torch.manual_seed(len(seen) + 100)  # what a script does before must not matter
        model, loader = nn.Linear(1, 1), make()
        ckpt = Checkpointer(model, loader=loader, dir=folder, save_interval="24h", seed=3)
        for step, batch in ckpt.steps(loader, max_steps=steps):
            assert len(seen) == step
            seen.append((batch[0] if isinstance(batch, list | tuple) else batch).tolist())
    return seen


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("kind", LOADERS)
def test_a_loader_goes_on_where_it_was(tmp_path, kind, workers):
    """
    Resumed in the middle of an epoch, at its end, and twice in one: the batches are those of a run that was never
    stopped, although workers had fetched ahead. Of each epoch every sample, once, and in another order if shuffled.
    """

    def make():
        return LOADERS[kind](WORKERS[workers])

    whole = trained(tmp_path / "whole", make, [3 * EPOCH])
    parts = trained(tmp_path / "parts", make, [2, 4, EPOCH, EPOCH + 1, 3 * EPOCH])
    epochs = [list(itertools.chain(*whole[at : at + EPOCH])) for at in range(0, 3 * EPOCH, EPOCH)]

    assert whole == parts
    assert [list(range(SAMPLES))] * 3 == [sorted(epoch) for epoch in epochs]
    assert (1 if kind == "stateful stream" else 3) == len({tuple(epoch) for epoch in epochs})


def through(feed, position, num_batches):
    seen = []
    while len(seen) < num_batches:
        for batch in feed.rest_of_epoch(position):
            samples = feed.count(batch, position)
            seen.append(batch[0].tolist())
            position.advance(samples)
            if len(seen) == num_batches:
                return seen
        position.next_epoch()
    return seen


@pytest.mark.parametrize("workers", WORKERS)
def test_ranks_with_a_stateful_loader_see_other_data_and_go_on_exactly(workers):
    """
    Three ranks with a DistributedSampler: each epoch all samples, and from each rank's own state the same rest.
    """

    def make(rank):
        sampler = DistributedSampler(numbers(), num_replicas=3, rank=rank, shuffle=True)
        loader = torchdata.StatefulDataLoader(numbers(), batch_size=2, sampler=sampler, **WORKERS[workers])
        return loader, World(rank, 3)

    epoch = []
    for rank in range(3):
        loader, world = make(rank)
        whole = through(data.feed(loader, world, 0, None), Position(), 11)
        loader, world = make(rank)
        feed, position = data.feed(loader, world, 0, None), Position()
        before = through(feed, position, 6)
        snapshot = state.Snapshot(rank, 3)
        kept = snapshot.encode_own(feed.state(), "loader")
        tensors = {piece.box.key: piece.local for piece in snapshot.pieces}
        loader, world = make(rank)
        resumed = data.feed(loader, world, 0, Saved(position, 3, state.decode(kept, tensors.__getitem__)))
        epoch += itertools.chain(*whole[:4])
        assert whole == before + through(resumed, Position(**position.dump()), 5)

    assert set(range(SAMPLES)) == set(epoch)
    assert len(epoch) < SAMPLES + 3
