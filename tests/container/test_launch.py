"""`launch` on a real engine: the flags, the log, the end, and the engine that stops what it started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.container.engine import PATIENCE_S, docker, engine
from tests.farmhouse import wait_until


class Launched:
    """The command as a person types it, and its container."""

    def __init__(self, image: str, config: Path, name: str) -> None:
        self.image, self.config, self.name = image, config, name

    def run(self, *options: str, **env: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-I", "-m", "runner", "launch", "--config", str(self.config), "--image", self.image]
        return subprocess.run(
            [*argv, "--name", self.name, *options],
            env={**os.environ, **env},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )

    def inspect(self) -> dict:
        return json.loads(docker("inspect", self.name))[0]

    def log(self) -> str:
        return subprocess.run(
            ["docker", "logs", self.name], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True
        ).stdout


@pytest.fixture
def launched(image: str, code, small) -> Iterator[Launched]:
    small(more="finish: {hold: 0s}\n")
    made = Launched(image, code.folder / "job.yaml", f"runner-test-launch-{os.getpid()}")
    yield made
    docker("rm", "--force", made.name, check=False)
    docker("volume", "rm", "--force", made.name, check=False)


def test_a_job_runs_in_a_container_with_the_flags_that_it_needs(launched):
    """
    Attached, the log and the exit code are the container's; its volume outlives it, and a second launch goes on there.
    """
    first = launched.run("--attach")

    found = launched.inspect()
    host = found["HostConfig"]
    limits = {limit["Name"]: limit["Soft"] for limit in host["Ulimits"] or ()}
    assert (0, f"{launched.name}\n") == (first.returncode, first.stdout), first.stderr
    assert "conclude succeeded" in first.stderr
    assert ("host", 16 << 30, 120) == (host["NetworkMode"], host["ShmSize"], found["Config"]["StopTimeout"])
    asked = {"memlock": -1, "stack": 64 << 20, "nofile": 1 << 20}
    assert limits == ({} if "may not raise limits" in first.stderr else asked)
    assert not host["DeviceRequests"]
    again = launched.run("--attach")
    assert (0, True) == (again.returncode, "this job is over already" in again.stderr), again.stderr


def test_one_that_runs_is_not_started_twice(launched, small):
    """
    Exit code 5, and how to look in.
    """
    small(steps=100_000, more="")
    assert 0 == launched.run("--json").returncode

    second = launched.run()

    assert 5 == second.returncode
    assert f"docker logs --follow {launched.name}" in second.stderr


def test_the_engine_stops_the_container_that_a_job_names_as_its_server(launched):
    """
    Through its socket, and for good: a restart policy does not bring it back. The exit code is the job's.
    """
    text = launched.config.read_text()
    launched.config.write_text(f"{text}provider: {{kind: docker}}\n")
    assert 0 == launched.run().returncode
    with engine() as client:
        client.containers.get(launched.name).update(restart_policy={"Name": "always"})

    wait_until(lambda: not launched.inspect()["State"]["Running"], PATIENCE_S)

    state = launched.inspect()["State"]
    assert ("exited", 0) == (state["Status"], state["ExitCode"]), launched.log()
    assert f"asking docker to stop {launched.name}" in launched.log()
    assert 0 == launched.inspect()["RestartCount"]


def test_values_of_secrets_are_not_in_what_is_printed(launched):
    """
    The line that --dry-run prints takes them from the environment, as docker run does; without one it says so.
    """
    text = launched.config.read_text()
    launched.config.write_text(f"{text}secrets: [HF_TOKEN]\n")

    printed = launched.run("--dry-run", HF_TOKEN="very-secret")
    missing = launched.run("--dry-run", HF_TOKEN="")

    assert (0, 2) == (printed.returncode, missing.returncode)
    assert "--env HF_TOKEN " in printed.stdout
    assert "--ulimit memlock=-1 --ulimit stack=67108864" in printed.stdout
    assert "very-secret" not in printed.stdout + printed.stderr
    assert "HF_TOKEN" in missing.stderr
