"""Which rented server a job runs on: one answer for the run, its preflight and its tasks."""

from __future__ import annotations

import socket
from collections.abc import Mapping

from runner.adapters.providers import find_server
from runner.adapters.providers.command import make_server
from runner.errors import JobError
from runner.facts import Server
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
