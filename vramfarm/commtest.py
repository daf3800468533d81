"""
Do the cards talk? One process of the test before the job: `python -I commtest.py '{"rank": 0, …}'`.

The supervisor starts one a card in the training environment. torch and the standard library only, and no module
of ours: this file is run by its path. What it is about to do stands in its report, a line of JSON each, written
before it is begun: where the lines end is where it hangs.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

PERIOD = 1024  # the pattern that is summed: a piece that lands in the wrong place shows
ELEMENT = 4  # bytes of a float32
LONG_S = 2.0  # an operation so slow that larger sizes are not tried
WANTED_S = 0.4  # time spent on each size
MOST_ROUNDS = 10


class Report:
    """Lines of JSON with the machine's clock, each written at once."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def __call__(self, phase: str, **fields: object) -> None:
        line = json.dumps({"phase": phase, "at": time.monotonic(), **fields})
        os.write(self._file, f"{line}\n".encode())


def main(text: str) -> int:
    order = json.loads(text)
    signal.alarm(order["limit_s"])  # if nobody is left to end it
    say = Report(order["report"])
    try:
        _run(order, say)
    except BaseException as error:  # noqa: BLE001  # whatever it is, the report has it
        name = type(error).__name__
        say("error", text=f"{name}: {error}"[:2000], kind=name)
        return 1
    return 0


def _run(order: dict[str, Any], say: Report) -> None:
    say("import")
    import torch  # noqa: PLC0415  # slow: the report has begun
    import torch.distributed as dist  # noqa: PLC0415

    say("device")
    device = _device(torch, order)
    say("computed", **_describe(torch, order, device))
    _misbehave(order, "join")
    if order["world"] > 1:
        say("join")
        dist.init_process_group(
            order["backend"], init_method=f"file://{order['store']}", rank=order["rank"], world_size=order["world"]
        )
        for size in _sizes(torch, dist, order, device):
            if _measure(torch, dist, order, device, size, say) > LONG_S:
                break
    say("done")
    sys.stdout.flush()
    os._exit(0)  # a communicator that cannot be taken down is no fault of the machine's


def _device(torch: Any, order: dict[str, Any]) -> Any:  # noqa: ANN401  # torch is not typed here
    """The card, after it has computed something and got it right."""
    if order["card"] is None:
        return torch.device("cpu")
    device = torch.device("cuda", order["card"])
    torch.cuda.set_device(device)
    ones = torch.ones(256, 256, device=device)
    total = float((ones @ ones).sum())
    if total != 256.0**3:
        msg = f"card {order['card']} computes {total} where {256.0**3} is right"
        raise ArithmeticError(msg)
    return device


def _describe(torch: Any, order: dict[str, Any], device: Any) -> dict[str, object]:  # noqa: ANN401
    told: dict[str, object] = {"torch": torch.__version__, "cuda": torch.version.cuda}
    if order["card"] is not None:
        told |= {"name": torch.cuda.get_device_name(device), "nccl": str(torch.cuda.nccl.version())}
    return told


def _sizes(torch: Any, dist: Any, order: dict[str, Any], device: Any) -> list[int]:  # noqa: ANN401
    """Those that fit on every card: the sum, its check and what NCCL needs."""
    free = 1 << 40 if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]
    room = torch.tensor([free // 8], dtype=torch.int64, device=device)
    dist.all_reduce(room, op=dist.ReduceOp.MIN)
    return [size for size in order["sizes"] if size <= int(room)]


def _measure(torch: Any, dist: Any, order: dict[str, Any], device: Any, size: int, say: Report) -> float:  # noqa: ANN401, PLR0913, PLR0917
    """One checked sum, then timed ones. Returns the seconds of one, the slowest rank's: all ranks agree on it."""
    rank, world = order["rank"], order["world"]

    def reduce(tensor: Any, **fields: object) -> float:  # noqa: ANN401
        say("reduce", size=size, **fields)
        _misbehave(order, "reduce")
        started = time.perf_counter()
        dist.all_reduce(tensor)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - started

    pattern = torch.arange(PERIOD, dtype=torch.float32, device=device)
    values = pattern.repeat(size // ELEMENT // PERIOD) + rank
    reduce(values, checked=True)
    if _is(order, "wrong"):
        values[0] += 1
    expected = world * pattern + world * (world - 1) / 2
    wrong = int((values.view(-1, PERIOD) != expected).sum())
    values.zero_()
    seconds = _agree(torch, dist, device, reduce(values, round=0))
    rounds = max(1, min(MOST_ROUNDS, int(WANTED_S / max(seconds, 1e-9))))
    if seconds <= LONG_S:
        best = min(reduce(values, round=at + 1) for at in range(rounds))  # of a card that has woken up
        seconds = _agree(torch, dist, device, best)
    say("measured", size=size, seconds=seconds, wrong=wrong)
    return seconds


def _agree(torch: Any, dist: Any, device: Any, seconds: float) -> float:  # noqa: ANN401
    slowest = torch.tensor([seconds], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)


# ------------------------------------------------------- what tests ask a rank to do wrong


def _is(order: dict[str, Any], what: str) -> bool:
    fault = order.get("fault") or {}
    return fault.get("rank") == order["rank"] and fault.get("what") == what


def _misbehave(order: dict[str, Any], where: str) -> None:
    if order.get("fault", {}).get("where") != where:
        return
    if _is(order, "stop"):
        os.kill(os.getpid(), signal.SIGSTOP)
    if _is(order, "sleep"):
        time.sleep(1000)
    if _is(order, "raise"):
        msg = "injected by the test"
        raise RuntimeError(msg)
    if _is(order, "slow"):
        time.sleep(0.3)


if __name__ == "__main__":
    assert Path(__file__).is_absolute(), "run by its path"
    sys.exit(main(sys.argv[1]))
