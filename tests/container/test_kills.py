"""What a provider or a person does to the processes of a container: nothing is trained twice, nothing is lost."""

from __future__ import annotations

import json
import re

from tests.container.test_life import COMMITTED, launches

TRAINERS = "cd /proc; for p in [0-9]*; do tr '\\0' ' ' <$p/cmdline | grep -q '^/usr/local/bin/python3 fake_tr' && echo $p; done"
GUARDIAN = "cat /proc/1/task/1/children"


def test_whatever_restarts_the_container_nothing_is_trained_twice(box, small, rental):
    """
    With --restart always PID 1 stays until the server is gone; one that is killed comes back, and only stops the server.
    """
    always = box(*small().mounts, "--network", "host", "--restart", "always")
    rental.fail({"operation": "stopServer", "kind": "status", "times": 1000})
    always.run("--config", "/job/job.yaml", env=rental.env)
    always.wait_for("is not stopped yet: HTTP 503")
    assert always.state()["Running"]

    always.exec("sh", "-c", f"kill -9 $({GUARDIAN})", check=False)

    always.wait_for(r"this job is over already \(succeeded\): nothing is trained(?s:.*)is not stopped yet: HTTP 503")
    rental.fail()
    always.wait_for(r"is gone")
    assert "stopped" == rental.state()["state"]
    assert [0] == launches(always.log())


def test_a_server_that_is_kept_idles(box, small, rental):
    """
    `on_success: keep`: PID 1 stays, because a provider may start again what exits; `docker stop` ends it.
    """
    kept = box(*small(more="finish: {on_success: keep}\n").mounts, "--network", "host", "--restart", "always")
    kept.run("--config", "/job/job.yaml", env=rental.env)

    kept.wait_for("the run ended with code 0; the server stays, as the job asks, and is billed")

    assert kept.state()["Running"]
    kept.stop()
    assert 0 == kept.wait(), kept.log()
    assert "running" == rental.state()["state"]
    assert [0] == launches(kept.log())


def test_a_killed_runner_finds_its_trainer_again(box, small):
    """
    The guardian starts it again; the trainer lives on, is found and not doubled.
    """
    going = box(*small(steps=300).mounts)
    going.run("--config", "/job/job.yaml")
    going.wait_for(COMMITTED)
    runner = json.loads(going.exec("cat", "/workspace/small/status.json"))["runner_pid"]
    trainers = going.exec("sh", "-c", TRAINERS, check=False).split()

    going.exec("sh", "-c", f"kill -9 {runner}")

    going.wait_for(r"the runner died \(signal 9\); starting it again(?s:.*)run folder /workspace/small")
    assert 1 == len(trainers)
    assert trainers == going.exec("sh", "-c", TRAINERS, check=False).split()
    assert 0 == going.wait(), going.log()
    assert [0] == launches(going.log())


def test_a_killed_guardian_ends_the_container_and_the_next_start_goes_on(box, small):
    """
    Everything in the container ends with PID 1; nothing but the steps since the last save is lost.
    """
    going = box(*small(steps=200).mounts)
    going.run("--config", "/job/job.yaml")
    saved = int(going.wait_for(COMMITTED)[1])

    going.exec("sh", "-c", f"kill -9 $({GUARDIAN})", check=False)

    assert 137 == going.wait(), going.log()
    going.start()
    assert 0 == going.wait(), going.log()
    first, second = launches(going.log())
    assert 0 == first
    assert saved <= second < 200


def test_the_commands_work_in_a_container_that_runs(box, small):
    """
    `docker exec C vramfarm-runner status`, and one that stops the job; a second run beside it is refused.
    """
    going = box(*small(steps=100_000).mounts)
    going.run("--config", "/job/job.yaml")
    going.wait_for(COMMITTED)

    status = going.exec("vramfarm-runner", "status")
    second = going.exec("vramfarm-runner", "up", "--config", "/job/job.yaml")
    going.exec("vramfarm-runner", "stop")

    assert re.match(r"small  running  step \d+/100000", status), status
    assert "" == second
    assert 8 == going.wait(), going.log()
    assert "conclude stopped" in going.log()


def test_up_does_the_same_where_the_provider_has_its_own_entrypoint(box, small):
    """
    In a session that knows nothing of the container's variables: once, in the background, however often it is called.
    """
    text = (small(steps=60).folder / "job.yaml").read_text()
    theirs = box(*small().mounts, "--entrypoint", "sleep")
    theirs.run("600", env={"RUNNER_JOB": text, "RUNNER_STOP_TIMEOUT": "60"})
    session = ("env", "--ignore-environment", "PATH=/usr/local/bin:/usr/bin:/bin", "sh", "-c")

    theirs.exec(*session, "vramfarm-runner up")
    again = theirs.exec(*session, "vramfarm-runner up 2>&1")

    assert "already up" in again
    follow = "timeout 90 tail -n +1 -F /workspace/.vramfarm/up.log | sed '/conclude/q'"
    log = theirs.exec(*session, follow)
    assert "conclude succeeded" in log, log
    assert "docker stop waits 1m 00s (RUNNER_STOP_TIMEOUT)" in log
    assert [0] == launches(log)
