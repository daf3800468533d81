"""
A small training loop on cards, or on two processes with gloo, that goes wrong in one way: rank 1 does, unless it says otherwise.

    torchrun --nproc-per-node 2 benchmarks/gpu/failing.py KIND SECONDS [WIDTH REPEATS TIMEOUT]

For hang.py and first_error.py. It trains well for so many seconds, multiplying matrices of that width so often a
step. What it does then begins with a mark, `FAILS_MARK`, a file whose time is that of the fault.
"""

import ctypes
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

KIND, SECONDS = sys.argv[1], float(sys.argv[2])
WIDTH, REPEATS, TIMEOUT = (int(word) for word in [*sys.argv[3:], "64", "1", "600"][:3])
RANK, LOCAL_RANK = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
LIMIT_S = 90  # whatever happens, it does not train on for ever
if os.environ.get("VRAMFARM_ATTEMPT", "1") != "1":
    sys.exit(0)  # what goes wrong is seen in the first attempt
if KIND == "import":
    import a_package_that_nobody_has  # noqa: F401  # type: ignore[import-not-found]

import torch  # noqa: E402  # what is above needs none of it
import torch.distributed as dist  # noqa: E402
from torch.distributed.elastic.multiprocessing.errors import record  # noqa: E402
from torch.utils.data import DataLoader, Dataset  # noqa: E402

if KIND == "before" and RANK == 0:
    raise RuntimeError("no folder of data was given")

KERNEL = 'extern "C" __global__ void wild(float* x) { x[threadIdx.x + (1ll << 44)] = 1.0f; }'


def mark():
    if path := os.environ.get("FAILS_MARK"):
        Path(path).touch()


class Samples(Dataset):
    def __init__(self, stuck_at):
        self.stuck_at = stuck_at

    def __len__(self):
        return 1_000_000

    def __getitem__(self, at):
        if time.monotonic() > self.stuck_at:
            mark()
            time.sleep(3600)
        return torch.ones(4)


def fault(device, step):
    """What goes wrong. Ranks that only wait go on with the next step."""
    if KIND in {"mismatch", "sizes"}:
        mark()
        large = torch.ones(1 << (22 if RANK else 24), device=device)
        if KIND == "mismatch" and RANK == 1:
            dist.all_gather([torch.empty_like(large) for _ in range(dist.get_world_size())], large)
        else:
            dist.all_reduce(large)
        return
    if (KIND == "kill0") != (RANK == 0) or RANK > 1:
        return
    mark()
    print(f"rank {RANK} is at step {step}", flush=True)
    match KIND:
        case "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "asleep":
            time.sleep(3600)
        case "value" | "recorded":
            raise ValueError(f"batch {step}: label 7 is not one of 4 classes")
        case "key":
            raise KeyError("attention_mask")
        case "kill" | "kill0":
            os.kill(os.getpid(), signal.SIGKILL)
        case "segv":
            ctypes.string_at(0)
        case "abort":
            os.abort()
        case "exit1":
            sys.exit(1)
        case "exit0":
            sys.exit(0)
        case "memory":
            torch.empty(1 << 42, dtype=torch.uint8, device=device)
        case "assert":
            torch.nn.Embedding(100, 8, device=device)(torch.tensor([32_000], device=device)).sum().item()
        case "access":
            x = torch.ones(32, device=device)
            torch.cuda._compile_kernel(KERNEL, "wild")((1, 1, 1), (32, 1, 1), (x,))
            x.sum().item()


def main():
    on_cards = torch.cuda.is_available()
    device = torch.device("cuda", LOCAL_RANK) if on_cards else torch.device("cpu")
    if on_cards:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_cards else "gloo", timeout=timedelta(seconds=TIMEOUT))
    began, is_over = time.monotonic(), False
    stuck_at = began + SECONDS if KIND == "loader" and RANK == 1 else float("inf")
    matrix = torch.randn(WIDTH, WIDTH, device=device, dtype=torch.bfloat16)
    product = torch.empty_like(matrix)
    for step, batch in enumerate(DataLoader(Samples(stuck_at), batch_size=1, num_workers=1), 1):
        for _ in range(REPEATS):
            torch.mm(matrix, matrix, out=product)
        if not on_cards:
            time.sleep(0.05)
        gradient = batch[0].to(device)
        gradient[3] = time.monotonic() - began > SECONDS
        dist.all_reduce(gradient)
        *_, loss, is_time = gradient.tolist()
        print(f"step {step} loss {loss / step:.4f}", flush=True)
        if is_time and not is_over and KIND != "loader":
            is_over = True
            fault(device, step)
        if time.monotonic() - began > SECONDS + LIMIT_S:
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    record(main)() if KIND == "recorded" else main()
