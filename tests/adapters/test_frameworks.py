import json
import os
import pickle
import struct
import zipfile
from datetime import UTC, datetime, timedelta

import pytest

from runner.adapters.frameworks import FRAMEWORKS, get_framework, resume_args
from runner.cli.planned import check_framework
from runner.errors import JobError
from runner.facts import Attempt, Live
from runner.job import FrameworkName, Job
from runner.sight import Saves

HF = FRAMEWORKS[FrameworkName.HF_TRAINER]


def complete(framework, folder, world_size=2):
    """Folders or files of complete saves, oldest first."""
    return [folder / save.name for save in framework.saves(folder, world_size) if save.complete]


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
    assert [checkpoint] == complete(HF, checkpoint.parent)


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

    assert [older, newer] == complete(HF, checkpoint.parent)


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

    assert [] == complete(HF, checkpoint.parent)


def test_weights_alone_are_complete_without_random_states(checkpoint):
    """
    With `save_only_model` there is nothing more to come.
    """
    for name in ("optimizer.pt", "scheduler.pt", "rng_state_0.pth", "rng_state_1.pth"):
        (checkpoint / name).unlink()

    assert [checkpoint] == complete(HF, checkpoint.parent)


def test_deepspeed_shards_of_all_ranks_are_needed(checkpoint):
    """
    `latest` is written before the other ranks are done: their shards are counted.
    """
    shards = checkpoint / "global_step499"
    shards.mkdir()
    (checkpoint / "latest").write_text("global_step499")
    (shards / "zero_pp_rank_0_mp_rank_00_optim_states.pt").write_text("x")
    before = complete(HF, checkpoint.parent)

    (shards / "zero_pp_rank_1_mp_rank_00_optim_states.pt").write_text("x")

    assert ([], [checkpoint]) == (before, complete(HF, checkpoint.parent))


def test_a_folder_that_is_not_there_yet_holds_nothing(tmp_path):
    """
    Before the first save there is no output folder.
    """
    assert [] == complete(HF, tmp_path / "none")


# ------------------------------------------------------------------------------ the others


def write_dcp(folder, *names):
    """A folder of shards, with metadata that names them as torch's does."""
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).write_bytes(b"x")
    (folder / ".metadata").write_bytes(pickle.dumps({"storage_data": {f"w{i}": n for i, n in enumerate(names)}}))
    return folder


def test_shards_are_complete_with_all_that_their_metadata_names(tmp_path):
    """
    The metadata is written last; a shard can still be gone.
    """
    framework = FRAMEWORKS[FrameworkName.DCP]
    for step in (9, 10):
        write_dcp(tmp_path / f"step-{step}", "__0_0.distcp", "__1_0.distcp")
    whole = complete(framework, tmp_path)

    (tmp_path / "step-9/__1_0.distcp").unlink()
    (tmp_path / "step-10/.metadata").write_bytes((tmp_path / "step-10/.metadata").read_bytes()[:-5])

    assert [tmp_path / "step-9", tmp_path / "step-10"] == whole
    assert [] == complete(framework, tmp_path)


def test_metadata_is_never_unpickled(tmp_path):
    """
    A hostile one executes nothing.
    """

    class Hostile:
        def __reduce__(self):
            return (open, (str(tmp_path / "executed"), "w"))

    folder = write_dcp(tmp_path / "step-1", "__0_0.distcp")
    (folder / ".metadata").write_bytes(pickle.dumps([Hostile(), "__0_0.distcp"]))

    complete(FRAMEWORKS[FrameworkName.DCP], tmp_path)

    assert not (tmp_path / "executed").exists()


def test_lightning_saves_files_and_folders(tmp_path):
    """
    A file with its end; a folder with the metadata of its shards and `meta.pt`, written after them. A link is no save.
    """
    write_torch(tmp_path / "epoch=1-step=200.ckpt")
    (tmp_path / "epoch=1-step=300.ckpt").write_bytes(b"PK\x03\x04 cut")
    (tmp_path / "last.ckpt").symlink_to("epoch=1-step=200.ckpt")
    write_dcp(tmp_path / "epoch=2-step=400.ckpt", "__0_0.distcp")
    lightning = FRAMEWORKS[FrameworkName.LIGHTNING]
    without_meta = complete(lightning, tmp_path)
    write_torch(tmp_path / "epoch=2-step=400.ckpt/meta.pt")

    saves = {save.step: save.complete for save in lightning.saves(tmp_path, 2)}

    assert [tmp_path / "epoch=1-step=200.ckpt"] == without_meta
    assert {200: True, 300: False, 400: True} == saves


def test_deepspeeds_latest_alone_proves_nothing(tmp_path):
    """
    Rank 0 writes it before the others are done.
    """
    deepspeed = FRAMEWORKS[FrameworkName.DEEPSPEED]
    tag = tmp_path / "global_step100"
    tag.mkdir()
    write_torch(tag / "mp_rank_00_model_states.pt")
    write_torch(tag / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt")
    (tmp_path / "latest").write_text("global_step100")
    early = complete(deepspeed, tmp_path)
    write_torch(tag / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt")

    (save,) = deepspeed.saves(tmp_path, 2)

    assert [] == early
    assert (100, True) == (save.step, save.complete)
    assert "latest" in save.files
    assert "global_step100/mp_rank_00_model_states.pt" in save.files


def test_files_with_one_number_are_one_save(tmp_path):
    """
    Complete when every kind of file is there that the save before had.
    """
    plain = FRAMEWORKS[FrameworkName.TORCH_SAVE]
    for name in ("model_100.pt", "optim_100_rank0.pt", "optim_100_rank1.pt", "model_200.pt", "optim_200_rank0.pt"):
        write_torch(tmp_path / name)
    (tmp_path / "meta_100.json").write_text("{}")
    (tmp_path / "meta_200.json").write_text("{}")
    early = {save.step: save.complete for save in plain.saves(tmp_path, 2)}
    write_torch(tmp_path / "optim_200_rank1.pt")

    late = {save.step: (save.complete, len(save.files)) for save in plain.saves(tmp_path, 2)}

    assert {100: True, 200: False} == early
    assert {100: (True, 4), 200: (True, 4)} == late


def test_a_file_that_is_written_again_is_another_save(tmp_path):
    """
    One name, no step: the time of change tells them apart.
    """
    plain = FRAMEWORKS[FrameworkName.TORCH_SAVE]
    write_torch(tmp_path / "ckpt.pt")
    (first,) = plain.saves(tmp_path, 1)
    write_torch(tmp_path / "ckpt.pt")
    os.utime(tmp_path / "ckpt.pt", ns=(first.stamp + 1, first.stamp + 1))

    (second,) = plain.saves(tmp_path, 1)

    assert (None, True) == (second.step, second.complete)
    assert first.id != second.id


# ---------------------------------------------------------------------------------- resuming


@pytest.mark.parametrize(
    ("job", "expected"),
    [
        ({"framework": "hf_trainer"}, ("--resume_from_checkpoint", "{}")),
        ({"launcher": "axolotl"}, ("--resume_from_checkpoint", "{}")),
        ({"launcher": "llamafactory"}, ("resume_from_checkpoint={}",)),
        ({"framework": "lightning"}, ("--ckpt_path", "{}/last.ckpt")),
        ({"framework": "dcp", "checkpoint": {"resume_flag": "--load="}}, ("--load={}",)),
        ({"framework": "torch_save", "checkpoint": {"resume_flag": "-r"}}, ("-r", "{}/last.ckpt")),
        ({"framework": "vramfarm"}, ()),
        ({"framework": "none"}, ()),
    ],
)
def test_resuming_names_the_checkpoint_as_the_script_wants_it(tmp_path, job, expected):
    """
    No framework chooses by itself; at step 0 there are no words.
    """
    write_torch(tmp_path / "last.ckpt")
    made = Job.model_validate({"command": "train.py {resume_args}", **job})

    words = resume_args(made, get_framework(made), tmp_path)

    assert tuple(word.format(tmp_path) for word in expected) == words
    assert () == resume_args(made, get_framework(made), None)


def test_a_script_that_could_not_be_told_where_to_go_on_is_refused():
    """
    It would start over after every crash.
    """
    with pytest.raises(JobError, match=r"command: expected \{resume_args\} in it, since hf_trainer saves by itself"):
        check_framework(Job.model_validate({"command": "train.py", "framework": "hf_trainer"}))


def test_a_framework_without_an_adapter_is_refused():
    """
    The message lists those there are.
    """
    with pytest.raises(JobError, match="framework: torchtune is not supported yet, expected one of auto, vramfarm"):
        get_framework(Job.model_validate({"command": "x", "framework": "torchtune"}))


NOW = datetime.now(UTC)
ATTEMPT = Attempt(number=1, id="a", resume=None, lineage=1, boot_id="b", launched_at=NOW - timedelta(hours=1))
NOBODY = Live(attempt_id="a", trainers=(), savers=())


def seen_writing(name, folder, *looks):
    """Seconds that a save is taken for; each look is (seconds from now, what is done before it)."""
    fields = {"framework": name, "command": "train.py {resume_args}", "checkpoint": {"watch": str(folder)}}
    saves = Saves(Job.model_validate(fields), 2)
    for at_s, do in looks:
        do()
        saves.ready(NOW + timedelta(seconds=at_s), ATTEMPT, NOBODY)
    return saves.write_s


def nothing():
    """Between two looks."""


def dated(path, at_s):
    """When it was last written to."""
    os.utime(path, (NOW.timestamp() + at_s,) * 2)


def test_a_file_is_timed_from_the_look_that_first_saw_it(tmp_path):
    """
    To its last write, and the two seconds between looks; the next one anew, under the same name, too.
    """

    def begin():
        (tmp_path / "last.pt").write_bytes(b"PK")
        dated(tmp_path / "last.pt", 1)

    def end(at_s):
        def write():
            write_torch(tmp_path / "last.pt")
            dated(tmp_path / "last.pt", at_s)

        return write

    once = [(2, begin), (12, end(10)), (14, nothing)]
    again = [(100, end(99)), (104, nothing)]

    assert 10 == pytest.approx(seen_writing("torch_save", tmp_path, *once), abs=0.01)
    assert 2 == seen_writing("torch_save", tmp_path, *once, *again)
    assert 0 == seen_writing("torch_save", tmp_path, (200, nothing))


def test_a_folder_is_timed_from_its_first_file_on(checkpoint):
    """
    The Trainer gives it its name when it is whole already.
    """
    for at_s, path in enumerate(sorted(checkpoint.iterdir())):
        dated(path, at_s)
    took = len(list(checkpoint.iterdir())) - 1

    found = seen_writing("hf_trainer", checkpoint.parent, (20, nothing), (22, nothing))

    assert took + 2 == pytest.approx(found, abs=0.01)
