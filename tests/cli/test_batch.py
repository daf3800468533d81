"""The global batch in a run of real processes: the accumulation follows the number of them."""

import json
from datetime import UTC, datetime

import pytest

from runner.facts import Finished, TaskKind
from runner.results import StoreView

SCRIPT = """\
#!/bin/sh
echo "$1 $VRAMFARM_GRAD_ACCUM $VRAMFARM_WORLD_SIZE $VRAMFARM_BATCH_PER_CARD $VRAMFARM_GLOBAL_BATCH" >> seen
"""


@pytest.fixture
def train(tmp_path, cli):
    """Run a script that writes down what it is told, on so many processes."""
    script = tmp_path / "train.sh"
    script.write_text(SCRIPT)
    script.chmod(0o755)

    def run(processes: int, samples: int = 16, *options: str):
        job = {
            "name": "kept",
            "command": "./train.sh {grad_accum}",
            "launcher": "command",
            "cpu_processes": processes,
            "batch": {"global": samples, "per_card": 2},
            "preflight": {"comm_test": False},
            "provider": {"kind": "none"},
        }
        (tmp_path / "job.yaml").write_text(json.dumps(job))
        return cli("run", "--config", "job.yaml", *options)

    return run


def test_half_as_many_processes_accumulate_twice_as_much(train, tmp_path):
    """
    Four, then two: the script, its environment and the log say what keeps the 16 samples a step.
    """
    first, second = train(4), train(2, 16, "--start-over")

    assert [0, 0] == [first.returncode, second.returncode], first.stderr + second.stderr
    assert ["2 2 4 2 16", "4 4 2 2 16"] == (tmp_path / "seen").read_text().splitlines()
    assert "global batch 16: 2 a card x 4 cards x 2 (VRAMFARM_GRAD_ACCUM)" in first.stderr


def test_a_machine_that_cannot_keep_the_batch_is_refused(train, tmp_path):
    """
    Nothing is trained with another batch than the one that was asked for.
    """
    done = train(3)

    assert 3 == done.returncode
    assert "global 16 is not a multiple of per_card 2 x 3 cards = 6; 1, 2, 4 or 8 cards do it" in done.stderr
    assert not (tmp_path / "seen").exists()


@pytest.mark.parametrize(
    ("batch", "expected"), [({"global": 256, "per_card": 4}, 256), (None, 0), ({"global": "many"}, 0), ([256], 0)]
)
def test_the_batch_of_the_job_in_the_store_is_known(batch, expected):
    """
    What another machine trained with; 0 where that makes no sense.
    """
    view = StoreView()
    result = {"job": {"identity": {"batch": batch}}}
    view.learn({TaskKind.SURVEY: Finished(subject="store", at=datetime.now(UTC), result=result)})

    assert expected == view.global_batch()
