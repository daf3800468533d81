"""The simulator against the contract that it and the provider module were written to."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from runner import simulator
from tests.farmhouse import Farmhouse

CONTRACT = Path(simulator.__file__).with_name("openapi.yaml")
MEMORY = Path(__file__).parents[2] / ".hypothesis"  # tables of characters, made once and not in each run
NOT_ITS_BUSINESS = (
    "positive_data_acceptance",  # a cursor that it never gave, a key for repeats that came before: well-formed, and wrong
)
CONTROLS_OF_THE_TEST = r"_sim/(clock|faults)"  # time and faults: whatever comes next would be answered by them


@pytest.mark.timeout(900)  # a thousand requests; half a minute where nothing else runs
@pytest.mark.skipif(find_spec("schemathesis") is None, reason="schemathesis is not installed (the dev extra)")
def test_every_answer_is_one_that_the_contract_promises(house: Farmhouse):
    """
    Status, type, headers and body of what examples, every edge of the contract and random requests get: no surprise,
    nothing accepted that it forbids, and never an error of ours.
    """
    st = Path(sys.executable).with_name("st")
    header = f"Authorization: Bearer {house.farm.account_key}"
    phases = ("--phases", "examples,coverage,fuzzing,stateful", "--max-examples", "4")  # the same ones on any machine
    patient = ("--request-timeout", "60")
    steady = ("--generation-deterministic", "--continue-on-failure", "--no-color", "--warnings", "off")

    done = subprocess.run(
        [
            *(str(st), "run", str(CONTRACT), "--url", house.url, "--header", header, *phases, *steady, *patient),
            *("--exclude-checks", ",".join(NOT_ITS_BUSINESS), "--exclude-path-regex", CONTROLS_OF_THE_TEST),
        ],
        capture_output=True,
        text=True,
        timeout=840,
        check=False,
        cwd=house.farm.state,
        env={**os.environ, "HYPOTHESIS_STORAGE_DIRECTORY": str(MEMORY)},
    )

    assert 0 == done.returncode, done.stdout[-8000:] + done.stderr[-2000:]
    assert "Tested:" in done.stdout
