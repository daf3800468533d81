"""The guardian and the real runner, with short waits: a storm kills the runner more often than a night does."""

import sys

from runner.guardian import Waits, main

FAST = Waits(restart_first=0.05, restart_last=0.1, short_life=0.0, ask_first=0.1, ask_last=0.5, read=0.1, look=0.1)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], waits=FAST))
