"""What every test starts from: an environment that says nothing of this machine, and the command line."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("slow machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("slow machine")  # a property does not fail because its machine is busy

_OURS = ("VRAMFARM_", "RUNNER_", "RUNPOD_", "VAST_", "AWS_")


@pytest.fixture(autouse=True, scope="session")
def _no_inherited_names() -> Iterator[None]:
    """A developer who is logged in to a store, or sits on a rented server, gets the same results."""
    kept = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith(_OURS)}
    yield
    os.environ.update(kept)


@pytest.fixture
def cli(tmp_path: Path):
    """Run `vramfarm-runner ARGUMENTS` as a process of its own, in `tmp_path`, which is its workspace."""

    def run(*arguments: str, stdin: str = "", **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "runner", *arguments],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=120,
            cwd=tmp_path,
            check=False,
            env={**os.environ, "VRAMFARM_WORKSPACE": str(tmp_path), **env},
        )

    return run
