"""The keeper of the lease, a real process each, on every store."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from runner.job import OffloadPolicy
from runner.keeper import LEASE, parse_claim
from runner.storage.offsite import open_store
from tests.s3server import BUCKET

KEEPER = """
import json, os, sys
from pathlib import Path
from runner.job import OffloadPolicy
from runner.keeper import keep_lease
from runner.policy.lease import Pace
from runner.storage.offsite import open_store

to, endpoint, name, status = sys.argv[1:]
say = lambda line: print(json.dumps(line), flush=True)
store = open_store(OffloadPolicy(to=to, endpoint=endpoint or None), os.environ)
pace = Pace(renew_s=0.3, valid_s=4.0, watch_s=6.0, look_s=0.2, again_s=0.2)
say({"result": keep_lease(store, "job", runner=os.getppid(), holder=name, who=name, status=Path(status), tell=say, pace=pace)})
"""


class Keeper:
    def __init__(self, where, tmp_path, name, status="none", code=KEEPER):
        to, endpoint, env = where
        self.out = tmp_path / f"{name}.jsonl"
        argv = [sys.executable, "-c", code, to, endpoint, name, str(tmp_path / status)]
        with self.out.open("wb") as out:
            self.process = subprocess.Popen(argv, stdout=out, env={**os.environ, **env}, cwd=Path(__file__).parents[2])

    def lines(self):
        return [json.loads(line) for line in self.out.read_text().splitlines()]

    def told(self):
        told = [line["told"] for line in self.lines() if "told" in line]
        return told[-1] if told else {"state": "unknown"}

    def result(self):
        self.process.wait(40)
        return self.lines()[-1]["result"]

    def until(self, state):
        deadline = time.monotonic() + 40
        while self.told()["state"] != state:
            assert self.process.poll() is None, self.lines()
            assert time.monotonic() < deadline, self.lines()
            time.sleep(0.05)
        return self


@pytest.fixture(params=["file", "s3"])
def where(request, tmp_path):
    """(offload.to, endpoint, environment) of a store."""
    if request.param == "file":
        return f"file://{tmp_path}/store", "", {}
    server = request.getfixturevalue("s3server")
    return f"s3://{BUCKET}/{os.urandom(8).hex()}", server.endpoint, server.env


@pytest.fixture
def keeper(where, tmp_path):
    """Starts keepers; ends those that are left."""
    begun = []

    def start(name, **more):
        begun.append(Keeper(where, tmp_path, name, **more))
        return begun[-1]

    yield start
    for one in begun:
        one.process.kill()
        one.process.wait()


def open_at(where):
    to, endpoint, env = where
    return open_store(OffloadPolicy(to=to, endpoint=endpoint or None), env)


def test_the_second_one_sees_the_first_ones_renewal(keeper):
    """
    It is told who has the run, and the first one never notices.
    """
    first = keeper("first").until("held")

    lost = keeper("second").result()

    assert ("taken", "first", 1) == (lost["state"], lost["who"], lost["fence"])
    assert lost["until"]
    assert "held" == first.told()["state"]


def test_after_a_release_nobody_waits(keeper):
    """
    A clean end hands the run on at once.
    """
    first = keeper("first").until("held")
    first.process.send_signal(signal.SIGUSR1)
    assert "unknown" == first.result()["state"]

    second = keeper("second").until("held").told()
    assert (2, "given_back") == (second["fence"], second["vacancy"])
    assert not [line for line in keeper("third").until("watching").lines() if line.get("result")]


def test_a_suspended_holder_loses_the_run_and_knows_it(keeper):
    """
    Silent for longer than the watch, it is replaced; awake again, its renewal is refused.
    """
    first = keeper("first").until("held")
    first.process.send_signal(signal.SIGSTOP)

    second = keeper("second").until("watching").until("held")
    first.process.send_signal(signal.SIGCONT)

    assert ("taken", "second") == (first.result()["state"], first.result()["who"])
    assert 2 == second.told()["fence"]


def test_the_status_of_the_run_goes_along(keeper, where, tmp_path):
    """
    What `status s3://…` reads is there as soon as something happened, and only from who holds the run.
    """
    (tmp_path / "status.json").write_text(json.dumps({"phase": "RUNNING", "attempt": 1}))
    keeper("first", status="status.json").until("held")

    deadline = time.monotonic() + 30
    while (found := open_at(where).get("job/status.json")) is None:
        assert time.monotonic() < deadline
        time.sleep(0.1)

    assert {"phase": "RUNNING", "attempt": 1} == json.loads(found)
    assert "first" == parse_claim(open_at(where).get(f"job/{LEASE}")).who


def test_a_store_that_hangs_for_a_while_costs_nobody_the_run(s3server, tmp_path):
    """
    Writes that arrived and were answered to nobody are found to be our own, and the lease is renewed again.
    """
    to = f"s3://{BUCKET}/{os.urandom(8).hex()}"
    code = KEEPER.replace("os.environ)", "os.environ, timeouts_s=(0.5, 0.5))").replace("valid_s=4.0", "valid_s=40.0")
    one = Keeper((to, s3server.endpoint, s3server.env), tmp_path, "one", code=code).until("held")
    try:
        os.kill(s3server._process.pid, signal.SIGSTOP)
        time.sleep(2.5)  # less than the lease is valid, more than an answer may take
    finally:
        os.kill(s3server._process.pid, signal.SIGCONT)
    before = len(one.lines())

    deadline = time.monotonic() + 40
    while not any("told" in line for line in one.lines()[before:]):
        assert one.process.poll() is None, one.lines()
        assert time.monotonic() < deadline, one.lines()
        time.sleep(0.1)

    one.process.send_signal(signal.SIGUSR1)
    assert ("unknown", "held", 1) == (one.result()["state"], one.told()["state"], one.told()["fence"])


@pytest.mark.parametrize("raw", [b"", b"[]", b"{}", b'{"holder": 1, "life": "", "fence": 1}', b"[" * 100_000])
def test_garbage_is_nobodys_claim(raw):
    """
    Nothing in a store is trusted.
    """
    assert None is parse_claim(raw)


def test_a_keeper_whose_runner_is_gone_ends(keeper, where, tmp_path):
    """
    Even if it was gone before the keeper began: it never keeps a run for nobody.
    """
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    code = KEEPER.replace("os.getppid()", str(gone.pid))
    to, endpoint, env = where

    argv = [sys.executable, "-c", code, to, endpoint, "orphan", str(tmp_path / "none")]
    done = subprocess.run(
        argv, env={**os.environ, **env}, capture_output=True, timeout=60, check=False, cwd=Path(__file__).parents[2]
    )

    assert {"result": {"state": "unknown"}} == json.loads(done.stdout.splitlines()[-1])
