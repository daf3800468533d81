"""Loops that are left and taken up again, and several loaders in one run: no sample is lost, and none is learnt twice."""

import random
import re

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, Sampler, TensorDataset, WeightedRandomSampler

from vramfarm import Checkpointer, folder
from vramfarm.epochs import World
from vramfarm.typed import StateError


class Counting:
    """Knows by itself where it is, and draws another order each time that it is begun anew."""

    def __init__(self, length):
        self.length, self.at, self.begun, self.restored = length, 0, 0, None
        self.asked = 0

    def __iter__(self):
        self.at, self.begun = self.restored or (0, self.begun + 1)
        self.restored = None
        while self.at < self.length:
            self.at += 1
            yield torch.tensor([[(self.at * 7 + self.begun) % 100.0]])

    def state_dict(self):
        self.asked += 1
        return {"at": self.at, "begun": self.begun}

    def load_state_dict(self, state):
        self.restored = (state["at"], state["begun"])


def batches(numbers):
    return [torch.tensor([[float(number)]]) for number in numbers]


def loader_of(first, length):
    return DataLoader(torch.arange(float(first), first + length).reshape(-1, 1), batch_size=1)


KINDS = {
    "torch": lambda: loader_of(0, 10),
    "list": lambda: batches(range(10)),
    "iterator": lambda: iter(batches(range(10))),
    "its own state": lambda: Counting(10),
}


class Run:
    """A training whose weight tells what it learnt; `used` are the samples of each step."""

    def __init__(self, path, loader=None, optimizers=None, **more):
        self.model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(self.model.weight)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 1e-3)
        self.ckpt = Checkpointer(self.model, optimizers or self.optimizer, loader=loader, dir=path, **more)
        self.used = []

    def go(self, loader=None, leave_at=None, **limits):
        """One loop, left in the body of its batch `leave_at` when the gradients are there."""
        pending = []
        for number, (_, batch) in enumerate(self.ckpt.steps(loader, finish=False, **limits)):
            self.model(batch).sum().backward()
            pending.append(int(batch))
            if number == leave_at:
                return self
            if self.ckpt.last_micro_batch:
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.used.append(pending)
                pending = []
        return self

    def result(self):
        self.ckpt.finish()
        return self.used, self.model.weight.item()


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_a_loop_that_is_left_in_a_step_and_taken_up_again_learns_what_one_loop_does(tmp_path, kind, accumulate):
    """
    In the first step, in the middle of one and just before its optimizer: its samples come again, without their gradients of before.
    """
    whole = Run(tmp_path / "whole", KINDS[kind]()).go(epochs=1, accumulate=accumulate)
    parts = Run(tmp_path / "parts", KINDS[kind]())
    for leave_at in (0, 5, 1, 3, None):
        parts.go(epochs=1, accumulate=accumulate, leave_at=leave_at)

    assert whole.result() == parts.result()


@pytest.mark.parametrize("kind", ["torch", "its own state"])
def test_a_step_over_the_end_of_an_epoch_that_was_left_comes_again(tmp_path, kind):
    """
    With the batches of both epochs, in the same process and after a resume.
    """
    loaders = {"torch": lambda: loader_of(0, 5), "its own state": lambda: Counting(5)}
    whole = Run(tmp_path / "whole", loaders[kind]()).go(epochs=3, accumulate=4)
    parts = Run(tmp_path / "parts", loaders[kind]())
    for leave_at in (6, 1, 2, None):
        parts.go(epochs=3, accumulate=4, leave_at=leave_at)
    used = []
    for leave_at in (6, 2, None):
        resumed = Run(tmp_path / "resumed", loaders[kind]()).go(epochs=3, accumulate=4, leave_at=leave_at)
        found = resumed.result()
        used += found[0]

    expected = whole.result()
    assert expected == parts.result()
    assert expected == (used, found[1])


@pytest.mark.parametrize("kind", ["torch", "its own state"])
def test_a_step_that_was_left_comes_again_after_a_resume(tmp_path, kind):
    """
    Also where the loader itself says where it is: it has gone further than the steps.
    """
    whole = Run(tmp_path / "whole", KINDS[kind]()).go(epochs=1, accumulate=2)
    used = []
    for leave_at in (3, 1, None):
        part = Run(tmp_path / "parts", KINDS[kind]()).go(epochs=1, accumulate=2, leave_at=leave_at)
        found = part.result()
        used += found[0]

    assert (used, found[1]) == whole.result()


def test_a_loader_is_asked_for_its_state_in_saves_only(tmp_path):
    """
    It may be large, and a step without a save costs nothing.
    """
    loader = Counting(50)
    run = Run(tmp_path, loader).go(epochs=1)
    asked = loader.asked
    run.result()

    assert asked <= 2  # before the first save, for the size of its memory
    assert loader.asked > asked


def test_batches_of_a_step_that_was_left_and_cannot_be_saved_are_told(tmp_path, capsys):
    """
    The save is made all the same.
    """

    class Own:
        def __init__(self, tensor):
            self.tensor = tensor

    class Wrapping(Counting):
        def __iter__(self):
            yield from map(Own, super().__iter__())

    run = Run(tmp_path, Wrapping(9))
    for number, (_, batch) in enumerate(run.ckpt.steps(finish=False)):
        if number == 3:
            break
        run.model(batch.tensor).sum().backward()
        run.optimizer.step()
    run.ckpt.finish()

    assert "left in the middle of step 4, whose batches cannot be saved" in capsys.readouterr().err
    assert 3 == folder.committed(tmp_path)[0].manifest.step


@pytest.mark.parametrize("stops", [(99,), (3, 99), (5, 99), (8, 9, 99)], ids=str)
def test_each_loader_has_a_place_of_its_own(tmp_path, stops):
    """
    A curriculum, the first data again at its end: each goes on where it was, also in a resumed run.
    """
    used = []
    for stop in stops:
        first, second = loader_of(0, 8), loader_of(100, 20)
        part = Run(tmp_path, first)
        part.go(max_steps=min(5, stop)).go(second, max_steps=min(9, stop)).go(max_steps=min(11, stop))
        used += part.result()[0]

    assert [[n] for n in (0, 1, 2, 3, 4, 100, 101, 102, 103, 5, 6)] == used


@pytest.mark.parametrize("kind", ["iterator", "its own state"])
@pytest.mark.parametrize("stops", [(99,), (3, 99), (5, 99), (7, 99), (4, 6, 8, 99)], ids=str)
def test_loaders_in_turns_keep_what_they_know_by_themselves(tmp_path, kind, stops):
    """
    While another one is gone through, and in the checkpoint: begun anew they would draw other orders, or have nothing left.
    """
    used = []
    for stop in stops:
        first, second = KINDS[kind](), Counting(20)
        part = Run(tmp_path, first)
        for loader, max_steps in ((first, 3), (second, 6), (first, 7), (second, 9)):
            part.go(loader, max_steps=min(max_steps, stop))
        used += part.result()[0]
    own = [0, 1, 2, 3] if kind == "iterator" else [8, 15, 22, 29]

    assert [[n] for n in (*own[:3], 8, 15, 22, own[3], 29, 36)] == used


def test_a_loader_that_was_not_seen_before_begins_at_its_beginning(tmp_path, capsys):
    """
    However far others are, its passes are its own; that it is new is said. And one more pass is never none.
    """
    run = Run(tmp_path, loader_of(0, 4))
    run.go(max_steps=6).go().go(loader_of(10, 2)).go(loader_of(20, 2), epochs=1)

    assert [0, 1, 2, 3] * 2 + [10, 11, 20, 21] == [n for step in run.result()[0] for n in step]
    assert 2 == capsys.readouterr().err.count("has not seen before")


def test_passes_without_a_limit_are_counted_from_the_runs_beginning(tmp_path):
    """
    Those that are behind a resumed run are gone through in no time, however many.
    """
    Run(tmp_path, loader_of(0, 3)).go(max_steps=7).result()
    run = Run(tmp_path, loader_of(0, 3))
    ends = []
    for _ in range(4):
        run.go()
        ends.append(run.ckpt.start_step)
    run.result()

    assert [7, 7, 9, 12] == ends


def test_a_loader_that_is_made_anew_for_each_epoch_is_the_same_one(tmp_path, capsys):
    """
    As long as its dataset is: an epoch is one pass, not one more each time.
    """
    data = TensorDataset(torch.arange(4.0).reshape(-1, 1))
    run = Run(tmp_path)
    for epoch in range(3):
        run.go(DataLoader(data, batch_size=1, collate_fn=lambda samples: samples[0][0]), epochs=epoch + 1)

    assert 12 == len(run.result()[0])
    assert "has not seen before" not in capsys.readouterr().err


def test_what_is_left_of_an_accumulation_is_not_learnt_with_another_loader(tmp_path):
    """
    It is dropped, gradients and all, and comes again where its loader does.
    """
    first, second = loader_of(0, 3), loader_of(10, 2)
    run = Run(tmp_path, first)
    run.go(epochs=1, accumulate=2).go(second, epochs=1, accumulate=2).go(epochs=2, accumulate=2)

    assert ([[0, 1], [10, 11], [2, 0], [1, 2]], pytest.approx(-0.027)) == run.result()


def test_loaders_in_another_order_are_refused(tmp_path):
    """
    Each would go on where the other was.
    """
    first, second = loader_of(0, 8), loader_of(100, 20)
    Run(tmp_path).go(first, max_steps=5).go(second, max_steps=9).result()

    with pytest.raises(
        StateError, match="loader 1 of this run has 20 samples, and had 8 when the checkpoint was saved"
    ):
        Run(tmp_path).go(second, max_steps=20)


def test_a_loader_that_waits_while_the_number_of_ranks_changes_goes_on_where_it_was(tmp_path):
    """
    It was gone through on two ranks, is not touched by an attempt on one, and comes back in a third: eight samples are behind it.
    """
    first, second = batches(range(12)), batches(range(20, 32))
    run = Run(tmp_path)
    object.__setattr__(run.ckpt._training, "data_world", World(0, 2))  # as if there were another rank
    run.go(first, max_steps=4).go(second, max_steps=6).ckpt.finish()
    Run(tmp_path).go(first, max_steps=4).go(second, max_steps=8).ckpt.finish()

    run = Run(tmp_path).go(first, max_steps=10)
    run.ckpt.finish()

    assert [[8], [9]] == run.used


def test_a_loop_in_the_body_of_another_is_refused(tmp_path):
    """
    Both would count each other's steps.
    """
    run = Run(tmp_path, loader_of(0, 4))
    for _ in run.ckpt.steps(finish=False, max_steps=1):
        with pytest.raises(RuntimeError, match="another steps\\(\\) loop has not ended"):
            next(run.ckpt.steps())
        run.optimizer.step()
    run.ckpt.finish()


@pytest.mark.parametrize("updated", [True, False])
def test_a_step_that_a_scaler_has_left_out_is_no_missing_one(tmp_path, updated):
    """
    One of two optimizers had an infinite gradient in the very step that is left: the step is whole, before the scaler's update and after it.
    """
    models = nn.ModuleList(nn.Linear(1, 1) for _ in range(2))
    optimizers = [torch.optim.Adam(model.parameters()) for model in models]
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    ckpt = Checkpointer(models, optimizers, dir=tmp_path, scaler=scaler)
    for step, batch in ckpt.steps(batches(range(9))):
        for number, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            loss = model(batch).sum() * (float("inf") if (step, number) == (4, 0) else 1)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
        if updated or step != 4:
            scaler.update()
        if step == 4:
            break
    ckpt.finish()

    assert 5 == folder.committed(tmp_path)[0].manifest.step


@pytest.mark.parametrize(("left", "steps"), [("before it", 4), ("before the update", 5), ("after the update", 5)])
def test_a_step_that_a_scaler_has_left_out_is_made(tmp_path, left, steps):
    """
    A loop that is left in the body of such a step has made it, with all that the script changed in it; one that is left before has not.
    """
    model = nn.Linear(1, 1)
    optimizer = torch.optim.Adam(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    ckpt = Checkpointer(model, optimizer, dir=tmp_path, scaler=scaler)
    for step, batch in ckpt.steps(batches(range(9))):
        if (step, left) == (4, "before it"):
            break
        optimizer.zero_grad()
        scaler.scale(model(batch).sum() * (float("inf") if step in {3, 4} else 1)).backward()
        scaler.step(optimizer)
        if (step, left) == (4, "before the update"):
            break
        scaler.update()
        if step == 4:
            break
    ckpt.finish()

    assert steps == folder.committed(tmp_path)[0].manifest.step


class Plain:
    """An optimizer of the script's own, which tells nobody when it steps."""

    def __init__(self, parameters):
        self.param_groups, self.state = [{"params": list(parameters), "lr": 1.0}], {}

    def state_dict(self):
        return {"state": {}, "param_groups": [{"lr": 1.0, "params": [0]}]}

    def load_state_dict(self, state):
        pass

    def step(self):
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.sub_(parameter.grad)


def test_an_optimizer_that_tells_nobody_has_stepped_if_its_weights_changed(tmp_path):
    """
    The batch of a break after it is learnt, and does not come again.
    """
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = Plain(model.parameters())
    ckpt = Checkpointer(model, optimizer, dir=tmp_path)
    for step, batch in ckpt.steps(batches([1] * 9)):
        model.weight.grad = None
        model(batch).sum().backward()
        optimizer.step()
        if step == 4:
            break
    ckpt.finish()

    assert (5, -5.0) == (folder.committed(tmp_path)[0].manifest.step, model.weight.item())


def shuffled(length=100, batch_size=4, *, shuffle=True, sampler=None, **more):
    data = TensorDataset(torch.arange(float(length))[:, None])
    order = {"sampler": sampler(data)} if sampler else {"shuffle": shuffle}
    return DataLoader(data, batch_size=batch_size, **order, collate_fn=lambda rows: rows[0][0], **more)


def distributed(seed):
    return shuffled(sampler=lambda data: DistributedSampler(data, num_replicas=1, rank=0, seed=seed))


@pytest.mark.parametrize(
    ("loader", "seed", "said"),
    [
        (shuffled(120), 1, "100 samples when .*, 48 samples into epoch 0, and 120 now: .*Subset"),
        (shuffled(90), 1, "100 samples when .* and 90 now: .* give it them all"),
        (shuffled(shuffle=False), 1, "shuffled when .* and in order now: .* give it shuffled"),
        (shuffled(), 2, "seed=1 when .* and seed=2 now: .* give seed=1"),
        (distributed(5), 1, "a sampler with seed=0 when .* and seed=5 now: .* give the sampler seed=0"),
    ],
    ids=["longer", "shorter", "in order", "seed", "its sampler's seed"],
)
def test_another_order_in_the_middle_of_an_epoch_is_refused(tmp_path, loader, seed, said):
    """
    Samples would be repeated and left out, and nothing would fail. Also where the loader is given to steps() only.
    """
    Run(tmp_path, shuffled(), seed=1).go(max_steps=12).result()

    with pytest.raises(StateError, match=said):
        Run(tmp_path, loader, seed=seed)
    with pytest.raises(StateError, match=said):
        Run(tmp_path, seed=seed).go(loader, max_steps=24)


def test_another_order_is_welcome_from_the_next_epoch_on(tmp_path):
    """
    The data may have grown by then; another batch size is welcome at any time, and loaders whose order is not ours are left alone.
    """
    run = Run(tmp_path, shuffled(), seed=1).go(max_steps=25)
    run.result()
    more = Run(tmp_path, shuffled(120), seed=2).go(max_steps=35)
    more.result()
    rest = Run(tmp_path, shuffled(120, 8), seed=2).go(max_steps=45)
    rest.result()
    Run(tmp_path, batches(range(40)), seed=3)

    assert (25, 10, 10) == (len(run.used), len(more.used), len(rest.used))


class Turned(Sampler):
    """An order of a script's own."""

    def __init__(self, data, seed=0, *, shuffle=True):
        self.data, self.seed, self.shuffle = data, seed, shuffle

    def __len__(self):
        return len(self.data)

    def __iter__(self):
        yield from random.Random(self.seed).sample(range(len(self)), len(self)) if self.shuffle else range(len(self))


def turned(length=100, **more):
    return shuffled(length, sampler=lambda data: Turned(data, **more))


def weighted(_=None):
    return shuffled(sampler=lambda data: WeightedRandomSampler([1.0] * len(data), 100))


@pytest.mark.parametrize(
    ("make", "seed", "other", "said"),
    [
        (turned, 1, turned(), ""),
        (turned, 2, turned(), ""),
        (turned, 1, turned(seed=7), "a sampler with seed=0 when .* and seed=7 now"),
        (turned, 1, turned(shuffle=False), "shuffled when .* and in order now"),
        (turned, 1, turned(120), "100 samples when .* and 120 now"),
        (weighted, 1, weighted(), ""),
        (weighted, 2, weighted(), "seed=1 when .* and seed=2 now"),
    ],
    ids=["the same", "of no use to it", "seed", "in order", "longer", "drawn", "drawn otherwise"],
)
def test_another_order_of_a_scripts_own_is_told(tmp_path, capsys, *, make, seed, other, said):
    """
    In the middle of an epoch: what it is made from is not ours to judge, so the run goes on.
    """
    Run(tmp_path, make(), seed=1).go(max_steps=12).result()
    capsys.readouterr()

    Run(tmp_path, other, seed=seed)
    told = [line for line in capsys.readouterr().err.splitlines() if "the loader:" in line]

    assert bool(said) == len(told)
    assert all(re.search(said, line) for line in told)


def test_batches_of_another_size_are_skipped_by_samples(tmp_path):
    """
    Also where the order is the script's own.
    """
    data = TensorDataset(torch.arange(48.0)[:, None])
    whole = [int(x) for _, batch in Run(tmp_path / "whole").ckpt.steps(own(data, 8), epochs=1) for x in batch[0]]
    for path, size, steps in ((tmp_path, 8, 2), (tmp_path, 4, 10)):
        seen = [int(x) for _, batch in Run(path).ckpt.steps(own(data, size), max_steps=steps) for x in batch[0]]

    assert whole[16:] == seen


def own(data, batch_size):
    return DataLoader(data, batch_size=batch_size, sampler=Turned(data))
