"""
The training that kill.py, resume.py and restart.py start: FSDP2, bf16 with fp32 master state, AdamW, a loss to compare bit for bit.

    torchrun --nproc-per-node 2 benchmarks/gpu/train.py --out FOLDER --steps 100

FOLDER gets curve.jsonl (a line a step: the loss as hexadecimal, the time), samples-<rank>.jsonl (which samples),
events-<rank>.jsonl (when a process was where) and, with --digest, a checksum of each whole tensor at both ends.
"""

import argparse
import json
import os
import time
import zlib
from pathlib import Path


class Tokens:
    """Sequences that can be learnt: each number follows from the one before and from the sample's own stride."""

    def __init__(self, samples, length, vocabulary):
        self.samples, self.length, self.vocabulary = samples, length, vocabulary

    def __len__(self):
        return self.samples

    def __getitem__(self, i):
        import torch

        stride = 1 + i % 7
        return i, (torch.arange(self.length + 1) * stride + 13 * i) % self.vocabulary


class Notes:
    """Lines of JSON, each in the file when the call is over: a kill loses none."""

    def __init__(self, path):
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def add(self, **fields):
        os.write(self._fd, json.dumps({"pid": os.getpid(), "at": time.time(), **fields}).encode() + b"\n")


def be_deterministic():
    """The same bits from the same weights and samples: without this the backward pass of attention differs from run to run."""
    import torch

    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # filled memory would only cost time
    if torch.cuda.is_available():
        for choose in ("cudnn", "mem_efficient", "math"):
            getattr(torch.backends.cuda, f"enable_{choose}_sdp")(False)


def process_began():
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    running = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - running


def digest(model, optimizer):
    """A checksum of each whole tensor of weights and optimizer; all ranks take part."""
    names = {id(p): n for n, p in model.named_parameters()}
    found = {f"model.{n}": _sum(t) for n, t in model.state_dict().items()}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            found[f"optimizer.state.{names[id(parameter)]}.{key}"] = _sum(value)
    return found


def _sum(tensor):
    import torch

    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return zlib.crc32(memoryview(whole.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()))


def clocks():
    """From now on: seconds of this process in parts of a restore, wall clock and those of its threads together."""
    from vramfarm import loading, streaming

    found = {}

    def timed(place, name, part):
        before = getattr(place, name)

        def wrapped(*args):
            started = time.perf_counter()
            try:
                return before(*args)
            finally:
                found[part] = found.get(part, 0.0) + time.perf_counter() - started

        setattr(place, name, wrapped)

    timed(loading.Reader, "__init__", "opening")
    timed(streaming, "read_all", "read_all")
    timed(streaming.Source, "read", "threads: reading and summing")
    timed(streaming, "check", "threads: of it summing")
    timed(streaming, "_spread", "threads: copying")
    has = streaming._Cached.has

    def counted(*args):
        is_there = has(*args)
        found["chunks"] = found.get("chunks", 0) + 1
        found["chunks in memory"] = found.get("chunks in memory", 0) + is_there
        return is_there

    streaming._Cached.has = counted
    return found


def use_dcp(folder, model, optimizer, *, save=False):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    mine, its = get_state_dict(model, optimizer)
    state = {"model": mine, "optimizer": its}
    if save:
        dcp.save(state, checkpoint_id=folder)
        return
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=mine, optim_state_dict=its)


def main():
    arguments = parse_arguments()
    out = Path(arguments.out)
    out.mkdir(parents=True, exist_ok=True)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    events = Notes(out / f"events-{rank}.jsonl")
    began = process_began()
    events.add(event="process", at=began, control=os.environ.get("VRAMFARM_CONTROL", ""), world_size=world_size)
    import torch

    events.add(event="torch")
    import torch.distributed as dist
    from model import Model, join, loss_of, shard
    from torch.utils.data import DataLoader

    events.add(event="fsdp")
    from vramfarm import Checkpointer

    events.add(event="imported")
    be_deterministic()
    device = join()
    dist.all_reduce(torch.ones(1, device=device))  # the first collective brings the links up
    events.add(event="joined")
    torch.manual_seed(0)
    with device:
        model = Model(arguments.layers, arguments.hidden, arguments.vocabulary)
    shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
    data = Tokens(arguments.samples, arguments.sequence, arguments.vocabulary)
    loader = DataLoader(data, batch_size=arguments.per_card, shuffle=True, drop_last=True)
    accumulate = max(1, arguments.global_batch // (arguments.per_card * world_size))
    if device.type == "cuda":
        torch.cuda.synchronize()
    events.add(event="built")
    keywords = {"dir": arguments.dir} if arguments.dir else {}
    if arguments.interval:
        keywords["save_interval"] = arguments.interval
    inside = clocks() if arguments.parts else {}
    ckpt = Checkpointer(
        model, optimizer, scheduler=scheduler, loader=loader, seed=7, resume=arguments.resume, **keywords
    )
    if arguments.dcp:
        use_dcp(arguments.dcp, model, optimizer)
    if device.type == "cuda":
        torch.cuda.synchronize()
    events.add(
        event="restored",
        inside=inside,
        step=ckpt.start_step,
        digest=digest(model, optimizer) if arguments.digest else None,
    )
    curve, samples = Notes(out / "curve.jsonl"), Notes(out / f"samples-{rank}.jsonl")
    total, seen = torch.zeros(1, dtype=torch.float64, device=device), []
    for step, (ids, tokens) in ckpt.steps(loader, max_steps=arguments.steps, accumulate=accumulate):
        model.set_requires_gradient_sync(ckpt.last_micro_batch)
        loss = loss_of(model, tokens.to(device, non_blocking=True)) / accumulate
        loss.backward()
        total += loss.detach().double() / world_size
        seen += ids.tolist()
        if not ckpt.last_micro_batch:
            continue
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        dist.all_reduce(total)
        value = total.item()
        total.zero_()
        samples.add(step=step + 1, ids=seen)
        seen = []
        if rank == 0:
            curve.add(step=step + 1, loss=value.hex())
        ckpt.report(loss=value)
        if arguments.pause:
            time.sleep(arguments.pause)
    events.add(event="ended", step=ckpt.start_step, digest=digest(model, optimizer) if arguments.digest else None)
    if arguments.dcp_save:
        use_dcp(arguments.dcp_save, model, optimizer, save=True)
    dist.barrier()
    if arguments.quit:
        os._exit(0)
    dist.destroy_process_group()


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--dir", default="", help="of the checkpoints, where there is no supervisor")
    parser.add_argument("--interval", default="", help="between saves, likewise")
    parser.add_argument("--resume", default="auto")
    parser.add_argument("--digest", action="store_true")
    parser.add_argument("--parts", action="store_true", help="say how long the parts of a restore take")
    parser.add_argument("--dcp", default="", help="load this checkpoint of torch's when the model is there")
    parser.add_argument("--dcp-save", default="", help="write one at the end")
    parser.add_argument("--quit", action="store_true", help="end at once when all is done: two seconds of tidying less")
    parser.add_argument("--pause", type=float, default=0.0)
    defaults = {"steps": 100, "layers": 2, "hidden": 128, "vocabulary": 512, "sequence": 64, "per-card": 4}
    for name, default in {**defaults, "global-batch": 8, "samples": 100_000}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser.parse_args()


if __name__ == "__main__":
    main()
