"""Data on its way in and outputs on their way out: against a folder and a real S3 server."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from runner import tasks
from runner.cli.load import load_job
from runner.cli.validate import warn
from runner.facts import Finished, Observed, Severity, TaskKind
from runner.job import ArchiveSource, Job, OffloadPolicy
from runner.policy.finish import ALL_OUTPUTS, tell_missing_outputs
from runner.preflight import _outputs
from runner.probes.unsaved import find_unsaved
from runner.storage.checksums import describe_file
from runner.storage.disk import Disk, is_own_name, own_path
from runner.storage.offsite import OffsiteError, dump_place, open_store
from runner.storage.offsite.contract import Entry
from runner.storage.offsite.file import FileStore
from runner.storage.offsite.links import Places
from runner.storage.offsite.outputs import INDEX, WRITTEN, copy_outputs, tell_left
from runner.storage.offsite.staging import Item, _expect_apart, _File, _Pieces, is_staged, stage
from tests.faultproxy import FaultProxy
from tests.storage.examples import ODD_NAMES, describe
from tests.storage.moving import ignore
from vramfarm.protocol import CHUNK_BYTES

THEN = datetime(2026, 1, 1, tzinfo=UTC)
LARGE = b"".join(bytes([number]) * CHUNK_BYTES for number in range(1, 4)) + b"tail"
CORPUS = {"train/0.bin": LARGE, "train/1.bin": b"small", "empty": b""}


class Origin:
    """A store with data in it, and what has been read from it."""

    def __init__(self, request, tmp_path, kind):
        self.offload, self.env = OffloadPolicy(to=f"file://{tmp_path}/origin"), {}
        if kind == "s3":
            self.offload, self.env = request.getfixturevalue("s3_offload"), request.getfixturevalue("s3server").env
        self.run_dir, self.to = tmp_path / "run", tmp_path / "data"
        self.reads = []

    def fill(self, tmp_path, corpus, describe=describe_file):
        store = open_store(self.offload, self.env)
        for key, content in corpus.items():
            (tmp_path / "one").write_bytes(content)
            store.put_file(key, tmp_path / "one", describe(tmp_path / "one", "one"), lambda _: None)

    def open_at(self, address):
        store = open_store(self.offload.model_copy(update={"to": address}), self.env)
        for how in ("read", "stream"):
            setattr(store, how, self._counted(getattr(store, how)))
        return store

    def _counted(self, read):
        def counted(key, offset, num_bytes, tag=""):
            self.reads.append((key, offset))
            return read(key, offset, num_bytes, tag)

        return counted

    def stage(self, *items, boot_id="boot", progress=ignore):
        items = items or (Item(source=self.offload.to, to=str(self.to)),)
        return stage(items, self.open_at, run_dir=self.run_dir, digest="digest", boot_id=boot_id, progress=progress)


@pytest.fixture(params=["file", "s3"])
def origin(request, tmp_path):
    origin = Origin(request, tmp_path, request.param)
    origin.fill(tmp_path, CORPUS)
    return origin


def contents(folder):
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_data_comes_in_whole_and_once(origin):
    """
    Every byte, compared; the second time nothing is read; progress goes to the end.
    """
    told = []
    first = origin.stage(progress=lambda fraction, _: told.append(fraction))
    num_reads = len(origin.reads)
    again = origin.stage()

    assert CORPUS == contents(origin.to)
    assert (3, len(LARGE) + 5, len(LARGE) + 5) == (first.num_files, first.size_bytes, first.fetched_bytes)
    assert (0, num_reads, 1.0) == (again.fetched_bytes, len(origin.reads), told[-1])
    assert is_staged([str(origin.to)], origin.run_dir, "digest")
    assert not is_staged([str(origin.to)], origin.run_dir, "other")


def test_data_that_was_thrown_away_is_not_taken_for_there(origin):
    """
    A run folder on a volume outlives a container's disk.
    """
    origin.stage()
    origin.to.rename(origin.to.with_name("gone"))

    assert not is_staged([str(origin.to)], origin.run_dir, "digest")


def test_only_what_changed_is_fetched_again(origin, tmp_path):
    """
    A nightly corpus: one file is new, one is another, one was spoiled here.
    """
    origin.stage()
    time.sleep(1.1)  # what a store says of the time of a change has whole seconds
    origin.fill(tmp_path, {"train/1.bin": b"SMALL", "new": b"new"})
    (origin.to / "empty").write_bytes(b"spoiled")
    origin.reads.clear()
    origin.stage()

    assert CORPUS | {"train/1.bin": b"SMALL", "new": b"new"} == contents(origin.to)
    assert {"train/1.bin", "new", "empty"} == {key for key, _ in origin.reads}


def test_single_files_and_several_items(origin, tmp_path):
    """
    A file goes to the name that is given, or into a folder; items do not mix.
    """
    at = origin.offload.to
    origin.stage(
        Item(source=f"{at}/train", to=f"{tmp_path}/a"),
        Item(source=f"{at}/train/1.bin", to=f"{tmp_path}/b/"),
        Item(source=f"{at}/train/1.bin", to=f"{tmp_path}/c/renamed"),
    )

    assert {"0.bin": LARGE, "1.bin": b"small"} == contents(tmp_path / "a")
    assert {"1.bin": b"small"} == contents(tmp_path / "b")
    assert {"renamed": b"small"} == contents(tmp_path / "c")


def test_nothing_there_and_two_for_one_place_are_final(origin, tmp_path):
    """
    A typo is said at once, with the key to mend; so is a mixture.
    """
    at = origin.offload.to
    with pytest.raises(OffsiteError, match=r"expected files at .*/typo, found none") as missing:
        origin.stage(Item(source=f"{at}/typo", to=f"{tmp_path}/a"))
    with pytest.raises(OffsiteError, match=r"expected one source for .*\.bin, found two") as twice:
        origin.stage(*[Item(source=f"{at}/train", to=f"{tmp_path}/a")] * 2)

    assert (True, "data.from" in missing.value.hint, True) == (missing.value.final, True, twice.value.final)


@pytest.mark.parametrize("mark", ["#1", "?1", "%201", "%23"])
def test_data_comes_from_the_folder_that_is_written(origin, tmp_path, mark):
    """
    What an address has is the path, to its last sign: no other folder's files come in its place.
    """
    away, place = f"{origin.offload.to}/d", f"{origin.offload.to}/d{mark}"
    for address, name in ((away, "wrong"), (place, "right")):
        origin.open_at(address).put(name, name.encode())

    origin.stage(Item(source=place, to=str(tmp_path / "folder")))
    origin.stage(Item(source=f"{place}/right", to=str(tmp_path / "file")))

    assert {"right": b"right"} == contents(tmp_path / "folder")
    assert b"right" == (tmp_path / "file").read_bytes()


def test_a_file_whose_name_is_anothers_with_something_added_is_another_file(origin, tmp_path):
    """
    What is under way has a place that no file of the data can have: each file ends with its own bytes.
    """
    names = [f"{number:02}{ending}" for number in range(12) for ending in ("", ".staging", ".part", ".unfinished")]
    corpus = {f"x/{name}": name.encode() for name in names} | {"x/big": LARGE, "x/big.staging": LARGE[::-1]}
    origin.fill(tmp_path, corpus)
    found = origin.stage(Item(source=f"{origin.offload.to}/x", to=str(origin.to / "x")))

    assert corpus == contents(origin.to)
    assert len(corpus) == found.num_files


def test_any_name_that_a_file_may_have_comes_in(origin, tmp_path):
    """
    Of Japanese, Chinese and Word: a name that was left out silently would be a part of the corpus that is missing.
    """
    origin.fill(tmp_path, {f"odd/{name}": name.encode() for name in ODD_NAMES})
    told = []
    origin.stage(Item(source=f"{origin.offload.to}/odd", to=str(origin.to)), progress=lambda _, note: told.append(note))

    assert {name: name.encode() for name in ODD_NAMES} == contents(origin.to)
    assert [] == [note for note in told if not note.isprintable()]


def test_what_can_be_no_file_here_is_refused_by_name(request, tmp_path):
    """
    With their number, before anything is fetched: a link leads elsewhere, a pipe never ends, a name is too long.
    """
    origin = Origin(request, tmp_path, "file")
    origin.fill(tmp_path, CORPUS)
    (tmp_path / "origin" / "link\x1b").symlink_to("empty")
    (tmp_path / "origin" / "folder").symlink_to("train")
    os.mkfifo(tmp_path / "origin" / "pipe")
    with pytest.raises(OffsiteError, match="found 3 that can be none here: ") as caught:
        origin.stage()

    with pytest.raises(OffsiteError, match=r"found 1 that can be none here: link\? \(a link\)"):
        origin.stage(Item(source=f"file://{tmp_path}/origin/link\x1b", to=str(tmp_path / "to")))
    told = str(caught.value)
    assert ("link? (a link)" in told, "folder (a link)" in told, "pipe (no plain file)" in told) == (True,) * 3
    assert (True, []) == (caught.value.final, origin.reads)


def test_a_name_that_no_disk_takes_is_refused_by_name(origin):
    """
    A store may take longer ones; SeaweedFS does not.
    """
    inner, long = origin.open_at, Entry(key="\u3000" * 90, size_bytes=0, modified_at=datetime.now(UTC))

    def open_long(address):
        store = inner(address)
        store.list = lambda *_: iter([long])
        return store

    origin.open_at = open_long
    with pytest.raises(OffsiteError, match=r"found 1 that can be none here: +\(too long\)") as caught:
        origin.stage()

    assert caught.value.final


def test_a_file_that_is_a_folder_too_and_a_name_of_ours_are_refused(origin, tmp_path):
    """
    A store may have both `a` and `a/b`, a disk cannot; before anything is fetched.
    """
    at, ours = origin.offload.to, own_path(Path("x"), "part").name
    origin.fill(tmp_path, {"one": b"1"})
    with pytest.raises(OffsiteError, match=r"expected a file or a folder for .*/a, found both") as both:
        origin.stage(Item(source=f"{at}/one", to=f"{tmp_path}/a"), Item(source=f"{at}/train", to=f"{tmp_path}/a"))
    with pytest.raises(OffsiteError, match=r"found one of this tool's") as own:
        origin.stage(Item(source=f"{at}/one", to=f"{tmp_path}/b/{ours}"))

    assert (True, True, []) == (both.value.final, own.value.final, origin.reads)


def test_names_of_ours_are_nobodys_data(origin, tmp_path):
    """
    What an unfinished copy left at the source is passed over, a folder that is called so, too; it is no single file, either.
    """
    ours = own_path(Path("x"), "part").name
    origin.fill(tmp_path, {"set/1": b"1"})
    if isinstance(origin.open_at(origin.offload.to), FileStore):
        (tmp_path / "origin" / "set" / "deep" / ours).mkdir(parents=True)
        for left in (f"set/{ours}", f"set/deep/{ours}/2"):
            (tmp_path / "origin" / left).write_bytes(b"half")
    else:
        origin.fill(tmp_path, {f"set/{ours}": b"half", f"set/deep/{ours}/2": b"half"})
    found = origin.stage(Item(source=f"{origin.offload.to}/set", to=f"{tmp_path}/data/set"))
    with pytest.raises(OffsiteError, match=r"found a name of this tool's own") as single:
        origin.stage(Item(source=f"{origin.offload.to}/set/{ours}", to=f"{tmp_path}/b/"))

    assert ({"set/1": b"1"}, 1) == (contents(tmp_path / "data"), found.num_files)
    assert single.value.final


def test_two_places_that_are_one_are_told(request, tmp_path):
    """
    Folders may be links, and some disks take `A` for `a`: what came later would stand for both.
    """
    origin = Origin(request, tmp_path, "file")
    origin.fill(tmp_path, CORPUS)
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    at = f"{origin.offload.to}/train"
    with pytest.raises(OffsiteError, match=r"expected one source for .*/link/.*, found two") as linked:
        origin.stage(Item(source=at, to=f"{tmp_path}/real"), Item(source=at, to=f"{tmp_path}/link"))
    (tmp_path / "A").write_bytes(b"1")
    (tmp_path / "a").hardlink_to(tmp_path / "A")  # as a disk shows them that does not tell them apart
    now = datetime.now(UTC)
    files = [_File(store=None, key=n, target=tmp_path / n, size_bytes=1, modified_at=now) for n in ("A", "a")]
    with pytest.raises(OffsiteError, match="this disk takes both names for one") as caught:
        _expect_apart(files)

    assert (True, True) == (linked.value.final, caught.value.final)


@pytest.mark.parametrize("torn", ["1", "1 ", "1 12", "x y.", "1 2 3.", "99 7.", "\x00\x00"], ids=repr)
def test_a_torn_note_of_a_piece_is_none(request, tmp_path, torn):
    """
    A disk that was full leaves the beginning of a line; the next life's notes come behind it.
    """
    origin = Origin(request, tmp_path, "file")
    origin.fill(tmp_path, CORPUS)
    target = origin.to / "train" / "0.bin"
    entry = next(e for e in open_store(origin.offload, origin.env).list("train/0") if e.key == "train/0.bin")
    file = _File(
        store=None, key="train/0.bin", target=target, size_bytes=entry.size_bytes, modified_at=entry.modified_at
    )
    target.parent.mkdir(parents=True)
    file.part.write_bytes(bytes(len(LARGE)))
    _Pieces(file, tmp_path, "boot")
    file.part.write_bytes(bytes(len(LARGE)))
    with next(tmp_path.glob("*.pieces")).open("a") as notes:
        notes.write(f"\n{torn}")
    pieces = _Pieces(file, tmp_path, "boot")
    file.part.write_bytes(bytes(len(LARGE)))
    pieces.note(2, 7)

    assert {2: 7} == _Pieces(file, tmp_path, "boot").known


def test_pieces_of_a_large_file_are_not_fetched_again(origin):
    """
    Those of this boot; after another one, what was not durable may be anything.
    """
    origin.stage()
    (origin.to / "train" / "0.bin").unlink()
    store, broken = origin.open_at, []

    def failing(address):
        opened = store(address)
        stream = opened.stream

        def once(key, offset, num_bytes, tag=""):
            for block in stream(key, offset, num_bytes, tag):
                if offset == 2 * CHUNK_BYTES and not broken:
                    broken.append(offset)
                    raise OffsiteError("cut", final=False)
                yield block
                offset += len(block)

        opened.stream = once
        return opened

    origin.open_at = failing
    with pytest.raises(OffsiteError, match="cut"):
        origin.stage()
    origin.open_at, origin.reads[:] = store, []
    origin.stage()
    after_kill = [offset // CHUNK_BYTES for key, offset in origin.reads if key == "train/0.bin"]

    assert [2] == after_kill
    assert CORPUS == contents(origin.to)


def test_an_object_that_is_replaced_while_it_is_read_is_never_mixed(origin, tmp_path):
    """
    By one of the same size, in a store that may keep no checksum: the pieces that came count for nothing.
    """
    open_at, fresh = origin.open_at, bytes(len(LARGE))

    def replacing(address):
        opened = open_at(address)
        stream = opened.stream

        def first(key, offset, num_bytes, tag=""):
            yield from stream(key, offset, CHUNK_BYTES, tag)
            if open_store(origin.offload, origin.env).read(f"train/{key}", 0, 1) != b"\0":
                replace_in(origin, tmp_path, f"train/{key}", fresh)
                raise OffsiteError("cut", final=False)
            yield from stream(key, offset + CHUNK_BYTES, num_bytes - CHUNK_BYTES, tag)

        opened.stream = first
        return opened

    origin.open_at = replacing
    item = Item(source=f"{origin.offload.to}/train/0.bin", to=str(origin.to / "0.bin"))
    with pytest.raises(OffsiteError, match="cut"):
        origin.stage(item)
    origin.stage(item)

    assert {"0.bin": fresh} == contents(origin.to)


def replace_in(origin, tmp_path, key, content):
    """In a folder with the time that it had, as tools do that copy times, too."""
    path = tmp_path / "origin" / key
    before = path.stat().st_mtime_ns if path.exists() else None
    origin.fill(tmp_path, {key: content})
    if before:
        os.utime(path, ns=(before, before))


@pytest.mark.parametrize("size", [CHUNK_BYTES // 2, CHUNK_BYTES + 7, len(LARGE) - 1], ids=str)
def test_an_answer_that_ends_early_is_no_data(request, tmp_path, size):
    """
    Where the store keeps no checksum nobody else would notice: a part of a piece is not noted as the piece.
    """
    origin = Origin(request, tmp_path, "file")
    origin.fill(tmp_path, CORPUS)
    open_at, limits = origin.open_at, [size]

    def open_short(address):
        store = open_at(address)
        stream = store.stream

        def cut(key, offset, num_bytes, tag=""):
            return stream(key, offset, limits.pop() if limits else num_bytes, tag)

        store.stream = cut
        return store

    origin.open_at = open_short
    with pytest.raises(OffsiteError, match="got others"):
        origin.stage()
    origin.stage()

    assert CORPUS == contents(origin.to)


def test_after_a_reboot_a_half_fetched_file_is_fetched_anew(origin):
    """
    Its notes were written by a machine that may have lost the bytes.
    """
    mark = hashlib.sha256(str(origin.run_dir).encode()).hexdigest()[:8]
    part = own_path(origin.to / "train" / "0.bin", f"{mark}.part")
    part.parent.mkdir(parents=True)
    part.write_bytes(bytes(len(LARGE)))
    notes = origin.run_dir / ".staging"
    notes.mkdir(parents=True)
    entry = next(e for e in open_store(origin.offload, origin.env).list("train/0") if e.key == "train/0.bin")
    name = hashlib.sha256(str(origin.to / "train" / "0.bin").encode()).hexdigest()[:16]
    stamp = round(entry.modified_at.timestamp() * 1_000_000) * 1000
    (notes / f"{name}.pieces").write_text(
        f'["{origin.to / "train" / "0.bin"}", {len(LARGE)}, {stamp}, "an older boot"]\n0 0.\n1 0.\n2 0.\n3 0.'
    )
    origin.stage(boot_id="boot")

    assert CORPUS == contents(origin.to)


def test_what_came_in_is_not_taken_for_the_runs_own_work(origin, tmp_path):
    """
    Else the folder of every job with data would be kept, and paid for.
    """
    begun = datetime.now(UTC) + timedelta(seconds=1)
    time.sleep(1.1)
    origin.stage()
    found = find_unsaved(tmp_path, run_dir=origin.run_dir, checkpoint_dir=tmp_path / "none", since=begun)
    (origin.to / "tokens").write_text("made here")
    later = find_unsaved(tmp_path, run_dir=origin.run_dir, checkpoint_dir=tmp_path / "none", since=begun)

    assert ((), ("data/tokens",)) == (found, later)


@pytest.mark.parametrize(
    ("fault", "describe"),
    [
        pytest.param({"flip": 7}, describe_file, id="another byte"),
        pytest.param({"flip": 7}, describe, id="another byte of an object with CRC64NVME"),
        pytest.param({"cut_down": 50}, describe_file, id="cut"),
        pytest.param({"end_early": 50}, describe_file, id="ended early"),
    ],
)
def test_damage_on_the_way_in_does_not_pass(request, s3server, tmp_path, fault, describe):
    """
    The store's own checksum decides; a later try ends well.
    """
    origin = Origin(request, tmp_path, "s3")
    origin.fill(tmp_path, CORPUS, describe)
    with FaultProxy(s3server.endpoint) as proxy:
        origin.offload = origin.offload.model_copy(update={"endpoint": proxy.endpoint})
        met = proxy.add(operation="GetObject", path=r".*/train/0\.bin", times=1, **fault)
        try:
            origin.stage()
        except OffsiteError as error:
            assert not error.final  # noqa: PT017  # a flipped byte ends the call; the others are fetched again in it
        origin.stage()

    assert ["GetObject"] == met.taken
    assert CORPUS == contents(origin.to)


STAGE = """
import json, os, sys
from pathlib import Path
from runner.job import OffloadPolicy
from runner.storage.offsite import open_store
from runner.storage.offsite.staging import Item, stage
offload, to, run_dir = OffloadPolicy(**json.loads(sys.argv[1])), sys.argv[2], Path(sys.argv[3])
stage(
    [Item(source=offload.to, to=to)],
    lambda address: open_store(offload.model_copy(update={"to": address}), os.environ),
    run_dir=run_dir, digest="digest", boot_id="boot", progress=lambda *said: print(*said, flush=True),
)
"""


def test_a_killed_staging_goes_on(request, s3server, tmp_path):
    """
    kill -9 in the middle: no file has its name before it is whole, and in the end all are.
    """
    origin = Origin(request, tmp_path, "s3")
    corpus = {f"{number}.bin": os.urandom(3 * CHUNK_BYTES + number) for number in range(3)}
    origin.fill(tmp_path, corpus)
    argv = [sys.executable, "-c", STAGE, origin.offload.model_dump_json(), str(origin.to), str(origin.run_dir)]
    env = {"PATH": os.environ["PATH"], **origin.env}
    for _ in range(3):
        with subprocess.Popen(argv, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2], env=env) as process:
            with ThreadPoolExecutor(1) as reader:
                reader.submit(process.stdout.readline).result(timeout=60)
                reader.submit(process.stdout.readline).result(timeout=60)
            process.send_signal(signal.SIGKILL)
        whole = {name: body for name, body in contents(origin.to).items() if not is_own_name(Path(name).name)}
        assert whole.items() <= corpus.items()
    origin.stage()

    assert corpus == contents(origin.to)


def test_two_runs_that_bring_in_the_same_do_not_write_into_one_anothers(request, s3server, tmp_path):
    """
    Two jobs on one machine may share a folder of data: what one of them calls whole is whole.
    """
    origin = Origin(request, tmp_path, "s3")
    corpus = {f"{number}.bin": os.urandom(3 * CHUNK_BYTES + number) for number in range(3)}
    origin.fill(tmp_path, corpus)
    argv = [sys.executable, "-c", STAGE, origin.offload.model_dump_json(), str(origin.to)]
    env, here = {"PATH": os.environ["PATH"], **origin.env}, Path(__file__).parents[2]
    both = [
        subprocess.Popen([*argv, str(tmp_path / name)], stdout=subprocess.DEVNULL, cwd=here, env=env) for name in "ab"
    ]

    assert [0, 0] == [process.wait(60) for process in both]
    assert corpus == contents(origin.to)


def test_no_room_is_said_before_anything_is_fetched(tmp_path):
    """
    With the numbers: a full disk would stop more than this.
    """
    (tmp_path / "origin").mkdir()
    with (tmp_path / "origin" / "huge").open("wb") as file:
        file.truncate(1 << 43)
    offload = OffloadPolicy(to=f"file://{tmp_path}/origin")
    with pytest.raises(OffsiteError, match=r"expected 8796\.[12]\d* GB free") as caught:
        stage(
            [Item(source=offload.to, to=str(tmp_path / "data"))],
            lambda address: open_store(offload.model_copy(update={"to": address}), {}),
            run_dir=tmp_path / "run",
            digest="d",
            boot_id="b",
            progress=ignore,
        )

    assert (True, []) == (caught.value.final, list((tmp_path / "data").iterdir()))


@pytest.mark.parametrize("to", ["file/below", "file", "circle"])
def test_what_only_a_person_mends_on_this_disk_is_said_at_once(request, tmp_path, to):
    """
    Half an hour of tries on a paid machine would change nothing.
    """
    origin = Origin(request, tmp_path, "file")
    origin.fill(tmp_path, CORPUS)
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "circle").symlink_to("circle")
    with pytest.raises(OffsiteError, match=f"data: {tmp_path}/{to.split('/')[0]}") as caught:
        origin.stage(Item(source=f"{origin.offload.to}/train", to=str(tmp_path / to)))

    assert (True, "data.to" in caught.value.hint) == (caught.value.final, True)


def test_a_name_as_long_as_a_name_may_be_comes_in(origin, tmp_path):
    """
    What is under way has a shorter one.
    """
    origin.fill(tmp_path, {f"long/{'n' * 255}": b"long"})
    origin.stage(Item(source=f"{origin.offload.to}/long", to=str(origin.to)))

    assert {"n" * 255: b"long"} == contents(origin.to)


# ---------------------------------------------------------------------------------------- outputs


@pytest.fixture
def board(tmp_path):
    """A folder as a job writes it, and its run folder."""
    folder = tmp_path / "tensorboard"
    (folder / "run-1").mkdir(parents=True)
    (folder / "run-1" / "events").write_bytes(b"1")
    (folder / "notes.txt").write_bytes(b"notes")
    (tmp_path / "run").mkdir()
    return folder


def places(tmp_path):
    """Of a run in the workspace `tmp_path`."""
    return Places(
        run_dir=tmp_path / "run",
        checkpoint_dir=tmp_path / "run" / "checkpoints",
        workspace=tmp_path,
        data=(tmp_path / "corpus",),
    )


def there(store):
    return {
        entry.key.removeprefix("job/outputs/"): store.read(entry.key, 0, entry.size_bytes)
        for entry in store.list("job/outputs/")
    }


def test_outputs_are_copied_and_only_what_changed(store, board, tmp_path):
    """
    Again and again; with its notes a copy costs no question for a file that is there.
    """
    first = copy_outputs(store, "job", [board], places(tmp_path), ignore)
    (board / "run-1" / "events").write_bytes(b"12")
    second = copy_outputs(store, "job", [board], places(tmp_path), ignore)
    third = copy_outputs(store, "job", [board], places(tmp_path), ignore)

    assert (6, 2, 0) == (first.sent_bytes, second.sent_bytes, third.sent_bytes)
    assert {"tensorboard/run-1/events": b"12", "tensorboard/notes.txt": b"notes"} == there(store)
    assert () == third.left_out


def test_outputs_that_were_lost_there_go_again_and_notes_may_be_lost_here(store, board, tmp_path):
    """
    What counts is what the store has, not what was sent once.
    """
    copy_outputs(store, "job", [board], places(tmp_path), ignore)
    store.delete("job/outputs/tensorboard/notes.txt")
    after_loss = copy_outputs(store, "job", [board], places(tmp_path), ignore)
    (tmp_path / "run" / INDEX).write_bytes(b"\xff torn")
    anew = copy_outputs(store, "job", [board], places(tmp_path), ignore)

    assert (5, 0) == (after_loss.sent_bytes, anew.sent_bytes)
    assert {"tensorboard/run-1/events", "tensorboard/notes.txt"} == set(there(store))


class Unlisted(FileStore):
    """It may not be asked what it has."""

    def list(self, prefix):
        raise AssertionError(prefix)


def test_what_was_confirmed_is_believed_while_it_trains_and_asked_for_at_the_end(board, tmp_path):
    """
    A list of a hundred thousand files is too much every few minutes; what somebody removed there goes again with the last copy.
    """
    store = FileStore(tmp_path / "store", Disk())
    for path in (board / "notes.txt", board / "run-1" / "events"):
        os.utime(path, (1, 1))  # what is very young is noted by the next copy only
    first = copy_outputs(store, "job", [board], places(tmp_path), ignore, believe=True)
    store.delete("job/outputs/tensorboard/notes.txt")
    (board / "run-1" / "events").write_bytes(b"12")
    believing = copy_outputs(
        Unlisted(tmp_path / "store", Disk()), "job", [board], places(tmp_path), ignore, believe=True
    )
    last = copy_outputs(store, "job", [board], places(tmp_path), ignore)

    assert (6, 2, 5) == (first.sent_bytes, believing.sent_bytes, last.sent_bytes)
    assert {"tensorboard/run-1/events": b"12", "tensorboard/notes.txt": b"notes"} == there(store)


def test_a_folder_that_is_not_there_is_named_and_names_of_ours_are_nobodys_work(store, board, tmp_path):
    """
    Such a one has what a copy of ours left unfinished.
    """
    (board / own_path(Path("x"), "guard").name).write_bytes(b"")
    found = copy_outputs(store, "job", [board, tmp_path / "not-there"], places(tmp_path), ignore)

    assert () == found.left_out
    assert {"tensorboard/run-1/events", "tensorboard/notes.txt"} == set(there(store))
    assert (2, 2, (f"{tmp_path}/not-there",)) == (found.num_files, found.num_stored, found.missing)


def test_a_folder_that_cannot_be_read_is_no_empty_one(board, tmp_path):
    """
    Without rights, on a network disk that has gone, or deeper than a path may be: it is left, told, and missed at the end.
    """
    store, begun = FileStore(tmp_path / "store", Disk()), datetime.now(UTC) + timedelta(days=1)
    deep = make_deep(board)
    found = copy_outputs(store, "job", [board], places(tmp_path), ignore)
    missed = find_unsaved(board, run_dir=tmp_path / "run", checkpoint_dir=tmp_path / "none", since=begun)

    assert (2, 2, 1) == (found.num_files, found.num_stored, len(found.left_out))
    assert (True, "it cannot be read: File name too long; mend that, or take it out of outputs") == (
        found.left_out[0][0].startswith(deep),
        found.left_out[0][1],
    )
    assert [True] == [one.endswith("d (cannot be read)") for one in missed]


def make_deep(folder):
    """Folders in one another, the last of which no path leads to; returns where they begin."""
    name, at = "d" * 250, os.open(folder, os.O_RDONLY)
    for _ in range(17):
        os.mkdir(name, dir_fd=at)
        inner = os.open(name, os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = inner
    os.mkdir("d", dir_fd=at)
    os.close(at)
    return f"{folder}/{name}"


def test_a_file_that_the_store_refuses_costs_only_itself(store, board, tmp_path):
    """
    Longer names than it takes, a folder where it has a file: it is named, and all others go.
    """
    long = board / "a" / "/".join(["n" * 200] * 6)
    long.parent.mkdir(parents=True)
    long.write_bytes(b"long")
    (board / "z").write_bytes(b"last")
    if isinstance(store, FileStore):
        store.put(f"job/outputs/tensorboard/a/{'n' * 200}", b"a file")
    found = copy_outputs(store, "job", [board], places(tmp_path), ignore)

    assert [str(long)] == [path for path, _ in found.left_out]
    assert {"tensorboard/run-1/events", "tensorboard/notes.txt", "tensorboard/z"} <= set(there(store))
    assert (4, 3) == (found.num_files, found.num_stored)


def test_an_output_may_be_a_file(store, board, tmp_path):
    """
    Whoever names one means it.
    """
    found = copy_outputs(store, "job", [board / "notes.txt"], places(tmp_path), ignore)

    assert ({"notes.txt": b"notes"}, 1, ()) == (there(store), found.num_stored, found.missing)


class Vanishing(FileStore):
    """While a large file is about to be sent the job removes it."""

    def put_file(self, key, path, shard, sent):
        if path.name == "tmp":
            path.unlink()
        super().put_file(key, path, shard, sent)


def test_a_file_that_vanishes_meanwhile_costs_only_itself(board, tmp_path):
    """
    All else is copied, and the task does not fail: jobs rename what they have written.
    """
    store = Vanishing(tmp_path / "store", Disk())
    (board / "a" / "tmp").parent.mkdir()
    (board / "a" / "tmp").write_bytes(b"t")
    found = copy_outputs(store, "job", [board], places(tmp_path), ignore)

    assert (2, 2, ()) == (found.num_files, found.num_stored, found.left_out), "what is gone is nobody's"
    assert {"tensorboard/run-1/events", "tensorboard/notes.txt"} == set(there(store))


class Written(FileStore):
    """While a file is about to be sent somebody goes on writing to it, so many times."""

    times = 1

    def put_file(self, key, path, shard, sent):
        if path.name == "events" and self.times:
            self.times -= 1
            with path.open("ab") as file:
                file.write(b"more")
        super().put_file(key, path, shard, sent)


@pytest.mark.parametrize(("times", "left"), [(1, ()), (9, (WRITTEN,))], ids=["a last line", "no end"])
def test_the_last_copy_waits_a_moment_for_what_is_written(board, tmp_path, times, left):
    """
    Nobody should write any more; who does so for long is told of. While it trains, the next copy is soon.
    """
    store = Written(tmp_path / "store", Disk())
    store.times = times
    found = copy_outputs(store, "job", [board], places(tmp_path), ignore)
    (board / "run-1" / "events").write_bytes(b"anew")
    store.times = 1
    now = copy_outputs(store, "job", [board], places(tmp_path), ignore, believe=True)

    assert left == tuple(why for _, why in found.left_out)
    assert [WRITTEN] == [why for _, why in now.left_out]


def test_what_a_link_in_outputs_stands_for_is_copied_once(store, board, tmp_path):
    """
    Files and folders of the script's, wherever in the workspace: under the link's name. What is copied anyway, or
    came from a store, is not copied again; a link that leads nowhere, or in a circle, holds nothing.
    """
    real = tmp_path / "real"
    (real / "deep").mkdir(parents=True)
    (real / "deep" / "model").write_bytes(b"model")
    (tmp_path / "corpus").mkdir()
    links = {
        "run-2": real,
        "the-same": real / "deep",
        "latest": board / "run-1",
        "words": tmp_path / "corpus",
        "gone": tmp_path / "none",
        "circle": board / "circle",
        "pipe": "/dev/null",
    }
    for name, target in links.items():
        (board / name).symlink_to(target)
    (real / "deep" / "up").symlink_to(real)
    expected = {"tensorboard/run-1/events", "tensorboard/notes.txt", "tensorboard/run-2/deep/model"}
    found = [copy_outputs(store, "job", [board], places(tmp_path), ignore) for _ in range(2)]

    assert [(), ()] == [one.left_out for one in found]
    assert expected == set(there(store))
    assert [(str(real),)] * 2 == [one.followed for one in found]
    assert [3, 3] == [one.num_stored for one in found]


def test_what_the_task_leaves_is_what_the_end_goes_by(board, tmp_path):
    """
    Its answer, as JSON, tells decision and summary which file is not there, and what need not be missed.
    """
    fields = {"command": "x", "outputs": [str(board)], "offload": {"to": f"file://{tmp_path}/store"}}
    fields["checkpoint"] = {"dir": f"{tmp_path}/run/checkpoints"}
    job = Job.model_validate({**fields, "finish": {"save_folder": str(tmp_path)}})
    (board / "big").symlink_to("/etc")
    (tmp_path / "real").mkdir()
    (board / "near").symlink_to(tmp_path / "real")
    arguments = {
        "subject": ALL_OUTPUTS,
        "job": "job",
        "spec": job.model_dump(mode="json", by_alias=True),
        "place": dump_place(job.offload),
        "run_dir": str(tmp_path / "run"),
        "checkpoint_dir": str(tmp_path / "run" / "checkpoints"),
    }
    told = json.loads(json.dumps(tasks.outputs(arguments, ignore)))
    seen = Observed(
        now=THEN, boot_id="b", life="l", tasks={TaskKind.OUTPUTS: Finished(subject=ALL_OUTPUTS, at=THEN, result=told)}
    )

    missing = f"/etc: the link {board}/big leads here, out of {tmp_path}; name /etc in outputs, or move it there"
    assert missing == tell_missing_outputs(job, seen)
    assert (["/etc"], [f"{tmp_path}/real"]) == (told["only_here"], told["followed"])
    assert told["there"] == "2 of 2 files in the store"
    assert told["stuck"].startswith(f"/etc: the link {board}/big leads here, out of {tmp_path}; name /etc in outputs")
    assert missing == tell_left(job)


def test_what_no_copy_will_have_is_told_before_the_job(board, tmp_path):
    """
    By `validate` and `preflight`, as the end would tell it; a link that leads nowhere is no loss, and nothing is said.
    """
    text = f"name: j\ncommand: x\nlauncher: command\noutputs: [{board}]\noffload: {{to: s3://b}}\ndata: []\n"
    (tmp_path / "job.yaml").write_text(text)
    job = load_job(str(tmp_path / "job.yaml"), {"VRAMFARM_WORKSPACE": str(tmp_path)}).job
    (board / "gone").symlink_to(tmp_path / "none")
    (board / "circle").symlink_to(board / "circle")
    before = [*_outputs(job), *(line for line in warn(job, {}) if line.startswith("outputs"))]
    (tmp_path / "j" / "checkpoints").mkdir(parents=True)
    (board / "latest").symlink_to(tmp_path / "j" / "checkpoints")
    (board / "logs").symlink_to("/etc")

    (found,), (line,) = _outputs(job), [line for line in warn(job, {}) if line.startswith("outputs")]

    assert [] == before
    assert Severity.WARN is found.severity
    for text in (found.message, line):
        assert f"{board}/latest: expected the script's own" in text
        assert text.endswith("take it out of outputs (and 1 more)")


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("{outside}", "/board/link leads here, out of {workspace}; name {outside} in outputs, or move it there"),
        ("{workspace}", "which has the run folder in it; name a folder below, or lead the link there"),
        ("{workspace}/run", "which has the run folder in it; name a folder below, or lead the link there"),
        ("{workspace}/run/checkpoints/step-1", "checkpoints go to the store by themselves; take it out of outputs"),
    ],
)
@pytest.mark.parametrize("is_named", [False, True], ids=["inside", "named"])
def test_a_link_that_is_not_followed_is_told_and_missed(tmp_path, place, words, is_named):
    """
    Out of the workspace, and to what the runner has there: also where it is made while the job runs.
    """
    workspace, outside = tmp_path / "w", tmp_path / "outside"
    known, board = places(workspace), workspace / "board"
    for folder in (workspace / "run" / "checkpoints" / "step-1", outside, board):
        folder.mkdir(parents=True)
        (folder / "file").write_bytes(b"x")
    link = workspace / "link" if is_named else board / "link"
    link.symlink_to(place.format(workspace=workspace, outside=outside))
    store, folders = FileStore(tmp_path / "store", Disk()), [board, link] if is_named else [board]
    found = copy_outputs(store, "job", folders, known, ignore)
    missed = find_unsaved(
        workspace,
        run_dir=known.run_dir,
        checkpoint_dir=known.checkpoint_dir,
        since=datetime.now(UTC) + timedelta(days=1),
        outputs=[board],
    )

    if is_named and place == "{outside}":
        assert {"board/file": b"x", "link/file": b"x"} == there(store), "whoever names a place means it"
        return
    assert [str(outside if place == "{outside}" else link)] == [path for path, _ in found.left_out]
    assert found.left_out[0][1].endswith(words.format(workspace=workspace, outside=outside))
    assert {"board/file": b"x"} == there(store)
    assert is_named or ["board/file", "board/link"] == sorted(missed)


@pytest.mark.parametrize("content", [b"code" * 1000, LARGE], ids=["small", "in pieces"])
def test_an_archive_of_code_is_compared_as_data_is(content, s3_offload, s3server, tmp_path, monkeypatch):
    """
    What was damaged on its way is not run: it is no file under its name, and the next try brings the right bytes. With
    a key that may not list.
    """
    (tmp_path / "code.tar").write_bytes(content)
    shard = describe_file(tmp_path / "code.tar", "code.tar")
    open_store(s3_offload, s3server.env).put_file("code.tar", tmp_path / "code.tar", shard, lambda _: None)
    for name, value in s3server.env.items():
        monkeypatch.setenv(name, value)
    source = ArchiveSource(archive=f"{s3_offload.to}/code.tar")
    place = tmp_path / "run" / "source" / "abc-code.tar"

    with FaultProxy(s3server.endpoint) as proxy:
        proxy.add(operation="GetObject", flip=7, times=1)
        proxy.add(operation="ListObjectsV2", answer=(403, "AccessDenied"))
        arguments = {
            "run_dir": str(tmp_path / "run"),
            "subject": "abc",
            "boot_id": "boot",
            "offload": {"to": s3_offload.to, "endpoint": proxy.endpoint},
        }
        with pytest.raises(OffsiteError, match=r"source\.archive: .* bytes that were listed, got others") as caught:
            tasks._fetched(source, arguments, ignore)
        was_there = place.exists()
        found = tasks._fetched(source, arguments, ignore)

    assert (False, False) == (caught.value.final, was_there)
    assert found == ArchiveSource(archive=str(place))
    assert content == place.read_bytes()
