"""`logs`: what the launcher and the ranks wrote, of the last attempt or an earlier one."""

from __future__ import annotations

import argparse
import errno
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Collection, Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Final

from runner.cli.output import note, out, speaking
from runner.cli.runs import add_follow, add_run, find_in_store, find_run, is_alive, refuse_follow
from runner.cli.stores import Address, StoredRun, no_run, open_run
from runner.errors import JobError, StoreError, one_line
from runner.figures import size
from runner.supervise.logs import Follower, Line, find_streams, stream_of, tail

_LOOK_S: Final = 0.5
_TAIL_BYTES: Final = 1 << 20  # of one file in the store
_ALL_BYTES: Final = 64 << 20  # of all of them: of many less each
_MAX_FILES: Final = 1000  # of an attempt: whoever may write to a bucket may fill it with more than a person reads
_MAX_LISTED: Final = 100_000
_MAX_NAMED: Final = 64
_ATTEMPT: Final = re.compile(r"attempt-\d{4,9}", re.ASCII)
_NO_NAME: Final = frozenset({errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.EINVAL, errno.EILSEQ})


def configure(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    add_follow(parser)
    parser.add_argument(
        "-n", "--lines", type=int, default=100, metavar="N", help="last lines of each stream (default: 100)"
    )
    parser.add_argument("--rank", type=int, metavar="K", help="only this rank; -1: the launcher")
    parser.add_argument("--json", action="store_true", help="one JSON object per line: rank, stream, text")
    parser.add_argument("--attempt", type=int, metavar="K", help="show this attempt, not the latest")


def run(args: argparse.Namespace) -> int:
    if address := find_in_store(args.run, os.environ):
        return _from_the_store(args, address)
    run_dir = find_run(args.run, os.environ)
    folder = _attempt(run_dir, args.attempt)
    _expect_rank(args.rank, {stream.rank for stream in find_streams(folder)}, folder.name)
    follower = Follower(folder, rank=args.rank)
    follower.skip()  # before the tail is shown: a line may then come twice, but none is lost
    lines = tail(folder, args.lines, rank=args.rank)
    _print(lines, as_json=args.json)
    if not (lines or args.follow) and args.lines > 0:
        sys.stderr.write(f"{folder}: nothing was printed yet\n")
    if args.follow:
        _follow(run_dir, folder, follower, args)
    return 0


def _from_the_store(args: argparse.Namespace, address: Address) -> int:
    """The ends of the logs, as the runner copied them last."""
    refuse_follow(args)
    run = open_run(address)
    sizes = _list(run, "" if args.attempt is None else f"{args.attempt:04d}/") or _list(run, "")
    numbers = sorted({name for key in sizes if _ATTEMPT.fullmatch(name := key.split("/")[2])})
    wanted = numbers[-1:] if args.attempt is None else [n for n in numbers if n == f"attempt-{args.attempt:04d}"]
    if not numbers:
        raise _no_logs(address, run)
    if not wanted:
        known = ", ".join(number.removeprefix("attempt-").lstrip("0") for number in numbers)
        raise JobError(f"{address}: expected logs of attempt {args.attempt}, found {known}")
    prefix = f"{run.job}/logs/{wanted[0]}/"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / wanted[0]
        folder.mkdir()
        for key, num_bytes in _choose(sizes, prefix, args.rank, wanted[0]):
            _bring(run, key, sizes[key], num_bytes, folder / key.removeprefix(prefix))
        lines = tail(folder, args.lines, rank=args.rank)
        _print(lines, as_json=args.json)
    if not lines and args.lines > 0:
        sys.stderr.write(f"{address}: no line of {wanted[0]} is there yet; the runner copies logs every ten minutes\n")
    return 0


def _list(run: StoredRun, attempt: str) -> dict[str, int]:
    """Sizes by key. A list is as long as whoever may write to a bucket likes."""
    listed = list(islice(run.store.list(f"{run.job}/logs/attempt-{attempt}"), _MAX_LISTED + 1))
    if len(listed) > _MAX_LISTED:
        note(
            f"left out: all logs that the store lists after the first {_MAX_LISTED} (--attempt K looks at one attempt)"
        )
    return {entry.key: entry.size_bytes for entry in listed}


def _choose(sizes: Mapping[str, int], prefix: str, rank: int | None, attempt: str) -> list[tuple[str, int]]:
    """Which files are fetched, and how much of the end of each. What is left out is told."""
    found = {key: stream for key in sizes if key.startswith(prefix) and (stream := stream_of(key.removeprefix(prefix)))}
    _expect_rank(rank, {one for one, _ in found.values()}, attempt)
    keys = [key for _, key in sorted((found[key], key) for key in found if rank in {None, found[key][0]})]
    if len(keys) > _MAX_FILES:
        more = sum(sizes[key] for key in keys[_MAX_FILES:])
        note(
            f"left out: {len(keys) - _MAX_FILES} of {len(keys)} logs ({size(more)}), from {one_line(keys[_MAX_FILES])} on (--rank names one)"
        )
    each = min(_TAIL_BYTES, _ALL_BYTES // max(1, min(len(keys), _MAX_FILES)))
    return [(key, each) for key in keys[:_MAX_FILES]]


def _bring(run: StoredRun, key: str, size_bytes: int, num_bytes: int, path: Path) -> None:
    """The end of one file. In a store names may stand beside one another that a disk cannot have so."""
    begin = max(size_bytes - num_bytes, 0)
    content = run.store.read(key, begin, min(size_bytes, num_bytes))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    except OSError as error:
        if error.errno not in _NO_NAME:
            raise
        note(f"passed over: {one_line(key)}: {error.strerror}")


def _no_logs(address: Address, run: StoredRun) -> StoreError:
    if not run.is_there():
        return no_run(address)
    return StoreError(
        f"{address}: expected logs of an attempt, found none", hint="vramfarm-runner status says what the run is doing"
    )


def _attempt(run_dir: Path, number: int | None) -> Path:
    folders = sorted((run_dir / "logs").glob("attempt-*"))
    if number is not None:
        folders = [folder for folder in folders if folder.name == f"attempt-{number:04d}"]
    if not folders:
        what = "no attempt" if number is None else f"no attempt {number}"
        raise JobError(f"{run_dir}: {what} has logs", hint="vramfarm-runner status says what the run is doing")
    return folders[-1]


def _follow(run_dir: Path, folder: Path, follower: Follower, args: argparse.Namespace) -> None:
    """New lines, of the attempts that follow too, until nobody runs this run any more."""
    while True:
        lives = is_alive(run_dir)
        _print(follower.read(), as_json=args.json)
        newest = _attempt(run_dir, args.attempt)
        if newest != folder:
            _print((*follower.read(), *follower.finish()), as_json=args.json)
            sys.stderr.write(f"== {newest.name} ==\n")
            folder, follower = newest, Follower(newest, rank=args.rank)
        elif not lives:
            _print(follower.finish(), as_json=args.json)
            return
        time.sleep(_LOOK_S)


def _expect_rank(rank: int | None, ranks: Collection[int], attempt: str) -> None:
    if rank is not None and ranks and rank not in ranks:
        known = ", ".join(map(str, sorted(ranks)[:_MAX_NAMED]))
        raise JobError(f"--rank {rank}: {attempt} has no such rank; it has {known} (-1 is the launcher)")


def _print(lines: Iterable[Line], *, as_json: bool) -> None:
    for line in lines:
        if as_json:
            out(json.dumps({"rank": line.rank, "stream": line.stream, "text": line.text}))
            continue
        who = "launcher" if line.rank < 0 else f"rank {line.rank}"
        out(f"{who}: {line.text}")
    with speaking():
        sys.stdout.flush()
