"""Programs that do not answer, and one that cannot even be killed."""

import sys
import time

from runner.probes.command import ask

# Traced by a process of its own: after SIGKILL it stays until the tracer looks, as one that hangs in the kernel would.
UNKILLABLE = """
import ctypes, os, signal, time
libc = ctypes.CDLL(None, use_errno=True)
me, (ready, told) = os.getpid(), os.pipe()
libc.prctl(0x59616D61, -1, 0, 0, 0)
if os.fork() == 0:
    os.setsid()
    seized = libc.ptrace(0x4206, me, None, None)
    os.write(told, b"x" if seized == 0 else b"-")
    time.sleep(40)
    os._exit(0)
assert os.read(ready, 1) == b"x"
print("held", flush=True)
time.sleep(60)
"""


def test_an_answer_is_code_and_text():
    """
    Both streams, whole; the first line of the worse one for a message.
    """
    answer = ask(("sh", "-c", "echo out; echo broken >&2; exit 3"), timeout_s=20)

    assert (3, "out\n", "broken") == (answer.code, answer.out, answer.first_line)


def test_a_program_that_is_not_there_is_told_from_one_that_hangs():
    """
    Only one of them means that there is no driver.
    """
    assert ask(("/nowhere/x",), timeout_s=20).missing
    assert not ask(("sleep", "60"), timeout_s=0.2).missing


def test_what_was_said_before_the_end_is_kept():
    """
    A hang says where it hangs.
    """
    answer = ask(("sh", "-c", "echo begun; exec sleep 60"), timeout_s=4.0)

    assert (None, "begun\n") == (answer.code, answer.out)


def test_a_program_that_cannot_be_killed_is_left_behind():
    """
    `nvidia-smi` on a lost card hangs in the kernel: SIGKILL does nothing until the card answers, which is never.
    """
    started = time.monotonic()

    answer = ask((sys.executable, "-c", UNKILLABLE), timeout_s=8)

    assert (None, "held\n") == (answer.code, answer.out)
    assert time.monotonic() - started < 30
