"""
Stands for the machine around the guardian: starts it again when it was killed or has left, and
lets everything else of the run live on meanwhile, as a machine of one's own does.

    python -I box.py PROGRAM [ARGUMENT ...]
"""

import os
import signal
import subprocess
import sys
import time

LEFT = 75
PAUSE_S = 0.1


def main(argv):
    asked = []
    guardian = None

    def pass_on(*_):
        asked.append(True)
        if guardian is not None and guardian.poll() is None:
            guardian.terminate()

    signal.signal(signal.SIGTERM, pass_on)
    while True:
        guardian = subprocess.Popen(argv)
        code = guardian.wait()
        print(f"box: the guardian ended with {code}", file=sys.stderr, flush=True)
        if asked or (code >= 0 and code != LEFT):
            return code & 0xFF
        time.sleep(PAUSE_S)


if __name__ == "__main__":
    os.environ["PYTHONUNBUFFERED"] = "1"
    sys.exit(main(sys.argv[1:]))
