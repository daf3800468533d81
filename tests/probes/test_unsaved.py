"""What is only on this disk is found; what is not worth keeping is not."""

import os
from datetime import UTC, datetime, timedelta

import pytest

from runner import publishing
from runner.cli.refusal import REFUSAL
from runner.folder import RunFolder
from runner.probes.unsaved import find_unsaved, has_files
from runner.storage.disk import is_own_name, own_path
from runner.storage.offsite import outputs

THEN = datetime.now(UTC) - timedelta(hours=1)


def look(workspace):
    run_dir = workspace / "job"
    return find_unsaved(workspace, run_dir=run_dir, checkpoint_dir=run_dir / "checkpoints", since=THEN)


def put(path, *, age_s=0):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("x")
    moment = datetime.now(UTC).timestamp() - age_s
    os.utime(path, (moment, moment))


def test_our_own_notes_keep_no_server(tmp_path):
    """
    What the runner notes in the run folder, or has begun to, is nobody's work: no server is saved, and paid for, because of it.
    """
    notes = (publishing.KNOWN, publishing.LOGS_AT, outputs.INDEX, REFUSAL)
    files = ("journal", "job", "lock", "stop", "status", "metrics", "report", "holder")
    run = RunFolder(root=tmp_path / "job")
    for path in (*(run.root / name for name in notes), *(getattr(run, name) for name in files)):
        put(path)
        put(path.with_name(f".{path.name}.tmp"))
        put(path.with_name(f".{path.name}.4711.tmp"))
        put(path.with_name(f"{path.name}.new"))

    assert () == look(tmp_path)


@pytest.mark.parametrize(
    ("name", "age_s", "expected"),
    [
        pytest.param("model.pt", 0, ("model.pt",), id="a model beside the run"),
        pytest.param("out/final/model.safetensors", 0, ("out/final/model.safetensors",), id="deep below"),
        pytest.param("job/eval.json", 0, ("job/eval.json",), id="in the run folder, not ours"),
        pytest.param("dataset.bin", 7200, (), id="there before the job"),
        pytest.param("job/logs/attempt-0001/launcher.log", 0, (), id="our logs"),
        pytest.param("job/checkpoints/step-00000001-00000000/MANIFEST.json", 0, (), id="checkpoints"),
        pytest.param("job/checkpoints/.saver.lock", 0, (), id="the saver's lock"),
        pytest.param("job/checkpoints/.tmp-1/shard.safetensors", 0, (), id="an unfinished save"),
        pytest.param("job/checkpoints/model.pt", 0, ("job/checkpoints/model.pt",), id="a model among the checkpoints"),
        pytest.param("job/checkpoints/hf/w.bin", 0, ("job/checkpoints/hf/w.bin",), id="a folder among the checkpoints"),
        pytest.param(".vramfarm/guardian.json", 0, (), id="the guardian's record"),
        pytest.param("code/__pycache__/x.pyc", 0, (), id="made again"),
    ],
)
def test_what_counts(tmp_path, name, age_s, expected):
    """
    Files of the run's time that nobody else has.
    """
    put(tmp_path / name, age_s=age_s)

    assert expected == look(tmp_path)


def test_the_source_counts_only_where_the_run_wrote_into_it(tmp_path):
    """
    A clone is in the repository; a model that a script left in it is not.
    """
    put(tmp_path / "job/source/abc/train.py", age_s=60)
    put(tmp_path / "job/source/abc.done", age_s=50)
    put(tmp_path / "job/source/abc/model.pt")

    assert ("job/source/abc/model.pt",) == look(tmp_path)


def test_outputs_that_are_not_in_the_store_are_missed_however_old_and_wherever(tmp_path):
    """
    Whoever names a folder wants it off the machine: also what was there before the run, or lies beside the workspace.
    """
    board, beside = tmp_path / "w" / "board", tmp_path / "beside"
    put(board / "old", age_s=7200)
    put(beside / "older", age_s=7200)
    put(tmp_path / "w" / "dataset", age_s=7200)
    looks = {
        are_saved: find_unsaved(
            tmp_path / "w",
            run_dir=tmp_path / "w" / "job",
            checkpoint_dir=tmp_path / "w" / "job" / "checkpoints",
            since=THEN,
            outputs=(board, beside),
            are_saved=are_saved,
        )
        for are_saved in (False, True)
    }

    assert {False: ("board/old", f"{beside}/older"), True: ()} == looks


@pytest.mark.parametrize("kind", ["a link", "made again", "below what is made again"])
def test_outputs_are_missed_wherever_they_lead(tmp_path, kind):
    """
    What the copy takes, this takes: through a link that job.yaml names, and in folders that are passed over else.
    """
    work = tmp_path / "w"
    outputs, file = {
        "a link": (work / "board", tmp_path / "elsewhere" / "big.bin"),
        "made again": (work / ".cache" / "results", work / ".cache" / "results" / "big.bin"),
        "below what is made again": (work / "board", work / "board" / ".git" / "big.bin"),
    }[kind]
    put(file, age_s=7200)
    if kind == "a link":
        work.mkdir()
        outputs.symlink_to(file.parent)
    run = work / "job"

    found = find_unsaved(
        work, run_dir=run, checkpoint_dir=run / "checkpoints", since=THEN, outputs=(outputs,), are_saved=False
    )

    assert [file] == [work / one for one in found]


def test_names_of_ours_are_nobodys_work(tmp_path):
    """
    A copy that was killed keeps no server.
    """
    put(own_path(tmp_path / "corpus" / "words", "abc.part"))

    found = find_unsaved(
        tmp_path, run_dir=tmp_path / "job", checkpoint_dir=tmp_path / "job/c", since=THEN, is_nothing=is_own_name
    )

    assert () == found


def test_links_are_not_followed(tmp_path):
    """
    Neither out of the folder, nor round in circles.
    """
    put(tmp_path / "elsewhere" / "big.bin")
    (tmp_path / "w").mkdir()
    (tmp_path / "w" / "circle").symlink_to(tmp_path / "w")
    (tmp_path / "w" / "out").symlink_to(tmp_path / "elsewhere")

    assert () == look(tmp_path / "w")


def test_an_early_end_asks_only_whether_there_is_anything(tmp_path):
    """
    A fresh server has nothing but the guardian's record; one with a run on it has.
    """
    put(tmp_path / ".vramfarm/guardian.json")
    assert not has_files(tmp_path)

    put(tmp_path / "job/journal.jsonl")
    assert has_files(tmp_path)
