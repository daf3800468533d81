import subprocess
import sys
from pathlib import Path

import pytest

from runner.adapters.launchers import LAUNCHERS, Launch, check_command, split_command
from runner.adapters.launchers.launch import run_module
from runner.errors import JobError
from runner.job import LauncherName

PYTHON = "/env/bin/python"


def launch(*words):
    return Launch(python=PYTHON, command=words, num_procs=8, log_dir=Path("/logs"))


def test_every_launcher_of_the_job_file_exists():
    """
    A name that job.yaml accepts has an adapter.
    """
    assert set(LauncherName) == set(LAUNCHERS)


TORCHRUN = (
    "--standalone",
    "--local-addr=127.0.0.1",
    "--nproc-per-node=8",
    "--max-restarts=0",
    "--log-dir=/logs",
    "--redirects=3",
)


@pytest.mark.parametrize(
    ("name", "words", "expected"),
    [
        ("torchrun", ("train.py", "--lr", "1"), ("torch.distributed.run", *TORCHRUN, "--", "train.py", "--lr", "1")),
        ("torchrun", ("-m", "package.train", "--log", "1"), ("torch.distributed.run", *TORCHRUN, "-m", "--", "package.train", "--log", "1")),
        ("torchrun", ("--tee", "3", "train.py"), ("torch.distributed.run", *TORCHRUN, "--tee", "3", "train.py")),
        (
            "accelerate",
            ("--config_file", "fsdp.yaml", "train.py"),
            ("accelerate.commands.launch", "--num_processes=8", "--num_machines=1", "--max_restarts=0", "--tee=3", "--log_dir=/logs",
             "--config_file", "fsdp.yaml", "train.py"),
        ),
        (
            "deepspeed",
            ("train.py",),
            ("deepspeed.launcher.runner", "--hostfile=/dev/null", "--num_gpus=8", "--enable_each_rank_log=/logs", "--", "--", "train.py"),
        ),
        (
            "deepspeed",
            ("--module", "package.train", "--m", "1"),
            ("deepspeed.launcher.runner", "--hostfile=/dev/null", "--num_gpus=8", "--enable_each_rank_log=/logs", "--module", "--", "--", "package.train", "--m", "1"),
        ),
        (
            "deepspeed",
            ("--include", "localhost:0", "train.py"),
            ("deepspeed.launcher.runner", "--hostfile=/dev/null", "--num_gpus=8", "--enable_each_rank_log=/logs", "--include", "localhost:0", "train.py"),
        ),
        ("axolotl", ("config.yml",), ("torch.distributed.run", *TORCHRUN, "--module", "--", "axolotl.cli.train", "config.yml")),
        ("llamafactory", ("sft.yaml",), ("torch.distributed.run", *TORCHRUN, "--module", "--", "llamafactory.launcher", "sft.yaml")),
        (
            "torchtune",
            ("full_finetune_distributed", "--config", "llama3/8B_full"),
            ("torchtune._cli.tune", "run", *TORCHRUN, "full_finetune_distributed", "--config", "llama3/8B_full"),
        ),
    ],
)  # fmt: skip
def test_a_launcher_is_called_as_it_documents(name, words, expected):
    """
    One process per card, no restarts of its own, one log per rank.
    """
    argv = LAUNCHERS[LauncherName(name)].argv(launch(*words))

    assert (PYTHON, "-c") == argv[:2]
    assert expected == argv[3:]


@pytest.mark.parametrize(
    ("words", "argv"),
    [
        pytest.param(("python", "a.py"), ("/env/bin/python", "a.py"), id="python"),
        pytest.param(("./go.sh", "a"), ("./go.sh", "a"), id="program"),
    ],
)
def test_a_command_runs_as_it_stands(words, argv):
    """
    Only `python` is replaced: by the training interpreter.
    """
    assert argv == LAUNCHERS[LauncherName.COMMAND].argv(launch(*words))


def test_a_module_runs_out_of_reach_of_the_users_files(tmp_path):
    """
    Neither the working folder nor PYTHONPATH can hide a module; what is only there is found still.
    """
    (tmp_path / "json.py").write_text("raise RuntimeError('not the real one')")
    (tmp_path / "mine.py").write_text("import json, sys; print(json.dumps(sys.argv[1:]), __name__)")
    argv = run_module(sys.executable, "mine", "--flag", "a b")

    done = subprocess.run(
        argv, cwd=tmp_path, env={"PYTHONPATH": "."}, capture_output=True, text=True, timeout=20, check=True
    )

    assert '["--flag", "a b"] __main__\n' == done.stdout


def test_an_option_of_the_script_is_never_taken_for_one_of_torchruns(tmp_path):
    """
    `--log` could be short for three of its own, and would end the launch before the script begins.
    """
    (tmp_path / "train.py").write_text("import sys; print(sys.argv[1:])")
    words = ("train.py", "--log", "x", "--", "--no")
    one = Launch(python=sys.executable, command=words, num_procs=1, log_dir=tmp_path / "logs")

    argv = LAUNCHERS[LauncherName.TORCHRUN].argv(one)
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)

    assert 0 == done.returncode, done.stderr
    assert ["['--log', 'x', '--', '--no']\n"] == [p.read_text() for p in tmp_path.glob("logs/*/*/0/stdout.log")]


SECOND = """
import argparse, sys
parser = argparse.ArgumentParser()
for name in ("--node_rank", "--master_addr", "--master_port", "--world_info", "--enable_each_rank_log"):
    parser.add_argument(name)
for name in ("--module", "--no_python", "--no_local_rank"):
    parser.add_argument(name, action="store_true")
parser.add_argument("training_script")
parser.add_argument("training_script_args", nargs=argparse.REMAINDER)
args = parser.parse_args()
print([args.training_script, *args.training_script_args])
"""
FIRST = """
import argparse, subprocess, sys
parser = argparse.ArgumentParser()
for name in ("--hostfile", "--num_gpus", "--num_nodes", "--master_addr", "--master_port", "--enable_each_rank_log"):
    parser.add_argument(name)
for name in ("--module", "--no_python", "--no_local_rank", "--no_ssh_check"):
    parser.add_argument(name, action="store_true")
parser.add_argument("user_script")
parser.add_argument("user_args", nargs=argparse.REMAINDER)
args = parser.parse_args()
second = [sys.executable, "-m", "deepspeed.launcher.launch", "--world_info=x", "--master_addr=a", "--master_port=1"]
sys.exit(subprocess.call([*second, *["--module"][: args.module], args.user_script, *args.user_args]))
"""


@pytest.mark.parametrize("module", [(), ("--module",)], ids=["script", "module"])
def test_an_option_of_the_script_is_taken_by_neither_of_deepspeeds_parsers(tmp_path, module):
    """
    Two programs in a row that parse as DeepSpeed 0.19 does: an ambiguous `--m` or `--no` ended the second.
    """
    (tmp_path / "deepspeed" / "launcher").mkdir(parents=True)
    (tmp_path / "deepspeed" / "launcher" / "runner.py").write_text(FIRST)
    (tmp_path / "deepspeed" / "launcher" / "launch.py").write_text(SECOND)
    words = ("train.py", "--m", "5", "--no", "--", "--master", "x")
    one = Launch(python=sys.executable, command=(*module, *words), num_procs=1, log_dir=tmp_path / "logs")

    argv = LAUNCHERS[LauncherName.DEEPSPEED].argv(one)
    done = subprocess.run(
        argv, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, timeout=60, check=False
    )

    assert (0, f"{list(words)}\n") == (done.returncode, done.stdout), done.stderr


def test_placeholders_are_filled():
    """
    Resume arguments become words of their own, other placeholders stay in theirs.
    """
    words = split_command(
        "train.py {resume_args} --out={checkpoint_dir} --fmt '{step} x'",
        resume_args=("--resume", "/a b"),
        values={"checkpoint_dir": "/c d"},
    )

    assert ("train.py", "--resume", "/a b", "--out=/c d", "--fmt", "{step} x") == words


def test_nothing_to_resume_leaves_no_empty_word():
    """
    At the first start there is no argument, not an empty one.
    """
    assert ("train.py",) == split_command("train.py {resume_args}", resume_args=(), values={})


def test_an_open_quote_is_the_jobs_fault():
    """
    The message shows the command.
    """
    with pytest.raises(JobError, match=r"command: cannot be split into words: No closing quotation: .*--name"):
        split_command("train.py --name 'x", resume_args=(), values={})


@pytest.fixture
def code(tmp_path):
    (tmp_path / "train.py").touch()
    (tmp_path / "go.sh").touch(mode=0o755)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("torchrun", ("train.py", "--lr", "1")),
        ("torchrun", ("-m", "package.train")),
        ("axolotl", ("https://example.com/config.yml",)),
        ("torchtune", ("full_finetune_distributed",)),
        ("command", ("./go.sh",)),
        ("command", ("sh", "-c", "true")),
        ("command", ("python", "anything.py")),
    ],
)
def test_a_command_that_can_start_passes(code, name, words):
    """
    Files and programs that exist, and what only the launcher can know, are not refused.
    """
    check_command(LauncherName(name), launch(*words), cwd=code)


@pytest.mark.parametrize(
    ("name", "words", "message", "hint"),
    [
        ("torchrun", ("trian.py",), "command: expected a file 'trian.py' in .*, found none", "workdir"),
        ("torchrun", ("torchrun", "train.py"), "script and its arguments only, got 'torchrun'", "leave 'torchrun' out"),
        ("torchrun", ("/usr/bin/python3", "train.py"), "`launcher: torchrun` starts the script", "`launcher: command`"),
        (
            "torchrun",
            ("accelerate", "launch", "a.py"),
            "got 'accelerate'",
            "`launcher: accelerate` or `launcher: command`",
        ),
        ("torchtune", ("tune", "run", "full"), "got 'tune'", "leave 'tune' out"),
        ("torchrun", ("OMP_NUM_THREADS=1", "train.py"), "got 'OMP_NUM_THREADS=1'", "`env: {OMP_NUM_THREADS: 1}`"),
        ("command", ("A=1", "./go.sh"), "command: expected a script or a program first", "`env: {A: 1}`"),
        ("command", ("./train.py",), "command: expected a program './train.py', found none that can be run", "chmod"),
        ("command", ("no-such-program",), "command: expected a program 'no-such-program', .* in PATH", "spelling"),
        ("torchrun", (), "command: expected a script and its arguments, got nothing", ""),
    ],
)
def test_a_command_that_cannot_start_is_refused_before_the_launch(code, name, words, message, hint):
    """
    The message names the command and the folder; the hint says what to do.
    """
    with pytest.raises(JobError, match=message) as caught:
        check_command(LauncherName(name), launch(*words), cwd=code)

    assert hint in caught.value.hint
