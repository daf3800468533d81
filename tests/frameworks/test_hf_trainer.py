"""A job of Hugging Face's Trainer, run whole: real Trainer, real torchrun, real kill."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from runner.storage import journal
from runner.storage.checkpoints import CheckpointDir
from runner.storage.disk import Disk
from tests.farmhouse import wait_until

transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[frameworks]'")

SCRIPT = Path(__file__).with_name("train_hf.py")


def _start(folder: Path, arguments: str, *, num_ranks: int) -> subprocess.Popen[str]:
    job = {
        "name": "hf",
        "command": f"{SCRIPT} --output_dir {{checkpoint_dir}} {arguments} {{resume_args}}",
        "framework": "hf_trainer",
        "cpu_processes": num_ranks,
        "python": sys.executable,
        "preflight": {"comm_test": False},
        "restart": {"initial_delay": "1s"},
        "offload": {"to": f"file://{folder}/store"},
        "env": {"OMP_NUM_THREADS": "1"},
    }
    folder.mkdir()
    (folder / "job.yaml").write_text(json.dumps(job))
    command = (sys.executable, "-I", "-m", "runner", "run", "--config", str(folder / "job.yaml"))
    env = {**os.environ, "VRAMFARM_WORKSPACE": str(folder), "HF_HUB_OFFLINE": "1"}
    return subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def test_a_trainer_that_is_killed_goes_on_where_its_last_save_was(tmp_path: Path):
    """
    Its saves are committed, rotated and copied off the machine; steps that are made again have the same losses, bit for bit.
    """
    run_dir = tmp_path / "workspace" / "hf"
    with _start(run_dir.parent, "--die_at 10", num_ranks=2) as process:
        log = process.communicate(timeout=240)[1]
    assert 0 == process.returncode, log[-6000:]

    history = journal.read(run_dir / "journal.jsonl")
    directory = CheckpointDir(run_dir / "checkpoints", Disk())
    kept = directory.committed()
    stored = [path.name for path in (tmp_path / "workspace/store/hf/checkpoints").iterdir()]
    losses: dict[int, set[float]] = {}
    for line in (run_dir / "saves/losses.jsonl").read_text().splitlines():
        entry = json.loads(line)
        losses.setdefault(entry["step"], set()).add(entry["loss"])
    assert ["failed", "succeeded"] == [attempt.ending for attempt in history.attempts]
    assert history.attempts[1].resume is not None
    assert 8 == history.attempts[1].resume.step
    assert (2, 16, {"hf_trainer"}) == (len(kept), kept[-1].ref.step, {checkpoint.framework for checkpoint in kept})
    assert all(() == directory.verify(checkpoint.ref) for checkpoint in kept)
    assert kept[-1].ref.name in stored
    assert list(range(1, 17)) == sorted(losses)
    assert all(1 == len(values) for values in losses.values()), losses


@pytest.mark.skipif(
    int(transformers.__version__.split(".")[0]) < 5,
    reason="transformers is older than 5: its Trainer has no such option",
)
def test_a_trainer_that_saves_on_sigterm_is_asked_to_and_waited_for(tmp_path: Path):
    """
    The run is told to leave between two saves, hours before the next: nothing is lost, and the next start goes on there.
    """
    run_dir = tmp_path / "workspace" / "hf"
    losses = run_dir / "saves" / "losses.jsonl"
    with _start(run_dir.parent, "--max_steps 100000 --enable_jit_checkpoint", num_ranks=1) as process:
        wait_until(lambda: losses.exists() and losses.read_text().count("\n") > 5, 200)
        asked_at = json.loads(losses.read_text().split("\n")[-2])["step"]  # the last line may be half written
        process.terminate()
        log = process.communicate(timeout=150)[1]

    attempts = journal.read(run_dir / "journal.jsonl").attempts
    assert (75, [("interrupted", "")]) == (process.returncode, [(a.ending, a.reason) for a in attempts]), log[-6000:]
    saved = [checkpoint.ref.step for checkpoint in CheckpointDir(run_dir / "checkpoints", Disk()).committed()]
    assert 1 == len(saved), log[-6000:]
    assert asked_at < saved[0] < 100_000
