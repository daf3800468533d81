"""
A container's memory limit that is hit in the middle of a save: the kernel kills one of ours, of its own choice.

A cgroup of version 1 stands where a container has its own. Who is killed is settled by `oom_score_adj`; another
process takes memory until that has happened. `make test` plays two of

    STORM_PARTS="ranks saver launcher shim runner guardian" .venv/bin/python -m pytest -n 0 tests/chaos/test_out_of_memory.py
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from runner.supervise.process import end_all, find
from tests.chaos.parts import sort_parts
from tests.chaos.witness import check_checkpoint
from tests.fake_trainer import content
from tests.farmhouse import wait_until
from vramfarm.folder import committed
from vramfarm.protocol import Env

HERE = Path(__file__).parent
MEMORY = Path("/sys/fs/cgroup/memory")
LIMIT = 700_000_000
MARK = "VRAMFARM_CHAOS"
STEPS, BYTES = 150, 300_000
JOB = f"""
name: tight
command: python {HERE / "launch_ranks.py"} 2 {HERE.parent / "fake_trainer.py"} --steps {STEPS} --step-time 0.02 --bytes {BYTES}
launcher: command
cpu_processes: 2
preflight: {{comm_test: false}}
python: {sys.executable}
checkpoint: {{save_interval: 400ms, keep_last: 2}}
offload: {{to: "file://{{store}}", keep_last: 2}}
restart: {{initial_delay: 0s}}
finish: {{hold: 0s}}
"""
HOG = """
import os, sys
open("/proc/self/oom_score_adj", "w").write("-1000")
open(sys.argv[1] + "/cgroup.procs", "w").write(str(os.getpid()))
held = []

def lives():
    try:
        with open("/proc/" + sys.argv[2] + "/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False

while lives():
    held.append(bytearray(b"x") * 2_000_000)
"""


class Container:
    """A run in a cgroup of its own."""

    def __init__(self, folder: Path, library: Path) -> None:
        self.folder, self.id = folder, uuid.uuid4().hex
        self.cgroup = MEMORY / f"chaos-{self.id}"
        self.cgroup.mkdir()
        (self.cgroup / "memory.limit_in_bytes").write_text(str(LIMIT))
        self.run_dir, self.orders = folder / "tight", folder / "orders"
        (folder / "job.yaml").write_text(JOB.replace("{store}", str(folder / "store")))
        own = f'echo $$ >{self.cgroup}/cgroup.procs && mount --bind {self.cgroup} {MEMORY} && exec "$@"'
        guard = (sys.executable, "-I", str(HERE / "guard.py"), "--config", str(folder / "job.yaml"))
        self._argv = ("unshare", "--mount", "sh", "-c", own, "sh", *guard)
        self._env = {
            **os.environ,
            MARK: self.id,
            "VRAMFARM_WORKSPACE": str(folder),
            "LD_PRELOAD": str(library),
            "TROUBLE_ROOT": str(self.run_dir),
            "TROUBLE_ORDERS": str(self.orders),
        }
        self.guardian = self.start()

    def start(self) -> subprocess.Popen[bytes]:
        with (self.folder / "log").open("ab") as log:
            self.guardian = subprocess.Popen(self._argv, env=self._env, stdout=log, stderr=log)
        return self.guardian

    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def parts(self):
        return sort_parts(self._processes())

    def stand_at(self, point: str) -> None:
        """Until a process stands at that operation, in a save that is not the first."""
        wait_until(lambda: len(committed(self.run_dir / "checkpoints")) > 1, 60)
        self.orders.with_suffix(".new").write_text(f"{point}\n")
        self.orders.with_suffix(".new").rename(self.orders)
        wait_until((self.folder / "orders.here").exists, 30)

    def kill_for_memory(self, part: str) -> int:
        victim = self.parts()[part][-1].pid
        Path(f"/proc/{victim}/oom_score_adj").write_text("1000")
        hog = subprocess.run([sys.executable, "-c", HOG, self.cgroup, str(victim)], check=False, timeout=60)
        assert hog.returncode in {0, -signal.SIGKILL}  # taken last, as nobody else was left
        self.orders.unlink()
        return victim

    def _processes(self):
        return (*{*find(Env.RUN, str(self.run_dir)), *find(MARK, self.id)},)  # the first knows the roles

    def end(self) -> None:
        end_all(self._processes)
        with suppress(OSError):
            self.guardian.wait(10)
        wait_until(lambda: not (self.cgroup / "cgroup.procs").read_text(), 20)
        self.cgroup.rmdir()


@pytest.fixture
def container(tmp_path: Path, library: Path) -> Iterator[Callable[[], Container]]:
    if os.geteuid() or not os.access(MEMORY / "memory.limit_in_bytes", os.W_OK):
        pytest.skip("needs root and a cgroup of version 1 for memory")
    made: list[Container] = []

    def make() -> Container:
        made.append(Container(tmp_path, library))
        return made[-1]

    yield make
    for one in made:
        one.end()


@pytest.mark.timeout(180)
@pytest.mark.parametrize("part", os.environ.get("STORM_PARTS", "saver runner").split())
def test_who_is_killed_for_want_of_memory_in_a_save_is_named_and_the_run_goes_on(container, part):
    """
    Whoever it is: the run ends well, the cause and the cure are in its report, and two good checkpoints stay.
    """
    run = container()
    run.stand_at("write -1 0 checkpoints/.tmp-*/shard-*")

    run.kill_for_memory(part)
    if part == "guardian":
        run.guardian.wait(20)
        run.start()

    assert 0 == run.guardian.wait(100), run.log()
    stored = committed(run.run_dir / "checkpoints")
    assert STEPS == stored[0].manifest.step
    assert 2 == len(stored)
    for one in stored:
        assert one.manifest.step == check_checkpoint(one.path, lambda rank, step: content(rank, step, BYTES))
    assert "out of memory: the kernel killed a process; the container may have 0.7 GB: give it more" in run.log()
    assert ("the saver was killed by signal 9" in run.log()) == (part == "saver")
