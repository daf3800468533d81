"""Tasks side by side, each in a fork of this process, which has imported all that they need."""

import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, TextIO

LOOK_S = 0.01


def parse_jobs(text: str) -> int:
    """What --jobs says; with none nothing would be done, and nothing be wrong."""
    if (jobs := int(text)) < 1:
        raise ValueError
    return jobs


def side_by_side(act: Callable[[Any], Any], tasks: Iterable[Any], jobs: int) -> Iterator[tuple[Any, Any]]:
    """
    Yield each task and what `act` returned, as JSON can say it, in the order in which they end; None where it did not come to that.

    A task is taken from `tasks` when there is a place for it. Whoever leaves early ends those that are on their way.
    """
    waiting, running = iter(tasks), {}
    try:
        while True:
            for task in islice(waiting, jobs - len(running)):
                answer = tempfile.TemporaryFile("w+")  # noqa: SIM115  # without a name: a fork that ends takes nothing away
                running[_fork(act, task, answer)] = task, answer
            if not running:
                return
            for pid in [pid for pid in running if os.waitpid(pid, os.WNOHANG)[0]]:
                task, answer = running.pop(pid)
                with answer:
                    answer.seek(0)
                    told = answer.read()
                yield task, json.loads(told) if told else None
            time.sleep(LOOK_S)
    finally:
        for pid in running:
            os.kill(pid, signal.SIGTERM)
        for pid, (_, answer) in running.items():
            os.waitpid(pid, 0)
            answer.close()


def _fork(act: Callable[[Any], Any], task: Any, answer: TextIO) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    try:
        print(json.dumps(act(task)), file=answer, flush=True)
    except SystemExit:
        pass
    except BaseException:  # noqa: BLE001  # a process ends here
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(0)
