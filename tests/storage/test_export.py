"""A model out of a checkpoint: any safetensors reader opens it, and it is the bytes that were saved."""

import json
import os
import random
import struct
import subprocess
import sys
from functools import partial
from itertools import pairwise, product
from math import prod
from pathlib import Path

import pytest
import safetensors

from runner.cli.shelves import Candidate, first_whole
from runner.errors import StoreError
from runner.storage import export as exporting
from runner.storage.checkpoints import CheckpointDir
from runner.storage.disk import Disk, alone_in
from runner.storage.export import HereSource, Wish, bf16_of_f32, export
from runner.storage.offsite import OffsiteError, uploading
from runner.storage.offsite.restoring import StoreSource
from tests.fakes import FaultyDisk, Loss, PowerLoss
from tests.storage.examples import commit
from vramfarm import image
from vramfarm.image import ITEM_BYTES, Box
from vramfarm.protocol import CHUNK_BYTES, Ref, shard_name

SAVE_AND_LOAD = Path(__file__).with_name("export_and_load.py")


def ignore(fraction, note):
    """Where nobody asks for progress."""


def test_a_checkpoint_that_the_store_alone_fails_at_is_passed_over():
    """
    After a few tries. An outage is not: what cannot be read now may be the newest there is.
    """
    tried = []
    found = [Candidate(Ref(1, step, 1, f"{step:08x}"), None, None) for step in (2, 1)]

    def take(candidate, *, of_object):
        tried.append(candidate.ref.step)
        if candidate.ref.step > 1:
            raise OffsiteError("500", final=False, of_server=True, of_object=of_object)
        return candidate

    assert found[-1] == first_whole(found, partial(take, of_object=True), pause_s=0)
    with pytest.raises(OffsiteError):
        first_whole(found, partial(take, of_object=False), pause_s=0)
    assert [2, 2, 2, 1, 2] == tried


def test_any_number_of_damaged_checkpoints_is_passed_over():
    """
    A folder that somebody filled with them does not hide the one that is whole.
    """
    found = [Candidate(Ref(1, step, 1, f"{step:08x}"), None, None) for step in range(2000, 0, -1)]

    def take(candidate):
        if candidate.ref.step > 1:
            raise OffsiteError("other bytes", final=True, damaged=True)
        return candidate

    assert found[-1] == first_whole(found, take)


def shards_of(tensors, num_ranks, dice):
    """
    Files of `num_ranks`, each tensor cut into a grid of boxes that are dealt to them.

    `tensors`: by key, (dtype, shape, bytes).
    """
    dealt = [{} for _ in range(num_ranks)]
    for key, (dtype, shape, raw) in tensors.items():
        boxes = list(grid(shape, num_ranks, dice))
        for rank, (offsets, extent) in zip(dice.sample(range(num_ranks), len(boxes)), boxes, strict=True):
            box = Box(key, dtype, extent, offsets)
            dealt[rank][box] = cut(raw, shape, box)
    files = {}
    for rank, mine in enumerate(dealt):
        laid = image.lay_out(mine)
        content = bytearray(laid.header.ljust(laid.size_bytes))
        for placed in laid.placed:
            content[placed.begin : placed.end] = mine[placed.box]
        files[shard_name(rank, num_ranks)] = bytes(content)
    return files


def grid(shape, most, dice):
    """(offsets, shape) of at most `most` boxes that fill a tensor, cut in one or two dimensions."""
    edges = [[0, size] for size in shape]
    for d in dice.sample(range(len(shape)), min(2, len(shape))):
        pieces = dice.randint(1, max(1, min(most, shape[d])))
        edges[d] = [0, *sorted(dice.sample(range(1, shape[d]), pieces - 1)), shape[d]]
        most //= pieces
    for spans in product(*(list(pairwise(edge)) for edge in edges)):
        yield tuple(a for a, _ in spans), tuple(b - a for a, b in spans)


def cut(raw, shape, box):
    """The bytes of a box, element by element: slow, and plain to see."""
    if not shape:
        return raw
    item, found = ITEM_BYTES[box.dtype], []
    *outer, last = box.shape
    for place in product(*(range(size) for size in outer)):
        at = 0
        for size, offset in zip(shape, [o + p for o, p in zip(box.offsets, (*place, 0), strict=True)], strict=True):
            at = at * size + offset
        found.append(raw[at * item : (at + last) * item])
    return b"".join(found)


def saved(directory, tensors, num_ranks=3, seed=0, **more):
    files = shards_of(tensors, num_ranks, random.Random(seed))
    return commit(directory, shards=files | more.pop("files", {}), **more)


def values(shape, dtype="F32", seed=0):
    return dtype, shape, random.Random(f"{shape}{seed}").randbytes(prod(shape) * ITEM_BYTES[dtype])


SMALL = {
    "model.layers.0.weight": values((6, 10)),
    "model.layers.10.weight": values((5, 4), "F16"),
    "model.layers.9.weight": values((3, 4, 5), "BF16"),
    "model.scale": values(()),
    "model.empty": values((0, 4)),
    "model.count": values((1,), "I64"),
    "optimizer.state.layers.0.weight.exp_avg": values((6, 10)),
    "ema.layers.0.weight": values((6, 10), seed=1),
}


def opened(path):
    """What the safetensors package reads: by name, (dtype, shape, bytes)."""
    return {
        name: (one["dtype"], tuple(one["shape"]), bytes(one["data"]))
        for name, one in safetensors.deserialize(path.read_bytes())
    }


def model_in(tensors, part="model"):
    return {key.removeprefix(f"{part}."): value for key, value in tensors.items() if key.startswith(f"{part}.")}


@pytest.mark.parametrize("num_ranks", [1, 2, 7])
@pytest.mark.parametrize("seed", range(4))
def test_however_it_was_spread_the_whole_comes_out(directory, tmp_path, num_ranks, seed):
    """
    Every tensor of the model, bit for bit, in one file that the safetensors package opens; nothing of the optimizer.
    """
    manifest = saved(directory, SMALL, num_ranks, seed)

    done = export(HereSource(directory, manifest.ref), tmp_path / "out", Wish(), Disk(), ignore)

    assert model_in(SMALL) == opened(tmp_path / "out" / "model.safetensors")
    assert (("model.safetensors",), 6) == (done.files, done.num_tensors)
    assert ["model.safetensors"] == [path.name for path in (tmp_path / "out").iterdir()]


def test_what_is_larger_than_a_chunk_comes_out_whole(directory, tmp_path):
    """
    Rows that lie across the borders of chunks, of a tensor that is cut both ways.
    """
    tensors = {"model.wide": values((3, (CHUNK_BYTES // 4) + 1031)), "model.b": values((2100, 2003), "F16")}
    manifest = saved(directory, tensors, 4, seed=3)

    export(HereSource(directory, manifest.ref), tmp_path / "out", Wish(), Disk(), ignore)

    assert model_in(tensors) == opened(tmp_path / "out" / "model.safetensors")


def test_a_large_model_becomes_several_files_and_an_index(directory, tmp_path):
    """
    Layers in their order, no file above the size but for a tensor that is, and an index as transformers reads it.
    """
    tensors = {f"model.layers.{i}.weight": values((8, 8), seed=i) for i in range(12)}
    manifest = saved(directory, tensors)

    done = export(HereSource(directory, manifest.ref), tmp_path / "out", Wish(max_file_bytes=5 * 256), Disk(), ignore)

    names = [f"model-{n:05d}-of-00003.safetensors" for n in (1, 2, 3)]
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_bytes())
    found = {name: opened(tmp_path / "out" / name) for name in names}
    assert (*names, "model.safetensors.index.json") == done.files
    assert {"total_size": 12 * 256} == index["metadata"]
    assert {key: name for name, inside in found.items() for key in inside} == index["weight_map"]
    assert [f"layers.{i}.weight" for i in range(5)] == sorted(found[names[0]])
    assert model_in(tensors) == {key: value for inside in found.values() for key, value in inside.items()}


def test_names_are_the_models_own(directory, tmp_path):
    """
    Without what compile, activation checkpointing and DDP put into them; other readers know them as `format: pt`.
    """
    raw = values((4, 4))
    tensors = {"model.module._orig_mod.a.weight": raw, "model.module.b._checkpoint_wrapped_module.module.weight": raw}
    manifest = saved(directory, tensors)

    export(HereSource(directory, manifest.ref), tmp_path, Wish(), Disk(), ignore)

    content = (tmp_path / "model.safetensors").read_bytes()
    assert {"a.weight": raw, "b.module.weight": raw} == opened(tmp_path / "model.safetensors")
    assert {"format": "pt"} == json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"]


def test_another_module_of_the_checkpoint(directory, tmp_path):
    """
    An averaged model was saved beside the model: it is asked for by its name; a name that is none says which there are.
    """
    manifest = saved(directory, SMALL)
    source = HereSource(directory, manifest.ref)

    export(source, tmp_path, Wish(part="ema"), Disk(), ignore)

    assert model_in(SMALL, "ema") == opened(tmp_path / "model.safetensors")
    with pytest.raises(StoreError, match="expected tensors of 'emma', got only those of ema, model, optimizer"):
        export(source, tmp_path / "other", Wish(part="emma"), Disk(), ignore)


def test_a_store_is_read_like_a_disk_and_only_what_is_needed(store, directory, tmp_path):
    """
    From the store itself, without a restore: the same bytes, and no chunk that has only optimizer state.
    """
    tensors = {"model.a": values((9, 9)), "optimizer.state.a.exp_avg": values((3, CHUNK_BYTES // 4))}
    manifest = saved(directory, tensors, 1)
    uploading.upload(store, "job", directory, manifest.ref, ignore)
    source, read = StoreSource(store, "job", manifest.ref), []
    asked, source.read = source.read, lambda shard, chunk: read.append(chunk) or asked(shard, chunk)

    export(source, tmp_path / "out", Wish(), Disk(), ignore)

    assert model_in(tensors) == opened(tmp_path / "out" / "model.safetensors")
    assert {0} == set(read)


def f32(*numbers):
    return struct.pack(f"<{len(numbers)}I", *numbers)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (0x3F800000, 0x3F80),
        (0x3F808000, 0x3F80),  # a tie, to even
        (0x3F818000, 0x3F82),
        (0x3F808001, 0x3F81),
        (0x7F7FFFFF, 0x7F80),  # the largest number becomes infinity
        (0x7F800000, 0x7F80),
        (0xFF800000, 0xFF80),
        (0x7F800001, 0x7FC0),  # NaN stays one
        (0xFFFFFFFF, 0x7FC0),
        (0x80000001, 0x8000),
    ],
)
def test_floats_are_rounded_as_torch_rounds_them(given, expected):
    """
    And what stands beside them does not change them.
    """
    others = 0xFFFFFFFF, 0x00000000, 0x7F7FFFFF

    assert struct.pack("<H", expected) == bf16_of_f32(f32(*others, given, *others))[6:8]


def test_bf16_halves_the_floats_and_nothing_else(directory, tmp_path):
    """
    Other types stay what they are.
    """
    manifest = saved(directory, SMALL)

    export(HereSource(directory, manifest.ref), tmp_path, Wish(as_bf16=True), Disk(), ignore)

    wanted = {
        name: ("BF16", shape, bf16_of_f32(raw)) if dtype == "F32" else (dtype, shape, raw)
        for name, (dtype, shape, raw) in model_in(SMALL).items()
    }
    assert wanted == opened(tmp_path / "model.safetensors")


# ------------------------------------------------------------------------------ what is refused


def test_damage_anywhere_leaves_no_model(directory, tmp_path):
    """
    One flipped bit in any byte of a shard that the model needs: it is named, and nothing is written.
    """
    manifest = saved(directory, {"model.a": values((40, 10))}, 2)
    shard = directory.path(manifest.ref) / shard_name(0, 2)
    whole = shard.read_bytes()
    for at in (0, 9, len(whole) // 2, len(whole) - 1):
        shard.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        with pytest.raises(StoreError, match=f"{shard.name}: chunk 0: expected crc32"):
            export(HereSource(directory, manifest.ref), tmp_path / "out", Wish(), Disk(), ignore)

    assert [] == list((tmp_path / "out").glob("*")) if (tmp_path / "out").exists() else True


def test_a_model_with_holes_is_refused(directory, tmp_path):
    """
    A shard that the manifest does not name, because somebody made the manifest: zeros are no weights.
    """
    laid = image.lay_out([Box("model.a", "F32", (2, 2), (3, 0))])  # and nothing of the first three rows
    manifest = commit(directory, shards={shard_name(0, 1): laid.header.ljust(laid.size_bytes)})

    with pytest.raises(StoreError, match=r"a: expected \d+ elements, each once"):
        export(HereSource(directory, manifest.ref), tmp_path / "out", Wish(), Disk(), ignore)


def test_two_parts_in_one_place_are_refused(directory, tmp_path):
    """
    As many elements as there are places, and one place twice: what would count is chance.
    """
    boxes = [
        Box("model.a", "F32", (2, 2), (0, 0)),
        Box("model.a", "F32", (2, 2), (0, 1)),
        Box("model.a", "F32", (1, 1), (0, 3)),
    ]
    laid = [image.lay_out([box]) for box in boxes]
    manifest = commit(
        directory, shards={shard_name(i, 3): one.header.ljust(one.size_bytes) for i, one in enumerate(laid)}
    )

    with pytest.raises(StoreError, match="each once"):
        export(HereSource(directory, manifest.ref), tmp_path / "out", Wish(), Disk(), ignore)


@pytest.mark.parametrize("name", ["shard.pt", "model.bin", "__0_0.distcp"])
def test_a_pickle_is_never_opened(directory, tmp_path, name):
    """
    It could run code, so its name is enough to refuse it. Our saver writes none: that checkpoint is damaged, and an
    older one is taken where there is one.
    """
    manifest = saved(directory, SMALL, files={name: b"\x80\x04cos\nsystem\n."})

    with pytest.raises(
        OffsiteError, match=f"{name}: expected a .safetensors file; anything else could be a pickle"
    ) as one:
        export(HereSource(directory, manifest.ref), tmp_path / "out", Wish(), Disk(), ignore)
    assert one.value.damaged


@pytest.mark.parametrize(
    "header", [b"[]", b'{"a": {}}', b"\xff" * 9, b'{"model.a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}']
)
def test_a_hostile_header_is_refused(directory, tmp_path, header):
    """
    In one line, with the name of the shard.
    """
    manifest = commit(directory, shards={"evil.safetensors": len(header).to_bytes(8, "little") + header + b"1234"})

    with pytest.raises(StoreError, match=r"evil\.safetensors: "):
        export(HereSource(directory, manifest.ref), tmp_path / "out", Wish(), Disk(), ignore)


def test_a_model_that_is_there_is_left_alone(directory, tmp_path):
    """
    An older one in the folder is not overwritten, and not mixed with.
    """
    manifest = saved(directory, SMALL)
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(b"mine")

    with pytest.raises(StoreError, match="expected no model there, found model-00001"):
        export(HereSource(directory, manifest.ref), tmp_path, Wish(), Disk(), ignore)

    assert b"mine" == (tmp_path / "model-00001-of-00002.safetensors").read_bytes()


def test_two_exports_into_one_folder_are_not_mixed(directory, tmp_path):
    """
    The second one is told, and touches nothing of the first.
    """
    manifest = saved(directory, SMALL)
    with alone_in(tmp_path, wait=False), pytest.raises(StoreError, match="another export writes there"):
        export(HereSource(directory, manifest.ref), tmp_path, Wish(), Disk(), ignore)

    assert not list(tmp_path.glob("*.safetensors"))


def test_a_full_disk_leaves_nothing(directory, tmp_path):
    """
    What was written until then goes.
    """
    manifest = saved(directory, SMALL)
    (tmp_path / "out").mkdir()
    disk = FaultyDisk(tmp_path / "out", 5, OSError(28, "No space left on device"))

    with pytest.raises(StoreError, match="No space left on device; no model was written"):
        export(HereSource(directory, manifest.ref), tmp_path / "out", Wish(), disk, ignore)

    assert [] == list((tmp_path / "out").iterdir())


@pytest.mark.parametrize("loss", Loss)
def test_power_may_go_at_any_operation(directory, tmp_path, loss):
    """
    Then there is a whole model, or none; and the next call comes to its end.
    """
    tensors = {f"model.{i}": values((8, 8), seed=i) for i in range(4)}
    source, out = HereSource(directory, saved(directory, tensors, 2).ref), tmp_path / "out"
    wish, fail_at, died = Wish(max_file_bytes=2 * 256), 0, True
    while died:
        out.mkdir()
        disk = FaultyDisk(out, fail_at)
        try:
            export(source, out, wish, disk, ignore)
            died = False
        except PowerLoss:
            disk.lose(loss, seed=fail_at)
            if not (out / exporting.INDEX).exists():
                export(source, out, wish, Disk(), ignore)
        index = json.loads((out / exporting.INDEX).read_bytes())["weight_map"]
        assert model_in(tensors) == {k: v for name in set(index.values()) for k, v in opened(out / name).items()}
        Disk().remove(out)
        fail_at += 1
    assert fail_at > 10


# ------------------------------------------------------------------------------ the command


def test_the_command_says_which_files_it_made(tmp_path, cli):
    """
    Standard output is their paths; `--json` says more. A folder of checkpoints: the newest.
    """
    (tmp_path / "checkpoints").mkdir()
    directory = CheckpointDir(tmp_path / "checkpoints", Disk())
    saved(directory, SMALL)
    newest = saved(directory, SMALL, seed=1, step=600)

    plain = cli("checkpoints", "export", "checkpoints", "--to", "a")
    told = cli("checkpoints", "export", f"checkpoints/{newest.ref.name}", "--to", "b", "--dtype", "bf16", "--json")

    assert (0, "a/model.safetensors\n", "") == (plain.returncode, plain.stdout, plain.stderr)
    assert (600, ["model.safetensors"]) == (json.loads(told.stdout)["step"], json.loads(told.stdout)["files"])
    assert model_in(SMALL) == opened(tmp_path / "a" / "model.safetensors")
    assert "BF16" == opened(tmp_path / "b" / "model.safetensors")["scale"][0]


def test_the_command_reads_a_store(tmp_path, cli):
    """
    By the address of a run: its newest checkpoint.
    """
    (tmp_path / "store" / "llama" / "checkpoints").mkdir(parents=True)
    saved(CheckpointDir(tmp_path / "store" / "llama" / "checkpoints", Disk()), SMALL)

    done = cli("checkpoints", "export", f"file://{tmp_path}/store/llama", "--to", "out")

    assert (0, "out/model.safetensors\n") == (done.returncode, done.stdout)
    assert model_in(SMALL) == opened(tmp_path / "out" / "model.safetensors")


@pytest.mark.parametrize("where", ["checkpoints", "file://{}/llama"], ids=["here", "store"])
def test_where_the_newest_is_damaged_the_next_older_is_exported(tmp_path, cli, where):
    """
    And that is said. Of one that was named, the next older is named: nobody gets another model unasked.
    """
    root = tmp_path / "llama" / "checkpoints"
    root.mkdir(parents=True)
    (tmp_path / "checkpoints").symlink_to(root)
    directory = CheckpointDir(root, Disk())
    older = saved(directory, SMALL)
    newest = saved(directory, SMALL, seed=1, step=600)
    shard = directory.path(newest.ref) / shard_name(0, 3)
    shard.write_bytes(bytes(shard.stat().st_size))
    place = where.format(tmp_path)
    one = f"{place}/checkpoints/{newest.ref.name}" if "://" in place else f"{place}/{newest.ref.name}"

    done = cli("checkpoints", "export", place, "--to", "out", "--json")
    named = cli("checkpoints", "export", one, "--to", "named")

    assert (0, older.step) == (done.returncode, json.loads(done.stdout)["step"])
    assert done.stderr.startswith(f"passed over: {newest.ref.name}: ")
    assert model_in(SMALL) == opened(tmp_path / "out" / "model.safetensors")
    assert (4, []) == (named.returncode, list((tmp_path / "named").glob("*")) if (tmp_path / "named").exists() else [])
    (hint,) = [
        line for line in named.stderr.splitlines() if line.startswith("hint: this one is damaged; the next older is ")
    ]
    assert hint.endswith(f"/{older.ref.name}")


def test_what_is_no_checkpoint_is_said_in_one_line(tmp_path, cli):
    """
    Pickles of another engine, a checkpoint that lacks a shard, a size that is none: exit codes 4, 4 and 2.
    """
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / "__0_0.distcp").write_bytes(b"x")
    (tmp_path / "checkpoints").mkdir()
    directory = CheckpointDir(tmp_path / "checkpoints", Disk())
    folder = directory.path(saved(directory, SMALL).ref)
    (folder / shard_name(1, 3)).unlink()

    pickles = cli("checkpoints", "export", "dcp", "--to", "out")
    short = cli("checkpoints", "export", str(folder), "--to", "out")
    size = cli("checkpoints", "export", str(folder), "--to", "out", "--max-shard-size", "much")

    assert [4, 4, 2] == [pickles.returncode, short.returncode, size.returncode]
    assert "found __0_0.distcp; a pickle can run code and is not read" in pickles.stderr
    assert f"{shard_name(1, 3)}: No such file or directory" in short.stderr
    assert "--max-shard-size: must be a size with its unit such as 64MiB or 10GB, got 'much'" in size.stderr
    assert not (tmp_path / "out").exists()


def test_a_model_goes_from_a_training_to_another_program(tmp_path):
    """
    Trained compiled, with tied weights, in 32 bits; exported; read by safetensors into a fresh model, which then is
    the trained one bit for bit; and as bfloat16, which is what torch makes of it, infinities too; NaN is NaN.
    """
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, SAVE_AND_LOAD], cwd=tmp_path, env=env, timeout=120, check=False, capture_output=True, text=True
    )

    assert (0, "equal, equal\n") == (done.returncode, done.stdout), done.stderr
