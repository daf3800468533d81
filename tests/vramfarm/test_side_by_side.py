"""What `--jobs` of the scripts in benchmarks/ does."""

import os
import signal
import time

import pytest

from benchmarks.side_by_side import side_by_side


def test_no_more_than_so_many_tasks_at_once_and_each_answer_with_its_task(tmp_path):
    """
    One that raises, leaves or is killed has no answer, and the others are done all the same.
    """
    there, came = tmp_path / "there", tmp_path / "came"
    there.mkdir()
    came.mkdir()

    def act(task):
        mine = there / str(task)
        mine.touch()
        (came / str(task)).touch()
        while task < 2 > len(list(came.iterdir())):  # they begin together
            time.sleep(0.01)
        number = len(list(there.iterdir()))
        mine.unlink()
        if task == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        if task in {4, 5}:
            raise {4: SystemExit, 5: ValueError}[task]
        return {"square": task * task, "beside": number}

    answers = dict(side_by_side(act, range(8), 2))

    assert {3, 4, 5} == {task for task, answer in answers.items() if answer is None}
    assert [0, 1, 4, 36, 49] == [answers[task]["square"] for task in (0, 1, 2, 6, 7)]
    assert 2 == max(answer["beside"] for answer in answers.values() if answer)


def test_who_leaves_early_ends_what_is_on_its_way():
    def act(task):
        os.write(told, b"%d\n" % os.getpid())
        signal.pause() if task else None
        return task

    hear, told = os.pipe()
    with os.fdopen(hear) as heard, os.fdopen(told, "w"):
        answers = side_by_side(act, range(3), 2)
        assert (0, 0) == next(answers)
        pids = [int(heard.readline()) for _ in range(2)]
        answers.close()

    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
