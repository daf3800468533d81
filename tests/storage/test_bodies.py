"""How the bytes of a file get into a socket: by the kernel, unread, or block by block; and what is said where they do not."""

import errno
import os
import socket
import ssl
import threading
from functools import partial

import pytest

from runner.storage.checksums import describe_file
from runner.storage.offsite import Abilities, Checksums, OffsiteError
from runner.storage.offsite.bodies import open_part
from runner.storage.offsite.s3 import S3Store
from runner.storage.offsite.wire import _Connection, _SecureConnection
from tests.faultproxy import FaultProxy
from tests.s3server import speaking_tls
from vramfarm.protocol import CHUNK_BYTES

LARGE = b"".join(bytes([number]) * CHUNK_BYTES for number in range(1, 3)) + b"tail"
ABLE = Abilities(checksums=Checksums.WHOLE, conditional=True)


def ignore(_):
    """Where nobody asks for progress."""


@pytest.fixture
def file(tmp_path):
    """And its shard."""
    path = tmp_path / "shard"
    path.write_bytes(LARGE)
    return path, describe_file(path, "shard")


@pytest.fixture
def passed(monkeypatch):
    """How many bytes each call of `sendfile` has taken."""
    numbers, real = [], os.sendfile

    def spy(*args):
        numbers.append(real(*args))
        return numbers[-1]

    monkeypatch.setattr(os, "sendfile", spy)
    return numbers


@pytest.fixture
def pair():
    """Two ends of a connection; little fits into it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        near = socket.create_connection(listener.getsockname(), timeout=5)
        far, _ = listener.accept()
    near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
    with near, far:
        yield near, far


def receive(far, into):
    while block := far.recv(1 << 20):
        into += block


WAYS = ["http", "https", "paced"]


@pytest.fixture
def proxy(request, s3server):
    tls = speaking_tls(request.getfixturevalue("certificate")) if request.param == "https" else None
    with FaultProxy(s3server.endpoint, tls=tls) as proxy:
        yield proxy


@pytest.fixture
def store(request, proxy, s3_offload, s3server):
    way = request.node.callspec.params["proxy"]
    limit = {"max_bandwidth": 10**9} if way == "paced" else {}
    ca = {"AWS_CA_BUNDLE": str(request.getfixturevalue("certificate") / "ca.pem")} if way == "https" else {}
    offload = s3_offload.model_copy(update={"endpoint": proxy.endpoint, **limit})
    return S3Store(offload, {**s3server.env, **ca}, ABLE, part_chunks=1)


# ------------------------------------------------------------------------------------- which way


@pytest.mark.parametrize(
    ("proxy", "able", "unread"),
    [
        pytest.param("http", ABLE, len(LARGE), id="http"),
        pytest.param("https", ABLE, 0, id="https: it is encrypted here"),
        pytest.param("paced", ABLE, 0, id="paced: not more than a block at once"),
        pytest.param("http", Abilities(checksums=Checksums.NONE, conditional=True), 0, id="nobody there compares it"),
    ],
    indirect=["proxy"],
)
def test_a_file_leaves_unread_where_the_store_compares_it(store, file, passed, able, unread):
    """
    Else each byte is summed as it leaves.
    """
    path, shard = file
    store._abilities = able
    store.put_file("job/shard", path, shard, ignore)

    assert unread == sum(passed)
    assert LARGE == store.read("job/shard", 0, len(LARGE))


@pytest.mark.parametrize("proxy", ["http"], indirect=True)
@pytest.mark.parametrize(
    "fault",
    [{"flip_up": 5}, {"reset": True}, {"answer": (503, "SlowDown")}],
    ids=["flipped", "reset", "busy"],
)
def test_a_part_that_is_sent_again_is_read(store, proxy, file, passed, fault):
    """
    So that it is known whether it is the file that is wrong.
    """
    path, shard = file
    proxy.add(operation="UploadPart", times=1, **fault)
    reads, real = [], os.preadv
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", lambda *args: reads.append(real(*args)) or reads[-1])
        store.put_file("job/shard", path, shard, ignore)

    assert sum(reads) in {CHUNK_BYTES, len(b"tail")}
    assert sum(passed) >= len(LARGE) - CHUNK_BYTES
    assert LARGE == store.read("job/shard", 0, len(LARGE))


@pytest.mark.parametrize("proxy", WAYS, indirect=True)
@pytest.mark.parametrize(
    "content", [LARGE[:-1] + b"?", LARGE[:-5], b"", LARGE[:7]], ids=["other", "cut", "empty", "short"]
)
def test_a_file_that_is_another_by_now_is_named_and_not_stored(store, file, content):
    """
    Whoever finds it, the store or we: its bytes are not those of its manifest.
    """
    path, shard = file
    path.write_bytes(content)

    with pytest.raises(OffsiteError, match=f"{path}: expected the bytes of its manifest") as caught:
        store.put_file("job/shard", path, shard, ignore)

    assert (True, True, None) == (caught.value.final, caught.value.damaged, store.head("job/shard"))


@pytest.mark.parametrize("proxy", ["http"], indirect=True)
def test_connections_are_used_again(store, file, monkeypatch):
    """
    After a body that went by the kernel, too.
    """
    path, made, real = file[0].with_name("small"), [], _Connection.connect
    monkeypatch.setattr(_Connection, "connect", lambda self: made.append(1) or real(self))
    path.write_bytes(b"small")
    for number in range(5):
        store.put_file(f"job/{number}", path, describe_file(path, "small"), ignore)

    assert [1] == made


@pytest.mark.parametrize("proxy", ["https"], indirect=True)
def test_who_is_to_be_trusted_is_read_once(store, file, monkeypatch):
    """
    A file of 150 authorities takes as long as sending a part: not for each connection.
    """
    made, read = [], []
    connect, load = _SecureConnection.connect, ssl.SSLContext.load_verify_locations
    monkeypatch.setattr(_SecureConnection, "connect", lambda self: made.append(1) or connect(self))
    monkeypatch.setattr(ssl.SSLContext, "load_verify_locations", lambda *args: read.append(1) or load(*args))
    store.put_file("job/shard", *file, ignore)

    assert len(made) > 1
    assert [1] == read


@pytest.mark.parametrize("proxy", ["http"], indirect=True)
@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP], ids=errno.errorcode.get)
def test_a_file_system_that_cannot_is_read_from(store, proxy, file, monkeypatch, number):
    """
    In the same attempt: nothing has left.
    """
    path, shard = file

    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "sendfile", refuse)
    store.put_file("job/shard", path, shard, ignore)

    assert 3 == proxy.operations.count("UploadPart")
    assert LARGE == store.read("job/shard", 0, len(LARGE))


@pytest.fixture
def bad_disk(monkeypatch):
    """How often it still fails."""
    left = [0]

    def failing(real, *args):
        left[0] -= 1
        if left[0] >= 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(*args)

    for name in ("sendfile", "preadv"):
        monkeypatch.setattr(os, name, partial(failing, getattr(os, name)))
    return left


@pytest.mark.parametrize("proxy", WAYS, indirect=True)
def test_a_disk_that_fails_is_told_in_its_own_words(store, file, bad_disk):
    """
    The file's name, not the connection's end. Trying again may help.
    """
    path, shard = file
    bad_disk[0] = 1000
    with pytest.raises(OffsiteError, match=f"{path}: Input/output error") as caught:
        store.put_file("job/shard", path, shard, ignore)

    assert (False, False) == (caught.value.final, caught.value.damaged)


@pytest.mark.parametrize("proxy", WAYS, indirect=True)
def test_a_disk_that_fails_once_is_tried_again(store, file, bad_disk):
    """
    At the same part, within one call.
    """
    path, shard = file
    bad_disk[0] = 1
    store.put_file("job/shard", path, shard, ignore)

    assert LARGE == store.read("job/shard", 0, len(LARGE))


# ------------------------------------------------------------------------------------- the socket


def test_however_little_the_kernel_takes_at_once_all_of_it_arrives(file, pair, monkeypatch):
    """
    And whoever waits for that hears of it once.
    """
    near, far = pair
    real, told, came = os.sendfile, [], bytearray()
    monkeypatch.setattr(os, "sendfile", lambda out, fd, offset, count: real(out, fd, offset, min(count, 999_999)))
    reader = threading.Thread(target=receive, args=(far, came))
    reader.start()
    with open_part(*file, 1, 2, told.append, is_compared=True) as part:
        assert part.pass_to(near)
        near.close()
        reader.join()

    assert ([CHUNK_BYTES + 4], LARGE[CHUNK_BYTES:]) == (told, bytes(came))


def test_a_peer_that_takes_nothing_is_not_waited_for_without_end(file, pair):
    """
    And the answer of one that does is waited for as long as before.
    """
    near, _ = pair
    near.settimeout(0.05)
    told = []
    with open_part(*file, 0, 3, told.append, is_compared=True) as part, pytest.raises(TimeoutError):
        part.pass_to(near)

    assert ([], 0.05) == (told, near.gettimeout())


def test_a_file_that_is_cut_in_the_middle_is_an_error(file, pair):
    """
    By which the connection is closed, and the part is sent again.
    """
    (near, far), told = pair, []
    os.truncate(file[0], CHUNK_BYTES + 100_000)
    reader = threading.Thread(target=receive, args=(far, bytearray()))
    reader.start()
    with open_part(*file, 0, 3, told.append, is_compared=True) as part, pytest.raises(OSError, match="too short"):
        part.pass_to(near)
    near.close()
    reader.join()

    assert [] == told


def test_a_peer_that_is_gone_is_an_error(file, pair):
    """
    The same; what it may have said before it went is heard by whoever called.
    """
    (near, far), told = pair, []
    far.close()
    with open_part(*file, 0, 3, told.append, is_compared=True) as part, pytest.raises(ConnectionError):
        part.pass_to(near)

    assert [] == told
