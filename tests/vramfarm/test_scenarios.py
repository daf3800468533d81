"""Features of trainings in combinations that nobody thought of."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.timeout(600)  # a quarter of a minute of processor; a busy machine gives it slowly
def test_trainings_made_by_chance_go_on_as_if_undisturbed(tmp_path):
    """
    Spread, optimizers, objects, data, changes between saves, ends and numbers of ranks by chance: what was committed is what the ranks had,
    comes back to them and to torch's own reader bit for bit, and no sample is left out.

    `make scenarios SEEDS=200` plays more; what that found is in docs/correctness.md.
    """
    argv = (sys.executable, HERE / "scenarios.py", tmp_path, "7000", "3")
    env = os.environ | {"PYTHONPATH": str(HERE.parents[1]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(argv, env=env, timeout=500, check=False, capture_output=True, text=True)
    lines = [json.loads(line) for line in done.stdout.splitlines()]

    assert ([], 0) == (lines[:-1], done.returncode), done.stderr
    assert 3 == lines[-1]["seeds"]
    assert 3 <= lines[-1]["committed"]
