"""Hangs of real processes: `vramfarm-runner run` finds them, says who it was, and goes on from the checkpoint."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from runner.storage import journal
from runner.supervise import process
from vramfarm.protocol import Env

ROOT = Path(__file__).parents[2]
TRAINER = ROOT / "tests" / "fake_trainer.py"
RANKS = ROOT / "tests" / "chaos" / "launch_ranks.py"
TORCH = ROOT / "tests" / "supervise" / "hanging_torch.py"
JOB = """
name: job
launcher: command
command: {python} {ranks} 2 {trainer} --steps 80 --step-time 0.05 --bytes 2000 {more}
cpu_processes: 2
preflight: {{comm_test: false}}
python: {python}
checkpoint: {{save_interval: 1s}}
restart: {{initial_delay: 100ms, grace_period: 10s}}
hang: {{startup_timeout: 60s, step_timeout: 3s}}
provider: {{kind: none}}
limits: {{max_duration: 5m}}
"""


TORCH_JOB = """
name: job
command: {ranks} {more}
cpu_processes: 2
preflight: {{comm_test: false}}
python: {python}
env: {{OMP_NUM_THREADS: "1"}}
restart: {{initial_delay: 100ms, grace_period: 10s}}
hang: {{startup_timeout: 60s, step_timeout: 5s}}
provider: {{kind: none}}
limits: {{max_duration: 5m}}
"""


def run(folder: Path, more: str, job: str = JOB) -> tuple[int, str]:
    """A whole run; its exit code and what it said."""
    (folder / "job.yaml").write_text(
        job.format(python=sys.executable, ranks=TORCH if job is TORCH_JOB else RANKS, trainer=TRAINER, more=more)
    )
    try:
        done = subprocess.run(
            [sys.executable, "-m", "runner", "run", "--config", "job.yaml"],
            cwd=folder,
            env={**os.environ, "VRAMFARM_WORKSPACE": str(folder)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
    finally:
        assert () == process.end_all(lambda: process.find(Env.RUN, str(folder / "job")), timeout_s=20)
    return done.returncode, done.stderr


def attempts_of(folder: Path):
    return journal.read(folder / "job" / "journal.jsonl").attempts


@pytest.mark.parametrize(
    ("more", "rank", "words"),
    [
        pytest.param("--hang stop --hang-rank 1", 1, "rank 1 is stopped (SIGSTOP)", id="stopped"),
        pytest.param("--hang ask --hang-rank 0", None, "asks 'Overwrite the output folder? [y/N]'", id="a question"),
    ],
)
def test_a_hang_is_found_named_and_resumed_from(tmp_path, more, rank, words):
    """
    The attempt is killed with evidence, the next one begins at the newest checkpoint and ends well.
    """
    code, said = run(tmp_path, f"--hang-at 50 {more}")

    first, second = attempts_of(tmp_path)
    assert 0 == code, said
    assert ("rank_stuck", rank, 50) == (first.diagnosis.label, first.diagnosis.rank, first.step)
    sure = "high" if rank is not None else "medium"  # if so, at the same step a second time, it is the script's
    assert sure == first.diagnosis.confidence
    assert words in first.reason
    assert second.resume is not None
    told = [said.index(w) for w in ("nothing explains it", "evidence/attempt-0001 has", "kill the attempt: it hangs")]
    assert told == sorted(told)
    evidence = tmp_path / "job" / "evidence" / "attempt-0001"
    assert "fake_trainer.py" in (evidence / "processes.txt").read_text()
    assert json.loads((evidence / "hang.json").read_text())["waited_s"] >= 3
    assert "Fatal Python error: Aborted" in (evidence / "stack-x.txt").read_text()  # two ranks write it at once


def test_work_without_a_step_is_no_hang(tmp_path):
    """
    Eight seconds of computing, with a limit of three, end nothing.
    """
    code, said = run(tmp_path, "--busy-at 50")

    assert (0, 1) == (code, len(attempts_of(tmp_path))), said


def test_a_loss_that_is_no_number_ends_the_run(tmp_path):
    """
    Given up with 6; what is left was saved while the loss was fine, and the reason names it.
    """
    job = JOB.replace("limits:", "guard: {{nan_patience: 20}}\nlimits:").replace(
        "save_interval: 1s", "save_interval: 500ms"
    )

    code, said = run(tmp_path, "--nan-at 40 --steps 2000", job)

    kept = sorted(path.name for path in (tmp_path / "job" / "checkpoints").glob("step-*"))
    assert 6 == code, said
    assert kept
    assert all(int(name[5:13]) < 40 for name in kept), kept
    assert f"go on from {kept[-1]}" in said


@pytest.mark.parametrize(
    ("kind", "label", "rank", "words"),
    [
        pytest.param("loader", "rank_stuck", 1, "rank 1 waits for its data", id="a stuck data loader"),
        pytest.param(
            "mismatch",
            "collective_mismatch",
            None,
            "rank 1 waits in all_gather, in main (hanging_torch.py:",
            id="different collectives",
        ),
    ],
)
def test_a_script_that_knows_nothing_of_us_is_watched_too(tmp_path, kind, label, rank, words):
    """
    Real torchrun and gloo; steps are lines of the log, and stacks say who waits for whom.
    """
    code, said = run(tmp_path, kind, TORCH_JOB)

    first, *_ = attempts_of(tmp_path)
    assert 0 == code, said
    assert (label, rank) == (first.diagnosis.label, first.diagnosis.rank), first.reason
    assert words in first.reason
