"""
A disk that answers nobody: whoever changes anything on it hangs in the kernel, where no signal reaches.

What must happen all the same is the guardian's: the end of this boot, the deadline, the stop of the server.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from benchmarks.chaos.disk import run
from benchmarks.chaos.disks import BYTES, Night, frozen
from runner.supervise.process import find
from tests.chaos.witness import check_checkpoint
from tests.fake_trainer import content
from tests.farmhouse import wait_until
from vramfarm.folder import committed
from vramfarm.protocol import Env

PATIENCE_S = 60


@pytest.fixture
def night(tmp_path: Path, library: Path) -> Iterator[Callable[..., Night]]:
    if os.geteuid() or not shutil.which("fsfreeze"):
        pytest.skip("needs root, and fsfreeze")
    made: list[Night] = []

    def start(**options) -> Night:
        made.append(Night(tmp_path, library, steps=100_000, **options))
        return made[-1]

    yield start
    for one in made:
        with suppress(Exception):  # it is not frozen any more
            run("fsfreeze", "-u", one.place)
        one.end()


def test_a_boot_ends_on_sigterm_though_its_disk_answers_nobody(night):
    """
    The runner hangs in the kernel and cannot be asked. When the disk is back what was committed is there, and nobody lives.
    """
    run_ = night(CHAOS_SILENCE_S="4")
    run_.until(lambda: len(run_.committed()) > 1, "two checkpoints")

    with frozen(run_):
        time.sleep(1)
        run_.guardian.terminate()
        assert 75 == run_.guardian.wait(PATIENCE_S)
    said = run_.log()

    assert "the runner says nothing for 4 s, its disk may not answer: this boot ends without it" in said
    wait_until(lambda: not find(Env.RUN, str(run_.run_dir)), PATIENCE_S)
    stored = committed(run_.run_dir / "checkpoints")
    assert len(stored) >= 2
    for one in stored:
        assert one.manifest.step == check_checkpoint(one.path, lambda rank, step: content(rank, step, BYTES))


def test_the_deadline_stops_the_server_though_its_disk_takes_not_even_the_log(night, tmp_path):
    """
    Run folder, guardian.json and the guardian's own log are all on it.
    """
    stopped = tmp_path / "stopped"
    stop = tmp_path / "stop.sh"
    stop.write_text(f"#!/bin/sh\ntouch {stopped}\n")
    stop.chmod(0o755)
    server = f"limits: {{max_duration: 25s}}\nprovider: {{kind: command, stop_command: [{stop}], status_command: [cat, {tmp_path / 'state'}]}}\n"
    (tmp_path / "state").write_text("running")
    run_ = night(more=server, log="disk/log")
    run_.until(run_.committed, "a checkpoint")

    with frozen(run_):
        wait_until(stopped.exists, PATIENCE_S)
        (tmp_path / "state").write_text("gone")
        assert 7 == run_.guardian.wait(PATIENCE_S)
