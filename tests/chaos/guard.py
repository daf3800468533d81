"""The guardian and the real runner, with short waits: a storm kills the runner more often than a night does."""

import os
import sys

from runner.guardian import Waits, main

SILENCE = float(os.environ.get("CHAOS_SILENCE_S", Waits().silence))
FAST = Waits(
    restart_first=0.05,
    restart_last=0.1,
    short_life=0.0,
    ask_first=0.1,
    ask_last=0.5,
    read=0.1,
    look=0.1,
    silence=SILENCE,
)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], waits=FAST))
