"""A script that knows nothing of us, and saves on SIGTERM: it is asked, waited for, and killed only then."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from runner.storage import journal
from runner.storage.checkpoints import CheckpointDir
from runner.storage.disk import Disk
from runner.supervise import process
from tests.farmhouse import wait_until
from vramfarm.protocol import Env

# Its save takes longer than what is left of an ended launcher may live.
TRAIN = """
import pathlib, signal, sys, time, zipfile
saves, asked = pathlib.Path(sys.argv[1]), []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
print("step 1", flush=True)
pathlib.Path("started").touch()
while not asked:
    time.sleep(0.05)
if sys.argv[2:] == ["stubborn"]:
    time.sleep(600)
time.sleep(3)
with zipfile.ZipFile(saves / "model_7.pt.part", "w") as file:
    file.writestr("data.pkl", b"state")
(saves / "model_7.pt.part").rename(saves / "model_7.pt")
"""


@pytest.fixture
def start(tmp_path):
    """Start a run of a command, and wait until it trains."""
    (tmp_path / "train.py").write_text(TRAIN)
    started: list[subprocess.Popen[str]] = []

    def run(script: str, **fields: object) -> subprocess.Popen[str]:
        (tmp_path / "train.sh").write_text(script.format(python=sys.executable))
        job = {
            "name": "plain",
            "launcher": "command",
            "command": "bash train.sh {checkpoint_dir} {resume_args}",
            "framework": "torch_save",
            "cpu_processes": 1,
            "preflight": {"comm_test": False},
            "provider": {"kind": "none"},
            **fields,
        }
        (tmp_path / "job.yaml").write_text(json.dumps(job))
        command = (sys.executable, "-I", "-m", "runner", "run", "--config", "job.yaml")
        env = {**os.environ, "VRAMFARM_WORKSPACE": str(tmp_path)}
        started.append(
            subprocess.Popen(
                command, env=env, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
            )
        )
        wait_until(lambda: (tmp_path / "started").exists() or started[-1].poll() is not None, 60)
        assert None is started[-1].poll(), started[-1].stderr.read()
        return started[-1]

    yield run
    for one in started:
        one.kill()
        one.wait()
    process.end_all(lambda: process.find(Env.RUN, str(tmp_path / "plain")))


@pytest.mark.parametrize(
    "script",
    [
        pytest.param('{python} train.py "$1"\ntouch went-on\n', id="a shell that waits for it"),
        pytest.param('trap "touch left" EXIT\n{python} train.py "$1" & wait\n', id="a shell that leaves it alone"),
        pytest.param('setsid -w {python} train.py "$1" | cat\n', id="in a session of its own, behind a pipe"),
    ],
)
def test_a_script_that_saves_on_sigterm_is_waited_for(start, tmp_path: Path, script):
    """
    What it saves then is committed before the boot ends, though nothing of it says that it is a rank.
    """
    run = start(script)

    run.terminate()
    log = run.communicate(timeout=90)[1]

    (attempt,) = journal.read(tmp_path / "plain/journal.jsonl").attempts
    kept = [checkpoint.ref.step for checkpoint in CheckpointDir(tmp_path / "plain/checkpoints", Disk()).committed()]
    assert (75, "interrupted", "", [7]) == (run.returncode, attempt.ending, attempt.reason, kept), log
    assert zipfile.is_zipfile(tmp_path / "plain/saves/model_7.pt")
    assert () == process.find(Env.RUN, str(tmp_path / "plain"))


def test_a_script_that_does_not_leave_is_killed_after_the_grace_period(start, tmp_path: Path):
    """
    By SIGKILL, and nothing of it stays; here the operator stops the run.
    """
    run = start('{python} train.py "$1" stubborn\n', restart={"grace_period": "3s"})

    (tmp_path / "plain" / "stop").touch()
    log = run.communicate(timeout=90)[1]

    assert "asked to stop: it did not save and leave in 3 s" in log
    assert 8 == run.returncode, log
    assert () == process.find(Env.RUN, str(tmp_path / "plain"))
