"""
FSDP1 with all that it may be combined with, on two ranks: resumed, read by others, and never torn.

    flat_run.py FOLDER

Prints one line of JSON for each check.
"""

import json
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy, StateDictType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Shard

from vramfarm import Checkpointer, copies, flat, folder
from vramfarm.loading import Reader
from vramfarm.state import Snapshot
from vramfarm.typed import StateError

warnings.simplefilter("ignore")
LOW = MixedPrecision(torch.bfloat16, torch.float32, torch.bfloat16)
KINDS = {
    "plain": {},
    "nested": {"auto_wrap_policy": ModuleWrapPolicy({nn.Conv2d})},
    "low": {"mixed_precision": LOW, "sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
    "flat": {"use_orig_params": False, "auto_wrap_policy": ModuleWrapPolicy({nn.Conv2d})},
    "compiled": {},
    "chunked": {},
}


class Net(nn.Module):
    """Tied weights, four dimensions (once not as they lie in memory), a buffer, and a weight that nobody uses."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 7, 3, padding=1).to(memory_format=torch.channels_last)
        self.embed, self.head = nn.Linear(7, 11, bias=False), nn.Linear(7, 11, bias=False)
        self.head.weight = self.embed.weight
        self.back = nn.Linear(11, 7)
        self.unused = nn.Parameter(torch.randn(5, 3))
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x):
        self.seen += 1
        x = torch.relu(self.conv(x)).mean((2, 3))
        return self.head(torch.relu(self.back(self.embed(x))))


class Run:
    def __init__(self, kind, directory, seed=0):
        torch.manual_seed(seed)
        net = Net()
        if kind == "nested":
            net.conv = checkpoint_wrapper(net.conv)
            net.unused.requires_grad_(requires_grad=False)
        options = {"use_orig_params": True} | KINDS[kind]
        self.model = FullyShardedDataParallel(net, device_id=torch.device("cpu"), **options)
        if kind == "compiled":
            self.model = torch.compile(self.model, backend="eager")
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=0.02)
        staging = "chunked" if kind == "chunked" else "auto"
        self.directory = directory
        self.ckpt = Checkpointer(
            self.model, self.optimizer, dir=directory, save_interval="1h", keep_last=9, staging=staging
        )

    def step(self):
        torch.manual_seed(100 * self.ckpt.start_step + dist.get_rank())
        loss = self.model(torch.randn(2, 3, 4, 4)).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.ckpt.step()
        return loss.item().hex()

    def train(self, steps):
        return [self.step() for _ in range(steps - self.ckpt.start_step)]

    def whole(self):
        """The weights, as torch brings them together."""
        fsdp = getattr(self.model, "_orig_mod", self.model)
        with FullyShardedDataParallel.state_dict_type(fsdp, StateDictType.FULL_STATE_DICT):
            return {clean(k): v.clone() for k, v in fsdp.state_dict().items()}


def clean(name):
    return name.replace("_checkpoint_wrapped_module.", "")


def agreed(mine):
    """Ranks that see the folder at different times must not part."""
    told = [bool(mine)]
    dist.broadcast_object_list(told)
    return told[0]


def say(name, same):
    told = [None] * dist.get_world_size()
    dist.all_gather_object(told, bool(same))
    if dist.get_rank() == 0:
        print(json.dumps({"check": name, "same": all(told)}), flush=True)


def is_saved(stored, wanted):
    reader = Reader(stored)
    return [k for k, v in wanted.items() if not torch.equal(v, reader.read(f"model.{k}").to(v.dtype))] == []


def newest(directory):
    return folder.committed(directory)[0]


def resumes(root, kind):
    """As it would have gone on; every save is what the weights were; torch's reader and a single process read it."""
    undisturbed = Run(kind, root / "whole").train(6)
    run, history = Run(kind, root / "parts"), {}
    run.step()
    run.ckpt.save()
    while not agreed(history.keys() & {s.manifest.step for s in folder.committed(run.directory)}):
        run.step()
        history[run.ckpt.start_step] = run.whole()
    stored = newest(run.directory)
    say(f"{kind}: saved beside the training", is_saved(stored, history[stored.manifest.step]))
    run = Run(kind, root / "more")
    losses = run.train(3)
    run.ckpt.finish()
    saved = run.whole()
    say(f"{kind}: saved at the end", is_saved(newest(root / "more"), saved))
    run = Run(kind, root / "more", seed=1)
    say(f"{kind}: loaded", all(torch.equal(v, saved[k]) for k, v in run.whole().items()))
    say(f"{kind}: resumed", losses + run.train(6) == undisturbed)
    run.ckpt.finish()
    if (reader := getattr(dcp, "HuggingFaceStorageReader", None)) is not None:
        now = {f"model.{k}": v for k, v in run.whole().items() if v.dtype == torch.float32}
        wanted = {k: torch.zeros_like(v) for k, v in now.items()}
        dcp.load(wanted, storage_reader=reader(str(newest(root / "more").path)), no_dist=True)
        say(f"{kind}: by torch", all(torch.equal(wanted[k], v) for k, v in now.items()))


def not_torn(root):
    """What training changes the flat parameters by is seen by the guard, and nothing else changes them."""
    run = Run("plain", root)
    run.step()
    guards = [one for found in flat.flats(run.model) for one in found.guards()]

    def versions():
        return [one._version for one in guards]

    layout = run.ckpt._saves.contents.take().layout
    plan = copies._Plan(memoryview(bytearray(layout.size_bytes)), layout)
    beside, torn = copies._Copy([], plan._kept), copies._Copy([], plan._kept)
    before = versions()
    run.model(torch.randn(2, 3, 4, 4)).mean().backward()
    say("guard: a copy beside forward and backward is true", beside.wait() == "")
    run.optimizer.step()  # through the parameters: their own versions count
    say("guard: forward, backward and step leave the flat parameters alone", versions() == before)
    for parameter in run.model.parameters():
        parameter.data = parameter.data * 2
    run.model(torch.randn(2, 3, 4, 4)).mean().backward()
    say("guard: it sees what torch writes back", versions() != before and "changed outside" in torn.wait())
    before = versions()
    with FullyShardedDataParallel.summon_full_params(run.model):
        next(run.model.parameters()).data.mul_(2)
    say("guard: it sees what is changed in the full parameters", versions() != before)
    for parameter in run.model.parameters():
        parameter.data = parameter.data * 2
    run.ckpt.step()
    run.ckpt.finish()
    say("replaced parameters are saved as they are", is_saved(newest(root), run.whole()))


class Odd(torch.Tensor):
    """Who knows what its bytes are."""


def refusals(root):
    class Blocks(torch.optim.SGD):
        """Keeps a number for each four elements that a rank has."""

        def step(self):
            for group in self.param_groups:
                for p in group["params"]:
                    if p.numel():
                        self.state[p]["absmax"] = torch.zeros(p.numel() // 4 + 2)

    run = Run("plain", root / "blocks")
    run.ckpt.finish()
    optimizer = Blocks(run.model.parameters(), lr=0.1)
    optimizer.step()
    say(
        "refused: state of a rank's own",
        "absmax: cannot be saved" in why(lambda: Checkpointer(run.model, optimizer, dir=root / "own")),
    )
    mesh = init_device_mesh("cpu", (2,))
    odd = DTensor.from_local(torch.ones(3).as_subclass(Odd), mesh, [Shard(0)])
    said = why(lambda: Snapshot(dist.get_rank(), 2).add("weight", odd))
    say("refused: a DTensor of what we do not know", "weight: cannot be saved: a tensor of type __main__.Odd" in said)
    handle = run.model._handle
    run.model._handle = "another"
    say("refused: another torch", "is not as we know it" in why(lambda: flat.flats(run.model)))
    run.model._handle = handle


def why(call):
    try:
        call()
    except StateError as error:
        return str(error)
    return ""


def main(root):
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    for kind in KINDS:
        (root / kind).mkdir(exist_ok=True)
        dist.barrier()
        resumes(root / kind, kind)
    not_torn(root / "torn")
    refusals(root)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
