"""
How long a training takes to end while a save is on its way, and what becomes of that save.

    PYTHONPATH=. python benchmarks/chaos/exits.py [HOW:DISK ...]

Two ranks under torchrun, without a supervisor, a save asked for every few steps. HOW is what ends them; DISK is `fast`, `slow`
(a save takes four seconds) or `silent` (it does not answer until training has ended). Printed is a row of a table for each.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIMIT_S = 150.0
DISKS = {"fast": "", "slow": "write 0 8000000 .tmp-*/shard-*\n", "silent": "fsync -1 0 .tmp-*/shard-*\n"}
CASES = (
    *("raise:fast", "raise:slow", "raise:silent", "raise in a hook:slow", "_exit:slow", "_exit:silent", "exit:slow"),
    *("SIGTERM:slow", "SIGTERM:silent", "SIGINT twice:slow", "SIGINT twice:silent", "SIGTERM, 5 s, SIGKILL:slow"),
    *("stopped worker, raise:slow", "stopped worker, SIGTERM:slow", "deadlocked worker, raise:slow"),
)


def script(how: str, go: Path) -> None:
    """What each rank runs."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset, get_worker_info

    from vramfarm import Checkpointer

    class Data(TensorDataset):
        def __getitem__(self, index):
            if (go.exists() and "worker" in how) and get_worker_info().id == 1:
                if "deadlocked" in how:
                    import threading

                    signal.signal(signal.SIGTERM, signal.SIG_IGN)
                    threading.Event().wait()
                os.kill(os.getpid(), signal.SIGSTOP)
            return super().__getitem__(index)

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    model = nn.parallel.DistributedDataParallel(nn.Linear(256, 256))
    optimizer = torch.optim.AdamW(model.parameters())
    loader = DataLoader(Data(torch.randn(100_000, 256)), batch_size=2, num_workers=2 if "worker" in how else 0)
    ckpt = Checkpointer(model, optimizer, loader=loader, dir=go.parent / "checkpoints", save_interval=0.6)
    for _step, (batch,) in ckpt.steps(loader, epochs=1):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.02)
        if go.exists() and dist.get_rank() == 1:
            if "worker" in how:
                time.sleep(1.0)
            if "hook" in how:
                next(model.parameters()).register_hook(lambda _: 1 / 0)
            elif "raise" in how:
                raise ValueError("as a script does")
            if how == "_exit":
                os._exit(3)
            if how == "exit":
                sys.exit(4)


def play(how: str, disk: str, work: Path, library: Path) -> str:
    work.mkdir()
    go, root, orders = work / "go", work / "checkpoints", work / "orders"
    env = os.environ | {
        "LD_PRELOAD": str(library),
        "TROUBLE_ROOT": str(root),
        "TROUBLE_ORDERS": str(orders),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "ignore",
    }
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    with (work / "log").open("wb") as log:
        launcher = subprocess.Popen(
            [*argv, __file__, "--script", how, str(go)], env=env, stdout=log, stderr=log, start_new_session=True
        )
    try:
        wait(lambda: len(steps(root)) >= 2, 90)
        orders.write_text(DISKS[disk])
        before = set(steps(root))
        wait(lambda: any(root.glob(".tmp-*")) or disk == "fast", 30)
        go.touch()
        began = time.monotonic()
        if "SIGTERM" in how:
            time.sleep(1.5 if "worker" in how else 0)
            launcher.terminate()
        if "SIGINT" in how:
            for _ in range(2):
                os.killpg(launcher.pid, signal.SIGINT)
                for rank in ranks(str(go)):
                    with suppress(ProcessLookupError):
                        os.kill(
                            rank, signal.SIGINT
                        )  # torchrun gives each a session: a terminal reaches the launcher only
                time.sleep(0.5)
        if "SIGKILL" in how:
            time.sleep(5.0)
            for pid in (launcher.pid, *ranks(str(go))):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            launcher.wait(LIMIT_S)
        took, code = time.monotonic() - began, launcher.poll()
        left = len(ranks(str(go)))
        orders.unlink()
        wait(lambda: not any(root.glob(".tmp-*")), 30)
        new = sorted(set(steps(root)) - before)
        return f"| {how} | {disk} | {took:.1f} s, {'still there' if code is None else f'exit code {code}'} | {left} ranks | {'committed' if new else 'none'} |"
    finally:
        for pid in (launcher.pid, *ranks(str(go))):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        launcher.wait(10)


def steps(root: Path) -> list[str]:
    return [path.name for path in root.glob("step-*")]


def ranks(mark: str) -> list[int]:
    """Ranks and their workers, by their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            words = path.read_bytes().split(b"\0")
            if mark.encode() in words and b"torch.distributed.run" not in words:
                found.append(int(path.parent.name))
    return found


def wait(claim, seconds: float) -> None:
    ends = time.monotonic() + seconds
    while not claim():
        assert time.monotonic() < ends, "not in time"
        time.sleep(0.02)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=CASES)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="chaos-exits-", ignore_cleanup_errors=True) as work:
        library = Path(work) / "trouble.so"
        source = ROOT / "tests/vramfarm/trouble.c"
        subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source, "-ldl", "-lpthread"], check=True, timeout=60)
        print(
            "| what ends it | disk | until all have ended | left | the save on its way |\n|---|---|---|---|---|",
            flush=True,
        )
        for number, case in enumerate(args.cases):
            how, _, disk = case.rpartition(":")
            try:
                print(play(how, disk, Path(work) / str(number), library), flush=True)
            except AssertionError as error:
                print(
                    f"| {how} | {disk} | {error!r} |\n{(Path(work) / str(number) / 'log').read_text()[:1500]}",
                    flush=True,
                )
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--script"]:
        script(sys.argv[2], Path(sys.argv[3]))
    else:
        sys.exit(main())
