"""
Stands for the image's entrypoint on simulated servers: `entrypoint.py FOLDER [ARGUMENT ...]`.

The first server that starts is a machine whose cards do not work: what the job may use instead
of cards is taken from it. All others are as they should be.
"""

from __future__ import annotations

import base64
import json
import os
import sys
from pathlib import Path

from runner import guardian


def main(folder: Path, arguments: list[str]) -> None:
    mark = folder / "first-server"
    try:
        with mark.open("x") as file:
            file.write(os.environ["VRAMFARM_SERVER_ID"])
    except FileExistsError:
        pass
    if mark.read_text() == os.environ["VRAMFARM_SERVER_ID"]:
        job = json.loads(base64.b64decode(os.environ["RUNNER_JOB"]))
        del job["cpu_processes"]
        os.environ["RUNNER_JOB"] = json.dumps(job)
    os.execv(sys.executable, [sys.executable, "-I", str(Path(guardian.__file__)), *arguments])


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
