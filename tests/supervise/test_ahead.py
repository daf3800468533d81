"""While torch is imported the disk reads the checkpoint that training will ask for."""

import ctypes
import fcntl
import mmap
import os
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from runner.supervise.attempt import SHIM

SIZE = 40 << 20
PATIENCE_S = 60.0


@pytest.fixture
def shard(tmp_path):
    """A shard of which nothing is in the page cache; skips where the filesystem lives in memory."""
    path = tmp_path / "step-00000001-0123abcd" / "model-00001-of-00001.safetensors"
    path.parent.mkdir()
    with path.open("wb") as file:
        file.write(os.urandom(SIZE))
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if cached_bytes(path):
        pytest.skip("a file cannot be put out of the page cache here")
    return path


def cached_bytes(path):
    """How much of it is in memory, without a touch."""
    pages = (ctypes.c_ubyte * (SIZE // mmap.PAGESIZE))()
    with path.open("rb") as file, mmap.mmap(file.fileno(), SIZE, access=mmap.ACCESS_COPY) as memory:
        first = ctypes.c_char.from_buffer(memory)
        assert 0 == ctypes.CDLL(None).mincore(ctypes.byref(first), ctypes.c_size_t(SIZE), pages)
        del first
    return sum(page & 1 for page in pages) * mmap.PAGESIZE


@contextmanager
def attempt(tmp_path, resume, ranks=1):
    """A shim whose launcher takes its time."""
    folder = tmp_path / "attempt"
    folder.mkdir()
    env = dict(os.environ) | {"VRAMFARM_RESUME": str(resume), "VRAMFARM_WORLD_SIZE": str(ranks)}
    with subprocess.Popen([sys.executable, "-I", SHIM, folder, "sleep", "60"], env=env) as shim:
        yield shim
        subprocess.run(["pkill", "-KILL", "-P", str(shim.pid)], check=False)
        assert 137 == shim.wait(PATIENCE_S)


def open_files(pid):
    return [one.readlink() for one in Path(f"/proc/{pid}/fd").iterdir()]


def until(is_so):
    """Whether it came to be so."""
    end = time.monotonic() + PATIENCE_S
    while not is_so() and time.monotonic() < end:
        time.sleep(0.1)
    return is_so()


def test_the_checkpoint_is_read_while_the_launcher_starts(tmp_path, shard):
    """
    When the ranks ask for it, it is in memory; and its files are closed, so that what is removed gives its space back.
    """
    with attempt(tmp_path, shard.parent) as shim:
        assert True is until(lambda: cached_bytes(shard) > SIZE * 0.9)
        assert True is until(lambda: shard not in open_files(shim.pid))


def test_it_is_left_to_the_rank_that_has_opened_it(tmp_path, shard):
    """
    Two readers of the same bytes would take each other's disk.
    """
    with shard.open("rb") as rank:
        fcntl.flock(rank, fcntl.LOCK_SH)
        with attempt(tmp_path, shard.parent):
            until((tmp_path / "attempt" / "shim.json").exists)
            time.sleep(2)

            assert True is (cached_bytes(shard) < SIZE / 2)


def test_few_cores_are_left_to_the_ranks(tmp_path, shard):
    """
    Where all cores import torch, whatever is read meanwhile delays just that.
    """
    with attempt(tmp_path, shard.parent, ranks=len(os.sched_getaffinity(0))):
        until((tmp_path / "attempt" / "shim.json").exists)
        time.sleep(2)

        assert True is (cached_bytes(shard) < SIZE / 2)


@pytest.mark.parametrize("resume", ["none", "/nowhere/at/all"])
def test_without_a_checkpoint_the_launcher_runs_all_the_same(tmp_path, resume):
    """
    Reading ahead is a favour; nothing of it may end an attempt.
    """
    with attempt(tmp_path, resume) as shim:
        record = tmp_path / "attempt" / "shim.json"
        assert True is until(lambda: record.exists() and b'"launcher"' in record.read_bytes())
        assert None is shim.poll()
