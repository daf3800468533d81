"""
Checkpoint engines side by side in one training, with what the machine can do measured beside them.

    torchrun --nproc-per-node 2 benchmarks/checkpoint.py --dim 256 --layers 8 --rounds 3 --out build/bench

A training of feed-forward blocks, or of a transformer, under FSDP2 with AdamW. Each round: some quiet steps, a save by
one engine, steps until the save is done; then the next engine. A step ends when the device has finished it and all
ranks know. Written are DIR/NAME.json and DIR/NAME.md.

Restarts are processes of their own: from the start of the ranks to the end of their first step, with a checkpoint and in
an empty folder. The difference is what the checkpoint costs.
"""

import argparse
import contextlib
import json
import os
import platform
import shutil
import statistics
import sys
import time
import traceback
from datetime import datetime, timezone
from pathlib import Path

import torch
import torch.distributed as dist
from engines import Ours, build
from gpu.drive import finish_ranks, launch_ranks
from gpu.model import Model, driver, loss_of, shard
from limits import Limits, read_directly
from torch import nn
from torch.distributed.fsdp import fully_shard

from vramfarm import Checkpointer

QUIET = 6
LONGEST = 4000  # steps of one round


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim, bias=False)
        self.down = nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Training:
    """The training loop: one step a call, with its duration."""

    def __init__(self, arguments, device):
        self.arguments, self.device = arguments, device
        self.rank = dist.get_rank()
        self.model, self.optimizer = self.make()
        self.seconds = []
        self.inside = []

    def make(self):
        torch.manual_seed(0)
        arguments = self.arguments
        with self.device:
            if arguments.model == "transformer":
                model = Model(arguments.layers, arguments.dim, arguments.vocabulary)
            else:
                model = nn.Sequential(*[Block(arguments.dim) for _ in range(arguments.layers)])
        blocks = list(model.blocks) if arguments.model == "transformer" else list(model)
        if arguments.compile:
            for block in blocks:
                block.compile()
        if arguments.model == "transformer":
            shard(model)
        else:
            for block in (*blocks, model):
                fully_shard(block)
        kind = {} if arguments.optimizer == "default" else {arguments.optimizer: True}
        return model, torch.optim.AdamW(model.parameters(), lr=1e-4, **kind)

    def _loss(self):
        arguments = self.arguments
        if arguments.model == "transformer":
            shape = (arguments.batch, arguments.tokens + 1)
            return loss_of(self.model, torch.randint(arguments.vocabulary, shape, device=self.device))
        x = torch.randn(arguments.batch, arguments.tokens, arguments.dim, device=self.device)
        return self.model(x).square().mean()

    def step(self, engine=None, *, wants_more=False):
        """One step. Return how many ranks want more, which all have to know anyway."""
        started = time.perf_counter()
        for left in reversed(range(self.arguments.accumulate)):
            self.model.set_requires_gradient_sync(left == 0)
            self._loss().backward()
        inside = time.perf_counter()
        if engine:
            engine.guard()
        inside = time.perf_counter() - inside
        self.optimizer.step()
        self.optimizer.zero_grad()
        more = torch.tensor([float(wants_more)], device=self.device)
        dist.all_reduce(more)
        number = more.item()  # as a loop that looks at its loss
        inside -= time.perf_counter()
        if engine:
            engine.step()
        inside += time.perf_counter()
        self.inside.append(inside)
        self.seconds.append(time.perf_counter() - started)
        return number

    def quiet(self, engine=None):
        begin = len(self.seconds)
        for _ in range(QUIET):
            self.step(engine)
        return statistics.median(self.seconds[begin + 2 :])

    def tensors(self):
        found = [p.to_local().detach() for p in self.model.parameters()]
        return found + [v.to_local() for s in self.optimizer.state.values() for k, v in s.items() if k != "step"]


def save(training, engine, number):
    """One save. Return what it cost and when it was done, as the slowest rank saw it."""
    quiet = training.quiet(engine)
    first = len(training.seconds)
    started = time.perf_counter()
    engine.done_at = None
    try:
        engine.begin(number)
    except Exception as error:  # noqa: BLE001  # the other rank must hear of it
        engine.error, engine.done_at = error, time.perf_counter()
    call = time.perf_counter() - started
    ours = isinstance(engine, Ours)
    until = started + training.arguments.save_limit_s

    def wants_more():
        return not engine.is_done() and time.perf_counter() < until

    while training.step(engine, wants_more=wants_more()) and len(training.seconds) - first < LONGEST:
        pass
    if not engine.is_done():
        engine.error = TimeoutError(f"not done after {training.arguments.save_limit_s:.0f} s")
        engine.done_at = time.perf_counter()
    steps = training.seconds[first:]
    steps[0] += 0 if ours else call
    begin = getattr(engine, "staged_at", started)
    writing = steps[3:-1]
    training.step(engine)
    worst = max(steps) - quiet
    row = {
        "call_s": call,
        "stall_s": worst,
        "inside_s": call + max(training.inside[first:]),
        "over_s": sum(s - quiet for s in steps),
        "slower": statistics.mean(writing) / quiet - 1 if len(writing) > 3 else float("nan"),
        "durable_s": engine.done_at - begin,
        "step_s": quiet,
        "steps": len(steps),
        "errors": engine.error is not None,
    }
    row = slowest(row, training.device)
    if row.pop("errors"):
        raise RuntimeError(f"a rank failed: {engine.error!r}")
    return row


def write_beside(training, limits):
    """Seconds of the direct write while the training goes on, as its slowest rank has it."""
    dist.barrier()
    took = limits.start_writing()
    for _ in range(LONGEST):
        if not training.step(wants_more=took() is None):
            break
    return slowest({"s": took() or float("nan")}, training.device)["s"]


def slowest(row, device):
    values = torch.tensor([float(v) for v in row.values()], dtype=torch.float64, device=device).nan_to_num(-1e9)
    dist.all_reduce(values, dist.ReduceOp.MAX)
    return {k: (v if v > -1e8 else float("nan")) for k, v in zip(row, values.tolist(), strict=True)}


def warm_up(training, engine):
    """Steps until our staging memory is ready. Return their cost and number."""
    for _ in range(4):
        training.step()
    quiet = training.quiet()
    first, started = len(training.seconds), time.perf_counter()
    while training.step(engine, wants_more=not engine.ckpt._is_warm) and time.perf_counter() - started < 120:
        pass
    steps = training.seconds[first:]
    over = sorted((s - quiet for s in steps), reverse=True)
    pins = engine.ckpt._warm_up._pins
    found = {
        "warm_s": time.perf_counter() - started,
        "warm_over_s": sum(over),
        "warm_worst_s": over[0],
        "warm_steps": len(steps),
        "pin_s": pins._spent_s if pins else 0.0,
    }
    return slowest(found, training.device)


def used_bytes():
    """What processes and the kernel hold of the host, without the page cache."""
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    get = {k: int(lines[k].split()[0]) * 1024 for k in ("MemTotal", "MemFree", "Buffers", "Cached", "Shmem")}
    return get["MemTotal"] - get["MemFree"] - get["Buffers"] - get["Cached"] + get["Shmem"]


def restart(arguments, name, folder, last):
    """Seconds from the start of a process to its first step: with the engine's checkpoint, and without one."""
    found = {"with": [], "without": [], "restore": [], "loop_with": [], "loop_without": [], "read": []}
    shards = [path for path in Path(last or folder).rglob("*") if path.suffix != ".json" and path.is_file()]
    for number in range(arguments.restarts):
        found["read"].append(read_directly(shards))
        for kind in ("without", "with"):
            empty = Path(arguments.dir) / f"empty-{number}"
            where = folder if kind == "with" else empty
            order = {"engine": name if kind == "with" else "vramfarm", "dir": str(where), "last": str(last)}
            forget(folder)
            one = first_step_of_a_process(arguments, order)
            shutil.rmtree(empty, ignore_errors=True)
            if kind == "with" and name == "vramfarm" and not one["start_step"]:
                raise RuntimeError("nothing was restored")
            found[kind].append(one["total_s"])
            found[f"loop_{kind}"].append(one["loop_s"])
            if kind == "with":
                found["restore"].append(one["restore_s"])
    return found


def first_step_of_a_process(arguments, order):
    log = Path(arguments.dir) / "first-step.log"
    log.unlink(missing_ok=True)
    options = [one for one in sys.argv[1:] if one != "--compile"]  # its seconds differ by more than what is measured
    options += ["--first-step", json.dumps(order | {"began": time.time()})]
    ranks = launch_ranks(dist.get_world_size(), Path(__file__).resolve(), options, log)
    code = finish_ranks(ranks, arguments.save_limit_s)
    lines = [line for line in log.read_text().splitlines() if line.startswith("first step: ")]
    if not lines:
        raise RuntimeError(f"restart: exit {code}: {log.read_text()[-500:]}")
    return json.loads(lines[0].removeprefix("first step: "))


def first_step(arguments, device):
    """A process that is started to be timed."""
    order = json.loads(arguments.first_step)
    dist.all_reduce(torch.zeros(1, device=device))
    training = Training(arguments, device)
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()
    before, start_step = time.time(), 0
    if order["engine"] == "vramfarm":
        start_step = Checkpointer(
            training.model, training.optimizer, dir=order["dir"], save_interval="24h", keep_last=1
        ).start_step
    else:
        (engine,) = build([order["engine"]], training.model, training.optimizer, Path(arguments.dir) / "again", print)
        engine.last = Path(order["last"])
        engine.load(training.model, training.optimizer)
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()
    restored = time.time()
    training.step()
    dist.barrier()
    if dist.get_rank() == 0:
        now = time.time()
        found = {"total_s": now - order["began"], "loop_s": now - before}
        found |= {"restore_s": restored - before, "start_step": start_step}
        print(f"first step: {json.dumps(found)}", flush=True)
    dist.barrier()
    os._exit(0)


def forget(folder):
    """What was written just now is in the page cache, unless it was written directly. Only that: libraries stay warm."""
    for path in filter(Path.is_file, Path(folder).rglob("*")):
        with path.open("rb") as file, contextlib.suppress(OSError):  # a filesystem that has no such thing
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main():
    arguments = parse_arguments()
    is_cuda = torch.cuda.is_available() and not arguments.cpu
    rank = int(os.environ["RANK"])
    device = torch.device("cuda", rank) if is_cuda else torch.device("cpu")
    if is_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if is_cuda else "gloo")
    if arguments.first_step:
        first_step(arguments, device)
    folder = Path(arguments.dir) / "bench"
    if rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    dist.barrier()

    def say(text):
        if rank == 0:
            print(f"{time.perf_counter() - begun:7.1f} {text}", flush=True)

    begun = time.perf_counter()
    training = Training(arguments, device)
    for _ in range(3):
        training.step()
    limits = Limits(training.tensors(), folder, rank, dist.barrier, int(arguments.limit_gb * 1e9))
    total = slowest({"bytes": limits.whole_bytes}, device)["bytes"] * dist.get_world_size()
    say(f"state: {total / 1e9:.2f} GB, quiet step: {training.quiet():.4f} s")
    results = {
        "rows": {},
        "limits": {"copy_s": [], "write_s": [], "beside_s": [], "read_s": []},
        "sums": limits.sums(),
        "warm": {},
        "memory": {},
        "restart": {},
    }
    engines = []
    for name in arguments.engines or [None]:
        engines += build([name] if name else [], training.model, training.optimizer, folder, say)
    for number in range(arguments.rounds):
        for kind in ("copy", "write", *(["read"] if arguments.restarts else [])):
            results["limits"][f"{kind}_s"].append(getattr(limits, kind)())
        results["limits"]["beside_s"].append(write_beside(training, limits))
        limits.tidy()
        say(f"limits { ({k: round(v[-1], 3) for k, v in results['limits'].items() if v}) }")
        for engine in list(engines):
            late = time.perf_counter() - begun > arguments.limit_s and not (isinstance(engine, Ours) and number == 0)
            if number >= engine.rounds or agree(late, device):
                continue
            if agree(shutil.disk_usage(folder).free < 1.02 * total + (1 << 30), device):
                say(f"{engine.name}: left out: the disk has no room for another {total / 1e9:.1f} GB")
                continue
            try:
                if number == 0:
                    before = used_bytes()
                    if isinstance(engine, Ours):
                        results["warm"] = warm_up(training, engine)
                        say(f"warm-up { ({k: round(v, 4) for k, v in results['warm'].items()}) }")
                row = save(training, engine, number)
                engine.tidy()
                if number == 0:
                    results["memory"][engine.name] = used_bytes() - before  # what it goes on holding
            except Exception as error:  # noqa: BLE001  # a peer that fails is a result
                say(f"{engine.name}: failed: {error!r}"[:500])
                engine.tidy(all_of_it=True)
                results["rows"].setdefault(engine.name, []).append({"failed": repr(error)[:200]})
                engines.remove(engine)
                continue
            results["rows"].setdefault(engine.name, []).append(row)
            say(f"{engine.name} { ({k: round(v, 4) for k, v in row.items()}) }")
        write(arguments, results, total, training)
    limits.close()
    for engine in engines:
        if isinstance(engine, Ours):
            if arguments.restarts:
                engine.close()  # with a last save
            results["commits"] = engine.commits()
            say(results["commits"])
        if engine.name not in {"vramfarm", "dcp.save"} or not results["rows"].get(engine.name):
            continue
        if arguments.restarts and rank == 0:
            try:
                found = restart(arguments, engine.name, engine.folder, engine.last)
                results["restart"][engine.name] = found
                say(f"restart {engine.name}: { ({k: [round(s, 2) for s in v] for k, v in found.items()}) }")
            except Exception as error:  # noqa: BLE001  # the other figures count
                traceback.print_exc()
                say(f"restart {engine.name}: {error!r}")
        dist.all_reduce(torch.zeros(1))  # by gloo: a card that waits would be in the way of those that are timed
    write(arguments, results, total, training)
    for engine in engines:
        if not isinstance(engine, Ours):
            engine.close()
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)  # some peers leave threads that hold the interpreter up


def agree(flag, device):
    one = torch.tensor([float(flag)], device=device)
    dist.all_reduce(one)
    return one.item() > 0


def write(arguments, results, total, training):
    if dist.get_rank() != 0:
        return
    out = Path(arguments.out)
    out.mkdir(parents=True, exist_ok=True)
    about = {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if training.device.type == "cuda" else platform.machine(),
        "driver": driver(),
        "ranks": dist.get_world_size(),
        "bytes": total,
        "cores": os.cpu_count(),
        "arguments": vars(arguments),
        "argv": sys.argv[1:],
    }
    (out / f"{arguments.name}.json").write_text(json.dumps({"about": about, **results}, indent=1))
    (out / f"{arguments.name}.md").write_text(table(about, results))


def table(about, results):
    total = about["bytes"]
    limit = {k: statistics.median(v) for k, v in results["limits"].items() if v}
    where = f"{about['date']}, {about['ranks']} × {about['device']}, {about['cores']} cores, torch {about['torch']}, driver {about['driver']}"
    lines = [
        f"{where}; {total / 1e9:.2f} GB of state, a step of {step_of(results):.3f} s; {' '.join(about['argv'])}",
        "",
        "| | longest step − median, first save, s | later saves, s | steps while it is written | inside its calls, s | until done, s | GB/s | done means on the disk | host memory it keeps, × state |",
        "|---|---|---|---|---|---|---|---|---|",
        f"| limit: pinned copy | {limit['copy_s']:.3f} | {spread(results['limits']['copy_s'])} | | | | {total / limit['copy_s'] / 1e9:.2f} | | |",
        f"| limit: direct write, fsynced | | | | | {spread(results['limits']['write_s'])} | {total / limit['write_s'] / 1e9:.2f} | yes | |",
        f"| limit: the same while the training goes on | | | | | {spread(results['limits']['beside_s'])} | {total / limit['beside_s'] / 1e9:.2f} | yes | |",
    ]
    if "read_s" in limit:
        lines.append(
            f"| limit: direct read | | | | | {spread(results['limits']['read_s'])} | {total / limit['read_s'] / 1e9:.2f} | | |"
        )
    for name, rows in results["rows"].items():
        good = [row for row in rows if "failed" not in row]
        if not good:
            lines.append(f"| {name} | failed: {rows[0]['failed'][:80]} | | | | | | | |")
            continue
        later = [row["stall_s"] for row in good[1:]]
        slower = [row["slower"] for row in good if row["slower"] == row["slower"]]
        durable = [row["durable_s"] for row in good]
        memory = f"{results['memory'].get(name, 0) / total:.2f}" if torch.cuda.is_available() else ""
        lines.append(
            f"| {name} | {good[0]['stall_s']:.3f} | {spread(later)} | {f'{statistics.median(slower):+.1%}' if slower else ''} | {spread([row['inside_s'] for row in good])} | {spread(durable)} "
            f"| {total / statistics.median(durable) / 1e9:.2f} | {'yes' if name == 'vramfarm' or name.endswith('fsync') else 'no'} | {memory} |"
        )
    if ours := [row["durable_s"] for row in results["rows"].get("vramfarm", []) if "failed" not in row]:
        rate = {kind: limit[f"{kind}_s"] / statistics.median(ours) for kind in ("write", "beside")}
        lines += [
            "",
            f"vramfarm writes at {rate['write']:.2f} of the direct write, {rate['beside']:.2f} of the same beside the training",
        ]
    lines += ["", f"one thread sums {results['sums'] / 1e9:.2f} GB/s", *results.get("commits", [])]
    lines += ["", f"warm-up: {json.dumps({k: round(v, 3) for k, v in results['warm'].items()})}"]
    for name, found in results["restart"].items():
        beyond = statistics.median(found["with"]) - statistics.median(found["without"])
        lines.append(
            f"restart with {name}, from the start of the process to the end of its first step: {spread(found['with'])} s; "
            f"without a checkpoint {spread(found['without'])} s; {beyond:.2f} s more; "
            f"the restoring itself {spread(found['restore'])} s"
        )
        read = statistics.median(found["read"])
        beyond = statistics.median(found["loop_with"]) - statistics.median(found["loop_without"])
        lines.append(
            f"the same from the model that is there on: {spread(found['loop_with'])} s, without {spread(found['loop_without'])} s; "
            f"{beyond:.2f} s more, {beyond / read:.2f} × the direct read of these shards in turns with it, {spread(found['read'])} s"
        )
    return "\n".join(lines) + "\n"


def step_of(results):
    steps = [row["step_s"] for rows in results["rows"].values() for row in rows if "step_s" in row]
    return statistics.median(steps) if steps else float("nan")


def spread(values):
    if not values:
        return ""
    return f"{statistics.median(values):.3f} ({min(values):.3f}–{max(values):.3f})"


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="checkpoint", help="of the two files that are written")
    parser.add_argument("--model", choices=["feedforward", "transformer"], default="feedforward")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--optimizer", choices=["default", "foreach", "fused"], default="default")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--vocabulary", type=int, default=32_000, help="of a transformer")
    parser.add_argument("--limit-gb", type=float, default=8, help="a rank: of a larger state the limits take so much")
    parser.add_argument("--save-limit-s", type=float, default=150, help="for one save, or one restart")
    parser.add_argument("--first-step", default="", help="for restarts, by this script itself")
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--restarts", type=int, default=2)
    parser.add_argument("--engines", nargs="*", default=[])
    parser.add_argument("--dir", default="build")
    parser.add_argument("--out", default="build/bench-out")
    parser.add_argument("--limit-s", type=float, default=1e9, help="no more rounds of peers after this time")
    parser.add_argument("--cpu", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
