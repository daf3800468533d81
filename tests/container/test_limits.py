"""Containers that are narrower than they should be: each works, or says in one line what is wrong."""

from __future__ import annotations

import json

import pytest

HOG = "import time\nheld = []\nwhile True:\n    held.append(bytearray(20_000_000))\n"


def test_without_a_network_and_with_little_shared_memory_it_trains(box, quickstart):
    """
    `--network none` with a file:// store, Docker's own 64 MiB of /dev/shm: both are said, with the flag, and cured.
    """
    alone = box(*quickstart().mounts, "--network", "none", "--shm-size", "64m")

    alone.run("--config", "/job/job.yaml")

    assert 0 == alone.wait(), alone.log()
    log = alone.log()
    assert "shared memory (/dev/shm) has 64.0 MiB" in log
    assert "--ipc=host or --shm-size=16g; going on with NCCL_SHM_DISABLE=1" in log
    assert "no network in this container (--network none)" in log
    assert "is in the store" in log


def test_enough_shared_memory_is_not_worth_a_word(box):
    """
    Nor is a network.
    """
    roomy = box("--shm-size", "2g", "--network", "bridge")

    roomy.run()

    assert 2 == roomy.wait()
    assert " container: " not in roomy.log()


def test_a_name_of_no_interface_is_taken_away(box, small):
    """
    NCCL would end with "no socket interface found"; without the variable it finds one itself.
    """
    typo = box(*small().mounts, "--env", "NCCL_SOCKET_IFNAME=eno7")

    typo.run("--config", "/job/job.yaml")

    assert 0 == typo.wait(), typo.log()
    assert "NCCL_SOCKET_IFNAME=eno7 names no network interface of this container" in typo.log()


def test_a_read_only_image_and_a_user_of_no_name_work_with_a_volume(box, quickstart):
    """
    `--read-only --user 1000:1000`: programs get a place for their temporary files and a home in the volume.
    """
    strict = box(*quickstart().mounts, "--read-only", "--user", "1000:1000")

    strict.run("--config", "/job/job.yaml")

    assert 0 == strict.wait(), strict.log()
    assert "/tmp cannot be written: TMPDIR is /workspace/.vramfarm/tmp" in strict.log()
    assert "the home folder cannot be written: HOME is /workspace/.vramfarm/home" in strict.log()


@pytest.mark.parametrize("flags", [("--read-only",), ("--user", "1000:1000")], ids=["read-only", "user"])
def test_a_workspace_that_cannot_be_written_is_said_in_one_line(box, small, tmp_path, flags):
    """
    With the folder and what to do; the job is not begun.
    """
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o755)
    code = small()
    mount = ("--volume", f"{closed}:/workspace:ro") if "--read-only" in flags else ("--volume", f"{closed}:/workspace")
    narrow = box(*code.mounts, *flags)
    narrow.options = (*code.mounts, *flags, *mount)

    narrow.run("--config", "/job/job.yaml")

    assert 3 == narrow.wait(), narrow.log()
    said = [line for line in narrow.log().splitlines() if "/workspace cannot be written" in line]
    assert 1 == len(said)
    assert "mount a volume there that this user may write (-v NAME:/workspace)" in said[0]
    assert "Traceback" not in narrow.log()


def test_preflight_sees_what_the_container_was_given(box, small, tmp_path):
    """
    Docker's own /dev/shm, `--memory`, `--ulimit nofile`, a volume that is mounted read-only: a finding each, and only
    the last one refuses.
    """
    closed = tmp_path / "closed"
    closed.mkdir()
    code = small(more="model: {parameters: 1e9}\n")
    limits = ("--shm-size", "64m", "--memory", "900m", "--ulimit", "nofile=1024:1024")
    narrow = box(*code.mounts, *limits)
    narrow.options = (*code.mounts, *limits, "--volume", f"{closed}:/workspace:ro")

    narrow.run("preflight", "--config", "/job/job.yaml", "--json")

    assert 3 == narrow.wait(), narrow.log()
    log = narrow.log()
    told = json.loads(log[log.index("{") :])
    found = {one["name"]: one for one in told["findings"]}
    assert ("warn", "shared memory (/dev/shm) has 64.0 MiB") == (
        found["shared_memory"]["severity"],
        found["shared_memory"]["message"][:37],
    )
    assert {"NCCL_SHM_DISABLE": "1"} == found["shared_memory"]["facts"]["env"]
    assert "(the container's limit): a save stages 14 GB in it, and does not fit" in found["memory"]["message"]
    assert "a process may open 1024 files" in found["limits"]["message"]
    assert ("refuse", "swap") == (found["disk"]["severity"], told["verdict"])
    assert "expected a folder that can be written, got: Read-only file system" in found["disk"]["message"]


def test_a_kill_for_want_of_memory_is_named_as_such(box, small):
    """
    `--memory`: the kernel kills the largest process; the run says so, with the limit, and gives up.
    """
    code = small(more="finish: {hold: 0s}\n")
    (code.folder / "fake_trainer.py").write_text(HOG)
    text = (code.folder / "job.yaml").read_text()
    code.write(text.replace("initial_delay: 1s", "initial_delay: 1s, max_restarts_without_progress: 1"))
    tight = box(*code.mounts, "--memory", "300m", "--memory-swap", "300m")

    tight.run("--config", "/job/job.yaml")

    assert 6 == tight.wait(), tight.log()
    assert "out of memory: the kernel killed a process; the container may have 0.3 GB: give it more" in tight.log()
