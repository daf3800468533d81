"""Moving a checkpoint between a disk and a store, here or in a process that may be killed."""

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from runner.storage.checkpoints import CheckpointDir
from runner.storage.disk import Disk

MOVE = """
import json, os, sys
from pathlib import Path
from runner.job import OffloadPolicy
from runner.storage.checkpoints import CheckpointDir
from runner.storage.disk import Disk
from runner.storage.offsite import open_store
from runner.storage.offsite.restoring import restore
from runner.storage.offsite.uploading import upload
from vramfarm.protocol import Ref
what, offload, root, ref = sys.argv[1], OffloadPolicy(**json.loads(sys.argv[2])), Path(sys.argv[3]), Ref(*json.loads(sys.argv[4]))
say = lambda fraction, note: print(fraction, note, flush=True)
{"upload": upload, "restore": restore}[what](open_store(offload, os.environ), "job", *([CheckpointDir(root, Disk()), ref] if what == "upload" else [ref, CheckpointDir(root, Disk())]), say)
print(next(line for line in open("/proc/self/status") if line.startswith("VmHWM:")).split()[1])  # kB
"""


def ignore(fraction, note):
    """Where nobody asks for progress."""


def elsewhere(tmp_path):
    """Another machine's empty disk."""
    return CheckpointDir(tmp_path / "elsewhere" / "checkpoints", Disk())


def contents(directory, ref):
    folder = directory.path(ref)
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def move(what, where, root, ref, *, kill_after_s=None):
    """Exit code of a process that moves a checkpoint, killed some time after its first sign of life if asked."""
    with _start(what, where, root, ref) as process, ThreadPoolExecutor(1) as reader:
        first = reader.submit(process.stdout.readline)
        if kill_after_s is not None:
            first.result(timeout=60)
            time.sleep(kill_after_s)
            process.send_signal(signal.SIGKILL)
        return process.wait(timeout=120)


def peak_bytes(what, where, root, ref):
    """Most memory that a process had which moved a checkpoint."""
    with _start(what, where, root, ref) as process:
        told, _ = process.communicate(timeout=240)
    assert 0 == process.returncode
    return int(told.splitlines()[-1]) * 1024


def _start(what, where, root, ref):
    offload, env = where
    arguments = [what, offload.model_dump_json(), str(root), json.dumps([ref.lineage, ref.step, ref.attempt, ref.id])]
    return subprocess.Popen(
        [sys.executable, "-c", MOVE, *arguments],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
        env={"PATH": os.environ["PATH"], **env},
    )
