"""What a save holds is the state at its step, whatever training does next; and how staging gets ready beside it."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from vramfarm import Checkpointer, folder, memory, staging
from vramfarm.loading import Reader
from vramfarm.protocol import Arena, Slot, Word
from vramfarm.still import Still

STEPS = 40
ROOT = Path(__file__).parents[2]


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.turned = nn.Parameter(torch.randn(16, 3).t())
        self.last = nn.Linear(16, 1)

    def forward(self, x):
        return self.last(self.norm(self.first(x))) + self.turned.sum()


def state_of(model, optimizer):
    names = {id(p): name for name, p in model.named_parameters()}
    found = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    for parameter, state in optimizer.state.items():
        found |= {f"optimizer.state.{names[id(parameter)]}.{key}": value for key, value in state.items()}
    return {key: staging.local_of(tensor).clone() for key, tensor in found.items()}


def keep_all(model, step):
    pass


def exchange(model, step):
    model.first.weight.data = model.first.weight.data.clone()


def grow(model, step):
    """A layer more, on the way: the layout changes."""
    if step == STEPS // 2:
        model.first = nn.Sequential(nn.Linear(8, 8), model.first)


@pytest.mark.parametrize("between", [keep_all, exchange, grow])
def test_a_save_holds_the_state_of_its_step(tmp_path, between):
    """
    Many saves, asked for again and again, while the optimizer goes on, tensors are exchanged and layers come in.
    """
    torch.manual_seed(0)
    model = Small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    ckpt = Checkpointer(model, optimizer, dir=tmp_path, save_interval="1h", keep_last=STEPS)
    history = {}
    for step in range(1, STEPS + 1):
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        history[step] = state_of(model, optimizer)
        ckpt.save()
        ckpt.step()
        between(model, step)
        time.sleep(0.02)
    if between is grow:
        history[STEPS] = state_of(model, optimizer)
    ckpt.finish()

    found = folder.committed(tmp_path)
    assert 3 < len(found)
    for stored in found:
        reader = Reader(stored)
        then = history[stored.manifest.step]
        assert set(then) == {k for k in reader.keys if not k.startswith("rng")}
        assert [k for k, tensor in then.items() if not torch.equal(tensor, reader.read(k))] == []


def test_a_save_of_a_compiled_model_that_accumulates_holds_the_state_of_its_step(tmp_path):
    """
    Asked for with every micro-batch, so also while gradients are half accumulated, and while the save before is being
    written: that one is whole, and what was asked meanwhile gets the next. VRAMFARM_BACKEND: another one than eager.
    """
    torch.manual_seed(0)
    model = Small()
    compiled = torch.compile(model, backend=os.environ.get("VRAMFARM_BACKEND", "eager"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    ckpt = Checkpointer(compiled, optimizer, dir=tmp_path, save_interval="1h", keep_last=STEPS)
    page, history, asked_meanwhile = ckpt._seat.page, {}, 0
    for step, x in ckpt.steps([torch.randn(4, 8) for _ in range(9)], epochs=3000, accumulate=3):
        compiled(x).square().mean().backward()
        if ckpt.last_micro_batch:
            optimizer.step()
            optimizer.zero_grad()
            history[step + 1] = state_of(model, optimizer)
        asked_meanwhile += bool(page[Word.SAVING_STEP])
        ckpt.save()
        time.sleep(0.005)
        if ckpt.last_micro_batch and asked_meanwhile and page[Word.NUM_COMMITTED] > 4:
            break
    ckpt.finish()

    found = folder.committed(tmp_path)
    assert asked_meanwhile > 0
    assert (max(history), True) == (found[0].manifest.step, len(found) > 4)
    for stored in found:
        reader, then = Reader(stored), history[stored.manifest.step]
        assert set(then) == {k for k in reader.keys if not k.startswith("rng")}
        assert [k for k, tensor in then.items() if not torch.equal(tensor, reader.read(k))] == []


def test_what_stays_is_looked_at_once():
    """
    A state is walked again only when something in it was exchanged, not when it was trained.
    """
    model = Small()
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()

    step()
    still = Still({"model": model}, [("optimizer", optimizer)], rank=0, world_size=1)
    step()

    assert still.holds()
    model.first.bias.data = model.first.bias.data.clone()
    assert not still.holds()


def test_only_what_the_optimizer_changes_may_be_copied_late():
    """
    Weights that it was not given, buffers, and what a state_dict makes up are copied at once.
    """
    model = Small()
    model.first.requires_grad_(requires_grad=False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()

    still = Still({"model": model}, [("optimizer", optimizer)], rank=0, world_size=1)

    assert "model.last.weight" in still.owned
    assert "optimizer.state.last.weight.momentum_buffer" in still.owned
    assert not still.owned & {"model.first.weight", "model.norm.running_mean"}


def test_memory_that_what_is_saved_has_outgrown_is_not_rehearsed(tmp_path):
    """
    A save that needed more has announced another memory, while the first was still being made ready.
    """
    ckpt = Checkpointer(nn.Linear(100, 100), dir=tmp_path)
    size = ckpt._saves.contents.take().layout.size_bytes

    planned = []
    for arena in (bytearray(size - 1), bytearray(size)):
        ckpt._saves._rehearse(memoryview(arena))
        planned.append(ckpt._saves._copier._plan is not None)

    assert [False, True] == planned


def test_staging_memory_is_ready_before_it_is_needed(tmp_path):
    """
    After the first steps the saver has given it its pages and nothing more is to be done; a save waits for that.
    """
    model = nn.Linear(1000, 1000)
    ckpt = Checkpointer(model, dir=tmp_path, save_interval="1h")
    page, rank = ckpt._seat.page, ckpt._seat.rank
    assert 1 == page.get(rank, Slot.WARMING)
    ckpt.save()
    deadline = time.monotonic() + 20
    while not ckpt._saves.is_warm and time.monotonic() < deadline:
        assert 0 == page[Word.NUM_COMMITTED]
        ckpt.step()
        time.sleep(0.01)

    assert 0 == page.get(rank, Slot.WARMING)
    assert page.get(rank, Slot.ARENA_BYTES) > 4_000_000
    before = page.get(rank, Slot.ARENA_FD)
    while page[Word.NUM_COMMITTED] == 0 and time.monotonic() < deadline:
        ckpt.step()
        time.sleep(0.01)
    assert before == page.get(rank, Slot.ARENA_FD)
    ckpt.finish()


class Large(nn.Module):
    """With its optimizer's state 110 MB, in tensors that end anywhere, one of them with holes in memory."""

    def __init__(self):
        super().__init__()
        self.wide = nn.Linear(2999, 3001)
        self.turned = nn.Parameter(torch.randn(77, 33).t())

    def forward(self, x):
        return self.wide(x).sum() + self.turned.sum()


def test_a_state_larger_than_the_memory_for_it(tmp_path):
    """
    `chunked`: through a window of 32 MB, and each checkpoint is the state of its step, also where the saver is killed
    in the middle of a save.
    """
    torch.manual_seed(0)
    model = Large()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    ckpt = Checkpointer(model, optimizer, dir=tmp_path, save_interval="1h", keep_last=9, staging="chunked")
    page, history, killed = ckpt._seat.page, {}, threading.Event()

    def kill_in_a_save():
        while page[Word.NUM_COMMITTED] == 0 or page.get(0, Slot.WINDOWS_TAKEN) != 1 or not page[Word.SAVING_STEP]:
            time.sleep(0.0005)
        os.kill(page[Word.SAVER_PID], signal.SIGKILL)
        killed.set()

    killer = threading.Thread(target=kill_in_a_save, daemon=True)
    killer.start()
    deadline = time.monotonic() + 120
    while not (killed.is_set() and len(history) > 3 and page[Word.NUM_COMMITTED] > 2):
        assert time.monotonic() < deadline, page.error()
        model(torch.randn(1, 2999)).backward()
        optimizer.step()
        optimizer.zero_grad()
        history = {k: v for k, v in history.items() if k > ckpt.start_step - 3 or k in steps_in(tmp_path)}
        history[ckpt.start_step + 1] = state_of(model, optimizer)
        ckpt.save()
        ckpt.step()
    ckpt.finish()

    assert 32 << 20 < page.get(0, Slot.ARENA_BYTES) < 34 << 20
    for stored in folder.committed(tmp_path):
        reader, then = Reader(stored), history[stored.manifest.step]
        assert [] == [k for k, tensor in then.items() if not torch.equal(tensor, reader.read(k))]
        folder.remove(stored.path)


@pytest.mark.parametrize("memory_is", ["short", "refused"])
def test_where_there_is_no_memory_for_a_copy(tmp_path, capsys, memory_is):
    """
    Told from what is left, or by the saver, which could not take it: saved all the same, and said.
    """
    model = nn.Linear(100, 100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    ckpt = Checkpointer(model, optimizer, dir=tmp_path, save_interval="1h")
    page = ckpt._seat.page
    if memory_is == "short":
        ckpt._saves._available = 1000
    deadline = time.monotonic() + 60
    while not (ckpt._saves.is_warm and page[Word.NUM_COMMITTED]):
        assert time.monotonic() < deadline, page.error()
        model(torch.randn(4, 100)).square().mean().backward()
        optimizer.step()
        if ckpt._saves.is_warm and memory_is == "refused" and not ckpt._saves._is_bounded:
            page.put(0, Slot.ARENA_STATE, Arena.NONE)
        if ckpt._saves.is_warm:
            ckpt.save()
        ckpt.step()
        time.sleep(0.01)
    ckpt.finish()

    said = capsys.readouterr().err
    assert ("staging: chunked: 0.034 GB a rank, training waits" in said) == (memory_is == "short")
    assert ("staging: chunked from now on" in said) == (memory_is == "refused")
    assert torch.equal(model.weight, Reader(folder.committed(tmp_path)[0]).read("model.weight"))


@pytest.fixture
def group():
    """A control group of memory of our own, of 300 MB."""
    kinds = dict(line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines())
    root, limit = ("memory", "memory.limit_in_bytes") if "memory" in kinds else ("", "memory.max")
    place = Path("/sys/fs/cgroup", root, kinds.get("memory", kinds.get("", "")).lstrip("/"), f"engine-{os.getpid()}")
    try:
        place.mkdir()
        (place / limit).write_text("300000000")
    except OSError as error:
        pytest.skip(f"no control group to be had: {error}")
    yield place
    place.rmdir()


def test_memory_is_that_of_the_group_a_process_is_in(group):
    """
    Wherever below the machine's or the container's own group: what is taken beyond it would end the training.
    """
    code = "import sys; open(sys.argv[1], 'w').write('0'); from vramfarm import memory; print(memory.available_bytes())"
    done = subprocess.run(
        [sys.executable, "-c", code, group / "cgroup.procs"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )

    assert 200_000_000 < int(done.stdout) < 300_000_000


def steps_in(directory):
    return {stored.manifest.step for stored in folder.committed(directory)}


@pytest.mark.parametrize(
    ("wish", "needed", "available", "bounded"),
    [
        ("auto", 8, 10, False),
        ("auto", 9, 10, True),
        ("auto", 9, None, False),
        ("full", 99, 10, False),
        ("chunked", 1, 10, True),
    ],
)
def test_memory_for_a_save(wish, needed, available, bounded):
    """
    Without a wish a copy of all may take four fifths of what is left, on this machine or in this container.
    """
    assert bounded == memory.is_bounded(wish, needed, available)
