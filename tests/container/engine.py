"""Docker as a renter types it: builds, and one container with its volume."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import docker as sdk

PROJECT = Path(__file__).parents[2]
PATIENCE_S = 300.0  # a start of torch on a machine that does much else takes a minute
_numbers = itertools.count()


def docker(*arguments: str, stdin: str | None = None, timeout_s: float = 60.0, check: bool = True) -> str:
    """The command's standard output."""
    done = subprocess.run(
        ["docker", *arguments], input=stdin, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    if check and done.returncode != 0:
        raise AssertionError(f"docker {' '.join(arguments)}: exit {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done.stdout


@contextmanager
def engine() -> Iterator[sdk.DockerClient]:
    """The engine through its SDK, for what it knows as data; commands are run as a renter types them."""
    client = sdk.from_env(version="auto", timeout=60)
    try:
        yield client
    finally:
        client.close()


def why_no_engine() -> str:
    """Empty if an engine answers that can run Linux containers of this machine."""
    try:
        system = docker("version", "--format", "{{.Server.Os}}", timeout_s=20.0)
    except FileNotFoundError:
        return "no docker here"
    except (AssertionError, subprocess.TimeoutExpired) as error:
        return f"no Docker engine answers: {str(error).strip().splitlines()[-1]}"
    return "" if system.strip() == "linux" else f"the engine runs {system.strip()} containers"


def build(*arguments: str, dockerfile: str | None = None) -> str:
    """Build an image and return its name, which is different for every content."""
    wheelhouse = os.environ.get("WHEELHOUSE_IMAGE", "")
    offline = ("--network", "none", "--build-arg", f"WHEELHOUSE_IMAGE={wheelhouse}") if wheelhouse else ()
    with _one_at_a_time():
        digest = docker("build", "--quiet", *offline, *arguments, stdin=dockerfile, timeout_s=900.0).strip()
    name = f"runner-test:{digest.removeprefix('sha256:')[:12]}"
    docker("tag", digest, name)
    return name


def build_base() -> str:
    """A base image as public ones are: Python with torch."""
    return build("-", dockerfile=(PROJECT / "tests/container/torch.Dockerfile").read_text())


def build_product(base: str) -> str:
    """Our image on that base."""
    return build("--build-arg", f"BASE_IMAGE={base}", str(PROJECT))


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Test processes share the builder's cache: the first builds, the others find it built."""
    with Path(tempfile.gettempdir(), "runner-test-build.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


class Box:
    """A container and its volume, of one image. What is started again keeps the volume, until it is lost."""

    def __init__(self, image: str, *options: str) -> None:
        self.name = f"runner-test-{os.getpid()}-{next(_numbers)}"
        self.image = image
        self.options = ("--volume", f"{self.name}:/workspace", *options)

    def run(self, *arguments: str, options: tuple[str, ...] = (), env: Mapping[str, str] | None = None) -> None:
        """`docker run`, in the background."""
        variables = [word for name, value in (env or {}).items() for word in ("--env", f"{name}={value}")]
        docker("run", "--detach", "--name", self.name, *self.options, *options, *variables, self.image, *arguments)

    def start(self) -> None:
        docker("start", self.name)

    def kill(self) -> None:
        docker("kill", "--signal", "KILL", self.name)

    def stop(self) -> None:
        """`docker stop`: SIGTERM, and SIGKILL when the container's own grace is over."""
        docker("stop", self.name, timeout_s=PATIENCE_S)

    def exec(self, *arguments: str, check: bool = True) -> str:
        return docker("exec", self.name, *arguments, check=check)

    def log(self) -> str:
        """Of all lives of this container."""
        done = subprocess.run(
            ["docker", "logs", self.name],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
            check=True,
        )
        return done.stdout

    def state(self) -> dict[str, Any]:
        return dict(json.loads(docker("inspect", "--format", "{{json .State}}", self.name)))

    def wait_for(self, pattern: str, seconds: float = PATIENCE_S) -> re.Match[str]:
        """The first match in the log, when it comes."""
        ends = time.monotonic() + seconds
        while (match := re.search(pattern, self.log())) is None:
            assert time.monotonic() < ends, f"no {pattern!r} within {seconds:g} s\n{self.log()}"
            time.sleep(0.3)
        return match

    def wait(self, seconds: float = PATIENCE_S) -> int:
        """The exit code, when it has ended."""
        try:
            return int(docker("wait", self.name, timeout_s=seconds))
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it did not end within {seconds:g} s\n{self.log()}") from None

    def files(self, pattern: str) -> list[str]:
        """What lies in the volume under names like this, whether the container runs or not."""
        script = f"cd /workspace && find . -path '{pattern}' | sort"
        volume = ("--volume", f"{self.name}:/workspace")
        return docker("run", "--rm", *volume, "--entrypoint", "sh", self.image, "-c", script).split()

    def remove(self) -> None:
        """The container only."""
        docker("rm", "--force", self.name)

    def lose(self) -> None:
        """Container and volume: the machine is gone."""
        docker("rm", "--force", self.name, check=False)
        docker("volume", "rm", "--force", self.name, check=False)
