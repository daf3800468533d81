"""Who gave an order: a person in a terminal, or a command line that comes back with every restart."""

import subprocess
import sys
from pathlib import Path

ASK = f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r}); from runner.cli.run import is_typed; print(is_typed())"
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
