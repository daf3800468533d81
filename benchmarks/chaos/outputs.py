"""
Many small outputs to a real S3 server: how long, with how much memory, and in how many requests.

    PYTHONPATH=. python benchmarks/chaos/outputs.py [--files 100000] [--bytes 1000]

Each copy is a process of its own, as a task of the runner is: the first, one where nothing has changed, and the last, which asks
the store for its list.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.s3server import BUCKET, S3Server

ROOT = Path(__file__).parents[2]


def copy(folder: Path, *, believe: bool) -> None:
    """Prints what it took."""
    import urllib3

    from runner.job import OffloadPolicy
    from runner.storage.offsite import open_store
    from runner.storage.offsite.links import Places
    from runner.storage.offsite.outputs import copy_outputs

    requests = []
    ask = urllib3.connectionpool.HTTPConnectionPool.urlopen

    def counted(self, method, *arguments, **options):
        requests.append(method)
        return ask(self, method, *arguments, **options)

    urllib3.connectionpool.HTTPConnectionPool.urlopen = counted
    for name in (folder / "run", folder / "checkpoints"):
        name.mkdir(exist_ok=True)
    places = Places(run_dir=folder / "run", checkpoint_dir=folder / "checkpoints", workspace=folder, data=())
    began, cpu = time.monotonic(), time.process_time()
    store = open_store(OffloadPolicy(to=f"s3://{BUCKET}/many"), os.environ)
    found = copy_outputs(store, "many", [folder / "outputs"], places, lambda *_: None, believe=believe)
    told = {
        "in the store": f"{found.num_stored} of {found.num_files}",
        "s": round(time.monotonic() - began, 1),
        "CPU s": round(time.process_time() - cpu, 1),
        "memory, MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1000,
        "requests": {method: requests.count(method) for method in sorted(set(requests))},
    }
    print(json.dumps(told))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=100_000)
    parser.add_argument("--bytes", type=int, default=1000)
    parser.add_argument("--copy", help=argparse.SUPPRESS)
    parser.add_argument("folder", nargs="?", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.copy:
        copy(Path(args.folder), believe=args.copy == "believe")
        return 0
    with tempfile.TemporaryDirectory(prefix="chaos-outputs-", ignore_cleanup_errors=True) as work:
        folder, server = Path(work), S3Server(Path(work) / "s3")
        for number in range(args.files):
            place = folder / "outputs" / f"{number // 1000:03d}"
            if number % 1000 == 0:
                place.mkdir(parents=True)
            (place / f"sample-{number}.json").write_bytes(number.to_bytes(8, "big") * (args.bytes // 8))
        (folder / "s3").mkdir()
        server.start()
        env = {**os.environ, **server.env, "AWS_ENDPOINT_URL": server.endpoint, "PYTHONPATH": str(ROOT)}
        try:
            for name, how in (("first", "believe"), ("nothing changed", "believe"), ("the last", "list")):
                print(f"load {os.getloadavg()[0]:.0f}; {name}: ", end="", flush=True)
                subprocess.run([sys.executable, __file__, "--copy", how, str(folder)], env=env, check=True)
            status = Path(f"/proc/{server._process.pid}/status").read_text()
            print("server:", *[line for line in status.splitlines() if line.startswith("VmHWM")])
        finally:
            server.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
