"""Folders of logs, and logs that nobody would call one."""

import json
import os
import subprocess
import sys

import pytest

from runner.cli.main import main
from runner.supervise.triage import first_error

KEYS = [
    "label",
    "category",
    "rank",
    "primary_line",
    "primary_line_no",
    "cause",
    "remedy",
    "decision",
    "env",
    "confidence",
]
ERROR = 'Traceback (most recent call last):\n  File "t.py", line 5, in <module>\nValueError: bad batch\n'
PEER = "RuntimeError: [/pytorch/gloo/transport/tcp/pair.cc:561] Connection closed by peer [127.0.0.1]:4\n"


@pytest.fixture
def folder(tmp_path):
    """Write files, each a second after the one before."""

    def write(files):
        for at, (name, text) in enumerate(files.items()):
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text if isinstance(text, bytes) else text.encode())
            os.utime(path, (1_000 + at, 1_000 + at))
        return tmp_path

    return write


def test_torchrun_s_folder_is_read_by_rank(folder):
    """
    Each file's rank is its folder's; line numbers are the file's own.
    """
    found = first_error(
        folder(
            {
                "x/attempt_0/0/stderr.log": PEER,
                "x/attempt_0/1/stderr.log": "loading\n" + ERROR,
                "launcher.log": "  rank      : 0 (local_rank: 0)\n  exitcode  : 1 (pid: 7)\n",
            }
        )
    )

    assert (1, "ValueError: bad batch", 4) == (found.rank, found.primary_line, found.primary_line_no)


def test_a_restart_by_the_launcher_hides_nothing(folder):
    """
    Of torchrun's own attempts the first one counts.
    """
    found = first_error(
        folder(
            {
                "x/attempt_1/0/stderr.log": "torch.OutOfMemoryError: CUDA out of memory.\n",
                "x/attempt_0/0/stderr.log": ERROR,
            }
        )
    )

    assert "ValueError: bad batch" == found.primary_line


def test_of_a_run_the_last_attempt_is_read(folder):
    """
    The folder of a run has an attempt a folder.
    """
    found = first_error(
        folder({"logs/attempt-0001/launcher.log": ERROR, "logs/attempt-0002/launcher.log": "KeyError: 'x'\n"})
    )

    assert "KeyError: 'x'" == found.primary_line


def test_the_kernel_s_log_beside_them_is_believed_first(folder):
    """
    What the kernel says of a card explains what a rank says.
    """
    found = first_error(
        folder(
            {
                "rank_0.log": "[rank0]: RuntimeError: CUDA error: unknown error\n",
                "dmesg.txt": "[12.3] NVRM: Xid (PCI:0000:91:00): 79, pid=1, GPU has fallen off the bus.\n",
            }
        )
    )

    assert ("xid79_fallen_off_bus", "give_up_machine", 0) == (found.label, found.decision, found.rank)


def test_an_elastic_error_file_tells_what_no_log_does(folder):
    """
    With `@record` the traceback may be only in the error file; one that is none is passed over.
    """
    told = {"message": {"message": "ValueError: bad batch", "extraInfo": {"py_callstack": ERROR, "timestamp": "1"}}}

    found = first_error(
        folder(
            {
                "x/attempt_0/1/error.json": json.dumps(told),
                "x/attempt_0/0/error.json": '{"message": [[[',
                "launcher.log": "",
            }
        )
    )

    assert (1, "ValueError: bad batch") == (found.rank, found.primary_line)


def test_stamps_order_files_whose_times_were_lost(folder):
    """
    Copied logs are all of one age; what is written in the lines still says who was first.
    """
    found = first_error(
        folder(
            {
                "rank_0.log": "2026-01-01 10:00:09,000 CUDA out of memory. Tried to allocate 2.00 GiB.\n",
                "rank_1.log": "2026-01-01 10:00:03,000 OSError: [Errno 28] No space left on device\n",
            }
        )
    )

    assert ("disk_full", 1) == (found.label, found.rank)


HOSTILE = {
    "empty": b"",
    "binary": bytes(range(256)) * 4_000,
    "a line without an end": b"x" * 5_000_000,
    "one very long line with an error in it": b"a" * 3_000_000 + b"CUDA out of memory" + b"b" * 3_000_000 + b"\n",
    "nothing but ends": b"\n" * 300_000,
    "bars": b"\r 10%|#    | 1/10 [00:01<00:09, 1.0it/s]" * 50_000,
    "escapes": b"\x1b]0;title\x07\x1b[2J\x1b[1;1H" * 50_000,
    "tables": b"  rank      : 99999999999999999999 (local_rank: 1)\n  exitcode  : -99999999999 (pid: 1)\n" * 20_000,
    "deep tracebacks": (b"Traceback (most recent call last):\n" + b"  " * 500 + b"\n") * 2_000,
    "chains": b"KeyError: 1\n\nDuring handling of the above exception, another exception occurred:\n\n" * 20_000,
    "numbers": b"CUDA out of memory. Tried to allocate 1.2.3.4 GiB ... Process 1 has ..... GiB memory in use\n" * 200,
    "watchdogs": b"Watchdog caught collective operation timeout: WorkNCCL(SeqNum=" + b"9" * 5_000 + b", OpType=A)\n",
    "wide characters": "é漢😀\u202e\ud7ff".encode() * 100_000,
    "groups": (
        b"  + Exception Group Traceback (most recent call last):\n  | ExceptionGroup: a (1 sub-exception)\n  +-+---------------- 1 ----------------\n"
        + b" " * 1_900
        + b"\n"
    )
    * 3_000,
    "boxes": "╭─── Traceback (most recent call last) ───╮\n│ ❱ 1 │ ".encode()
    + ("│ " * 900 + " " * 900 + "\n").encode() * 500,
    "deep JSON": (b'{"error": ' + b'{"error": [' * 3_000 + b"\n") * 20,
    "odd JSON": b'{"level": 3, "error": "Error", "rank": true, "msg": ["x"], "exception": [{"exc_type": null}], "message": null}\n'
    * 5_000,
    "stamps": b"E9999 99:99:99 [Foo Bar 99 99:99:99 2026] 2026-99-99 99:99:99 ValueError: x\n" * 1_000,
}


@pytest.mark.parametrize("raw", HOSTILE.values(), ids=HOSTILE)
def test_whatever_is_in_a_log_there_is_an_answer(folder, raw):
    """
    Nothing in a log makes triage fail, print escapes, or take long.
    """
    found = first_error(folder({"train.log": raw}) / "train.log")

    assert "see " in found.summary
    assert "\x1b" not in found.summary
    assert len(found.summary) < 1_000


def test_a_log_of_hundreds_of_megabytes_takes_little_memory(tmp_path):
    """
    An error in the middle is found among gigabytes of steps; here a part of that, in bounded memory.
    """
    log = tmp_path / "train.log"
    steps = b"".join(
        b"[2025-09-10 20:17:22,925] [INFO] [trainer] step %d loss 0.88 lr 2.9e-04\n" % n for n in range(14_000)
    )
    error = "".join(f"[rank1]: {line}\n" for line in ERROR.splitlines()).encode()
    with log.open("wb") as file:
        for part in range(150):
            file.write(error if part == 70 else steps)

    code = (
        "import re, sys; from pathlib import Path; from runner.supervise.triage import first_error\n"
        "found = first_error(Path(sys.argv[1])); status = Path('/proc/self/status').read_text()\n"
        "print(found.primary_line_no, re.search(r'VmHWM:\\s+(\\d+)', status)[1])"  # ru_maxrss remembers the parent's
    )
    done = subprocess.run([sys.executable, "-c", code, log], capture_output=True, text=True, check=True, timeout=120)
    line, kilobytes = done.stdout.split()

    assert str(70 * 14_000 + 3) == line
    assert int(kilobytes) < 200_000


def test_the_command_prints_exactly_the_ten_fields(folder, capsys):
    """
    For scripts: a fixed set of fields; the line is whole, as it stands in the file.
    """
    log = folder({"train.log": "step 1 loss 2\n\x1b[31m[rank1]: ValueError: bad\tbatch\x1b[0m\r\n"}) / "train.log"

    assert 0 == main(["triage", str(log), "--json"])

    told = json.loads(capsys.readouterr().out)
    assert KEYS == list(told)
    assert "\x1b[31m[rank1]: ValueError: bad\tbatch\x1b[0m" == told["primary_line"]
    assert ("user_exception", 1, 2, "give_up_user", {}) == (
        told["label"],
        told["rank"],
        told["primary_line_no"],
        told["decision"],
        told["env"],
    )


def test_a_person_is_told_what_to_do_and_sent_to_no_link(folder, capsys):
    """
    Links that stand in a log are not passed on; the advice is ours.
    """
    log = folder({"train.log": "[rank0]: ValueError: get the fix at https://bit.ly/x and run it\n"}) / "train.log"

    assert 0 == main(["triage", str(log)])

    told = capsys.readouterr().out
    assert "bit.ly" not in told
    assert "decision: give_up_user" in told


def test_a_secret_that_stands_in_a_log_is_not_passed_on(folder):
    """
    A failed command is quoted, and the line goes to a person's chat.
    """
    error = "ValueError: no access with hf_abcdefghijklmnopqrstuv, sent Authorization: Bearer 0123456789abcdef0123"
    log = folder({"train.log": f"[rank0]: {error}\n"}) / "train.log"

    found = first_error(log)

    assert "ValueError: no access with (secret), sent Authorization: Bearer (secret); see " in found.summary


def test_a_path_that_is_not_there_is_told(tmp_path, capsys):
    """
    A wrong path is a wrong command line.
    """
    assert 2 == main(["triage", str(tmp_path / "nothing")])
    assert "expected a log or a folder of logs, found nothing" in capsys.readouterr().err
