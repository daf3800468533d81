"""A run that begins from a checkpoint of another one: real runners, real stores, real damage."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from runner.errors import JobError, StoreError
from runner.job import OffloadPolicy
from runner.storage.checkpoints import CheckpointDir
from runner.storage.disk import Disk
from runner.storage.forking import fork
from runner.storage.offsite import OffsiteError, open_store, uploading
from tests.storage.examples import SHARDS, commit
from vramfarm.protocol import MANIFEST

TRAINER = Path(__file__).parents[1] / "fake_trainer.py"
JOB = """
name: {name}
command: {python} {trainer} --steps {steps} --step-time 0.01 --bytes 1000
launcher: command
cpu_processes: 1
checkpoint: {{save_interval: 1s, resume: {resume}}}
offload: {{to: "file://{store}"}}
restart: {{initial_delay: 0s}}
preflight: {{comm_test: false}}
"""


@pytest.fixture
def run(tmp_path):
    def run(name, *, steps, resume="auto", workspace="workspace", args=()):
        """`run` of a job of the fake trainer, to its end."""
        job = tmp_path / f"{name}.yaml"
        store = tmp_path / "store"
        job.write_text(
            JOB.format(name=name, python=sys.executable, trainer=TRAINER, steps=steps, store=store, resume=resume)
        )
        env = {**os.environ, "VRAMFARM_WORKSPACE": str(tmp_path / workspace)}
        argv = [sys.executable, "-m", "runner", "run", "--config", str(job), *args]
        root = Path(__file__).parents[2]
        return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=120, check=False, cwd=root)

    return run


def test_a_run_forks_from_the_newest_checkpoint_of_another(run, tmp_path):
    """
    Steps go on counting; the journal has where it came from; another machine goes on with the run's own, though the other run is gone.
    """
    first = run("pretrain", steps=60)
    assert 0 == first.returncode, first.stderr
    other = f"file://{tmp_path}/store/pretrain"

    tuned = run("tune", steps=90, resume=other)

    assert 0 == tuned.returncode, tuned.stderr
    assert f"fork from {other} (checkpoint.resume): this run has no checkpoint of its own" in tuned.stderr
    assert "launch attempt 1 from step 60 (step-00000060-" in tuned.stderr
    journal = (tmp_path / "workspace" / "tune" / "journal.jsonl").read_text().splitlines()
    (launched,) = (event for event in map(json.loads, journal) if event["event"] == "launched")
    assert launched["origin"].startswith(f"{other}/checkpoints/step-00000060-")
    (tmp_path / "store" / "pretrain").rename(tmp_path / "gone")
    (tmp_path / "store" / "tune" / "outcome.json").unlink()  # as if the first machine had vanished
    again = run("tune", steps=120, resume=other, workspace="other machine", args=("--accept-change",))
    assert (0, True) == (again.returncode, "from step 90" in again.stderr), again.stderr


def test_a_run_without_its_beginning_is_refused(run, tmp_path):
    """
    One line and the right code: 2 for a folder that is not here, 4 for a store that has no such run.
    """
    folder, store = run("tune", steps=5, resume="nowhere"), run("tune", steps=5, resume=f"file://{tmp_path}/store/no")

    assert [2, 4] == [folder.returncode, store.returncode]
    assert f"checkpoint.resume: expected a folder at {tmp_path}/nowhere, found none" in folder.stderr
    assert f"checkpoint.resume: file://{tmp_path}/store/no: expected a whole checkpoint: none is there" in store.stderr
    assert "launch attempt" not in folder.stderr + store.stderr


# ------------------------------------------------------------------------------- the copying


def open_at(address):
    return open_store(OffloadPolicy(to=address), {})


@pytest.fixture
def other(tmp_path):
    """Checkpoints of another run: on this disk, and the same in a store."""
    directory = CheckpointDir(tmp_path / "other" / "checkpoints", Disk())
    directory.root.mkdir(parents=True)
    for step in (100, 200):
        uploading.upload(
            open_at(f"file://{tmp_path}/store"), "other", directory, commit(directory, step).ref, lambda *_: None
        )
    return directory


def forked(tmp_path, place, framework="vramfarm", open_at=open_at, **options):
    mine = CheckpointDir(tmp_path / "mine" / "checkpoints", Disk())
    options |= {"job": "mine", "framework": framework, "lineage": 3, "progress": lambda *_: None}
    return mine, fork(str(place), open_at, mine, **options)


@pytest.mark.parametrize(
    ("place", "step", "origin"),
    [
        ("{0}/other", 200, "{0}/other/checkpoints/step-00000200-000000c8"),
        ("{0}/other/checkpoints", 200, "{0}/other/checkpoints/step-00000200-000000c8"),
        ("{0}/other/checkpoints/step-00000100-00000064", 100, "{0}/other/checkpoints/step-00000100-00000064"),
        ("file://{0}/store/other", 200, "file://{0}/store/other/checkpoints/step-00000200-000000c8"),
        *[(p := "file://{0}/store/other/checkpoints/step-00000100-00000064", 100, p)],
    ],
    ids=["run folder", "folder of checkpoints", "folder of one", "address of a run", "address of one"],
)
def test_what_may_be_forked_from(tmp_path, other, place, step, origin):
    """
    The copy is a checkpoint of this run in all but its bytes, and says what it is a copy of.
    """
    mine, found = forked(tmp_path, place.format(tmp_path))

    (copy,) = mine.committed()
    manifest = mine.manifest(copy.ref)
    assert (found.checkpoint, ()) == (copy, mine.verify(copy.ref))
    assert ("mine", 3, step, 0) == (manifest.job, manifest.lineage, manifest.step, manifest.attempt)
    assert origin.format(tmp_path) == copy.origin
    assert dict(SHARDS) == {s.path: (mine.path(copy.ref) / s.path).read_bytes() for s in manifest.shards}
    assert found == forked(tmp_path, place.format(tmp_path))[1]  # after a kill: the same, not a second one


@pytest.mark.parametrize("place", ["{0}/other", "file://{0}/store/other"])
def test_the_newest_that_is_whole_is_taken(tmp_path, other, place):
    """
    A newer one with a wrong byte is passed over, and said.
    """
    for root in (other.root, tmp_path / "store" / "other" / "checkpoints"):
        shard = root / "step-00000200-000000c8" / "shard-00000-of-00002.safetensors"
        shard.write_bytes(b"X" + shard.read_bytes()[1:])

    mine, found = forked(tmp_path, place.format(tmp_path))

    assert [100] == [c.ref.step for c in mine.committed()]
    assert ["chunk 0: expected crc32" in problem for problem in found.passed_over] == [True]
    with pytest.raises(StoreError, match=r"expected a whole checkpoint: .*chunk 0: expected crc32"):
        forked(tmp_path / "again", f"{place.format(tmp_path)}/checkpoints/step-00000200-000000c8")


class _Ill:
    """A store that answers 500 for an object, as one does whose disk has lost it."""

    def __init__(self, inner, lost):
        self._inner, self._lost = inner, lost

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def get(self, key, **limits):
        self._fail(key)
        return self._inner.get(key, **limits)

    def stream(self, key, *args):
        self._fail(key)
        return self._inner.stream(key, *args)

    def _fail(self, key):
        if key.endswith(self._lost):
            raise OffsiteError("500", final=False, of_server=True)


@pytest.mark.parametrize("lost", [MANIFEST, max(SHARDS)])
def test_what_the_store_alone_fails_at_is_passed_over_when_it_is_given_up(tmp_path, other, lost):
    """
    It is waited for a while, and says that others can be read; then the next older one is taken, or none if that one is named.
    """
    newest = "step-00000200-000000c8"
    options = {"open_at": lambda address: _Ill(open_at(address), f"{newest}/{lost}")}
    run = f"file://{tmp_path}/store/other"

    with pytest.raises(OffsiteError) as caught:
        forked(tmp_path, run, **options)
    mine, _ = forked(tmp_path, run, given_up=True, **options)

    assert (True, True, False) == (caught.value.of_server, caught.value.of_object, caught.value.final)
    assert [100] == [c.ref.step for c in mine.committed()]
    with pytest.raises(StoreError, match=rf"{newest}: expected a whole checkpoint: .*500"):
        forked(tmp_path / "again", f"{run}/checkpoints/{newest}", given_up=True, **options)


def test_a_checkpoint_of_another_framework_is_refused(tmp_path, other):
    """
    The script could not read it.
    """
    with pytest.raises(JobError, match=r"expected a checkpoint of hf_trainer \(framework\), got one of vramfarm"):
        forked(tmp_path, other.root, framework="hf_trainer")
