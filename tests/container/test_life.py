"""The job in its image, on a real engine: from the first boot to the stopped server, through every kind of death."""

from __future__ import annotations

import re
import time

COMMITTED = r"checkpoint step-0*(\d+)-\w+ committed"


def launches(log: str) -> list[int]:
    """The steps that attempts were launched from."""
    return [int(step) for step in re.findall(r"launch attempt \d+ from step (\d+)", log)]


def steps_told(log: str) -> list[int]:
    """The steps that the trainer itself told of, in order."""
    return [int(step) for step in re.findall(r"\| step (\d+) loss", log)]


def test_a_job_runs_to_its_end_and_the_server_is_stopped(box, quickstart, rental):
    """
    `docker run IMAGE --config job.yaml` exits 0 once everything is in the store and the server is gone.
    """
    quick = box(*quickstart().mounts, "--network", "host")

    quick.run("--config", "/job/job.yaml", env=rental.env)

    assert 0 == quick.wait(), quick.log()
    log = quick.log()
    assert "stopped" == rental.state()["state"], log
    assert "job_succeeded" == rental.state()["state_reason"]
    assert "verified in the store" in log
    assert [0] == launches(log)
    assert [20, 40] == steps_told(log)


def test_a_killed_container_goes_on_from_its_own_disk(box, quickstart):
    """
    `docker kill`, `docker start`: it resumes from the newest checkpoint here; steps never go back to zero.
    """
    quick = box(*quickstart(steps=60, pause=0.05).mounts)
    quick.run("--config", "/job/job.yaml")
    saved = int(quick.wait_for(COMMITTED)[1])
    quick.wait_for("a last save takes about")  # it is timed a moment after the commit

    quick.kill()
    first = quick.log()
    quick.start()

    assert 0 == quick.wait(), quick.log()
    second = quick.log().removeprefix(first)
    assert saved <= launches(second)[0]
    assert "a last save takes about" in second.partition("launch")[0]
    assert "from the store" not in second
    assert min(steps_told(second.partition("launch")[2])) > saved, second
    assert "conclude succeeded" in second


def test_a_lost_machine_goes_on_from_the_store(box, quickstart):
    """
    Container and volume are gone: another machine restores the newest copy and resumes.
    """
    code = quickstart(steps=60, pause=0.05)
    lost, other = box(*code.mounts), box(*code.mounts)
    lost.run("--config", "/job/job.yaml")
    saved = int(lost.wait_for(r"checkpoint step-0*(\d+)-\w+ is in the store")[1])

    lost.lose()
    other.run("--config", "/job/job.yaml")

    assert 0 == other.wait(), other.log()
    log = other.log()
    assert re.search(r"restore step-\d+-\w+ from the store", log), log
    assert saved <= launches(log)[0]
    assert min(steps_told(log)) > saved


def test_docker_stop_lets_the_trainer_save_and_leave(box, quickstart):
    """
    Exit code 75 well within the grace period, with a checkpoint of the last step and nothing half-written.
    """
    quick = box(
        *quickstart(steps=100_000, pause=0.05).mounts, "--stop-timeout", "60", "--env", "RUNNER_STOP_TIMEOUT=60"
    )
    quick.run("--config", "/job/job.yaml")
    saved = int(quick.wait_for(COMMITTED)[1])

    began = time.monotonic()
    quick.stop()

    took_s = time.monotonic() - began
    log = quick.log()
    assert 75 == quick.wait(), log
    assert took_s < 45, log
    assert int(re.findall(COMMITTED, log)[-1]) > saved
    assert re.search(r"attempt interrupted at step (\d+)", log), log
    assert [] == quick.files("*/checkpoints/.tmp-*")
    assert len(quick.files("*/checkpoints/step-*/MANIFEST.json")) == len(quick.files("*/checkpoints/step-*[0-9a-f]"))
    assert "how long a last save takes is known after the first; docker stop waits 1m 00s (RUNNER_STOP_TIMEOUT)" in log
    assert re.search(
        r"a last save takes about \S+; docker stop waits 1m 00s \(RUNNER_STOP_TIMEOUT\): that is enough", log
    ), log


def test_a_container_that_starts_again_after_the_end_stops_the_server_again(box, small, rental):
    """
    The job concluded, and the provider did not hear it: the next life goes straight on with stopping, and trains nothing.
    """
    done = box(*small().mounts, "--network", "host")
    rental.fail({"operation": "stopServer", "kind": "status", "times": 1000})
    done.run("--config", "/job/job.yaml", env=rental.env)
    done.wait_for("is not stopped yet: HTTP 503")
    done.kill()
    first = done.log()
    rental.fail()

    done.start()

    assert 0 == done.wait(), done.log()
    second = done.log().removeprefix(first)
    assert "stopped" == rental.state()["state"]
    assert "this job is over already (succeeded): nothing is trained" in second
    assert [] == launches(second)
