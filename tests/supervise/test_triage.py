"""Real torchrun where its table matters, real Python errors elsewhere."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from runner.adapters.launchers import LAUNCHERS, Launch
from runner.facts import Exit
from runner.job import LauncherName
from runner.supervise import attempt
from runner.supervise.triage import first_error
from tests.supervise.conftest import until


@pytest.fixture
def torchrun(marker, tmp_path):
    """Run a script on two ranks under torchrun and a shim; return the attempt's folder and exit."""

    def run(code):
        folder = tmp_path / "run" / "attempt-0001"
        (tmp_path / "code").mkdir()
        (tmp_path / "code" / "train.py").write_text(code)
        launch = Launch(python=sys.executable, command=("code/train.py",), num_procs=2, log_dir=folder)
        spec = attempt.LaunchSpec(
            number=1,
            id=marker,
            argv=LAUNCHERS[LauncherName.TORCHRUN].argv(launch),
            cwd=tmp_path,
            run_dir=tmp_path / "run",
            folder=folder,
            control=tmp_path / "page",
            job="job",
            checkpoint_dir=tmp_path,
            save_interval_s=60.0,
            lineage=1,
            env={"PYTHONPATH": str(tmp_path)},
        )
        attempt.start(spec)
        until(lambda: attempt.live(marker) is None, 60)
        return folder, attempt.read_exit(folder)

    return run


@pytest.fixture
def ranks(tmp_path):
    """Run one script per rank by plain Python, into the files that torchrun would make."""

    def run(*scripts, launcher_log=""):
        for rank, code in enumerate(scripts):
            logs = tmp_path / "id" / "attempt_0" / str(rank)
            logs.mkdir(parents=True)
            argv = [sys.executable, "-I", *(["-c", code] if isinstance(code, str) else code)]
            with (logs / "stdout.log").open("wb") as out, (logs / "stderr.log").open("wb") as err:
                subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=out, stderr=err, check=False, timeout=20)
        (tmp_path / "launcher.log").write_text(launcher_log)
        return tmp_path

    return run


def table(**codes):
    rows = (f"  rank      : {r[1:]} (local_rank: {r[1:]})\n  exitcode  : {c} (pid: 7)\n" for r, c in codes.items())
    return "".join(rows)


def write(tmp_path, text):
    log = tmp_path / "train.log"
    log.write_text(text)
    return log


PEER = "raise RuntimeError('[pair.cc:545] Connection closed by peer [127.0.0.1]:20370')"


def test_an_exception_on_one_rank_is_found(torchrun, tmp_path):
    """
    The rank, its exception and its file are named; files of the user do not break torchrun.
    """
    for name in ("json.py", "torch.py", "logging.py"):
        (tmp_path / name).write_text("raise RuntimeError('not the real one')")

    folder, ended = torchrun(
        "import os, time\nif os.environ['RANK'] == '1': raise ValueError('bad batch')\ntime.sleep(60)"
    )

    said = first_error(folder, ended).summary
    assert Exit(code=1) == ended
    assert said.startswith("rank 1: ValueError: bad batch (train.py:2); see ")
    assert "ValueError: bad batch" in Path(said.partition("; see ")[2]).read_text()


def test_a_killed_rank_is_named_though_only_others_talk(torchrun):
    """
    What healthy ranks print about a dead peer is not the cause.
    """
    code = f"import os, time\nif os.environ['RANK'] == '1': os.kill(os.getpid(), 9)\ntime.sleep(0.1)\n{PEER}"

    folder, ended = torchrun(code)

    assert first_error(folder, ended).summary.startswith(
        "rank 1 was killed by SIGKILL (out of memory? the kernel does that); see "
    )


def test_what_a_script_repeats_of_an_error_keeps_its_class(tmp_path):
    """
    `except RuntimeError as e: raise RuntimeError(f"rank 0: {e}")` is no error of the script's own.
    """
    frame = '  File "/w/train.py", line 7, in step\n    {}\n'
    first = "RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1800000ms for recv operation to complete"
    begin = "Traceback (most recent call last):\n"
    log = write(
        tmp_path,
        f"{begin}{frame.format('loss.backward()')}{first}\n\nDuring handling of the above exception, another exception occurred:\n\n"
        f"{begin}{frame.format('raise RuntimeError(str(e))')}{first}\n",
    )

    assert "rank_stuck" == first_error(log, Exit(code=1)).label


@pytest.mark.parametrize(
    ("record", "log", "said"),
    [
        pytest.param(
            {"code": -9, "oom_kills": 1, "memory_limit": 300_000_000},
            "",
            "out of memory: the kernel killed a process; the container may have 0.3 GB: give it more",
            id="the program itself",
        ),
        pytest.param(
            {"code": 1, "oom_kills": 3, "memory_limit": (1 << 63) - 4096},
            table(r0=-15, r1=-9),
            "out of memory: the kernel killed rank 1 and 2 more; the container has no limit: give it more",
            id="a rank",
        ),
        pytest.param({"code": -9}, "", "the launcher was killed by SIGKILL; see", id="somebody else's SIGKILL"),
    ],
)
def test_a_kill_for_want_of_memory_is_named_as_such(tmp_path, record, log, said):
    """
    The kernel counts whom it kills in a container: what the shim read there is no guess.
    """
    (tmp_path / "exit.json").write_text(json.dumps(record))
    (tmp_path / "launcher.log").write_text(log)

    assert first_error(tmp_path, Exit(code=record["code"])).summary.startswith(said)


def test_a_silent_exit_is_named_with_its_code(torchrun):
    """
    A rank that exits without a word is named with its code, which torchrun turns into 1.
    """
    folder, ended = torchrun("import os, sys, time\nif os.environ['RANK'] == '0': sys.exit(3)\ntime.sleep(60)")

    assert first_error(folder, ended).summary.startswith("rank 0 exited with code 3 and no error message; see ")


def test_a_rank_that_says_why_without_the_look_of_an_error_is_quoted(ranks, tmp_path):
    """
    `sys.exit("why")` and a logger's line are all that a person at night has.
    """
    table = "E1130 02:00:00.000000 9 torch/distributed/elastic/multiprocessing/api.py:986] failed (exitcode: 1) local_rank: 0 (pid: 7) of binary: python"
    ranks("import sys; sys.exit('config.yaml: no key data.path')", launcher_log=f"{table}\n")

    summary = first_error(tmp_path, Exit(code=1)).summary

    assert (
        "exited with code 1 and no error message; the last line of its stderr: config.yaml: no key data.path; see"
        in summary
    )


def test_a_job_that_asks_for_input_is_told_so(ranks):
    """
    Standard input is empty, so `input()` fails at once, with an error that says nothing of a question.
    """
    folder, ended = ranks("input('Continue? [y/N] ')"), Exit(code=1)

    found = first_error(folder, ended)
    assert ("EOFError: EOF when reading a line", "high") == (found.primary_line, found.confidence)
    assert "the script asked for input, and nobody answers" == found.cause


def test_the_same_error_everywhere_is_told_once(ranks):
    """
    An import that fails on all ranks is not blamed on one.
    """
    folder = ranks("import nothing_of_this_name", "import nothing_of_this_name")

    said = first_error(folder, Exit(code=1)).summary

    assert said.startswith("all ranks: ModuleNotFoundError: No module named 'nothing_of_this_name'; see ")


DUMP = """Fatal Python error: Aborted

Thread 0x00007fa37ee6a140 (most recent call first):
  File "/usr/lib/python3.12/site-packages/torch/utils/data/dataloader.py", line 737 in __next__
  File "/code/train.py", line 110 in main

"""
RESET = """[rank1]: Traceback (most recent call last):
[rank1]:   File "/usr/lib/python3.12/multiprocessing/resource_sharer.py", line 138, in _serve
[rank1]: ConnectionResetError: [Errno 104] Connection reset by peer
"""


@pytest.mark.parametrize(
    ("log", "label"),
    [(DUMP + RESET + DUMP, "rank_stuck"), (RESET + DUMP, "network_reset")],
    ids=["after the rank's dump, before its worker's", "before any dump"],
)
def test_of_a_hang_only_what_was_printed_before_it_was_ended_can_be_the_cause(tmp_path, log, label):
    """A data worker writes its dump into the log of its rank, after words that only the kill has caused."""
    rank = tmp_path / "id" / "attempt_0" / "1"
    rank.mkdir(parents=True)
    (rank / "stderr.log").write_text(log)
    (tmp_path / "launcher.log").write_text("")
    (tmp_path / "hang.json").write_text(json.dumps({"rank": 1, "reason": "no step for 10 s"}))
    assert label == first_error(tmp_path).label


def test_a_missing_script_is_told_as_python_does(ranks):
    """
    A script that is not there leaves no traceback, but a line.
    """
    folder = ranks(["/nowhere/train.py"])

    assert "can't open file '/nowhere/train.py'" in first_error(folder, Exit(code=1)).summary


def test_the_first_to_die_is_taken_of_several(ranks):
    """
    Of several real errors the one that was written first is the cause.
    """
    folder = ranks("raise KeyError('second')", "raise ValueError('first')")
    for rank, second in ((0, 200), (1, 100)):
        os.utime(folder / f"id/attempt_0/{rank}/stderr.log", (second, second))

    assert first_error(folder, Exit(code=1)).summary.startswith("rank 1: ValueError: first; see ")


def test_a_crash_in_native_code_is_a_rank_s_error(ranks):
    """
    With the fault handler on, a segmentation fault has a line of its own.
    """
    folder = ranks("import faulthandler; faulthandler.enable(); faulthandler._sigsegv()", PEER)

    assert first_error(folder, Exit(code=1)).summary.startswith("rank 0: Fatal Python error: Segmentation fault; see ")


@pytest.mark.parametrize(
    ("log", "said"),
    [
        pytest.param(table(r0=-15, r1=-11), "rank 1 was killed by SIGSEGV; see ", id="signal"),
        pytest.param(
            table(r0=-15), "rank 0: RuntimeError: [pair.cc:545] Connection closed by peer", id="only secondary"
        ),
        pytest.param(
            "vramfarm-runner: cannot start /x: No such file or directory\n",
            "launcher: vramfarm-runner: cannot start /x",
            id="no launcher",
        ),
    ],
)
def test_without_a_real_error_the_best_of_the_rest_is_told(ranks, log, said):
    """
    Torchrun's table, then the launcher's own words, then what healthy ranks said.
    """
    assert first_error(ranks(PEER, launcher_log=log), Exit(code=1)).summary.startswith(said)


@pytest.mark.parametrize("code", [1, None])
def test_a_full_disk_is_named_though_no_log_has_a_word_of_it(tmp_path, code):
    """
    What it has left is measured; with room, or with an error that a log does name, that is no cause.
    """
    full = first_error(tmp_path, Exit(code=code), free_bytes=4096)
    roomy = first_error(tmp_path, Exit(code=code), free_bytes=10**9)
    (tmp_path / "launcher.log").write_text("ValueError: bad batch\n")
    named = first_error(tmp_path, Exit(code=code), free_bytes=4096)

    assert ("disk_full", "disk", "high") == (full.label, full.category, full.confidence)
    assert f"the disk of {tmp_path} is full: 4 kB are free, and no log could be written" == full.summary
    assert "unknown" == roomy.label
    assert "ValueError: bad batch" == named.primary_line


@pytest.mark.parametrize(
    ("code", "said"),
    [
        pytest.param(2, "the launcher exited with code 2; see ", id="code"),
        pytest.param(-9, "the launcher was killed by SIGKILL; see ", id="signal"),
        pytest.param(
            None,
            "nobody saw how the launcher ended: its shim was killed too, as in a container out of memory, or its disk accepted no write; see ",
            id="unknown",
        ),
    ],
)
def test_without_any_words_the_exit_is_told(tmp_path, code, said):
    """
    There is always a line, and it says where to look.
    """
    (tmp_path / "launcher.log").touch()

    assert f"{said}{tmp_path}/launcher.log" == first_error(tmp_path, Exit(code=code)).summary


@pytest.mark.parametrize(
    ("text", "error"),
    [
        pytest.param(
            "Traceback (most recent call last):\n  File\nKeyError: 'x'\n\nDuring handling of the above exception, another "
            "exception occurred:\n\nTraceback (most recent call last):\n  File\nRuntimeError: unexpected pos 64 vs 0",
            "KeyError: 'x'",
            id="error while cleaning up",
        ),
        pytest.param(
            "Traceback (most recent call last):\n  File\nValueError: Caught ValueError in DataLoader worker process 0.\n"
            "Original Traceback (most recent call last):\n  File\nValueError: bad sample 7",
            "ValueError: bad sample 7",
            id="DataLoader worker",
        ),
        pytest.param(
            "[rank1]: Traceback (most recent call last):\n[rank1]:   File\n[rank1]: torch.OutOfMemoryError: CUDA out of memory.",
            "torch.OutOfMemoryError: CUDA out of memory.",
            id="rank prefix",
        ),
        pytest.param(
            "Traceback (most recent call last):\n  File\ntorch.distributed.DistBackendError: NCCL error in: x.cpp:1, ncclInvalidUsage\n"
            "Last error:\nDuplicate GPU detected : rank 1 and rank 0 both on CUDA device 2000",
            "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 2000",
            id="NCCL's last error",
        ),
        pytest.param(
            "usage: train.py [-h]\ntrain.py: error: unrecognized arguments: --lrr",
            "train.py: error: unrecognized arguments: --lrr",
            id="arguments",
        ),
        pytest.param(
            "  File \"t.py\", line 1\n    f(\n     ^\nSyntaxError: '(' was never closed",
            "SyntaxError: '(' was never closed",
            id="syntax",
        ),
        pytest.param(
            "Traceback (most recent call last):\n  File\nmine.Trouble\n",
            "mine.Trouble",
            id="exception without a message",
        ),
        pytest.param("step 1\nloss: 0.5\n", "", id="nothing"),
    ],
)
def test_the_last_real_error_of_a_text_is_found(tmp_path, text, error):
    """
    The line that names the error, not what surrounds it.
    """
    assert error == first_error(write(tmp_path, text)).primary_line.rpartition("]: ")[2]
