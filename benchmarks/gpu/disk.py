"""
What the disk gives to as many writers and readers at once as there are cards, and what our shard writer makes of it. No torch, no card.

    python benchmarks/gpu/disk.py FOLDER [--writers 2] [--gb 2] [--rounds 3] [--limit-s 50] [--busy]

In turns, in one run: direct writes of plain memory, of a memory file, as the saver has it, and of huge pages; our writer
(checksums, fsync); direct reads into plain memory and into huge pages, as our reader has them. Also how fast one thread
sums.

With --busy one process more for each core does nothing but sums, as a training does that fills all cores; the last
columns say what writing took of the processor, and how much slower those became meanwhile. `rude` is our writer, its sums
without their niceness.
"""

import argparse
import mmap
import multiprocessing
import os
import statistics
import sys
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import page

sys.path.append(str(page.ROOT))
from benchmarks.raw import PIECE, direct, get, huge, put
from vramfarm import memory as arenas
from vramfarm import writing

DIRECT = os.O_DIRECT  # 0 where the filesystem has none


def filled(view):
    """Bytes that no disk and no host can make little of."""
    tile = os.urandom(min(len(view), 128 << 20))
    for at in range(0, len(view), len(tile)):
        part = view[at : at + len(tile)]
        part[:] = tile[: len(part)]
        part[:8] = at.to_bytes(8, "little")
    return view


def raw_write(path, view, depth):
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | DIRECT, 0o600)
    os.posix_fallocate(fd, 0, len(view))
    with ThreadPoolExecutor(depth) as pool:
        list(pool.map(lambda at: put(fd, view[at : at + PIECE], at), range(0, len(view), PIECE)))
    os.fsync(fd)
    os.close(fd)


def raw_read(path, view, depth):
    fd = os.open(path, os.O_RDONLY | DIRECT)
    with ThreadPoolExecutor(depth) as pool:
        list(pool.map(lambda at: get(fd, view[at : at + PIECE], at), range(0, len(view), PIECE)))
    os.close(fd)


def ours(path, view, _):
    _write_ours(path, view, 10)


def rude(path, view, _):
    _write_ours(path, view, 0)


def _write_ours(path, view, niceness):
    writing._idle.clear()
    writing._POLITE = niceness
    writing.write_shard(path, view, len(view))


def spin(counter):
    """What a busy core gets done."""
    raw = bytes(1 << 16)
    while True:
        zlib.crc32(raw)
        counter.value += 1


def work(number, folder, size, *, orders, barrier, answers):
    """One writer: does what all do, at the same time."""
    plain, large = filled(memoryview(mmap.mmap(-1, size))), filled(huge(size))
    arena = arenas.StagingMemory(size)
    filled(arenas.populate_arena(os.getpid(), arena.fd, size))
    started = time.perf_counter()
    zlib.crc32(plain[: 256 << 20])
    answers.put((min(size, 256 << 20) / (time.perf_counter() - started), 0))
    while (order := orders.get()) is not None:
        kind, depth = order
        path = Path(folder) / f"disk-{number}"
        view = {"plain memory": plain, "read": plain}.get(kind, large if "huge" in kind else arena.memory)
        if not kind.startswith("read"):
            path.unlink(missing_ok=True)
            os.sync()
        barrier.wait(60)
        started, used = time.perf_counter(), time.process_time()
        {"read": raw_read, "read huge": raw_read, "ours": ours, "rude": rude}.get(kind, raw_write)(path, view, depth)
        used = time.process_time() - used
        barrier.wait(60)
        answers.put((time.perf_counter() - started, used))
    Path(folder, f"disk-{number}").unlink(missing_ok=True)


def main():
    arguments = parse_arguments()
    folder, began = Path(arguments.folder), time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    global DIRECT  # noqa: PLW0603  # workers are forked with it
    DIRECT = direct(folder)
    size = int(arguments.gb * 1e9) // PIECE * PIECE
    context = multiprocessing.get_context("fork")
    barrier, answers = context.Barrier(arguments.writers), context.Queue()
    orders = [context.Queue() for _ in range(arguments.writers)]
    workers = [
        context.Process(
            target=work,
            args=(n, folder, size),
            kwargs={"orders": orders[n], "barrier": barrier, "answers": answers},
            daemon=True,
        )
        for n in range(arguments.writers)
    ]
    for worker in workers:
        worker.start()
    sums = [answers.get(timeout=60)[0] for _ in workers]
    kinds = [("plain memory", 4), ("memory file", 8), ("ours", 1), ("huge pages", 4), ("huge pages", 8)]
    kinds += [("read", 4), ("read huge", 4), ("read huge", 8)]
    if arguments.busy:
        kinds = [("plain memory", 4), ("huge pages", 4), ("ours", 1), ("rude", 1)]
    counters = [context.Value("Q", lock=False) for _ in range(os.cpu_count() if arguments.busy else 0)]
    for counter in counters:
        context.Process(target=spin, args=(counter,), daemon=True).start()
    found = {kind: [] for kind in kinds}
    for _ in range(arguments.rounds):
        for kind in kinds:
            if time.monotonic() - began > arguments.limit_s:
                break
            undisturbed = pace(counters)
            begun, before = time.perf_counter(), done(counters)
            for queue in orders:
                queue.put(kind)
            told = [answers.get(timeout=90) for _ in workers]
            took = max(seconds for seconds, _ in told)
            slower = 1 - (done(counters) - before) / (time.perf_counter() - begun) / undisturbed if counters else 0
            found[kind].append((took, sum(used for _, used in told), slower))
            print(f"{time.monotonic() - began:6.1f} {kind[0]}, {kind[1]}: {found[kind][-1]}", flush=True)
    for queue in orders:
        queue.put(None)
    for worker in workers:
        worker.join(20)
    write(folder, arguments, found, sums, arguments.writers * size)


def done(counters):
    return sum(counter.value for counter in counters)


def pace(counters):
    """Of the busy, undisturbed."""
    if not counters:
        return 1
    before, begun = done(counters), time.perf_counter()
    time.sleep(1)
    return (done(counters) - before) / (time.perf_counter() - begun)


def write(folder, arguments, found, sums, size):
    text = [
        f"{arguments.writers} at once, {size / 1e9:.1f} GB together, {os.cpu_count()} cores; one thread sums {statistics.mean(sums) / 1e9:.2f} GB/s",
        "",
        "| | pieces of 8 MiB in flight, each; of ours: of 256 MiB | s, median (range) | GB/s | CPU-s/GB | the busy cores slower meanwhile |",
        "|---|---|---|---|---|---|",
    ]
    names = {
        "ours": "our writer",
        "rude": "our writer, rude",
        "read": "direct read into plain memory",
        "read huge": "direct read into huge pages",
    }
    for (kind, depth), times in found.items():
        if times:
            seconds, used, slower = zip(*times, strict=True)
            middle = statistics.median(seconds)
            cost = (
                f"{statistics.median(used) / size * 1e9:.3f} | {statistics.median(slower):.0%}"
                if arguments.busy
                else f"{statistics.median(used) / size * 1e9:.3f} | "
            )
            name = names.get(kind, f"direct write, {kind}")
            text.append(
                f"| {name} | {depth} | {middle:.2f} ({min(seconds):.2f}–{max(seconds):.2f}) | {size / middle / 1e9:.2f} | {cost} |"
            )
    (folder / "disk.md").write_text("\n".join(text) + "\n")
    print("\n".join(text), flush=True)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--writers", type=int, default=page.num_ranks())
    parser.add_argument("--gb", type=float, default=2, help="of each writer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit-s", type=float, default=50)
    parser.add_argument("--busy", action="store_true", help="all cores are busy")
    return parser.parse_args()


if __name__ == "__main__":
    main()
