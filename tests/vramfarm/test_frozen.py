"""Frozen weights: written once, linked afterwards, and never believed to be frozen against the evidence."""

import mmap
import os
import signal
import time
import zlib

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader

from vramfarm import Checkpointer, folder, frozen, protocol, writing
from vramfarm.copies import Layout, _Plan, arrange
from vramfarm.image import Box, lay_out
from vramfarm.loading import Reader
from vramfarm.memory import PIECE_BYTES, address_of
from vramfarm.protocol import Word
from vramfarm.state import Snapshot
from vramfarm.still import Still

FROZEN = protocol.frozen_name(0, 1)


class Adapted(nn.Module):
    """A large weight that nobody trains, and a small one beside it."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(700, 700)
        self.base.requires_grad_(requires_grad=False)
        self.down = nn.Linear(700, 2, bias=False)
        self.up = nn.Linear(2, 700, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class Run:
    """A training that saves when it is told to."""

    def __init__(self, directory, model=None, **more):
        torch.manual_seed(3)
        self.directory = directory
        self.model = model or Adapted()
        self.optimizer = torch.optim.AdamW((p for p in self.model.parameters() if p.requires_grad), lr=0.1)
        self.ckpt = Checkpointer(self.model, self.optimizer, dir=directory, save_interval="1h", keep_last=9, **more)

    def step(self, num=1):
        for _ in range(num):
            self.model(torch.randn(2, 700)).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.ckpt.step()
            time.sleep(0.005)

    def save(self):
        """Train on until there is one more checkpoint, equal to the state at its step."""
        before, deadline = len(folder.committed(self.directory)), time.monotonic() + 60
        history, page, failures = {}, self.ckpt._seat.page, -1
        while len(folder.committed(self.directory)) == before:
            assert time.monotonic() < deadline, page.error()
            if page[Word.NUM_FAILED] != failures:
                failures = page[Word.NUM_FAILED]
                self.ckpt.save()
            self.step()
            history[self.ckpt.start_step] = {k: v.clone() for k, v in self.model.state_dict().items()}
        stored = folder.committed(self.directory)[0]
        reader, then = Reader(stored), history[stored.manifest.step]
        assert [] == [k for k, tensor in then.items() if not torch.equal(tensor, reader.read(f"model.{k}"))]
        return stored


def inode(stored, name=FROZEN):
    return (stored.path / name).stat().st_ino


def shards(stored):
    return [shard.path for shard in stored.manifest.shards]


@pytest.mark.filterwarnings("ignore::UserWarning")  # that there is no process group
def test_frozen_weights_are_written_once(tmp_path, capsys):
    """
    Later checkpoints, also those of a resumed run, link to the one file; others read all of it; older checkpoints may go.
    """
    run = Run(tmp_path)
    first, second = run.save(), run.save()
    run.ckpt.finish()
    again = Run(tmp_path)
    third = again.save()
    again.ckpt.finish()
    last = folder.committed(tmp_path)[0]

    assert ["shard-00000-of-00001.safetensors", FROZEN] == shards(first) == shards(last)
    assert 1 == len({inode(stored) for stored in (first, second, third, last)})
    assert (
        1
        == capsys.readouterr()
        .err.replace(again.ckpt.restored, "")
        .count("frozen weights, 0.00196 GB, are written once")
        - 1
    )
    for stored in folder.committed(tmp_path)[1:]:
        folder.remove(stored.path)
    with safe_open(last.path / FROZEN, "pt") as file:
        assert {"model.base.weight", "model.base.bias"} == set(file.keys())
    wanted = {f"model.{k}": torch.zeros_like(v) for k, v in again.model.state_dict().items()}
    dcp.load(wanted, storage_reader=HuggingFaceStorageReader(str(last.path)), no_dist=True)
    assert all(torch.equal(wanted[f"model.{k}"], v) for k, v in again.model.state_dict().items())


def thaw(model):
    model.base.requires_grad_(requires_grad=True)


def change_in_place(model):
    with torch.no_grad():
        model.base.weight.mul_(0.5)


def change_unseen(model):
    model.base.weight.data.mul_(0.5)


def sort_anew(model):
    model.base.weight.data.copy_(model.base.weight.data.flip(0))


def exchange(model):
    model.base.weight = nn.Parameter(model.base.weight.detach() * 2, requires_grad=False)


@pytest.mark.parametrize("change", [thaw, change_in_place, change_unseen, sort_anew, exchange])
def test_weights_that_are_not_frozen_after_all_are_noticed(tmp_path, change):
    """
    Whichever way they change, each checkpoint holds what they were at its step.
    """
    run = Run(tmp_path)
    first = run.save()
    change(run.model)
    second = run.save()
    run.ckpt.finish()

    same = set(first.manifest.shards) & set(second.manifest.shards)
    assert not any(shard.path == FROZEN for shard in same)


def test_an_average_is_not_frozen(tmp_path):
    """
    Nobody wants its gradient, and it changes with every step: it is saved each time.
    """
    model = Adapted()
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    average.requires_grad_(requires_grad=False)
    run = Run(tmp_path, model, ema=average)
    step = run.optimizer.register_step_post_hook(lambda *_: average.update_parameters(model))
    run.save()
    stored = run.save()
    step.remove()
    run.ckpt.finish()

    found = folder.committed(tmp_path)[0]
    assert all(torch.equal(v, Reader(found).read(f"ema.{k}")) for k, v in average.state_dict().items())
    assert FROZEN in shards(stored)


def test_a_saver_that_dies_finds_the_frozen_weights_again(tmp_path):
    """
    The next one links to them, without having them staged again.
    """
    run = Run(tmp_path)
    first = run.save()
    os.kill(run.ckpt._seat.page[Word.SAVER_PID], signal.SIGKILL)
    second = run.save()
    size = run.ckpt._seat.page.get(0, protocol.Slot.FROZEN_BYTES)
    run.ckpt.finish()

    assert (inode(first), 0) == (inode(second), size)


def test_frozen_weights_that_somebody_removed_are_written_again(tmp_path):
    """
    A save fails and says why; the next is whole.
    """
    run = Run(tmp_path)
    folder.remove(run.save().path)
    stored = run.save()
    failed = run.ckpt._seat.page[Word.NUM_FAILED]
    run.ckpt.finish()

    assert (1, 1) == (failed, len({inode(stored), inode(folder.committed(tmp_path)[0])}))


def test_frozen_weights_through_a_window(tmp_path):
    """
    Staged in pieces they are written once all the same, and looked at in each save.
    """
    run = Run(tmp_path, staging="chunked")
    first, second = run.save(), run.save()
    change_unseen(run.model)
    third = run.save()
    run.ckpt.finish()

    assert inode(first) == inode(second)
    assert FROZEN not in shards(third)


def test_little_is_not_worth_a_file(tmp_path):
    """
    A frozen bias goes where the rest goes.
    """
    model = nn.Linear(700, 2)
    model.bias.requires_grad_(requires_grad=False)
    run = Run(tmp_path, model)
    stored = run.save()
    run.ckpt.finish()

    assert 1 == len(stored.manifest.shards)


def test_a_copy_stands_for_a_link(tmp_path):
    """
    Where a filesystem has no links: verified on the way, and refused if it is not what was written.
    """
    raw = os.urandom(protocol.CHUNK_BYTES + 5)
    source, target = tmp_path / "a", tmp_path / "b"
    source.write_bytes(raw)
    shard = protocol.Shard("b", len(raw), tuple(zlib.crc32(c) for c in (raw[: protocol.CHUNK_BYTES], raw[-5:])))

    writing.copy_shard(source, target, shard)
    assert raw == target.read_bytes()
    source.write_bytes(raw[:-1] + b"\0")
    with pytest.raises(OSError, match="chunk 1 is not what was written"):
        writing.copy_shard(source, tmp_path / "c", shard)


def test_no_copy_lies_across_two_pinned_pieces():
    """
    A device refuses such a copy; the frozen weights begin anywhere.
    """
    at, size = 5 * 4096, 2 * PIECE_BYTES + 100
    key = Box("w", "U8", (size,), (0,))
    image = lay_out([key])
    memory = memoryview(mmap.mmap(-1, at + image.size_bytes))
    layout = Layout((image,), None, (), {key: torch.empty(size, dtype=torch.uint8)}, frozenset())

    parts = _Plan(memory[at:], layout, at=at)._parts(image.placed[0].begin, image.placed[0].end)

    begins = [part.data_ptr() - address_of(memory) for part in parts]
    assert size == sum(map(len, parts))
    assert all(a // PIECE_BYTES == (a + len(part) - 1) // PIECE_BYTES for a, part in zip(begins, parts, strict=True))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(3, 5),
        torch.ones(7, dtype=torch.bfloat16)[1:],
        torch.ones(4, 6).t(),
        torch.tensor(1.0),
        torch.ones(9, dtype=torch.uint8),
    ],
    ids=["plain", "odd", "turned", "scalar", "bytes"],
)
def test_any_changed_bit_changes_the_sum(tensor):
    """
    Of each kind of tensor, wherever it begins.
    """
    keys, before = ["w"], frozen.sums([tensor])
    assert set() == frozen.differing(keys, [tensor], before, frozen.sums([tensor]))()

    tensor.data.reshape(-1)[-1:].add_(1) if tensor.is_contiguous() else tensor.data[-1, -1].add_(1)

    assert {"w"} == frozen.differing(keys, [tensor], before, frozen.sums([tensor]))()


def marks(size, *places):
    tensor = torch.zeros(size)
    tensor[list(places)] = 1
    return tensor


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (marks(1000, 0), marks(1000, 10)),
        (marks(1000, 0, 6), marks(1000, 2, 4)),
        (marks(300_000, 8), marks(300_000, 299_990)),
        (torch.arange(600_000), torch.arange(600_000).view(600, 1000).flip(0).reshape(-1)),
        (torch.arange(600_000), torch.arange(600_000).view(600, 1000).flip(1).reshape(-1)),
        (torch.eye(2000, dtype=torch.int64), torch.eye(2000, dtype=torch.int64).flip(0)),
    ],
    ids=["mark", "two marks", "far", "rows", "columns", "permutation"],
)
def test_the_same_numbers_in_another_order_have_another_sum(one, other):
    """
    In small tensors and in large ones, in whatever way they changed places.
    """
    assert frozen.sums([one])[one.device] != frozen.sums([other])[one.device]


def test_each_rank_goes_on_with_the_frozen_weights_that_it_wrote_first():
    """What comes, grows and goes beside them, as replay buffers do, changes who writes what else; each tensor has one writer."""
    model = nn.Sequential(*(nn.Linear(600, 600) for _ in range(5)))
    model[:3].requires_grad_(requires_grad=False)
    known = [Still({"model": model}, [], rank=rank, world_size=2) for rank in range(2)]
    layouts, first = [None, None], None
    for size in (0, 2_000_000, 100, 900_000, 0):
        for rank in range(2):
            snapshot = Snapshot(rank, 2)
            snapshot.add("replay.seen", torch.zeros(size), spread=size == 900_000)
            layouts[rank] = arrange(known[rank], snapshot.pieces if size else [], layouts[rank])
        apart = [[box.key for box in one.frozen.still] for one in layouts]
        written = [box.key for one in layouts for image in one.images for box in (at.box for at in image.placed)]
        first = first or apart

        assert first == apart
        assert all(apart)
        assert sorted([*model_keys(model), *(["replay.seen"] if size else [])]) == sorted(
            [*apart[0], *apart[1], *written]
        )


def model_keys(model):
    return [f"model.{name}" for name in model.state_dict()]
