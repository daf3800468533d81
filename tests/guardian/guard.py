"""
The guardian with short waits and the fake runner. From its start on nothing may be imported:
it has to work when the disk is gone.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from runner.guardian import Waits, main


class NoMoreImports:
    """Stands for a disk that is gone."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        raise ImportError(f"{name}: imported late")


FAST = Waits(
    restart_first=0.05,
    restart_last=0.1,
    short_life=60.0,
    last_word=1.0,
    silence=4.0,
    unheard=float(os.environ.get("GUARD_UNHEARD_S", "600")),
    ask_first=0.02,
    ask_last=0.1,
    read=0.05,
    stopping=0.5,
    alert=0.5,
    look=0.05,
)

if __name__ == "__main__":
    sys.meta_path.insert(0, NoMoreImports)
    runner = (sys.executable, "-I", str(Path(__file__).with_name("fake_runner.py")))
    sys.exit(main(sys.argv[1:], runner=runner, waits=FAST))
