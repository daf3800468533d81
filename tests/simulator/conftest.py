"""A farm for each module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.farmhouse import Farmhouse, open_farm


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Farmhouse]:
    with open_farm(tmp_path_factory.mktemp("farm")) as house:
        yield house
