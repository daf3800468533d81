"""A folder of checkpoints that a stranger may write to runs nothing, whatever the script's own objects do with what they are given back."""

import base64
import io
import os
import pickle

import pytest
import torch
from torch import nn

from vramfarm import Checkpointer, unpickling
from vramfarm.typed import StateError


class Payload:
    """Its pickle makes a folder where it is loaded."""

    def __init__(self, place):
        self.place = place

    def __reduce__(self):
        return os.mkdir, (str(self.place),)


def as_tensor(raw, dtype):
    return torch.frombuffer(bytearray(raw + b"." * (-len(raw) % 8)), dtype=dtype).clone()


def saved_by_torch(thing):
    file = io.BytesIO()
    torch.save(thing, file)
    return file.getvalue()


DISGUISES = {
    "bytes": pickle.dumps,
    "a tensor of bytes": lambda thing: as_tensor(pickle.dumps(thing), torch.uint8),
    "a tensor of numbers": lambda thing: as_tensor(pickle.dumps(thing, 0), torch.float32),
    "text": lambda thing: base64.b64encode(pickle.dumps(thing)).decode(),
    "torch.save": saved_by_torch,
}


def unpickle(told):
    """As trusting as they come."""
    if isinstance(told, torch.Tensor):
        told = told.numpy().tobytes()
    raw = base64.b64decode(told) if isinstance(told, str) else told
    if raw.startswith(b"PK"):
        return torch.load(io.BytesIO(raw), weights_only=False)
    return pickle.loads(raw)


class Trusting(nn.Module):
    """Says what it was told to, and unpickles what it is given back."""

    def __init__(self, said):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.said = said

    def get_extra_state(self):
        return self.said

    def set_extra_state(self, state):
        self.said = unpickle(state)


class TrustingObject:
    def __init__(self, said):
        self.said = said

    def state_dict(self):
        return {"inner": [self.said]}

    def load_state_dict(self, state):
        unpickle(state["inner"][0])


class TrustingOptimizer(torch.optim.SGD):
    def load_state_dict(self, state):
        unpickle(state["param_groups"][0]["more"])


HARMLESS = pickle.dumps(0)


def stranger(place, where, given):
    """Write a checkpoint whose manifest agrees with all that is in it."""
    model = Trusting(given if where == "model" else HARMLESS)
    group = {"params": model.parameters(), "more": given if where == "optimizer" else HARMLESS}
    thing = TrustingObject(given if where == "state" else HARMLESS)
    ckpt = Checkpointer(model, torch.optim.SGD([group], lr=0.1), state=thing, dir=place, allow_pickle=True)
    ckpt.step()
    ckpt.finish()


def resume(place, **more):
    model = Trusting(HARMLESS)
    return Checkpointer(
        model, TrustingOptimizer(model.parameters(), lr=0.1), state=TrustingObject(0), dir=place, **more
    )


@pytest.mark.parametrize(
    ("where", "disguise"),
    [
        ("model", "a tensor of numbers"),
        ("model", "text"),
        ("model", "torch.save"),
        ("state", "a tensor of bytes"),
        ("optimizer", "bytes"),
    ],
)
def test_a_hostile_folder_runs_nothing_through_the_scripts_own_objects(tmp_path, where, disguise):
    """
    A module, an object, an optimizer that unpickles what it is given back, in whatever form: the resume is refused,
    by name, and nothing ran. Who allows it gets what they allowed, so there is something to refuse.
    """
    mark = tmp_path / "it ran"
    stranger(tmp_path / "checkpoints", where, DISGUISES[disguise](Payload(mark)))

    with pytest.raises(
        StateError, match=rf"{where}: unpickles what the checkpoint gives it, which names \w+\.mkdir; a pickle can run"
    ):
        resume(tmp_path / "checkpoints")

    assert not mark.exists()
    resume(tmp_path / "checkpoints", allow_pickle=True).finish()
    assert mark.is_dir()


@pytest.mark.parametrize(("when", "disguise"), [("start", "a tensor of bytes"), ("first step", "torch.save")])
def test_what_could_not_be_loaded_is_not_saved(tmp_path, when, disguise):
    """
    A module that keeps a pickle is refused while that costs nothing, not at 3 a.m. when it is to be resumed.
    """
    kept = DISGUISES[disguise](torch.zeros(2))
    model = Trusting(kept if when == "start" else None)

    def begin():
        ckpt = Checkpointer(model, dir=tmp_path)
        model.said = kept
        ckpt.step()

    with pytest.raises(StateError, match=r"model\._extra_state: cannot be saved: it is a pickle; .*allow_pickle=True"):
        begin()


@pytest.mark.parametrize(
    "value", [b"", b"PK no archive", b"(plain bytes", torch.get_rng_state(), {"a": [1, "c", None]}, pickle.dumps([1])]
)
def test_what_names_nothing_is_no_danger(value):
    """
    Random numbers' state, bytes of one's own, a pickle of a list: nothing of it is refused.
    """
    unpickling.refuse("it", value)


def test_other_code_unpickles_as_it_likes():
    """
    Nothing stays forbidden when the hand-over is done, whichever way it ended.
    """
    raw = pickle.dumps(torch.Size)
    with pytest.raises(StateError), unpickling.forbidden("it"):
        pickle.loads(raw)

    assert torch.Size is pickle.loads(raw)
