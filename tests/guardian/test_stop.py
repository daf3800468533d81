"""The guardian on a rented server: the deadline, the hold, and the stop that does not give up."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.farmhouse import Farmhouse, wait_until
from tests.guardian.conftest import GUARD

DONE = 'say {"end": {"code": 0, "stop": true, "keep": null, "hold_s": 0, "reason": "done"}}; exit 0'
FAILED = 'say {"end": {"code": 6, "stop": true, "keep": "/workspace", "hold_s": 0, "reason": "gave up"}}; exit 6'
REFUSED = 'say {"end": {"code": 3, "stop": true, "keep": null, "reason": "only one card"}}; exit 3'
KEPT = 'say {"end": {"code": 0, "stop": false}}; exit 0'
LOCKED = 'say {"end": {"code": 5, "stop": false}}; exit 5'


def test_a_job_that_is_done_stops_its_server(house: Farmhouse, rent):
    """
    And its disk is thrown away, as the last word said.
    """
    server = rent(DONE, restart_policy="always")

    now = house.wait_stopped(server)

    assert ("job_succeeded", 0, 0, None) == (
        now["state_reason"],
        now["container"]["exit_code"],
        now["container"]["restart_count"],
        now["save"],
    )
    assert not house.disk(server).exists()


def test_a_job_that_failed_stops_its_server_and_keeps_the_folder(house: Farmhouse, rent):
    """
    What is only there survives.
    """
    now = house.wait_stopped(rent(FAILED))

    assert ("job_failed", 6, "complete") == (now["state_reason"], now["container"]["exit_code"], now["save"]["state"])
    assert (house.farm.state / "saves" / now["save"]["id"] / "lives").exists()


def test_a_runner_that_always_dies_stops_the_server(house: Farmhouse, rent):
    """
    An early end, with the folder kept.
    """
    now = house.wait_stopped(rent("die"))

    assert (1, "complete") == (now["container"]["exit_code"], now["save"]["state"])


def test_sigterm_never_stops_the_server(house: Farmhouse, rent):
    """
    It ends this boot, with the runner's own code.
    """
    server = rent("sleep 600")
    wait_until((house.disk(server) / "lives").exists)
    time.sleep(0.3)  # the fake runner's handler is in place

    house.farm.host.terminate(server)

    now = house.wait_exited(server)
    assert ("running", 75) == (now["state"], now["container"]["exit_code"])
    assert "asking" not in house.log(server)
    house.stop(server)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        pytest.param({"kind": "status", "status": 401, "times": 3}, "HTTP 401", id="401"),
        pytest.param({"kind": "html_body", "times": 3}, "HTTP 403", id="403 of a proxy"),
        pytest.param({"kind": "status", "status": 429, "retry_after": 1}, "HTTP 429", id="429"),
        pytest.param({"kind": "status", "status": 500, "times": 5}, "HTTP 500", id="500"),
        pytest.param({"kind": "reset", "times": 2}, "no answer", id="reset"),
        pytest.param({"kind": "timeout", "delay_ms": 200, "times": 2}, "no answer", id="no answer"),
        pytest.param({"kind": "drop_after_commit"}, "", id="done, but the answer is lost"),
    ],
)
def test_the_stop_is_asked_for_until_the_server_is_gone(house: Farmhouse, rent, fault, said):
    """
    Whatever the provider answers, said once in plain words.
    """
    server = rent("sleep 0.3; " + DONE)
    house.fail({"operation": "stopServer", **fault})

    house.wait_stopped(server)

    log = house.log(server)
    assert said in log
    assert 1 >= log.count("not stopped yet"), log


def test_a_provider_that_asks_for_time_gets_it(house: Farmhouse, rent):
    """
    Retry-After is honoured.
    """
    server = rent(DONE)
    house.fail({"operation": "stopServer", "kind": "status", "status": 429, "retry_after": 2})
    wait_until(lambda: "HTTP 429" in house.log(server))
    asked = time.monotonic()

    house.wait_stopped(server)

    assert time.monotonic() - asked > 1.5


def test_a_save_that_fails_is_asked_for_again(house: Farmhouse, rent):
    """
    The server runs again, the job ends again, the folder is kept at last.
    """
    server = rent(FAILED, restart_policy="always")
    house.fail({"operation": "createSave", "kind": "status"})

    now = house.wait_stopped(server)

    assert (1, "complete") == (now["container"]["restart_count"], now["save"]["state"])


def test_an_early_end_holds_the_server_until_somebody_has_looked(house: Farmhouse, rent):
    """
    The reason and the time left are said; a file ends the hold.
    """
    server = rent(REFUSED, hold="600")
    wait_until(lambda: "10 min left" in house.log(server))
    assert "only one card" in house.log(server)
    assert "running" == house.server(server)["state"]

    (house.disk(server) / ".vramfarm" / "stop").touch()

    assert 3 == house.wait_stopped(server)["container"]["exit_code"]


def test_an_early_end_without_a_stated_hold_uses_up_the_paid_minutes(house: Farmhouse, rent):
    """
    Fifteen minutes since the first boot, not since this one.
    """
    server = rent(REFUSED, hold="")

    wait_until(lambda: "min left" in house.log(server))

    assert "15 min left" in house.log(server)
    house.stop(server)


def test_a_server_that_the_job_wants_to_keep_stays(house: Farmhouse, rent):
    """
    The container does not exit, else it would be started again.
    """
    server = rent(KEPT)
    wait_until(lambda: "the server stays" in house.log(server))
    time.sleep(0.3)
    assert "running" == house.server(server)["container"]["state"]

    house.farm.host.terminate(server)

    now = house.wait_exited(server)
    assert ("running", 0) == (now["state"], now["container"]["exit_code"])
    house.stop(server)


def test_a_kept_server_stops_at_the_deadline_and_its_folder_is_kept(house: Farmhouse, rent):
    """
    No bill after the deadline, whatever the job asked for.
    """
    server = rent("deadline 1; " + KEPT)

    now = house.wait_stopped(server)

    assert (0, "complete") == (now["container"]["exit_code"], now["save"]["state"])


def test_a_deadline_that_comes_while_leaving_stops_the_server(house: Farmhouse, rent):
    """
    SIGTERM stops no server, the deadline does.
    """
    server = rent("deaf; deadline 1.5; sleep 600")
    wait_until(lambda: "set by the runner" in house.log(server))

    house.farm.host.terminate(server)

    assert 7 == house.wait_stopped(server)["container"]["exit_code"]


@pytest.mark.parametrize(("stop_anyway", "saves"), [("false", "complete"), ("true", "failed")])
def test_at_the_jobs_own_limit_the_job_says_what_comes_first(house: Farmhouse, rent, stop_anyway, saves):
    """
    The data, which are asked for again, or the time.
    """
    tomorrow = (datetime.now(UTC) + timedelta(days=1)).isoformat()
    word = f'say {{"deadline": "{tomorrow}", "keep": "/workspace", "stop_anyway": {stop_anyway}}}'
    server = rent(f"{word}; {FAILED.replace('6', '7')}", restart_policy="always")
    house.fail({"operation": "createSave", "kind": "status"})

    assert saves == house.wait_stopped(server)["save"]["state"]


def test_a_second_runner_of_a_run_just_ends(house: Farmhouse, rent):
    """
    The server belongs to the first.
    """
    server = rent(LOCKED)

    now = house.wait_exited(server)

    assert ("running", 5) == (now["state"], now["container"]["exit_code"])
    house.stop(server)


def test_at_the_deadline_the_server_stops_and_the_folder_is_kept(house: Farmhouse, rent):
    """
    Even when the folder cannot be saved: the deadline wins.
    """
    server = rent("deaf; deadline 0.5; sleep 600")
    house.fail({"operation": "createSave", "kind": "status"})

    now = house.wait_stopped(server)

    assert ("self_request", 7, "failed") == (
        now["state_reason"],
        now["container"]["exit_code"],
        now["save"]["state"],
    )


def test_a_deadline_that_passed_between_boots_starts_nothing(house: Farmhouse, rent):
    """
    It is absolute: a container that boots again does not get a day more.
    """
    server = rent("deadline 0.8; sleep 0.3; stray; sleep 600", restart_policy="always")
    wait_until((house.disk(server) / "stray").exists)
    house.farm.pace, pace = type(house.farm.pace)(stage=0.0, restart=1.0, tick=0.02), house.farm.pace
    house.farm.end_container(server, 137)

    now = house.wait_stopped(server)

    house.farm.pace = pace
    save = house.farm.state / "saves" / now["save"]["id"]
    assert (7, 1) == (now["container"]["exit_code"], len((save / "lives").read_text().split()))


@pytest.mark.parametrize(
    "content",
    [
        b"{",
        b'{"server": "srv_other0", "first_boot_at": "2020-01-01T00:00:00+00:00", "deadline_at": "2020-01-02T00:00:00+00:00"}',
    ],
    ids=["cut", "of another server"],
)
def test_a_deadline_file_that_is_garbled_or_strange_is_made_anew(house: Farmhouse, content):
    """
    It never keeps the guardian from starting, and the past of another server does not end this one.
    """
    house.fail()
    put = "import os, sys; os.makedirs('.vramfarm'); open('.vramfarm/guardian.json', 'wb').write(bytes.fromhex(sys.argv[1]))"
    exec_guard = "os.execv(sys.argv[2], sys.argv[2:])"
    args = [GUARD[0], "-I", "-c", f"{put}; {exec_guard}", content.hex(), *GUARD, "sleep 0.3; " + FAILED]
    server = house.rent(args, env={"RUNNER_HOLD_S": "0"})

    now = house.wait_stopped(server)

    stored = json.loads((house.farm.state / "saves" / now["save"]["id"] / ".vramfarm" / "guardian.json").read_text())
    left = datetime.fromisoformat(stored["deadline_at"]) - datetime.now(UTC)
    assert 6 == now["container"]["exit_code"]
    assert server == stored["server"]
    assert timedelta(hours=23) < left <= timedelta(hours=24)


def test_a_disk_that_cannot_be_written_is_said_and_survived(house: Farmhouse, rent):
    """
    The deadline is kept in memory.
    """
    house.fail()
    wrapped = [
        GUARD[0],
        "-I",
        "-c",
        "import os, sys; open('.vramfarm', 'w'); os.execv(sys.argv[1], sys.argv[1:])",
        *GUARD,
    ]
    server = house.rent([*wrapped, DONE], env={"RUNNER_HOLD_S": "0"})

    house.wait_stopped(server)

    assert "kept in memory only" in house.log(server)


def test_the_rentals_end_is_a_deadline_when_it_is_earlier(house: Farmhouse):
    """
    No deadline later than what the provider lets us stay.
    """
    house.fail()
    ends = datetime.now(UTC) + timedelta(seconds=1)

    server = house.rent(["/usr/bin/env", f"VRAMFARM_RENTAL_ENDS_AT={ends.isoformat()}", *GUARD, "sleep 600"])

    assert 7 == house.wait_stopped(server)["container"]["exit_code"]


def test_a_server_that_the_provider_never_knew_is_not_gone(house: Farmhouse, at_home):
    """
    A wrong id must not end in a bill that runs on: it is said, and asked again.
    """
    guardian = at_home(
        DONE,
        VRAMFARM_SERVER_ID="srv_mistyped",
        VRAMFARM_API_URL=house.url,
        VRAMFARM_API_KEY=house.farm.account_key,
    )
    line = ""
    while "not stopped yet" not in line:
        line = guardian.stderr.readline()

    assert "does not know this server" in line
    assert guardian.poll() is None
    guardian.terminate()
    assert 0 == guardian.wait(20)


@pytest.mark.parametrize(
    "env",
    [
        {"VRAMFARM_SERVER_ID": "srv_\n\r x", "VRAMFARM_API_URL": "http://127.0.0.1:9", "VRAMFARM_API_KEY": "k"},
        {"VRAMFARM_SERVER_ID": "srv_1", "VRAMFARM_API_URL": "http://[", "VRAMFARM_API_KEY": "k"},
        {"VRAMFARM_SERVER_ID": "srv_1", "VRAMFARM_API_URL": "http://127.0.0.1:9", "VRAMFARM_API_KEY": "k\n\u20ac"},
        {"VRAMFARM_SERVER_ID": "srv_1"},
    ],
    ids=["id", "address", "key", "neither address nor key"],
)
def test_an_environment_that_makes_no_sense_is_said_and_borne(at_home, env):
    """
    The guardian does not die of it, and does not take the server for gone.
    """
    guardian = at_home(DONE, **env)
    while "not stopped yet" not in guardian.stderr.readline():
        assert guardian.poll() is None

    guardian.terminate()

    assert 0 == guardian.wait(20)


def test_the_guardian_is_small(house: Farmhouse, rent):
    """
    It must survive when memory is short.
    """
    server = rent("sleep 600")
    lives = house.disk(server) / "lives"
    runner = int(wait_until(lambda: lives.exists() and lives.read_text().strip()))
    guardian = Path(f"/proc/{runner}/stat").read_text().rpartition(")")[2].split()[1]

    status = Path(f"/proc/{guardian}/status").read_text()

    assert 40_000 > int(status.partition("VmRSS:")[2].split()[0]), "kB"
    house.stop(server)


def test_a_deadline_is_told_when_it_changes(house: Farmhouse, rent):
    """
    The runner repeats its word, a fraction of a second apart; the log has it once.
    """
    at = (datetime.now(UTC) + timedelta(hours=1)).replace(microsecond=0)
    words = [
        f'say {{"deadline": "{moment.isoformat()}", "keep": "/workspace"}}'
        for moment in (at, at.replace(microsecond=400_000))
    ]
    server = rent("; ".join([*words, DONE]))

    house.wait_stopped(server)

    assert 1 == house.log(server).count("set by the runner")
