"""What is in the image, what is not, and what it may stand on."""

from __future__ import annotations

import json
import subprocess

import pytest

from tests.container.engine import PROJECT, build, docker, engine

OTHERS = {
    "python 3.10": "FROM python:3.10-slim-bookworm\n",
    "no python": "FROM debian:bookworm-slim\n"
    "RUN cd /usr/lib/x86_64-linux-gnu && rm -f libssl* libcrypto* libffi* libsqlite3* libexpat* libbz2* libuuid* libreadline*\n",
}
NO_TORCH = "RUN d=$(python3 -c 'import site; print(site.getsitepackages()[0])') && mkdir $d/torch && touch $d/torch/__init__.py\n"


def size(image: str) -> int:
    with engine() as client:
        return int(client.images.get(image).attrs["Size"])


def test_the_image_adds_less_than_400_mb(image, torch_base):
    """
    To a base that has torch.
    """
    assert 400_000_000 > size(image) - size(torch_base)


def leftovers(image: str) -> set[str]:
    script = (
        "find /root/.cache /var/lib/apt/lists /var/cache/apt /src /tmp /wheelhouse -type f; find / -xdev -name '*.whl'"
    )
    return set(docker("run", "--rm", "--entrypoint", "sh", image, "-c", f"{script} 2>/dev/null; true").split())


def test_the_history_has_no_secret_and_the_image_no_cache(image, torch_base):
    """
    Nothing is passed in that could be one, and neither pip nor apt leaves anything that the base did not have.
    """
    with engine() as client:
        history = "\n".join(layer["CreatedBy"] for layer in client.images.get(image).history()).lower()

    assert "opt/runner" in history
    assert [] == [word for word in ("token", "password", "secret", "api_key", "aws_", "credential") if word in history]
    assert set() == leftovers(image) - leftovers(torch_base)


def test_the_supervisor_needs_no_newer_glibc_than_ubuntu_22_04_has(image):
    """
    2.35: that is what the default base image stands on.
    """
    script = (
        "import pathlib, re; "
        "files = [f for f in pathlib.Path('/opt/runner').rglob('*') if '.so' in f.name or f.parent.name == 'bin']; "
        "print(max(int(v) for f in files if f.is_file() for v in re.findall(rb'\\0GLIBC_2[.](\\d+)', f.read_bytes())))"
    )

    needed = docker("run", "--rm", "--entrypoint", "/opt/runner/bin/python", image, "-I", "-c", script)

    assert 30 < int(needed) <= 35


def test_stacks_of_what_hangs_can_be_taken_without_a_capability(image):
    """
    py-spy, of a process of the same user, as the image starts by default; and nothing but the guardian judges its health.
    """
    script = "/opt/runner/bin/python -c 'import time; time.sleep(60)' & sleep 2; /opt/runner/bin/py-spy dump --pid $!"

    stacks = docker("run", "--rm", "--entrypoint", "bash", image, "-c", script)

    assert "(idle)" in stacks
    with engine() as client:
        config = client.images.get(image).attrs["Config"]
    assert ("SIGTERM", ["NONE"]) == (config["StopSignal"], config["Healthcheck"]["Test"])
    assert "Apache-2.0" == config["Labels"]["org.opencontainers.image.licenses"]


@pytest.mark.parametrize(
    ("missing", "said"),
    [("/usr/bin/flock", "the base image has no flock: expected Debian"), ("/usr/bin/apt-get", "no apt-get: put")],
)
def test_a_base_that_will_not_do_ends_the_build_with_a_line(missing, said):
    """
    And not the first start of a server that is paid for.
    """
    base = build("-", dockerfile=f"FROM debian:bookworm-slim\nRUN rm {missing}\n")

    with pytest.raises(AssertionError, match=said):
        build("--build-arg", f"BASE_IMAGE={base}", str(PROJECT))


def test_tini_is_pid_1_and_the_entrypoint_takes_any_command(image, code):
    """
    `docker run IMAGE validate job.yaml`; nothing in the user's folders or environment breaks the supervisor's Python.
    """
    code.write("name: a\ncommand: train.py\n")
    (code.folder / "json.py").write_text("raise RuntimeError('not the real one')")
    hostile = (
        "--env",
        "PYTHONPATH=/job",
        "--env",
        "PYTHONHOME=/nowhere",
        "--env",
        "LD_LIBRARY_PATH=/job",
        "--workdir",
        "/job",
    )
    entrypoint = json.loads(docker("inspect", "--format", "{{json .Config.Entrypoint}}", image))

    said = docker("run", "--rm", *code.mounts, *hostile, image, "validate", "/job/job.yaml")

    assert ["/opt/runner/bin/tini", "--", "/entrypoint.sh"] == entrypoint
    assert "torchrun train.py" in said


def test_a_command_line_that_is_not_understood_ends_at_once(box):
    """
    Exit code 2, once: it is not tried again.
    """
    typo = box()

    typo.run("--cofnig", "/job/job.yaml")

    assert 2 == typo.wait(30), typo.log()
    assert 1 == typo.log().count("unrecognized arguments: --cofnig")


@pytest.mark.parametrize("base", OTHERS)
def test_the_supervisor_brings_its_own_python(box, small, base, engine):
    """
    It does not care which one the base image has, or whether there is one; the job runs with the base's.
    """
    python = "python" in base.split()[0]
    other = build("-", dockerfile=OTHERS[base] + (NO_TORCH if python else ""))
    packages = () if python else ("--build-arg", "DEBIAN_PACKAGES=")
    made = build("--build-arg", f"BASE_IMAGE={other}", *packages, str(PROJECT))

    there = box(*small(steps=10).mounts, image=made)
    there.run("--config", "/job/job.yaml")

    if python:
        assert 0 == there.wait(), there.log()
        assert "training with /usr/local/bin/python3" in there.log()
    else:
        assert 2 == there.wait(), there.log()
        assert "python: auto: expected torch, found none" in there.log()
    assert "3.11" in docker("run", "--rm", "--entrypoint", "/opt/runner/bin/python", made, "-I", "--version")


def test_an_image_of_ones_own_takes_the_job_as_text(image, code, small):
    """
    `FROM vramfarm/runner` and `COPY`: nothing is mounted; the job comes in RUNNER_JOB, or on standard input.
    """
    text = (small(steps=10, more="finish: {hold: 0s}\n").folder / "job.yaml").read_text().replace("/job", "/code")
    (code.folder / "Dockerfile").write_text(f"FROM {image}\nCOPY fake_trainer.py /code/\n")
    mine = build(str(code.folder))

    by_variable = docker("run", "--rm", "--env", f"RUNNER_JOB={text}", mine, check=False)
    by_input = subprocess.run(
        ["docker", "run", "--rm", "--interactive", mine, "--config", "-"],
        input=text,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )

    assert "" == by_variable
    assert 0 == by_input.returncode, by_input.stderr
    assert "conclude succeeded" in by_input.stderr
