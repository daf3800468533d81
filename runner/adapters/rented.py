"""The rented server that a job runs on: which it is, for the run, its preflight and its tasks, and whether its provider listens."""

from __future__ import annotations

import socket
import sys
from collections.abc import Mapping
from dataclasses import replace

from runner.adapters.providers import PROVIDERS, Answer, find_server, keyrings, with_each
from runner.adapters.providers.command import make_server
from runner.adapters.providers.http import make_send
from runner.errors import JobError
from runner.facts import Server, ServerState
from runner.job import Job, ProviderName


def rented(job: Job, env: Mapping[str, str]) -> Server | None:
    """The server that is stopped in the end, by `provider.kind`; None: there is none to stop."""
    policy = job.provider
    if policy.kind is ProviderName.NONE:
        return None
    if policy.kind is ProviderName.COMMAND:
        return make_server(policy.stop_command, policy.status_command)
    found = find_server(env, policy.kind)
    if found is None and policy.kind is ProviderName.DOCKER:
        return Server(provider="docker", id=socket.gethostname(), currency="")  # the engine's name for this container
    if found is None and policy.kind is not ProviderName.AUTO:
        raise JobError(
            f"provider.kind: {policy.kind}: nothing in the environment, nor in that of PID 1, names a server of theirs",
            hint="set its id and key by hand (docs/providers.md has the names), or say provider: {kind: auto}",
        )
    return found


def prove(server: Server | None, env: Mapping[str, str]) -> tuple[Server | None, str]:
    """
    Read the server's state once: is the key good, what does an hour cost, when does the rental end?
    Also why its stop is in doubt, if it is.

    That is said, and no reason to end: the server is billed either way, and may as well train.
    """
    if server is None:
        return None, ""
    answer = ask(server, env)
    return as_told(server, answer), doubt(server, answer)


def ask(server: Server, env: Mapping[str, str]) -> Answer:
    """The server's state, by the first key that is not refused."""
    provider, send = PROVIDERS[server.provider], make_send()
    return with_each(keyrings(env), lambda ring: provider.read(server, ring, send))


def as_told(server: Server, answer: Answer) -> Server:
    """With what only the provider knows."""
    return replace(
        server,
        price_per_hour=server.price_per_hour or answer.price_per_hour,
        rental_ends_at=server.rental_ends_at or answer.ends_at,
        keeping=server.keeping or answer.keeping,
    )


def doubt(server: Server, answer: Answer) -> str:
    """Why its stop may fail; empty if nothing speaks for that. Said on standard error."""
    if server.provider == "command" and not server.status_command:
        return ""  # it cannot be known
    if answer.state in {ServerState.RUNNING, ServerState.STOPPING}:
        _say(f"{server.provider} knows this server and takes our key: {server.id} is {answer.detail}")
        return ""
    found = f"{server.provider} did not tell the state of {server.id}: {answer.detail}"
    _say(f"warning: {found}; the stop may fail in the same way: mend it while the job runs, or stop it by hand")
    return found


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)  # noqa: T201  # the log begins when the run folder is there
