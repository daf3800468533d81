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

pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[frameworks]'")

SCRIPT = Path(__file__).with_name("train_hf.py")


def _run(folder: Path, *, die_at: int) -> Path:
    """Run the job to its end; returns its run folder."""
    job = {
        "name": "hf",
        "command": f"{SCRIPT} --output_dir {{checkpoint_dir}} --die_at {die_at} {{resume_args}}",
        "framework": "hf_trainer",
        "cpu_processes": 2,
        "python": sys.executable,
        "restart": {"initial_delay": "1s"},
        "offload": {"to": f"file://{folder}/store"},
        "env": {"OMP_NUM_THREADS": "1"},
    }
    folder.mkdir()
    (folder / "job.yaml").write_text(json.dumps(job))
    command = (sys.executable, "-I", "-m", "runner", "run", "--config", str(folder / "job.yaml"))
    env = {**os.environ, "VRAMFARM_WORKSPACE": str(folder), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert 0 == done.returncode, done.stderr[-6000:]
    return folder / "hf"


def test_a_trainer_that_is_killed_goes_on_where_its_last_save_was(tmp_path: Path):
    """
    Its saves are committed, rotated and copied off the machine; steps that are made again have the same losses, bit for bit.
    """
    run_dir = _run(tmp_path / "workspace", die_at=10)

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
