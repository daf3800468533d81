"""One image for all container tests; a container and a rented server for each."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.container.engine import PROJECT, Box, build, build_base, build_product, why_no_engine
from tests.farmhouse import Farmhouse, wait_until

# A server is a process for the simulator; the container stands beside it, with what that process was told.
TELL = """
import json, os, time
print(json.dumps({n: v for n, v in os.environ.items() if n.startswith("VRAMFARM_") and n != "VRAMFARM_WORKSPACE"}), flush=True)
time.sleep(3600)
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(1200))  # the first one builds the image


@pytest.fixture(scope="session")
def engine() -> None:
    """Skips, and says why, where there is no engine."""
    if reason := why_no_engine():
        pytest.skip(f"{reason}: scripts/docker-engine.sh up brings one up on Debian")


@pytest.fixture(scope="session")
def torch_base(engine: None) -> str:
    """A base image as public ones are: Python with torch."""
    return build_base()


@pytest.fixture(scope="session")
def image(torch_base: str) -> str:
    """The product on that base."""
    return build_product(torch_base)


@pytest.fixture
def box(image: str) -> Iterator[Callable[..., Box]]:
    """Makes containers; they and their volumes go with the test."""
    boxes: list[Box] = []

    def make(*options: str, image: str = image) -> Box:
        boxes.append(Box(image, *options))
        return boxes[-1]

    yield make
    for made in boxes:
        made.lose()


@dataclass
class Rental:
    """A server that is rented, seen from the provider's side."""

    farm: Farmhouse
    id: str
    env: dict[str, str]

    def state(self) -> dict[str, Any]:
        return self.farm.server(self.id)

    def fail(self, *faults: dict[str, Any]) -> None:
        """What the provider's API does to the next calls; nothing: it works again."""
        self.farm.fail(*faults)


@pytest.fixture(scope="session")
def farm(engine: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Farmhouse, Path]]:
    """The simulator in a container, on the host's network; and where it keeps its servers."""
    state = tmp_path_factory.mktemp("farm")
    image = build("-", dockerfile=(PROJECT / "tests/container/farm.Dockerfile").read_text())
    mounts = ("--volume", f"{PROJECT}:/src:ro", "--volume", f"{state}:/state")
    box = Box(image, *mounts, "--network", "host", "--env", "PYTHONDONTWRITEBYTECODE=1")
    box.run("python", "-m", "tests.container.farm")
    try:
        url, key = box.wait_for(r"(http://\S+) (vfa_\w+)").groups()
        yield Farmhouse(url, SimpleNamespace(account_key=key)), state  # type: ignore[arg-type]  # only the key is used
    finally:
        box.lose()


@pytest.fixture
def rental(farm: tuple[Farmhouse, Path]) -> Rental:
    """A rented server; its variables are for a container with the host's network."""
    house, state = farm
    server = house.rent(["python", "-c", TELL])
    log = state / "servers" / server / "container.log"
    wait_until(lambda: log.exists() and log.read_text().endswith("\n"))
    return Rental(house, server, json.loads(log.read_text()))


@dataclass
class Code:
    """A folder with job.yaml and what it starts, as it is mounted into a container."""

    folder: Path
    store: Path

    @property
    def mounts(self) -> tuple[str, ...]:
        return ("--volume", f"{self.folder}:/job:ro", "--volume", f"{self.store}:/store")

    def write(self, text: str) -> None:
        (self.folder / "job.yaml").write_text(text)


@pytest.fixture
def code(tmp_path: Path) -> Code:
    """The quickstart's script, a trainer without torch, and a folder for the store."""
    made = Code(tmp_path / "job", tmp_path / "store")
    made.folder.mkdir()
    made.store.mkdir()
    made.store.chmod(0o777)
    shutil.copytree(PROJECT / "configs/quickstart", made.folder / "quickstart")
    shutil.copy(PROJECT / "tests/fake_trainer.py", made.folder)
    return made


QUICKSTART = """
name: quick
command: quickstart/train.py --steps {steps} --pause {pause} --dim 32 --layers 1
workdir: /job
cpu_processes: 2
preflight: {{comm_test: false}}
env: {{OMP_NUM_THREADS: 1}}
checkpoint: {{save_interval: 2s, keep_last: 2}}
offload: {{to: "file:///store"}}
restart: {{initial_delay: 1s}}
limits: {{max_duration: 15m}}
finish: {{hold: 0s}}
"""


@pytest.fixture
def quickstart(code: Code) -> Callable[..., Code]:
    """The quickstart, shorter."""

    def write(steps: int = 40, pause: float = 0.0) -> Code:
        code.write(QUICKSTART.format(steps=steps, pause=pause))
        return code

    return write


FAKE = """
name: small
command: python fake_trainer.py --steps {steps} --step-time 0.05
launcher: command
workdir: /job
cpu_processes: 1
checkpoint: {{save_interval: 1s, keep_last: 2}}
restart: {{initial_delay: 1s}}
limits: {{max_duration: 15m}}
"""


@pytest.fixture
def small(code: Code) -> Callable[..., Code]:
    """A job whose trainer starts in milliseconds."""

    def write(steps: int = 40, more: str = "finish: {hold: 0s}\noffload: {to: 'file:///store'}\n") -> Code:
        code.write(FAKE.format(steps=steps) + more)
        return code

    return write
