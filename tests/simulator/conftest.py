"""A farm for each module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.container.engine import build, why_no_engine
from tests.farmhouse import Farmhouse, open_farm

PYTHON_ALONE = "FROM python:3.11-slim-bookworm\nWORKDIR /workspace\n"


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Farmhouse]:
    with open_farm(tmp_path_factory.mktemp("farm")) as house:
        yield house


@pytest.fixture(scope="session")
def image() -> str:
    """Python and nothing else. Skips, and says why, where there is no engine."""
    if reason := why_no_engine():
        pytest.skip(f"{reason}: scripts/docker-engine.sh up brings one up on Debian")
    return build("-", dockerfile=PYTHON_ALONE)


@pytest.fixture(scope="module", params=["process", "docker"])
def any_house(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Farmhouse]:
    """Its servers are processes, or containers: what is promised of them is the same."""
    image = request.getfixturevalue("image") if request.param == "docker" else ""
    with open_farm(tmp_path_factory.mktemp(f"farm-{request.param}"), image=image) as house:
        yield house
