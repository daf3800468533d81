"""A whole job that came out of a bucket and goes back into it: real processes, a real S3 server."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import time
import uuid
from datetime import datetime
from pathlib import Path

import pytest

from tests.s3server import BUCKET, SECRET_KEY

TRAINER = Path(__file__).parents[1] / "fake_trainer.py"
JOB = """
name: tiny
command: fake_trainer.py --steps 60 --step-time 0.02 --bytes 100000
launcher: command
cpu_processes: 1
source: {{archive: "{at}/code.tar.gz"}}
setup: ["echo set-up > set-up.txt"]
checkpoint: {{save_interval: 1s}}
offload: {{to: "{at}/runs", endpoint: "{endpoint}", max_bandwidth: 100MB}}
finish: {{on_success: stop}}
"""


@pytest.fixture
def cloud(s3server, tmp_path):
    """(address of a prefix with job.yaml and the code, environment to reach it)."""
    at = f"s3://{BUCKET}/{uuid.uuid4().hex}"
    prefix = at.removeprefix(f"s3://{BUCKET}/")
    code = tmp_path / "code"
    code.mkdir()
    shutil.copy(TRAINER, code)
    (code / "fake_trainer.py").chmod(0o755)
    with tarfile.open(tmp_path / "code.tar.gz", "w:gz") as archive:
        archive.add(code / "fake_trainer.py", "fake_trainer.py")
    command = JOB.format(at=at, endpoint=s3server.endpoint).replace(
        "command: fake_trainer.py", f"command: {sys.executable} fake_trainer.py"
    )
    client = s3server.client()
    client.put_object(Bucket=BUCKET, Key=f"{prefix}/code.tar.gz", Body=(tmp_path / "code.tar.gz").read_bytes())
    client.put_object(Bucket=BUCKET, Key=f"{prefix}/job.yaml", Body=command.encode())
    env = {**os.environ, **s3server.env, "AWS_ENDPOINT_URL": s3server.endpoint}
    return at, {**env, "VRAMFARM_WORKSPACE": str(tmp_path / "workspace")}


def runner(env, *args):
    argv = [sys.executable, "-m", "runner", *args]
    return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=120, check=False, cwd="/")


def test_a_job_from_the_bucket_ends_in_the_bucket(cloud, tmp_path):
    """
    job.yaml and code by s3://, set-up done, checkpoints verified there; on an empty disk nothing is trained twice.
    """
    at, env = cloud

    first = runner(env, "run", "--config", f"{at}/job.yaml")
    assert 0 == first.returncode, first.stderr
    shutil.rmtree(tmp_path / "workspace")
    again = runner(env, "run", "--config", f"{at}/job.yaml")
    status = json.loads(runner(env, "status", f"{at}/runs/tiny", "--json").stdout)
    verified = runner(env, "checkpoints", "verify", f"{at}/runs/tiny")

    assert (0, True) == (again.returncode, "launch" not in again.stderr), again.stderr
    assert ("succeeded", 60) == (status["outcome"], status["step"])
    assert 0 == verified.returncode, verified.stderr


def test_data_comes_in_and_outputs_go_out(cloud, s3server, tmp_path):
    """
    The corpus is here before the job is launched; what it wrote beside its checkpoints is in the bucket, all of it.
    With a key of the runner's own, of which the command has nothing.
    """
    at, env = cloud
    env = {f"VRAMFARM_{name}" if name in s3server.env else name: value for name, value in env.items()}
    client, prefix = s3server.client(), at.removeprefix(f"s3://{BUCKET}/")
    job = client.get_object(Bucket=BUCKET, Key=f"{prefix}/job.yaml")["Body"].read().decode()
    job = job.replace("setup:", 'data: [{from: "%s/corpus", to: "{workspace}/corpus"}]\nsetup:' % at)  # noqa: UP031
    job = job.replace(
        "command: ",
        "command: sh -c 'cp {workspace}/corpus/words {workspace}/board/copy && env > {workspace}/board/env && exec \"$@\"' sh ",
    )
    job = job.replace("echo set-up", "mkdir -p {workspace}/board && echo set-up") + 'outputs: ["{workspace}/board"]\n'
    client.put_object(Bucket=BUCKET, Key=f"{prefix}/job.yaml", Body=job.encode())
    client.put_object(Bucket=BUCKET, Key=f"{prefix}/corpus/words", Body=b"words")

    done = runner(env, "run", "--config", f"{at}/job.yaml")

    assert 0 == done.returncode, done.stderr
    assert b"words" == (tmp_path / "workspace" / "corpus" / "words").read_bytes()
    copied = client.get_object(Bucket=BUCKET, Key=f"{prefix}/runs/tiny/outputs/board/copy")["Body"].read()
    assert b"words" == copied
    assert SECRET_KEY not in (tmp_path / "workspace" / "board" / "env").read_text()
    assert "the data is in place: 1 files" in done.stderr


def test_what_is_not_in_the_bucket_is_said(cloud):
    """
    One line: where, expected, found.
    """
    at, env = cloud

    done = runner(env, "run", "--config", f"{at}/other.yaml")

    assert 2 == done.returncode
    assert f"error: {at}/other.yaml: expected an object, found none" in done.stderr


def test_a_store_that_is_away_at_the_start_is_waited_for_and_until_when_is_said(tmp_path):
    """
    In one line, the same in the log, the status and the journal; a SIGTERM ends it before, and nothing was trained.
    """
    with socket.socket() as nobody:  # bound, and nobody listens
        nobody.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        (tmp_path / "job.yaml").write_text(
            "name: tiny\ncommand: t.py\nlauncher: command\ncpu_processes: 1\n"
            f"offload: {{to: 's3://b/runs', endpoint: '{endpoint}'}}\n"
        )
        env = os.environ | {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": SECRET_KEY}
        env |= {"VRAMFARM_WORKSPACE": str(tmp_path), "PYTHONUNBUFFERED": "1"}
        argv = [sys.executable, "-m", "runner", "run", "--config", str(tmp_path / "job.yaml")]
        with subprocess.Popen(argv, env=env, stderr=subprocess.PIPE, text=True, cwd="/") as run:
            line = next(line for line in run.stderr if "lease of the run failed" in line)
            status = wait_for(lambda: json.loads(runner(env, "status", "tiny", "--json").stdout)["waiting"])
            events = runner(env, "events", "tiny", "--json").stdout
            run.send_signal(signal.SIGTERM)
            log = run.stderr.read()

    (waiting,) = [event for event in map(json.loads, events.splitlines()) if event["event"] == "waiting"]
    stamp = datetime.fromisoformat(waiting["until"])
    assert 75 == run.returncode
    assert waiting["what"] in line
    assert waiting["until"] == status["until"]
    assert f"until {stamp:%H:%M} UTC at the latest, and nothing is trained before; then exit 4" in line
    assert "launch" not in log


def wait_for(look, timeout_s=90):
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if found := look():
            return found
        time.sleep(0.2)
    raise AssertionError("it did not come")
