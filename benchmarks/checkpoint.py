"""
Checkpoint engines side by side in one training, with what the machine can do measured beside them.

    torchrun --nproc-per-node 2 benchmarks/checkpoint.py --dim 256 --layers 8 --rounds 3 --out build/bench

A training of feed-forward blocks, or of a transformer, under FSDP2 with AdamW. Each round: some quiet steps, a save by
one engine, steps until the save is done and all of its files are fsynced; then the next engine. A step ends when the
device has finished it and all ranks know. Written are DIR/NAME.json, DIR/NAME.md and DIR/NAME.svg, anew after each save.

With --warm-ups N the staging memory is made ready N times, each time by a Checkpointer of its own, between as many quiet
steps before and after: what it costs is told from those.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import sys
import time
from datetime import datetime, timezone
from pathlib import Path

import torch
import torch.distributed as dist
from engines import Nothing, Ours, build
from gpu.model import Model, driver, loss_of, shard
from limits import Limits
from picture import draw
from raw import huge
from torch import nn
from torch.distributed.fsdp import fully_shard

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

    def block(self, count):
        """Seconds of so many quiet steps."""
        for _ in range(count):
            self.step()
        return self.seconds[-count:]

    def tensors(self):
        found = [p.to_local().detach() for p in self.model.parameters()]
        return found + [v.to_local() for s in self.optimizer.state.values() for k, v in s.items() if k != "step"]


def save(training, engine, number, spans):
    """One save. Return what it cost and when it was done, as the slowest rank saw it."""
    quiet = training.quiet(engine)
    idle = statistics.median(training.inside[-QUIET:])
    floor = idle_floor(training) if isinstance(engine, Ours) else float("nan")
    first = len(training.seconds)
    started = time.perf_counter()
    engine.done_at = engine.synced_at = engine.error = None
    try:
        engine.begin(number)
    except Exception as error:  # noqa: BLE001  # the other rank must hear of it
        engine.error, engine.done_at = error, time.perf_counter()
        engine.synced_at = engine.done_at
    call = time.perf_counter() - started
    until = started + training.arguments.save_limit_s

    def wants_more():
        return not engine.is_done() and time.perf_counter() < until

    while training.step(engine, wants_more=wants_more()) and len(training.seconds) - first < LONGEST:
        pass
    if not engine.is_done():
        engine.error = TimeoutError(f"not done after {training.arguments.save_limit_s:.0f} s")
        engine.done_at = engine.synced_at = time.perf_counter()
    training.seconds[first] += call
    steps = training.seconds[first:]
    begin = getattr(engine, "staged_at", started)
    writing = steps[3:-1]
    training.step(engine)
    spans.append({"name": engine.name, "first": first, "end": first + len(steps), "step_s": quiet})
    row = {
        "call_s": call,
        "stall_s": max(steps) - quiet,
        "inside_s": call + max(training.inside[first:]),
        "idle_s": idle,
        "floor_s": floor,
        "writer_cpu_s": getattr(engine, "writer_cpu_s", float("nan")),
        "over_s": sum(s - quiet for s in steps),
        "slower": statistics.mean(writing) / quiet - 1 if len(writing) > 3 else float("nan"),
        "done_s": engine.done_at - begin,
        "synced_s": engine.synced_at - begin,
        "step_s": quiet,
        "steps": len(steps),
        "errors": engine.error is not None,
    }
    row = slowest(row, training.device)
    spans[-1] |= {"stall_s": row["stall_s"], "synced_s": row["synced_s"], "failed": bool(row["errors"])}
    if row.pop("errors"):
        raise RuntimeError(f"a rank failed: {engine.error!r}")
    return row


def idle_floor(training):
    """Seconds that a call of nothing takes in the same place: training has emptied the caches."""
    training.quiet(Nothing())
    return statistics.median(training.inside[-QUIET:])


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
    """Steps until our staging memory is ready. Return their cost and number, told from the quiet steps before them."""
    for _ in range(4):
        training.step()
    quiet, used = training.quiet(), engine.saver_cpu_s()
    steps = steps_to_warm(training, engine)
    used = engine.saver_cpu_s() - used
    pins = engine.ckpt._saves._warm_up._pins if engine.ckpt._saves._warm_up else None
    found = {
        "s": sum(steps),
        "over_s": sum(steps) - quiet * len(steps),
        "worst_s": max(steps) - quiet,
        "steps": len(steps),
        "pin_s": pins._spent_s if pins else 0.0,
        "saver_cpu_s": used,
        "floor_cpu_s": seconds_to_zero(engine.staging_bytes()),
    }
    return slowest(found, training.device)


def seconds_to_zero(size):
    """Of a processor, to be given as much plain memory: less than that nobody can need who takes memory."""
    part, used = min(size, 1 << 30), time.thread_time()
    huge(part)
    return (time.thread_time() - used) * size / part


def steps_to_warm(training, engine):
    first, started = len(training.seconds), time.perf_counter()
    while training.step(engine, wants_more=not engine.ckpt._saves.is_warm) and time.perf_counter() - started < 120:
        pass
    return training.seconds[first:]


def warm_ups(training, folder, say):
    """
    The same several times, each between quiet steps that are as many, by new Checkpointers.

    The cost is the mean of those steps less that of their quiet neighbours, times their number; and the same of medians,
    with the worst step apart, which slow steps elsewhere do not change. Quiet blocks told from their neighbours in the
    same way say what of that is chance.
    """
    blocks = [training.block(40)]
    for number in range(training.arguments.warm_ups):
        engine = Ours(training.model, training.optimizer, folder / f"warm-{number}")
        steps = steps_to_warm(training, engine)
        engine.ckpt._let_go()
        quiet = training.block(len(steps))
        blocks += [steps, quiet]
        say(f"warm-up {number}: {len(steps)} steps, {sum(steps):.2f} s, worst {max(steps):.4f} s")
    quiet, warm = blocks[::2], blocks[1::2]
    cost = [_beyond(w, a, b) for w, a, b in zip(warm, quiet, quiet[1:], strict=False)]
    chance = [_beyond(b, a, c) for a, b, c in zip(quiet, quiet[1:], quiet[2:], strict=False)]
    return {"cost": cost, "chance": chance, "quiet_s": [statistics.median(q) for q in quiet]}


def _beyond(steps, before, after):
    quiet = [*before, *after]
    return {
        "steps": len(steps),
        "s": sum(steps),
        "by_means_s": len(steps) * (statistics.mean(steps) - statistics.mean(quiet)),
        "by_medians_s": len(steps) * (statistics.median(steps) - statistics.median(quiet)),
        "worst_s": max(steps) - statistics.median(quiet),
        "worst_quiet_s": max(quiet) - statistics.median(quiet),
    }


def used_bytes():
    """What processes and the kernel hold of the host, without the page cache."""
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    get = {k: int(lines[k].split()[0]) * 1024 for k in ("MemTotal", "MemFree", "Buffers", "Cached", "Shmem")}
    return get["MemTotal"] - get["MemFree"] - get["Buffers"] - get["Cached"] + get["Shmem"]


def main():
    arguments = parse_arguments()
    is_cuda = torch.cuda.is_available() and not arguments.cpu
    rank = int(os.environ["RANK"])
    device = torch.device("cuda", rank) if is_cuda else torch.device("cpu")
    if is_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if is_cuda else "gloo")
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
        "limits": {"copy_s": [], "write_s": [], "beside_s": []},
        "sums": limits.sums(),
        "warm": {},
        "warm_ups": {},
        "memory": {},
        "spans": [],
    }
    if arguments.warm_ups:
        results["warm_ups"] = warm_ups(training, folder, say)
        write(arguments, results, total, training)
    engines = []
    for name in arguments.engines or [None]:
        engines += build([name] if name else [], training.model, training.optimizer, folder, say)
    for number in range(arguments.rounds):
        for kind in ("copy", "write"):
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
            if not one_save(training, engine, number, results, say):
                engines.remove(engine)
            write(arguments, results, total, training)
    limits.close()
    for engine in engines:
        if not isinstance(engine, Ours):
            engine.close()
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)  # some peers leave threads that hold the interpreter up


def one_save(training, engine, number, results, say):
    """Whether it came to its end: a peer that fails is a result."""
    rows = results["rows"].setdefault(engine.name, [])
    before = used_bytes()
    try:
        if number == 0 and isinstance(engine, Ours):
            results["warm"] = warm_up(training, engine)
            say(f"warm-up { ({k: round(v, 4) for k, v in results['warm'].items()}) }")
        row = save(training, engine, number, results["spans"])
    except Exception as error:  # noqa: BLE001  # see above
        say(f"{engine.name}: failed: {error!r}"[:500])
        rows.append({"failed": repr(error)[:200]})
        engine.tidy()
        return False
    engine.tidy()
    rows.append(row)
    results["memory"].setdefault(engine.name, used_bytes() - before)  # what it goes on holding
    if isinstance(engine, Ours):
        results["commits"], results["staging_bytes"] = engine.commits(), engine.staging_bytes()
        say(results["commits"][-1:])
    say(f"{engine.name} { ({k: round(v, 4) for k, v in row.items()}) }")
    return True


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
    steps, said = [round(seconds, 5) for seconds in training.seconds], caption(about, results)
    whole = {"about": about, "caption": said, **results, "seconds": steps}
    (out / f"{arguments.name}.json").write_text(json.dumps(whole))
    (out / f"{arguments.name}.md").write_text(table(about, results))
    if any(not span["failed"] for span in results["spans"]):
        (out / f"{arguments.name}.svg").write_text(draw(steps, results["spans"], said))


def caption(about, results):
    where = f"{about['ranks']} × {about['device']}, {about['bytes'] / 1e9:.2f} GB of state"
    return f"{where}, a step of {step_of(results):.3f} s, torch {about['torch']}, {about['date']}"


def table(about, results):
    total = about["bytes"]
    limit = {k: statistics.median(v) for k, v in results["limits"].items() if v}
    where = f"{about['date']}, {about['ranks']} × {about['device']}, {about['cores']} cores, torch {about['torch']}, driver {about['driver']}"
    lines = [
        f"{where}; load {os.getloadavg()[0]:.0f}; {total / 1e9:.2f} GB of state, a step of {step_of(results):.3f} s; {' '.join(about['argv'])}",
        "",
        "| | longest step − median, first save, s | later saves, s | steps while it is written | inside its calls, s | until it says done, s | until all is fsynced, s | GB/s, fsynced | host memory it keeps, × state |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    if limit:
        lines += [
            f"| limit: pinned copy | {limit['copy_s']:.3f} | {spread(results['limits']['copy_s'])} | | | | | {total / limit['copy_s'] / 1e9:.2f} | |",
            f"| limit: direct write, fsynced | | | | | | {spread(results['limits']['write_s'])} | {total / limit['write_s'] / 1e9:.2f} | |",
            f"| limit: the same while the training goes on | | | | | | {spread(results['limits']['beside_s'])} | {total / limit['beside_s'] / 1e9:.2f} | |",
        ]
    for name, rows in results["rows"].items():
        lines += [row_of(name, rows, results, total)] if rows else []
    lines += of_ours(results, total, limit, about["cores"])
    lines += ["", f"one thread sums {results['sums'] / 1e9:.2f} GB/s", *results.get("commits", [])]
    if results["warm"]:
        lines += ["", f"warm-up: {json.dumps({k: round(v, 3) for k, v in results['warm'].items()})}"]
    for kind, several in results["warm_ups"].items():
        lines += ["", *(f"warm-ups, {kind}: {json.dumps(one)}" for one in several)]
    return "\n".join(lines) + "\n"


def of_ours(results, total, limit, cores):
    """What the table has no column for."""
    rows = [row for row in results["rows"].get("vramfarm", []) if "failed" not in row]
    if not rows:
        return []
    took = statistics.median(row["synced_s"] for row in rows)
    used = statistics.median(row["writer_cpu_s"] for row in rows)
    idle, floor = (statistics.median(row[kind] for row in rows) * 1e6 for kind in ("idle_s", "floor_s"))
    lines = [
        "",
        f"vramfarm: the saver takes {used / total * 1e9:.3f} CPU-s/GB, {used / took:.2f} cores while it writes, {used / took / cores:.1%} of all",
        f"step() when nothing is saved: {idle:.1f} µs, of an empty function in its place {floor:.1f} µs; staging memory: {results['staging_bytes'] / total:.3f} × the state",
    ]
    if limit:
        rate = {kind: limit[f"{kind}_s"] / took for kind in ("write", "beside")}
        lines.append(
            f"it writes at {rate['write']:.2f} of the direct write, {rate['beside']:.2f} of the same beside the training"
        )
    return lines


def row_of(name, rows, results, total):
    good = [row for row in rows if "failed" not in row]
    if not good:
        return f"| {name} | failed: {rows[0]['failed'][:120]} | | | | | | | |"
    slower = [row["slower"] for row in good if row["slower"] == row["slower"]]
    synced = [row["synced_s"] for row in good]
    memory = f"{results['memory'].get(name, 0) / total:.2f}" if torch.cuda.is_available() else ""
    cells = [
        name,
        f"{good[0]['stall_s']:.3f}",
        spread([row["stall_s"] for row in good[1:]]),
        f"{statistics.median(slower):+.1%}" if slower else "",
        spread([row["inside_s"] for row in good]),
        spread([row["done_s"] for row in good]),
        spread(synced),
        f"{total / statistics.median(synced) / 1e9:.2f}",
        memory,
    ]
    return f"| {' | '.join(cells)} |"


def step_of(results):
    steps = [row["step_s"] for rows in results["rows"].values() for row in rows if "step_s" in row]
    return statistics.median(steps) if steps else float("nan")


def spread(values):
    if not values:
        return ""
    if len(values) == 1:
        return f"{values[0]:.3f}"
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
    parser.add_argument("--save-limit-s", type=float, default=150, help="for one save")
    parser.add_argument("--warm-ups", type=int, default=0, help="so many, measured before all else")
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--engines", nargs="*", default=[])
    parser.add_argument("--dir", default="build")
    parser.add_argument("--out", default="build/bench-out")
    parser.add_argument("--limit-s", type=float, default=1e9, help="no more rounds of peers after this time")
    parser.add_argument("--cpu", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
