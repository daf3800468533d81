"""Who hears what: from the guardian when the stop does not come about, from a whole run, and where nothing began."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner import guardian
from tests.farmhouse import wait_until
from tests.providers.clouds import Fault, RunPod, Webhook, serving

DONE = 'say {"end": {"code": 0, "stop": true, "keep": null, "hold_s": 0, "reason": "done"}}; exit 0'
JOB = """
name: small
command: python3 train.py
launcher: command
cpu_processes: 1
notify: [WHOM]
offload: {to: "file://{workspace}/store", outlives_server: true}
"""


@pytest.fixture
def webhook(tmp_path: Path) -> Iterator[Webhook]:
    with serving(Webhook(), tmp_path) as served:
        yield served


def test_a_stop_that_is_not_confirmed_is_told(at_home, tmp_path, webhook):
    """
    By the guardian, which keeps on asking; the address is written nowhere.
    """
    with serving(RunPod(fault=Fault(403, b"<html>Forbidden</html>")), tmp_path) as cloud:
        process = at_home(f'say {{"notify": ["{webhook.url}/secret-path"]}}; deadline 600; {DONE}', **cloud.env)
        wait_until(lambda: webhook.requests)
        cloud.fault = None
        _, log = process.communicate(timeout=30)

    assert ("alert", "xedezhzb9la3ye") == (webhook.requests[0].body["event"], webhook.requests[0].body["server"])
    assert "not confirmed" in webhook.requests[0].body["text"]
    assert "alert: the stop is not confirmed" in log
    assert (0, "deleted") == (process.returncode, cloud.now())
    assert not any(secret in log + _texts(tmp_path) for secret in ("secret-path",))


def test_a_listener_that_hangs_does_not_hold_up_the_stop(at_home, tmp_path):
    """
    It is told beside the asking.
    """
    with (
        serving(RunPod(fault=Fault(500)), tmp_path) as cloud,
        serving(Webhook(fault=Fault(drops=True)), tmp_path) as deaf,
    ):
        process = at_home(f'say {{"notify": ["{deaf.url}"]}}; {DONE}', **cloud.env)
        wait_until(lambda: deaf.requests)
        cloud.fault = None

        assert 0 == process.wait(20)
        assert "deleted" == cloud.now()


def test_a_whole_run_tells_that_it_began_and_how_it_ended(tmp_path, webhook):
    """
    Before the server goes. The training command sees neither the address nor the key.
    """
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "train.py").write_text(
        "import os; open('told', 'w').write(str({'WHOM', 'RUNPOD_API_KEY'} & os.environ.keys()))"
    )
    with serving(RunPod(), tmp_path) as cloud:
        done = _run(tmp_path, {**cloud.env, "WHOM": f"{webhook.url}/secret-path"})
        stopped = [request.method for request in cloud.requests if request.method != "GET"]

    assert 0 == done.returncode, done.stderr
    assert ["started", "ended"] == webhook.events()
    assert "0.69 USD/h" in webhook.requests[0].body["text"]
    assert "small: succeeded" in webhook.requests[1].body["text"]
    assert stopped
    assert "set()" == (tmp_path / "told").read_text()
    assert "secret-path" not in done.stderr + _texts(tmp_path / "work")


@pytest.mark.parametrize(
    ("job", "said", "state"),
    [
        pytest.param("limts: {}\n", "limts", "deleted", id="a typo"),
        pytest.param(
            "notify: [NOT_THERE]\noffload: {to: 'file://STORE'}\n", "NOT_THERE", "stopped", id="no value for a secret"
        ),
    ],
)
def test_what_is_wrong_with_the_job_is_told_to_whom_the_environment_names(tmp_path, webhook, *, job, said, state):
    """
    Once. job.yaml cannot say whom: it cannot be read, or names somebody without an address.
    """
    (tmp_path / "store").mkdir()
    (tmp_path / "job.yaml").write_text(
        f"name: small\ncommand: x\ncpu_processes: 1\n{job}".replace("STORE", f"{tmp_path}/store")
    )
    with serving(RunPod(), tmp_path) as cloud:
        done = _run(tmp_path, {**cloud.env, "RUNNER_NOTIFY_URL": webhook.url, "RUNNER_HOLD_S": "0"})

        assert (2, state) == (done.returncode, cloud.now()), done.stderr
    assert ["ended"] == webhook.events()
    assert said in webhook.requests[0].body["text"]


def test_a_listener_that_is_not_there_is_said_and_changes_nothing(tmp_path):
    """
    By its name, not by its address.
    """
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "train.py").write_text("")

    done = _run(tmp_path, {"WHOM": "http://127.0.0.1:9/secret-path"})

    assert 0 == done.returncode, done.stderr
    assert "notify started failed: WHOM: no connection" in done.stderr
    assert "secret-path" not in done.stderr


def _run(tmp_path: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    (tmp_path / "work").mkdir()
    return subprocess.run(
        [sys.executable, "-I", guardian.__file__, "--config", str(tmp_path / "job.yaml")],
        env={**os.environ, "VRAMFARM_WORKSPACE": str(tmp_path / "work"), **env},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def _texts(folder: Path) -> str:
    """Everything that was written there."""
    return json.dumps([path.read_text(errors="replace") for path in folder.rglob("*") if path.is_file()])
