"""Loaders that people have, through the whole library: position saved and resumed exactly, epochs shuffled anew."""

import itertools
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

from vramfarm import Checkpointer, data, rng, state
from vramfarm.epochs import Position, Saved, World

torchdata = pytest.importorskip("torchdata.stateful_dataloader")

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata calls it

SAMPLES = 22
BATCH = 4
EPOCH = 6  # batches, the last a short one
SECOND_OF_TWO = World(1, 2)
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
            feed.mark()
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


class Noisy(Dataset):
    """Augments with all that a transform may draw from."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        numpys = np.random.rand()  # noqa: NPY002  # what scripts use
        return index, random.random(), float(numpys), torch.rand(()).item()


def masked(samples):
    return [torch.tensor([[*sample, torch.rand(()).item()] for sample in samples], dtype=torch.float64)]


class Own(DataLoader):
    """Does something of its own to each batch."""

    def __iter__(self):
        yield from ([-batch] for [batch] in super().__iter__())


class NoisyStream(IterableDataset):
    def __iter__(self):
        yield from (noisy[index] for noisy in [Noisy()] for index in range(SAMPLES))


def weighted(more):
    sampler = WeightedRandomSampler(torch.ones(SAMPLES), SAMPLES)
    return DataLoader(Noisy(), batch_size=BATCH, sampler=sampler, collate_fn=masked, **more)


def with_accelerate(more):
    accelerate = pytest.importorskip("accelerate")
    return accelerate.Accelerator(cpu=True).prepare(DataLoader(Noisy(), batch_size=BATCH, collate_fn=masked, **more))


NOISY = {
    "torch": lambda more: DataLoader(Noisy(), batch_size=BATCH, shuffle=True, collate_fn=masked, **more),
    "own kind": lambda more: Own(Noisy(), batch_size=BATCH, shuffle=True, collate_fn=masked, **more),
    "weighted": weighted,
    "accelerate": with_accelerate,
    "stateful": lambda more: torchdata.StatefulDataLoader(
        Noisy(), batch_size=BATCH, shuffle=True, collate_fn=masked, **more
    ),
}


def augmented(loaders, stops, world=SECOND_OF_TWO):
    """The batches of a training that is resumed at each of `stops`, with another loader each time, and what is said of it."""
    seen, saved, drawn = [], None, None
    for make, stop in zip(loaders, stops, strict=True):
        rng.seed_host(7 + len(seen))  # what a script does before must not matter
        feed = data.feed(make(), world, 3, saved)
        position = Position(**saved.position.dump()) if saved else Position()
        rng.put_back(drawn or rng.collect())
        seen += [tuple(map(tuple, batch)) for batch in through(feed, position, stop - len(seen))]
        snapshot = state.Snapshot(world.rank, world.size)
        kept = snapshot.encode_own(feed.state(), "loader")
        tensors = {piece.box.key: piece.local for piece in snapshot.pieces}
        saved = Saved(position, world.size, state.decode(kept, tensors.__getitem__))
        drawn = rng.collect()
    return seen, feed.note


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("kind", NOISY)
def test_what_is_drawn_at_random_for_a_batch_is_the_same_after_a_resume(kind, workers):
    """
    By torch, random and numpy, in the dataset and in collate_fn: in an epoch's middle, twice in one and in the next,
    whatever workers had fetched ahead. And no two batches are given the same numbers, in no epoch.
    """

    def make():
        return NOISY[kind](WORKERS[workers])

    whole, _ = augmented([make], [EPOCH + 4])
    parts, note = augmented([make] * 4, [2, EPOCH - 1, EPOCH + 2, EPOCH + 4])
    numbers = [number for batch in whole for sample in batch for number in sample[1:]]

    assert len(numbers) == len(set(numbers))
    if (kind, workers) == ("accelerate", "no workers"):  # it fetches one batch ahead, in this process
        assert "random numbers for the first batch are drawn anew" in note
        return
    assert whole == parts
    assert "anew" not in note


@pytest.mark.parametrize("kind", ["torch", "own kind", "weighted"])
def test_what_workers_draw_does_not_depend_on_how_many_they_are(kind):
    """
    Nor on how much they fetch ahead, whether they stay, and what the script's own function does in them when they start.
    """

    def make(**more):
        return lambda: NOISY[kind](more)

    def ours(_):
        assert isinstance(get_worker_info().dataset, Noisy)
        torch.manual_seed(0)

    whole, _ = augmented([make(num_workers=2)], [EPOCH + 2])
    others = [
        make(num_workers=2, prefetch_factor=1),
        make(num_workers=1, persistent_workers=True, worker_init_fn=ours),
    ]

    assert whole == augmented(others, [3, EPOCH + 2])[0]


@pytest.mark.parametrize("kind", ["torch", "weighted"])
def test_ranks_draw_different_numbers_in_their_workers(kind):
    """
    Two ranks that augment alike would learn less than they seem to.
    """
    batches = [augmented([lambda: NOISY[kind]({"num_workers": 1})], [2], World(rank, 2))[0] for rank in range(2)]

    assert 2 * 2 * BATCH == len({sample[1] for rank in batches for batch in rank for sample in batch})


def test_a_stream_without_workers_draws_the_same_numbers_after_a_resume():
    """
    The batches that are skipped draw, too: from others than the script's.
    """

    def make():
        return DataLoader(NoisyStream(), batch_size=BATCH, collate_fn=masked)

    assert augmented([make], [EPOCH + 2])[0] == augmented([make] * 3, [1, 3, EPOCH + 2])[0]


@pytest.mark.parametrize(
    ("loader", "said"),
    [
        (lambda: DataLoader(NoisyStream(), num_workers=1), False),
        (lambda: DataLoader(NoisyStream(), num_workers=1, persistent_workers=True), True),
        (lambda: torchdata.StatefulDataLoader(NoisyStream(), num_workers=1), True),
        (lambda: torchdata.StatefulDataLoader(NoisyStream()), False),
    ],
    ids=["again", "persistent", "stateful", "no workers"],
)
def test_where_workers_draw_other_numbers_after_a_resume_the_report_says_so(loader, said):
    """
    Those that find their samples by themselves have no batches with seeds.
    """
    assert said == ("begin anew" in data.feed(loader(), World(0, 1), 0, None).note)


def test_batches_come_in_order_whatever_was_asked_for():
    """
    A position counts what came before it: out of order, a resume would repeat some samples and skip others.
    """
    torch_knows = {"in_order": False} if hasattr(DataLoader(numbers()), "in_order") else {}
    feed = data.feed(DataLoader(numbers(), num_workers=1, **torch_knows), World(0, 1), 0, None)

    assert getattr(feed._loader, "in_order", True)
    assert bool(torch_knows) == ("in order" in feed.note)


@pytest.mark.parametrize("kind", ["torch", "stateful"])
def test_a_whole_training_augments_the_same_after_a_resume(tmp_path, kind):
    """
    Also where the checkpoint is asked for before the first batch, and loaders begin with that.
    """

    def make():
        return NOISY[kind](WORKERS["workers"])

    assert trained(tmp_path / "whole", make, [EPOCH + 3]) == trained(
        tmp_path / "parts", make, [3, EPOCH + 1, EPOCH + 3]
    )


@pytest.mark.parametrize(
    ("kind", "first", "said"),
    [
        ("stateful", [6, 7], "random numbers, the loader's own state\n"),
        (
            "torch",
            [0, 1],
            "not restored: data position: the loop was the script's own, which finds its place by itself\n",
        ),
    ],
)
def test_in_a_loop_of_the_scripts_own_the_report_says_who_finds_the_place(tmp_path, capfd, kind, first, said):
    """
    A loader with a state of its own goes on where it was; any other begins anew, and the script has to skip.
    """

    def begin():
        make = {"stateful": torchdata.StatefulDataLoader, "torch": DataLoader}[kind]
        loader, model = make(numbers(), batch_size=2), nn.Linear(1, 1)
        return loader, Checkpointer(model, torch.optim.SGD(model.parameters(), 0.1), loader=loader, dir=tmp_path)

    loader, ckpt = begin()
    for _ in itertools.islice(loader, 3):
        ckpt.step()
    ckpt.finish()
    capfd.readouterr()
    loader, ckpt = begin()

    assert first == next(iter(loader))[0].tolist()
    assert said in capfd.readouterr().err
    ckpt.finish()
