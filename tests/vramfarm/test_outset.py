"""What trains is what is saved: optimizers that were made anew or forgotten, and weights that came later, are told."""

import copy
import time
import weakref

import pytest
import torch
from torch import nn

from vramfarm import Checkpointer
from vramfarm.outset import _CURE
from vramfarm.stepping import _STRANGER

PATIENCE_S = 60


class Run:
    """A loop of one's own, with two layers of which an optimizer trains the second."""

    def __init__(self, tmp_path, capsys, **more):
        self.model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        self.optimizer = torch.optim.SGD(self.model[1].parameters(), 1e-3)
        self.others = []
        self.ckpt = Checkpointer(self.model, self.optimizer, dir=tmp_path / "checkpoints", **more)
        self._capsys = capsys
        capsys.readouterr()

    def train(self, steps=6):
        for _ in range(steps):
            self.model(torch.ones(1, 2)).sum().backward()
            for one in (self.optimizer, *self.others):
                one.step()
            self.ckpt.step()
        return self

    def settle(self):
        """Train until nobody is listened to."""
        deadline = time.monotonic() + PATIENCE_S
        while self.ckpt._stepping.is_listening:
            assert time.monotonic() < deadline
            self.train(1)
            time.sleep(0.001)
        return self.train(2)

    def save(self):
        before = self.ckpt.saved_step
        self.ckpt.save()
        while not self.ckpt.wait(PATIENCE_S) or self.ckpt.saved_step == before:
            self.train(1)
        return self.settle()

    def told(self):
        """What was said but for saves and their memory."""
        lines = [line.removeprefix("vramfarm: ") for line in self._capsys.readouterr().err.splitlines()]
        return [line for line in lines if not line.startswith(("saved step", "staging:"))]


def replace_optimizer(run):
    run.optimizer = torch.optim.SGD(run.model[1].parameters(), 1e-3)


def forget_one(run):
    run.others.append(torch.optim.Adam(run.model[0].parameters()))


def forget_all_of_it(run):
    run.others.append(torch.optim.Adam([run.model[0].weight, nn.Parameter(torch.ones(3))]))
    run.others.append(torch.optim.Adam(list(nn.Linear(3, 1).parameters())))


STRANGERS = {
    replace_optimizer: [("SGD", "model.1.weight and 1 more")],
    forget_one: [("Adam", "model.0.weight and 1 more")],
    forget_all_of_it: [
        ("Adam", "model.0.weight and 1 more"),
        ("Adam", "a parameter of shape (1, 3) in no module that was given and 1 more"),
    ],
}


@pytest.mark.parametrize("when", ["at the start", "later"])
@pytest.mark.parametrize("change", STRANGERS, ids=lambda one: one.__name__)
def test_an_optimizer_that_trains_and_is_not_saved_is_told(tmp_path, capsys, change, when):
    """
    In the first steps, or after the next save; once.
    """
    run = Run(tmp_path, capsys)
    early = [] if when == "at the start" else run.settle().told()
    change(run)
    if when == "later":
        run.save()

    told = run.settle().told()
    again = run.save().told()

    assert [_STRANGER.format(kind=kind, what=what) for kind, what in STRANGERS[change]] == told
    assert [] == early + again


def average(run):
    """Weights that change by other means than an optimizer."""
    run.others.append(Averaging(run.model))


class Averaging:
    def __init__(self, model):
        self.model, self.own = model, copy.deepcopy(model)

    def step(self):
        with torch.no_grad():
            for own, one in zip(self.own.parameters(), self.model.parameters(), strict=True):
                own.lerp_(one, 0.5)


class Ahead(torch.optim.Optimizer):
    """Has another one do the work."""

    def __init__(self, inner):
        self.inner = inner
        super().__init__(inner.param_groups, {})

    def step(self):
        self.inner.step()


class Holder:
    """Saves an optimizer by itself."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def state_dict(self):
        return self.optimizer.state_dict()

    def load_state_dict(self, state):
        self.optimizer.load_state_dict(state)


def test_what_is_saved_is_no_stranger(tmp_path, capsys):
    """
    Averages, an optimizer in another one, in an object, or given to another Checkpointer; and nobody is listened to for longer than that takes.
    """
    run, other = Run(tmp_path, capsys), Run(tmp_path / "other", capsys)
    model = nn.Linear(2, 2)
    inner, held = (torch.optim.SGD([one], 1e-3) for one in model.parameters())
    wrapped = Ahead(inner)
    run.ckpt = Checkpointer(model, wrapped, dir=tmp_path / "third", holder=Holder(held))
    run.told()
    average(run)
    run.others += [other.optimizer, wrapped, held]

    told = run.settle().save().told()

    assert [] == told


def grow(run):
    run.model.append(nn.Linear(2, 2))
    run.optimizer.add_param_group({"params": run.model[2].parameters()})


def replace(run):
    run.model[1] = nn.Linear(2, 2)


def thaw(run):
    run.optimizer.add_param_group({"params": [run.model[0].weight]})


def shrink(run):
    del run.model[1]


def train_a_stray(run):
    run.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})


CHANGES = {
    grow: f"after Checkpointer was made model.2.weight and 1 more came, optimizer was given 2.bias and 1 more: {_CURE}",
    replace: f"after Checkpointer was made model.1.weight and 1 more became another: {_CURE}; no optimizer that was given trains model.1.weight and 1 more",
    thaw: f"after Checkpointer was made optimizer was given 0.weight: {_CURE}",
    shrink: f"after Checkpointer was made model.1.weight and 1 more went: {_CURE}",
    train_a_stray: "optimizer: parameter 0 of group 1, of shape (3,), is in no module given to Checkpointer, so its value would not be saved: "
    "give the module that holds it by a name, Checkpointer(..., head=head), or put it into one",
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda one: one.__name__)
def test_what_a_restart_would_not_find_again_is_told_at_the_next_save(tmp_path, capsys, change):
    """
    Once, with what to do; it is saved all the same.
    """
    run = Run(tmp_path, capsys).settle().save()
    before = run.told()
    change(run)

    told = run.save().told()
    again = run.save().told()

    assert ([], [CHANGES[change]], []) == (before, told, again)


def test_what_has_ended_is_let_go_of_at_once(tmp_path):
    """
    Not when Python next looks for cycles: a Checkpointer holds the loader, and that its workers.
    """
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    ckpt = Checkpointer(model, optimizer, dir=tmp_path)
    for _ in ckpt.steps([torch.ones(2)] * 3):
        optimizer.step()
    left = weakref.ref(ckpt)
    del ckpt

    assert left() is None
