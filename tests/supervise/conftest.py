import os
import signal
import sys
import time
import uuid

import pytest

from runner.supervise import process
from vramfarm.protocol import Env


def until(claim, timeout_s=10.0):
    """Wait until the claim is true; return what it returned."""
    deadline = time.monotonic() + timeout_s
    while not (answer := claim()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)
    return answer


@pytest.fixture
def marker():
    """An attempt id that nobody else has; whatever carries it is gone after the test."""
    value = uuid.uuid4().hex
    yield value
    for name in (Env.ATTEMPT_ID, Env.RUN):
        assert () == process.end_all(lambda name=name: process.find(name, value), timeout_s=10)
    process.reap()


@pytest.fixture
def run_python(marker, tmp_path):
    """Start Python code in a process that carries the marker."""

    def run(code, **env):
        argv = (sys.executable, "-I", "-c", code)
        return process.spawn(argv, env={**os.environ, Env.ATTEMPT_ID: marker, **env}, cwd=tmp_path)

    return run


@pytest.fixture(autouse=True)
def default_signals():
    """Background shells start pytest with SIGINT ignored, which children would inherit."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
