"""
A runner that does as it is told. One argument a life, the last for all that follow: steps
with a `;` between them. Ends with 75 on SIGTERM and 9 when its guardian is gone.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

HERE = Path(os.environ["VRAMFARM_WORKSPACE"])
LINE = socket.socket(fileno=int(os.environ["RUNNER_LIFELINE"]))


def main(lives: list[str]) -> None:
    with (HERE / "lives").open("a+") as file:
        file.write(f"{os.getpid()}\n")
        file.flush()
        file.seek(0)
        life = len(file.readlines())
    signal.signal(signal.SIGTERM, lambda *_: os._exit(75))
    threading.Thread(target=watch_lifeline, daemon=True).start()
    for step in lives[min(life, len(lives)) - 1].split(";"):
        take(*step.strip().partition(" ")[::2])


def watch_lifeline() -> None:
    with suppress(OSError):  # a guardian that was killed resets the line
        LINE.recv(1)
    os._exit(9)


def take(word: str, rest: str) -> None:
    match word:
        case "say":
            LINE.sendall(rest.encode() + b"\n")
        case "deadline":  # in so many seconds
            at = datetime.now(UTC) + timedelta(seconds=float(rest))
            line = f'{{"deadline": "{at.isoformat()}", "keep": "/workspace", "run": "{HERE / "run"}"}}'
            LINE.sendall(line.encode() + b"\n")
        case "sleep":
            time.sleep(float(rest))
        case "exit":
            os._exit(int(rest))
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "deaf":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        case "stray":  # a process of the run that nobody waits for
            stray = (sys.executable, "-I", "-c", "import time; time.sleep(600)")
            env = os.environ | {"VRAMFARM_RUN": str(HERE / "run")}
            process = subprocess.Popen(stray, env=env, start_new_session=True)
            (HERE / "stray").write_text(str(process.pid))
        case "orphans":  # short lives whose parent does not wait
            for _ in range(5):
                subprocess.run(["/bin/sh", "-c", "sleep 0.05 & exit 0"], check=True)
        case _:
            raise SystemExit(f"unknown step {word!r}")


if __name__ == "__main__":
    main(sys.argv[1:])
