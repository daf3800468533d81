"""What every test starts from: an environment that says nothing of this machine, and the command line."""

from __future__ import annotations

import json
import os
import shutil
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


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What stands between a process and its disk, for LD_PRELOAD: vramfarm/trouble.c says what it does."""
    if shutil.which("gcc") is None:
        pytest.skip("no gcc on this machine")
    built = tmp_path_factory.mktemp("shim") / "trouble.so"
    source = Path(__file__).parent / "vramfarm" / "trouble.c"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", built, source, "-ldl", "-lpthread"], check=True, timeout=60)
    return built


@pytest.fixture(scope="session")
def forks(_no_inherited_names: None) -> Iterator[subprocess.Popen[str]]:
    """One for all commands of this session: a third of a second of imports is spared with each."""
    argv = [sys.executable, str(Path(__file__).with_name("forks.py"))]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as forks:
        yield forks
        forks.stdin.close()


@pytest.fixture
def cli(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, forks: subprocess.Popen[str]):
    """Run `vramfarm-runner ARGUMENTS` as a process of its own, in `tmp_path`, which is its workspace."""

    def run(*arguments: str, stdin: str = "", **env: str) -> subprocess.CompletedProcess[str]:
        streams = tmp_path_factory.mktemp("streams")
        (streams / "stdin").write_text(stdin)
        wish = {
            "arguments": arguments,
            "cwd": str(tmp_path),
            "env": {**os.environ, "VRAMFARM_WORKSPACE": str(tmp_path), **env},
            **{name: str(streams / name) for name in ("stdin", "stdout", "stderr")},
        }
        print(json.dumps(wish), file=forks.stdin, flush=True)
        written, code = "", 0
        while written != wish["stdout"]:  # what a test that ran out of time has left is not ours
            written, code = json.loads(forks.stdout.readline())
        out, err = ((streams / name).read_text() for name in ("stdout", "stderr"))
        return subprocess.CompletedProcess(arguments, code, out, err)

    return run
