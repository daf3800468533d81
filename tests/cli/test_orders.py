"""Who gave an order: a person in a terminal, or a command line that comes back with every restart."""

import os
import socket
import subprocess
import sys
from pathlib import Path

ASK = f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r}); from runner.cli.run import is_typed; print(is_typed())"
RUN = (sys.executable, "-I", "-m", "runner", "run")
IN_TERMINAL = "import pty, sys; pty.spawn(sys.argv[1:])"


def ask(*before):
    argv = [*before, sys.executable, "-c", ASK]
    return subprocess.run(argv, capture_output=True, stdin=subprocess.DEVNULL, text=True, timeout=60, check=True).stdout


def test_only_what_leads_a_terminals_foreground_is_typed():
    """
    A command of a shell in a terminal is; one without a terminal, or of a script in one, is not.
    """
    terminal = [sys.executable, "-c", IN_TERMINAL]

    answers = [ask(*before).split() for before in ([], terminal, [*terminal, "sh", "-c", '"$@"; true', "sh"])]

    assert [["False"], ["True"], ["False"]] == answers


def test_an_order_that_a_script_repeats_is_no_success(tmp_path: Path):
    """
    The run is over: nothing is done, and how a script names its orders is said. A name that comes again is carried out once.
    """
    (tmp_path / "job.yaml").write_text("name: small\ncommand: 'true'\nlauncher: command\ncpu_processes: 1\n")
    env = {**os.environ, "VRAMFARM_WORKSPACE": str(tmp_path)}

    def run(order: str) -> subprocess.CompletedProcess[str]:
        argv = (*RUN, str(tmp_path / "job.yaml"), "--start-over", "--order", order)  # as validate takes it
        return subprocess.run(
            argv, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, check=False
        )

    unnamed = socket.gethostname()  # what a container's own command has for a name
    done = [run(order) for order in (unnamed, unnamed, "monday", "monday")]

    assert [0, 2, 0, 0] == [one.returncode for one in done], [one.stderr[-500:] for one in done]
    assert "--start-over: it was carried out here before, and the run is over: nothing is done" in done[1].stderr
    assert "launch attempt 2" in done[2].stderr
    assert "--order NAME makes it a new one" in done[3].stderr
