"""What a network and a store can do to a transfer: a real S3 server behind a proxy that breaks things."""

import os
import re
import sys
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from botocore.exceptions import ClientError

from runner import preflight
from runner.facts import Severity
from runner.job import Job, OffloadPolicy
from runner.preflight import Mission
from runner.storage.checkpoints import CheckpointDir
from runner.storage.checksums import describe_file
from runner.storage.disk import Disk
from runner.storage.offsite import (
    Abilities,
    Checksums,
    OffsiteError,
    comparing,
    restoring,
    surveying,
    tidying,
    uploading,
)
from runner.storage.offsite.cures import plain_words
from runner.storage.offsite.parts import NUM_THREADS, PART_CHUNKS, Window
from runner.storage.offsite.s3 import S3Store
from tests.faultproxy import FaultProxy
from tests.s3server import BUCKET, S3Server, speaking_tls
from tests.storage.examples import commit
from tests.storage.moving import contents, elsewhere, ignore, move
from vramfarm.protocol import CHUNK_BYTES

LARGE = b"".join(bytes([number]) * CHUNK_BYTES for number in range(1, 4)) + b"tail"
SHARDS = {"large": LARGE, "small": b"small" * 100}
ABLE = Abilities(checksums=Checksums.WHOLE, conditional=True)


@pytest.fixture
def proxy(request, s3server):
    """By http, where bodies leave unread at first, or by https, where they are read."""
    tls = None
    if getattr(request, "param", "http") == "https":
        tls = speaking_tls(request.getfixturevalue("certificate"))
    with FaultProxy(s3server.endpoint, tls=tls) as proxy:
        yield proxy


@pytest.fixture
def behind(request, proxy, s3_offload, s3server):
    """The store as it is seen through the proxy, with small parts."""
    offload, env = s3_offload.model_copy(update={"endpoint": proxy.endpoint}), s3server.env
    if proxy.endpoint.startswith("https"):
        env = {**env, "AWS_CA_BUNDLE": str(request.getfixturevalue("certificate") / "ca.pem")}
    return S3Store(offload, env, ABLE, part_chunks=1)


def there_and_back(store, directory, tmp_path):
    """Up, checked by the store's own word, and down to an empty disk."""
    ref = commit(directory, shards=SHARDS).ref
    uploading.upload(store, "job", directory, ref, ignore)
    comparing.verify(store, "job", ref)
    there = elsewhere(tmp_path)
    restoring.restore(store, "job", ref, there, ignore)
    return contents(directory, ref) == contents(there, ref)


@pytest.mark.parametrize(
    ("operation", "what"),
    [
        pytest.param("UploadPart", {"answer": (503, "SlowDown")}, id="a part is too much just now"),
        pytest.param("UploadPart", {"answer": (500, "InternalError")}, id="a part meets a fault of the server"),
        pytest.param("UploadPart", {"reset": True}, id="a part's connection is reset"),
        pytest.param("UploadPart", {"cut_up": 1_000_000}, id="a part's body is cut"),
        pytest.param("UploadPart", {"flip_up": 1_000_000}, id="a part's byte is flipped"),
        pytest.param("UploadPart", {"answer": (400, "XAmzContentChecksumMismatch")}, id="the same, in MinIO's words"),
        pytest.param("UploadPart", {"lost": True}, id="a part's acknowledgement is lost"),
        pytest.param("PutObject", {"answer": (503, "SlowDown")}, id="an object is too much just now"),
        pytest.param("PutObject", {"lost": True}, id="an object's acknowledgement is lost, the manifest's too"),
        pytest.param("CreateMultipartUpload", {"lost": True}, id="the beginning is lost"),
        pytest.param("CompleteMultipartUpload", {"lost": True}, id="the completion is lost"),
        pytest.param("CompleteMultipartUpload", {"answer": (500, "InternalError")}, id="the completion fails"),
        pytest.param("HeadObject", {"answer": (503, "SlowDown")}, id="a question is too much just now"),
        pytest.param("ListObjectsV2", {"reset": True}, id="a list's connection is reset"),
        pytest.param("ListObjectsV2", {"cut_down": 100}, id="a list is cut"),
        pytest.param("GetObject", {"answer": (500, "InternalError")}, id="a read meets a fault of the server"),
        pytest.param("GetObject", {"cut_down": 50}, id="a read is cut"),
        pytest.param("GetObject", {"end_early": 50}, id="a read ends early as if that were all"),
    ],
)
@pytest.mark.parametrize("proxy", ["http", "https"], indirect=True)
def test_what_passes_is_survived(behind, proxy, directory, tmp_path, operation, what):  # noqa: PLR0917
    """
    Twice each, within one call: the transfer goes on, and every byte is right.
    """
    fault = proxy.add(operation=operation, times=2, **what)

    assert there_and_back(behind, directory, tmp_path)
    assert [operation] * 2 == fault.taken


def test_a_flipped_byte_on_its_way_down_never_passes(behind, proxy, directory, tmp_path):
    """
    The client library hands it over without a word; our checksums do not.
    """
    ref = commit(directory, shards=SHARDS).ref
    uploading.upload(behind, "job", directory, ref, ignore)
    fault, there = proxy.add(operation="GetObject", flip=7, times=5), elsewhere(tmp_path)
    with suppress(OffsiteError):  # five in a row may be more than is put up with: then it says so
        restoring.restore(behind, "job", ref, there, ignore)
    proxy.heal()
    restoring.restore(behind, "job", ref, there, ignore)

    assert contents(directory, ref) == contents(there, ref)
    assert fault.taken


@pytest.mark.parametrize("broken", [max(SHARDS), ".*"], ids=["one object", "all of them"])
def test_a_server_that_fails_at_one_object_is_told_from_one_that_is_down(behind, proxy, directory, tmp_path, broken):
    """
    It fails at a file that its own disk has lost, for ever, and reads what is beside it: an older checkpoint may be
    whole. Where it reads nothing else either, all is waited for.
    """
    ref = commit(directory, shards=SHARDS).ref
    uploading.upload(behind, "job", directory, ref, ignore)
    source = restoring.StoreSource(behind, "job", ref)
    proxy.add(operation="GetObject", path=f".*{broken}", answer=(500, "InternalError"))

    with pytest.raises(OffsiteError) as caught:
        restoring.bring(source.manifest, source, elsewhere(tmp_path), ignore)

    assert (broken != ".*", False, False) == (caught.value.of_object, caught.value.final, caught.value.damaged)
    assert "full" not in caught.value.hint


@pytest.mark.parametrize("first", [".*", "UploadPart|GetObject|PutObject"], ids=["with a HEAD", "with a write"])
@pytest.mark.parametrize(
    ("answer", "cure", "curable"),
    [
        pytest.param((403, "AccessDenied"), "check its rights", True, id="forbidden"),
        pytest.param((404, "NoSuchBucket"), "make the bucket", False, id="no bucket"),
        pytest.param((400, "AuthorizationHeaderMalformed"), "set offload.region", False, id="another region"),
        pytest.param((301, "PermanentRedirect"), "set offload.region", False, id="another region, nobody says which"),
        pytest.param((403, "RequestTimeTooSkewed"), "set it (timedatectl", True, id="clock"),
        pytest.param((400, "ExpiredToken"), "get new ones", True, id="expired"),
        pytest.param((403, "InvalidAccessKeyId"), "AWS_ACCESS_KEY_ID", True, id="unknown key"),
        pytest.param((403, "QuotaExceeded"), "the store is full", True, id="full"),
        pytest.param((507, "XMinioStorageFull"), "the store is full", True, id="full, another server's words"),
    ],
)
def test_what_does_not_pass_is_said_once_with_its_cure(behind, proxy, directory, answer, cure, curable, first):  # noqa: PLR0917
    """
    No trying again: a human must do something, and is told what, even where the answer to a HEAD has no words.
    Where it is no part of job.yaml that is wrong, the end of a run waits for that.
    """
    ref = commit(directory, shards=SHARDS).ref
    fault = proxy.add(operation=first, answer=answer)

    with pytest.raises(OffsiteError) as caught:
        uploading.upload(behind, "job", directory, ref, ignore)

    assert (True, True) == (caught.value.final, cure in caught.value.hint), caught.value
    assert curable is caught.value.curable
    assert "\n" not in str(caught.value)
    assert len(fault.taken) < 12  # the shards that were under way, a HEAD and a read each


def test_a_manifest_that_is_refused_is_no_damaged_one(behind, proxy, directory):
    """
    Archived by a lifecycle rule: with its cure, and as an error, not as a store without checkpoints.
    """
    uploading.upload(behind, "job", directory, commit(directory).ref, ignore)
    proxy.add(operation="GetObject", answer=(403, "InvalidObjectState"))
    proxy.add(operation="GetObject", answer=(404, "NoSuchKey"), times=1)  # there is no outcome
    proxy.faults.reverse()

    with pytest.raises(OffsiteError, match="403 InvalidObjectState") as caught:
        surveying.survey(behind, "job")

    assert "lifecycle rule" in caught.value.hint


@pytest.mark.parametrize("operation", ["GetObject", "ListObjectsV2"])
@pytest.mark.parametrize(("needs_data", "then"), [(True, [Severity.REFUSE]), (False, [])], ids=["needed", "here"])
def test_data_that_the_key_may_not_read_is_said_by_preflight(  # noqa: PLR0917
    behind, proxy, s3server, tmp_path, operation, needs_data, then
):
    """
    A key that may list is not one that may read; whoever has the data needs no key for it.
    """
    behind.put("corpus/empty", b"")
    behind.put("corpus/text", b"abc")
    source = f"{behind.address}/corpus"
    fields = {"command": "t.py", "data": [{"from": source, "to": str(tmp_path)}]}
    job = Job.model_validate(fields | {"offload": {"to": "s3://elsewhere/runs", "endpoint": proxy.endpoint}})
    where = {"run_dir": tmp_path, "workdir": tmp_path, "python": sys.executable, "num_procs": 1, "num_cards": 0}
    mission = Mission(job=job, env=s3server.env, needs_data=needs_data, **where)
    well = preflight._caught("data", lambda: preflight._data(mission))
    proxy.add(operation=operation, answer=(403, "AccessDenied"))

    ill = preflight._caught("data", lambda: preflight._data(mission))

    assert [Severity.OK] * needs_data == [one.severity for one in well], well
    assert then == [one.severity for one in ill], ill
    assert all("403 AccessDenied" in one.message and one.message.startswith(source) for one in ill), ill


def test_a_store_that_goes_away_and_comes_back(tmp_path, directory):
    """
    Killed in the middle of an upload: an error that says to try again. Back: what had arrived is not sent again.
    """
    server = S3Server(tmp_path / "s3")
    server.start()
    try:
        with FaultProxy(server.endpoint) as proxy:
            offload = OffloadPolicy(to=f"s3://{BUCKET}/x", endpoint=proxy.endpoint, max_bandwidth="12MB")
            store, ref = S3Store(offload, server.env, ABLE, part_chunks=1), commit(directory, shards=SHARDS).ref
            proxy.add(operation="UploadPart", times=1, lost=True)  # one part has arrived for certain
            killer = threading.Timer(1.2, server.stop)
            killer.start()
            with pytest.raises(OffsiteError) as caught:
                uploading.upload(store, "job", directory, ref, ignore)
            killer.join()
            server.start()
            uploading.upload(S3Store(offload, server.env, ABLE, part_chunks=1), "job", directory, ref, ignore)

            assert not caught.value.final, caught.value
            assert [ref] == [checkpoint.ref for checkpoint in surveying.survey(store, "job").checkpoints]
    finally:
        server.stop()


def test_after_a_kill_only_what_is_missing_is_sent(proxy, s3_offload, s3server, directory):
    """
    kill -9 in the middle of an upload, in a process of its own; the line carries each part about once.
    """
    shards = {"large": os.urandom(8 * CHUNK_BYTES)}
    ref = commit(directory, shards=shards).ref
    offload = s3_offload.model_copy(update={"endpoint": proxy.endpoint, "max_bandwidth": 30_000_000})
    move("upload", (offload, s3server.env), directory.root, ref, kill_after_s=1.0)
    before = proxy.num_bytes_up

    assert 0 == move("upload", (offload, s3server.env), directory.root, ref)
    assert before > 2 * CHUNK_BYTES  # else nothing was killed
    assert proxy.num_bytes_up - before < len(shards["large"]) - CHUNK_BYTES


@pytest.mark.parametrize(
    ("operation", "right"),
    [
        ("ListMultipartUploads", "s3:ListBucketMultipartUploads"),
        ("ListParts", "s3:ListMultipartUploadParts"),
        ("AbortMultipartUpload", "s3:AbortMultipartUpload"),
    ],
)
def test_a_right_that_only_spares_work_is_done_without_and_named(behind, proxy, s3server, directory, operation, right):  # noqa: PLR0917
    """
    Who may write may store: what a killed upload left cannot be found, so all of it goes once more. The look that
    finds the right missing leaves nothing.
    """
    ref = commit(directory, shards=SHARDS).ref
    key = surveying.key_of("job", ref, directory.manifest(ref).shards[0])
    s3server.client().create_multipart_upload(Bucket=BUCKET, Key=f"{behind._prefix}{key}")
    proxy.add(operation=operation, answer=(403, "AccessDenied"))

    assert (right,) == behind.find_missing_rights("job/preflight")
    assert [] == list(behind.list("job/preflight"))
    uploading.upload(behind, "job", directory, ref, ignore)
    tidying.sweep(behind, "job")
    assert [ref] == [checkpoint.ref for checkpoint in surveying.survey(behind, "job").checkpoints]


def test_on_a_slow_line_one_part_after_another_is_whole(behind, proxy, tmp_path):
    """
    A kill costs what is half there, and progress counts what is whole: few parts share the line, and more once it is
    quick.
    """
    at_first = []

    def sent(_):
        at_first.append(proxy.operations.count("UploadPart"))
        proxy.limit_up(1e9)

    proxy.limit_up(4_000_000)
    (tmp_path / "shard").write_bytes(os.urandom(8 * CHUNK_BYTES))
    shard = describe_file(tmp_path / "shard", "shard")
    behind.put_file("job/shard", tmp_path / "shard", shard, sent)

    assert 2 <= at_first[0] <= 5, at_first  # both of the first, two after them and one more


def test_on_a_quick_line_all_threads_send():
    """
    Each part that is soon there lets one more go beside the others.
    """
    window = Window()
    for _ in range(NUM_THREADS):
        with window.one():
            pass
    with ExitStack() as together:
        for _ in range(NUM_THREADS):
            together.enter_context(window.one())
        assert not window._slots.acquire(blocking=False)


@pytest.mark.parametrize(
    ("times_s", "num_more"),
    [
        pytest.param([5.6, 5.6, 8.4, 8.4], 1, id="the line is slow: one more made each of them slower"),
        pytest.param([3.2] * 6, 5, id="the way is long: more beside them cost nothing"),
        pytest.param([0.1] * 100, NUM_THREADS - 2, id="quick"),
    ],
)
def test_as_many_parts_are_on_their_way_as_help(times_s, num_more):
    """
    Told by how long each took.
    """
    window = Window()
    for took_s in times_s:
        window._note(took_s)

    assert NUM_THREADS - 2 - num_more == window._left


@pytest.mark.parametrize(
    ("num_bytes", "took_s", "left"),
    [
        pytest.param(PART_CHUNKS * CHUNK_BYTES, 0.1, 0, id="whole, and at once: all send"),
        pytest.param(PART_CHUNKS * CHUNK_BYTES, 0.5, NUM_THREADS - 2, id="not at once: its answer will tell"),
        pytest.param(8 * CHUNK_BYTES, 0.5, 0, id="a larger one may take longer"),
        pytest.param(CHUNK_BYTES, 0.01, NUM_THREADS - 2, id="so little may lie in the socket's memory"),
    ],
)
def test_a_quick_line_is_known_before_the_server_has_answered(num_bytes, took_s, left):
    """
    A busy server takes its time for each part: until the first is there, most threads would have nothing to do.
    """
    window = Window()

    window.note_left(num_bytes, took_s)

    assert left == window._left


def test_a_slow_line_is_not_taken_for_a_dead_one(proxy, s3_offload, s3server, tmp_path):
    """
    A large part takes longer than the client waits for a connection.
    """
    offload = s3_offload.model_copy(update={"endpoint": proxy.endpoint})
    proxy.limit_up(3_000_000)
    directory = CheckpointDir(tmp_path, Disk())
    ref = commit(directory, shards={"large": os.urandom(2 * CHUNK_BYTES + 1)}).ref
    uploading.upload(S3Store(offload, s3server.env, ABLE, timeouts_s=(2, 60)), "job", directory, ref, ignore)

    assert proxy.num_bytes_up < 2.2 * CHUNK_BYTES


def test_silence_is_noticed(proxy, s3_offload, s3server):
    """
    A server that takes a request and never answers costs a time limit, not the run.
    """
    offload = s3_offload.model_copy(update={"endpoint": proxy.endpoint})
    store = S3Store(offload, s3server.env, ABLE, timeouts_s=(15, 1))
    proxy.add(operation="ListObjectsV2", hang_s=60)
    started = time.monotonic()

    with pytest.raises(OffsiteError, match="no answer") as caught:
        list(store.list("job/"))

    assert not caught.value.final
    assert time.monotonic() - started < 40


@pytest.mark.parametrize(
    ("operation", "answer", "cure"),
    [
        ("GetObject", (403, "AccessDenied"), "the key may not do this: check its rights"),
        ("PutObject", (405, "MethodNotAllowed"), "is offload.endpoint one of S3"),
        ("PutObject", (400, "InvalidRequest"), "its own log says"),
    ],
)
def test_preflight_tries_what_a_run_needs_and_names_the_cure(  # noqa: PLR0917
    operation, answer, cure, proxy, s3_offload, s3server, tmp_path
):
    """
    A run reads its lease two seconds after its start: a key that may only write is no "go". Nothing stays behind.
    """
    fault = proxy.add(operation=operation, answer=answer)
    to = f"{s3_offload.to}/tried"
    offload = s3_offload.model_copy(update={"endpoint": proxy.endpoint, "to": to})
    job = Job.model_validate({"command": "train.py", "offload": offload.model_dump()})
    mission = Mission(
        job=job, python=sys.executable, num_procs=1, num_cards=0, run_dir=tmp_path, workdir=tmp_path, env=s3server.env
    )

    (told,) = preflight._caught("store", lambda: preflight._store(mission))

    assert Severity.REFUSE is told.severity, told
    assert cure in told.hint, told
    assert fault.taken
    assert [] == list(S3Store(offload.model_copy(update={"endpoint": s3server.endpoint}), s3server.env).list(""))


def test_the_page_says_which_answers_are_final():
    """
    Each answer that the table of docs/store.md names, by what the code makes of it.
    """
    page = (Path(__file__).parents[2] / "docs" / "store.md").read_text()
    rows = re.findall(r"^\| (passes|curable|final|one object) \| (.*?) \|", page, re.MULTILINE)
    told = {answer: kind for kind, answers in rows for answer in re.findall(r"`(\d+ \w+)`", answers)}

    assert len(told) > 30
    assert told == {answer: _kind_of(*answer.split()) for answer in told}


def _kind_of(status, code):
    answer = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": int(status)}}
    with pytest.raises(OffsiteError) as caught, plain_words("s3://b/key"):
        raise ClientError(answer, "GetObject")
    error = caught.value
    return "passes" if not error.final else "curable" if error.curable else "one object" if error.of_object else "final"


@pytest.mark.parametrize("code", ["SlowDown", "ServiceUnavailable", "503"])
def test_a_busy_store_has_a_cure_and_is_asked_again(code):
    """
    A cure does not make an error one that nobody asks again after.
    """
    answer = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": 503}}

    with pytest.raises(OffsiteError) as caught, plain_words("s3://b/key"):
        raise ClientError(answer, "PutObject")

    assert not caught.value.final
    assert "it is asked again" in caught.value.hint
