"""Shards on real filesystems: what was in memory is in the file, whatever its size."""

import mmap
import os
import resource
import subprocess
import sys
import tempfile
import threading
import zlib
from dataclasses import replace
from pathlib import Path

import pytest

from vramfarm import folder, protocol, writing
from vramfarm.checksum import find_crc64nvme

CHUNK = protocol.CHUNK_BYTES


@pytest.fixture(params=["disk", "memory"])
def place(request, tmp_path):
    """A folder on the disk, and one on a filesystem that may know no direct writes."""
    if request.param == "disk":
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        yield Path(name)


def filled(size):
    """Page-aligned memory with `size` bytes in it, and something else behind them."""
    pages = -(-(size + 1) // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = memoryview(mmap.mmap(-1, pages))
    memory[:] = b"x" * pages
    block = os.urandom(1 << 20)
    for start in range(0, size, len(block)):
        end = min(size, start + len(block))
        memory[start:end] = block[: end - start]
    return memory


@pytest.mark.parametrize("size", [0, 1, 4096, CHUNK, CHUNK + 1, 3 * CHUNK + 4097])
def test_a_file_has_the_bytes_and_no_more(place, size):
    """
    Direct writes go in whole blocks; the file ends where the shard ends.
    """
    memory = filled(size)

    shard = writing.write_shard(place / "shard", memory, size)

    raw = (place / "shard").read_bytes()
    assert (size, bytes(memory[:size])) == (shard.size_bytes, raw)
    chunks = [raw[at : at + CHUNK] for at in range(0, size, CHUNK)]
    assert tuple(zlib.crc32(chunk) for chunk in chunks) == shard.checksums
    assert tuple(find_crc64nvme()(chunk, 0) for chunk in chunks) == shard.crc64nvme


WRITE = """
import mmap, pathlib, sys
sys.modules["awscrt"] = None
from vramfarm import writing
shard = writing.write_shard(pathlib.Path(sys.argv[1]), memoryview(mmap.mmap(-1, 4096)), 9)
print(shard.checksums, shard.crc64nvme, "awscrt.checksums" in sys.modules)
"""


def test_a_shard_is_written_where_nothing_computes_crc64nvme(tmp_path):
    """
    The training's environment needs torch and nothing else.
    """
    argv = [sys.executable, "-c", WRITE, tmp_path / "shard"]

    out = subprocess.run(argv, env={"PYTHONPATH": "."}, capture_output=True, text=True, check=True, timeout=60).stdout

    assert f"({zlib.crc32(bytes(9))},) () False\n" == out


def test_a_manifest_that_would_be_too_large_does_without_crc64nvme(tmp_path):
    """
    Nobody needs it, and a checkpoint that cannot be committed is none.
    """
    temporary = tmp_path / ".tmp-5"
    temporary.mkdir()
    size, chunks = 1000 * CHUNK, tuple(range(2**63, 2**63 + 1000))
    shard = protocol.Shard("shard", size, tuple(range(1000)), chunks)
    state = {"text": "x" * (protocol.MAX_MANIFEST_BYTES - 10_000)}
    manifest = protocol.Manifest("job", 0, 5, "0123abcd", 1, 1, "2026-01-01", "crc32", (shard,), state=state)
    (temporary / "shard").touch()
    os.truncate(temporary / "shard", size)

    large = folder.read(folder.commit(temporary, manifest))
    temporary.mkdir()
    (temporary / "shard").symlink_to(large.path / "shard")
    small = folder.commit(temporary, replace(manifest, id="01234567", state={}))

    assert ((), shard.checksums) == (large.manifest.shards[0].crc64nvme, large.manifest.shards[0].checksums)
    assert chunks == protocol.parse_manifest((small / protocol.MANIFEST).read_bytes()).shards[0].crc64nvme


def test_memory_that_is_not_aligned_is_written_all_the_same(tmp_path):
    """
    A filesystem may refuse what it cannot write directly; then it is written the ordinary way.
    """
    memory = memoryview(filled(2 * CHUNK))[3:]

    writing.write_shard(tmp_path / "shard", memory, len(memory))

    assert bytes(memory) == (tmp_path / "shard").read_bytes()


def test_a_full_disk_is_known_before_the_first_byte(tmp_path):
    """
    The space is taken first.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (CHUNK, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            writing.write_shard(tmp_path / "shard", filled(4 * CHUNK), 4 * CHUNK)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    assert 0 == (tmp_path / "shard").stat().st_size


def test_sums_give_way_to_training_and_direct_writes_do_not(tmp_path):
    """
    On full cores a polite thread comes late to a disk that waits for it; where bytes are copied into the page cache, writing is polite, too.
    """
    probe = writing._Target(tmp_path / "probe", 0)
    probe.close()
    expected = os.getpriority(os.PRIO_PROCESS, 0) if probe._is_direct else 10
    writing._idle.clear()
    found = []

    def write():
        writing.write_shard(tmp_path / "shard", filled(CHUNK), CHUNK)
        found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    thread = threading.Thread(target=write)
    thread.start()
    thread.join()

    sums = {os.getpriority(os.PRIO_PROCESS, one.native_id) for one in writing._idle[-1]._threads}
    assert ([expected], {10}) == (found, sums)


def test_a_shard_is_handed_to_the_kernel_in_few_calls(tmp_path):
    """
    Between two calls the disk stands still until the thread is given a processor, which takes milliseconds where training has them all.
    """
    target = writing._Target(tmp_path / "shard", size := 3 * CHUNK + 4097)
    if not target._is_direct:
        pytest.skip("no direct writes here")
    memory, put, calls = filled(size), target._put_directly, []
    target._put_directly = lambda *what: calls.append(what[1:]) or put(*what)

    target.write(memory, 0, size)
    target.close()

    assert [(0, size)] == calls


@pytest.mark.parametrize(("asked", "expected"), [(3, {4}), (1000, {26, writing._PROBES + 1})])
def test_a_disk_is_shown_the_memory_until_somebody_wants_it(tmp_path, asked, expected):
    """
    That is asked before each piece of 8 MiB. Neither the memory nor the folder is changed, and what is small is not worth it.
    """
    memory, wanted = filled(26 * CHUNK), []
    before = zlib.crc32(memory)

    def is_wanted():
        wanted.append(1)
        return len(wanted) <= asked

    writing.introduce(memory, tmp_path, is_wanted)

    assert len(wanted) in expected
    assert not writing.introduce(memory[: 3 * CHUNK], tmp_path, is_wanted)
    assert (before, []) == (zlib.crc32(memory), list(tmp_path.iterdir()))


def test_a_first_save_starts_no_thread(tmp_path):
    """
    They are there before it, of as many shards as there are ranks and no more.
    """
    writing._idle.clear()
    for _ in range(3):
        writing.prepare(2)
    before = threading.active_count()

    writing.write_shard(tmp_path / "shard", filled(3 * CHUNK), 3 * CHUNK)

    assert (2, before) == (len(writing._idle), threading.active_count())
