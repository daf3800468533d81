"""Servers: how they live, restart, stop, and what is kept, be they processes or containers."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from runner.supervise.process import find, identify, kill
from tests.farmhouse import Farmhouse, open_farm, wait_until


def python(program: str) -> list[str]:
    """Of this machine, or of the image."""
    return ["python3", "-I", "-c", program]


SLEEP = python("import signal, sys, time; signal.signal(15, lambda *_: sys.exit(143)); time.sleep(600)")
IGNORES_TERM = python(
    "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
)


def _alive(server: str) -> bool:
    return bool(find("VRAMFARM_SERVER_ID", server))


def _lives(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def test_a_process_is_told_who_it_is(any_house: Farmhouse):
    """
    The names that the API promises, and a workspace that is there.
    """
    server = any_house.rent(python("import os, json; print(json.dumps(dict(os.environ)))"), env={"RUN_ID": "run-7"})
    any_house.wait_exited(server)

    env = json.loads(any_house.log(server))

    assert (server, any_house.url, any_house.farm.find(server).key) == (
        env["VRAMFARM_SERVER_ID"],
        env["VRAMFARM_API_URL"],
        env["VRAMFARM_API_KEY"],
    )
    assert ("rtx-4090", "1", "0.59", "0", "run-7") == tuple(
        env[name]
        for name in (
            "VRAMFARM_GPU",
            "VRAMFARM_GPU_COUNT",
            "VRAMFARM_PRICE_PER_HOUR",
            "VRAMFARM_RESTART_COUNT",
            "RUN_ID",
        )
    )
    workspace = any_house.disk(server).resolve() if any_house.image == Farmhouse.image else "/workspace"
    assert str(workspace) == env["VRAMFARM_WORKSPACE"]
    any_house.stop(server)


@pytest.mark.parametrize(
    ("policy", "code", "restarted"),
    [
        ("always", 0, True),
        ("always", 3, True),
        ("on_failure", 0, False),
        ("on_failure", 3, True),
        ("never", 0, False),
        ("never", 3, False),
    ],
)
def test_an_exit_restarts_the_container_as_the_policy_says(any_house: Farmhouse, policy, code, restarted):
    """
    On the same disk; the server stays running and billed in every case.
    """
    program = f"import os; open('lives', 'a').write('x'); os._exit({code})"
    server = any_house.rent(python(program), restart_policy=policy)

    def over(now):
        return now["container"]["restart_count"] >= 2 if restarted else now["container"]["state"] == "exited"

    now = any_house.wait(server, over)

    assert "running" == now["state"]
    if restarted:
        wait_until(lambda: any_house.read(server, "lives") > "x")
    else:
        assert "x" == any_house.read(server, "lives")
    any_house.stop(server)


def test_a_stop_ends_the_process_and_deletes_the_disk(any_house: Farmhouse):
    """
    Nothing of the server is left but its record and its log.
    """
    server = any_house.rent(SLEEP)
    any_house.wait_started(server)

    reply = any_house.stop(server)

    now = any_house.wait_stopped(server)
    assert (202, "user_request") == (reply.status, now["state_reason"])
    assert not any_house.has_disk(server)
    assert not _alive(server)


def test_a_stop_that_is_repeated_is_no_error(any_house: Farmhouse):
    """
    200 while it is under way and after; 409 only if it wants to save something else.
    """
    server = any_house.rent(IGNORES_TERM)
    any_house.wait(server, lambda _: "up" in any_house.log(server))

    replies = [any_house.stop(server, grace_seconds=1) for _ in range(2)]
    other = any_house.stop(server, save={"path": "/workspace"})
    any_house.wait_stopped(server)
    late = any_house.stop(server)

    assert [202, 200, 409, 200] == [reply.status for reply in (*replies, other, late)]
    assert 137 == any_house.server(server)["container"]["exit_code"]


def test_a_stop_keeps_the_folder_that_is_named(any_house: Farmhouse):
    """
    What the process wrote while it was told to end is in it.
    """
    program = (
        "import signal, sys, time, pathlib\n"
        "def end(*_):\n    pathlib.Path('out/last').write_text('saved'); sys.exit(0)\n"
        "signal.signal(15, end); pathlib.Path('out').mkdir(); print('up', flush=True); time.sleep(600)"
    )
    server = any_house.rent(python(program))
    any_house.wait(server, lambda _: "up" in any_house.log(server))

    any_house.stop(server, save={"path": "/workspace/out", "name": "run-7"})

    save = any_house.wait_stopped(server)["save"]
    assert ("complete", "run-7", 5, 1) == (save["state"], save["name"], save["bytes"], save["files"])
    assert "saved" == (any_house.farm.state / "saves" / save["id"] / "last").read_text()
    assert not any_house.has_disk(server)


def test_a_saved_folder_comes_back_on_another_server(any_house: Farmhouse):
    """
    A new server with `restore_save_id` starts with it.
    """
    first = any_house.rent(python("open('a', 'w').write('1')"))
    any_house.wait_exited(first)
    any_house.stop(first, save={"path": "/workspace"})
    save = any_house.wait_stopped(first)["save"]["id"]

    second = any_house.rent(python("print(open('a').read())"), restore_save_id=save)

    any_house.wait_exited(second)
    assert "1\n" == any_house.log(second)
    any_house.stop(second)


@pytest.mark.parametrize(
    ("on_failure", "state"), [("keep_running", "running"), ("stop_anyway", "stopped")], ids=["keep", "stop"]
)
def test_a_save_that_fails_keeps_the_server_or_not_as_asked(any_house: Farmhouse, on_failure, state):
    """
    With keep_running the container is started again.
    """
    server = any_house.rent(SLEEP, restart_policy="always")
    any_house.wait_started(server)

    any_house.stop(server, save={"path": "/workspace/none"}, on_save_failure=on_failure)

    now = any_house.wait(server, lambda now: now["save"] and now["state"] == state)
    assert "failed" == now["save"]["state"]
    if state == "running":
        any_house.wait(server, lambda now: now["container"]["restart_count"] == 1)
        any_house.stop(server)
        any_house.wait_stopped(server)


def test_a_folder_outside_the_disk_is_not_saved(any_house: Farmhouse):
    """
    Neither by its path nor by a link.
    """
    server = any_house.rent(python("import os; os.symlink('/etc', 'link'); print('up')"))
    any_house.wait_exited(server)

    paths = ("/etc", "/workspace/../../..", "/workspace/link")
    saves = [
        any_house.call("POST", f"/servers/{server}/saves", {"path": path}, Idempotency_Key=f"outside-{n}-{server}")
        for n, path in enumerate(paths)
    ]

    assert ["failed"] * 3 == [json.loads(save.body)["state"] for save in saves]
    any_house.stop(server)


@pytest.mark.parametrize("victim", ["process", "pid 1"])
def test_strays_end_with_their_container(house: Farmhouse, victim):
    """
    As in a namespace: no process of the server outlives its first one, whatever its environment.
    """
    program = (
        "import os, subprocess, time\n"
        f"bare = subprocess.Popen({SLEEP!r}, start_new_session=True, env={{'PATH': os.environ['PATH']}})\n"
        f"marked = subprocess.Popen({SLEEP!r}, start_new_session=True, env={{'RUN': os.getcwd() + '/run'}})\n"
        "print(os.getpid(), marked.pid, bare.pid, flush=True); time.sleep(600)"
    )
    server = house.rent(python(program))
    house.wait(server, lambda _: house.log(server).endswith("\n"))
    process, marked, bare = map(int, house.log(server).split())
    pid_1 = json.loads((house.disk(server).parent / "pid.json").read_text())["pid"]

    os.kill(process if victim == "process" else pid_1, signal.SIGKILL)

    house.wait_exited(server)
    assert [] == [pid for pid in (process, marked, bare) if _lives(pid)]
    house.stop(server)


def test_a_container_whose_every_process_is_killed_is_started_again(house: Farmhouse):
    """
    PID 1 of the server included: an exit nobody recorded is 137.
    """
    server = house.rent(SLEEP, restart_policy="always")
    house.wait_started(server)
    victims = wait_until(lambda: find("VRAMFARM_SERVER_ID", server))
    pid_1 = json.loads((house.disk(server).parent / "pid.json").read_text())["pid"]

    kill([identify(pid_1), *victims], signal.SIGKILL)  # some end with the first

    house.wait(server, lambda now: now["container"]["restart_count"] == 1)
    events = json.loads(house.call("GET", f"/servers/{server}/events").body)["events"]
    assert [137] == [e["data"]["exit_code"] for e in events if e["type"] == "container.exited"]
    house.stop(server)


def test_a_rental_that_ends_stops_the_server(house: Farmhouse):
    """
    The provider's own stop keeps the workspace.
    """
    server = house.rent(SLEEP)
    house.wait_started(server)

    house.call("POST", "/_sim/clock", {"advance_seconds": 86_400})

    now = house.wait_stopped(server)
    assert ("rental_ended", "complete") == (now["state_reason"], now["save"]["state"])


def test_a_rental_that_ended_unseen_is_not_billed_on(tmp_path):
    """
    A simulator that is started after a week finds a day's bill, not a week's.
    """
    with open_farm(tmp_path / "farm") as house:
        server = house.rent(SLEEP)
        house.wait_started(server)

        house.call("POST", "/_sim/clock", {"advance_seconds": 7 * 86_400})

        assert 24 * 60 >= house.wait_stopped(server)["billing"]["billed_minutes"]


JUPYTER = {"kind": "pytorch_jupyter", "image": None}


def test_an_idle_server_is_warned_of_then_saved_and_stopped(tmp_path):
    """
    Two hours, an email, one hour more; a connection in between starts the count anew.
    """
    with open_farm(tmp_path / "farm") as house:
        server = house.rent([], **JUPYTER)
        activity = f"/_sim/servers/{server}/activity"
        house.wait(server, lambda now: now["idle_detection"]["idle_since"])
        house.call("PUT", activity, {"ssh_connections": 1})
        house.wait(server, lambda now: not now["idle_detection"]["idle_since"])
        house.call("POST", "/_sim/clock", {"advance_seconds": 3 * 3600})
        house.call("PUT", activity, {"ssh_connections": 0})
        house.wait(server, lambda now: now["idle_detection"]["idle_since"])

        house.call("POST", "/_sim/clock", {"advance_seconds": 2 * 3600})
        house.wait(server, lambda now: now["idle_detection"]["stops_at"])
        house.call("POST", "/_sim/clock", {"advance_seconds": 3600})

        now = house.wait_stopped(server)
        emails = json.loads(house.call("GET", "/_sim/outbox").body)["emails"]
        assert ("idle", "complete") == (now["state_reason"], now["save"]["state"])
        assert ["idle_warning", "idle_stopped"] == [email["kind"] for email in emails]


def test_a_server_of_an_own_image_is_never_stopped_for_idling(house: Farmhouse):
    """
    It has to stop itself.
    """
    server = house.rent(SLEEP)
    house.wait_started(server)

    house.call("POST", "/_sim/clock", {"advance_seconds": 12 * 3600})
    house.wait(server, lambda now: now["billing"]["billed_minutes"] >= 720)

    assert "running" == house.server(server)["state"]
    house.stop(server)


def test_a_container_is_made_to_end_with_a_code(any_house: Farmhouse):
    """
    For rehearsals of a crash.
    """
    server = any_house.rent(SLEEP)
    any_house.wait_started(server)

    any_house.call("PUT", f"/_sim/servers/{server}/activity", {"exit_code": 42})

    assert 42 == any_house.wait_exited(server)["container"]["exit_code"]
    any_house.stop(server)
