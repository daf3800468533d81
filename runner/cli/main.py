"""
The command line. The only place that catches `RunnerError`, and where exit codes are made.

A command is a module of this package with a line in `COMMANDS` and two functions: `configure`
adds its arguments, `run` does it and returns the exit code. Standard output is data, standard
error is the log.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import gc
import os
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Final, Protocol, cast

from runner import __version__
from runner.cli.bugreport import where, write_bug_report
from runner.cli.output import discard_stdout, open_what_is_closed, plain, speaking, write_whatever_comes
from runner.errors import JobError, RunnerError

INTERRUPTED: Final = 130  # 128 + SIGINT, as shells say it
BROKEN_PIPE: Final = 141  # 128 + SIGPIPE
USAGE: Final = JobError.exit_code

COMMANDS: Final[Mapping[str, str]] = {
    "run": "run the job and stop the server when it is over (what happens without a command)",
    "validate": "say what a job would do, and warn of mistakes; start nothing",
    "plan": "what a job needs: memory, batch, save interval, cost, machines that fit; what run would do now",
    "preflight": "check whether this machine is fit for a job: go, go with changes, or swap it",
    "rehearse": "try the whole night in ten minutes with this very job: start, save, copy, kill, restore, leave",
    "explain": "say what saved output of nvidia-smi topo -m, df, all_reduce_perf and others means",
    "status": "show how a run is doing",
    "attach": "watch a run: how far it is, which checkpoints are safe, its log; q detaches",
    "report": "the result of a run: machines, attempts, first errors, cost, goodput",
    "logs": "show the output of the ranks and the launcher",
    "events": "show what the runner did, one line each",
    "triage": "find the first real error in a log, and what to do about it",
    "stop": "save, end the job, stop the server",
    "checkpoints": "list, verify, restore or export checkpoints",
    "launch": "run a job in a container of this machine's Docker engine, with the flags it needs",
    "submit": "from a cron host: rent the cheapest machine that fits, and start the job on it",
    "sweep": "from a cron host: stop servers that submit rented and that are past their deadline",
    "simulate": "a local VRAMfarm: rent 'servers' on this machine",
}
_INSIDE: Final[Mapping[str, str]] = {
    "loop": "the runner itself; the guardian starts it",
    "understudy": "the run of a rehearsal, which ends with it",
}

_READ_THEIR_OWN: Final = frozenset({"simulate"})


class Command(Protocol):
    """What a command's module offers (PEP 544: a module satisfies a protocol)."""

    def configure(self, parser: argparse.ArgumentParser) -> None: ...
    def run(self, args: argparse.Namespace) -> int: ...


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code. Nothing escapes but `SystemExit` of argparse."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        open_what_is_closed()
        write_whatever_comes()
        code = _dispatch(arguments)
        with speaking():
            sys.stdout.flush()
    except RunnerError as error:
        return _complain(error)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        discard_stdout()
        return BROKEN_PIPE
    except Exception as error:  # noqa: BLE001  # the edge: whatever it is, the user gets a report
        return _report(error, arguments)
    return code


def _dispatch(arguments: list[str]) -> int:
    name = arguments[0] if arguments else ""
    if name in {"-h", "--help", "--version"}:
        _parser().parse_args(arguments)
    if not name or name.startswith("-"):
        name, arguments = "run", ["run", *arguments]
    if name not in COMMANDS and name not in _INSIDE:
        close = difflib.get_close_matches(name, COMMANDS, n=1)
        meant = f"did you mean {close[0]}?" if close else f"expected one of {', '.join(COMMANDS)}"
        _parser().error(f"{name}: no such command; {meant}")
    command = _load(name)
    if name in _READ_THEIR_OWN:
        return command.run(argparse.Namespace(rest=arguments[1:]))
    parser = argparse.ArgumentParser(
        prog=f"vramfarm-runner {name}", description=COMMANDS.get(name) or _INSIDE[name], allow_abbrev=False
    )
    command.configure(parser)
    return command.run(parser.parse_args(arguments[1:]))


def _load(name: str) -> Command:
    """What a command imports stays to its end. To look through it for garbage, meanwhile and ever after, takes a tenth of its start."""
    gc.disable()
    try:
        return cast("Command", import_module(f"runner.cli.{name}"))
    finally:
        gc.freeze()
        gc.enable()


def _parser() -> argparse.ArgumentParser:
    width = max(shutil.get_terminal_size().columns - 2, 40)
    listing = "\n".join(
        textwrap.fill(summary, width, initial_indent=f"  {name:<12} ", subsequent_indent=" " * 15)
        for name, summary in COMMANDS.items()
    )
    parser = argparse.ArgumentParser(
        prog="vramfarm-runner",
        usage="vramfarm-runner [COMMAND] [--config job.yaml] …",
        description="Run one training job on a rented multi-GPU server.",
        epilog=f"commands:\n{listing}\n\nvramfarm-runner COMMAND --help says more; exit codes: docs/exit-codes.md",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"vramfarm-runner {__version__}")
    return parser


def _complain(error: RunnerError) -> int:
    for line in str(error).splitlines():
        _say(f"error: {line}")
    for line in error.hint.splitlines():
        _say(f"hint: {line}")
    return error.exit_code


def _report(error: Exception, arguments: list[str]) -> int:
    if isinstance(error, FileNotFoundError) and _is_nowhere():
        return _complain(JobError("the current folder: it was removed", hint="cd to another one"))
    path = write_bug_report(error, arguments, os.environ)
    _say(f"error: unexpected: {type(error).__name__}: {str(error)[:200]} ({where(error)})")
    _say(f"hint: this is a fault of the runner; the report is {path}" if path else "hint: no report could be written")
    return RunnerError.exit_code


def _say(line: str) -> None:
    with contextlib.suppress(OSError):  # nobody listens; the exit code still tells
        print(plain(line), file=sys.stderr, flush=True)  # noqa: T201  # the log of a command


def _is_nowhere() -> bool:
    try:
        Path.cwd()
    except FileNotFoundError:
        return True
    return False
