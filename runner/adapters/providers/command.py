"""
Any program of the user's that stops the machine.

The rule of the stop: exit code 0 of `stop_command` means that the stop was asked for, anything else
that it was not. The rule of reading back: `status_command` exits 0 and its first line is one of
running, stopping, gone; anything else is unknown. Without a `status_command` nothing says that the
server is gone, and the stop is asked for again and again until it is.

The programs see the environment, and RUNNER_KEEP (a folder, or empty), RUNNER_EXIT_CODE and
RUNNER_STOP_ANYWAY. They must be safe to repeat.
"""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final

from runner.adapters.providers.contract import Answer, Keep, Send
from runner.facts import Server, ServerState

STOP: Final = "RUNNER_STOP_COMMAND"
STATUS: Final = "RUNNER_STATUS_COMMAND"
NAMES: Final = (STOP, STATUS)
_LIMIT_S: Final = 60.0
_STATES: Final = {state.value: state for state in (ServerState.RUNNING, ServerState.STOPPING, ServerState.GONE)}


def identify(env: Mapping[str, str]) -> Server | None:
    """This machine, if RUNNER_STOP_COMMAND says how to stop it: known even when job.yaml cannot be read."""
    if not env.get(STOP):
        return None
    return make_server(_words(env[STOP]), _words(env.get(STATUS, "")))


def make_server(stop_command: Sequence[str], status_command: Sequence[str]) -> Server:
    """This machine, by the name it gives itself."""
    return Server(
        provider="command",
        id=socket.gethostname(),
        currency="",
        stop_command=tuple(stop_command),
        status_command=tuple(status_command),
    )


def read(server: Server, env: Mapping[str, str], send: Send) -> Answer:
    """What `status_command` says."""
    del send
    if not server.status_command:
        return Answer(ServerState.UNKNOWN, "there is no status_command that would say whether the server is gone")
    code, said = _run(server.status_command, env)
    word = said.partition("\n")[0].strip().lower()
    if code == 0 and word in _STATES:
        return Answer(_STATES[word], word)
    return Answer(
        ServerState.UNKNOWN, f"status_command: expected exit 0 and {', '.join(_STATES)}, got {code}: {said[:200]}"
    )


def stop(server: Server, keep: Keep, code: int, env: Mapping[str, str], send: Send) -> Answer:
    """Run `stop_command`."""
    del send
    told = {
        "RUNNER_KEEP": keep.folder or "",
        "RUNNER_STOP_ANYWAY": "1" if keep.stop_anyway else "",
        "RUNNER_EXIT_CODE": str(code),
    }
    ended, said = _run(server.stop_command, {**env, **told})
    if ended == 0:
        return Answer(ServerState.STOPPING, "stop_command: exit 0")
    return Answer(ServerState.UNKNOWN, f"stop_command: expected exit 0, got {ended}: {said[:200]}")


def explain(keep: Keep, seen: Answer) -> str:
    """Only the user knows."""
    del seen
    return f"stop_command decides about disk and bill; RUNNER_KEEP is {keep.folder or 'empty: nothing is only here'}"


def _words(text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError:
        return (text,)


def _run(argv: Sequence[str], env: Mapping[str, str]) -> tuple[int | str, str]:
    """How it ended, and what it said. A program that hangs is killed, with all that it started."""
    try:
        process = subprocess.Popen(
            argv,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        return "no start", str(error)
    try:
        said, _ = process.communicate(timeout=_LIMIT_S)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return "no end", f"it ran longer than {_LIMIT_S:g} s and was killed"
    finally:
        if process.stdout:
            process.stdout.close()
    return process.returncode, said[-4096:].decode(errors="replace").strip()
