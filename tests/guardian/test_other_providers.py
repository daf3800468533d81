"""The guardian on servers of every kind: found by the environment, or named by the job."""

from __future__ import annotations

import json
import os
import socket
import subprocess

import pytest

from tests.farmhouse import wait_until
from tests.guardian.conftest import GUARD
from tests.providers.clouds import KEY, Fault, RunPod, Vast, programmed, serving

DONE = 'say {"end": {"code": 0, "stop": true, "keep": null, "hold_s": 0, "reason": "done"}}; exit 0'
FAILED = 'say {"end": {"code": 6, "stop": true, "keep": "/workspace", "hold_s": 0, "reason": "gave up"}}; exit 6'


@pytest.mark.parametrize("made", [RunPod, Vast])
@pytest.mark.parametrize(
    ("life", "code", "becomes"), [(DONE, 0, "deleted"), (FAILED, 6, "stopped")], ids=["discard", "keep"]
)
def test_a_job_ends_and_its_server_is_gone(at_home, tmp_path, made, life, code, becomes):  # noqa: PLR0917
    """
    By the verb that fits, which the log explains in money; the key is nowhere in it.
    """
    with serving(made(), tmp_path) as cloud:
        guardian = at_home(life, **cloud.env)
        _, log = guardian.communicate(timeout=30)

    assert (code, becomes) == (guardian.returncode, cloud.now()), log
    assert ("USD a month" if becomes == "stopped" else "nothing is billed") in log
    assert "is gone" in log
    assert KEY not in log


def test_a_key_that_is_shadowed_in_a_session_is_found_with_pid_1(tmp_path):
    """
    What the provider told PID 1 stops the server, whatever a session over SSH has of the same name.
    """
    alone = ("unshare", "--pid", "--fork", "--mount-proc")
    if subprocess.run([*alone, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("no PID namespace can be made here")
    session = 'RUNPOD_API_KEY=of-somebody-else "$@"; exit $?'
    with serving(RunPod(), tmp_path) as cloud:
        done = subprocess.run(
            [*alone, "sh", "-c", session, "sh", *GUARD, DONE],
            env={**os.environ, **cloud.env, "VRAMFARM_WORKSPACE": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    assert (0, "deleted") == (done.returncode, cloud.now()), done.stderr


def test_a_pod_whose_stop_is_refused_goes_on_asking(at_home, tmp_path):
    """
    For ever, and when the key is mended, the pod goes.
    """
    with serving(RunPod(fault=Fault(403, b"<html>Forbidden</html>")), tmp_path) as cloud:
        guardian = at_home(DONE, **cloud.env)
        wait_until(lambda: len(cloud.requests) > 12)

        cloud.fault = None

        assert 0 == guardian.wait(20)
        assert "deleted" == cloud.now()


def _named(cloud) -> str:
    words = {
        "provider": "command",
        "id": socket.gethostname(),
        "stop_command": cloud.env["RUNNER_STOP_COMMAND"].split(),
        "status_command": cloud.env["RUNNER_STATUS_COMMAND"].split(),
    }
    return f"say {json.dumps({'server': words})}"


@pytest.mark.parametrize("end", [DONE, "deadline 0.5; sleep 600"], ids=["at its end", "at the deadline"])
def test_a_server_that_only_the_job_can_stop_is_learned_from_it(at_home, tmp_path, end):
    """
    By its command, which the runner tells before anything else.
    """
    with programmed(tmp_path) as cloud:
        guardian = at_home(f"{_named(cloud)}; {end}")

        assert (0 if end == DONE else 7) == guardian.wait(30)
        assert ("deleted" if end == DONE else "stopped") == cloud.now()


def test_a_job_that_can_no_longer_be_read_is_stopped_by_the_command_it_once_named(at_home, tmp_path):
    """
    The guardian remembers it, with the deadline, on the disk.
    """
    with programmed(tmp_path) as cloud:
        first = at_home(f"{_named(cloud)}; deadline 600; sleep 600")
        armed = tmp_path / ".vramfarm" / "guardian.json"
        wait_until(lambda: armed.exists() and b"stop_command" in armed.read_bytes())
        first.kill()
        first.wait(10)

        second = at_home("exit 2", RUNNER_HOLD_S="0")

        assert 2 == second.wait(30)
        assert "stopped" == cloud.now()


def test_a_job_that_says_none_leaves_the_server_alone(at_home, tmp_path):
    """
    At its end and at the deadline.
    """
    with serving(RunPod(), tmp_path) as cloud:
        guardian = at_home('say {"server": null}; deadline 0.5; sleep 600', **cloud.env)

        assert 7 == guardian.wait(30)
        assert "running" == cloud.now()


class Stuck(Vast):
    """Says that it is stopping, for ever, until it is asked often enough."""

    asked = 0

    def halt(self, state: str) -> None:
        self.asked += 1
        if self.asked > 3:
            super().halt(state)

    def _instance(self):
        wished = "stopped" if self.asked else "running"
        return super()._instance() | {"intended_status": wished}


def test_a_server_that_is_stopping_for_ever_is_asked_again(at_home, tmp_path):
    """
    Patience with a stop ends, too.
    """
    with serving(Stuck(), tmp_path) as cloud:
        guardian = at_home(FAILED, **cloud.env)

        assert 6 == guardian.wait(30)
        assert ("stopped", 4) == (cloud.now(), cloud.asked)


def test_names_that_lead_nowhere_are_asked_for_again_until_they_do(tmp_path):
    """
    DNS is gone for a while: what the provider never heard is no stop.
    """
    alone = ("unshare", "--mount", "--propagation", "private")
    if subprocess.run([*alone, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("no mount namespace can be made here")
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost\n")
    with serving(RunPod(), tmp_path) as cloud:
        url = cloud.url.replace("127.0.0.1", "api.runpod.example")
        guardian = subprocess.Popen(
            [*alone, "sh", "-c", 'mount --bind "$0" /etc/hosts && exec "$@"', str(hosts), *GUARD, DONE],
            env={**os.environ, **cloud.env, "RUNPOD_REST_URL": f"{url}/v1", "VRAMFARM_WORKSPACE": str(tmp_path)},
            stderr=subprocess.PIPE,
            text=True,
        )
        line = ""
        while "not stopped yet" not in line:
            line = guardian.stderr.readline()
            assert line, "it ended"
        heard = len(cloud.requests)

        hosts.write_text("127.0.0.1 localhost api.runpod.example\n")

        guardian.communicate(timeout=60)
    assert "no answer from" in line
    assert (0, 0, "deleted") == (heard, guardian.returncode, cloud.now())
