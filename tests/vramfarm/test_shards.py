"""The shards: readable by others, verified by us, each byte with one writer."""

import itertools
import json
import math
import os
import struct
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch.distributed.checkpoint import HuggingFaceStorageReader

from vramfarm import flat, folder, image, protocol, staging, state, writing
from vramfarm.copies import Copier, Layout, Taken
from vramfarm.image import Box, ImageError
from vramfarm.loading import DamagedError, Reader
from vramfarm.staging import Piece, piece_of
from vramfarm.streaming import Source
from vramfarm.typed import StateError

TENSORS = {
    "w": torch.arange(15, dtype=torch.float32).reshape(5, 3),
    "half": torch.ones(7, dtype=torch.bfloat16),
    "step": torch.tensor(3.0),
    "count": torch.tensor(2**40),
    "mask": torch.tensor([True, False, True]),
    "empty": torch.zeros(0, 4),
    "bytes": torch.arange(11, dtype=torch.uint8),
    "strided": torch.arange(12, dtype=torch.float64).reshape(3, 4).t(),
}


def write(directory, tensors, world_size, *, rows=("w",)):
    """Write a checkpoint as `world_size` ranks would: `rows` are sharded, the rest is replicated."""
    return write_pieces(
        directory,
        [
            staging.choose([_piece(k, t, rank, world_size, sharded=k in rows) for k, t in tensors.items()])
            for rank in range(world_size)
        ],
    )


def write_pieces(directory, ranks):
    """Write a checkpoint of the pieces that each rank has."""
    temporary, world_size = directory / ".tmp-x", len(ranks)
    temporary.mkdir(parents=True)
    shards = []
    for rank, pieces in enumerate(ranks):
        shard = image.lay_out(piece.box for piece in pieces)
        memory = memoryview(bytearray(shard.size_bytes))
        layout = Layout((shard,), None, (), {}, frozenset())
        taken = Taken(layout, {p.box: p.local for p in pieces}, b"", is_new=True)
        Copier([], hide=True).fill(memory, memoryview(b""), taken, may_hide=False)
        path = temporary / protocol.shard_name(rank, world_size)
        shards.append(writing.write_shard(path, memory, shard.size_bytes))
    manifest = protocol.Manifest("job", 0, 5, "0123abcd", 1, world_size, "", "crc32", tuple(shards))
    return folder.read(folder.commit(temporary, manifest))


def _piece(key, tensor, rank, world_size, *, sharded):
    if not sharded:
        return piece_of(key, tensor, rank=rank, world_size=world_size, spread=True)
    per = -(-tensor.shape[0] // world_size)
    local = tensor[rank * per : (rank + 1) * per]
    offset = min(rank * per, tensor.shape[0])
    box = Box(key, staging.DTYPES[tensor.dtype], tuple(local.shape), (offset, *(0,) * (tensor.dim() - 1)))
    return Piece(box, local, tuple(tensor.shape))


@pytest.mark.parametrize("world_size", [1, 2, 4, 7])
def test_any_rank_count_reads_what_any_wrote(tmp_path, world_size):
    """
    Whole tensors and any box of them come back bit by bit, empty shards or not.
    """
    reader = Reader(write(tmp_path, TENSORS, world_size))

    assert set(TENSORS) == set(reader.keys)
    for key, tensor in TENSORS.items():
        assert (tuple(tensor.shape), tensor.dtype) == (reader.shape(key), reader.dtype(key))
        assert torch.equal(tensor, reader.read(key))
    box = torch.zeros(3, 2)
    reader.read_into("w", box, (2, 1))
    assert torch.equal(TENSORS["w"][2:5, 1:3], box)


def test_safetensors_opens_a_shard(tmp_path):
    """
    Any safetensors reader opens our files.
    """
    stored = write(tmp_path, TENSORS, 1)

    with safe_open(stored.path / stored.manifest.shards[0].path, "pt") as file:
        assert set(TENSORS) == set(file.keys())
        assert all(torch.equal(tensor, file.get_tensor(key)) for key, tensor in TENSORS.items())


@pytest.mark.filterwarnings("ignore::UserWarning")  # that there is no process group
def test_torch_reshards_our_files(tmp_path):
    """
    torch's own reader loads a checkpoint of 4 ranks in one process.
    """
    stored = write(tmp_path, TENSORS, 4)
    wanted = {
        key: torch.zeros_like(t, memory_format=torch.contiguous_format) for key, t in TENSORS.items() if t.numel()
    }

    dcp.load(wanted, storage_reader=HuggingFaceStorageReader(str(stored.path)), no_dist=True)

    assert all(torch.equal(TENSORS[key], tensor) for key, tensor in wanted.items())


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
@settings(deadline=None)
def test_a_range_of_elements_is_a_few_boxes(shape, data):
    """
    Each element of the range once, in order, without holes in memory; at most 2n - 1 boxes for n dimensions.
    """
    whole = torch.arange(math.prod(shape)).reshape(shape)
    begin, end = sorted(data.draw(st.tuples(*[st.integers(0, whole.numel())] * 2)))
    boxes = flat.split(shape, begin, end)
    found = [whole[tuple(slice(o, o + n) for o, n in zip(*box, strict=True))] for box in boxes]

    assert list(range(begin, end)) == [i for box in found for i in box.flatten().tolist()]
    assert all(box.is_contiguous() for box in found)
    assert 2 * len(shape) > len(boxes)


def test_further_boxes_of_a_tensor_go_to_further_files():
    """
    No file has a name twice; each begins on a page, where whoever knows their sizes looks for it.
    """
    boxes = [Box("w", "F32", (2, 3), (1, 0)), Box("v", "F32", (4,), (0,)), Box("w", "F32", (1, 2), (0, 1))]
    images = image.lay_out_all(boxes)

    assert [{"w", "v"}, {"w"}] == [{placed.box.key for placed in one.placed} for one in images]
    assert [(one.begin, one.begin + one.size_bytes) for one in images] == image.places(i.size_bytes for i in images)
    assert 0 == images[1].begin % 4096 == images[1].placed[0].begin % 4096


@given(st.lists(st.integers(0, 400), min_size=1, max_size=20), st.integers(1, 8))
@settings(deadline=None)
def test_each_replicated_tensor_has_one_writer_and_the_work_is_shared(sizes, world_size):
    """
    All ranks choose alike without talking; no rank has more than its share and one tensor.
    """
    tensors = {f"t{i}": torch.zeros(size, dtype=torch.uint8) for i, size in enumerate(sizes)}
    chosen = [
        staging.choose([piece_of(k, t, rank=r, world_size=world_size, spread=True) for k, t in tensors.items()])
        for r in range(world_size)
    ]
    loads = [sum(piece.local.numel() for piece in pieces) for pieces in chosen]

    assert sorted(tensors) == sorted(piece.box.key for pieces in chosen for piece in pieces)
    assert max(loads) <= sum(sizes) / world_size + max(sizes)


LARGE = {
    "a": torch.arange(5_000_000, dtype=torch.float32).reshape(1000, 5000),
    "b": torch.arange(3_000_000, dtype=torch.int64).reshape(300, 100, 100),
    "c": torch.arange(1_500_000, dtype=torch.float32).reshape(5000, 300).t(),
}


@pytest.mark.parametrize("world_size", [1, 3])
def test_large_parts_go_straight_to_their_place(tmp_path, world_size):
    """
    Rows of a tensor and whole ones, from several files, chunk by chunk; with holes in memory the slow way.
    """
    reader = Reader(write(tmp_path, LARGE, world_size, rows=("a", "b")))
    rows = torch.empty(500, 5000)
    holes = torch.empty(5000, 300).t()
    whole = torch.empty(300, 100, 100, dtype=torch.int64)

    reader.read_into("a", rows, (250, 0))
    reader.read_into("b", whole, (0, 0, 0))
    reader.read_into("c", holes, (0, 0))
    reader.flush()

    assert torch.equal(LARGE["a"][250:750], rows)
    assert torch.equal(LARGE["b"], whole)
    assert torch.equal(LARGE["c"], holes)


def test_a_flipped_bit_in_a_large_part_is_found(tmp_path):
    """
    Read directly, verified all the same.
    """
    stored = write(tmp_path, LARGE, 1)
    path = stored.path / stored.manifest.shards[0].path
    raw = bytearray(path.read_bytes())
    raw[20_000_000] ^= 2
    path.write_bytes(raw)
    reader = Reader(stored)
    reader.read_into("a", torch.empty(1000, 5000), (0, 0))
    reader.read_into("b", torch.empty(300, 100, 100, dtype=torch.int64), (0, 0, 0))

    with pytest.raises(DamagedError, match="bytes from 16777216: expected checksum"):
        reader.flush()


@pytest.mark.parametrize("at", ["header", "tensor"])
def test_a_flipped_bit_is_found(tmp_path, at):
    """
    One bit anywhere, and the checkpoint is damaged, not loaded.
    """
    stored = write(tmp_path, TENSORS, 1)
    path = stored.path / stored.manifest.shards[0].path
    raw = bytearray(path.read_bytes())
    raw[20 if at == "header" else -1] ^= 1
    path.write_bytes(raw)

    with pytest.raises(DamagedError, match="expected checksum"):
        [Reader(stored).read(key) for key in TENSORS]


def test_what_lies_in_the_page_cache_is_not_fetched_from_the_disk(tmp_path):
    """
    A supervisor reads ahead while torch is imported. The kernel counts what comes from the disk.
    """
    stored = write(tmp_path, LARGE, 1)
    for shard in stored.manifest.shards:
        (stored.path / shard.path).read_bytes()
    reader = Reader(stored)
    tensor = torch.empty(1000, 5000)
    reader.read_into("a", tensor, (0, 0))

    before = read_from_disk()
    reader.flush()

    assert torch.equal(LARGE["a"], tensor)
    assert True is (read_from_disk() - before < tensor.nbytes / 2)


def read_from_disk():
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes:"))


def test_a_shard_that_the_disk_does_not_give_back_is_damaged():
    """
    An unreadable block is damage as a flipped bit is: an older checkpoint may be whole.
    """
    unreadable = Path("/proc/self/mem")  # nothing is mapped at its beginning
    shard = protocol.Shard("mem", protocol.CHUNK_BYTES, (0,))

    with pytest.raises(DamagedError, match="self/mem: bytes from 0: Input/output error"):
        Source(unreadable, shard).keep(0)


def test_only_what_is_read_is_verified(tmp_path):
    """
    A rank pays for its own part: damage elsewhere is another rank's to find.
    """
    chunk = protocol.CHUNK_BYTES
    stored = write(
        tmp_path, {"a": torch.zeros(chunk, dtype=torch.uint8), "b": torch.ones(2 * chunk, dtype=torch.uint8)}, 1
    )
    with (stored.path / stored.manifest.shards[0].path).open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\xff")
    reader = Reader(stored)

    assert 0 == reader.read("a").sum()
    with pytest.raises(DamagedError):
        reader.read("b")


@pytest.mark.parametrize(
    ("boxes", "why"),
    [
        pytest.param([(0, 2), (2, 3)], "", id="whole"),
        pytest.param([(0, 2), (0, 2), (2, 3)], "w: 15 elements, and the ranks staged 21 of it", id="twice"),
        pytest.param([(0, 2), (3, 2)], "w: 15 elements, and the ranks staged 12 of it", id="a hole"),
        pytest.param(
            [(0, 2), (0, 2), (4, 2)], "w: some of its elements were staged twice, and others not at all", id="both"
        ),
    ],
)
def test_what_the_ranks_staged_is_whole(boxes, why):
    """
    Each element once, told from the headers.
    """
    shards = [image.lay_out([Box("w", "F32", (rows, 3), (begin, 0))]).placed for begin, rows in boxes]

    assert why == image.want_of_cover(shards)


def test_parts_with_different_dimensions_are_no_tensor():
    """
    Said, where a saver would die of it, and its successor again.
    """
    shards = [image.lay_out([Box("w", "F32", shape, (0,) * len(shape))]).placed for shape in ((3,), ())]

    assert "w: staged with 0 and with 1 dimensions" == image.want_of_cover(shards)


@given(st.randoms(use_true_random=False), st.integers(1, 3))
def test_boxes_overlap_where_an_element_is_in_two(random, dims):
    """
    As counting says, element by element, of boxes anywhere, nested and empty ones too.
    """
    boxes = []
    for _ in range(random.randint(1, 6)):
        offsets = tuple(random.randint(0, 4) for _ in range(dims))
        boxes.append(Box("w", "U8", tuple(random.randint(0, 3) for _ in range(dims)), offsets))
    elements = [
        at
        for box in boxes
        for at in itertools.product(*(range(o, o + n) for o, n in zip(box.offsets, box.shape, strict=True)))
    ]

    assert (len(set(elements)) < len(elements)) == image.overlap(boxes)


def test_slices_of_many_ranks_are_compared_in_a_moment():
    """
    Not each with each: a hundred thousand slices of one tensor, and none overlaps.
    """
    assert not image.overlap([Box("w", "F32", (2, 3), (2 * n, 0)) for n in range(100_000)])


def test_a_checkpoint_whose_parts_overlap_is_damaged(tmp_path):
    """
    The count of its elements is right, and a row is nowhere: it would keep what the script began with.
    """
    rows = torch.arange(6.0).reshape(2, 3)
    stored = write_pieces(tmp_path, [[Piece(Box("w", "F32", (2, 3), (at, 0)), rows, (6, 3))] for at in (0, 0, 4)])

    with pytest.raises(DamagedError, match="w: parts of it overlap"):
        Reader(stored)


def test_groups_that_hold_the_same_share_the_work():
    """
    Of a layer that is spread over two of four ranks, the other two hold a copy.
    """
    groups = [[[0, 1, 2, 3], [0, 2]], [[0, 1, 2, 3], [1, 3]], [[0, 1, 2, 3], [0, 2]], [[0, 1, 2, 3], [1, 3]]]

    assert {(0, 1, 2, 3): (0, 1), (0, 2): (0, 2)} == staging.arrange(groups, 2)
    assert (1, 2) == staging.arrange(groups, 1)[1, 3]
    with pytest.raises(StateError, match=r"over the ranks \[\(0, 2\), \(1, 2\)\], and not all ranks have them"):
        staging.arrange([[[0, 2]], [[1, 2]], [[0, 2]]], 0)


def test_ranks_with_different_models_are_refused():
    """
    Of a model whose layers are on different ranks, each would take the others' for copies of its own.
    """
    outlines = [state.outline({"model": torch.nn.Linear(3, size)}) for size in (4, 4, 5)]

    assert {} == state.compare(outlines[:2], 1)
    with pytest.raises(StateError, match="rank 2 holds another model than rank 0: 2 tensors, with other names, shapes"):
        state.compare(outlines, 0)
    with pytest.raises(StateError, match="rank 1 holds another model than rank 0: 0 tensors, rank 0 has 2;"):
        state.compare([outlines[0], state.outline({"model": torch.nn.Module()})], 0)


def test_a_shard_of_another_size_is_no_checkpoint(tmp_path):
    """
    Sizes are compared before anything is opened.
    """
    stored = write(tmp_path, TENSORS, 2)
    with (stored.path / stored.manifest.shards[1].path).open("ab") as file:
        file.write(b"x")

    assert [] == folder.committed(tmp_path)
    assert "expected" in folder.broken(tmp_path)[0]


HOSTILE = {
    "pipe": "expected a plain file",
    "link": "expected a plain file",
    "folder": "expected a plain file",
    "sparse": "not a safetensors header",
    "huge header": "expected a header within",
    "deep header": "not a safetensors header",
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_shard_is_refused_at_once(tmp_path, kind):
    """
    With a manifest that agrees: what is no plain file is not opened, a terabyte of nothing is not read, and of a header only so
    much as any reader of safetensors takes.
    """
    stored = write(tmp_path, TENSORS, 1)
    path = stored.path / stored.manifest.shards[0].path
    size, first = (1 << 40, b"") if kind in {"sparse", "huge header"} else (0, b"")
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
        size = path.stat().st_size
    else:
        first = {
            "huge header": struct.pack("<Q", 900_000_000),
            "deep header": struct.pack("<Q", 400_000) + b"[" * 400_000,
        }.get(kind, b"")
        path.write_bytes(first)
        size = size or len(first)
        os.truncate(path, size)
    sums = [zlib.crc32(bytes(min(protocol.CHUNK_BYTES, size)))] * -(-size // protocol.CHUNK_BYTES)
    sums[:1] = [zlib.crc32(first.ljust(min(protocol.CHUNK_BYTES, size), b"\0"))] if sums else []
    agreeing = replace(stored.manifest, shards=(protocol.Shard(path.name, size, tuple(sums)),))
    (stored.path / protocol.MANIFEST).write_bytes(protocol.dump_manifest(agreeing))

    read = folder.read(stored.path)
    said = read if isinstance(read, str) else ""
    if not said:
        with pytest.raises(DamagedError) as caught:
            Reader(read)
        said = str(caught.value)

    assert HOSTILE[kind] in said


@pytest.mark.parametrize(
    "tensor",
    [
        pytest.param(torch.zeros(2, dtype=torch.complex64), id="complex"),
        pytest.param(torch.zeros(2, device="meta"), id="meta"),
        pytest.param(torch.eye(2).to_sparse(), id="sparse"),
    ],
)
def test_a_tensor_that_has_no_plain_bytes_is_refused_by_name(tensor):
    """
    The message names the key.
    """
    with pytest.raises(StateError, match=r"^model\.w: cannot be saved"):
        piece_of("model.w", tensor, rank=0, world_size=1)


@given(st.binary(max_size=200))
def test_bytes_that_are_no_header_are_refused(raw):
    """
    Whatever they are, there is one kind of error.
    """
    with pytest.raises(ImageError):
        image.parse_header(raw[:8] + raw, len(raw))


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [-1], "data_offsets": [0, -4]},
        {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]},
        {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]},
        {"dtype": "F32", "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]},
    ],
    ids=["short", "negative", "hole", "unknown type", "no shape", "beyond the file"],
)
def test_a_header_that_lies_is_refused(entry):
    """
    Boxes fit their bytes, back to back, to the end of the file; nothing else is believed.
    """
    raw = json.dumps({"w": entry}).encode()
    header = struct.pack("<Q", len(raw)) + raw

    with pytest.raises(ImageError):
        image.parse_header(header, len(header) + 4)
