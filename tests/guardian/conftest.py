"""A farm for each module, and the guardian on it or on a machine of one's own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.farmhouse import Farmhouse, open_farm

GUARD = (sys.executable, "-I", str(Path(__file__).with_name("guard.py")))


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Farmhouse]:
    with open_farm(tmp_path_factory.mktemp("farm")) as house:
        yield house


@pytest.fixture
def rent(house: Farmhouse):
    """Rent a server whose container is the guardian; returns its id."""

    def rent(*lives: str, hold: str = "0", **wish) -> str:
        house.fail()
        return house.rent([*GUARD, *lives], env={"RUNNER_HOLD_S": hold} if hold else {}, **wish)

    return rent


@pytest.fixture
def at_home(tmp_path: Path):
    """Start the guardian on a machine that nobody rents out."""
    started: list[subprocess.Popen[str]] = []

    def start(*lives: str, **env: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*GUARD, *lives],
            env={**os.environ, "VRAMFARM_WORKSPACE": str(tmp_path), **env},
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate(timeout=10)
