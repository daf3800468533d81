"""Servers that can do less than AWS, or want to be spoken to in another way; and what a transfer costs the machine."""

import base64
import json
import socket
import struct
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from zlib import crc32

import pytest

from runner.job import OffloadPolicy
from runner.storage.checkpoints import CheckpointDir
from runner.storage.checksums import describe_file, is_sum_of_parts
from runner.storage.disk import Disk, own_path
from runner.storage.offsite import (
    Abilities,
    Checksums,
    OffsiteError,
    comparing,
    open_store,
    restoring,
    surveying,
    tidying,
    uploading,
)
from runner.storage.offsite.file import FileStore
from runner.storage.offsite.s3 import S3Store
from tests.faultproxy import FaultProxy
from tests.s3server import BUCKET, DOMAIN, speaking_tls
from tests.storage.examples import commit, fill, without_crc64nvme
from tests.storage.late import LateStore
from tests.storage.moving import contents, elsewhere, ignore, peak_bytes
from vramfarm.checksum import find_crc64nvme
from vramfarm.protocol import CHUNK_BYTES

LARGE = b"".join(bytes([number]) * CHUNK_BYTES for number in range(1, 4)) + b"tail"
CRC64NVME = "x-amz-checksum-crc64nvme"
CHECKSUM_HEADERS = (
    *(CRC64NVME, "x-amz-checksum-crc32"),
    *("x-amz-checksum-algorithm", "x-amz-checksum-mode", "x-amz-checksum-type"),
)
ALL = Abilities(checksums=Checksums.WHOLE, conditional=True, crc64nvme=True)


@pytest.fixture
def proxy(s3server):
    with FaultProxy(s3server.endpoint) as proxy:
        yield proxy


@pytest.mark.parametrize(
    ("refused", "hidden", "expected"),
    [
        pytest.param((), (), ALL, id="all that AWS does"),
        pytest.param((CRC64NVME,), (), replace(ALL, crc64nvme=False), id="refuses CRC64NVME"),
        pytest.param((), (CRC64NVME,), replace(ALL, crc64nvme=False), id="forgets CRC64NVME"),
        pytest.param(
            ("x-amz-checksum-type",),
            (),
            Abilities(checksums=Checksums.PARTS, conditional=True),
            id="sums of parts",
        ),
        pytest.param(
            CHECKSUM_HEADERS, (), Abilities(checksums=Checksums.NONE, conditional=True), id="refuses checksums"
        ),
        pytest.param(
            (), CHECKSUM_HEADERS[:2], Abilities(checksums=Checksums.NONE, conditional=True), id="forgets checksums"
        ),
        pytest.param((), CHECKSUM_HEADERS[1:2], replace(ALL, checksums=Checksums.NONE), id="forgets CRC32"),
        pytest.param(
            (("x-amz-checksum-type", "x-amz-checksum-algorithm: CRC32"),),
            (),
            replace(ALL, checksums=Checksums.PARTS),
            id="CRC32 of parts only, as R2",
        ),
        pytest.param(("if-none-match",), (), replace(ALL, conditional=False), id="no conditions"),
        pytest.param(("if-match",), (), replace(ALL, conditional=False), id="half of the conditions"),
    ],
)
def test_a_lesser_server_is_found_out_and_made_do_with(  # noqa: PLR0917
    proxy, s3_offload, s3server, directory, tmp_path, refused, hidden, expected
):
    """
    What it can do is tried out once, and every byte is compared all the same: by its word, or by reading back.
    """
    proxy.without_headers = hidden
    proxy.answers = {(one,) if isinstance(one, str) else one: (501, "NotImplemented") for one in refused}
    offload = s3_offload.model_copy(update={"endpoint": proxy.endpoint})
    store = S3Store(offload, s3server.env, part_chunks=1)
    found = store.probe()
    ref = commit(directory, shards={"large": LARGE, "small": b"small", "empty": b""}).ref
    uploading.upload(store, "job", directory, ref, ignore)
    comparing.verify(store, "job", ref)
    there = elsewhere(tmp_path)
    restoring.restore(store, "job", ref, there, ignore)
    store.put(f"job/checkpoints/{ref.name}/small", b"smell")
    with pytest.raises(OffsiteError, match="small"):
        comparing.verify(store, "job", ref)

    assert expected == found
    assert contents(directory, ref) == contents(there, ref)
    assert [] == [entry.key for entry in store.list(".probe")]  # it leaves nothing behind


def test_a_server_that_ignores_a_checksum_it_does_not_know_is_found_out(proxy, s3_offload, s3server, directory):
    """
    It says yes to any CRC64NVME and keeps none: a wrong one tells.
    """
    proxy.ignored_headers = (CRC64NVME,)
    store = S3Store(s3_offload.model_copy(update={"endpoint": proxy.endpoint}), s3server.env)
    ref = commit(directory, shards={"large": LARGE, "small": b"small"}).ref
    uploading.upload(store, "job", directory, ref, ignore)
    comparing.verify(store, "job", ref)

    assert replace(ALL, crc64nvme=False) == store.probe()


def test_what_crc64nvme_is_refused_for_crc32_tells(proxy, s3_offload, s3server):
    """
    Whatever the code of a refusal: a server that does not know it goes on by CRC32, one whose key is wrong is an error.
    """
    offload = s3_offload.model_copy(update={"endpoint": proxy.endpoint})
    proxy.answers = {(CRC64NVME,): (400, "InvalidDigest")}
    able = S3Store(offload, s3server.env).probe()
    proxy.answers = {(header,): (403, "AccessDenied") for header in CHECKSUM_HEADERS[:2]}
    with pytest.raises(OffsiteError, match="AccessDenied"):
        S3Store(offload, s3server.env).probe()

    assert replace(ALL, crc64nvme=False) == able


def kept(store, ref, name):
    """Which checksums the server tells of an object."""
    head = store.head(f"job/checkpoints/{ref.name}/{name}")
    return {field for field in ("crc32", "crc64nvme") if getattr(head, field) is not None}


def test_a_checkpoint_is_confirmed_by_what_its_manifest_and_its_objects_have(proxy, s3_offload, s3server, directory):
    """
    CRC64NVME where both have it; else CRC32: of a manifest that was written without, of objects that went up before.
    The server's word is enough each time, from any machine, and a copy inside the store is one by either.
    """
    store = S3Store(s3_offload.model_copy(update={"endpoint": proxy.endpoint}), s3server.env)
    older = S3Store(s3_offload, s3server.env, replace(ALL, crc64nvme=False))
    shards = {"large": LARGE, "small": b"small"}
    plain = without_crc64nvme(fill(directory.root / ".tmp-1", 100, shards=shards))
    directory.adopt(directory.root / ".tmp-1", plain)
    before, ours = (
        commit(directory, step, shards={**shards, "own": b"%d" % step * CHUNK_BYTES}) for step in (200, 300)
    )
    for one, manifest in ((store, plain), (older, before), (store, ours)):
        uploading.upload(one, "job", directory, manifest.ref, ignore)
    begun = len(proxy.operations)
    for manifest in (plain, before, ours):
        comparing.verify(store, "job", manifest.ref)

    assert {"crc32"} == kept(store, plain.ref, "large") == kept(store, before.ref, "large")
    assert {"crc32"} == kept(store, before.ref, "own")
    assert {"crc64nvme"} == kept(store, ours.ref, "own") == kept(store, ours.ref, "small")
    assert 3 == proxy.operations[begun:].count("GetObject")  # the manifests


def test_an_upload_that_can_be_neither_gone_on_with_nor_given_up_is_in_nobodys_way(
    proxy, s3_offload, s3server, directory
):
    """
    By another checksum, as an older runner began it, and with a key that may not abort: a new one is begun, and gone on with.
    """
    store = S3Store(s3_offload.model_copy(update={"endpoint": proxy.endpoint}), s3server.env, part_chunks=1)
    ref, client = commit(directory, shards={"large": LARGE}).ref, s3server.client()
    client.create_multipart_upload(
        Bucket=BUCKET, Key=f"{store._prefix}job/checkpoints/{ref.name}/large", ChecksumAlgorithm="CRC32"
    )
    store.probe()
    time.sleep(1.1)  # which of two uploads is the newer is told in seconds
    proxy.add(operation="AbortMultipartUpload", answer=(403, "AccessDenied"))
    proxy.add(operation="CompleteMultipartUpload", answer=(403, "AccessDenied"), times=1)
    with pytest.raises(OffsiteError, match="AccessDenied"):
        uploading.upload(store, "job", directory, ref, ignore)
    before = proxy.num_bytes_up
    uploading.upload(store, "job", directory, ref, ignore)
    comparing.verify(store, "job", ref)

    assert {"crc64nvme"} == kept(store, ref, "large")
    assert proxy.num_bytes_up - before < CHUNK_BYTES


def test_large_copies_inside_the_store_are_confirmed_too(s3_offload, s3server, directory):
    """
    The server sums what it puts together; an object by CRC32 becomes one by CRC64NVME.
    """
    older = S3Store(s3_offload, s3server.env, replace(ALL, crc64nvme=False))
    uploading.upload(older, "job", directory, commit(directory, 100, shards={"large": LARGE}).ref, ignore)
    store = S3Store(s3_offload, s3server.env, copy_chunks=2)
    second = commit(directory, 200, shards={"large": LARGE}).ref
    copied = uploading.upload(store, "job", directory, second, ignore)

    assert (len(LARGE), {"crc64nvme"}) == (copied, kept(store, second, "large"))
    comparing.verify(store, "job", second)


def test_a_crc64nvme_that_is_not_of_the_bytes_is_refused_by_the_server(proxy, s3_offload, s3server, directory):
    """
    Frozen weights have their list for good: what the server refuses each time goes by CRC32. Other bytes are told by both sums.
    """
    store = S3Store(s3_offload.model_copy(update={"endpoint": proxy.endpoint}), s3server.env)
    manifest = fill(directory.root / ".tmp-1", 100, shards={"large": LARGE, "small": b"small"})
    wrong = tuple(replace(shard, crc64nvme=(1,) * len(shard.checksums)) for shard in manifest.shards)
    directory.adopt(directory.root / ".tmp-1", replace(manifest, shards=wrong))
    store.probe()
    begun = len(proxy.operations)
    uploading.upload(store, "job", directory, manifest.ref, ignore)
    num_puts = proxy.operations[begun:].count("PutObject")
    comparing.verify(store, "job", manifest.ref)
    right = commit(directory, 200, shards={"large": LARGE}).ref
    uploading.upload(store, "job", directory, right, ignore)
    key = f"{store._prefix}job/checkpoints/{right.name}/large"
    sum_64 = base64.b64encode(find_crc64nvme()(LARGE[::-1], 0).to_bytes(8, "big")).decode()
    s3server.client().put_object(Bucket=BUCKET, Key=key, Body=LARGE[::-1], ChecksumCRC64NVME=sum_64)

    assert {"crc32"} == kept(store, manifest.ref, "large") == kept(store, manifest.ref, "small")
    assert 4 + 1 + 1 == num_puts  # the small one, refused and taken, and the manifest
    with pytest.raises(OffsiteError, match=r"expected \d+ bytes with crc64nvme \w{16}, got \d+ bytes with crc64nvme"):
        comparing.verify(store, "job", right)


def test_a_server_that_repeats_the_checksums_it_is_told_is_not_believed(proxy, s3_offload, s3server, directory):
    """
    It takes any checksum and tells it again: what arrived is read back, also by whoever looks from another machine.
    """
    offload = s3_offload.model_copy(update={"endpoint": proxy.endpoint})
    proxy.repeats_checksums = True
    store = S3Store(offload, s3server.env)
    ref, begun = commit(directory, shards={"small": b"small" * 1000}).ref, len(proxy.operations)
    uploading.upload(store, "job", directory, ref, ignore)
    read_back, looked = proxy.operations[begun:].count("GetObject"), {"abilities": asdict(store.probe())}
    uploading.publish(store, "job", {surveying.LOOKED: json.dumps(looked).encode()})
    other_way = s3server.client()  # on its disk, say
    key = f"{store._prefix}job/checkpoints/{ref.name}/small"
    other_way.put_object(Bucket=BUCKET, Key=key, Body=b"smell" * 1000)
    elsewhere = S3Store(offload, s3server.env, surveying.read_abilities(S3Store(offload, s3server.env), "job"))

    assert (Abilities(checksums=Checksums.NONE, conditional=True), True) == (store.probe(), read_back > 0)
    for looks in (store, elsewhere):
        with pytest.raises(OffsiteError, match="other bytes"):
            comparing.verify(looks, "job", ref)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [((), 0, "the store reports the checksums of its manifest; nothing was read"), (("--read",), 4, "other bytes")],
)
def test_verify_says_that_it_read_nothing_and_reads_when_told_to(  # noqa: PLR0917
    words, code, said, cli, proxy, s3_offload, s3server, directory
):
    """
    A store reports what it noted at the upload, whatever became of the bytes: only `--read` finds that.
    """
    proxy.repeats_checksums = True
    offload = s3_offload.model_copy(update={"endpoint": proxy.endpoint})
    store, ref = S3Store(offload, s3server.env, ALL), commit(directory, shards={"small": b"small" * 1000}).ref
    uploading.upload(store, "job", directory, ref, ignore)
    env, address = {**s3server.env, "AWS_ENDPOINT_URL": proxy.endpoint}, f"{s3_offload.to}/job"
    whole = cli("checkpoints", "verify", address, "--json", *words, **env)
    s3server.client().put_object(
        Bucket=BUCKET, Key=f"{store._prefix}job/checkpoints/{ref.name}/small", Body=b"smell" * 1000
    )

    rotten = cli("checkpoints", "verify", address, *words, **env)

    assert {ref.name: 5000 if words else 0} == json.loads(whole.stdout)["bytes_read"], whole.stderr
    assert code == rotten.returncode, rotten.stderr
    assert f"{ref.name}  " in rotten.stdout
    assert said in rotten.stdout


@pytest.mark.parametrize("raw", [b"", b"[]", b'{"abilities": 1}', b'{"abilities": {"checksums": "all"}}', b"[" * 10**5])
def test_what_is_no_record_of_abilities_says_nothing(store, raw):
    """
    Anybody may have written it.
    """
    store.put("job/looked.json", raw)

    assert surveying.read_abilities(store, "job") is None


@pytest.mark.parametrize("refused", [(), CHECKSUM_HEADERS[:2]], ids=["with checksums", "without"])
def test_a_bucket_that_takes_nothing_without_a_digest_is_served(proxy, s3_offload, s3server, directory, refused):
    """
    As one with a default retention: from the first object on.
    """
    proxy.wants_digests, proxy.refused_headers = True, refused
    store = S3Store(s3_offload.model_copy(update={"endpoint": proxy.endpoint}), s3server.env, part_chunks=1)
    ref = commit(directory, shards={"large": LARGE, "small": b"small"}).ref

    assert store.probe().conditional
    uploading.upload(store, "job", directory, ref, ignore)
    comparing.verify(store, "job", ref)


@pytest.mark.parametrize("header", ["if-none-match", "if-match"])
def test_a_server_that_takes_what_it_must_refuse_has_no_conditional_writes(proxy, s3_offload, s3server, header):
    """
    It says yes to every write: only trying tells.
    """
    proxy.ignored_headers = (header,)
    store = S3Store(s3_offload.model_copy(update={"endpoint": proxy.endpoint}), s3server.env)

    assert not store.probe().conditional
    assert [] == list(store.list(".probe"))


@pytest.mark.parametrize(("num_chunks", "step"), [(1, 1), (3, 1), (4, 2), (7, 2), (10, 3), (33, 32)])
def test_a_sum_of_parts_is_known_however_evenly_they_were_cut(num_chunks, step):
    """
    Another version of ours, or another program, may have made larger parts.
    """
    chunks = [bytes([n]) * CHUNK_BYTES for n in range(num_chunks - 1)] + [b"tail"]
    parts = [b"".join(chunks[at : at + step]) for at in range(0, num_chunks, step)]
    of_parts = crc32(b"".join(crc32(part).to_bytes(4, "big") for part in parts))
    size, checksums = sum(map(len, chunks)), [crc32(chunk) for chunk in chunks]

    assert is_sum_of_parts(of_parts, len(parts), checksums, size)
    assert not is_sum_of_parts(of_parts ^ 1, len(parts), checksums, size)
    assert not is_sum_of_parts(of_parts, num_chunks + 1, checksums, size)


CLIENT = """
import sys
import runner.storage.offsite.s3, botocore.auth
print(botocore.auth.AUTH_TYPE_MAPS["s3v4"].__module__, [name for name in sys.modules if "awscrt" in name])
import awscrt.auth
print("found")
"""


def test_botocore_signs_by_itself_whatever_else_is_installed():
    """
    With `awscrt` it would sign by that, and load it in every process that looks into a store.
    """
    argv, env = [sys.executable, "-c", CLIENT], {"PYTHONPATH": "."}

    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False, timeout=60)

    assert "botocore.auth []\nfound\n" == done.stdout, done.stderr


@pytest.mark.parametrize(
    ("addressing", "endpoint", "address"),
    [
        ("auto", None, "https://bucket.s3.amazonaws.com/x/key"),
        ("auto", "https://example.org", "https://example.org/bucket/x/key"),
        ("virtual", "https://example.org", "https://bucket.example.org/x/key"),
    ],
)
def test_where_the_bucket_is_named(addressing, endpoint, address):
    """
    In the path for servers of their own, in the host's name for AWS, or as the job says.
    """
    offload = OffloadPolicy(to="s3://bucket/x", endpoint=endpoint, addressing=addressing)
    store = S3Store(offload, {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"})
    url = store._client.generate_presigned_url("get_object", Params=store._named("key"))

    assert address == url.partition("?")[0]


_CONFIG = """
[profile farm]
region = eu-farm-1
services = farm
s3 =
  addressing_style = virtual

[services farm]
s3 =
  endpoint_url = {endpoint}
"""
_JOB = """
name: job
command: train.py
offload: {{to: "{to}", endpoint: "{endpoint}", region: eu-farm-1, addressing: virtual}}
"""


@pytest.fixture(params=["job.yaml", "profile"])
def told(request, tmp_path, proxy, s3server, s3_offload):
    """(RUN for a command, its environment, what it must address): a server that has the bucket in its host's name."""
    host = f"{DOMAIN}:{s3server.endpoint.rpartition(':')[2]}"
    env = {**s3server.env, "http_proxy": proxy.endpoint}
    if request.param == "profile":
        (tmp_path / "config").write_text(_CONFIG.format(endpoint=f"http://{host}"))
        env |= {"AWS_CONFIG_FILE": str(tmp_path / "config"), "AWS_PROFILE": "farm"}
        return f"{s3_offload.to}/job", env, f"{BUCKET}.{host}"
    (tmp_path / "job.yaml").write_text(_JOB.format(to=s3_offload.to, endpoint=f"http://{host}"))
    return "job.yaml", env, f"{BUCKET}.{host}"


def test_commands_reach_a_store_as_job_yaml_or_the_aws_configuration_says(  # noqa: PLR0917
    told, cli, proxy, s3_offload, s3server, directory, tmp_path
):
    """
    From any machine, with the bucket in the host's name, and nothing in the environment but the key.
    """
    which, env, host = told
    ref = commit(directory).ref
    uploading.upload(open_store(s3_offload, s3server.env), "job", directory, ref, ignore)

    listed = cli("checkpoints", "ls", which, "--json", **env)
    verified = cli("checkpoints", "verify", which, "--json", **env)
    restored = cli("checkpoints", "restore", which, "there", "--json", **env)

    assert [ref.step] == [row["step"] for row in json.loads(listed.stdout)], listed.stderr
    assert {ref.name: []} == json.loads(verified.stdout)["checkpoints"], verified.stderr
    assert contents(directory, ref) == contents(CheckpointDir(tmp_path / "there", Disk()), ref), restored.stderr
    assert {host} == proxy.hosts


def test_an_empty_key_in_the_environment_is_no_key(cli, s3_offload, s3server, directory, tmp_path):
    """
    `docker run -e NAME=` and compose's `${NAME:-}` leave such: the key is where it is otherwise.
    """
    ref = commit(directory).ref
    uploading.upload(open_store(s3_offload, s3server.env), "job", directory, ref, ignore)
    key, secret = (s3server.env[name] for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"))
    (tmp_path / "keys").write_text(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = {secret}\n")
    empty = dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"), "")
    env = {
        **s3server.env,
        **empty,
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "keys"),
        "AWS_ENDPOINT_URL": s3server.endpoint,
    }

    listed = cli("checkpoints", "ls", f"{s3_offload.to}/job", "--json", **env)

    assert [ref.step] == [row["step"] for row in json.loads(listed.stdout or "[]")], listed.stderr


_CLASH = {
    "launcher.log": b"hello\n",
    "launcher.log/x": b"",
    "launcher.log/attempt_0/0/stdout.log": b"lost\n",
    "x_rank0.log/attempt_0/0/stderr.log": b"lost\n",
    "x_rank0.log": b"",
    "0": b"",
    "0/x": b"",
}


def test_logs_whose_names_no_disk_can_have_are_passed_over(cli, s3_offload, s3server):
    """
    A name below another file's, a folder called as a log: what can be shown is, the rest is named.
    """
    store = open_store(s3_offload, s3server.env)
    for name, content in _CLASH.items():
        store.put(f"job/logs/attempt-0001/{name}", content)
    store.put("job/logs/attempt-²/launcher.log", b"none of an attempt")

    done = cli("logs", f"{s3_offload.to}/job", AWS_ENDPOINT_URL=s3server.endpoint, **s3server.env)

    assert (0, "launcher: hello\n") == (done.returncode, done.stdout), done.stderr
    assert "passed over: job/logs/attempt-0001/launcher.log/attempt_0/0/stdout.log: " in done.stderr
    assert "passed over: job/logs/attempt-0001/x_rank0.log" in done.stderr
    assert "/x: " not in done.stderr, "what is no log is not fetched"


def test_a_server_with_a_ca_of_its_own(s3_offload, s3server, certificate):
    """
    Trusted when AWS_CA_BUNDLE names it; else the message says that, at once.
    """
    with FaultProxy(s3server.endpoint, tls=speaking_tls(certificate)) as proxy:
        offload = s3_offload.model_copy(update={"endpoint": proxy.endpoint})
        stranger = S3Store(offload, s3server.env)
        with pytest.raises(OffsiteError) as caught:
            list(stranger.list("job/"))
        store = S3Store(offload, {**s3server.env, "AWS_CA_BUNDLE": str(certificate / "ca.pem")})
        store.put("job/x", b"x")

        assert (True, True) == (caught.value.final, "AWS_CA_BUNDLE" in caught.value.hint)
        assert "certificate verify failed: its certificate is not trusted" in str(caught.value)
        assert b"x" == store.get("job/x")


class _OwnWords(BaseHTTPRequestHandler):
    """A server that is none of S3, or of https and asked without: 400, in words of its own."""

    def do_PUT(self):
        text = b"Client sent an HTTP request to an HTTPS server."
        self.close_connection = True
        self.send_response(400)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_):
        pass


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("plain", ("expected https there, found http", "write http:// in offload.endpoint")),
        ("tls", ("expected http there, found https", "write https:// in offload.endpoint")),
        ("own words", ("the store answered 400", "is offload.endpoint one of S3, and is it https there?")),
    ],
)
def test_https_where_it_is_http_and_the_reverse_end_a_run_at_its_start(s3_offload, s3server, certificate, kind, words):
    """
    No network is down: nobody waits for it, and the cure is said.
    """
    scheme = "https" if kind == "plain" else "http"
    own = ThreadingHTTPServer(("127.0.0.1", 0), _OwnWords)
    threading.Thread(target=own.serve_forever, daemon=True).start()
    with FaultProxy(s3server.endpoint, tls=speaking_tls(certificate) if kind == "tls" else None) as proxy, own:
        address = proxy.endpoint.partition("://")[2] if kind == "tls" else f"127.0.0.1:{own.server_port}"
        offload = s3_offload.model_copy(update={"endpoint": f"{scheme}://{address}"})
        with pytest.raises(OffsiteError) as caught:
            S3Store(offload, s3server.env).probe()
        own.shutdown()

    assert caught.value.final
    assert words[0] in str(caught.value)
    assert words[1] in caught.value.hint


class _NoneOfS3(BaseHTTPRequestHandler):
    """It answers everything, and nothing as it was asked."""

    answer: tuple[dict[str, str], bytes] = ({}, b"")

    def do_GET(self):
        fields, body = self.answer
        self.send_response(200)
        for name, value in {"Content-Length": str(len(body)), **fields}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body if self.command == "GET" else b"")

    do_HEAD = do_GET  # noqa: N815  # as it is called

    def log_message(self, *_):
        pass


@pytest.fixture
def none_of_s3(s3_offload, s3server):
    """A function: (fields, body of an answer) to a store of it."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _NoneOfS3) as own:
        threading.Thread(target=own.serve_forever, daemon=True).start()
        offload = s3_offload.model_copy(update={"endpoint": f"http://127.0.0.1:{own.server_port}"})

        def answering(fields, body):
            _NoneOfS3.answer = fields, body
            return S3Store(offload, s3server.env)

        yield answering
        own.shutdown()


def _list_of(entry):
    return f"<ListBucketResult><IsTruncated>false</IsTruncated><Contents>{entry}</Contents></ListBucketResult>".encode()


@pytest.mark.parametrize(
    ("fields", "body", "ask"),
    [
        ({}, b"<html><body>Please log in</body></html>", lambda store: list(store.list("job/"))),
        ({}, b"", lambda store: list(store.list("job/"))),
        ({}, _list_of("<Key>k</Key><Size>1</Size>"), lambda store: list(store.list(""))),
        (
            {},
            _list_of("<Key>k</Key><Size>1</Size><LastModified>now</LastModified>"),
            lambda store: list(store.list("")),
        ),
        ({}, b"{}", lambda store: store.get("job/x")),
        ({"Content-Length": "five"}, b"", lambda store: store.head("job/x")),
    ],
    ids=["a page", "empty", "no time", "a time that is none", "no tag", "no length"],
)
def test_an_answer_that_is_none_of_s3_is_no_empty_store_and_no_fault_of_ours(none_of_s3, fields, body, ask):
    """
    A gateway's page in place of a list would begin a run at step 0. It may pass: it is asked again.
    """
    with pytest.raises(OffsiteError) as caught:
        ask(none_of_s3(fields, body))

    assert (False, False) == (caught.value.final, caught.value.damaged)
    assert "is offload.endpoint one of S3" in caught.value.hint


@pytest.mark.parametrize("word", ["AAA", "no checksum", "=", "AAAAAA==-x"])
def test_a_checksum_that_is_none_is_as_good_as_none(none_of_s3, word):
    """
    What is not confirmed is read back.
    """
    head = none_of_s3({"x-amz-checksum-crc32": word, CRC64NVME: word}, b"x").head("job/x")

    assert (1, None, None, None) == (head.size_bytes, head.crc32, head.crc64nvme, head.parts_crc32)


@pytest.mark.parametrize("content", [None, "", "-----BEGIN CERTIFICATE-----\nMIIB", b"\x30\x82"])
def test_a_ca_that_is_none_is_said(s3_offload, s3server, tmp_path, content):
    """
    The library would only say so with the first request, in words of its own, as if the server were ill.
    """
    bundle, found = tmp_path / "ca.pem", "none" if content is None else "no whole one"
    if content is not None:
        bundle.write_bytes(content if isinstance(content, bytes) else content.encode())

    with pytest.raises(OffsiteError, match=f"expected a file of certificates, found {found} at {bundle}") as caught:
        S3Store(s3_offload, {**s3server.env, "AWS_CA_BUNDLE": str(bundle)})

    assert caught.value.final


class _Role(BaseHTTPRequestHandler):
    """Gives out credentials that are about to expire, as an instance role does."""

    def do_GET(self):
        self.server.num_given += 1
        if self.server.failing:
            self.send_error(503)
            return
        soon = datetime.now(UTC) + timedelta(seconds=self.server.valid_s)
        fields = {
            "AccessKeyId": self.server.key[0],
            "SecretAccessKey": self.server.key[1],
            "Token": "",
            "Expiration": soon.strftime("%Y-%m-%dT%H:%M:%SZ"),
        }
        body = json.dumps(fields).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        """Not into the test's output."""


@pytest.fixture
def role(s3server, monkeypatch):
    with ThreadingHTTPServer(("127.0.0.1", 0), _Role) as server:
        server.num_given, server.valid_s, server.failing = 0, 300, False
        server.key = s3server.env["AWS_ACCESS_KEY_ID"], s3server.env["AWS_SECRET_ACCESS_KEY"]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"http://127.0.0.1:{server.server_port}/")
        yield server
        server.shutdown()


class _Refusing(BaseHTTPRequestHandler):
    """Refuses each body unseen: before it if it was asked, else by closing the connection in the middle."""

    protocol_version = "HTTP/1.1"

    def do_PUT(self):
        self.server.asked.append(self.headers["Expect"])
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def handle_expect_100(self):
        self.server.asked.append(self.headers["Expect"])
        body = b"<Error><Code>ExpiredToken</Code></Error>"
        self.send_response_only(403, "Forbidden")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        return False

    def log_message(self, *_):
        """Not into the test's output."""


def test_bodies_wait_for_no_word_of_the_server_and_a_refusal_is_heard_all_the_same(s3_offload, tmp_path):
    """
    To ask first costs each part a turn. Where the connection breaks instead of an answer, the next attempt asks.
    """
    (tmp_path / "shard").write_bytes(LARGE[:CHUNK_BYTES])
    able = ALL
    with ThreadingHTTPServer(("127.0.0.1", 0), _Refusing) as server:
        server.asked = []
        threading.Thread(target=server.serve_forever, daemon=True).start()
        offload = s3_offload.model_copy(update={"endpoint": f"http://127.0.0.1:{server.server_port}"})
        store = S3Store(offload, {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}, able)
        with pytest.raises(OffsiteError) as caught:
            store.put_file("job/x", tmp_path / "shard", describe_file(tmp_path / "shard", "shard"), ignore)
        server.shutdown()

    assert [None, "100-continue"] == server.asked
    assert "ExpiredToken" in str(caught.value)
    assert "the credentials have expired" in caught.value.hint


def test_credentials_that_expire_are_renewed_in_the_middle_of_an_upload(role, s3_offload, directory):
    """
    A client that kept those of its first minute would fail in the sixth hour.
    """
    store = S3Store(s3_offload, {}, part_chunks=1)
    store.probe()
    before = role.num_given
    ref = commit(directory, shards={"large": LARGE}).ref
    uploading.upload(store, "job", directory, ref, ignore)

    assert role.num_given > before >= 1
    assert [ref] == [checkpoint.ref for checkpoint in surveying.survey(store, "job").checkpoints]


_ROLE_OF_OTHER = "[default]\nrole_arn = arn:aws:iam::123456789012:role/x\nsource_profile = other\n"
_SSO = (
    "[default]\nsso_account_id = 1\nsso_role_name = r\nsso_region = eu-west-1\nsso_start_url = https://127.0.0.1:9/\n"
)


@pytest.mark.parametrize(
    ("config", "env", "cure", "curable"),
    [
        pytest.param("", {}, "set AWS_ACCESS_KEY_ID", True, id="none"),
        pytest.param("", {"AWS_ACCESS_KEY_ID": "a"}, "set both", True, id="half a key"),
        pytest.param("", {"AWS_PROFILE": "none"}, "AWS_PROFILE names it", True, id="no such profile"),
        pytest.param("[default\n", {}, "AWS_CONFIG_FILE", True, id="a file that cannot be read"),
        pytest.param(_ROLE_OF_OTHER, {}, "AWS configuration files", True, id="a role of nobody"),
        pytest.param(_SSO, {}, "aws sso login", True, id="a login that is over"),
        pytest.param(
            "",
            {"AWS_ROLE_ARN": "arn:aws:iam::123456789012:role/x", "AWS_WEB_IDENTITY_TOKEN_FILE": "/no/token"},
            "AWS_WEB_IDENTITY_TOKEN_FILE",
            True,
            id="a token that is not there",
        ),
        pytest.param("", {"AWS_DEFAULTS_MODE": "fast"}, "AWS_DEFAULTS_MODE", False, id="a setting that is none"),
    ],
)
def test_what_is_wrong_with_credentials_is_told_with_its_own_cure(tmp_path, monkeypatch, config, env, cure, curable):  # noqa: PLR0917  # what differs
    """
    Whoever is told to look into job.yaml looks for what is not there. Nothing is asked of anybody.
    """
    (tmp_path / "config").write_text(config)
    own = {"AWS_CONFIG_FILE": f"{tmp_path}/config", "AWS_SHARED_CREDENTIALS_FILE": f"{tmp_path}/none"}
    for name, value in {**own, "AWS_EC2_METADATA_DISABLED": "true", **env}.items():
        monkeypatch.setenv(name, value)
    offload = OffloadPolicy(to="s3://bucket/runs", endpoint="http://127.0.0.1:9", region="eu-west-1")

    with pytest.raises(OffsiteError) as caught:
        S3Store(offload, env).head("x")

    assert (True, curable) == (caught.value.final, caught.value.curable)
    assert cure in caught.value.hint, caught.value.hint


def test_a_key_is_never_told(s3_offload):
    """
    One with a line's end in it is no header, and the library would show all of that. Around it a line's end is none of it.
    """
    secret = {"AWS_ACCESS_KEY_ID": "AKIA", "AWS_SECRET_ACCESS_KEY": "x", "AWS_SESSION_TOKEN": "hid\nden"}

    with pytest.raises(OffsiteError) as caught:
        S3Store(s3_offload, secret).head("x")

    assert "AWS_SESSION_TOKEN: expected one word, found more" == str(caught.value)
    assert caught.value.hint == "is it cut in two, or quoted twice?"


def test_a_line_end_behind_a_key_is_none_of_it(s3_offload, s3server):
    """
    `$(cat file)` has none, a file that a container mounts has.
    """
    store = S3Store(s3_offload, {name: f" {value}\r\n" for name, value in s3server.env.items()})
    store.put("job/x", b"x")

    assert b"x" == store.get("job/x")


# ------------------------------------------------------------------------------------- consistency


def test_a_role_that_does_not_answer_is_asked_again(role, s3_offload):
    """
    The place where credentials come from may be away for a moment: no reason to give the store up.
    """
    role.failing = True
    with pytest.raises(OffsiteError, match="role") as caught:
        S3Store(s3_offload, {}).put("job/x", b"x")
    role.failing = False

    S3Store(s3_offload, {}).put("job/x", b"x")

    assert (False, True) == (caught.value.final, "role" in caught.value.hint)


@pytest.mark.parametrize("address", ["http://127.0.0.1:1", "http://user:hunter2@127.0.0.1:1"])
def test_who_does_not_answer_is_named_once(address):
    """
    What was asked for, who did not answer, and why, in one line; never a password.
    """
    store = S3Store(
        OffloadPolicy(to="s3://bucket/x", endpoint=address), {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    )

    with pytest.raises(OffsiteError) as caught:
        store.head("job/y")

    assert "s3://bucket/x/job/y: no answer from 127.0.0.1:1: connection refused" == str(caught.value)


def test_a_store_that_is_late_is_waited_for(directory, tmp_path):
    """
    An upload has ended when whoever lists the store finds the checkpoint.
    """
    store, ref = LateStore(FileStore(tmp_path / "store", Disk()), 0.5), commit(directory).ref
    uploading.upload(store, "job", directory, ref, ignore)
    found = surveying.survey(store, "job").checkpoints
    there = elsewhere(tmp_path)
    restoring.restore(store, "job", ref, there, ignore)

    assert [ref] == [checkpoint.ref for checkpoint in found]
    assert contents(directory, ref) == contents(there, ref)


def test_a_store_that_is_too_late_is_an_error_that_passes(directory, tmp_path):
    """
    It is said what it does not show, nothing is taken for safe, and a later try ends well.
    """
    store, ref = LateStore(FileStore(tmp_path / "store", Disk()), 3600), commit(directory).ref

    with pytest.raises(OffsiteError, match="stored, but it is not there") as caught:
        uploading.upload(store, "job", directory, ref, ignore)
    store.lag_s = 0
    uploading.upload(store, "job", directory, ref, ignore)

    assert not caught.value.final
    assert [ref] == [checkpoint.ref for checkpoint in surveying.survey(store, "job").checkpoints]


# ------------------------------------------------------------------------- content that is there


FROZEN = {"frozen": LARGE, "adapter": b"adapter" * 1000}


def test_content_that_the_store_has_is_not_sent_again(proxy, s3_offload, s3server, directory):
    """
    The frozen weights of a fine-tuning are the same in each checkpoint: the server copies them.
    """
    offload = s3_offload.model_copy(update={"endpoint": proxy.endpoint})
    store, told = open_store(offload, s3server.env), []
    uploading.upload(store, "job", directory, commit(directory, 100, shards=FROZEN).ref, ignore)
    before = proxy.num_bytes_up
    second = commit(directory, 200, shards=FROZEN | {"adapter": b"changed"}).ref
    copied = uploading.upload(store, "job", directory, second, lambda fraction, _: told.append(fraction))
    tidying.tidy(store, "job", keep_last=1)

    assert (len(LARGE), 1.0) == (copied, told[-1])
    assert proxy.num_bytes_up - before < 100_000
    assert [200] == [checkpoint.ref.step for checkpoint in surveying.survey(store, "job").checkpoints]
    comparing.verify(store, "job", second)


def test_the_same_shard_twice_is_sent_once(proxy, s3_offload, s3server, directory):
    """
    Within one checkpoint, too.
    """
    offload = s3_offload.model_copy(update={"endpoint": proxy.endpoint})
    store = open_store(offload, s3server.env)
    ref = commit(directory, shards={"a": LARGE, "b": LARGE, "c": LARGE}).ref
    copied = uploading.upload(store, "job", directory, ref, ignore)

    assert 2 * len(LARGE) == copied
    assert proxy.num_bytes_up < 1.1 * len(LARGE)
    comparing.verify(store, "job", ref)


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param({"operation": "CopyObject|UploadPartCopy", "answer": (501, "NotImplemented")}, id="cannot copy"),
        pytest.param({"operation": "CopyObject|UploadPartCopy", "answer": (403, "AccessDenied")}, id="may not copy"),
    ],
)
def test_a_server_that_does_not_copy_gets_the_bytes(proxy, s3_offload, s3server, directory, fault):
    """
    To copy is to spare the line, nothing more.
    """
    offload = s3_offload.model_copy(update={"endpoint": proxy.endpoint})
    store = open_store(offload, s3server.env)
    uploading.upload(store, "job", directory, commit(directory, 100, shards=FROZEN).ref, ignore)
    proxy.add(**fault)
    second = commit(directory, 200, shards=FROZEN).ref

    assert 0 == uploading.upload(store, "job", directory, second, ignore)
    comparing.verify(store, "job", second)


def test_in_a_folder_the_same_bytes_have_two_names(directory, tmp_path):
    """
    No second copy on the disk; and what a killed copy leaves is never written into.
    """
    store = FileStore(tmp_path / "store", Disk())
    first = commit(directory, 100, shards=FROZEN).ref
    uploading.upload(store, "job", directory, first, ignore)
    origin = tmp_path / "store" / "job" / "checkpoints" / first.name / "frozen"
    second = commit(directory, 200, shards=FROZEN).ref
    place = origin.parent.parent / second.name
    place.mkdir()
    own_path(place / "frozen", "unfinished").hardlink_to(origin)  # as a kill leaves it
    copied = uploading.upload(store, "job", directory, second, ignore)
    changed = commit(directory, 300, shards=FROZEN | {"frozen": LARGE[::-1]}).ref
    (origin.parent.parent / changed.name).mkdir()
    own_path(origin.parent.parent / changed.name / "frozen", "unfinished").hardlink_to(origin)
    uploading.upload(store, "job", directory, changed, ignore)

    assert len(LARGE) == copied
    assert origin.samefile(place / "frozen")
    for ref in (first, second, changed):
        comparing.verify(store, "job", ref)


# -------------------------------------------------------------------------------------------- cost


def test_memory_does_not_grow_with_the_shard(s3_offload, s3server, directory, tmp_path):
    """
    A quarter of a GiB in one file, up and down, each by a process of at most 200 MB.
    """
    temporary = directory.root / ".tmp-large"
    manifest = fill(temporary, shards={"large": b""})
    with (temporary / "large").open("wb") as file:
        file.truncate(32 * CHUNK_BYTES)
    manifest = replace(manifest, shards=(describe_file(temporary / "large", "large"),))
    directory.adopt(temporary, manifest)
    where = (s3_offload, s3server.env)

    assert peak_bytes("upload", where, directory.root, manifest.ref) < 200_000_000
    assert peak_bytes("restore", where, elsewhere(tmp_path).root, manifest.ref) < 200_000_000
