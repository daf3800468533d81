"""
Kill storms on the quickstart itself: torchrun, two ranks, gloo, the library, `vramfarm-runner run`.

Afterwards the weights, the optimizer and the loss are those of a run that nobody disturbed, bit for bit.
Each round kills at every kind of moment, in an order of its own; `make test` plays one. More by hand:

    STORM_ROUNDS=20 .venv/bin/python -m pytest -n 2 tests/chaos/test_storm_torch.py
"""

import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.storm import NAME, Play, Storm, farm_in
from vramfarm.folder import committed
from vramfarm.protocol import Manifest

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart" / "train.py"
ROUNDS = int(os.environ.get("STORM_ROUNDS", "1"))
STEPS = 100
ARGUMENTS = f"--steps {STEPS} --layers 1 --dim 64 --batch 4 --context 64 --pause 0.08"
JOB = f"""
name: {NAME}
command: {QUICKSTART} {ARGUMENTS}
cpu_processes: 2
preflight: {{comm_test: false}}
python: {sys.executable}
env: {{OMP_NUM_THREADS: "1"}}
checkpoint: {{save_interval: 1s, keep_last: 2}}
offload: {{to: "{{store}}", keep_last: 2}}
restart: {{max_restarts_without_progress: 1000, initial_delay: 0s, backoff_coefficient: 1}}
finish: {{hold: 0s}}
"""
MOMENTS = ("soon", "starting", "training", "saving", "task", "saving")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Manifest, str]:
    """The last checkpoint and the loss of a run without a supervisor, in one go."""
    folder = tmp_path_factory.mktemp("undisturbed")
    loss = train(folder, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    return committed(folder / "checkpoints")[0].manifest, loss


def train(folder: Path, *launcher: str) -> str:
    """Train from what is in `folder` to the end; returns the loss that it prints."""
    done = subprocess.run(
        [sys.executable, *launcher, str(QUICKSTART), *ARGUMENTS.split(), "--pause", "0"],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    (loss,) = final_losses(done.stdout)
    return loss


def final_losses(text: str) -> list[str]:
    return re.findall(r"final loss \S+", text)


def printed_loss(store: Path) -> str:
    """What rank 0 printed; if it was killed between the end of training and that, what the last checkpoint gives."""
    logs = (path.read_text(errors="replace") for path in (store / "logs").rglob("*.log"))
    losses = [loss for text in logs for loss in final_losses(text)]
    return losses[0] if losses else train(store)


@pytest.mark.storm
@pytest.mark.timeout(280)
@pytest.mark.parametrize("seed", range(1, 1 + ROUNDS))
def test_a_run_that_was_killed_again_and_again_learns_the_same_to_the_last_bit(tmp_path, seed, undisturbed):
    """
    At least five kills: while it starts, trains, saves and uploads, and when training is done.
    """
    manifest, loss = undisturbed
    dice = random.Random(seed)
    play = Play(
        seed=seed,
        guardian=(sys.executable, "-I", "-m", "runner", "run"),
        job=JOB,
        steps=STEPS,
        moments=(*dice.sample(MOMENTS, len(MOMENTS)), "ended"),
        moment_s=40.0,
        patience_s=120.0,
        runner_deaths=2,
    )
    with farm_in(tmp_path / "farm") as farm:
        storm = Storm(play, tmp_path, farm)
        storm.run()

    assert 5 <= storm.num_kills, storm.killed
    store = tmp_path / "store" / NAME
    last = committed(store / "checkpoints")[0].manifest
    assert (manifest.step, manifest.shards) == (last.step, last.shards)
    assert loss == printed_loss(store)
