"""Notes of what a store has, and work on more than can be kept."""

import json
import threading
from itertools import count
from pathlib import Path

import pytest

from runner.storage.disk import Disk
from runner.storage.offsite.contract import for_each, in_parallel
from runner.storage.offsite.file import FileStore
from runner.storage.offsite.known import Known
from runner.storage.offsite.pace import Pace


@pytest.fixture
def store(tmp_path):
    return FileStore(tmp_path / "store", Disk(), Pace(None))


def test_notes_are_added_to_what_is_there(tmp_path, store):
    """
    A copy of a few files among very many writes a few lines; the newest of a key counts.
    """
    path = tmp_path / "notes"
    first = Known(path, store)
    for number in range(3):
        first.note(f"a/{number}", (number, 2**62, 2**64 - 1))
    first.save()
    before = path.read_bytes()

    second = Known(path, store)
    second.note("a/1", (7, 8, 9))
    second.save()

    assert path.read_bytes().startswith(before)
    third = Known(path, store)
    expected = [(0, 2**62, 2**64 - 1), (7, 8, 9), (2, 2**62, 2**64 - 1), ()]
    assert expected == [third.of(f"a/{number}") for number in range(4)]


@pytest.mark.parametrize(
    "torn",
    [b'\n["a/1", "9 9', b"\n\xff\0\0", b"\n[1, 2]", b"\n[[], {}]", b'\n["a/1", "x y"]', b'\n{"a": 1}', b"\n[" * 9999],
    ids=["a kill", "zeros", "numbers", "others", "words", "an object", "deep"],
)
def test_a_line_that_is_torn_costs_that_line(tmp_path, store, torn):
    """
    What comes after it is read again.
    """
    path = tmp_path / "notes"
    known = Known(path, store)
    known.note("a/0", (1, 2, 3))
    known.save()
    with path.open("ab") as file:
        file.write(torn)

    after = Known(path, store)
    after.note("a/2", (4, 5, 6))
    after.save()

    last = Known(path, store)
    assert [(1, 2, 3), (), (4, 5, 6)] == [last.of(f"a/{number}") for number in range(3)]


@pytest.mark.parametrize("is_old", [True, False], ids=["of an older runner", "of another store"])
def test_notes_that_say_nothing_here_are_begun_anew(tmp_path, store, is_old):
    """
    To ask again costs a question a file; to believe them could cost the files.
    """
    path = tmp_path / "notes"
    address = store.address if is_old else "s3://other"
    path.write_text(json.dumps({"store": address, "files": {"a/0": [1, 2, 3]}}) + '\n["a/0", "1 2 3"]' * (not is_old))

    known = Known(path, store)
    known.note("a/1", (4, 5, 6))
    known.save()

    assert known.of("a/0") == () != known.of("a/1")
    assert Known(path, store).of("a/1") == (4, 5, 6)


def test_what_a_store_lists_decides_what_is_known(tmp_path, store):
    """
    What it lost, or has with another size, is known no more, now and later; what it has besides is told with its size.
    """
    path = tmp_path / "notes"
    known = Known(path, store)
    for number in range(3):
        known.note(f"a/{number}", (10, number, 0))
    known.save()

    others = known.compare([("a/0", 10), ("a/1", 11), ("b", 5)])
    known.save()

    assert {"a/1": 11, "b": 5} == others
    for one in (known, Known(path, store)):
        assert [(10, 0, 0), (), ()] == [one.of(f"a/{number}") for number in range(3)]


def test_lines_that_do_not_count_any_more_go(tmp_path, store):
    """
    A file that changes every minute of a night has one line in the end.
    """
    path = tmp_path / "notes"
    for number in range(40):
        known = Known(path, store, max_old=10)
        known.note("a", (number, 0, 0))
        known.save()

    assert len(path.read_bytes().splitlines()) < 20
    assert (39, 0, 0) == Known(path, store).of("a")


def test_no_more_is_asked_for_than_is_worked_at():
    """
    A hundred thousand files are not kept to be copied one after another.
    """
    asked, enough, go_on = count(), threading.Event(), threading.Event()

    def items():
        for number in range(100):
            if next(asked) == 3:
                enough.set()
            yield number

    done = []

    def work(number):
        assert go_on.wait(60)
        done.append(number)

    whole = threading.Thread(target=for_each, args=(work, items(), 4))
    whole.start()
    assert enough.wait(60)
    at_first = next(asked)
    go_on.set()
    whole.join(60)

    assert 4 == at_first
    assert [*range(100)] == sorted(done)


def test_an_error_ends_what_has_not_begun():
    """
    In whatever is looked for, too, and it is raised.
    """
    done = []

    def work(number):
        if number == 5:
            raise ValueError(number)
        done.append(number)

    with pytest.raises(ValueError, match="5"):
        for_each(work, iter(range(10_000)), 1)
    with pytest.raises(FileNotFoundError):
        for_each(done.append, (Path("/none").stat() for _ in range(3)), 2)

    assert [0, 1, 2, 3, 4] == done
    assert [1, 4, 9] == in_parallel(lambda number: number * number, [1, 2, 3], 8)
    assert [] == in_parallel(len, [], 8)
