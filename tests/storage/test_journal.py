"""The journal: whole lines only, folded in order, and room for the last ones on a full disk."""

import errno
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from runner.facts import Attempt, Conclusion, Ending, Exit, History, Outcome
from runner.storage import journal as events
from runner.storage.disk import Disk
from runner.storage.journal import Journal, read
from vramfarm.protocol import Ref

NOW = datetime(2026, 1, 1, tzinfo=UTC)
ATTEMPT = Attempt(number=1, id="a", resume=Ref(1, 5, 1, "0" * 8), lineage=1, boot_id="b", launched_at=NOW)


def a_life(journal):
    journal.append(events.accepted(NOW))
    journal.append(events.launched(ATTEMPT))
    journal.append(events.interrupted(1, "SIGTERM", NOW))
    journal.append(events.exited(Ending.INTERRUPTED, Exit(code=0), step=7, reason="", at=NOW))
    journal.append(events.concluded(Conclusion(outcome=Outcome.STOPPED, reason="asked", at=NOW)))
    journal.append(events.stop_sent("life", keep=True, at=NOW))


def test_what_is_written_is_read_back(tmp_path):
    """
    Every event comes back as the fact it was.
    """
    journal = Journal(tmp_path / "j", Disk())
    a_life(journal)

    expected = History(
        accepted_at=NOW,
        opened_at=NOW,
        attempts=(replace(ATTEMPT, ending=Ending.INTERRUPTED, exit=Exit(code=0), step=7, ended_at=NOW),),
        interrupted=1,
        conclusion=Conclusion(outcome=Outcome.STOPPED, reason="asked", at=NOW),
        stop_sent_in="life",
    )
    assert expected == read(tmp_path / "j") == journal.history


def test_any_prefix_can_be_read_and_gone_on_with(tmp_path):
    """
    Cut anywhere, the journal is a shorter life, and the next append starts on a line of its own.
    """
    path = tmp_path / "j"
    a_life(Journal(path, Disk()))
    whole = path.read_bytes()

    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        before = read(path)
        after = Journal(path, Disk()).append(events.interrupted(9, "again", NOW))
        assert replace(before, interrupted=9) == after == read(path)


def test_reopening_clears_the_end_and_counts_afresh(tmp_path):
    """
    After --start-over earlier attempts are history, and checkpoints before it are not used.
    """
    journal = Journal(tmp_path / "j", Disk())
    a_life(journal)

    history = journal.append(events.reopened(start_over=True, order="o", at=NOW))

    assert (None, 1, 2) == (history.conclusion, history.budget_from, history.fresh_from)


class FullDisk(Disk):
    """Has room for nothing until something is removed."""

    def __init__(self):
        self.full = False

    def append(self, path, data):
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        super().append(path, data)

    def remove(self, path):
        super().remove(path)
        self.full = False


def test_a_full_disk_does_not_silence_the_journal(tmp_path):
    """
    The ballast is given up for the line that matters; without it the error is raised.
    """
    disk = FullDisk()
    journal = Journal(tmp_path / "j", disk)
    disk.full = True

    journal.append(events.interrupted(7, "x", NOW))

    assert 7 == read(tmp_path / "j").interrupted
    disk.full = True
    with pytest.raises(OSError, match="No space"):
        journal.append(events.interrupted(8, "y", NOW))


def test_what_is_right_anyway_is_known_in_this_life_where_the_disk_takes_no_line(tmp_path):
    """
    A person is told though the disk is read-only, and not again and again.
    """
    journal = Journal(tmp_path / "no folder" / "journal.jsonl", Disk())

    journal.note(events.notified("save", NOW))

    assert {"save": NOW} == dict(journal.history.notified)
    with pytest.raises(OSError, match="No such file"):
        journal.append(events.accepted(NOW))
