"""Preflight as a user meets it: the command, and the first lines of a run. The driver is a program that answers as one."""

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from runner import preflight
from runner.facts import Finding, Server, Severity
from runner.job import Job
from runner.preflight import Mission, look_at_code, look_at_machine
from runner.storage.checkpoints import CheckpointDir
from runner.storage.disk import Disk
from runner.storage.offsite.file import FileStore
from tests.probes.test_smi import document
from tests.storage.examples import commit

TRAINER = Path(__file__).parent / "fake_trainer.py"
ROWS = "0, GPU-0a, NVIDIA H100 80GB HBM3, 81559, 550.54.15\\n1, GPU-1a, NVIDIA H100 80GB HBM3, 81559, 550.54.15"
TOPO = "\\tGPU0\\tGPU1\\tCPU Affinity\\nGPU0\\t X \\tNV18\\t0-31\\nGPU1\\tNV18\\t X \\t0-31\\n"
JOB = """
name: small
command: {python} fake_trainer.py --steps 5 --step-time 0.01
launcher: command
cpu_processes: 1
preflight: {{comm_test: false}}
checkpoint: {{save_interval: 1s}}
"""


@pytest.fixture
def driver(tmp_path):
    """A PATH on which nvidia-smi reports two cards."""

    def install(*cards):
        folder = tmp_path / "bin"
        folder.mkdir()
        (folder / "report.xml").write_text(document(*cards))
        program = folder / "nvidia-smi"
        program.write_text(
            f'#!/bin/sh\ncase "$*" in\n*-x*) cat {folder}/report.xml ;;\n'
            f'*p2p*) printf "\\tGPU0\\tGPU1\\nGPU0\\tX\\tOK\\nGPU1\\tOK\\tX\\n" ;;\n*topo*) printf "{TOPO}" ;;\n*query-gpu=index,uuid*) printf "{ROWS}\\n" ;;\n*) exit 2 ;;\nesac\n'
        )
        program.chmod(0o755)
        return f"{folder}:{os.environ['PATH']}"

    return install


@pytest.fixture
def job(tmp_path):
    shutil.copy(TRAINER, tmp_path)
    (tmp_path / "job.yaml").write_text(JOB.format(python=sys.executable))
    return tmp_path / "job.yaml"


@pytest.fixture
def cli(tmp_path):
    """As the shared one, with more patience: a whole run on a machine that does much else."""

    def run(*arguments, **env):
        return subprocess.run(
            [sys.executable, "-m", "runner", *arguments],
            capture_output=True,
            text=True,
            timeout=150,
            cwd=tmp_path,
            check=False,
            env={**os.environ, "VRAMFARM_WORKSPACE": str(tmp_path), **env},
        )

    return run


def mission(tmp_path, script="", **fields):
    (tmp_path / "train.py").write_text(script)
    job = Job.model_validate({"command": "train.py", "checkpoint": {"dir": f"{tmp_path}/run/checkpoints"}} | fields)
    return Mission(
        job=job,
        python=sys.executable,
        num_procs=1,
        num_cards=0,
        run_dir=tmp_path / "run",
        workdir=tmp_path,
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path)},
    )


def test_a_plain_machine_is_go(cli, job):
    """
    Every check a line, what is always set, the verdict last; exit code 0.
    """
    done = cli("preflight", "--config", "job.yaml")

    assert 0 == done.returncode, done.stderr
    lines = done.stdout.splitlines()
    assert "verdict: go" == lines[-1] or lines[-1].startswith("  ")
    assert any(line.startswith("ok       disk") for line in lines), done.stdout
    assert any("NCCL_DEBUG=WARN" in line and "unless you set them" in line for line in lines)


def test_a_fabric_that_is_down_is_a_swap(cli, job, driver):
    """
    Exit code 3, for scripts too; the reason says what to do.
    """
    done = cli("preflight", "--config", "job.yaml", "--json", PATH=driver({}, {"fabric": "Not Started"}))

    told = json.loads(done.stdout)
    assert (3, "swap") == (done.returncode, told["verdict"])
    assert ["1 of 2 cards are not ready in the NVLink fabric"] == [reason[:47] for reason in told["reasons"]]
    assert "swap this machine and tell support" in told["reasons"][0]


def test_links_are_named_with_the_speed_to_expect(cli, job, driver):
    """
    The same judgements as `explain`.
    """
    done = cli("preflight", "--config", "job.yaml", "--json", PATH=driver({}, {"width": 8}))

    told = {(one["name"], one["severity"]): one["message"] for one in json.loads(done.stdout)["findings"]}
    assert "every pair is linked by NVLink, NV18 at the least" in told["links", "ok"]
    assert "card 1: its PCIe link has 8 lanes of 16" == told["cards.speed", "warn"]
    assert 0 == done.returncode


def test_a_run_on_a_machine_to_be_swapped_ends_at_once(cli, job, driver, tmp_path):
    """
    Refused with exit code 3 before anything is launched; status tells it, as a script would read it.
    """
    done = cli("run", "--config", "job.yaml", PATH=driver({}, {"failed": "Yes"}))

    assert 3 == done.returncode, done.stderr
    assert "preflight: swap this machine: card 1: a broken row of its memory could not be replaced" in done.stderr
    verdict = json.loads((tmp_path / "small/status.json").read_text())["verdict"]
    assert "swap" == verdict["verdict"]
    assert not (tmp_path / "small/logs/attempt-0001").exists()
    assert "machine refused: card 1" in cli("status", "small").stdout


def test_a_run_says_its_verdict_in_one_line(cli, job, tmp_path):
    """
    And keeps it in status.json, where the store has it too.
    """
    done = cli("run", "--config", "job.yaml")

    assert 0 == done.returncode, done.stderr
    assert 1 == done.stderr.count("preflight: go"), done.stderr
    assert json.loads((tmp_path / "small/status.json").read_text())["verdict"]["verdict"] in {"go", "changes"}


# ------------------------------------------------------------------------------- the checks


def test_a_check_that_hangs_and_one_that_fails_are_findings():
    """
    The others are told all the same, in their order.
    """
    checks = {
        "slow": lambda: time.sleep(600),
        "broken": lambda: 1 / 0,
        "well": lambda: [Finding(name="well", severity=Severity.OK, message="fine")],
        "store": lambda: 1 / 0,
    }

    found = preflight._all_at_once(checks, lambda *_: None, limit_s=4.0)

    assert ["time_limit", "broken", "well", "store"] == [one.name for one in found]
    assert [Severity.WARN, Severity.WARN, Severity.OK, Severity.REFUSE] == [one.severity for one in found]
    assert {"exit_code": 4} == found[-1].facts  # a run would fail at it later
    assert "slow: no answer within 4 s" == found[0].message


def test_the_disk_and_the_store_are_really_written(tmp_path):
    """
    And nothing is left in either.
    """
    store = tmp_path / "store"
    store.mkdir()
    told = look_at_machine(mission(tmp_path, offload={"to": f"file://{store}"}))

    severities = {one.name: one.severity for one in told}
    assert Severity.OK is severities["disk"]
    assert Severity.OK is severities["store"], told
    assert [] == [path for path in store.rglob("*") if path.is_file()]
    assert [] == [path for path in (tmp_path / "run").rglob("*") if path.is_file()]


def test_what_is_tried_of_a_store_fits_the_bandwidth_that_it_may_take(tmp_path, monkeypatch):
    """
    Eight megabytes at a low limit take longer than the check may: it would say that the store does not answer.
    """
    sent, put = [], FileStore.put

    def watched(self, key, content):
        sent.append(len(content))
        put(self, key, content)

    monkeypatch.setattr(FileStore, "put", watched)
    offload = {"to": f"file://{tmp_path}/store", "max_bandwidth": "400KB"}

    trial = preflight._try_store(mission(tmp_path, offload=offload))

    assert ([100_000] * 4, True) == (sent, 0 < trial.rate <= 400_000)


def test_a_store_on_the_disk_that_goes_with_the_server_is_refused(tmp_path):
    """
    A mount point without its disk looks like a store. A simulated server's disk is a folder, a container's volumes
    stay, and whoever has a network volume says so.
    """
    (tmp_path / "mnt").mkdir()
    place = f"file://{tmp_path}/mnt/runs"
    rented = replace(mission(tmp_path, offload={"to": place}), server=Server(provider="command", id="vm"))
    loud = replace(rented, job=mission(tmp_path, offload={"to": place, "outlives_server": True}).job)
    keeps = mission(tmp_path, offload={"to": place}, finish={"on_success": "keep", "on_failure": "keep"}).job

    (refused,) = preflight._store(rented)

    assert (Severity.REFUSE, {"exit_code": 4}) == (refused.severity, refused.facts)
    assert "is on the disk of this run" in refused.message
    assert not (tmp_path / "mnt" / "runs").exists()
    for fine in (
        loud,
        replace(rented, job=keeps),
        replace(rented, env={**rented.env, "VRAMFARM_API_URL": "http://127.0.0.1:9/v1"}),
        replace(rented, server=Server(provider="docker", id="box")),
        replace(rented, job=mission(tmp_path, offload={"to": "file:///dev/shm/vramfarm-test"}).job),
    ):
        assert not preflight.judge_store_place(
            fine.job,
            fine.server,
            shares_disk=preflight._shares_disk(fine),
            is_local=preflight._is_local(fine.env),
        )


def test_preflight_and_run_know_the_server_that_job_yaml_names(cli, job, tmp_path):
    """
    A program of the user's stops it: nothing in the environment names it, and its disk goes with it all the same.
    """
    (tmp_path / "mnt").mkdir()
    stop = f"[touch, {tmp_path}/stopped]"
    status = f"[sh, -c, 'test -e {tmp_path}/stopped && echo gone || echo running']"
    job.write_text(
        f"{job.read_text()}offload: {{to: 'file://{tmp_path}/mnt/runs'}}\n"
        f"provider: {{kind: command, stop_command: {stop}, status_command: {status}}}\nfinish: {{hold: 0s}}\n"
    )

    done = cli("preflight", "--config", "job.yaml")
    run = cli("run", "--config", "job.yaml")

    assert (4, 4) == (done.returncode, run.returncode), done.stdout + run.stderr
    assert "is on the disk of this run, which goes with the server" in done.stdout
    assert "is on the disk of this run, which goes with the server" in run.stderr


def test_two_processes_talk_before_the_job_does(tmp_path):
    """
    Over gloo where there is no card; the test is left out where job.yaml says so.
    """
    two = replace(mission(tmp_path), num_procs=2)

    told = {one.name: one for one in look_at_machine(two)}

    assert told["comm"].message.startswith("2 processes talk, "), told["comm"]
    assert "comm" not in {one.name for one in look_at_machine(mission(tmp_path, preflight={"comm_test": False}))}


def test_a_folder_that_cannot_be_written_refuses(tmp_path):
    """
    Nothing can be saved there.
    """
    (tmp_path / "run").write_text("a file")

    told = {one.name: one for one in look_at_machine(mission(tmp_path))}

    assert Severity.REFUSE is told["disk"].severity
    assert "expected a folder that can be written" in told["disk"].message


def test_a_store_that_would_refuse_the_run_is_said_by_preflight(cli, job):
    """
    Not the machine's fault: the verdict is that of the job, with the cure, and the exit code is that of `run`.
    """
    job.write_text(job.read_text() + "offload: {to: 'file:///sys/vramfarm-store'}\n")  # nobody can write there

    done = cli("preflight", "--config", "job.yaml")
    told = json.loads(cli("preflight", "--config", "job.yaml", "--json").stdout)
    run = cli("run", "--config", "job.yaml")

    assert (4, 4) == (done.returncode, run.returncode), done.stderr + run.stderr
    assert "verdict: this job cannot run: file:///sys/vramfarm-store" in done.stdout
    assert "refuse" == told["verdict"]
    assert told["reasons"][0].startswith("file:///sys/vramfarm-store")
    assert "; " in told["reasons"][0], "no cure"


def test_a_store_that_does_not_answer_now_refuses_nothing(tmp_path):
    """
    It may be back when the job starts, and a run waits for it.
    """
    away = mission(tmp_path, offload={"to": "s3://bucket/runs", "endpoint": "http://127.0.0.1:9"})
    env = {**away.env, "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}

    told = preflight._caught("store", lambda: preflight._store(replace(away, env=env)))

    assert [Severity.WARN] == [one.severity for one in told], told


@pytest.mark.parametrize(("has_work", "expected"), [(False, Severity.REFUSE), (True, Severity.WARN)])
def test_a_store_that_may_be_mended_refuses_no_run_that_has_work_here(tmp_path, has_work, expected):
    """
    A later life trains on from its checkpoint: nobody may be there to mend the store at once.
    """
    unmounted = mission(tmp_path, offload={"to": f"file://{tmp_path}/no-disk/store"})
    if has_work:
        (tmp_path / "run" / "checkpoints").mkdir(parents=True)
        commit(CheckpointDir(tmp_path / "run" / "checkpoints", Disk()))

    told = preflight._caught("store", lambda: preflight._store(unmounted))

    assert [("store", expected)] == [(one.name, one.severity) for one in told], told


IMPORTS = {
    "there": ("import json, torch\nfrom vramfarm import Checkpointer\n", None),
    "missing": ("import os\nimport flash_attn_none\n", "flash_attn_none"),
    "optional": ("try:\n    import flash_attn_none\nexcept ImportError:\n    pass\n", None),
    "found by a moved path": ("import sys\nsys.path.append('x')\nimport none_such\n", None),
    "beside the script": ("import helper\n", None),
    "no python": ("import json\ndef\n", "SyntaxError"),
}


@pytest.mark.parametrize(("script", "words"), IMPORTS.values(), ids=IMPORTS)
def test_imports_are_looked_for_not_made(tmp_path, script, words):
    """
    As the training interpreter would find them.
    """
    (tmp_path / "helper.py").write_text("raise SystemExit('imported')")

    odd = [one.message for one in look_at_code(mission(tmp_path, script)) if one.severity is not Severity.OK]

    assert (words is not None) == bool(odd), odd
    assert (words or "") in "".join(odd)


def test_a_script_and_data_that_are_not_there_are_named(tmp_path):
    """
    Outputs need not be there.
    """
    asked = mission(tmp_path, command="train.py --train-data /none/a --data_dir=/none/b --output /none/c --steps 5")
    (tmp_path / "train.py").unlink()

    odd = [one.message for one in look_at_code(asked) if one.severity is Severity.WARN]

    assert [f"{path} is named in the command, and is not there" for path in ("train.py", "/none/a", "/none/b")] == odd


def test_data_that_is_on_its_way_is_not_missed(tmp_path):
    """
    Imports are looked for while `data` is still coming in.
    """
    asked = mission(
        tmp_path,
        command="train.py --train-data /none/corpus/train --eval-data /none/corpus2",
        data=[{"from": "s3://bucket/corpus", "to": "/none/corpus"}],
    )

    odd = [one.message for one in look_at_code(asked) if one.severity is Severity.WARN]

    assert ["/none/corpus2 is named in the command, and is not there"] == odd


def test_a_fabric_that_is_being_joined_is_asked_again(tmp_path, driver):
    """
    A machine that has only just started is not thrown away.
    """
    path = driver({}, {"fabric": "In Progress"})
    folder = Path(path.partition(":")[0])
    (folder / "ready.xml").write_text(document({}, {}))
    program = folder / "nvidia-smi"
    program.write_text(
        program.read_text().replace(
            "*-x*)", f"*-x*) test -e {folder}/asked && cp {folder}/ready.xml {folder}/report.xml; touch {folder}/asked;"
        )
    )

    report = preflight._settled(replace(mission(tmp_path), num_cards=2, smi=str(program)))

    assert ["Completed", "Completed"] == [card.fabric.state for card in report.cards]


def test_a_file_that_hides_a_module_is_named(tmp_path):
    """
    The script's folder comes first when it is run.
    """
    (tmp_path / "torch.py").touch()

    (one,) = look_at_code(mission(tmp_path, "import torch\n"))

    assert f"{tmp_path}/torch.py hides the module of that name" == one.message
