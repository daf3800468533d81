import json
import struct
import zipfile

import pytest

from runner.adapters.frameworks import FRAMEWORKS, get_framework
from runner.errors import JobError
from runner.job import FrameworkName

HF = FRAMEWORKS[FrameworkName.HF_TRAINER]


def write_safetensors(path, size=8):
    header = json.dumps({"w": {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(size))


def write_torch(path):
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", b"x" * 100)


@pytest.fixture
def checkpoint(tmp_path):
    """What Trainer writes at step 500 on two ranks."""
    folder = tmp_path / "checkpoint-500"
    folder.mkdir()
    write_safetensors(folder / "model-00001-of-00001.safetensors")
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"w": "model-00001-of-00001.safetensors"}})
    )
    for name in ("optimizer.pt", "scheduler.pt", "training_args.bin", "rng_state_0.pth", "rng_state_1.pth"):
        write_torch(folder / name)
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 500}))
    return folder


def test_what_the_trainer_wrote_is_complete(checkpoint):
    """
    A checkpoint with all its files counts.
    """
    assert [checkpoint] == HF.complete(checkpoint.parent, 2)


def test_checkpoints_come_by_step(checkpoint):
    """
    By number, not by name.
    """
    newer = checkpoint.rename(checkpoint.with_name("checkpoint-1000"))
    (newer / "trainer_state.json").write_text(json.dumps({"global_step": 1000}))
    older = checkpoint.with_name("checkpoint-900")
    older.mkdir()
    (older / "trainer_state.json").write_text(json.dumps({"global_step": 900}))
    (checkpoint.parent / "runs").mkdir()

    assert [older, newer] == HF.complete(checkpoint.parent, 2)


def cut(name):
    def spoil(folder):
        raw = (folder / name).read_bytes()
        (folder / name).write_bytes(raw[:-4])

    return spoil


def remove(name):
    return lambda folder: (folder / name).unlink()


def write(name, text):
    def spoil(folder):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)

    return spoil


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(remove("trainer_state.json"), id="rank 0 is not done"),
        pytest.param(remove("rng_state_1.pth"), id="rank 1 is not done"),
        pytest.param(write("trainer_state.json", '{"global_step": 400}'), id="state of another step"),
        pytest.param(write("trainer_state.json", '{"global_st'), id="state is torn"),
        pytest.param(write("checkpoint-is-incomplete.txt", ""), id="says so itself"),
        pytest.param(cut("model-00001-of-00001.safetensors"), id="weights are cut"),
        pytest.param(remove("model-00001-of-00001.safetensors"), id="a file of the index is missing"),
        pytest.param(cut("optimizer.pt"), id="optimizer is cut"),
        pytest.param(write("optimizer.pt", ""), id="optimizer is empty"),
        pytest.param(write("optimizer_0/__0_0.distcp", "x"), id="sharded without metadata"),
        pytest.param(write("global_step500/x.pt", ""), id="DeepSpeed without latest"),
    ],
)
def test_a_checkpoint_that_lacks_something_does_not_count(checkpoint, spoil):
    """
    The last file written by rank 0 proves nothing of the others.
    """
    spoil(checkpoint)

    assert [] == HF.complete(checkpoint.parent, 2)


def test_weights_alone_are_complete_without_random_states(checkpoint):
    """
    With `save_only_model` there is nothing more to come.
    """
    for name in ("optimizer.pt", "scheduler.pt", "rng_state_0.pth", "rng_state_1.pth"):
        (checkpoint / name).unlink()

    assert [checkpoint] == HF.complete(checkpoint.parent, 2)


def test_deepspeed_shards_of_all_ranks_are_needed(checkpoint):
    """
    `latest` is written before the other ranks are done: their shards are counted.
    """
    shards = checkpoint / "global_step499"
    shards.mkdir()
    (checkpoint / "latest").write_text("global_step499")
    (shards / "zero_pp_rank_0_mp_rank_00_optim_states.pt").write_text("x")
    before = HF.complete(checkpoint.parent, 2)

    (shards / "zero_pp_rank_1_mp_rank_00_optim_states.pt").write_text("x")

    assert ([], [checkpoint]) == (before, HF.complete(checkpoint.parent, 2))


def test_a_folder_that_is_not_there_yet_holds_nothing(tmp_path):
    """
    Before the first save there is no output folder.
    """
    assert [] == HF.complete(tmp_path / "none", 2)


def test_resuming_names_the_folder(tmp_path):
    """
    The Trainer never chooses by itself; our library needs no argument.
    """
    told = {name: FRAMEWORKS[name].resume_args(tmp_path) for name in FRAMEWORKS}

    assert {"hf_trainer": ("--resume_from_checkpoint", str(tmp_path)), "auto": (), "vramfarm": (), "none": ()} == told


def test_a_framework_without_an_adapter_is_refused():
    """
    The message lists those there are.
    """
    with pytest.raises(JobError, match="framework: lightning is not supported yet, expected one of auto, vramfarm"):
        get_framework(FrameworkName.LIGHTNING)
