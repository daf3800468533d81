"""
How real programs die at night: what torch, Hugging Face, rich, loguru, hydra, pip and bash wrote when they failed
so, with the middle of long tracebacks left out. A folder is torchrun's, of two ranks with gloo.
"""

from pathlib import Path

import pytest

from runner.facts import Exit
from runner.supervise.triage import first_error
from runner.supervise.triage.advice import ADVICE

NIGHTS = Path(__file__).parents[1] / "data" / "nights"
GIVE_UP, RESUME = "give_up_user", "resume"
LOGS = {
    # ---- how tracebacks look
    "rich_group": ("user_exception", GIVE_UP, "ValueError: shard 1: bad magic"),
    "rich_bare_assert": ("user_exception", GIVE_UP, "AssertionError (train.py:4: assert 1 == 2)"),
    "rich_chain": ("user_exception", GIVE_UP, "KeyError: 'tokenizer' (train.py:4"),
    "loguru_exc": ("user_exception", GIVE_UP, "ZeroDivisionError: division by zero (train.py:4)"),
    "json_log": ("user_exception", GIVE_UP, "ValueError: shard 3 has 7 columns, expected 8 (train.py:7)"),
    "structlog_json": ("dataset_missing", GIVE_UP, "FileNotFoundError: [Errno 2] No such file or directory: '/data/none.bin'"),
    "thread_value": ("user_exception", GIVE_UP, "ValueError: shard 7 has no labels (train.py:4)"),
    "del_ignored": ("user_exception", GIVE_UP, "KeyError: 'labels'"),
    "excepthook_broken": ("user_exception", GIVE_UP, "KeyError: 'labels'"),
    "warns_then_key": ("user_exception", GIVE_UP, "KeyError: 'labels'"),
    "accel_launch": ("user_exception", GIVE_UP, "ValueError: no such dataset: alpaca (t.py:2)"),
    # ---- errors that say little
    "bare_assert_deep": ("user_exception", GIVE_UP, "AssertionError (train.py:3: assert (x.ndim)"),
    "syntax_import": ("user_exception", GIVE_UP, "SyntaxError: '(' was never closed (broken.py:2: x = (1)"),
    "bdb": ("user_exception", GIVE_UP, "bdb.BdbQuit (train.py:3"),
    "called": ("user_exception", GIVE_UP, "before it: preprocess: no files in /data (train.py:2)"),
    "spawn_noguard": ("user_exception", GIVE_UP, "RuntimeError: An attempt has been made to start a new process"),
    "spawn_pickle": ("user_exception", GIVE_UP, "AttributeError: Can't pickle local object 'D.__init__.<locals>.<lambda>'"),
    "futures_broken": ("user_exception", RESUME, "BrokenProcessPool"),
    "pydantic": ("user_exception", GIVE_UP, "2 validation errors for T: lr Input should be a valid number"),
    "yaml_flow": ("user_exception", GIVE_UP, "a: [1, 2 ^ expected ',' or ']', but got '<stream end>' (train.py:2)"),
    "yaml": ("user_exception", GIVE_UP, 'mapping values are not allowed here: in "/w/c.yaml", line 2, column 5'),
    "hydra_override": ("user_exception", GIVE_UP, "Could not override 'optim.lrr'."),
    "typer_usage": ("user_exception", GIVE_UP, "No such option: --stepz (Possible options: --help, --steps)"),
    "sys_exit": ("user_exception", GIVE_UP, "the last words: no shards match /data/*.bin"),
    "asyncio_task": ("user_exception", GIVE_UP, "KeyError: 'input_ids' (train.py:7"),
    "no_env": ("user_exception", GIVE_UP, "environment variable RANK expected, but not set"),
    # ---- torch
    "dynamo_backend": ("user_exception", GIVE_UP, "ValueError: backend cannot do convolutions (train.py:3)"),
    "dynamo_unsupported": ("user_exception", GIVE_UP, "(train.py:5: print(y.sum().item()))"),
    "dynamo_user": ("user_exception", GIVE_UP, "RuntimeError(\"shape '[3, 5]' is invalid for input of size 4\") (train.py:5: return y.view(3,5)+1)"),
    "inductor_nocc": ("no_c_compiler", "retry_env", "No working C++ compiler found"),
    "impossible": ("user_exception", GIVE_UP, "tried to allocate 1000000000000000000 bytes"),
    "load_trunc": ("checkpoint_corrupt", RESUME, "OSError: [Errno 22] Invalid argument (train.py:4)"),
    "weights_namespace": ("weights_only", "retry_env", "Unsupported global: GLOBAL argparse.Namespace was not an allowed global"),
    "weights_text": ("file_is_lfs_pointer_or_html", GIVE_UP, "Unsupported operand 100"),
    "save_tiny": ("disk_full", GIVE_UP, "basic_ios::clear: iostream error"),
    "cuda_none": ("wrong_arch", GIVE_UP, "Torch not compiled with CUDA enabled"),
    # ---- native code and processes
    "terminate_cpp": ("segfault", RESUME, "what():  tokenizer cache: index 9 is out of bounds"),
    "segv_dump": ("segfault", RESUME, "Segmentation fault (train.py:3)"),
    "pyhome": ("segfault_startup", GIVE_UP, "init_fs_encoding"),
    "bash_killed": ("sigkill_unknown", RESUME, "line 1: 12889 Killed"),
    "bash_nocmd": ("missing_module", GIVE_UP, "torchrunn: command not found"),
    # ---- Hugging Face, packages, the network
    "hf_gated403": ("hf_gated_403", GIVE_UP, "403 Forbidden"),
    "hf_gated401": ("hf_token_401", GIVE_UP, "401 Unauthorized"),
    "hf_missing": ("hf_token_401", GIVE_UP, "401 Unauthorized"),
    "hf_offline": ("hf_offline_not_cached", GIVE_UP, "outgoing traffic has been disabled"),
    "hf_dead": ("network_reset", "retry_as_is", "Connection refused"),
    "dns": ("network_reset", RESUME, "Name or service not known"),
    "hf_remote_code": ("user_exception", GIVE_UP, "contains custom code"),
    "hf_unknown_type": ("user_exception", GIVE_UP, "does not recognize this architecture"),
    "hf_flash": ("missing_module", GIVE_UP, "FlashAttention2 has been toggled on"),
    "hf_args": ("user_exception", GIVE_UP, "unexpected keyword argument 'evaluation_strategy' (train.py:1)"),
    "peft_no_config": ("user_exception", GIVE_UP, "it became ValueError: Can't find 'adapter_config.json' at '/w/adapter' (train.py:2)"),
    "hf_parser": ("user_exception", GIVE_UP, "['learning_rte']"),
    "safet_header": ("file_is_lfs_pointer_or_html", GIVE_UP, "header too large"),
    "safet_cut": ("download_truncated", "retry_env", "incomplete metadata"),
    "called_pip": ("missing_module", GIVE_UP, "requirement flash-attnn"),
}  # fmt: skip
CODES = {"terminate_cpp": -6, "segv_dump": -11, "bash_killed": 137, "bash_nocmd": 127, "typer_usage": 2}
RANKS = {
    "exit_0": ("uneven_data", GIVE_UP, "rank 1 left with exit code 0 while others went on; the first to notice, rank 0: "),
    "os_exit_0": ("uneven_data", GIVE_UP, "rank 1 left with exit code 0 while others went on; the first to notice, rank 0: "),
    "abort_in_thread": ("segfault", RESUME, "rank 1: Fatal Python error: Aborted (train.py:78); see "),
    "group": ("user_exception", GIVE_UP, "rank 1: ValueError: shard 1: bad magic (train.py:57); see "),
    "thread": ("network_reset", RESUME, "rank 1: ConnectionError: bucket closed the connection (train.py:90); see "),
    "save_full": ("disk_full", GIVE_UP, "rank 1: RuntimeError: basic_ios::clear: iostream error; see "),
    "worker_exit": ("user_exception", GIVE_UP, "rank 1: RuntimeError: DataLoader worker (pid 18326) exited unexpectedly with exit code 1."),
}  # fmt: skip


@pytest.mark.parametrize("name", LOGS)
def test_a_program_that_died_says_why(name):
    """
    The error itself, whoever drew a box around it or printed something after it; and what follows.
    """
    label, decision, words = LOGS[name]

    found = first_error(NIGHTS / f"{name}.log", Exit(code=CODES.get(name, 1)))

    assert (label, decision) == (found.label, found.decision), found
    assert words in found.summary


@pytest.mark.parametrize("name", RANKS)
def test_the_rank_that_is_to_blame_is_named(name):
    """
    Rank 1 it is in each, whatever rank 0 has to say of its peer.
    """
    label, decision, words = RANKS[name]

    found = first_error(NIGHTS / name, Exit(code=1))

    assert (label, decision, 1) == (found.label, found.decision, found.rank), found
    assert found.summary.startswith(words)


@pytest.mark.parametrize(("free_bytes", "confidence"), [(None, "medium"), (4096, "high"), (10**9, "low")])
def test_what_only_follows_from_a_full_disk_is_as_certain_as_the_disk_is_full(free_bytes, confidence):
    """
    torch.save does not ask why it could not write.
    """
    found = first_error(NIGHTS / "save_full", Exit(code=1), free_bytes=free_bytes)

    assert ("disk_full", confidence) == (found.label, found.confidence)


SHELLS = {
    "not executable": (126, "/w/run.sh: line 3: ./go.sh: Permission denied", "user_exception", "chmod +x"),
    "not executable, zsh": (126, "zsh:1: permission denied: ./go.sh", "user_exception", "chmod +x"),
    "another processor": (
        126,
        "bash: line 1: ./fuse: cannot execute binary file: Exec format error",
        "user_exception",
        "build it here",
    ),
    "windows line ends": (
        127,
        "bash: line 1: ./go.sh: cannot execute: required file not found",
        "user_exception",
        "dos2unix",
    ),
    "bad interpreter": (
        126,
        "bash: ./go.py: /opt/conda/bin/python3.9: bad interpreter: No such file or directory",
        "user_exception",
        "that line",
    ),
    "no such program, env": (
        127,
        "/usr/bin/env: 'python3.9': No such file or directory",
        "missing_module",
        "install it in setup",
    ),
    "no such program, zsh": (127, "zsh:1: command not found: axolotll", "missing_module", "install it in setup"),
    "no such program": (127, "/w/run.sh: line 7: axolotll: command not found", "missing_module", "install it in setup"),
    "cd": (1, "/w/run.sh: line 2: cd: /data/run7: No such file or directory", "user_exception", "check the path"),
    "cd, dash": (2, "sh: 1: cd: can't cd to /data/run7", "user_exception", "check the path"),
    "exec": (127, "bash: line 1: exec: nosuchprog: not found", "missing_module", "install it in setup"),
    "source": (
        1,
        "/w/run.sh: line 1: /venv/bin/activate: No such file or directory",
        "user_exception",
        "check the path",
    ),
}


@pytest.mark.parametrize(("code", "line", "label", "remedy"), SHELLS.values(), ids=SHELLS)
def test_what_a_shell_could_not_run_is_told_with_its_cure(tmp_path, code, line, label, remedy):
    """
    By whom it is said, and how: the shell's name and the number of its line.
    """
    (tmp_path / "launcher.log").write_text(f"preparing\n{line}\n")

    found = first_error(tmp_path, Exit(code=code))

    assert (label, GIVE_UP, line) == (found.label, found.decision, found.primary_line)
    assert found.confidence in {"medium", "high"}
    assert remedy in found.remedy


def test_what_a_program_of_a_script_could_not_open_is_told(tmp_path):
    """
    Not its last words, which are a farewell.
    """
    told = "tar: /data/code.tar.gz: Cannot open: No such file or directory"
    (tmp_path / "launcher.log").write_text(f"{told}\ntar: Error is not recoverable: exiting now\n")

    assert told == first_error(tmp_path, Exit(code=2)).primary_line


def test_a_shell_that_went_on_is_not_to_blame(tmp_path):
    """
    `module: command not found` of a script that was written for another machine ends nothing.
    """
    log = tmp_path / "launcher.log"
    log.write_text("run.sh: line 2: module: command not found\n" + (NIGHTS / "yaml.log").read_text())

    found = first_error(tmp_path, Exit(code=1))

    assert (LOGS["yaml"][0], True) == (found.label, LOGS["yaml"][2] in found.summary)


def test_each_cure_is_one_line_that_a_person_can_act_on():
    """
    None sends anybody away with "correct the script".
    """
    for row in ADVICE:
        assert 0 < len(row.remedy) <= 120, row
        assert row.cause[-1] not in ".!"


def test_every_log_is_read():
    """
    A fixture that no test names tests nothing.
    """
    assert set(LOGS) | set(RANKS) == {path.stem for path in NIGHTS.iterdir()}
