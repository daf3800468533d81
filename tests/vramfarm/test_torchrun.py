"""Several ranks under a real torchrun. Each start takes seconds, so each checks much."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vramfarm import folder, protocol
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


def output_of(process, timeout_s=90):
    out, _ = process.communicate(timeout=timeout_s)
    assert 0 == process.returncode, out
    return out


def losses(cwd, num_ranks=2):
    return [[json.loads(line) for line in (cwd / f"out.{rank}").read_text().splitlines()] for rank in range(num_ranks)]


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_a_resumed_run_makes_the_same_losses(tmp_path, kind):
    """
    On the same number of ranks, dropout and all, to the last bit.
    """
    script = HERE / "train_small.py"
    output_of(torchrun(tmp_path / "whole", 2, script, kind, 26, "out"))
    output_of(torchrun(tmp_path / "parts", 2, script, kind, 26, "out", "--stop-after", 11))

    said = output_of(torchrun(tmp_path / "parts", 2, script, kind, 26, "out"))

    assert losses(tmp_path / "whole") == losses(tmp_path / "parts")
    assert "resumed from step-00000011" in said
    stored = folder.committed(tmp_path / "parts" / "checkpoints")[0]
    sizes = [shard.size_bytes for shard in stored.manifest.shards]
    assert (26, 2) == (stored.manifest.step, len(sizes))


def test_any_number_of_ranks_goes_on(tmp_path):
    """
    Saved by 2 ranks with FSDP2, read by 1 and 4, by us and by torch, all tensors the same; and on with 1.
    """
    script = HERE / "train_small.py"
    output_of(torchrun(tmp_path, 2, script, "fsdp2", 12, "out"))

    found = []
    for num_ranks in (1, 4):
        said = output_of(
            torchrun(tmp_path, num_ranks, HERE / "reshard.py", tmp_path / "checkpoints", tmp_path / f"read-{num_ranks}")
        )
        found += [json.loads((tmp_path / f"read-{num_ranks}.{rank}").read_text()) for rank in range(num_ranks)]
        assert f"saved by 2 ranks, now {num_ranks}; seeded anew" in said
    output_of(torchrun(tmp_path, 1, script, "fsdp2", 14, "out"))

    assert all(found[0] == other for other in found)
    assert 12 == found[0][0]
    before = {i for rank in losses(tmp_path) for step, _, batch in rank if step == 11 for i in batch}
    alone = losses(tmp_path, 1)[0][12:]
    assert [12, 13] == [step for step, _, _ in alone]
    assert not before & {i for _, _, batch in alone for i in batch}
    assert 14 == folder.committed(tmp_path / "checkpoints")[0].manifest.step


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
