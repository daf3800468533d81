"""`submit` and `sweep` as a cron host calls them: what is refused before money is spent, and what is stopped after it."""

from __future__ import annotations

import fcntl
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from runner.facts import Machine
from runner.policy.ledger import dump
from runner.supervise.archive import pack
from tests.farmhouse import Farmhouse, open_farm

RUNNER = (sys.executable, "-I", "-m", "runner")
JOB = "name: night\ncommand: train.py\ncpu_processes: 1\n"


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Farmhouse]:
    with open_farm(tmp_path_factory.mktemp("farm"), entrypoint=("sleep", "600"), balance=10) as house:
        yield house


@pytest.fixture
def run(house: Farmhouse, tmp_path: Path):
    env = {**os.environ, "VRAMFARM_API_URL": house.url, "VRAMFARM_API_KEY": house.farm.account_key}
    env["VRAMFARM_SUBMIT_STATE"] = str(tmp_path / "state")

    def run(*command: str, job: str = JOB, **more: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "job.yaml").write_text(job)
        config = ("--config", str(tmp_path / "job.yaml"), "--look-every", "0.2") if command[0] == "submit" else ()
        return subprocess.run(
            (*RUNNER, *command, *config), env={**env, **more}, capture_output=True, text=True, timeout=120, check=False
        )

    return run


@pytest.fixture
def secret() -> Iterator[str]:
    """The name of a secret that is there as a file, as Docker and Kubernetes mount them."""
    path = Path("/run/secrets", f"TEST_{os.getpid()}")
    try:
        path.parent.mkdir(exist_ok=True)
        path.write_text("from-a-file\n")
    except OSError as error:
        pytest.skip(f"no secret can be put there: {error}")
    yield path.name
    path.unlink()


def test_a_secret_that_is_a_file_is_found(run, secret):
    """
    As `run` reads it on the machine: what is in the way then is the price.
    """
    done = run(
        "submit", job=f"{JOB}offload: {{to: 'file:///tmp/none'}}\nsecrets: [{secret}]\nprovider: {{max_price: 0.10}}\n"
    )

    assert 3 == done.returncode, done.stderr
    assert "more than 0.1" in done.stderr


@pytest.mark.parametrize(
    ("more", "env", "code", "expected"),
    [
        ("", {}, 2, "offload.to: expected a store, found none"),
        ("offload: {to: 'file:///tmp/none'}\n", {"VRAMFARM_API_KEY": ""}, 2, "expected the account's key in VRAMFARM_API_KEY"),
        ("offload: {to: 'file:///tmp/none'}\nsecrets: [HF_TOKEN]\n", {}, 2, "secrets: no value for HF_TOKEN"),
        ("checkpoint: {resume: /old}\n", {}, 2, "checkpoint.resume: expected an address that a rented machine can reach"),
        ("provider: {kind: runpod}\n", {}, 2, "provider.kind: submit rents at vramfarm only, got runpod"),
        ("offload: {to: 'file:///tmp/none'}\nprovider: {max_price: 0.10}\n", {}, 3, "more than 0.1"),
        ("offload: {to: 'file:///tmp/none'}\nsource: {path: .}\n", {}, 2, "command: expected a file 'train.py' in"),
        ("offload: {to: 'file:///tmp/none'}\ncards: 8\n", {}, 3, "the account has 10"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_said_before_a_machine_is_rented(run, house, more, env, code, expected):  # noqa: PLR0917
    """
    One line, the right exit code, no bill.
    """
    before = len(house.farm.servers())

    done = run("submit", job=JOB + more, **env)

    assert (code, before) == (done.returncode, len(house.farm.servers())), done.stderr
    assert expected in done.stderr


def test_servers_that_never_trained_count_over_cron_lines(run, house: Farmhouse, tmp_path: Path):
    """
    After max_machines of them in one night the next line rents nothing, and says why.
    """
    now = datetime.now(UTC).isoformat()
    record = {f"srv_{n}": {"machine": f"m{n}", "rented_at": now, "refused": "no word"} for n in range(3)}
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "night.json").write_text(json.dumps(record))
    before = len(house.farm.servers())

    done = run("submit", job=f"{JOB}offload: {{to: 'file://{tmp_path}/store'}}\n")

    assert (3, before) == (done.returncode, len(house.farm.servers())), done.stderr
    assert "3 servers were rented and none trains (provider.max_machines): no word" in done.stderr
    assert "--go-on" in done.stderr


def test_a_limit_that_leaves_a_machine_no_time_rents_none(run, house: Farmhouse, tmp_path: Path):
    """
    It would end before it could even tell the store that the run is over.
    """
    before = len(house.farm.servers())

    done = run("submit", job=f"{JOB}offload: {{to: 'file://{tmp_path}/store'}}\nlimits: {{max_duration: 60s}}\n")

    assert (2, before) == (done.returncode, len(house.farm.servers())), done.stderr
    assert "nothing is rented: limits.max_duration leaves 1m, and a rented machine takes 3m" in done.stderr


@pytest.mark.parametrize(
    ("told", "code", "expected"),
    [
        pytest.param({"outcome": "limit", "reason": "as told"}, 7, "as told", id="its last status says how it ended"),
        pytest.param({"deadline_why": "limits.until"}, 7, "limits.until was reached", id="its deadline came"),
        pytest.param({"server": "srv_before"}, 3, "more than 0.1", id="another machine's status"),
        pytest.param(
            {"outcome": "succeeded", "updated_at": -10},
            3,
            "more than 0.1",
            id="it vanished before, and its bytes may be lost",
        ),
    ],
)
def test_an_end_that_its_machine_could_not_publish_is_one(run, tmp_path: Path, told, code, expected):
    """
    Where it is none the next machine is looked for, and here the price is in its way.
    """
    now = datetime.now(UTC)
    begun, deadline = now - timedelta(hours=1), now - timedelta(minutes=5)
    minutes = told.get("updated_at", -1)
    status = {"server": "srv_1", "attempt": 1, "deadline_at": deadline.isoformat(), **told}
    status["updated_at"] = (deadline + timedelta(minutes=minutes)).isoformat()
    seen = begun + timedelta(minutes=10)
    machine = Machine(
        id="vramfarm:srv_1", provider="vramfarm", server="srv_1", opened_at=begun, paid_from=begun, seen_at=seen
    )
    (tmp_path / "store" / "night").mkdir(parents=True)
    (tmp_path / "store" / "night" / "status.json").write_text(json.dumps(status))
    (tmp_path / "store" / "night" / "ledger.json").write_text(json.dumps(dump((machine,))))

    limits = "limits: {max_duration: 55m}\nprovider: {max_price: 0.10}\n"
    done = run("submit", job=f"{JOB}offload: {{to: 'file://{tmp_path}/store'}}\n{limits}")

    assert code == done.returncode, done.stderr
    assert expected in done.stdout + done.stderr


def test_a_person_who_leaves_is_told_what_stays_rented(house: Farmhouse, tmp_path: Path):
    """
    Ctrl-C ends the looking only.
    """
    (tmp_path / "job.yaml").write_text(f"{JOB}offload: {{to: 'file://{tmp_path}/store'}}\n")
    env = {**os.environ, "VRAMFARM_API_URL": house.url, "VRAMFARM_API_KEY": house.farm.account_key}
    env["VRAMFARM_SUBMIT_STATE"] = str(tmp_path / "state")
    argv = (*RUNNER, "submit", "--config", str(tmp_path / "job.yaml"), "--look-every", "0.2")
    with subprocess.Popen(argv, env=env, stderr=subprocess.PIPE, text=True) as submit:
        said = next(line for line in submit.stderr if "waiting for its verdict" in line)

        submit.send_signal(signal.SIGINT)

        rest = submit.stderr.read()
    server = said.split()[1].rstrip(":")
    house.stop(server)
    assert (130, True) == (submit.returncode, f"{server}: rented, and not stopped by this Ctrl-C" in rest), rest


def test_a_cron_line_that_comes_again_finds_the_first_at_work(run, tmp_path: Path):
    """
    Code 5, and nothing is rented.
    """
    (tmp_path / "state").mkdir()
    with (tmp_path / "state" / "night.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)

        done = run("submit", job=f"{JOB}offload: {{to: 'file://{tmp_path}/store'}}\n")

    assert 5 == done.returncode
    assert "another submit of this run is at work" in done.stderr


def test_sweep_stops_what_is_past_its_deadline_and_nothing_else(run, house: Farmhouse, tmp_path: Path):
    """
    Its folder is kept; the next sweep finds nothing to do.
    """
    late, early = (house.rent(["sleep", "600"]) for _ in range(2))
    now = datetime.now(UTC)
    record = {
        late: {"machine": "m", "deadline_at": (now - timedelta(minutes=1)).isoformat()},
        early: {"machine": "m", "deadline_at": (now + timedelta(hours=1)).isoformat()},
    }
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "night.json").write_text(json.dumps(record))

    first = run("sweep", "--json")
    stopped = house.wait_stopped(late, 40)
    again = run("sweep")

    assert (0, [late]) == (first.returncode, [line["server"] for line in json.loads(first.stdout)]), first.stderr
    assert "complete" == stopped["save"]["state"]
    assert house.server(early)["state"] != "stopped"
    assert "no server of ours is past its deadline" in again.stdout
    house.stop(early)


def test_a_packed_folder_has_the_name_of_its_content(tmp_path: Path):
    """
    The same code is sent once, whoever packs it and when; what git ignores stays here.
    """
    code = tmp_path / "code"
    code.mkdir()
    (code / "train.py").write_text("print()\n")
    (code / "big.bin").write_text("data")
    (code / ".gitignore").write_text("*.bin\n")
    subprocess.run(["git", "init", "-q", str(code)], check=True)
    first = pack(code)
    os.utime(code / "train.py", (1, 1))
    second = pack(code)
    (code / "train.py").write_text("print(1)\n")

    with tarfile.open(fileobj=io.BytesIO(first[1])) as archive:
        assert [".gitignore", "train.py"] == archive.getnames()
    assert first == second
    assert first[0] != pack(code)[0]
