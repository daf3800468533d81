"""The library in one process: what is saved comes back, and what does not fit is said."""

import fcntl
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from vramfarm import Checkpointer, arguments, data, folder, protocol, seat
from vramfarm.arguments import parse_scalar
from vramfarm.epochs import World
from vramfarm.loading import Reader
from vramfarm.orders import Complaint
from vramfarm.protocol import ControlPage, Env, Slot
from vramfarm.run import ResumeError, await_all, expect_no_other_writer
from vramfarm.training import NO_OPTIMIZER
from vramfarm.typed import StateError


def train(tmp_path, steps, *, model=None, optimizer_of=None, name="checkpoints", hook=None, **more):
    """Train a little and end; return what was trained."""
    torch.manual_seed(0)
    model = model or nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))
    optimizer = (optimizer_of or (lambda m: torch.optim.AdamW(m.parameters(), lr=0.01)))(model)
    loader = DataLoader(TensorDataset(torch.arange(40).float().reshape(10, 4).sin()), batch_size=2, shuffle=True)
    ckpt = Checkpointer(model, optimizer, loader=loader, dir=tmp_path / name, **more)
    several = optimizer if isinstance(optimizer, list) else [optimizer]
    for step, (batch,) in ckpt.steps(loader, max_steps=steps):
        model(batch).square().mean().backward()
        for one in several:
            one.step()
            one.zero_grad()
        if hook:
            hook(step, ckpt)
    return model, optimizer, ckpt


def same(one, other):
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


def newest(tmp_path, name="checkpoints"):
    return folder.committed(tmp_path / name)[0]


def test_a_resumed_run_ends_as_one_that_was_never_disturbed(tmp_path, capsys):
    """
    Weights, optimizer, scheduler, average and random numbers go on bit by bit.
    """

    def run(name, *stops):
        for stop in stops:
            torch.manual_seed(1)
            model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))
            average = torch.optim.swa_utils.AveragedModel(model)
            optimizer = torch.optim.Adam(
                [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.1}], lr=0.01
            )
            scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 7])
            loader = DataLoader(
                TensorDataset(torch.arange(40).float().reshape(10, 4).sin()), batch_size=3, shuffle=True
            )
            ckpt = Checkpointer(model, optimizer, scheduler=scheduler, ema=average, loader=loader, dir=tmp_path / name)
            for _, (batch,) in ckpt.steps(max_steps=stop, accumulate=2):
                model(batch).square().mean().backward()
                if ckpt.last_micro_batch:
                    optimizer.step()
                    optimizer.zero_grad()
                    scheduler.step()
                    average.update_parameters(model)
        return [thing.state_dict() for thing in (model, average, optimizer, scheduler)]

    assert same(run("whole", 11), run("parts", 2, 5, 11))
    said = capsys.readouterr().err
    assert (
        "restored: model (4 tensors), ema (5 tensors), optimizer, scheduler, random numbers, data position (epoch 2"
        in said
    )


def test_tensors_of_ours_are_where_we_want_them(tmp_path):
    """
    A script may have said that new tensors are on its card; random numbers are put back from the processor's memory all the same.
    """
    _, _, ckpt = train(tmp_path, 2)
    like = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))

    with torch.device("meta"):
        again = Checkpointer(like, torch.optim.AdamW(like.parameters(), lr=0.01), dir=tmp_path / "checkpoints")

    assert 2 == again.start_step == ckpt.start_step


def test_a_fresh_start_makes_no_fake_step(tmp_path):
    """
    Reading optimizer state before the first step would make torch step once: the curve would differ.
    """
    steps = []
    train(
        tmp_path,
        2,
        hook=lambda step, ckpt: steps.append(ckpt._training.optimizers[0][1].state_dict()["state"][0]["step"].item()),
    )

    assert [1.0, 2.0] == steps


def test_the_state_keeps_its_precision(tmp_path):
    """
    torch would cast fp32 state of bf16 weights down while loading; we do not.
    """

    class KeepsMore(torch.optim.SGD):
        def step(self, closure=None):
            super().step()
            for p in self.param_groups[0]["params"]:
                self.state[p]["master"] = p.detach().float() + 1e-5

    def optimizer_of(model):
        return KeepsMore(model.parameters(), lr=0.1, momentum=0.9)

    model = nn.Linear(4, 2).bfloat16()
    optimizer = optimizer_of(model)
    ckpt = Checkpointer(model, optimizer, dir=tmp_path / "c")
    model(torch.ones(1, 4).bfloat16()).sum().backward()
    optimizer.step()
    ckpt.step()
    ckpt.finish()
    again = nn.Linear(4, 2).bfloat16()
    restored = optimizer_of(again)
    Checkpointer(again, restored, dir=tmp_path / "c").finish()

    assert same(optimizer.state_dict(), restored.state_dict())
    assert torch.float32 == restored.state[again.weight]["master"].dtype


def test_several_optimizers(tmp_path):
    """
    Each has its own state, though both know the same model.
    """

    def optimizers_of(model):
        return [torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9), torch.optim.AdamW(model[3].parameters())]

    _, first, _ = train(tmp_path, 3, optimizer_of=optimizers_of)
    _, second, _ = train(tmp_path, 3, optimizer_of=optimizers_of)

    assert same([o.state_dict() for o in first], [o.state_dict() for o in second])


def wrapped():
    inner = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    return torch.compile(
        nn.Sequential(checkpoint_wrapper(torch.compile(inner[0], backend="eager")), inner[1]), backend="eager"
    )


def test_parameters_in_another_order_keep_their_own_state(tmp_path):
    """
    What an optimizer knows of a parameter follows its name, also where a script hands them over in another order.
    """

    def optimizer_of(order):
        return lambda model: torch.optim.SGD([model.get_parameter(n) for n in order], lr=0.1, momentum=0.9)

    def model():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))

    order = ["0.weight", "1.weight"]
    net, optimizer, _ = train(tmp_path, 3, model=model(), optimizer_of=optimizer_of(order))
    before = {name: optimizer.state[net.get_parameter(name)] for name in order}
    net = model()
    turned = optimizer_of(order[::-1])(net)
    Checkpointer(net, turned, dir=tmp_path / "checkpoints").finish()

    assert same(before, {name: turned.state[net.get_parameter(name)] for name in order})


class Packed(nn.Module):
    """Says in its state_dict what it holds elsewhere, as quantized layers do."""

    def __init__(self, scale):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.scale = scale

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "scale"] = torch.tensor([self.scale, float("nan")])


def test_what_cannot_be_put_back_in_place_is_refused_where_it_differs(tmp_path):
    """
    A tensor that a module makes for its state_dict alone is filled in vain: fine if it is the same, else refused by name.
    """
    ckpt = Checkpointer(Packed(3.0), dir=tmp_path)
    ckpt.step()
    ckpt.finish()

    Checkpointer(Packed(3.0), dir=tmp_path).finish()
    with pytest.raises(StateError, match=r"model\.scale: the module makes them anew for its state_dict"):
        Checkpointer(Packed(4.0), dir=tmp_path)


class EightBit(torch.optim.Optimizer):
    """Keeps bytes, a table that all parameters share, the largest number of each block, and a count that is no tensor."""

    table = torch.linspace(-1, 1, 256)

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1, "betas": (0.9, 0.99)})

    def step(self):
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            blocks = -(-p.numel() // 4)
            state["state1"] = torch.randint(0, 256, p.shape, dtype=torch.uint8)
            state |= {"step": state.get("step", 0) + 1, "qmap1": self.table, "absmax1": torch.rand(blocks)}


def test_an_optimizer_that_keeps_bytes(tmp_path):
    """
    State of another type and of other shapes than the weights comes back as it was.
    """
    model, optimizer, _ = train(tmp_path, 2, optimizer_of=lambda m: EightBit(m.parameters()))
    again = EightBit(model.parameters())
    Checkpointer(model, again, dir=tmp_path / "checkpoints").finish()

    assert same(optimizer.state_dict()["state"], again.state_dict()["state"])


def test_wrappers_do_not_change_names(tmp_path):
    """
    Saved compiled and with activation checkpoints, loaded plain, and loaded compiled again.
    """
    first, _, _ = train(tmp_path, 2, model=wrapped())
    second, plain, _ = train(tmp_path, 2, model=nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)))
    third, compiled, _ = train(tmp_path, 2, model=wrapped())

    for other in (second, third):
        assert all(torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters(), strict=True))
    assert same(plain.state_dict(), compiled.state_dict())


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(4, 8, bias=False)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(x) + self.embed(x).sin()


def test_tied_weights_stay_tied(tmp_path):
    """
    They are there under each of their names, and have one optimizer state.
    """
    first, before, _ = train(tmp_path, 3, model=Tied())
    second, after, _ = train(tmp_path, 3, model=Tied())

    assert second.head.weight is second.embed.weight
    assert torch.equal(first.head.weight, second.head.weight)
    assert same(before.state_dict(), after.state_dict())
    assert {"model.embed.weight", "model.head.weight"} == {k for k in Reader(newest(tmp_path)).keys if "model" in k}


def test_state_that_does_not_exist_yet(tmp_path):
    """
    Saved before the optimizer did anything, and with a parameter that never had a gradient.
    """

    def begin():
        model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", growth_interval=1)
        return model, optimizer, scaler, Checkpointer(model, optimizer, scaler=scaler, dir=tmp_path / "c")

    _, optimizer, _, ckpt = begin()
    ckpt.step()
    ckpt.finish()
    assert {} == optimizer.state_dict()["state"]
    model, optimizer, scaler, ckpt = begin()
    assert {} == optimizer.state_dict()["state"]
    scaler.scale(model[0](torch.ones(1, 2)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    ckpt.step()
    ckpt.finish()
    again = begin()
    again[3].finish()

    assert 2 == len(again[1].state_dict()["state"])
    assert same(optimizer.state_dict(), again[1].state_dict())
    assert same(scaler.state_dict(), again[2].state_dict())
    assert 131072.0 == again[2].get_scale()


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        pytest.param(
            lambda m: [{"params": m[0].parameters()}, {"params": [*m[1].parameters(), *m[3].parameters()]}],
            "2 here, 1 in the checkpoint.*\n  group 0: only here: none; only in the checkpoint: 1.bias, 1.weight, "
            "3.bias, 3.weight\n  group 1: only here: 1.bias, 1.weight, 3.bias, 3.weight; only",
            id="more groups",
        ),
        pytest.param(
            lambda m: [{"params": [m[0].weight]}],
            "1 here, 1 in the checkpoint.*\n  group 0: only here: none; only in the checkpoint: 0.bias, 1.bias, "
            "1.weight, 3.bias, 3.weight$",
            id="fewer parameters",
        ),
    ],
)
def test_other_parameter_groups_are_refused_by_name(tmp_path, groups, said):
    """
    Which group has what the other has not; the checkpoint stays where it is.
    """
    train(tmp_path, 1)

    with pytest.raises(StateError, match=said):
        train(tmp_path, 2, optimizer_of=lambda m: torch.optim.AdamW(groups(m), lr=0.01))

    assert 1 == len(folder.committed(tmp_path / "checkpoints"))


def test_another_model_is_refused_with_the_difference(tmp_path):
    """
    Missing, unexpected and differing tensors are listed, and the checkpoint stays where it is.
    """
    train(tmp_path, 1)
    other = nn.Sequential(nn.Linear(4, 9), nn.Identity(), nn.Identity(), nn.Linear(9, 2), nn.Linear(2, 2))

    with pytest.raises(StateError) as caught:
        train(tmp_path, 2, model=other)

    text = str(caught.value)
    assert "model.0.weight: expected (9, 4) torch.float32, the checkpoint has (8, 4) torch.float32" in text
    assert "model.1.running_mean: in the checkpoint, not in the model" in text
    assert "model.4.weight: not in the checkpoint" in text
    assert 1 == len(folder.committed(tmp_path / "checkpoints"))


def test_what_was_not_saved_or_not_asked_for_is_said(tmp_path, capsys):
    """
    A new object starts afresh and one that is gone is left out; neither silently.
    """
    train(tmp_path, 1, old=torch.optim.swa_utils.AveragedModel(nn.Linear(1, 1)))
    train(tmp_path, 1, new=torch.optim.swa_utils.AveragedModel(nn.Linear(1, 1)))

    said = capsys.readouterr().err
    assert "not restored: new: not in the checkpoint, starts afresh" in said
    assert "not restored: old: in the checkpoint, but not given to Checkpointer" in said


class Temperature:
    """An object of the script's own that keeps what an optimizer trains."""

    def __init__(self):
        self.value = nn.Parameter(torch.ones(1))

    def state_dict(self):
        return {"value": self.value.detach()}

    def load_state_dict(self, state):
        self.value.data.copy_(state["value"])


def test_what_is_trained_and_would_not_be_saved_is_refused_at_the_start(tmp_path):
    """
    A learnable temperature in no module has its optimizer state saved, and its value lost: so it is refused, unless somebody gives it.
    """
    model, lonely, kept, fixed = (
        nn.Linear(4, 4),
        nn.Parameter(torch.ones(3)),
        Temperature(),
        nn.Parameter(torch.ones(1)),
    )
    fixed.requires_grad_(False)
    groups = [{"params": [*model.parameters()]}, {"params": [kept.value, fixed, lonely]}]
    optimizer = torch.optim.AdamW(groups)

    with pytest.raises(StateError) as refused:
        Checkpointer(model, optimizer, dir=tmp_path / "refused", temperature=kept)
    Checkpointer(model, optimizer, dir=tmp_path / "held", temperature=kept, more=nn.ParameterList([lonely])).finish()

    assert str(refused.value) == (
        "optimizer: parameter 2 of group 1, of shape (3,), is in no module given to Checkpointer, so its value would not be saved: "
        "give the module that holds it by a name, Checkpointer(..., head=head), or put it into one"
    )
    assert not (tmp_path / "refused").exists()


def test_what_cannot_be_saved_is_refused_at_the_start(tmp_path):
    """
    Not at the first save, when an hour is gone.
    """

    class Odd:
        def state_dict(self):
            return {"f": object()}

        def load_state_dict(self, state):
            pass

    with pytest.raises(StateError, match=r"odd\.f: cannot be saved without pickle"):
        train(tmp_path, 1, odd=Odd())


@pytest.mark.parametrize("is_again", [False, True], ids=["once", "again, restored meanwhile"])
def test_a_damaged_checkpoint_is_set_aside_for_an_older_one(tmp_path, capsys, is_again):
    """
    A flipped bit costs one checkpoint, not the run, and a human finds the evidence.
    """
    train(tmp_path, 2)
    train(tmp_path, 4)
    bad = newest(tmp_path)
    if is_again:
        shutil.copytree(bad.path, bad.path.with_name(protocol.DAMAGED + bad.path.name))
    flip(bad)

    _, _, ckpt = train(tmp_path, 4)

    assert "step-00000002" == ckpt.restored[:13]
    assert (tmp_path / "checkpoints" / (protocol.DAMAGED + bad.path.name)).is_dir()
    assert 4 == newest(tmp_path).manifest.step
    assert "set aside" in capsys.readouterr().err


def test_a_damaged_checkpoint_that_cannot_be_set_aside_ends_the_start_with_the_reason(tmp_path):
    """
    All ranks are told, with what is in the way; the checkpoint stays as it is.
    """
    train(tmp_path, 2)
    bad = newest(tmp_path)
    flip(bad)
    (tmp_path / "checkpoints" / (protocol.DAMAGED + bad.path.name)).write_text("a file of somebody's")

    with pytest.raises(
        ResumeError, match=r"expected checksum .*; it cannot be set aside: .*checkpoints: Not a directory"
    ):
        train(tmp_path, 4)

    assert bad.path.is_dir()


def flip(stored):
    path = stored.path / stored.manifest.shards[0].path
    raw = bytearray(path.read_bytes())
    raw[-3] ^= 4
    path.write_bytes(raw)


def test_a_newer_one_that_cannot_be_used_is_told(tmp_path, capsys):
    """
    It is not resumed from, so some steps are made again: whoever reads the log learns why. It stays where it is.
    """
    train(tmp_path, 2)
    train(tmp_path, 4)
    bad = newest(tmp_path)
    (bad.path / bad.manifest.shards[0].path).unlink()
    capsys.readouterr()

    _, _, ckpt = train(tmp_path, 3)

    assert "step-00000002" == ckpt.restored[:13]
    assert f"passed over: {bad.path.name}: [Errno 2] No such file or directory" in capsys.readouterr().err
    assert bad.path.exists()


SENSELESS = {
    "another step": (("shared", "step"), 999999, "step: expected 4, as in its name, got '999999'"),
    "an older step": (("shared", "step"), 3, "step: expected 4, as in its name, got '3'"),
    "a negative step": (("shared", "step"), -5, "step: expected 4, as in its name, got '-5'"),
    "a step in words": (("shared", "step"), "4", "step: expected 4, as in its name, got '4'"),
    "position": (("shared", "position", "epoch"), None, "the checkpoint's position in the data makes no sense: "),
    "places": (
        ("shared", "places"),
        {"now": 1, "all": [[{}, None]]},
        "the checkpoint's places in the data make no sense: ",
    ),
    "samples": (
        ("shared", "position", "samples"),
        1 << 62,
        "the checkpoint's position in the data makes no sense: ",
    ),
    "orders": (("shared", "orders"), {"x": {}}, "the checkpoint's loaders make no sense: "),
    "order": (("shared", "orders"), {"0": 1}, "the checkpoint's order of the data makes no sense: "),
    "loaders": (("own", "loaders"), {"x": None}, "the checkpoint's loaders make no sense: "),
    "models": (("shared", "models"), 1, "no rank writes this: TypeError('expected values by name, got 1')"),
    "all": (("shared",), [1], "no rank writes this: TypeError("),
    "nothing": ((), None, "no rank writes this: TypeError("),
    "random numbers": (("own", "rng"), {"python": 5, "torch": 6}, "no rank writes this: TypeError("),
}


@pytest.mark.parametrize("kind", SENSELESS)
def test_a_checkpoint_whose_manifest_contradicts_itself_is_damaged(tmp_path, capsys, kind):
    """
    A step far behind the end would end the training as done. It is set aside for an older one, and the line names it.
    """
    keys, value, said = SENSELESS[kind]
    train(tmp_path, 2)
    train(tmp_path, 4)
    bad = newest(tmp_path)
    fields = json.loads((bad.path / protocol.MANIFEST).read_bytes()) | {"reason": "interval"}
    place, last = fields["state"]["ranks"], "0"
    for key in keys:
        place, last = place[last], key
    place[last] = value
    (bad.path / protocol.MANIFEST).write_bytes(protocol.seal(fields))
    capsys.readouterr()

    _, _, ckpt = train(tmp_path, 5)

    assert "step-00000002" == ckpt.restored[:13]
    assert (tmp_path / "checkpoints" / (protocol.DAMAGED + bad.path.name)).is_dir()
    lines = [line for line in capsys.readouterr().err.splitlines() if "set aside" in line]
    assert 1 == len(lines)
    assert lines[0].startswith(f"vramfarm: {bad.path.name}: {protocol.MANIFEST}: state: {said}")


MANGLED = {
    "state": (("optimizers", "optimizer", "state"), [[{}, {}]], "TypeError"),
    "dtype": (("objects", "scheduler"), {"$": "dtype", "v": "x"}, "KeyError"),
}


@pytest.mark.parametrize("kind", MANGLED)
def test_a_manifest_whose_state_is_nonsense_is_refused_by_all_ranks(tmp_path, capsys, kind):
    """
    Whatever is raised while it is put back becomes one refusal: the other ranks wait for this one's word.
    """

    def make():
        model = nn.Linear(2, 2)
        optimizer = torch.optim.AdamW(model.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        return Checkpointer(model, optimizer, scheduler=scheduler, dir=tmp_path / "checkpoints"), model, optimizer

    ckpt, model, optimizer = make()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    ckpt.step()
    ckpt.finish()
    path = newest(tmp_path).path / protocol.MANIFEST
    keys, value, said = MANGLED[kind]
    fields = json.loads(path.read_bytes())
    place = fields["state"]["ranks"]["0"]["shared"]
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value
    path.write_bytes(protocol.seal(fields))

    with pytest.raises(StateError, match=said):
        make()


def test_nothing_usable_is_no_reason_to_start_over(tmp_path):
    """
    A run whose checkpoints are all broken says so; only the word `never` starts at step 0, as a new lineage.
    """
    train(tmp_path, 2)
    name = newest(tmp_path).path
    (name / protocol.MANIFEST).write_bytes(b"{")

    with pytest.raises(ResumeError, match=f"(?s)resume=.never.*{name.name}: MANIFEST.json: not JSON"):
        train(tmp_path, 3)
    _, _, ckpt = train(tmp_path, 1, resume="never")

    assert (None, 1) == (ckpt.restored, newest(tmp_path).manifest.step)


def test_going_back_begins_a_new_lineage(tmp_path):
    """
    After a roll-back, the newest is what was made since, though an older future has higher steps.
    """
    train(tmp_path, 2)
    back = newest(tmp_path).path
    train(tmp_path, 9)

    train(tmp_path, 3, resume=str(back))

    assert (3, 1) == (newest(tmp_path).manifest.step, newest(tmp_path).manifest.lineage)
    _, _, ckpt = train(tmp_path, 4)
    assert "step-00000003" == ckpt.restored[:13]


def test_a_break_after_the_optimizers_step_counts_it(tmp_path):
    """
    The final state is saved under the number of steps that made it.
    """
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.ones(10, 4)), batch_size=1)
    ckpt = Checkpointer(model, optimizer, dir=tmp_path / "c")
    for step, (batch,) in ckpt.steps(loader):
        model(batch).sum().backward()
        if step == 5:
            break  # before the optimizer
        optimizer.step()
        if step == 4:
            continue
    ckpt.finish()

    assert 5 == newest(tmp_path, "c").manifest.step


def test_step_and_steps_do_not_mix(tmp_path):
    """
    Counting twice would be silent; it is refused.
    """
    with pytest.raises(RuntimeError, match="counts the steps by itself"):
        train(tmp_path, 2, hook=lambda step, ckpt: ckpt.step())


def test_an_asked_for_save_comes_and_can_be_waited_for(tmp_path):
    """
    save() asks, wait() waits, in the middle of training.
    """
    committed = []

    def hook(step, ckpt):
        if step == 2:
            ckpt.save()
        time.sleep(0.05)
        if ckpt._seat.is_pending():
            assert ckpt.wait(10)
            committed.append(newest(tmp_path).manifest.reason)

    train(tmp_path, 12, hook=hook)

    assert {"asked"} >= set(committed)
    assert ["final", "asked"] == [s.manifest.reason for s in folder.committed(tmp_path / "checkpoints")]


def test_a_step_costs_microseconds(tmp_path):
    """
    Without a save, step() is a few stores: less than 20 µs of the processor, whatever else the machine does.
    """
    ckpt = Checkpointer(nn.Linear(1, 1), dir=tmp_path / "c")
    best = 1.0
    for _ in range(5):
        started = time.thread_time()
        for _ in range(2000):
            ckpt.step()
        best = min(best, (time.thread_time() - started) / 2000)
    print(f"step(): {best * 1e6:.1f} µs")
    ckpt.finish()

    assert best < 20e-6


def test_a_step_calls_next_to_nothing(tmp_path):
    """
    Training empties the caches before each step, and then every function that is called costs microseconds: once the
    staging memory is ready a step is two of ours, and the clock.
    """
    ckpt = Checkpointer(nn.Linear(1, 1), dir=tmp_path / "c")
    expected = ["step", "passes", "monotonic_ns"]
    deadline, called = time.monotonic() + 30, None

    while called != expected and time.monotonic() < deadline:  # until it is ready, and has heard of the saver
        time.sleep(0.01)
        called = calls_of(ckpt.step)
    ckpt.finish()

    assert expected == called


def calls_of(act):
    """Names of the functions that this calls, in Python and in C."""
    found = []

    def note(frame, event, what):
        if "call" in event and what is not sys.setprofile:
            found.append(what.__name__ if what else frame.f_code.co_name)

    sys.setprofile(note)
    act()
    sys.setprofile(None)
    return found


def test_the_training_scripts_end_is_not_held_up_by_its_crash(tmp_path):
    """
    An exception propagates at once, and the saver ends with the process.
    """
    code = (
        "import time\nimport torch\nfrom vramfarm import Checkpointer\nckpt = Checkpointer(torch.nn.Linear(1, 1))\n"
        "ckpt.step()\nprint(time.monotonic(), flush=True)\nraise ValueError('mine')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False
    )

    assert (1, True) == (done.returncode, "ValueError: mine" in done.stderr)
    assert time.monotonic() - float(done.stdout) < 30  # waiting for a save that nobody staged would take 60
    deadline = time.monotonic() + 30
    while list(Path("/dev/shm").glob("vramfarm-*")) and any(_is_of(p, tmp_path) for p in Path("/proc").glob("[0-9]*")):
        assert time.monotonic() < deadline
        time.sleep(0.05)


class Kept:
    """Has a state, takes any other, and counts how often it is handed one."""

    def __init__(self, state):
        self.state, self.num_loaded = state, 0

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state, self.num_loaded = state, self.num_loaded + 1


def zeros(size):
    return Kept({"bytes": torch.zeros(size, dtype=torch.uint8)})


def test_nothing_is_handed_out_before_all_of_it_was_verified(tmp_path):
    """
    Damage in the last bytes of a checkpoint is found before any object is given its state.
    """
    train(tmp_path, 1, small=zeros(10), large=zeros(20_000_000))
    train(tmp_path, 2, small=zeros(10), large=zeros(20_000_000))
    bad = newest(tmp_path)
    with (bad.path / bad.manifest.shards[0].path).open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"!")
    small = zeros(10)

    _, _, ckpt = train(tmp_path, 2, small=small, large=zeros(20_000_000))

    assert ("step-00000001", 1) == (ckpt.restored[:13], small.num_loaded)


def _is_of(process, folder):
    try:
        return str(folder) in str((process / "cwd").readlink())
    except OSError:
        return False


def test_the_library_is_imported_without_torch_by_those_who_have_none():
    """
    The supervisor and the saver import the package; torch stays out.
    """
    code = "import sys, vramfarm, vramfarm.protocol, vramfarm.seat, vramfarm.folder, vramfarm.saver; print('torch' in sys.modules)"

    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout

    assert "False" == out.strip()


def test_under_a_supervisor_its_word_counts(tmp_path, monkeypatch):
    """
    Folder, lineage and checkpoint come from the environment; a damaged one is set aside and the supervisor chooses again.
    """
    train(tmp_path, 2)
    bad = newest(tmp_path)
    path = bad.path / bad.manifest.shards[0].path
    page = ControlPage.create(tmp_path / "page", num_ranks=1)
    monkeypatch.setenv(Env.CONTROL, str(page.path))
    monkeypatch.setenv(Env.CHECKPOINT_DIR, str(bad.path.parent))
    monkeypatch.setenv(Env.RESUME, "none")
    monkeypatch.setenv(Env.LINEAGE, "4")

    _, _, ckpt = train(tmp_path, 1, name="elsewhere", resume=str(bad.path))
    with pytest.raises(RuntimeError, match="has ended"):
        train(tmp_path, 3)
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    monkeypatch.setenv(Env.CONTROL, str(ControlPage.create(tmp_path / "page-2", num_ranks=1).path))
    monkeypatch.setenv(Env.RESUME, str(bad.path))
    with pytest.raises(ResumeError, match="the next attempt takes an older one"):
        train(tmp_path, 3)

    assert (None, 4, 1) == (ckpt.restored, newest(tmp_path).manifest.lineage, newest(tmp_path).manifest.step)
    assert (tmp_path / "checkpoints" / (protocol.DAMAGED + bad.path.name)).is_dir()
    assert page.path.exists()


ENDS = """
import os
import signal
import subprocess
import sys
import torch
from vramfarm import Checkpointer
from vramfarm.protocol import Word

model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
ckpt = Checkpointer(model, optimizer, dir=sys.argv[1])


def learn():
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()


if sys.argv[2] == "break":
    for step, _ in ckpt.steps([None] * 100, max_steps=100):
        learn()
        if step == 6:
            break
else:
    for _ in range(7):
        learn()
        ckpt.step()
if sys.argv[2] == "raise in a save":
    step = 7
    while not ckpt._seat.is_pending():
        learn()
        ckpt.save()
        ckpt.step()
        step += 1
    model.weight.data.fill_(step)
    os.kill(ckpt._seat.page[Word.SAVER_PID], signal.SIGSTOP)
    subprocess.Popen(["sh", "-c", f"sleep 1; kill -CONT {ckpt._seat.page[Word.SAVER_PID]}"])
if sys.argv[2] == "raise with a hook":
    sys.excepthook = lambda *_: None
if sys.argv[2].startswith("raise"):
    raise ValueError("mine")
if sys.argv[2] == "exit 1":
    sys.exit("the loss is not a number")
if sys.argv[2] == "exit 0":
    sys.exit()
print(f"ends {model.weight.detach().sum():.6f}")
"""


def test_a_script_that_raises_in_a_save_has_saved(tmp_path):
    """
    What was staged is committed, as it was then, although the saver is held up while the interpreter ends.
    """
    done = subprocess.run(
        [sys.executable, "-c", ENDS, str(tmp_path / "checkpoints"), "raise in a save"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    stored = newest(tmp_path)
    assert (1, True) == (done.returncode, "ValueError: mine" in done.stderr)
    assert stored.manifest.step > 7
    assert float(stored.manifest.step) not in Reader(stored).read("model.weight").flatten().tolist()


@pytest.mark.parametrize(
    ("way", "code", "saved"),
    [
        ("break", 0, [7]),
        ("own loop", 0, [7]),
        ("exit 0", 0, [7]),
        ("exit 1", 1, []),
        ("raise", 1, []),
        ("raise with a hook", 1, []),
    ],
    ids=str,
)
def test_a_script_that_just_ends_loses_nothing(tmp_path, way, code, saved):
    """
    After a break, or in a loop of one's own without finish(), the last step is saved at exit; a crash is no end, however it is told.
    """
    done = subprocess.run(
        [sys.executable, "-c", ENDS, str(tmp_path / "ckpt"), way],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert (code, saved) == (done.returncode, [s.manifest.step for s in folder.committed(tmp_path / "ckpt")]), (
        done.stderr
    )


def test_a_script_whose_last_save_fails_at_its_exit_says_so(tmp_path):
    """
    Its exit code says nothing: an interpreter that ends has chosen it before.
    """
    code = ENDS.replace("def learn", "ckpt._seat.page[Word.ENDED] = 3\n\n\ndef learn", 1)
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "ckpt"), "own loop"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert (0, True) == (done.returncode, "the script ends, and its last state is not saved: " in done.stderr), (
        done.stderr
    )


@pytest.mark.parametrize("kind", ["pipe", "endless", "huge"])
def test_a_hostile_folder_neither_hangs_nor_is_believed(tmp_path, kind):
    """
    A manifest that is a pipe, a link to an endless device, or too large is no manifest.
    """
    hostile = tmp_path / "step-00000005-0123abcd"
    hostile.mkdir()
    manifest = hostile / protocol.MANIFEST
    if kind == "pipe":
        os.mkfifo(manifest)
    elif kind == "endless":
        manifest.symlink_to("/dev/zero")
    else:
        manifest.touch()
        os.truncate(manifest, 1 << 30)

    assert isinstance(folder.read(hostile), str)
    assert [] == folder.committed(tmp_path)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/zero")])
def test_a_lock_that_is_no_file_is_refused_at_once(tmp_path, make):
    """
    A pipe of that name would be waited for without a word, with the cards idle.
    """
    make(tmp_path / protocol.SAVER_LOCK)

    with pytest.raises(ResumeError, match=r"\.saver\.lock: expected a plain file, .*: remove it"):
        expect_no_other_writer(tmp_path, print)


def test_a_pipe_in_the_place_of_the_savers_log_holds_nobody_up(tmp_path):
    """
    Whoever opens a pipe waits for its other end: nobody does, and training goes on, without a log.
    """
    os.mkfifo(tmp_path / "saver.log")

    train(tmp_path, 2)

    assert 2 == newest(tmp_path).manifest.step


def test_a_second_run_in_the_same_folder_is_refused(tmp_path):
    """
    It would train to its end and save nothing; a saver that is just ending is waited for.
    """
    with (tmp_path / protocol.SAVER_LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)

        with pytest.raises(ResumeError, match=r"another run saves into this folder; .* dir="):
            expect_no_other_writer(tmp_path, print, patience_s=0.2)

    expect_no_other_writer(tmp_path, print, patience_s=0.2)


@pytest.mark.parametrize("rank", ["gone", "there"])
def test_a_saver_whose_ranks_are_gone_is_waited_for_as_long_as_a_disk(tmp_path, rank):
    """
    After a crash it may have minutes to write; a run that goes on never ends by itself, and is refused soon.
    """
    page, told = seat.create_page(1), []
    page.put(0, Slot.PID, os.getpid())
    page.put(0, Slot.STARTED, protocol.process_started(os.getpid()) + (rank == "gone"))
    (tmp_path / protocol.SAVER_LOCK).write_text(str(page.path))
    with (tmp_path / protocol.SAVER_LOCK).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)

        with pytest.raises(ResumeError, match="another run saves into this folder"):
            expect_no_other_writer(tmp_path, told.append, patience_s=0, disk_s=0.2)
    page.path.unlink()

    waits = f"{tmp_path}: waiting for the saver of a run that has ended: it writes the last checkpoint"
    assert [waits] * (rank == "gone") == told


def test_a_second_one_in_the_same_process_is_told_that_it_is_that(tmp_path):
    """
    As when a notebook's cell runs again after a `break`: no other run is to be looked for. After its end there may be one.
    """
    first = Checkpointer(nn.Linear(1, 1), dir=tmp_path)
    wait_until_locked(tmp_path)

    with pytest.raises(ResumeError, match=r"this very process saves into it, .* call its finish\(\) first"):
        Checkpointer(nn.Linear(1, 1), dir=tmp_path)
    first.finish()
    assert str(first._seat.page.path) == (tmp_path / protocol.SAVER_LOCK).read_text()
    Checkpointer(nn.Linear(1, 1), dir=tmp_path).finish()


def wait_until_locked(directory):
    """Until the saver, which has just been started, has its lock."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            expect_no_other_writer(directory, print, patience_s=0)
        except ResumeError:
            return
        time.sleep(0.02)


def test_want_of_room_says_where_and_how_much(tmp_path):
    """
    A path, two numbers and what to do.
    """
    why = folder.want_of_room(tmp_path, 1 << 60)

    assert "" == folder.want_of_room(tmp_path, 1)
    assert why.startswith(f"{tmp_path}: one more checkpoint needs 1210567.6 TB, ")
    assert "free some space there" in why


@pytest.mark.parametrize(
    ("num_bytes", "expected"), [(0, "0 B"), (12_400, "12.4 kB"), (400_000, "400.0 kB"), (1_200_000_000, "1.2 GB")]
)
def test_a_size_is_never_nothing_of_a_larger_unit(num_bytes, expected):
    """
    "needs 0 MB, 0 MB are free" helps nobody.
    """
    assert expected == folder._size(num_bytes)


def test_the_batch_of_the_job_is_kept_by_a_loop_that_asks(tmp_path, monkeypatch, capsys):
    """
    Four batches a step on these cards; a loop that takes fewer is told, and counted as it steps.
    """
    monkeypatch.setenv(Env.GRAD_ACCUM, "4")
    model, loader = nn.Linear(4, 2), DataLoader(TensorDataset(torch.ones(8, 4)))
    completing = []

    ckpt = Checkpointer(model, dir=tmp_path / "kept")
    for step, _ in ckpt.steps(loader, accumulate=ckpt.grad_accum):
        completing += [step] if ckpt.last_micro_batch else []
    quiet = capsys.readouterr().err
    _, _, other = train(tmp_path, 2)

    assert ([0, 1], 2, 2) == (completing, ckpt.start_step, other.start_step)
    assert "job.yaml" not in quiet
    assert "kept by 4 batches a step on these cards, this loop takes 1" in capsys.readouterr().err


def test_a_loss_is_reported_as_training_has_it():
    """
    With its graph; torch's warning for that would be in every newcomer's log.
    """
    loss = (torch.ones(1, requires_grad=True) * 2).sum()

    assert (2.0, 0.5, None) == (parse_scalar("loss", loss), parse_scalar("lr", 0.5), parse_scalar("lr", None))


@pytest.mark.parametrize(
    "given", [torch.ones(3), torch.tensor(1j), "soon", [1.0], 10**400], ids=lambda one: str(one)[:20]
)
def test_what_is_no_number_is_refused_by_its_name(tmp_path, given):
    """
    As every other keyword is.
    """
    ckpt = Checkpointer(nn.Linear(1, 1), dir=tmp_path)

    with pytest.raises(ValueError, match=r"^report: loss: expected (one|a) number, got "):
        ckpt.report(loss=given)
    if not isinstance(given, torch.Tensor):
        with pytest.raises(ValueError, match=r"^wait: timeout_s: expected a number, got "):
            ckpt.wait(given)


def test_a_wait_without_end_ends_with_the_save(tmp_path):
    """
    `float("inf")` seconds are what nobody's clock can count.
    """
    ckpt = Checkpointer(nn.Linear(1, 1), dir=tmp_path)

    assert ckpt.wait(float("inf"))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"keep_last": 0}, "keep_last: expected a number of checkpoints, 1 at least, got 0"),
        ({"keep_last": -1}, "keep_last: expected a number of checkpoints, 1 at least, got -1"),
        ({"keep_last": None}, "keep_last: expected a number of checkpoints, 1 at least, got None"),
        ({"save_interval": -1}, "save_interval: expected something like 30m, 90s or seconds, more than 0, got -1"),
        ({"save_interval": float("nan")}, "save_interval: expected something like 30m, .* got nan"),
        pytest.param(
            {"save_interval": 10**400}, "save_interval: expected something .* got 1000", id="endless interval"
        ),
        ({"dir": None}, "dir: expected a folder, got None"),
        ({"dir": ""}, "dir: expected a folder, got ''"),
        ({"dir": "a\0b"}, "dir: expected a folder, got 'a.*b'"),
        ({"dir": "s3://bucket/run"}, "dir: expected a folder on this machine, got 's3://bucket/run'"),
        ({"resume": True}, "resume: expected auto, never or a checkpoint's folder, got True$"),
        (
            {"resume": "none"},
            "resume: expected auto, never or a checkpoint's folder, got '.*/none', which is no folder$",
        ),
        ({"resume": "/proc/self"}, "got '/proc/self', which has no MANIFEST.json: no checkpoint was committed there$"),
        ({"data_parallel": (5, 2)}, r"data_parallel: expected \(rank, size\) .* got \(5, 2\)"),
        ({"optimizer": None}, "optimizer: expected an optimizer or a list of them, got NoneType"),
        ({"optimizer": {"a": 1}}, "optimizer: expected an optimizer or a list of them, got str in dict"),
        ({"loader": DataLoader}, "loader: expected a loader, .*, got the class DataLoader itself"),
        ({"loader": "data"}, "loader: expected a loader, or something else that gives batches, got str"),
        ({"data_parallel": (1, 2)}, r"data_parallel: expected a size that divides 1, .* got \(1, 2\)"),
        ({"seed": None}, "seed: expected a whole number, got None"),
        ({"seed": 1.5}, "seed: expected a whole number, got 1.5"),
        ({"allow_pickle": "no"}, "allow_pickle: expected True or False, got 'no'"),
        ({"hide_copies": "no"}, "hide_copies: expected True or False, got 'no'"),
        ({"ema.x": nn.Linear(1, 1)}, "'ema.x': expected a plain name, .* take it for a part of 'ema'"),
        ({"ema": nn.Linear}, "ema: expected an object with a state, got the class Linear itself"),
        ({"save_intervall": "5m"}, "save_intervall: expected an object .* got str; is save_interval= meant"),
        ({"model": nn.LazyLinear(4)}, "model.weight: has no shape yet: give the model a batch once"),
        ({"model": [nn.Linear(1, 1)]}, "model: expected a torch.nn.Module, got list"),
    ],
    ids=str,
)
def test_what_a_keyword_cannot_be_is_refused_by_its_name(tmp_path, given, said):
    """
    Before anything is trained: with `keep_last=0` each save would remove itself.
    """
    with pytest.raises((ValueError, TypeError, ResumeError), match=said):
        Checkpointer(**{"model": nn.Linear(1, 1), "dir": tmp_path} | given)


@pytest.mark.parametrize("given", [(0, 3), (1, 8)], ids=str)
def test_parts_of_the_data_are_seen_by_as_many_ranks_each(given):
    """
    Of four ranks no three can see different data: what the fourth sees would be anybody's guess.
    """
    with pytest.raises(ValueError, match="data_parallel: expected a size that divides 4"):
        arguments.parse_world(given, World(0, 4))


@pytest.mark.parametrize(
    "given",
    [{"max_steps": "4"}, {"max_steps": -1}, {"max_steps": 1e1}, {"epochs": 0.5}, {"accumulate": 1.5}, {"finish": "no"}],
    ids=str,
)
def test_what_a_loop_cannot_be_asked_for_is_refused_by_its_name(tmp_path, given):
    """
    Half a batch was taken for two, and a text ended the training with an error of memory views.
    """
    ckpt = Checkpointer(nn.Linear(1, 1), dir=tmp_path)
    ((name, value),) = given.items()

    with pytest.raises(
        ValueError, match=rf"^steps: {name}: expected (a number of .*, \d at least|True or False), got {value!r}$"
    ):
        next(ckpt.steps([torch.ones(1, 1)], **given))


def test_a_folder_that_nothing_can_be_saved_in_is_refused(tmp_path):
    """
    In the first second, and not in the morning.
    """
    (tmp_path / "file").touch()

    with pytest.raises(ResumeError, match=r"no checkpoint can be saved: .*/file/checkpoints: Not a directory"):
        Checkpointer(nn.Linear(1, 1), dir=tmp_path / "file" / "checkpoints")


def test_the_newest_checkpoint_is_never_pruned(tmp_path):
    """
    Whatever number comes to the rotation.
    """
    train(tmp_path, 2)
    folder.prune(tmp_path / "checkpoints", 0)

    assert [2] == [stored.manifest.step for stored in folder.committed(tmp_path / "checkpoints")]


def test_who_has_not_come_to_the_constructor_is_named_while_the_others_wait(capsys):
    """
    `if rank == 0: Checkpointer(...)`, a habit of torch.save, would hang without a word. Again and again, by one rank only.
    """
    store, said = torch.distributed.HashStore(), ""
    store.set("a", "")
    waiting = threading.Thread(
        target=await_all, args=(store, "abc", 0, "to come"), kwargs={"late_s": 0.1, "again_s": 0.1}, daemon=True
    )
    waiting.start()
    deadline = time.monotonic() + 30
    while said.count("\n") < 2 and time.monotonic() < deadline:
        said += capsys.readouterr().err
        time.sleep(0.02)
    store.set("b", "")
    with pytest.raises(RuntimeError, match=r"^waited \d+ s in vain for rank 2 to come$"):
        await_all(store, "abc", 1, "to come", late_s=0.1, patience_s=0.1)
    store.set("c", "")
    waiting.join(30)

    assert not waiting.is_alive()
    assert ["vramfarm: waiting for rank 1, 2 to come; 0 s so far"] * 2 == said.splitlines()[:2]


def test_what_no_reader_would_take_is_not_committed(tmp_path):
    """
    For whatever reason: a save that failed, and says why, is better than one that every start passes over.
    """
    shards = (protocol.Shard("shard", 0, ()),)
    manifest = protocol.Manifest("job", 0, 5, "0123abcd", protocol.MAX_NUMBER, 1, "", protocol.ALGORITHM, shards)
    temporary = tmp_path / f"{protocol.TEMPORARY}00000005-0123abcd"
    temporary.mkdir()
    (temporary / "shard").touch()

    with pytest.raises(ValueError, match=r"no start could go on from it: MANIFEST.json: attempt: .* below"):
        folder.commit(temporary, manifest)

    assert [temporary] == list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["lineage", "attempt", "step"])
def test_numbers_that_leave_no_room_to_count_on_are_refused_at_the_start(tmp_path, name):
    """
    What would be saved after them nobody could read. The line says which folder is in the way.
    """
    train(tmp_path, 2)
    path, most = newest(tmp_path).path, protocol.MAX_NUMBER - 1
    fields = json.loads((path / protocol.MANIFEST).read_bytes()) | {name: most}
    (path / protocol.MANIFEST).write_bytes(protocol.seal(fields))
    path = path.rename(path.with_name(f"step-{most}-{fields['id']}")) if name == "step" else path

    with pytest.raises(ResumeError, match=rf"{path}: MANIFEST.json: {name}: {most} is more than .* move that folder"):
        Checkpointer(nn.Linear(1, 1), dir=tmp_path / "checkpoints")


def test_large_arrays_are_in_the_shards(tmp_path):
    """
    Of any kind of number and any order in memory, bit by bit; the manifest stays small.
    """
    numbers = np.random.default_rng(0)
    arrays = {
        "plain": numbers.standard_normal((300, 200)),
        "turned": numbers.integers(0, 9, (200, 300), dtype="<i2").T,
        "complex": numbers.standard_normal(20_000) + 1j,
        "flags": numbers.standard_normal(100_000) > 0,
        "frozen": np.broadcast_to(np.float32(1.5), (400, 100)),
        "small": np.arange(3, dtype=">u4"),
    }
    train(tmp_path, 1, buffer=Kept(arrays))
    back = Kept({})
    train(tmp_path, 1, buffer=back)

    assert [(n, a.dtype, a.tolist()) for n, a in arrays.items()] == [
        (n, a.dtype, a.tolist()) for n, a in back.state.items()
    ]
    assert all(array.flags.writeable for array in back.state.values())
    assert (newest(tmp_path).path / protocol.MANIFEST).stat().st_size < 100_000


def test_a_manifest_that_nobody_could_read_is_not_committed(tmp_path):
    """
    What makes it so large is named; a checkpoint that is there can be read.
    """
    with pytest.raises(
        RuntimeError, match=r"MANIFEST.json would have 2\d\.\d MB, 2\d\.\d MB of it the state of buffer"
    ):
        train(tmp_path, 1, buffer=Kept({"raw": bytes(17 << 20)}))

    assert [] == list((tmp_path / "checkpoints").glob("*step-*"))


@pytest.mark.parametrize(
    "state",
    [{1: torch.ones(3), "1": torch.zeros(3)}, {"a.b": torch.ones(1, 2), "a": {"b": torch.ones(2, 1)}}],
    ids=["a number and its text", "a dot"],
)
def test_two_tensors_of_one_name_are_refused(tmp_path, state):
    """
    One would come back as the other, or as what was in memory.
    """
    with pytest.raises(StateError, match=r"buffer\.(1|a\.b): two tensors would have this name"):
        Checkpointer(nn.Linear(1, 1), buffer=Kept(state), dir=tmp_path)


def test_a_step_that_only_one_of_two_optimizers_made_is_not_saved(tmp_path, capsys):
    """
    An exception between them leaves the state of no step; what was saved before is what counts.
    """
    one, other = nn.Linear(1, 1), nn.Linear(1, 1)
    optimizers = [torch.optim.Adam(m.parameters()) for m in (one, other)]
    ckpt = Checkpointer(nn.ModuleDict({"one": one, "other": other}), optimizers, dir=tmp_path)

    def loop():
        for step, (batch,) in ckpt.steps([(torch.ones(1, 1),)] * 9):
            for module, optimizer in zip((one, other), optimizers, strict=True):
                module(batch).sum().backward()
                if step == 5 and module is other:
                    raise ZeroDivisionError
                optimizer.step()

    with pytest.raises(ZeroDivisionError):
        loop()
    with pytest.raises(RuntimeError, match="step 6 is half made"):
        ckpt.finish()

    assert (
        "left in the middle of step 6, when not all optimizers had stepped: it is not saved" in capsys.readouterr().err
    )
    assert [] == folder.committed(tmp_path)


@pytest.mark.filterwarnings("ignore")  # of what torch does then
def test_an_optimizers_compiled_step_has_nothing_of_ours_in_it(tmp_path):
    """
    What counts steps in it would have it compiled anew in each of them.
    """
    graphs = []

    def note(graph, _):
        graphs.append(graph)
        return graph.forward

    model = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), torch.tensor(0.1))
    ckpt = Checkpointer(model, optimizer, dir=tmp_path)
    compiled = torch.compile(optimizer.step, backend=note)
    for _ in range(4):
        model(torch.ones(4)).sum().backward()
        compiled()
        ckpt.step()
    ckpt.finish()
    torch._dynamo.reset()

    assert 1 == len(graphs)


@pytest.mark.parametrize("act", ["sys.exit(0)", "ckpt.finish()", "pass"])
def test_a_fork_of_the_script_does_not_end_its_training(tmp_path, act):
    """
    What it does, and its exit, are its own: the parent goes on, and its last state is saved.
    """
    code = (
        "import os, sys, torch\nfrom vramfarm import Checkpointer\nmodel = torch.nn.Linear(1, 1)\n"
        "ckpt = Checkpointer(model, torch.optim.SGD(model.parameters(), 0.1))\n"
        "for step, _ in ckpt.steps([0] * 9):\n"
        "    model(torch.ones(1)).sum().backward()\n"
        "    ckpt._training.optimizers[0][1].step()\n"
        "    if step == 2:\n"
        "        child = os.fork()\n"
        "        if not child:\n"
        f"            {act}\n"
        "        else:\n"
        "            os.waitpid(child, 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=200, check=True
    )

    assert 9 == newest(tmp_path).manifest.step
    assert (act != "sys.exit(0)") == ("only that one saves" in done.stderr)


def test_accelerates_optimizer_is_the_one_in_it(tmp_path):
    """
    It never initialised what it inherits; what it wraps does the work and is saved.
    """
    accelerate = pytest.importorskip("accelerate")
    model = nn.Linear(2, 1)
    wrapped = accelerate.Accelerator(cpu=True).prepare(torch.optim.AdamW(model.parameters()))
    ckpt = Checkpointer(model, wrapped, dir=tmp_path / "checkpoints")
    for _, batch in ckpt.steps([torch.ones(1, 2)] * 3):
        model(batch).sum().backward()
        wrapped.step()
        wrapped.zero_grad()

    again = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(again.parameters())
    assert 3 == Checkpointer(again, optimizer, dir=tmp_path / "checkpoints").start_step
    assert [3.0, 3.0] == [one["step"].item() for one in optimizer.state.values()]


def test_a_saver_that_cannot_start_is_told_at_once(tmp_path, monkeypatch, capsys):
    """
    With its exit code, while the training goes on; not at the end of the night.
    """
    monkeypatch.setenv(Env.SAVER_PYTHON, "/bin/false")
    model = nn.Linear(1, 1)
    ckpt = Checkpointer(model, torch.optim.SGD(model.parameters(), 0.1), dir=tmp_path / "checkpoints")
    deadline, said = time.monotonic() + 30, ""
    while "the saver ended" not in said and time.monotonic() < deadline:
        model(torch.ones(1)).sum().backward()
        ckpt._training.optimizers[0][1].step()
        ckpt.step()
        said += capsys.readouterr().err
        time.sleep(0.01)
    ckpt._seat.page[protocol.Word.ENDED] = protocol.Ended.LEFT  # nobody saves: the end does not wait
    ckpt._finished = True

    assert "vramfarm: the saver ended with exit code 1; it is started again" in said


def small(tmp_path, **more):
    """A model with one weight, its optimizer, and a Checkpointer."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    return model, optimizer, Checkpointer(model, optimizer, dir=tmp_path / "checkpoints", **more)


def go_on(model, optimizer, ckpt, steps=1):
    for _ in range(steps):
        model(torch.ones(1)).sum().backward()
        optimizer.step()
        ckpt.step()
        time.sleep(0.01)


def test_what_has_finished_keeps_nothing(tmp_path):
    """
    A notebook, or a search over learning rates, has many Checkpointers in one process, and often keeps them and their
    optimizers: none of them may hold a copy of the state.
    """

    def staged():
        return Path("/proc/self/maps").read_text().count("vramfarm-arena")

    pages, before = set(Path("/dev/shm").glob(f"vramfarm-{os.getpid()}-*")), staged()
    kept = [small(tmp_path / str(number)) for number in range(2)]
    hooks = [len(optimizer._optimizer_step_pre_hooks) for _, optimizer, _ in kept]
    for one in kept:
        go_on(*one, steps=3)
        one[2].finish()

    assert [3, 3] == [ckpt.saved_step for _, _, ckpt in kept]
    assert staged() <= before
    assert ([1, 1], [0, 0]) == (hooks, [len(optimizer._optimizer_step_pre_hooks) for _, optimizer, _ in kept])
    assert [0, 0] == [len(optimizer._optimizer_step_post_hooks) for _, optimizer, _ in kept]
    assert pages == set(Path("/dev/shm").glob(f"vramfarm-{os.getpid()}-*"))


def test_a_folder_that_is_made_again_is_no_failure(tmp_path, capsys):
    """
    Nothing failed: the next save is there. "not saved" would send whoever reads the log to look for one that is not.
    """
    one = small(tmp_path)
    ckpt, until = one[2], time.monotonic() + 60
    ckpt.save()
    while not ckpt.saved_step and time.monotonic() < until:
        go_on(*one)
    first = ckpt.saved_step
    shutil.rmtree(tmp_path / "checkpoints")
    ckpt.save()
    while ckpt.saved_step == first and time.monotonic() < until:
        go_on(*one)
    ckpt.finish()
    said = capsys.readouterr().err

    assert f"vramfarm: {tmp_path}/checkpoints: was removed or renamed while training ran: it is made again" in said
    assert "not saved" not in said


@pytest.mark.parametrize("limits", [lambda epoch: {"epochs": epoch + 1}, lambda _: {}], ids=["epochs", "no limit"])
def test_there_may_be_a_validation_between_epochs(tmp_path, limits):
    """
    A loop for each epoch: every one has its batches, all is saved at the end, and a resumed one goes on in its epoch.
    """

    def run(epochs, stop=99):
        model, optimizer, ckpt = small(tmp_path, loader=[torch.ones(2, 1)] * 5)
        counts = []
        for epoch in range(epochs):
            counts.append(0)
            for step, batch in ckpt.steps(finish=False, **limits(epoch)):
                model(batch).sum().backward()
                optimizer.step()
                counts[-1] += 1
                if step + 1 == stop:
                    break
        ckpt.finish()
        return counts

    assert [5, 2] == run(2, stop=7)
    assert [0, 3, 5] == run(3)
    assert 15 == newest(tmp_path).manifest.step
    assert 15 == small(tmp_path)[2].saved_step


def test_a_save_that_was_asked_for_after_the_last_step_is_not_said_to_be_there(tmp_path):
    """
    It begins at one of the next steps, and there may be none.
    """
    _, _, ckpt = small(tmp_path)
    list(ckpt.steps([torch.ones(1)] * 2, finish=False))
    assert ckpt.wait(20)
    ckpt.save()

    assert not ckpt.wait(20)


def test_after_the_end_nothing_is_trained_in_silence(tmp_path):
    """
    A second loop, or a step, would never be saved: it says so.
    """
    _, _, ckpt = small(tmp_path)
    assert 0 == ckpt.saved_step
    list(ckpt.steps([torch.ones(1)] * 2))
    assert 2 == ckpt.saved_step

    with pytest.raises(RuntimeError, match=r"steps: the training has ended, .* finish=False"):
        next(iter(ckpt.steps([torch.ones(1)] * 2, epochs=2)))
    with pytest.raises(RuntimeError, match="step: the training has ended"):
        ckpt.step()
    with pytest.raises(RuntimeError, match="save: the training has ended"):
        ckpt.save()


class Doubled(DataLoader):
    """Does something of its own to each batch."""

    def __iter__(self):
        for (batch,) in super().__iter__():
            yield batch * 2


def test_a_loader_of_the_scripts_own_kind_stays_as_it_is(tmp_path):
    """
    What it does to its batches is done, and after a resume it goes on where it was.
    """
    numbers = TensorDataset(torch.arange(6.0).reshape(6, 1))
    seen = []
    for stop in (2, 99):
        _, _, ckpt = small(tmp_path, loader=Doubled(numbers, batch_size=1))
        for step, batch in ckpt.steps():
            seen.append(batch.item())
            ckpt._stepping.note(0)
            if step + 1 == stop:
                break
        ckpt.finish()

    assert [0.0, 2.0, 4.0, 6.0, 8.0, 10.0] == seen


def test_leaving_in_the_middle_of_an_accumulation_skips_no_sample(tmp_path):
    """
    Gradients that no optimizer step used are gone; the resumed run takes those samples again.
    """
    numbers = TensorDataset(torch.arange(16.0).reshape(16, 1))
    used = []
    for stop in (9, 99):
        model, optimizer, ckpt = small(tmp_path, loader=DataLoader(numbers, batch_size=1))
        pending = []
        for number, (_, (batch,)) in enumerate(ckpt.steps(accumulate=4)):
            model(batch).sum().backward()
            pending.append(int(batch))
            if ckpt.last_micro_batch:
                optimizer.step()
                used, pending = used + pending, []
            if number == stop:
                break
        ckpt.finish()

    assert list(range(16)) == used


class Shuffled(IterableDataset):
    """Another order each epoch, if it is told of it."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        order = torch.randperm(12, generator=torch.Generator().manual_seed(self.epoch))
        yield from order[worker.id :: worker.num_workers]


def test_persistent_workers_are_told_of_each_epoch(tmp_path):
    """
    Each works on a copy of the dataset from when it was started: every epoch would have the same order.
    """
    orders = []
    for persistent in (False, True):
        _, _, ckpt = small(tmp_path, resume="never")
        loader = DataLoader(Shuffled(), batch_size=6, num_workers=1, persistent_workers=persistent)
        orders.append([tuple(batch.tolist()) for _, batch in ckpt.steps(loader, epochs=2)])

    assert orders[0] == orders[1]
    assert len(set(orders[1])) == 4


def test_accelerates_loader_is_gone_through(tmp_path):
    """
    It has the methods of one that keeps its state, and none unless it was asked to.
    """
    accelerate = pytest.importorskip("accelerate")
    numbers = DataLoader(TensorDataset(torch.arange(8.0).reshape(8, 1)), batch_size=2)
    seen = []
    for stop in (2, 99):
        _, _, ckpt = small(tmp_path, loader=accelerate.Accelerator(cpu=True).prepare(numbers))
        for step, (batch,) in ckpt.steps():
            seen += batch.flatten().tolist()
            ckpt._stepping.note(0)
            if step + 1 == stop:
                break
        ckpt.finish()

    assert list(map(float, range(8))) == seen


def test_a_state_that_cannot_be_taken_fails_one_save_and_not_the_training(tmp_path, capsys):
    """
    An object that raises, or holds what only pickle could carry, for a while: the next save is whole.
    """
    thing = Kept({"n": 1})
    model, optimizer, ckpt = small(tmp_path, save_interval=0.05, thing=thing)
    deadline, said = time.monotonic() + 60, ""
    for _, batch in ckpt.steps([torch.ones(1)] * 100_000):
        model(batch).sum().backward()
        optimizer.step()
        time.sleep(0.002)
        said += capsys.readouterr().err
        thing.state = {"n": object()} if ckpt.start_step > 3 and "not saved" not in said else {"n": 2}
        committed = [stored.manifest.step for stored in folder.committed(tmp_path / "checkpoints")]
        if ("not saved" in said and committed) or time.monotonic() > deadline:
            break
    ckpt.finish()

    assert "its state could not be taken: StateError('thing.n: cannot be saved without pickle" in said
    assert newest(tmp_path).manifest.step == ckpt.start_step


def test_a_save_that_fails_again_and_again_is_told_once(tmp_path, capsys):
    """
    A disk that is full all night leaves the log readable. Each try has another step, so numbers are no news.
    """
    thing = Kept({"n": 1})
    model, optimizer, ckpt = small(tmp_path, save_interval=0.05, thing=thing)
    deadline = time.monotonic() + 60
    while ckpt._saves._told[1] < 3 and time.monotonic() < deadline:
        thing.state = {"n": object() if ckpt.start_step > 3 else 1}
        model(torch.ones(1)).sum().backward()
        optimizer.step()
        ckpt.step()
        time.sleep(0.02)
    thing.state = {"n": 2}
    failed = ckpt._saves._told[1]
    ckpt.finish()

    assert failed >= 3
    assert 1 == capsys.readouterr().err.count("not saved: ")


def test_what_is_complained_of_is_told_when_it_changes_and_every_ten_minutes():
    """
    Whoever comes in the morning finds it near the end of the log.
    """
    complaint = Complaint()
    full = "save of step {} failed: /a: one more checkpoint needs 25.2 MB, {} are free; free some space there"
    told = [
        (full.format(7, "0 B"), 1.0),
        (full.format(9, "1.5 kB"), 3.0),
        (full.format(9, "1.5 kB"), 600.0),
        (full.format(11, "0 B"), 601.0),
        ("save of step 12 failed: /a: Input/output error", 602.0),
        (full.format(13, "0 B"), 603.0),
    ]

    assert [True, False, False, True, True, True] == [complaint.is_news(text, now) for text, now in told]


def test_the_state_of_another_optimizer_is_refused_by_name(tmp_path):
    """
    It would end in the first step, with a KeyError of torch's; the same kind under another name goes on.
    """

    class Mine(torch.optim.AdamW):
        pass

    train(tmp_path, 1)
    with pytest.raises(StateError, match="the checkpoint has the state of a AdamW, which is of no use to a RMSprop"):
        train(tmp_path, 2, optimizer_of=lambda m: torch.optim.RMSprop(m.parameters()))

    _, _, ckpt = train(tmp_path, 2, optimizer_of=lambda m: Mine(m.parameters(), lr=0.01))
    assert 2 == ckpt.start_step


def test_a_buffer_without_memory_of_its_own_is_refused_at_the_start(tmp_path):
    """
    It could be saved, and no resume could ever load it.
    """
    model = nn.Linear(1, 1)
    model.register_buffer("wide", torch.ones(1).expand(4))

    with pytest.raises(StateError, match=r"model.wide: an expanded tensor, into which nothing can be loaded"):
        Checkpointer(model, dir=tmp_path)


def test_an_optimizer_that_is_not_due_makes_no_half_step(tmp_path):
    """
    One that steps every other time: leaving where it does not is a whole step, and one in whose turn an exception comes is half.
    """

    def run(name, stop):
        one, other = nn.Linear(1, 1), nn.Linear(1, 1)
        optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (one, other)]
        model = nn.ModuleDict({"one": one, "other": other})
        ckpt = Checkpointer(model, optimizers, dir=tmp_path / name)
        for step, batch in ckpt.steps([torch.ones(1)] * 20):
            (one(batch) + other(batch)).sum().backward()
            optimizers[0].step()
            if step == stop:
                break
            if step % 2 == 0:
                optimizers[1].step()
        return ckpt

    run("whole", 9).finish()
    with pytest.raises(RuntimeError, match="step 9 is half made"):
        run("half", 8).finish()

    assert 10 == newest(tmp_path, "whole").manifest.step


def test_an_accumulation_goes_on_over_the_end_of_an_epochs_loop(tmp_path):
    """
    As in one loop over all epochs, and after a resume between them: each step has its four samples.
    """

    def run(name, *ends):
        windows = []
        for end in ends:
            numbers = TensorDataset(torch.arange(10.0).reshape(10, 1))
            model, optimizer, ckpt = small(tmp_path / name, loader=DataLoader(numbers, batch_size=1))
            pending = []
            for epoch in range(end):
                for _, (batch,) in ckpt.steps(epochs=epoch + 1, accumulate=4, finish=False):
                    model(batch).sum().backward()
                    pending.append(int(batch))
                    if ckpt.last_micro_batch:
                        optimizer.step()
                        windows.append(pending)
                        pending = []
            ckpt.finish()
        return windows

    expected = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 1], [2, 3, 4, 5], [6, 7, 8, 9]]
    assert expected == run("whole", 2)
    assert expected == run("parts", 1, 2)


def test_one_more_pass_is_one_more_pass(tmp_path):
    """
    Also after a loop that named how many epochs it wanted.
    """
    _, _, ckpt = small(tmp_path, loader=[torch.ones(1)] * 3)
    counts = [len(list(ckpt.steps(finish=False, **more))) for more in ({"epochs": 2}, {}, {})]

    assert [6, 3, 3] == counts


def test_a_validation_that_draws_random_numbers_does_not_change_a_resume(tmp_path):
    """
    Epochs that are behind a resumed run validate again; random numbers are put back when training goes on.
    """

    def run(name, *stops):
        drawn = []
        for stop in stops:
            torch.manual_seed(3)
            _, _, ckpt = small(tmp_path / name, loader=[torch.ones(1)] * 4)
            for epoch in range(3):
                for step, _ in ckpt.steps(epochs=epoch + 1, finish=False):
                    drawn.append(torch.rand(()).item())
                    ckpt._stepping.note(0)
                    if step + 1 == stop:
                        break
                if ckpt.start_step == stop:
                    break
                torch.rand(5)
            ckpt.finish()
        return drawn

    assert run("whole", 12) == run("parts", 6, 12)


class Named(DataLoader):
    """Nothing but another name."""


@pytest.mark.parametrize(("kind", "kept"), [(DataLoader, False), (Named, False), (Doubled, True)])
def test_only_what_iterates_its_own_way_is_left_to_itself(kind, kept):
    """
    A name alone changes nothing: its samples are shared out over the ranks as those of torch's own kind.
    """
    loader = kind(TensorDataset(torch.arange(6.0)), batch_size=1, shuffle=True)

    assert kept == isinstance(data.feed(loader, World(0, 2), 0, None), data.SkippingFeed)
    assert data.is_unshared(loader, World(0, 2))
    assert not data.is_unshared(loader, World(0, 1))


@pytest.mark.parametrize("accumulate", [0, -2])
def test_a_step_of_no_batch_is_refused(tmp_path, accumulate):
    """
    It counted as one. A folder's name is no loader either.
    """
    ckpt = Checkpointer(nn.Linear(1, 1), dir=tmp_path)

    with pytest.raises(
        ValueError, match=f"steps: accumulate: expected a number of batches, 1 at least, got {accumulate}"
    ):
        next(ckpt.steps([torch.ones(1, 1)], accumulate=accumulate))
    with pytest.raises(TypeError, match="steps: expected a loader, or something else that gives batches, got str"):
        next(ckpt.steps("data"))


def test_an_optimizer_that_was_forgotten_is_told(tmp_path, capsys):
    """
    Its state would be lost in silence. Not told where one is given by a name, or nothing is to be trained.
    """
    Checkpointer(nn.Linear(1, 1), dir=tmp_path / "forgotten")
    told = capsys.readouterr().err
    model = nn.Linear(1, 1)
    Checkpointer(model, dir=tmp_path / "named", own=torch.optim.SGD(model.parameters()))
    Checkpointer(nn.Linear(1, 1).requires_grad_(requires_grad=False), dir=tmp_path / "fixed")

    assert 1 == told.count(NO_OPTIMIZER)
    assert NO_OPTIMIZER not in capsys.readouterr().err
