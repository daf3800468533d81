"""What may go wrong while a checkpoint is written or read, done to our engine and to torch's DCP."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SUITE = Path(__file__).parents[2] / "benchmarks" / "correctness.py"


@pytest.mark.timeout(900)  # half a minute of processor; a busy machine gives it slowly
def test_ours_passes_every_row(tmp_path):
    """
    Kills, late ranks, power loss, failing writes, flipped bits, hostile files, other numbers of ranks, other ways of spreading a model: no checkpoint
    and no sample is lost or is another state. What torch's DCP does in the same run is told, and not judged: it may change.

    `make correctness ROUNDS=1000` is the long version; its table is in docs/correctness.md.
    """
    argv = (sys.executable, SUITE, "--rounds", "10", "--dcp-rounds", "1", "--jobs", "2", "--out", tmp_path / "out")
    done = subprocess.run(argv, timeout=800, check=False, capture_output=True, text=True)
    print(done.stdout)

    rows = json.loads((tmp_path / "out" / "correctness.json").read_text())["rows"]
    failed = {name: found["vramfarm"]["says"] for name, found in rows.items() if not found["vramfarm"]["passed"]}
    assert ({}, 0) == (failed, done.returncode), done.stderr
    assert 15 == len([name for name, found in rows.items() if found["DCP"]["rounds"] or found["DCP"]["skipped"]])
