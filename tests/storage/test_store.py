"""What every store promises: one suite, run against a folder, one that is late, and a real S3 server."""

import errno
import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from zlib import crc32

import pytest
from botocore.exceptions import ClientError

from runner.job import OffloadPolicy
from runner.storage.checksums import CRC32, CRC64NVME, describe_file
from runner.storage.disk import Disk, own_path
from runner.storage.offsite import OffsiteError, open_store
from runner.storage.offsite.contract import Checksums, Head, Version, agrees, proves
from runner.storage.offsite.digests import Kind
from runner.storage.offsite.disks import refused
from runner.storage.offsite.file import FileStore
from runner.storage.offsite.parts import PART_CHUNKS, plan_parts
from runner.storage.offsite.s3 import S3Store
from runner.storage.offsite.tidying import remove_run
from tests.fakes import FaultyDisk, Loss, PowerLoss
from tests.s3server import BUCKET
from tests.storage.cutting import CuttingProxy
from tests.storage.examples import ODD_NAMES, describe
from tests.storage.late import LateStore
from vramfarm.checksum import find_crc64nvme
from vramfarm.protocol import CHUNK_BYTES, Shard

LARGE = b"".join(bytes([number]) * CHUNK_BYTES for number in range(3)) + b"tail"
FOREVER = datetime.now(UTC) + timedelta(days=1)


@pytest.fixture(params=["file", "late", "s3"])
def store(request, tmp_path):
    if request.param == "s3":
        return open_store(request.getfixturevalue("s3_offload"), request.getfixturevalue("s3server").env)
    folder = open_store(OffloadPolicy(to=f"file://{tmp_path}/store"), {})
    return folder if request.param == "file" else LateStore(folder, lag_s=0.2)


def soon(ask, expected):
    """What is answered once it is what is expected, or after a while: some stores are late."""
    deadline = time.monotonic() + 20
    while (found := ask()) != expected and time.monotonic() < deadline:
        time.sleep(0.02)
    return found


def keys(store, prefix):
    return sorted(entry.key for entry in store.list(prefix))


def ignore(num_bytes):
    """Where nobody asks for progress."""


def write(path, content):
    path.write_bytes(content)
    return describe_file(path, path.name)


@pytest.mark.parametrize(("crc", "of"), [(CRC32, crc32), (CRC64NVME, find_crc64nvme())], ids=["crc32", "crc64nvme"])
@pytest.mark.parametrize("sizes", [(0, 0), (1, 0), (0, 1), (1000, 1), (1, CHUNK_BYTES), (12_345, 67_890)])
def test_checksums_of_pieces_add_up_to_that_of_the_whole(crc, of, sizes):
    """
    The sum is what zlib, or `awscrt`, says of the pieces joined.
    """
    first, second = (bytes(range(256)) * (size // 256 + 1) for size in sizes)
    first, second = first[: sizes[0]], second[: sizes[1]]

    assert of(first + second, 0) == crc.combine(of(first, 0), of(second, 0), len(second))


@pytest.mark.parametrize(
    ("told", "is_so"),
    [
        ({"crc64nvme": 1, "crc32": 2, "md5": "3"}, True),
        ({"crc64nvme": 0, "crc32": 2, "md5": "3"}, False),
        ({"crc32": 2, "md5": "0"}, True),
        ({"crc32": 0, "md5": "3"}, False),
        ({"md5": "3", "parts_crc32": (0, 1)}, True),
        ({"md5": "0"}, False),
        ({"parts_crc32": (crc32(b"\0\0\0\2"), 1)}, True),
        ({"parts_crc32": (0, 1)}, None),
        ({}, None),
    ],
)
def test_the_strongest_word_of_a_store_counts(told, is_so):
    """
    Whoever compares, a checkpoint or data: of parts a store tells how it cut them, no more.
    """
    head = Head(**{"size_bytes": 9, "crc32": None, **told})

    assert is_so is proves(head, 9, [2], crc64nvme=lambda: 1, md5=lambda: "3")
    assert proves(head, 8, [2]) is False


def test_what_was_put_comes_back(store):
    """
    The last put wins, and what was never put is not there.
    """
    store.put("job/status.json", b"old")
    store.put("job/status.json", b"new")

    assert b"new" == soon(lambda: store.get("job/status.json"), b"new")
    assert store.get("job/other.json") is None


def test_what_was_tried_out_leaves_nothing_and_every_store_of_ours_has_conditional_writes(store):
    """
    A lease rests on them.
    """
    assert store.probe().conditional
    assert [] == list(store.list(""))


def test_a_run_whose_writers_were_killed_is_removed_to_the_last_folder(tmp_path):
    """
    In a folder: a copy that was begun, a folder made for one, the lock file of a write that never was.
    """
    store = FileStore(tmp_path / "store", Disk())
    store.put("job/status.json", b"{}")
    store.put_if("job/lease.json", b"{}", None)
    logs, other = tmp_path / "store/job/logs/attempt-0001", tmp_path / "store/other/logs"
    for folder in (logs, tmp_path / "store/job/machines/0001", other):
        folder.mkdir(parents=True)
    own_path(logs / "launcher.log", "unfinished").write_text("half of")
    own_path(tmp_path / "store/job/refusal.json", "guard").touch()
    time.sleep(0.02)  # what is begun now is somebody else's
    remove_run(store, "job")

    assert [other.parent, other] == sorted((tmp_path / "store").rglob("*"))


class Lockless(FileStore):
    """On a network disk that has no locks."""

    @contextmanager
    def _guarded(self, target):
        with super()._guarded(target):
            raise OSError(errno.ENOLCK, "no locks available", str(target))
        yield


def test_a_disk_without_locks_has_no_conditional_writes(tmp_path):
    """
    It is said, and the run goes on without a lease; nothing is left behind.
    """
    assert not Lockless(tmp_path / "store", Disk()).probe().conditional
    assert [] == list((tmp_path / "store").iterdir())


def test_a_folder_that_cannot_be_written_is_not_taken_for_one_without_conditional_writes(tmp_path):
    """
    Without a lease two machines could write one run: nothing but the lack of the ability itself is a reason.
    """
    (tmp_path / "store").write_text("a file")

    with pytest.raises(OffsiteError, match="exists"):
        FileStore(tmp_path / "store", Disk()).probe()


def test_what_is_larger_than_expected_is_refused(store):
    """
    Nobody fills our memory with an object under a small object's name.
    """
    store.put("job/outcome.json", b"x" * 11)
    soon(lambda: keys(store, "job/"), ["job/outcome.json"])

    with pytest.raises(OffsiteError, match="at most 10 bytes, got 11") as caught:
        store.get("job/outcome.json", limit_bytes=10)

    assert caught.value.final


def test_of_several_who_put_something_new_one_succeeds(store):
    """
    A manifest is never replaced, not even by somebody who writes at the same moment.
    """
    with ThreadPoolExecutor(6) as pool:
        won = list(pool.map(lambda n: store.put_new("job/MANIFEST.json", b"%d" % n), range(6)))

    assert 1 == won.count(True)
    winner = b"%d" % won.index(True)
    assert winner == soon(lambda: store.get("job/MANIFEST.json"), winner)
    assert not store.put_new("job/MANIFEST.json", b"later")


def test_a_small_object_is_replaced_only_as_it_was_seen(store):
    """
    Whoever saw an older version, or none where there is one, is refused and changes nothing.
    """
    first = store.put_if("job/lease.json", b"1", None)
    seen = soon(lambda: store.get_version("job/lease.json"), Version(content=b"1", tag=first))
    second = store.put_if("job/lease.json", b"2", first)
    expected = Version(content=b"2", tag=second)

    assert Version(content=b"1", tag=first) == seen
    assert [None, None, None] == [store.put_if("job/lease.json", b"3", tag) for tag in (None, first, '"other"')]
    assert expected == soon(lambda: store.get_version("job/lease.json"), expected)
    assert ["job/lease.json"] == keys(store, "job/")


def test_nothing_is_replaced_where_nothing_is(store):
    """
    An object that was removed meanwhile is not there to be replaced.
    """
    assert (None, None) == (store.put_if("job/lease.json", b"1", '"tag"'), store.get_version("job/lease.json"))


def test_of_several_who_replace_one_version_one_succeeds(store):
    """
    Two runners that take over a dead one's lease at the same moment.
    """
    tag = store.put_if("job/lease.json", b"dead", None)
    with ThreadPoolExecutor(6) as pool:
        won = list(pool.map(lambda n: store.put_if("job/lease.json", b"%d" % n, tag), range(6)))

    assert 5 == won.count(None)
    (winner,) = (number for number, new in enumerate(won) if new)
    assert b"%d" % winner == soon(lambda: store.get("job/lease.json"), b"%d" % winner)


@pytest.mark.parametrize("describe", [describe, describe_file])
@pytest.mark.parametrize("content", [b"", b"small", LARGE], ids=["empty", "small", "large"])
def test_a_file_arrives_whole(store, tmp_path, content, describe):
    """
    Its size, its checksum where the store keeps one, and its bytes, wherever we read.
    """
    (tmp_path / "shard").write_bytes(content)
    shard, sent = describe(tmp_path / "shard", "shard"), []
    store.put_file("job/shard", tmp_path / "shard", shard, sent.append)

    soon(lambda: keys(store, "job/"), ["job/shard"])
    head = store.head("job/shard")
    at = max(0, len(content) - 10)

    assert len(content) == sum(sent)
    further = find_crc64nvme()(content, 0) if shard.crc64nvme else None
    whole = {"crc32": None, "crc64nvme": further} if further else {"crc32": crc32(content)}
    assert head in {Head(size_bytes=len(content), **known) for known in ({"crc32": None}, whole)}
    assert content[at:] == store.read("job/shard", at, len(content) - at)
    assert content[:3] == store.read("job/shard", 0, len(content[:3]))


@pytest.mark.parametrize(("offset", "num_bytes"), [(0, 0), (0, 3), (5, 2 << 20), (1 << 20, (1 << 20) + 9)])
def test_a_long_read_comes_in_blocks_of_a_mebibyte(store, offset, num_bytes):
    """
    Memory does not grow with what is read; only the last block is shorter.
    """
    content = bytes(range(251)) * (3 * (1 << 20) // 251)
    store.put("job/long", content)
    soon(lambda: keys(store, "job/"), ["job/long"])
    blocks = [*map(bytes, store.stream("job/long", offset, num_bytes))]

    assert content[offset : offset + num_bytes] == b"".join(blocks)
    assert all(len(block) == 1 << 20 for block in blocks[:-1])


def test_a_file_that_is_not_what_its_checksums_say_is_refused(store, tmp_path):
    """
    A damaged shard never gets a good one's name, however far the upload has come.
    """
    shard = write(tmp_path / "shard", LARGE)
    (tmp_path / "shard").write_bytes(LARGE[:-1] + b"?")

    with pytest.raises(OffsiteError, match="expected the bytes of its manifest") as caught:
        store.put_file("job/shard", tmp_path / "shard", shard, ignore)

    assert (True, True, None) == (caught.value.final, caught.value.damaged, store.head("job/shard"))


def test_a_list_has_all_below_a_prefix_and_nothing_else(store):
    """
    Neighbours whose names begin alike are not below it.
    """
    for key in ("job/a/1", "job/a/b/2", "job/a-b/3", "job2/a/4"):
        store.put(key, key.encode())

    expected = {("job/a/1", 7), ("job/a/b/2", 9)}

    assert expected == soon(lambda: {(entry.key, entry.size_bytes) for entry in store.list("job/a/")}, expected)
    assert [] == list(store.list("nothing/"))


def test_a_long_list_is_whole(s3_offload, s3server):
    """
    A server gives a thousand names at a time; all pages are read.
    """
    store = open_store(s3_offload, s3server.env)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: store.put(f"job/{n:04d}", b""), range(1005)))

    assert 1005 == len({entry.key for entry in store.list("job/")})


def test_what_was_deleted_is_gone_and_may_be_deleted_again(store):
    """
    And its neighbours stay.
    """
    store.put("job/a/1", b"1")
    store.put("job/a/2", b"2")
    for _ in range(2):
        store.delete("job/a/1")

    assert ["job/a/2"] == soon(lambda: keys(store, "job/"), ["job/a/2"])


def test_names_that_a_file_may_have_are_keys(store):
    """
    Whatever a person, or Word, made of them: they come back as they went.
    """
    for name in ODD_NAMES:
        store.put(f"job/{name}", name.encode())

    assert sorted(f"job/{name}" for name in ODD_NAMES) == soon(
        lambda: keys(store, "job/"), sorted(f"job/{name}" for name in ODD_NAMES)
    )
    assert [name.encode() for name in ODD_NAMES] == [store.get(f"job/{name}") for name in ODD_NAMES]


def test_what_is_read_with_a_tag_is_of_one_object(store):
    """
    By its head's tag; one that was replaced by another of the same size is an error that may pass.
    """
    store.put("job/data", b"first")
    soon(lambda: store.head("job/data") is not None, True)
    tag = store.head("job/data").tag
    parts = [store.read("job/data", 0, 3, tag), *map(bytes, store.stream("job/data", 3, 2, tag))]
    store.put("job/data", b"other")
    soon(lambda: store.read("job/data", 0, 5), b"other")
    refusals = []
    for call in (lambda: store.read("job/data", 3, 2, tag), lambda: list(store.stream("job/data", 3, 2, tag))):
        with pytest.raises(OffsiteError, match="got another one") as caught:
            call()
        refusals.append(caught.value.final)

    assert (b"first", [False, False]) == (b"".join(parts), refusals)


def test_a_refusal_of_a_hostile_name_is_one_line(store):
    """
    It ends on a terminal.
    """
    with pytest.raises(OffsiteError) as caught:
        store.read("job/\x1b[2J\nfake", 0, 1)

    assert str(caught.value).isprintable()


@pytest.mark.parametrize("key", ["../x", "/etc/x", "job/../../x", "job//x", "", "job/./x", "job/\ud800"])
def test_a_key_that_leads_elsewhere_is_refused(store, key):
    """
    Before anything is asked of the store.
    """
    for call in (lambda: store.put(key, b""), lambda: store.get(key), lambda: store.delete(key)):
        with pytest.raises(OffsiteError, match="plain relative path"):
            call()


# ------------------------------------------------------------------------------------- a folder


def test_links_and_pipes_in_a_folder_are_not_objects(tmp_path):
    """
    A store on a disk never reads what lies outside of it.
    """
    store = open_store(OffloadPolicy(to=f"file://{tmp_path}/store"), {})
    store.put("job/real", b"1")
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "key").write_bytes(b"secret")
    (tmp_path / "store" / "job" / "link").symlink_to(tmp_path / "secret" / "key")
    (tmp_path / "store" / "job" / "folder").symlink_to(tmp_path / "secret")

    assert ["job/real"] == [entry.key for entry in store.list("job/")]
    for key in ("job/link", "job/folder/key"):
        with pytest.raises(OffsiteError):
            store.get(key)


def test_a_disk_that_is_not_mounted_is_said_so(tmp_path):
    """
    A folder that we would have to invent is no place off this machine.
    """
    with pytest.raises(OffsiteError, match="expected the folder") as caught:
        open_store(OffloadPolicy(to=f"file://{tmp_path}/mnt/store"), {})

    assert (True, "is the disk mounted? make the folder, or correct offload.to") == (
        caught.value.final,
        caught.value.hint,
    )


class RefusingDisk(Disk):
    """A disk that takes nothing more, for the reason it was given."""

    def __init__(self, number):
        super().__init__()
        self.number = number

    def write(self, path, content):
        del content
        raise OSError(self.number, os.strerror(self.number), str(path))


@pytest.mark.parametrize(
    ("number", "final", "hint"),
    [
        pytest.param(errno.EROFS, True, "mount it so that it can be written, or correct offload.to", id="read-only"),
        pytest.param(errno.ENOSPC, True, "free some space there, or lower offload.keep_last", id="full"),
        pytest.param(errno.EDQUOT, True, "free some space there, or lower offload.keep_last", id="quota"),
        pytest.param(errno.EACCES, True, "may this user write there?", id="denied"),
        pytest.param(errno.EPERM, True, "may this user write there?", id="not-permitted"),
        pytest.param(errno.ESTALE, False, "", id="a-network-disk-that-was-away"),
        pytest.param(errno.EIO, False, "", id="a-network-disk-that-does-not-answer"),
    ],
)
def test_what_only_a_person_mends_is_final_and_says_how(tmp_path, number, final, hint):
    """
    A folder that is full or read-only is not asked again and again; a network disk that is away is.
    """
    store = FileStore(tmp_path / "store", RefusingDisk(number))

    with pytest.raises(OffsiteError, match=os.strerror(number)) as caught:
        store.put("job/looked.json", b"1")

    assert (final, hint) == (caught.value.final, caught.value.hint)


@pytest.mark.parametrize("key", ["offload.to", "data.to", "checkpoint.dir"])
@pytest.mark.parametrize(
    ("number", "final", "curable"),
    [
        (errno.ENOSPC, True, True),
        (errno.EROFS, True, True),
        (errno.ENAMETOOLONG, True, False),
        (errno.EEXIST, True, False),
        (errno.EILSEQ, True, False),
        (errno.ELOOP, True, False),
        (errno.ESTALE, False, False),
        (errno.EIO, False, False),
    ],
    ids=lambda value: errno.errorcode.get(value) if type(value) is int else None,
)
def test_one_table_says_what_a_disk_refuses_for_good(key, number, final, curable):
    """
    Of a store in a folder, of data on their way in, of a restore; with the cure wherever trying again is of no use.
    """
    error = refused("/place", OSError(number, os.strerror(number)), key)

    assert (final, curable, final) == (error.final, error.curable, bool(error.hint))
    assert "{" not in error.hint


def test_a_path_through_a_file_is_said_at_once(tmp_path):
    """
    What can never become a folder is not waited for.
    """
    (tmp_path / "store").write_text("a file")

    with pytest.raises(OffsiteError) as caught:
        open_store(OffloadPolicy(to=f"file://{tmp_path}/store"), {}).put("job/looked.json", b"1")

    assert (True, True) == (caught.value.final, bool(caught.value.hint)), caught.value


def test_two_who_write_one_small_object_at_once_both_succeed(tmp_path):
    """
    The keeper and a copy of the report both write `status.json`: it is that of one of them, and whole.
    """
    store = FileStore(tmp_path / "store", Disk())
    contents = [bytes([number]) * (1 + 50_000 * number) for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(5):
            list(pool.map(lambda content: store.put("job/status.json", content), contents))

    assert store.get("job/status.json") in contents


def test_abort_forgets_what_a_killed_writer_left_in_a_folder(tmp_path):
    """
    Only what is old enough.
    """
    store = open_store(OffloadPolicy(to=f"file://{tmp_path}/store"), {})
    store.put("job/a/1", b"1")
    old, young, theirs = (tmp_path / "store/job/a" / name for name in ("1", "2", "3.unfinished"))
    old, young = own_path(old, "unfinished"), own_path(young, "unfinished")
    for path, begun_at in ((old, 0), (young, time.time() + 60), (theirs, 0)):
        path.write_bytes(b"half")
        os.utime(path, (begun_at, begun_at))
    store.abort("job/", datetime.now(UTC))

    assert {"1", "3.unfinished", young.name} == {path.name for path in (tmp_path / "store/job/a").iterdir()}
    assert ["job/a/1", "job/a/3.unfinished"] == keys(store, "job/")


def test_a_file_store_has_no_names_of_its_own_among_the_objects(tmp_path):
    """
    A copy that is under way, and a lock, lie where no object can: each of these is an object like any other.
    """
    store, names = FileStore(tmp_path / "store", Disk()), ["a.unfinished", ".a.guard", "a", "a.staging"]
    for name in (*names, "a"):
        store.put_if(f"job/{name}", name.encode(), None) or store.put(f"job/{name}", name.encode())
    with pytest.raises(OffsiteError, match="plain relative path"):
        store.put(f"job/{own_path(Path('a'), 'guard').name}", b"")

    assert sorted(f"job/{name}" for name in names) == keys(store, "job/")
    assert [name.encode() for name in names] == [store.get(f"job/{name}") for name in names]


def test_nothing_is_written_or_removed_through_a_link_in_a_store(tmp_path):
    """
    Somebody who may write there lays a link that leads out of it.
    """
    outside, store = tmp_path / "outside", FileStore(tmp_path / "store", Disk())
    outside.mkdir()
    (outside / "keys").write_bytes(b"theirs")
    (own_path(outside / "x", "unfinished")).write_bytes(b"")
    store.put("job/real", b"1")
    (tmp_path / "store/job/logs").symlink_to(outside)
    shard = write(tmp_path / "shard", b"evil")
    for call in (
        lambda: store.put("job/logs/keys", b"evil"),
        lambda: store.put_new("job/logs/new", b"evil"),
        lambda: store.put_if("job/logs/new", b"evil", None),
        lambda: store.put_file("job/logs/deep/er", tmp_path / "shard", shard, ignore),
        lambda: store.copy("job/real", "job/logs/copy", shard),
        lambda: store.delete("job/logs/keys"),
        lambda: store.read("job/logs/keys", 0, 9),
        lambda: list(store.list("job/logs/")),
        lambda: store.abort("job/logs/", datetime.now(UTC)),
    ):
        with pytest.raises(OffsiteError, match="expected a folder, got a link") as caught:
            call()
        assert "remove the link" in caught.value.hint
    store.abort("job/", datetime.now(UTC))

    assert {"keys": b"theirs", own_path(outside / "x", "unfinished").name: b""} == {
        path.name: path.read_bytes() for path in outside.iterdir()
    }


def test_abort_forgets_a_run_that_came_to_nothing(tmp_path):
    """
    Whoever was killed before its first byte leaves an empty folder.
    """
    store = open_store(OffloadPolicy(to=f"file://{tmp_path}/store"), {})
    for name in ("job", "another"):
        (tmp_path / "store" / name).mkdir(parents=True)
        os.utime(tmp_path / "store" / name, (0, 0))
    store.abort("job/", datetime.now(UTC))

    assert ["another"] == [path.name for path in (tmp_path / "store").iterdir()]


class LinklessDisk(Disk):
    """A disk as FUSE and SMB offer it."""

    def link(self, source, target):
        raise OSError(errno.EPERM, "no links here")


def test_a_disk_without_hard_links_will_do(tmp_path):
    """
    What is there is not replaced on such a disk either.
    """
    store = FileStore(tmp_path / "store", LinklessDisk())

    assert [True, False] == [store.put_new("job/MANIFEST.json", b"first"), store.put_new("job/MANIFEST.json", b"other")]
    assert b"first" == store.get("job/MANIFEST.json")
    assert ["MANIFEST.json"] == [path.name for path in (tmp_path / "store/job").iterdir()]


@pytest.mark.parametrize("loss", list(Loss))
@pytest.mark.parametrize("fail_at", range(12))
@pytest.mark.parametrize("how", ["put", "put_new", "put_file"])
def test_what_a_folder_acknowledged_survives_a_power_loss(tmp_path, how, fail_at, loss):
    """
    After a power loss at any operation an object is whole or not there, and once the call has returned it is there.
    """
    (tmp_path / "disk").mkdir()
    disk = FaultyDisk(tmp_path / "disk", fail_at)
    shard = write(tmp_path / "shard", b"content")
    try:
        store = FileStore(tmp_path / "disk/store", disk)
        match how:
            case "put_file":
                store.put_file("job/object", tmp_path / "shard", shard, ignore)
            case _:
                getattr(store, how)("job/object", b"content")
    except PowerLoss:
        allowed = {None, b"content"}
    else:
        allowed = {b"content"}
    disk.lose(loss, seed=fail_at)

    after = FileStore(tmp_path / "disk/store", Disk())

    assert after.get("job/object") in allowed
    assert {entry.key for entry in after.list("job/")} <= {"job/object"}


# ------------------------------------------------------------------------------------ S3 only


@pytest.fixture
def s3store(s3_offload, s3server):
    """With small parts, and the numbers of those that were sent in `sent`."""
    store = S3Store(s3_offload, s3server.env, part_chunks=1)
    store.probe()
    store.sent = []
    store._client.meta.events.register(
        "before-parameter-build.s3.UploadPart", lambda params, **_: store.sent.append(params["PartNumber"])
    )
    return store


@pytest.mark.parametrize(
    ("describe", "algorithm", "sent"),
    [
        pytest.param(describe, "CRC64NVME", [2, 3], id="ours"),
        pytest.param(describe_file, "CRC32", [2, 3], id="without CRC64NVME in the manifest"),
        pytest.param(describe, "CRC32", [1, 2, 3, 4], id="begun by an older runner"),
        pytest.param(describe_file, "CRC64NVME", [1, 2, 3, 4], id="begun with another manifest"),
    ],
)
def test_parts_that_are_there_are_not_sent_again(s3store, s3server, tmp_path, describe, algorithm, sent):  # noqa: PLR0917
    """
    After a kill only what is missing goes, and what is there but wrong. Of an upload by another checksum the server takes nothing: it is given up.
    """
    (tmp_path / "shard").write_bytes(LARGE)
    shard = describe(tmp_path / "shard", "shard")
    client, key = s3server.client(request_checksum_calculation="when_required"), f"{s3store._prefix}job/shard"
    begun = client.create_multipart_upload(
        Bucket=BUCKET, Key=key, ChecksumAlgorithm=algorithm, ChecksumType="FULL_OBJECT"
    )
    for number, content in ((1, LARGE[:CHUNK_BYTES]), (2, bytes(CHUNK_BYTES)), (4, b"tail")):
        client.upload_part(Bucket=BUCKET, Key=key, UploadId=begun["UploadId"], PartNumber=number, Body=content)

    s3store.put_file("job/shard", tmp_path / "shard", shard, ignore)

    assert sent == sorted({*s3store.sent[-len(sent) :]})
    assert agrees(s3store.head("job/shard"), shard)
    assert [] == client.list_multipart_uploads(Bucket=BUCKET, Prefix=s3store._prefix).get("Uploads", [])


@pytest.mark.parametrize(
    ("num_chunks", "expected"),
    [
        pytest.param(1, [1], id="one"),
        pytest.param(5, [2, 2, 1], id="a small shard"),
        pytest.param(127, [3] * 42 + [1], id="thirty-two or a few more"),
        pytest.param(1000, [4] * 250, id="none too large to be a step of progress"),
        pytest.param(50_001, [6] * 8333 + [3], id="no more than a store takes"),
    ],
)
def test_parts_of_a_large_shard_are_larger(num_chunks, expected):
    """
    Each costs a server its turn, and a kill what was sent of it.
    """
    shard = Shard("shard", (num_chunks - 1) * CHUNK_BYTES + 1, (0,) * num_chunks)

    parts = plan_parts(shard, CRC32, PART_CHUNKS)

    assert expected == [part.num_chunks for part in parts]
    assert shard.size_bytes == sum(part.size_bytes for part in parts)


def test_a_lost_answer_to_the_completion_is_no_error(s3store, s3server, tmp_path):
    """
    Then the server does not know the upload any more, but has the file, whole. If it has not, it is tried again.
    """
    shard, kind = write(tmp_path / "shard", LARGE), Kind(CRC32, Checksums.WHOLE)
    forgotten = s3store._uploads.begin("job/shard", kind)
    s3server.client().abort_multipart_upload(Bucket=BUCKET, Key=f"{s3store._prefix}job/shard", UploadId=forgotten.id)
    parts = plan_parts(shard, CRC32, 1)

    def complete():
        with s3store._plain_words("job/shard"):
            s3store._complete(forgotten, shard, parts, ["tag"] * len(parts))

    with pytest.raises(OffsiteError, match="NoSuchUpload") as caught:
        complete()
    s3store.put_file("job/shard", tmp_path / "shard", shard, ignore)
    complete()

    assert not caught.value.final


def test_keys_that_no_file_could_have_are_handed_to_whoever_asks(s3store, s3server):
    """
    They come from somebody else; what stands for a folder, as web consoles make them, is no object.
    """
    told = []
    s3store.put("job/good", b"")
    s3server.client().put_object(Bucket=BUCKET, Key=f"{s3store._prefix}job/folder/", Body=b"")
    odd = ["a//b", "../up", "./here", "half/", "", "/"]  # this server makes others of these, AWS does not
    found = [{"Key": f"{s3store._prefix}job/{key}", "Size": key == "half/", "LastModified": None} for key in odd]
    s3store._client.meta.events.register(
        "after-call.s3.ListObjectsV2", lambda parsed, **_: parsed["Contents"].extend(found)
    )

    assert ["job/good"] == [entry.key for entry in s3store.list("job/", told.append)]
    assert ["job/a//b", "job/../up", "job/./here", "job/half/"] == told


@pytest.mark.parametrize("num_cuts", [1, 3])
def test_connections_that_break_are_made_again(s3_offload, s3server, tmp_path, num_cuts):
    """
    In the middle of a part on its way up, and in the middle of a read.
    """
    with CuttingProxy(int(s3server.endpoint.rpartition(":")[2]), cut_after_bytes=1 << 20) as proxy:
        offload = s3_offload.model_copy(update={"endpoint": f"http://127.0.0.1:{proxy.port}"})
        store, shard = S3Store(offload, s3server.env, part_chunks=1), write(tmp_path / "shard", LARGE)
        proxy.num_cuts = num_cuts
        store.put_file("job/shard", tmp_path / "shard", shard, ignore)
        after_put, proxy.num_cuts = proxy.num_cuts, num_cuts

        assert LARGE == store.read("job/shard", 0, len(LARGE))
        assert (0, 0) == (after_put, proxy.num_cuts)


def test_a_read_that_breaks_goes_on_after_what_came(s3_offload, s3server, tmp_path):
    """
    A line that breaks every few megabytes still brings a large range, and each byte about once.
    """
    with CuttingProxy(int(s3server.endpoint.rpartition(":")[2]), cut_after_bytes=5 << 20) as proxy:
        offload = s3_offload.model_copy(update={"endpoint": f"http://127.0.0.1:{proxy.port}"})
        store, asked = S3Store(offload, s3server.env), []
        store.put_file("job/shard", tmp_path / "shard", write(tmp_path / "shard", LARGE), ignore)
        store._client.meta.events.register(
            "before-parameter-build.s3.GetObject", lambda params, **_: asked.append(params["Range"])
        )
        proxy.num_cuts = 6  # more than a request is tried
        content = b"".join(map(bytes, store.stream("job/shard", 0, len(LARGE))))

        assert LARGE == content
        assert sorted(asked, key=lambda range_: int(range_[6:].partition("-")[0])) == asked
        assert 4 < len(
            set(asked)
        )  # one may come twice: a connection that has carried much breaks before the first block


def test_the_server_compares_the_checksums_itself(s3server):
    """
    Why `head` may be believed: a wrong checksum is refused by the server, for a part's bytes too.
    """
    with pytest.raises(ClientError, match="BadDigest"):
        s3server.client().put_object(Bucket=BUCKET, Key="wrong", Body=b"bytes", ChecksumCRC32="AAAAAA==")


def test_abort_forgets_unfinished_uploads(s3store, s3server):
    """
    They cost money and no list shows them; those that were begun later, and of another run, stay.
    """
    client = s3server.client()
    for name in ("job/old", "other/old"):
        client.create_multipart_upload(Bucket=BUCKET, Key=f"{s3store._prefix}{name}")

    def left():
        found = client.list_multipart_uploads(Bucket=BUCKET, Prefix=s3store._prefix)["Uploads"]
        return sorted(upload["Key"].removeprefix(s3store._prefix) for upload in found)

    s3store.abort("job/", datetime.now(UTC) - timedelta(days=1))
    early = left()
    s3store.abort("job/", FOREVER)

    assert ["job/old", "other/old"] == early
    assert ["other/old"] == left()


@pytest.mark.parametrize("kind", ["file", "s3"])
def test_no_more_than_so_many_bytes_a_second(request, kind, tmp_path):
    """
    Training's own traffic comes first: `max_bandwidth` holds for all threads together, on a network disk as well.
    """
    offload, env = OffloadPolicy(to=f"file://{tmp_path}/store"), {}
    if kind == "s3":
        offload, env = request.getfixturevalue("s3_offload"), request.getfixturevalue("s3server").env
    offload = offload.model_copy(update={"max_bandwidth": 10_000_000})
    store, shard = open_store(offload, env), write(tmp_path / "shard", LARGE)
    store.probe()
    started = time.monotonic()
    store.put_file("job/shard", tmp_path / "shard", shard, ignore)

    assert (
        time.monotonic() - started > 0.85 * len(LARGE) / 10_000_000
    )  # what was late before, a quarter of a second's, may follow


@pytest.mark.parametrize(
    ("change", "final", "says"),
    [
        pytest.param({"endpoint": "http://127.0.0.1:9"}, False, "check offload.endpoint", id="nobody listens"),
        pytest.param({"endpoint": "no address"}, True, "https://host", id="address that is none"),
        pytest.param({"to": "s3://no-such-bucket/x"}, True, "make the bucket", id="no such bucket"),
        pytest.param({"secret": "wrong"}, True, "AWS_SECRET_ACCESS_KEY", id="wrong secret"),
        pytest.param({"key": "nobody"}, True, "AWS_ACCESS_KEY_ID", id="unknown key"),
    ],
)
def test_a_store_that_cannot_be_used_says_what_to_do(s3_offload, s3server, change, final, says):
    """
    What passes by itself is not final; what needs a human is, with a hint.
    """
    offload = s3_offload.model_copy(update={k: v for k, v in change.items() if k in {"endpoint", "to"}})
    env = {
        "AWS_ACCESS_KEY_ID": change.get("key", s3server.env["AWS_ACCESS_KEY_ID"]),
        "AWS_SECRET_ACCESS_KEY": change.get("secret", s3server.env["AWS_SECRET_ACCESS_KEY"]),
    }

    with pytest.raises(OffsiteError) as caught:
        list(open_store(offload, env).list("job/"))

    assert (final, True) == (caught.value.final, says in caught.value.hint)


def test_an_endpoint_with_the_bucket_in_it_is_refused_by_the_first_look(s3_offload, s3server):
    """
    As consoles show it. A list finds no such key there, which is no store that is away; nothing is left of the try.
    """
    twice = s3_offload.model_copy(update={"endpoint": f"{s3server.endpoint}/{BUCKET}"})

    for ask in (lambda store: store.probe(), lambda store: list(store.list("job/"))):
        with pytest.raises(OffsiteError) as caught:
            ask(open_store(twice, s3server.env))
        assert (True, True) == (caught.value.final, "names the bucket already" in caught.value.hint)
    assert 0 == s3server.client().list_objects_v2(Bucket=BUCKET, Prefix=twice.to.removeprefix("s3://"))["KeyCount"]


def test_what_killed_looks_left_is_swept_by_the_next(s3_offload, s3server, tmp_path):
    """
    An object, an upload that no list shows, a guard in a folder; nothing else, and nothing young.
    """
    store, client = S3Store(s3_offload, s3server.env), s3server.client()
    prefix = f"{s3_offload.to.removeprefix(f's3://{BUCKET}/')}/"
    for key in (".probe-killed", "job"):
        client.put_object(Bucket=BUCKET, Key=prefix + key, Body=b"1")
        client.create_multipart_upload(Bucket=BUCKET, Key=prefix + key)
    time.sleep(1.1)  # a server's clock ticks in seconds
    store.put(".probe-mine", b"1")
    store.probe()
    young = sorted(entry.key for entry in store.list(""))
    store._look(".probe-mine")._sweep(timedelta(0))
    uploads = client.list_multipart_uploads(Bucket=BUCKET, Prefix=prefix)["Uploads"]
    folder = tmp_path / "store"
    folder.mkdir()
    killed, young_one = (own_path(folder / name, "guard") for name in (".probe-killed", ".probe-young"))
    for path, age_s in ((killed, 4000), (young_one, 0)):
        path.touch()
        os.utime(path, (time.time() - age_s,) * 2)
    open_store(OffloadPolicy(to=f"file://{folder}"), {}).probe()

    assert [".probe-killed", ".probe-mine", "job"] == young
    assert [".probe-mine", "job"] == sorted(entry.key for entry in store.list(""))
    assert [f"{prefix}job"] == [upload["Key"] for upload in uploads]
    assert [young_one] == [*folder.iterdir()]
