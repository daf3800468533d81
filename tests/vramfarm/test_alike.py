"""Ranks that are all given the same data: noticed once, and only where it is so."""

import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, SubsetRandomSampler, TensorDataset, WeightedRandomSampler

from vramfarm import alike, data
from vramfarm.epochs import Position, World
from vramfarm.protocol import ControlPage
from vramfarm.seat import Seat


def watches(tmp_path, number):
    page = ControlPage.create(tmp_path / "page", num_ranks=number)
    return [alike.Watch(Seat(page, rank)) for rank in range(number)]


def one(number):
    return {"ids": torch.tensor([number, 7]), "text": ["a"], "mask": (torch.ones(2, dtype=torch.bfloat16),)}


@pytest.mark.parametrize(
    ("batches", "expected"),
    [
        pytest.param([(1, 2), (1, 2)], True, id="the same"),
        pytest.param([(1, 2), (3, 4)], False, id="different"),
        pytest.param([(1, 2), (1, 3)], False, id="the first by chance"),
        pytest.param([(5, 5), (5, 5)], False, id="always the same: no data at all"),
        pytest.param([(1, 2)], False, id="one rank"),
    ],
)
def test_ranks_that_are_given_the_same_are_noticed(tmp_path, batches, expected):
    """
    Told from two batches of each, once all ranks have them.
    """
    ranks = watches(tmp_path, len(batches))

    for number in range(2):
        for rank, mine in zip(ranks, batches, strict=True):
            assert ranks[0].is_same() is None
            rank.see(one(mine[number]))
    ranks[0].see(one(99))

    assert expected is ranks[0].is_same()


@pytest.mark.parametrize("changed", [None, 0, 9, 19])
def test_weights_that_differ_from_rank_to_rank_are_named(tmp_path, changed):
    """
    The first, the last, and some between them are compared: of those that are trained. Buffers may differ.
    """
    page = ControlPage.create(tmp_path / "page", num_ranks=2)
    for rank in range(2):
        model = nn.Sequential(*(nn.BatchNorm1d(3) for _ in range(10)))
        weights = list(model.parameters())
        weights[1].requires_grad_(False)
        model[0].running_mean += rank
        with torch.no_grad():
            weights[1].add_(rank)
            if changed is not None:
                weights[changed].add_(rank * 1e-6)
        optimizer = torch.optim.SGD([one for one in weights if one.requires_grad], lr=0.1)
        whole = alike.whole_weights({"model": model}, [("optimizer", optimizer)])
        alike.tell_weights(Seat(page, rank), whole)

    names = {None: "", 0: "model.0.weight", 9: "", 19: "model.9.bias"}
    assert names[changed] == alike.differing(page, whole)
    assert 4 == len(whole)


def test_any_batch_has_a_number():
    """
    Whatever its tensors are, and where there are none.
    """
    batches = [
        None,
        "text",
        [],
        torch.zeros(0),
        torch.eye(3).to_sparse(),
        torch.ones(2, device="meta"),
        torch.ones(4, 4).t(),
        torch.ones(3, dtype=torch.complex64).conj(),
    ]

    assert all(alike.digest(batch) > 0 for batch in batches)
    assert alike.digest(torch.zeros(3)) != alike.digest(torch.ones(3))


WITHOUT_NUMPY = """
import sys
sys.modules["numpy"] = None
from pathlib import Path
import torch
from vramfarm import alike, unpickling
from vramfarm.protocol import ControlPage
from vramfarm.seat import Seat

page = ControlPage.create(Path(sys.argv[1]), num_ranks=2)
weights = [("first", torch.ones(3)), ("second", torch.ones(2, 2, dtype=torch.bfloat16))]
for rank in range(2):
    alike.tell_weights(Seat(page, rank), weights)
    weights[1][1].t()[0, 1] += 1
unpickling.refuse("state", {"rng": torch.zeros(4, dtype=torch.uint8)})
assert alike.digest([torch.ones(2), torch.tensor(7)]) != alike.digest([torch.ones(2), torch.tensor(8)])
print(alike.differing(page, weights))
"""


def test_what_several_ranks_say_of_themselves_needs_no_numpy(tmp_path):
    """
    torch does not bring it, and the library needs torch alone: batches, weights and what is looked through for pickles.
    """
    words = [sys.executable, "-W", "ignore", "-c", WITHOUT_NUMPY, str(tmp_path / "page")]

    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)

    assert ("second\n", "", 0) == (done.stdout, done.stderr, done.returncode)


SAMPLERS = {
    "with replacement": lambda dataset: RandomSampler(dataset, replacement=True),
    "weighted": lambda dataset: WeightedRandomSampler([1.0] * len(dataset), len(dataset)),
    "subset": lambda dataset: SubsetRandomSampler(range(len(dataset))),
}


@pytest.mark.parametrize("kind", SAMPLERS)
def test_a_sampler_that_knows_no_ranks_draws_other_samples_on_each(kind):
    """
    Each rank has random numbers of its own for it, the same again when it resumes.
    """
    dataset = TensorDataset(torch.arange(60))

    def drawn(rank):
        loader = DataLoader(dataset, batch_size=4, sampler=SAMPLERS[kind](dataset))
        return [batch.tolist() for (batch,) in data.feed(loader, World(rank, 2), 0, None).rest_of_epoch(Position())]

    assert drawn(0) == drawn(0)
    assert drawn(0) != drawn(1)


def test_workers_of_two_ranks_draw_other_numbers():
    """
    Else each card would see its samples changed in the same random way.
    """

    def seeds(rank):
        loader = DataLoader(Drawing(), batch_size=4, shuffle=True, num_workers=1)
        return {
            int(seed)
            for batch in data.feed(loader, World(rank, 2), 0, None).rest_of_epoch(Position())
            for seed in batch
        }

    assert seeds(0) == seeds(0)
    assert not seeds(0) & seeds(1)


class Drawing(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.initial_seed()
