"""PID 1 of a simulated server."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from runner.simulator import container
from tests.farmhouse import wait_until

CHILD = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open("started", "w").close()
time.sleep(0.3)
os._exit(7)
"""


def test_a_sigterm_that_comes_while_the_process_ends_does_not_cost_its_exit_code(tmp_path: Path):
    """
    A stop often comes just when the guardian leaves: the code is recorded all the same.
    """
    spec = {"argv": [sys.executable, "-I", "-c", CHILD], "env": {}, "cwd": str(tmp_path), "number": 0}
    (tmp_path / "container.json").write_text(json.dumps(spec))
    with (tmp_path / "log").open("wb") as log:
        box = subprocess.Popen([sys.executable, "-I", container.__file__, str(tmp_path)], stderr=log)
    wait_until((tmp_path / "started").exists)

    while box.poll() is None:
        box.terminate()
        with suppress(subprocess.TimeoutExpired):
            box.wait(0.001)

    assert (tmp_path / "exit.json").exists(), (tmp_path / "log").read_text()
    assert {"number": 0, "code": 7} == json.loads((tmp_path / "exit.json").read_bytes())
