"""
`attach`: look in on a run that goes on without you, and detach again.

It only reads: status.json, the logs and nvidia-smi. Nothing typed here reaches the run. curses
sends a terminal only what changed, which is what a slow line wants.
"""

from __future__ import annotations

import argparse
import curses
import locale
import os
import sys
import time
from collections import deque
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from runner.cli.runs import find_in_store, find_run, is_alive
from runner.cli.screen import BEGINS, View, screen
from runner.cli.status import read_status
from runner.errors import JobError
from runner.supervise import process
from runner.supervise.cards import Cards
from runner.supervise.logs import Follower, Line, tail

_LOOK_S: Final = 1.0
_CARDS_S: Final = 5.0
_KEY_MS: Final = 200
_LINES: Final = 2000  # of log that are kept to look at
_FIRST_LINES: Final = 50  # of each stream
_HINT: Final = "`vramfarm-runner status` and `vramfarm-runner logs -f` work without one"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", nargs="?", help="folder, name or job.yaml of the run")
    parser.add_argument("--rank", type=int, metavar="K", help="only this rank's log; -1: the launcher")


def run(args: argparse.Namespace) -> int:
    if find_in_store(args.run, os.environ):
        raise JobError(
            f"attach: expected a run on this machine, found none of {args.run}",
            hint=f"`vramfarm-runner status {args.run}` and `vramfarm-runner logs {args.run}` look into its store",
        )
    run_dir = find_run(args.run, os.environ)
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise JobError("attach: expected a terminal, found none (docker exec needs -it)", hint=_HINT)
    locale.setlocale(locale.LC_ALL, "")  # curses writes in the terminal's encoding
    try:
        curses.wrapper(lambda window: _Desk(run_dir, args.rank).stay(window))
    except curses.error as error:
        terminal = os.environ.get("TERM", "")
        raise JobError(f"attach: this terminal cannot be used (TERM={terminal}): {error}", hint=_HINT) from None
    except KeyboardInterrupt:  # as `q`: a person who leaves must not end anything
        pass
    return 0


class _Desk:
    """One visit."""

    def __init__(self, run_dir: Path, rank: int | None) -> None:
        self._run_dir = run_dir
        self._log = _Log(run_dir)
        self._cards = Cards()
        self._view = View(status={}, alive=True, now=datetime.now(UTC), rank=rank)
        self._looked_at = float("-inf")

    def stay(self, window: curses.window) -> None:
        """Until `q`. A run that ended stays on the screen, with its outcome."""
        with suppress(curses.error):  # some terminals cannot hide it
            curses.curs_set(0)
        window.timeout(_KEY_MS)
        while True:
            if time.monotonic() - self._looked_at >= _LOOK_S:
                self._look()
            _paint(window, self._view)
            if not self._press(window.getch()):
                return

    def _look(self) -> None:
        self._looked_at = time.monotonic()
        now = datetime.now(UTC)
        cards = self._cards.look(self._looked_at, every_s=_CARDS_S)
        process.reap()
        lines = self._view.lines if self._view.held else tuple(self._log.read())
        self._view = replace(self._view, now=now, cards=cards, lines=lines)
        with suppress(JobError):  # not written yet, or just being replaced: the last one stays
            status, _ = read_status(str(self._run_dir))
            self._view = replace(self._view, status=status, alive=is_alive(self._run_dir))

    def _press(self, key: int) -> bool:
        """Whether to stay."""
        character = chr(key) if 0 <= key < 128 else ""  # noqa: PLR2004  # what is beyond is a function key
        if character == "q":
            return False
        if character.isdigit():
            self._view = replace(self._view, rank=int(character))
        elif character == "l":
            self._view = replace(self._view, rank=-1)
        elif character == "a":
            self._view = replace(self._view, rank=None)
        elif character == " ":
            self._view = replace(self._view, held=not self._view.held)
        return True


class _Log:
    """The last lines of the newest attempt, and those of the ones that follow."""

    def __init__(self, run_dir: Path) -> None:
        self._logs = run_dir / "logs"
        self._folder: Path | None = None
        self._follower: Follower | None = None
        self._lines: deque[Line] = deque(maxlen=_LINES)

    def read(self) -> deque[Line]:
        newest = max(self._logs.glob("attempt-*"), default=None)
        if newest is not None and newest != self._folder:
            if self._follower is not None:  # the last words of the one before, which often say why it ended
                self._lines.extend((*self._follower.read(), *self._follower.finish()))
                self._lines.append(Line(-1, BEGINS, f"attempt {int(newest.name.rpartition('-')[2])}"))
            self._folder, self._follower = newest, Follower(newest)
            self._follower.skip()
            self._lines.extend(tail(newest, _FIRST_LINES))
        if self._follower is not None:
            self._lines.extend(self._follower.read())
        return self._lines


def _paint(window: curses.window, view: View) -> None:
    height, width = window.getmaxyx()
    window.erase()
    for row, line in enumerate(screen(view, width=width - 1, height=height)):
        with suppress(curses.error):  # the window shrank in between
            window.addstr(row, 0, line)
    window.refresh()
