"""
A launcher without torch that behaves as torchrun does: each rank in a session of its own; when
one fails the others are ended, and this exits 1; killed, it leaves its ranks alive.

    python launch_ranks.py NUM_RANKS SCRIPT [ARGUMENT ...]
"""

import os
import signal
import subprocess
import sys
import time

GRACE_S = 1.0


def start(rank, world_size, argv):
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    env = os.environ | {name: str(value) for name, value in place.items()}
    return subprocess.Popen([sys.executable, *argv], env=env, start_new_session=True)


def wait(ranks):
    """The first failure, or 0 when all are done."""
    while True:
        codes = [rank.poll() for rank in ranks]
        bad = [code for code in codes if code]
        if bad or None not in codes:
            return bad[0] if bad else 0
        time.sleep(0.01)


def end(ranks):
    for number in (signal.SIGTERM, signal.SIGKILL):
        for rank in ranks:
            if rank.poll() is None:
                rank.send_signal(number)
        until = time.monotonic() + GRACE_S
        while time.monotonic() < until and any(rank.poll() is None for rank in ranks):
            time.sleep(0.01)


def main(num_ranks, argv):
    ranks = [start(rank, num_ranks, argv) for rank in range(num_ranks)]
    signal.signal(signal.SIGTERM, lambda *_: (end(ranks), sys.exit(1)))
    code = wait(ranks)
    end(ranks)
    return 1 if code else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
