"""Staging memory as two processes have it: the same bytes, and large pages where the kernel has them."""

import ctypes
import mmap
import os
from pathlib import Path

import pytest

from vramfarm import memory

HUGE = 2 << 20
COLLAPSE = 25  # of madvise


def mapped_in_huge_pages(view):
    """Bytes of a mapping, as the kernel tells it."""
    lines, found = Path("/proc/self/smaps").read_text().splitlines(), None
    for line in lines:
        if "-" in line.split()[0]:
            begin, end = (int(one, 16) for one in line.split()[0].split("-"))
            found = begin <= memory.address_of(view) < end
        elif found and line.startswith("ShmemPmdMapped:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no such mapping")


def kernel_collapses():
    """Whether this kernel, with what it has left, makes a huge page of a memory file's small ones."""
    probe = memory.StagingMemory(HUGE)
    probe.memory[:] = bytes(HUGE)
    address = ctypes.c_void_p(memory.address_of(probe.memory))
    probe.close()
    return ctypes.CDLL(None).madvise(address, ctypes.c_size_t(HUGE), COLLAPSE) == 0


def test_staging_memory_has_huge_pages_in_both_processes():
    """
    The saver takes them; the rank, which mapped the file when it was empty, has them too. What is left over has small ones.
    """
    if not kernel_collapses():
        pytest.skip("no huge pages for memory files in this kernel, or none left")
    size = 3 * HUGE + 5 * mmap.PAGESIZE
    arena = memory.StagingMemory(size)

    populated = memory.populate_arena(os.getpid(), arena.fd, size)
    memory.populate_slowly(arena.memory)

    assert [3 * HUGE, 3 * HUGE] == [mapped_in_huge_pages(view) for view in (populated, arena.memory)]
    arena.close()


def test_what_is_taken_to_get_huge_pages_is_given_back():
    """
    A process may have no more than the staging memory, and that is shared: nothing of its own is left.
    """
    arena = memory.StagingMemory(48 * HUGE)
    before = own_bytes()

    populated = memory.populate_arena(os.getpid(), arena.fd, arena.size)

    assert own_bytes() - before < 8 * HUGE
    assert arena.size == len(populated)
    arena.close()


def own_bytes():
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["RssAnon"].split()[0]) * 1024


@pytest.mark.parametrize("size", [mmap.PAGESIZE, HUGE, 3 * HUGE + 5 * mmap.PAGESIZE])
def test_what_one_process_stages_the_other_has(size):
    """
    To the last byte, whatever the size, and after the rank has closed its end. It begins where a huge page may.
    """
    arena = memory.StagingMemory(size)
    saver = memory.populate_arena(os.getpid(), arena.fd, size)
    content = os.urandom(size)

    arena.memory[:] = content
    arena.close()

    assert content == bytes(saver)
    assert [0, 0] == [memory.address_of(view) % HUGE for view in (arena.memory, saver)]


def test_a_file_that_is_shorter_is_not_mapped():
    """
    A rank that has gone may have left its number to another file; reading behind its end would kill the saver.
    """
    arena = memory.StagingMemory(mmap.PAGESIZE)

    with pytest.raises(ValueError, match="shorter"):
        memory.map_arena(os.getpid(), arena.fd, 2 * mmap.PAGESIZE)
    arena.close()
