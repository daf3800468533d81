"""
A disk in trouble below all that a run writes, not its checkpoints alone. All of it, by hand: make chaos-disks
"""

from __future__ import annotations

import os

import pytest

from benchmarks.chaos.disks import play


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", ["full tmpfs", "ENOSPC on open"])
def test_a_run_whose_disk_takes_nothing_trains_on_and_ends_well_when_it_does(tmp_path, library, name):
    """
    Steps go on at their pace, it is said with what to do, both checkpoints stay, what was committed leaves the
    machine, and when there is room again saves go on in the same attempt.
    """
    if os.geteuid():
        pytest.skip("this user may not mount a filesystem")

    found = play(name, tmp_path, library, stays_s=3.0, steps=400)

    assert [] == found["wrong"], found["log"]
    assert "is in the store" in "".join(found["said"])
