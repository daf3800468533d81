"""Several ranks under a real torchrun. Each start takes seconds, so each checks much."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.vramfarm import own_objects
from vramfarm import Checkpointer, folder, protocol
from vramfarm.protocol import ControlPage, Env, Slot, Word

HERE = Path(__file__).parent
QUICKSTART = HERE.parents[1] / "configs" / "quickstart" / "train.py"
ENV = {"PYTHONPATH": str(HERE.parents[1]), "OMP_NUM_THREADS": "1"}


def torchrun(cwd, num_ranks, *arguments, **env):
    argv = (
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={num_ranks}",
        *map(str, arguments),
    )
    cwd.mkdir(exist_ok=True)
    return subprocess.Popen(
        argv, cwd=cwd, env=os.environ | ENV | env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def output_of(process, timeout_s=240):
    out, _ = process.communicate(timeout=timeout_s)
    assert 0 == process.returncode, out
    return out


def losses(cwd, num_ranks=2):
    return [[json.loads(line) for line in (cwd / f"out.{rank}").read_text().splitlines()] for rank in range(num_ranks)]


@pytest.fixture(scope="module", params=["ddp", "fsdp2"])
def trained(request, tmp_path_factory):
    """Folder of a training that was not disturbed (`whole`) and of one that was resumed twice (`parts`)."""
    cwd = tmp_path_factory.mktemp(request.param)
    said = output_of(
        torchrun(cwd, 2, HERE / "train_small.py", request.param, "whole:26", "parts:9", "parts:11", "parts:26")
    )
    assert "resumed from step-00000011" in said
    return cwd


def test_a_resumed_run_makes_the_same_losses(trained):
    """
    On the same number of ranks, dropout and all, to the last bit.
    """
    assert 26 == len(losses(trained / "whole")[0])
    assert losses(trained / "whole") == losses(trained / "parts")


@pytest.mark.parametrize("trained", ["fsdp2"], indirect=True)
def test_any_number_of_ranks_goes_on(trained, tmp_path):
    """
    Saved by 2 ranks with FSDP2: read by 1 and by 4, by us and by torch, all tensors are the same. And 1 rank goes
    on where the 2 were in the data.
    """
    found = []
    for num_ranks in (1, 4):
        said = output_of(torchrun(tmp_path, num_ranks, HERE / "reshard.py", trained / "whole", f"read-{num_ranks}"))
        found += [json.loads((tmp_path / f"read-{num_ranks}.{rank}").read_text()) for rank in range(num_ranks)]
        assert f"saved by 2 ranks, now {num_ranks}; seeded anew" in said
    by_two = losses(trained / "whole")
    second_epoch = {i for rank in by_two for step, _, batch in rank if 12 <= step <= 22 for i in batch}
    third_epoch = [i for line in zip(*by_two, strict=True) for i in batch_of(line) if line[0][0] > 23]

    assert all(found[0][:2] == other[:2] for other in found)
    assert 26 == found[0][0]
    assert 88 == len(second_epoch)
    assert set(range(92)) == {*third_epoch, *found[0][2]}


def test_however_a_model_is_spread(tmp_path):
    """
    Tensor parallel, FSDP2 with replicas, both, layers that only FSDP2 spreads beside tensor parallel ones, and FSDP1 in
    four ways: resumed to the last bit, each byte written by one rank, frozen weights once; and each read as another. And
    ranks that are all given the same batches, or have weights of their own, are told.
    """
    said = output_of(torchrun(tmp_path, 4, HERE / "spread.py", tmp_path))
    checks = [json.loads(line) for line in said.splitlines() if line.startswith("{")]

    assert [] == [check for check in checks if not check["same"]]
    assert 34 == len(checks), said
    assert 1 == said.count("vramfarm: every rank was given the same first batches")
    assert ["head.weight): is DDP or FSDP missing? the checkpoint is a mix of them"] == [
        line.partition("the ranks have different weights (")[2]
        for line in said.splitlines()
        if "different weights" in line
    ]


def test_what_ranks_keep_in_objects_of_their_own_comes_back_to_them(tmp_path, capsys):
    """
    Told by the saver at the first save, which the next step makes up for: by sizes, order, one element in many, plain values, by which rank has them at all; in
    a later save, too. What is the same on all ranks is saved once, and frozen weights stay with the ranks that wrote them. A rank of another number goes on with what one of them had.
    """
    said = output_of(torchrun(tmp_path, 2, HERE / "own_objects.py", tmp_path))
    given = [[json.loads(line) for line in (tmp_path / f"out.{rank}").read_text().splitlines()] for rank in range(2)]
    third = own_objects.objects(7) | {"a_first": own_objects.Kept({"n": 0})}
    Checkpointer(own_objects.network(), dir=tmp_path / "checkpoints", **third)
    saved = folder.committed(tmp_path / "checkpoints")

    assert [before for before, _ in given] == [after for _, after in given]
    assert given[0][0] == own_objects.told(third)
    assert 1 == said.count(" failed: a_first, numbers, one, order, replay, the_second: differs from rank to rank")
    assert 1 == said.count(" failed: tail: differs from rank to rank")
    assert ["final", "asked"] * 2 == [one.manifest.reason for one in saved]
    assert "replay (each rank's own)" in said
    assert "replay: each of 2 ranks had its own, now 1" in capsys.readouterr().err
    assert not any("alike" in rank["own"] for rank in saved[0].manifest.state["ranks"].values())


def test_fsdp1_with_all_that_it_may_be_combined_with(tmp_path):
    """
    Nested, low precision, flat parameters in the optimizer, compiled, through a window; tied, frozen and unused weights,
    and some that do not lie as they are indexed: every save is what the weights were then, resumed to the last bit,
    read by torch's own reader; what else changes the weights is noticed, what cannot be saved is refused.
    """
    said = output_of(torchrun(tmp_path, 2, HERE / "flat_run.py", tmp_path))
    checks = [json.loads(line) for line in said.splitlines() if line.startswith("{")]

    assert [] == [check for check in checks if not check["same"]]
    assert 38 == len(checks), said


def batch_of(line):
    return [i for _, _, batch in line for i in batch]


def test_a_supervised_run_leaves_and_comes_back(tmp_path):
    """
    Under a supervisor: told by the environment where and what; asked to leave all ranks exit 0 at one step
    with `left` recorded; a killed attempt loses at most one interval; the end is `done`, with the loss of an
    undisturbed run.
    """
    arguments = (QUICKSTART, "--steps", 40, "--batch", 2, "--context", 32, "--layers", 1, "--dim", 32)
    whole = output_of(torchrun(tmp_path / "whole", 2, *arguments))

    first = Attempt(tmp_path, 1)
    running = torchrun(tmp_path / "job", 2, *arguments, "--pause", 0.05, **first.env())
    until(lambda: first.page.get(0, Slot.STEP) > 5)
    first.page[Word.REQUEST_LEAVE] = 1
    output_of(running)
    left = first.end()

    second = Attempt(tmp_path, 2)
    running = torchrun(tmp_path / "job", 2, *arguments, "--pause", 0.05, **second.env("0.2"))
    until(lambda: second.page[Word.NUM_COMMITTED] > 1)
    for rank in range(2):
        os.kill(second.page.get(rank, Slot.PID), signal.SIGKILL)
    running.communicate(timeout=60)
    assert 0 != running.returncode

    third = Attempt(tmp_path, 3)
    done = output_of(torchrun(tmp_path / "job", 2, *arguments, **third.env()))

    assert ("left", False, "done", 40) == (left.kind, second.end_file.exists(), third.end().kind, third.end().step)
    assert first.end().step in {s.manifest.step for s in folder.committed(tmp_path / "checkpoints")}
    assert final_loss(whole) == final_loss(done)
    assert not list(tmp_path.glob("checkpoints/.tmp-*"))


def final_loss(out):
    return next(line for line in out.splitlines() if line.startswith("final loss"))


class Attempt:
    """The supervisor's part: a page, the environment, the newest checkpoint to resume from."""

    def __init__(self, run, number):
        self.run, self.number = run, number
        self.end_file = run / f"end-{number}.json"
        self.page = ControlPage.create(run / f"page-{number}", num_ranks=2)

    def env(self, interval="1000"):
        stored = folder.committed(self.run / "checkpoints")
        return {
            Env.CONTROL: str(self.page.path),
            Env.CHECKPOINT_DIR: str(self.run / "checkpoints"),
            Env.SAVE_INTERVAL_S: interval,
            Env.ATTEMPT: str(self.number),
            Env.LINEAGE: "0",
            Env.RESUME: str(stored[0].path) if stored else "none",
            Env.END_FILE: str(self.end_file),
        }

    def end(self):
        return protocol.parse_end(self.end_file.read_bytes())


def until(condition, timeout_s=60.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.01)
