"""
Kill storms without torch: the whole chain of processes, a trainer that starts in milliseconds.

`make test` plays a few. Hundreds by hand, one failing seed again:

    STORM_ROUNDS=300 .venv/bin/python -m pytest -n 2 tests/chaos/test_storm.py
    STORM_SEED=17 STORM_ROUNDS=1 .venv/bin/python -m pytest tests/chaos/test_storm.py
"""

import os
import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.chaos.storm import MOMENTS, NAME, Play, Storm, farm_in
from tests.fake_trainer import content

HERE = Path(__file__).parent
STEPS = 200
BYTES = 300_000
ROUNDS = int(os.environ.get("STORM_ROUNDS", "4"))
FIRST = int(os.environ.get("STORM_SEED", "0"))
JOB = f"""
name: {NAME}
command: python {HERE / "launch_ranks.py"} 2 {HERE.parent / "fake_trainer.py"} --steps {STEPS} --step-time 0.015 --bytes {BYTES}
launcher: command
cpu_processes: 2
preflight: {{comm_test: false}}
python: {sys.executable}
checkpoint: {{save_interval: 300ms, keep_last: 2}}
offload: {{to: "{{store}}", keep_last: 2}}
restart: {{max_restarts_without_progress: 1000, initial_delay: 0s, backoff_coefficient: 1, grace_period: 20s}}
finish: {{hold: 0s}}
"""


PLAY = Play(
    seed=0,
    guardian=(sys.executable, "-I", str(HERE / "guard.py")),
    job=JOB,
    steps=STEPS,
    moments=(),
    moment_s=3.0,
    patience_s=60.0,
    runner_deaths=1000,
    content=lambda rank, step: content(rank, step, BYTES),
)


@pytest.mark.storm
@pytest.mark.timeout(180)
@pytest.mark.parametrize("seed", range(FIRST, FIRST + ROUNDS))
def test_whatever_is_killed_the_run_ends_with_its_last_checkpoint_in_the_store(tmp_path, seed):
    """
    No step is lost that was committed, nothing is damaged, nothing is left, and the server is stopped.
    """
    dice = random.Random(seed)
    moments = tuple(dice.choices(MOMENTS, k=dice.randint(2, 7)))
    with farm_in(tmp_path / "farm") as farm:
        Storm(replace(PLAY, seed=seed, moments=moments), tmp_path, farm).run()


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "parts",
    [
        pytest.param(("shim", "launcher", "rank"), id="a rank is left and nobody who watches it"),
        pytest.param(("ranks", "saver"), id="only the launcher is left"),
        pytest.param(("guardian", "shim", "launcher", "ranks"), id="only the saver is left"),
    ],
)
def test_what_is_left_of_an_attempt_does_not_hold_up_the_next(tmp_path, parts):
    """
    Whatever part of it is killed: the rest is ended, the run goes on, and the journal says how far it came.
    """
    play = replace(PLAY, moments=("training",), moment_s=30.0, parts=parts)
    with farm_in(tmp_path / "farm") as farm:
        storm = Storm(play, tmp_path, farm)
        storm.run()

    assert 0 < storm.witness.ended[1]
