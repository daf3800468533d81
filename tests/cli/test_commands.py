"""The command line as a process: exit codes, what goes to which stream, what a run's folder says."""

import fcntl
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from runner.cli.events import describe as describe_event
from runner.cli.load import load_job
from runner.cli.loop import identity
from runner.cli.main import COMMANDS
from runner.cli.planned import refuse_planned
from runner.cli.shelves import Candidate, first_whole
from runner.cli.status import describe
from runner.job import Job
from runner.storage.offsite import OffsiteError
from vramfarm.checksum import crc32
from vramfarm.protocol import MANIFEST, Env, Manifest, Ref, Shard, dump_manifest, shard_name

JOB = "name: llama\ncommand: train.py --lr 2e-5\noffload: {to: s3://bucket/runs}\nlimits: {max_duration: 12h}\n"


def write_run(folder: Path, **fields) -> Path:
    """A run folder with the status of a run that goes well."""
    status = {
        "job": folder.name,
        "phase": "RUNNING",
        "step": 500,
        "max_steps": 1000,
        "loss": 2.34567,
        "steps_per_s": 2.0,
        "eta_s": 250.0,
        "attempt": 1,
        "verdict": None,
        "store": "s3://bucket/runs/llama",
        "checkpoints": [
            {"step": 400, "id": "0123abcd", "lineage": 1, "local": True, "offsite": True, "verified": True},
            {"step": 500, "id": "4567cdef", "lineage": 1, "local": True, "offsite": False, "verified": False},
        ],
        "deadline_at": (datetime.now(UTC) + timedelta(hours=2, seconds=30)).isoformat(),
        "cost": "1.20 EUR",
        "server": "m-1",
        "outcome": None,
        "exit_code": None,
        "message": "checkpoint step-00000500-4567cdef committed: 12.4 GB in 9.1s",
        "updated_at": datetime.now(UTC).isoformat(),
    }
    folder.mkdir(parents=True)
    (folder / "status.json").write_text(json.dumps(status | fields))
    (folder / "lock").touch()
    return folder


def write_checkpoint(root: Path, step: int, content: bytes) -> Path:
    """A committed checkpoint of one shard."""
    shard = Shard(shard_name(0, 1), len(content), (crc32(content),))
    written_at = datetime.now(UTC).isoformat()
    manifest = Manifest("llama", 1, step, "0123abcd", 1, 1, written_at, "crc32", (shard,))
    folder = root / manifest.ref.name
    folder.mkdir(parents=True)
    (folder / shard.path).write_bytes(content)
    (folder / "MANIFEST.json").write_bytes(dump_manifest(manifest))
    return folder


@pytest.fixture
def held_lock():
    """Hold the lock of a run as its runner does."""
    files = []

    def hold(run_dir: Path) -> None:
        files.append((run_dir / "lock").open("a"))
        fcntl.flock(files[-1], fcntl.LOCK_EX)

    yield hold
    for file in files:
        file.close()


# ------------------------------------------------------------------------------ all commands


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(cli, name):
    """
    `COMMAND --help` is data on standard output.
    """
    done = cli(name, "--help")

    assert (0, "") == (done.returncode, done.stderr)
    assert done.stdout.startswith("usage: ")


def test_help_lists_every_command(cli):
    """
    Nobody has to read the documentation to find a command.
    """
    done = cli("--help")

    assert [] == [name for name in COMMANDS if f"\n  {name} " not in done.stdout]


def test_version(cli):
    """
    The version is one line of data.
    """
    assert "vramfarm-runner 0.1.0\n" == cli("--version").stdout


@pytest.mark.parametrize("arguments", [["frob"], ["validate", "--frob"], ["status", "a", "b"], ["--frob"]])
def test_wrong_usage_is_2(cli, arguments):
    """
    A command line that cannot be read ends with 2 before anything is done.
    """
    done = cli(*arguments)

    assert (2, "") == (done.returncode, done.stdout)
    assert "error: " in done.stderr


@pytest.mark.parametrize("name", ["validate", "plan", "preflight", "rehearse", "submit", "launch"])
@pytest.mark.parametrize("given", [["nope.yaml"], ["--config", "nope.yaml"]], ids=["JOB", "--config JOB"])
def test_a_job_is_named_in_either_way_and_what_is_there_is_told(tmp_path, cli, name, given):
    """
    Nobody has to remember which command takes it how, nor how the file was called.
    """
    (tmp_path / "job.yaml").touch()

    done = cli(name, *given)

    assert (2, "") == (done.returncode, done.stdout)
    assert [
        "error: nope.yaml: cannot be read: no such file or directory",
        "hint: is the path right (here: job.yaml)? in a container, mount its folder first",
    ] == done.stderr.splitlines()


def test_two_jobs_are_one_too_many(cli):
    """
    Not one of them in silence.
    """
    done = cli("validate", "a.yaml", "--config", "b.yaml")

    assert (2, "error: expected one job, found two: a.yaml and b.yaml\n") == (done.returncode, done.stderr)


def test_a_mistyped_command_is_answered_with_the_one_that_is_meant(cli):
    """
    One name, not eighteen.
    """
    assert cli("stauts").stderr.endswith("stauts: no such command; did you mean status?\n")


def test_a_terminal_that_knows_ascii_only_breaks_nothing(tmp_path):
    """
    What it lacks is escaped: the help has an ellipsis in it.
    """
    done = subprocess.run(
        [sys.executable, "-m", "runner", "--help"],
        env={**os.environ, "PYTHONIOENCODING": "ascii", "COLUMNS": "50"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert (0, "") == (done.returncode, done.stderr)
    assert "[--config job.yaml] \\u2026" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_a_reader_that_goes_away_is_no_error(tmp_path):
    """
    `vramfarm-runner status --json | head -1` prints no traceback.
    """
    write_run(tmp_path / "llama", message="x" * 1_000_000)
    reader, writer = os.pipe()
    os.close(reader)

    done = subprocess.run(
        [sys.executable, "-m", "runner", "status", "--json", str(tmp_path / "llama")],
        stdout=writer,
        stderr=subprocess.PIPE,
        timeout=30,
        check=False,
    )
    os.close(writer)

    assert (141, b"") == (done.returncode, done.stderr)


@pytest.mark.parametrize(
    ("redirection", "code", "said"),
    [
        pytest.param(">&-", 0, "", id="closed"),
        pytest.param("<&- >&- 2>&-", 0, "", id="all closed"),
        pytest.param(">/dev/full", 3, "error: standard output: no space left on device", id="a full disk"),
    ],
)
def test_an_output_that_cannot_be_written_is_no_fault_of_ours(tmp_path, redirection, code, said):
    """
    One line, or none where nobody wants to know.
    """
    write_run(tmp_path / "llama")
    argv = ["sh", "-c", f'"$@" {redirection}', "sh", sys.executable, "-m", "runner", "status", str(tmp_path / "llama")]

    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)

    assert (code, said) == (done.returncode, done.stderr.partition("\n")[0])


def test_a_folder_that_was_removed_under_the_shell_is_said(tmp_path):
    """
    A relative name leads nowhere then.
    """
    script = f'cd {tmp_path} && rmdir {tmp_path} && exec "$@"'
    argv = ["sh", "-c", script, "sh", sys.executable, "-I", "-m", "runner", "status", "llama/job.yaml"]

    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)

    assert (2, "error: the current folder: it was removed") == (done.returncode, done.stderr.partition("\n")[0])


def test_a_fault_of_ours_leaves_a_report_without_secrets(tmp_path, cli):
    """
    What nobody expected becomes a file to send in: traceback, versions, arguments, and no secret.
    """
    folder = write_run(tmp_path / "llama")
    (folder / "journal.jsonl").touch()
    (folder / "status.json").unlink()
    (folder / "status.json").mkdir()  # nobody expects that

    done = cli("status", str(folder), TMPDIR=str(tmp_path), HF_TOKEN=str(tmp_path))

    (report,) = tmp_path.glob("bug-*.txt")
    assert 1 == done.returncode
    assert done.stderr.endswith(f"the report is {report}\n")
    text = report.read_text()
    assert "Traceback" in text
    assert f"arguments: status $HF_TOKEN/{folder.name}" in text
    assert str(tmp_path) not in text


# ---------------------------------------------------------------------------------- validate


def test_validate_says_what_would_happen(tmp_path, cli):
    """
    Where copies go, when the server stops, what gives up: in words, on standard output.
    """
    (tmp_path / "job.yaml").write_text(JOB)

    done = cli("validate", "job.yaml")

    assert (0, "") == (done.returncode, done.stderr)
    for expected in (
        "torchrun train.py --lr 2e-5",
        "every 30m",
        "s3://bucket/runs/llama",
        "12h; then the server stops",
    ):
        assert expected in done.stdout


def test_a_password_in_an_address_is_warned_of_and_not_written_down(tmp_path, cli):
    """
    The run folder goes into the bucket, and what makes a job this job is printed.
    """
    (tmp_path / "job.yaml").write_text(
        "name: a\ncommand: t.py\nsource: {git: 'http://me:SECRET@127.0.0.1:9/x.git'}\n"
        "offload: {to: 's3://b/p', endpoint: 'http://SECRET@127.0.0.1:9'}\n"
    )

    warned = json.loads(cli("validate", "job.yaml", "--json").stdout)["warnings"]
    job = load_job(str(tmp_path / "job.yaml"), {"VRAMFARM_WORKSPACE": str(tmp_path)}).job
    written = job.without_passwords().model_dump_json() + json.dumps(identity(job))

    assert ["source", "offload.endpoint"] == [warning.split(":")[0] for warning in warned]
    assert "SECRET" not in written
    assert "http://127.0.0.1:9/x.git" in written


def test_validate_warns_of_a_path_in_the_address_of_a_store(tmp_path, cli):
    """
    Consoles show it with the bucket behind the host; a "/" alone is none.
    """

    def warned(endpoint):
        text = f"name: a\ncommand: t.py\noffload: {{to: s3://b/p, endpoint: '{endpoint}'}}\n"
        (tmp_path / "job.yaml").write_text(text)
        return json.loads(cli("validate", "job.yaml", "--json").stdout)["warnings"]

    (tmp_path / "t.py").touch()

    assert ["offload.endpoint: has a path (/b)"] == [w.partition(": offload.to")[0] for w in warned("http://h:9000/b")]
    assert [] == warned("http://h:9000/")


def test_validate_warns_when_nothing_leaves_the_machine(tmp_path, cli):
    """
    A server's disk goes with the server.
    """
    (tmp_path / "job.yaml").write_text("name: a\ncommand: t.py\nsecrets: [NO_SUCH_SECRET]\n")
    (tmp_path / "t.py").touch()

    done = json.loads(cli("validate", "job.yaml", "--json").stdout)

    assert ["offload.to", "NO_SUCH_SECRET"] == [warning.split(":")[0] for warning in done["warnings"]]


@pytest.mark.parametrize(
    ("more", "code"),
    [
        ("command: train.py", 0),
        ("command: trian.py", 2),
        ("command: python trian.py\nlauncher: command", 2),
        ("command: train.py\nworkdir: sub", 2),
        ("command: ignored.py", 2),
        ("command: trian.py\nsetup: pip install x", 2),
        ("command: trian.py\nsetup: python make_it.py", 0),
        ("command: /opt/trian.py", 0),
        ("command: my-tool --fast\nlauncher: command", 0),
    ],
)
def test_validate_looks_for_the_script_in_what_is_packed(tmp_path, cli, more, code):
    """
    What surely cannot work is 2; what only the machine can tell is left to it.
    """
    (tmp_path / "job.yaml").write_text(f"name: a\nsource: {{path: code}}\n{more}\n")
    code_dir = tmp_path / "code"
    code_dir.mkdir()
    subprocess.run(["git", "init", "-q", str(code_dir)], check=True)
    (code_dir / "train.py").touch()
    (code_dir / "ignored.py").touch()
    (code_dir / ".gitignore").write_text("ignored.py\n")

    done = cli("validate", "job.yaml")

    assert code == done.returncode, done.stderr
    assert (code == 2) == ("error: command: " in done.stderr)


def test_a_typo_in_the_command_is_told_by_status_and_can_be_corrected(tmp_path, cli):
    """
    Nothing is said to be launched; status says what it was, and the corrected job goes on under the same name.
    """
    job = "name: a\nlauncher: command\nframework: none\ncpu_processes: 1\nprovider: {kind: none}\ncommand: "
    (tmp_path / "work.sh").write_text("#!/bin/sh\ntrue\n")
    (tmp_path / "work.sh").chmod(0o755)
    (tmp_path / "job.yaml").write_text(f"{job}./wrok.sh\n")

    refused = cli("run", "--config", "job.yaml", VRAMFARM_WORKSPACE=str(tmp_path))
    told = cli("status", "a", VRAMFARM_WORKSPACE=str(tmp_path)).stdout
    (tmp_path / "job.yaml").write_text(f"{job}./work.sh\n")
    mended = cli("run", "--config", "job.yaml", VRAMFARM_WORKSPACE=str(tmp_path))

    assert 2 == refused.returncode, refused.stderr
    assert "launch attempt" not in refused.stderr
    assert "ended with exit code 2: command: expected a program './wrok.sh'" in told
    assert "mend that, then start it again" in told
    assert 0 == mended.returncode, mended.stderr
    assert "exit code 2" not in cli("status", "a", VRAMFARM_WORKSPACE=str(tmp_path)).stdout


def test_validate_json_is_the_whole_job_and_can_be_read_back(tmp_path, cli):
    """
    What it prints with every default is a job.yaml itself, and the same job.
    """
    (tmp_path / "job.yaml").write_text(JOB)
    first = json.loads(cli("validate", "--json", "job.yaml").stdout)["job"]
    (tmp_path / "again.yaml").write_text(json.dumps({k: v for k, v in first.items() if v is not None}))

    again = json.loads(cli("validate", "--json", "again.yaml").stdout)["job"]

    assert "30m" == first["checkpoint"]["save_interval"]
    assert first == again


def test_a_wrong_job_is_2_with_a_line_for_each_mistake(tmp_path, cli):
    """
    Standard error has every mistake, then what to do.
    """
    (tmp_path / "job.yaml").write_text("comand: t\ncards: 0\n")

    done = cli("validate", "job.yaml")

    expected = [
        "error: job.yaml:1: command: missing; say what to run, such as command: train.py",
        "error: job.yaml:1: comand: unknown key, did you mean 'command'?",
        "error: job.yaml:2: cards: must be all, or 1 to 64, got 0",
    ]
    assert (2, "") == (done.returncode, done.stdout)
    assert sorted(expected) == sorted(line for line in done.stderr.splitlines() if line.startswith("error: "))
    assert "hint: docs/job-yaml.md has every key\n" in done.stderr


def test_a_placeholder_that_nobody_fills_is_said(tmp_path, cli):
    """
    Braces may be the script's own, so it is a warning; one that is nearly ours has its name.
    """
    (tmp_path / "job.yaml").write_text("name: a\ncommand: train.py {checkpont_dir} ${HOME} {world_size} {zzz}\n")

    done = json.loads(cli("validate", "--json", "job.yaml").stdout)["warnings"]

    told = "job.yaml:2: command: nobody fills in {%s}: the script gets it as it stands"
    expected = [told % "checkpont_dir" + ", did you mean {checkpoint_dir}?", told % "zzz"]
    assert expected == [line for line in done if "nobody fills in" in line]


def test_a_variable_that_no_shell_reads_is_said(tmp_path, cli):
    """
    In the command and in env, with its line; where a shell is asked for it is none.
    """
    (tmp_path / "job.yaml").write_text("name: a\ncommand: train.py --out $HOME/x\nenv:\n  A: ${B}\n  C: 5$\n")
    (tmp_path / "shell.yaml").write_text("name: a\nlauncher: command\ncommand: bash -c 'echo $HOME'\n")

    done, shell = (json.loads(cli("validate", "--json", name).stdout) for name in ("job.yaml", "shell.yaml"))

    assert [["job.yaml:2: command: $HOME", "job.yaml:4: env.A: ${B}"], []] == [
        [line.partition(" stays as it stands")[0] for line in found["warnings"] if "no shell reads it" in line]
        for found in (done, shell)
    ]


def test_a_command_without_its_way_to_resume_has_its_line(tmp_path, cli):
    """
    A framework that saves by itself needs {resume_args}; the message says in which line.
    """
    (tmp_path / "job.yaml").write_text("name: a\nframework: hf_trainer\ncommand: train.py\n")

    done = cli("validate", "job.yaml")

    assert 2 == done.returncode
    assert done.stderr.startswith("error: job.yaml:3: command: expected {resume_args} in it")


@pytest.mark.parametrize(("zone", "told"), [("+02:00", ""), ("", "; no zone is named, which means UTC")])
def test_a_limit_that_is_over_is_said(tmp_path, cli, zone, told):
    """
    A date of last night ends the job at its first look: nobody is left to find that out at 3 a.m., and UTC is named.
    """
    over = datetime.now(UTC) - timedelta(hours=3)
    written = f"{over + timedelta(hours=2 if zone else 0):%Y-%m-%dT%H:%M}{zone}"
    (tmp_path / "job.yaml").write_text(f"name: a\ncommand: train.py\nlimits:\n  until: {written}\n")

    done = cli("validate", "job.yaml")

    (warning,) = [line for line in done.stdout.splitlines() if "limits.until: " in line]
    assert warning.startswith(
        f"warning: job.yaml:4: limits.until: expected a time in the future, found {written} (3h 0"
    )
    assert warning.endswith(f" ago, {over:%Y-%m-%d %H:%M} UTC{told}): the job would end before it trains")


def test_a_limit_by_the_clock_is_told_in_utc(tmp_path, cli):
    """
    `07:00 Europe/Berlin` is this morning's or tomorrow's: which, and how far away, is said.
    """
    (tmp_path / "job.yaml").write_text("name: a\ncommand: train.py\nlimits: {until: '07:00 Asia/Tokyo'}\n")

    (line,) = [line for line in cli("validate", "job.yaml").stdout.splitlines() if line.startswith("limits ")]

    assert re.search(r"at 07:00 Asia/Tokyo \(in [0-9hms ]+, \d{4}-\d\d-\d\d 22:00 UTC\); then", line)


@pytest.mark.parametrize("how", ["stdin", "variable"])
def test_a_job_without_a_file(cli, how):
    """
    A job may come through a pipe or the environment.
    """
    done = cli("validate", "-", stdin=JOB) if how == "stdin" else cli("validate", RUNNER_JOB=JOB)

    assert 0 == done.returncode
    assert "llama" in done.stdout


@pytest.mark.parametrize("key", ["framework: torchtune"])
def test_what_is_not_built_yet_is_said_and_refused(tmp_path, cli, key):
    """
    Nobody finds out in the morning that a key was read and ignored.
    """
    (tmp_path / "job.yaml").write_text(f"{JOB}{key}\n")
    (tmp_path / "train.py").touch()

    warnings = json.loads(cli("validate", "--json", "job.yaml").stdout)["warnings"]
    refused = cli("run", "--config", "job.yaml")

    assert 1 == len(warnings)
    assert ": not built yet: " in warnings[0]
    assert (2, True) == (refused.returncode, f"error: {warnings[0]}\n" in refused.stderr)


def test_every_default_is_built():
    """
    The smallest job relies on nothing that is only planned.
    """
    refuse_planned(Job(command="train.py"))


# --------------------------------------------------------------------------------------- run


@pytest.mark.parametrize("arguments", [["run", "--config", "none.yaml"], ["--config", "none.yaml"]])
def test_run_is_what_happens_without_a_command(cli, arguments):
    """
    The container's command line is `--config job.yaml`; a job that cannot be read ends with 2, through the guardian.
    """
    done = cli(*arguments)

    assert (2, "") == (done.returncode, done.stdout)
    assert "guardian: deadline" in done.stderr
    assert "error: none.yaml: cannot be read: no such file or directory\n" in done.stderr


def test_run_keeps_what_came_through_a_pipe(cli):
    """
    Standard input can be read once, and the runner may be started twice: its environment has the job.
    """
    done = cli("run", "--config", "-", stdin="comand: t\n")

    assert 2 == done.returncode
    assert "error: $RUNNER_JOB:1: comand: unknown key, did you mean 'command'?\n" in done.stderr


def test_run_refuses_a_pipe_that_does_not_fit_the_environment(cli):
    """
    Linux takes no more than 128 KiB in one variable.
    """
    done = cli("run", "--config", "-", stdin="#" * 100_000)

    assert 2 == done.returncode
    assert "hint: write it to a file" in done.stderr


# ------------------------------------------------------------------------------------ status


def test_status_for_a_person(tmp_path, cli, held_lock):
    """
    Five lines: how far, what last, what is safe, until when, how fresh.
    """
    held_lock(write_run(tmp_path / "llama"))

    lines = cli("status").stdout.splitlines()

    expected = [
        "llama  running  step 500/1000  loss 2.346  2 steps/s  4m 10s left",
        "  checkpoint step-00000500-4567cdef committed: 12.4 GB in 9.1s",
        "  attempt 1, 2 checkpoints, 1 verified in the store, 1 only on its disk, the newest at step 500",
        "  the server stops at the latest in 2h 00m, cost so far 1.20 EUR, server m-1",
    ]
    assert expected == lines[:4]
    assert lines[4].startswith("  as of ")


@pytest.mark.parametrize("lives", [True, False])
def test_status_says_until_when_a_run_waits_for_its_store(tmp_path, cli, held_lock, lives):
    """
    In place of the last line of the log; a runner that is gone waits for nothing.
    """
    waiting = {"what": "lease failed: no answer (until 17:52 UTC)", "until": "2026-01-01T17:52:00+00:00"}
    run_dir = write_run(tmp_path / "llama", waiting=waiting, message="the code is in place")
    if lives:
        held_lock(run_dir)

    lines = cli("status").stdout.splitlines()

    assert f"  {waiting['what'] if lives else 'the code is in place'}" == lines[1]


def test_status_json_is_the_file_and_whether_the_runner_lives(tmp_path, cli, held_lock):
    """
    A script gets all of it.
    """
    run_dir = write_run(tmp_path / "llama")
    written = json.loads((run_dir / "status.json").read_text())

    dead = json.loads(cli("status", "llama", "--json").stdout)
    held_lock(run_dir)
    alive = json.loads(cli("status", "llama", "--json").stdout)

    assert written | {"runner_alive": False, "processes_left": 0} == dead
    assert written | {"runner_alive": True, "processes_left": 0} == alive


def test_status_says_that_ranks_live_on_without_a_runner(tmp_path, cli):
    """
    They train and cost, nobody watches the deadline, and a start takes them over.
    """
    run_dir = write_run(tmp_path / "llama", server=None)
    rank = subprocess.Popen(["sleep", "60"], env={**os.environ, Env.RUN: str(run_dir)})
    try:
        told = cli("status").stdout
        left = json.loads(cli("status", "--json").stdout)["processes_left"]
    finally:
        rank.kill()
        rank.wait()

    assert 1 == left
    assert "llama  without a runner  step 500/1000" in told
    assert "1 process lives on without it: start it again with the same job.yaml" in told
    assert "and nobody watches it" in told
    assert "at the latest" not in told


def test_status_says_that_the_runner_is_gone(tmp_path, cli):
    """
    RUNNING in a file that nobody writes any more is not running.
    """
    write_run(tmp_path / "llama")

    done = cli("status")

    assert "llama  not running" in done.stdout
    assert "start it again with the same job.yaml" in done.stdout


def test_status_of_a_run_that_is_over(tmp_path, cli):
    """
    The outcome and its exit code stand where the phase stood.
    """
    write_run(tmp_path / "llama", outcome="succeeded", exit_code=0, phase="STOPPED")

    assert "llama  succeeded (exit code 0)  step 500/1000" in cli("status").stdout


@pytest.mark.parametrize("how", ["newest", "name", "folder", "job.yaml"])
def test_a_run_is_found(tmp_path, cli, how):
    """
    By nothing (the newest), its name, its folder, or its job.yaml.
    """
    old = write_run(tmp_path / "old")
    os.utime(old / "status.json", (1, 1))
    new = write_run(tmp_path / "llama")
    (tmp_path / "job.yaml").write_text(JOB)

    arguments = {"newest": [], "name": ["llama"], "folder": [str(new)], "job.yaml": ["job.yaml"]}[how]

    assert "llama" == json.loads(cli("status", "--json", *arguments).stdout)["job"]


def test_a_run_that_is_not_there_names_those_that_are(tmp_path, cli):
    """
    A wrong name is a wrong command line.
    """
    write_run(tmp_path / "llama")

    done = cli("status", "lama")

    assert 2 == done.returncode
    assert f"error: lama: expected a run folder, a name in {tmp_path}, or a job.yaml; runs there: llama" in done.stderr


def test_a_job_that_runs_elsewhere_is_found_in_its_store(tmp_path, cli):
    """
    On a rented machine, or a simulated one; what needs the machine itself names the store.
    """
    (tmp_path / "job.yaml").write_text(JOB.replace("s3://bucket/runs", f"'file://{tmp_path}/store'"))
    run = write_run(tmp_path / "store" / "llama")
    for stream in ("stdout", "stderr"):
        log = run / "logs" / "attempt-0001" / "x" / "attempt_0" / "0" / f"{stream}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(f"{stream} of rank 0\n")

    write_checkpoint(run / "checkpoints", 400, b"x" * 1000)

    status, logs, stop = (cli(command, "job.yaml") for command in ("status", "logs", "stop"))
    report, listed, verified = (
        cli(*words, "--json", "job.yaml") for words in (("report",), ("checkpoints", "ls"), ("checkpoints", "verify"))
    )
    attach = cli("attach", "job.yaml")

    assert (0, "llama  running") == (status.returncode, status.stdout[:14]), status.stderr
    assert (0, True) == (logs.returncode, "stdout of rank 0" in logs.stdout), logs.stderr
    assert 2 == stop.returncode
    assert f"name the run in its store: file://{tmp_path}/store/llama" in stop.stderr
    assert f"file://{tmp_path}/store/llama" == json.loads(report.stdout)["address"], report.stderr
    assert [(400, False, True)] == [(row["step"], row["local"], row["offsite"]) for row in json.loads(listed.stdout)]
    name = "step-00000400-0123abcd"
    assert {"checkpoints": {name: []}, "bytes_read": {name: 1000}, "problems": []} == json.loads(verified.stdout)
    assert (2, True) == (attach.returncode, "`vramfarm-runner status job.yaml`" in attach.stderr), attach.stderr


def test_logs_that_the_store_does_not_have_yet_are_a_line_on_stderr(tmp_path, cli):
    """
    Nothing printed and nothing copied would look the same; so it is for a run that is here.
    """
    (tmp_path / "job.yaml").write_text(JOB.replace("s3://bucket/runs", f"'file://{tmp_path}/store'"))
    for run in (write_run(tmp_path / "store" / "llama"), write_run(tmp_path / "here")):
        log = run / "logs" / "attempt-0001" / "launcher.log"
        log.parent.mkdir(parents=True)
        log.touch()

    afar, here = cli("logs", "job.yaml"), cli("logs", "here")

    assert [(0, "", 1)] * 2 == [(d.returncode, d.stdout, len(d.stderr.splitlines())) for d in (afar, here)]
    assert "copies logs every ten minutes" in afar.stderr
    assert "nothing was printed yet" in here.stderr


# -------------------------------------------------------------------------------------- stop


def test_stop_leaves_a_request_that_outlives_it(tmp_path, cli, held_lock):
    """
    The request is a file of the run, so the next runner finds it as well as this one.
    """
    run_dir = write_run(tmp_path / "llama")
    held_lock(run_dir)

    assert json.loads(cli("stop", "llama", "--json").stdout)["asked"]
    done = cli("stop", "llama")

    assert (0, True) == (done.returncode, (run_dir / "stop").exists())
    assert "end with exit code 8" in done.stdout


def test_stop_without_a_runner_says_so(tmp_path, cli):
    """
    Nobody waits for a runner that is not there.
    """
    run_dir = write_run(tmp_path / "llama")

    done = cli("stop")

    assert "has no live runner" in done.stdout
    assert f"rm {run_dir / 'stop'}" in done.stdout


def test_stop_of_a_run_that_is_over_changes_nothing(tmp_path, cli):
    """
    A request in a run that is over would stop the one that goes on from it.
    """
    run_dir = write_run(tmp_path / "llama", outcome="succeeded")

    done = cli("stop")

    assert "llama is over already: succeeded\n" == done.stdout
    assert not (run_dir / "stop").exists()


def test_stop_before_training_promises_no_save(tmp_path, cli, held_lock):
    """
    Where nothing trains there is no next step to save at.
    """
    held_lock(write_run(tmp_path / "llama", phase="PREFLIGHT", attempt=0, checkpoints=[]))

    told = cli("stop").stdout

    assert "llama will begin no training, finish its copies, and end with exit code 8" in told


DRAINS = {
    "outcome": "stopped",
    "exit_code": 8,
    "phase": "DRAINING",
    "draining": {"what": "lease of the run (no answer)", "until": "2026-01-01T12:30:00+00:00"},
}


def test_a_run_that_is_over_and_a_runner_that_is_not_are_told_apart(tmp_path, cli, held_lock):
    """
    Whoever believes that the server is off while it waits for its store pays for it.
    """
    held_lock(write_run(tmp_path / "llama", **DRAINS))

    told, again = cli("status").stdout, cli("stop").stdout

    line = "the runner has not ended: it copies data off the machine, until 12:30 UTC at the latest: lease of the run (no answer)"
    assert told.startswith("llama  stopped, draining (exit code 8 to come)  ")
    assert line in told
    assert line in again


def test_a_runner_that_died_while_it_drained_is_said(tmp_path, cli):
    """
    What is only on this disk is not thrown away because a status says that the job is over.
    """
    write_run(tmp_path / "llama", **DRAINS)

    told = cli("status").stdout

    assert told.startswith("llama  stopped (exit code 8)  ")
    assert "had not got everything off the machine" in told


@pytest.mark.parametrize(
    ("told", "first", "last"),
    [
        ({"outcome": None}, "not running", "it goes on"),
        ({"outcome": "left", "exit_code": 75}, "left (exit code 75)", "had not got everything off the machine"),
    ],
)
def test_a_runner_that_left_is_missed_from_afar_too(told, first, last):
    """
    Its machine cannot be asked: without a word of it somebody waits for a run that nobody goes on with.
    """
    now = datetime.now(UTC)
    status = {"job": "llama", "phase": "LEFT", "updated_at": now.isoformat(), **told}

    lines = [*describe(status, alive=None, now=now)]

    assert lines[0].startswith(f"llama  {first}  ")
    assert "start it again" in lines[-1]
    assert last in lines[-1]


# ------------------------------------------------------------------------------- checkpoints


def test_checkpoints_ls(tmp_path, cli):
    """
    What is here and what is known to be in the store, oldest first.
    """
    run_dir = write_run(tmp_path / "llama")
    write_checkpoint(run_dir / "checkpoints", 400, b"x" * 2000)
    write_checkpoint(run_dir / "checkpoints", 500, b"y" * 1000)

    rows = [line.split() for line in cli("checkpoints", "ls").stdout.splitlines()]

    assert ["STEP", "ID", "LINEAGE", "SIZE", "AGE", "WHERE", "VERIFIED"] == rows[0]
    assert ["400", "0123abcd", "1", "2.0", "kB"] == rows[1][:5]
    assert ["local", "offsite", "in", "the", "store"] == rows[1][-5:]
    assert ["local", "no"] == rows[2][-2:]


def test_checkpoints_ls_names_the_damaged(tmp_path, cli):
    """
    Beside those that are whole; an empty table alone would say that nothing was ever saved. Exit code 4 then, as of `verify`.
    """
    run_dir = write_run(tmp_path / "llama", checkpoints=[])
    for step in (400, 500):
        write_checkpoint(run_dir / "checkpoints", step, b"x")
    torn, aside = "step-00000500-0123abcd", ".damaged-step-00000400-0123abcd"
    (run_dir / "checkpoints" / torn / MANIFEST).write_text("{")
    beside = cli("checkpoints", "ls")
    (run_dir / "checkpoints" / aside.removeprefix(".damaged-")).rename(run_dir / "checkpoints" / aside)

    done = cli("checkpoints", "ls")

    assert (0, 2) == (beside.returncode, len(beside.stdout.splitlines()))
    assert f"unusable: {torn}: {MANIFEST}: not JSON" in beside.stderr
    assert (4, 1) == (done.returncode, len(done.stdout.splitlines()))
    line = f"error: {run_dir}/checkpoints: no whole checkpoint is there, only damaged ones: {torn}, {aside}"
    assert line == done.stderr.splitlines()[0]


def test_a_run_in_the_store_of_which_nothing_can_be_used_is_no_empty_table(cli, stored):
    """
    Each line says why, once; exit code 4. Where one is whole the others are said beside it, and the exit code is 0.
    """
    folders = sorted((Path(stored.removeprefix("file://")) / "checkpoints").iterdir())
    (folders[1] / MANIFEST).write_text("{")
    some = cli("checkpoints", "ls", stored)
    (folders[0] / MANIFEST).write_text("{}")

    none = cli("checkpoints", "ls", stored, "--json")
    restored = cli("checkpoints", "restore", stored, "here")

    assert (0, True) == (some.returncode, f"unusable: {folders[1].name}: " in some.stderr), some.stderr
    assert (4, []) == (none.returncode, json.loads(none.stdout)), none.stderr
    assert 2 == none.stderr.count(f"{MANIFEST}: ") == none.stderr.count(MANIFEST), none.stderr
    assert "checkpoints ls" not in restored.stderr


def test_checkpoints_ls_json(tmp_path, cli):
    """
    The same for scripts.
    """
    write_checkpoint(write_run(tmp_path / "llama") / "checkpoints", 400, b"x")

    (row,) = json.loads(cli("checkpoints", "ls", "--json").stdout)

    assert (400, 1, True, True) == (row["step"], row["size_bytes"], row["local"], row["offsite"])


def test_checkpoints_verify_reads_every_byte(tmp_path, cli):
    """
    A flipped bit is found, named, and is exit code 4.
    """
    folder = write_checkpoint(write_run(tmp_path / "llama") / "checkpoints", 400, b"x" * 2000)
    before = cli("checkpoints", "verify")
    (folder / shard_name(0, 1)).write_bytes(b"x" * 1999 + b"z")

    after = cli("checkpoints", "verify", "--json")

    assert (0, f"{folder.name}  every byte is what its manifest says\n") == (before.returncode, before.stdout)
    assert 4 == after.returncode
    assert 1 == len(json.loads(after.stdout)["checkpoints"][folder.name])
    assert shard_name(0, 1) in after.stderr
    assert f"error: {folder.name}: " in after.stderr


@pytest.mark.parametrize("is_run", [True, False], ids=["of a run", "alone"])
def test_the_folder_of_one_checkpoint_is_a_checkpoint(tmp_path, cli, is_run):
    """
    For ls, verify and restore: that one, and no other, whoever else is damaged beside it.
    """
    run_dir = write_run(tmp_path / "llama", checkpoints=[]) if is_run else tmp_path / "llama"
    folder = write_checkpoint(run_dir / "checkpoints", 400, b"x" * 2000)
    other = write_checkpoint(run_dir / "checkpoints", 500, b"y" * 2000)
    (other / shard_name(0, 1)).write_bytes(b"z" * 2000)

    rows = json.loads(cli("checkpoints", "ls", str(folder), "--json").stdout)
    verified = cli("checkpoints", "verify", f"llama/checkpoints/{folder.name}")
    damaged = cli("checkpoints", "verify", str(other))
    restored = cli("checkpoints", "restore", str(folder), "here")
    refused = cli("checkpoints", "restore", str(other), "here")

    assert [400] == [row["step"] for row in rows]
    assert (0, f"{folder.name}  every byte is what its manifest says\n") == (verified.returncode, verified.stdout)
    assert (4, 1) == (damaged.returncode, damaged.stderr.count("error: "))
    assert (0, f"here/{folder.name}\n") == (restored.returncode, restored.stdout)
    assert b"x" * 2000 == (tmp_path / "here" / folder.name / shard_name(0, 1)).read_bytes()
    assert (4, [folder.name]) == (refused.returncode, [path.name for path in (tmp_path / "here").iterdir()])
    assert f"hint: this one is damaged; the next older is {folder}" in refused.stderr


def test_a_refusal_of_the_store_is_not_told_as_damage():
    """
    It has a cure of its own, and an older checkpoint is none.
    """

    def refuse(_):
        raise OffsiteError("403", hint="ask for the right", final=True, curable=True)

    named, newest = (
        Candidate(ref=Ref(1, step, 1, "0" * 8), open=None, bring=None, older=older)
        for step, older in ((1, "x"), (2, ""))
    )
    for found in ([named], [newest, named]):
        with pytest.raises(OffsiteError) as caught:
            first_whole(found, refuse)

        assert "ask for the right" == caught.value.hint


@pytest.mark.parametrize(
    ("which", "code", "expected"),
    {
        "a name that is none": (
            "lama",
            2,
            "error: lama: expected a run folder, a name in {}, or a job.yaml; runs there: llama",
        ),
        "one that is not there": (
            "llama/checkpoints/step-00000999-0123abcd",
            4,
            "hint: there are step-00000400-0123abcd",
        ),
        "a folder of something else": ("data", 4, "found none in it"),
        "the folder of all runs": (".", 2, "found runs: llama in it"),
        "under another name": (
            "best",
            2,
            "error: best: expected a checkpoint under its own name, found step-00000400-0123abcd",
        ),
    }.values(),
)
def test_a_wrong_place_of_checkpoints_is_said_with_what_is_there(tmp_path, cli, which, code, expected):
    """
    Two lines, and the next thing to type, for each command that looks for checkpoints here. Exit code 2 where there is no
    such place, 4, as of a store, where it was looked into and has none.
    """
    folder = write_checkpoint(write_run(tmp_path / "llama", checkpoints=[]) / "checkpoints", 400, b"x")
    folder.rename(tmp_path / "best") if which == "best" else (tmp_path / "data").mkdir()

    for words in (["ls", which], ["verify", which], ["export", which, "--to", "out"]):
        done = cli("checkpoints", *words)

        assert (code, "", 2) == (done.returncode, done.stdout, len(done.stderr.splitlines())), done.stderr
        assert expected.format(tmp_path) in done.stderr


def test_a_folder_of_checkpoints_may_have_none_yet(tmp_path, cli):
    """
    An empty table; but nothing was verified, and a script that goes on after `verify` does not.
    """
    (write_run(tmp_path / "llama", checkpoints=[]) / "checkpoints").mkdir()

    listed = cli("checkpoints", "ls", "llama/checkpoints")
    verified = cli("checkpoints", "verify", "llama/checkpoints")

    assert (0, 1) == (listed.returncode, len(listed.stdout.splitlines()))
    assert (4, "") == (verified.returncode, verified.stdout)
    assert [
        f"error: {tmp_path}/llama/checkpoints: expected a checkpoint, found none",
        "hint: nothing was verified; vramfarm-runner checkpoints ls shows what is there",
    ] == verified.stderr.splitlines()


def test_a_launch_that_is_only_shown_is_json_for_scripts(tmp_path, cli):
    """
    The same words as the line for a shell.
    """
    (tmp_path / "job.yaml").write_text(JOB)

    line, told = (cli("launch", "job.yaml", "--dry-run", "--gpus", "none", *options) for options in ((), ("--json",)))

    assert shlex.split(line.stdout) == json.loads(told.stdout)["argv"]


def test_events_leave_out_what_is_empty():
    """
    A line for a person has what happened, and no `env={}`.
    """
    event = {
        "event": "launched",
        "at": "2026-01-01T03:00:00+00:00",
        "number": 1,
        "env": {},
        "resume": None,
        "origin": "",
    }

    assert describe_event(event).endswith("  launched     number=1")


# ------------------------------------------------------------------------------------- store


@pytest.fixture
def stored(tmp_path) -> str:
    """Address of a run in a folder that plays the store, with two checkpoints and a status."""
    run_dir = write_run(tmp_path / "elsewhere" / "llama")
    for step in (400, 500):
        write_checkpoint(run_dir / "checkpoints", step, f"{step}".encode() * 1000)
    return f"file://{run_dir}"


def test_status_from_the_store(cli, stored):
    """
    How a run is doing can be seen from anywhere, without a way into the machine.
    """
    done = cli("status", stored, "--json")

    assert (0, "llama", None) == (
        done.returncode,
        json.loads(done.stdout)["job"],
        json.loads(done.stdout)["runner_alive"],
    )


_ODD = (
    -1,
    10**30,
    True,
    "\x1b[2J\ud800\nconclude succeeded",
    [[[{}]]],
    [{}],
    [[1]],
    {"a": []},
    {"until": "soon", "reasons": 7, "goodput": "much"},
)


@pytest.mark.parametrize("command", ["status", "events", "report"])
def test_what_is_hostile_in_a_store_moves_no_cursor_and_breaks_no_command(cli, stored, command):
    """
    Every field of what is read there, as anything that JSON can say: it is shown or left out, in plain signs.
    """
    folder = Path(stored.removeprefix("file://"))
    journal = folder / "machines" / "0001" / "journal.jsonl"
    journal.parent.mkdir(parents=True)
    status = json.loads((folder / "status.json").read_bytes())
    spoilt = [b"[" * 100_000, *(json.dumps(status | dict.fromkeys(status, odd)).encode() for odd in _ODD)]
    events = (json.dumps({"event": odd, "at": odd, "reason": odd}) for odd in _ODD)
    journal.write_text("".join(f"{line}\n" for line in events))
    codes, said = set(), ""
    for content in {"status": spoilt, "report": spoilt[4:5]}.get(command, [b"{}"]):
        (folder / "status.json").write_bytes(content)
        for options in ((), ("--json",)):
            done = cli(command, stored, *options)
            codes.add(done.returncode)
            said += done.stdout + done.stderr

    assert ({0, 2} if command == "status" else {0}) == codes, said
    assert "\x1b" not in said
    assert "?[2J" in said
    assert "\nconclude succeeded" not in said  # nor does anything there begin a line of its own


def test_status_of_a_run_that_the_store_does_not_have(cli, stored):
    """
    A wrong name is told from an empty answer.
    """
    done = cli("status", f"{stored}x")

    assert (4, f"error: {stored}x: no status.json there") == (done.returncode, done.stderr.splitlines()[0])


@pytest.mark.parametrize(
    "command",
    [
        "status",
        "report",
        "logs",
        "logs --attempt 2",
        "events",
        "checkpoints ls",
        "checkpoints verify",
    ],
)
def test_an_address_without_a_run_is_one_exit_code(cli, stored, command):
    """
    Whoever asks: it is what the store has, and no wrong usage.
    """
    done = cli(*command.split(), f"{stored}x")

    assert (4, "") == (done.returncode, done.stdout), done.stderr
    assert done.stderr.startswith(f"error: {stored}x: ")


def test_checkpoints_ls_of_the_store(cli, stored):
    """
    The store's own listing, oldest first.
    """
    rows = json.loads(cli("checkpoints", "ls", "--json", stored).stdout)

    assert [(400, False, True), (500, False, True)] == [(row["step"], row["local"], row["offsite"]) for row in rows]


@pytest.mark.parametrize("name", ["disk#2", "disk?2", "disk%202"])
def test_a_store_is_the_folder_that_is_written(cli, tmp_path, name):
    """
    And no other one that has such a run, with a part of that name.
    """
    write_checkpoint(tmp_path / name / "llama" / "checkpoints", 400, b"right")
    for other in ("disk", "disk 2"):
        write_checkpoint(tmp_path / other / "llama" / "checkpoints", 300, b"wrong")

    rows = json.loads(cli("checkpoints", "ls", "--json", f"file://{tmp_path}/{name}/llama").stdout)

    assert [400] == [row["step"] for row in rows]


def test_of_logs_in_a_store_so_many_are_fetched_and_the_rest_is_told(cli, stored):
    """
    Whoever may write to a bucket may fill it: what is no log is not fetched, and of a thousand and two logs the last two.
    """
    folder = Path(stored.removeprefix("file://")) / "logs" / "attempt-0001"
    folder.mkdir(parents=True)
    for number in range(1002):
        (folder / f"x_rank{number}.log").write_text(f"line of {number}\n")
    (folder / "junk").write_bytes(b"no log")

    all_ = cli("logs", stored)
    one = cli("logs", stored, "--rank", "1001")

    assert (0, 1000) == (all_.returncode, len(all_.stdout.splitlines())), all_.stderr
    assert (
        "left out: 2 of 1002 logs (26 B), from llama/logs/attempt-0001/x_rank1000.log on (--rank names one)"
        in all_.stderr
    )
    assert (0, "rank 1001: line of 1001\n", "") == (one.returncode, one.stdout, one.stderr)


@pytest.mark.parametrize(("suffix", "step"), [("", 500), ("/checkpoints/step-00000400-0123abcd", 400)])
def test_restore_brings_a_checkpoint_and_says_where_it_is(tmp_path, cli, stored, suffix, step):
    """
    The newest of a run, or the one that is named; standard output is its folder.
    """
    done = cli("checkpoints", "restore", f"{stored}{suffix}", str(tmp_path / "here"))

    folder = tmp_path / "here" / f"step-{step:08d}-0123abcd"
    assert (0, f"{folder}\n") == (done.returncode, done.stdout)
    assert f"{step}".encode() * 1000 == (folder / shard_name(0, 1)).read_bytes()


def test_a_damaged_checkpoint_in_the_store_is_found_and_not_restored(tmp_path, cli, stored):
    """
    Bytes that are not those of the manifest are exit code 4, and nothing is left of it; of a run the next older one comes, and that is said.
    """
    name = "step-00000500-0123abcd"
    damaged = Path(stored.removeprefix("file://")) / "checkpoints" / name / shard_name(0, 1)
    damaged.write_bytes(b"x" * damaged.stat().st_size)

    verified = cli("checkpoints", "verify", stored, "--json")
    restored = cli("checkpoints", "restore", f"{stored}/checkpoints/{name}", str(tmp_path / "here"))
    newest = cli("checkpoints", "restore", stored, str(tmp_path / "there"))

    assert (4, 4) == (verified.returncode, restored.returncode), restored.stderr
    assert [] == list((tmp_path / "here").iterdir())
    assert (0, f"{tmp_path}/there/step-00000400-0123abcd\n") == (newest.returncode, newest.stdout)
    assert f"passed over: {name}: " in newest.stderr
    assert [0, 1] == [len(found) for _, found in sorted(json.loads(verified.stdout)["checkpoints"].items())]


def test_restore_names_the_newer_one_that_it_passed_over(tmp_path, cli, stored):
    """
    Half deleted in the store: the next older whole one comes, and nobody takes it for the newest.
    """
    (Path(stored.removeprefix("file://")) / "checkpoints" / "step-00000500-0123abcd" / shard_name(0, 1)).unlink()

    done = cli("checkpoints", "restore", stored, str(tmp_path / "here"))

    assert (0, f"{tmp_path}/here/step-00000400-0123abcd\n") == (done.returncode, done.stdout)
    assert "passed over: step-00000500-0123abcd" in done.stderr


@pytest.mark.parametrize("action", ["ls", "verify"])
@pytest.mark.parametrize("where", ["/x", "/.."])
def test_a_run_that_the_store_does_not_have_is_no_empty_table(cli, stored, action, where):
    """
    Neither a name that was mistyped nor the folder that runs are in is a run without checkpoints.
    """
    address = f"{stored}x" if where == "/x" else stored.rpartition("/")[0]

    done = cli("checkpoints", action, address)

    assert (4, "", f"error: {address}: expected a run, found none") == (
        done.returncode,
        done.stdout,
        done.stderr.splitlines()[0],
    )


def test_the_address_of_one_checkpoint_is_that_one(tmp_path, cli, stored):
    """
    For ls, verify, restore and export, as its folder is: whoever is damaged beside it, and none that is there for one that is not.
    """
    good, damaged, missing = (f"step-{step:08d}-0123abcd" for step in (400, 500, 600))
    (Path(stored.removeprefix("file://")) / "checkpoints" / damaged / MANIFEST).write_text("junk")
    ways = (("ls",), ("verify",), ("restore", "here"), ("export", "--to", "out"))

    def ask(name, way):
        return cli("checkpoints", way[0], f"{stored}/checkpoints/{name}", *way[1:])

    listed, verified, restored, _ = (ask(good, way) for way in ways)

    assert (0, True) == (listed.returncode, "step" not in listed.stderr), listed.stderr
    assert ["STEP", "400"] == [line.split()[0] for line in listed.stdout.splitlines()]
    assert (0, f"{good}  every byte is what its manifest says\n") == (verified.returncode, verified.stdout)
    assert (0, f"here/{good}\n") == (restored.returncode, restored.stdout)
    assert f"error: {damaged}: " in ask(damaged, ("verify",)).stderr
    for way in ways:
        done = ask(missing, way)
        line, hint = done.stderr.splitlines()
        assert (4, "") == (done.returncode, done.stdout), way
        assert f"error: {stored}/checkpoints/{missing}: expected a whole checkpoint, found none" == line
        assert f"hint: there are {good}" == hint


@pytest.mark.parametrize("has_shards", [False, True])
def test_verify_of_a_run_without_a_checkpoint_in_its_store_verifies_nothing(cli, stored, has_shards):
    """
    Exit code 4 and its line, as of a folder: whoever deletes the machine after `verify` must hear it.
    """
    folder = Path(stored.removeprefix("file://")) / "checkpoints"
    for name in ("step-00000400-0123abcd", "step-00000500-0123abcd"):
        (folder / name / MANIFEST).unlink() if has_shards else shutil.rmtree(folder / name)

    done = cli("checkpoints", "verify", stored)

    assert (4, "", f"error: {stored}: expected a checkpoint, found none") == (
        done.returncode,
        done.stdout,
        done.stderr.splitlines()[0],
    )


def test_restore_says_in_json_what_it_brought(tmp_path, cli, stored):
    """
    For scripts.
    """
    done = cli("checkpoints", "restore", stored, str(tmp_path / "here"), "--json")

    name = "step-00000500-0123abcd"
    expected = {"checkpoint": name, "step": 500, "folder": str(tmp_path / "here" / name)}
    assert (0, expected) == (done.returncode, json.loads(done.stdout))


@pytest.mark.parametrize("what", ["report", "restore"])
def test_a_place_that_cannot_be_written_to_is_no_fault_of_ours(tmp_path, cli, stored, what):
    """
    One line that names it, and exit code 2.
    """
    (tmp_path / "file").touch()
    place = str(tmp_path / "file" / "x")
    words = {
        "report": ["report", str(tmp_path / "elsewhere" / "llama"), "--html", place],
        "restore": ["checkpoints", "restore", stored, place],
    }

    done = cli(*words[what])

    assert 2 == done.returncode, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert place in line
    assert "hint: this is a fault" not in done.stderr


def test_events_are_read_from_the_store(cli, stored):
    """
    The journals of all machines, in the order of their coming.
    """
    root = Path(stored.removeprefix("file://")) / "machines"
    for number, event in (("0001", "accepted"), ("0002", "joined")):
        (root / number).mkdir(parents=True)
        line = json.dumps({"event": event, "at": "2026-01-01T03:00:00+00:00"})
        (root / number / "journal.jsonl").write_text(f"{line}\n")

    text, lines = cli("events", stored), cli("events", stored, "--json").stdout.splitlines()

    assert (0, 2) == (text.returncode, len(text.stdout.splitlines()))
    assert [("accepted", "1"), ("joined", "2")] == [(e["event"], e["of_machine"]) for e in map(json.loads, lines)]
    assert [4, 2] == [cli("events", f"{stored}x").returncode, cli("events", stored, "-f").returncode]


def test_triage_of_a_run_by_its_name(tmp_path, cli):
    """
    It points to a log that is there; and of a run that succeeded it says so, and advises nothing.
    """
    run_dir = write_run(tmp_path / "llama")
    before, log = cli("triage").stdout, run_dir / "logs" / "attempt-0001" / "launcher.log"
    log.parent.mkdir(parents=True)
    log.write_text("all is well\n")
    unknown = cli("triage").stdout
    launched = {"event": "launched", "number": 1, "id": "a", "resume": None, "lineage": 1, "boot_id": "b"}
    exited = {"event": "exited", "ending": "succeeded", "code": 0, "step": 9, "reason": ""}
    at = "2026-01-01T03:00:00+00:00"
    lines = [json.dumps(event | {"at": at}) for event in (launched, exited)]
    (run_dir / "journal.jsonl").write_text("".join(f"{line}\n" for line in lines))

    done, missing = cli("triage"), cli("triage", "lama")

    assert f"see {run_dir}\n" in before
    assert f"see {log}" in unknown
    assert (0, f"nothing failed: attempt 1, the last of {run_dir}, succeeded\n") == (done.returncode, done.stdout)
    assert None is json.loads(cli("triage", "llama", "--json").stdout)["decision"]
    assert (2, True) == (missing.returncode, "runs there: llama" in missing.stderr)


@pytest.mark.parametrize("address", ["s3://bucket", "file:///", "s3://", "s3://bucket//llama"])
def test_an_address_without_a_run_is_wrong_usage(cli, address):
    """
    A bucket is not a run.
    """
    done = cli("checkpoints", "ls", address)

    assert 2 == done.returncode
    assert "expected the run in its store" in done.stderr


# -------------------------------------------------------------------------------------- logs


def write_log(run_dir: Path, attempt: int, rank: int, *lines: str) -> Path:
    path = run_dir / "logs" / f"attempt-{attempt:04d}" / "x" / "attempt_0" / str(rank) / "stdout.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def test_logs_of_the_last_attempt(tmp_path, cli):
    """
    The last lines of every rank; an earlier attempt or one rank by asking.
    """
    run_dir = write_run(tmp_path / "llama")
    write_log(run_dir, 1, 0, "first")
    write_log(run_dir, 2, 0, "a", "b", "c")
    write_log(run_dir, 2, 1, "d")

    assert "rank 0: b\nrank 0: c\nrank 1: d\n" == cli("logs", "-n", "2").stdout
    assert "rank 1: d\n" == cli("logs", "--rank", "1").stdout
    assert "rank 0: first\n" == cli("logs", "--attempt", "1").stdout
    assert 2 == cli("logs", "--attempt", "3").returncode
    assert '{"rank": 1, "stream": "stdout", "text": "d"}\n' == cli("logs", "--rank", "1", "--json").stdout
    assert "--rank 7: attempt-0002 has no such rank; it has 0, 1" in cli("logs", "--rank", "7").stderr


def test_logs_are_followed_until_the_runner_ends(tmp_path, held_lock):
    """
    New lines come as they are written, those of the next attempt too, which is told beside them.
    """
    run_dir = write_run(tmp_path / "llama")
    path = write_log(run_dir, 1, 0, "old")
    lock = (run_dir / "lock").open("a")
    fcntl.flock(lock, fcntl.LOCK_EX)
    argv = [sys.executable, "-m", "runner", "logs", "-f", str(run_dir)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as follower:
        assert "rank 0: old\n" == follower.stdout.readline()
        with path.open("a") as file:
            file.write("new\n")
        assert "rank 0: new\n" == follower.stdout.readline()
        write_log(run_dir, 2, 0, "again")
        assert "rank 0: again\n" == follower.stdout.readline()
        lock.close()
        assert 0 == follower.wait(timeout=30)
        assert "== attempt-0002 ==\n" == follower.stderr.read()


@pytest.mark.parametrize(
    ("lease", "expected"),
    [
        ({"state": "held", "who": "srv_a"}, []),
        (
            {"state": "lapsed", "who": "srv_a"},
            ["  the lease of the run cannot be renewed: copies wait for the store, and nothing else does"],
        ),
        ({"state": "watching", "who": "srv_a"}, ["  watching whether srv_a still has this run"]),
        ({"state": "taken", "who": ""}, ["  another runner has this run now"]),
        ("garbage", []),
    ],
)
def test_a_lease_that_is_in_the_way_is_told(lease, expected):
    """
    And no word of one that is not.
    """
    status = {"job": "j", "lease": lease}

    assert expected == list(describe(status, alive=True, now=datetime.now(UTC)))[1:-2]


def test_why_nothing_is_saved_is_told():
    """
    While the run lasts; of one that is over, `outcome` is told.
    """
    told = [
        list(describe({"save_error": "no room", **more}, alive=True, now=datetime.now(UTC)))
        for more in ({}, {"outcome": "gave_up"})
    ]

    assert [True, False] == ["  not saved: no room" in lines for lines in told]


@pytest.mark.parametrize("command", ["checkpoints", "run"])
def test_whoever_reads_no_job_does_not_wait_for_what_reads_one(command):
    """
    A restore by address, which a machine is paid for meanwhile, and `run`, which only passes its job on, begin without it.
    """
    asked = ("pydantic", "ruamel.yaml", "runner.job", "runner.facts")
    code = (
        f"import sys, runner.cli.main, runner.cli.{command}; print(*(name for name in {asked} if name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)

    assert "\n" == done.stdout
