"""
Every way of spreading a model over four ranks: resumed as it was, and read as another.

    spread.py FOLDER

Prints one line of JSON for each check: what was saved by, what it was read as, and whether all was the same.
"""

import hashlib
import json
import struct
import sys
import warnings
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, StateDictType, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from vramfarm import Checkpointer, folder

warnings.simplefilter("ignore")
PLAN = {"0": ColwiseParallel(), "2": RowwiseParallel()}


def as_ddp(model):
    return nn.parallel.DistributedDataParallel(model), None


def as_fsdp2(model):
    for layer in model:
        fully_shard(layer)
    return fully_shard(model), None


def as_hsdp(model):
    return fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))), None


def as_tp(model):
    return parallelize_module(model, init_device_mesh("cpu", (4,), mesh_dim_names=("tp",)), PLAN), (0, 1)


def as_fsdp_tp(model):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], PLAN)
    return fully_shard(model, mesh=mesh["dp"]), (mesh["dp"].get_local_rank(), 2)


def fsdp1(model, strategy="FULL_SHARD", inner=(2,), **more):
    def wrapped(module):
        return FullyShardedDataParallel(
            module, sharding_strategy=ShardingStrategy[strategy], device_id=torch.device("cpu"), **more
        )

    for number in inner:
        model[number] = wrapped(model[number])
    return wrapped(model), None


def as_fsdp1(model):
    return fsdp1(model, use_orig_params=True)


def as_fsdp1_flat(model):
    return fsdp1(model, "SHARD_GRAD_OP", inner=(0, 2, 3), use_orig_params=False)


def as_fsdp1_hybrid(model):
    return fsdp1(model, "HYBRID_SHARD", use_orig_params=True, device_mesh=init_device_mesh("cpu", (2, 2)))


def as_fsdp1_copied(model):
    return fsdp1(model, "NO_SHARD", use_orig_params=True)


WAYS = {
    "ddp": as_ddp,
    "fsdp1": as_fsdp1,
    "fsdp1-flat": as_fsdp1_flat,
    "fsdp2": as_fsdp2,
    "hsdp": as_hsdp,
    "fsdp1-hybrid": as_fsdp1_hybrid,
    "fsdp1-copied": as_fsdp1_copied,
    "tp": as_tp,
    "fsdp+tp": as_fsdp_tp,
}


class Run:
    """A model with 13 rows, which four ranks do not divide, and a frozen layer behind them."""

    def __init__(self, way, directory, seed):
        self.model, self.data_parallel = WAYS[way](self.plain(seed))
        self.optimizer = torch.optim.AdamW((p for p in self.model.parameters() if p.requires_grad), lr=0.1)
        self.ckpt = Checkpointer(
            self.model, self.optimizer, dir=directory, data_parallel=self.data_parallel, keep_last=3
        )

    @staticmethod
    def plain(seed):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 13))
        return model.append(nn.Linear(13, 1 << 17, bias=False).requires_grad_(requires_grad=False))

    def train(self, steps):
        """Return the losses, exactly."""
        losses = []
        while self.ckpt.start_step < steps:
            number = self.data_parallel[0] if self.data_parallel else dist.get_rank()
            torch.manual_seed(100 * self.ckpt.start_step + number)
            loss = self.model(torch.randn(3, 6)).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.item().hex())
            self.ckpt.step()
        self.ckpt.finish()
        return losses

    def digests(self):
        if isinstance(self.model, FullyShardedDataParallel):
            return {k: digest(t) for k, t in sorted(gathered(self.model, self.optimizer).items())}
        inner = getattr(self.model, "module", self.model)
        tensors = dict(inner.state_dict())
        names = {id(p): n for n, p in inner.named_parameters()}
        for parameter, state in self.optimizer.state.items():
            tensors |= {f"{names[id(parameter)]}.{k}": v for k, v in state.items()}
        return {k: digest(t.full_tensor() if isinstance(t, DTensor) else t) for k, t in sorted(tensors.items())}


def gathered(model, optimizer):
    """All of it, as torch itself brings FSDP1's parts together."""
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        tensors = dict(model.state_dict())
    if any(name.endswith("_flat_param") for name, _ in model.named_parameters()):
        states = FullyShardedDataParallel.full_optim_state_dict(model, optimizer, rank0_only=False)["state"]
        return tensors | {f"{name}.{k}": v for name, state in states.items() for k, v in state.items()}
    named = [(name.replace("_fsdp_wrapped_module.", ""), p) for name, p in model.named_parameters()]
    mine = {name: optimizer.state[p] for name, p in named if p in optimizer.state}
    told = [None] * dist.get_world_size(
        model.process_group
    )  # that function returns exp_avg_sq for exp_avg on a processor
    dist.all_gather_object(told, mine, model.process_group)
    for name, shape in [(n, tensors[n].shape) for one in told for n in one]:
        rows = [one[name] for one in told if name in one][
            : 1 if name in mine and mine[name]["exp_avg"].shape == shape else None
        ]
        tensors |= {f"{name}.{k}": torch.cat([row[k] for row in rows]).view(shape) for k in ("exp_avg", "exp_avg_sq")}
        tensors[f"{name}.step"] = rows[0]["step"]
    return tensors


def digest(tensor):
    return hashlib.sha256(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def bytes_written(directory):
    """Bytes of each tensor of the model and its optimizer, added up over the files."""
    found, stored = Counter(), folder.committed(directory)[0]
    for shard in stored.manifest.shards:
        raw = (stored.path / shard.path).read_bytes()
        header = json.loads(raw[8 : 8 + struct.unpack("<Q", raw[:8])[0]])
        for key, entry in header.items():
            if key.startswith(("model.", "optimizer.")):
                begin, end = entry["data_offsets"]
                found[key.removeprefix("model.")] += end - begin
    return found


def frozen_files(directory):
    """How many files hold the frozen weights of all checkpoints, and how many names they have."""
    names = [path.stat().st_ino for path in directory.glob("step-*/frozen-*")]
    return len(set(names)), len(names)


def say(**what):
    told = [None] * dist.get_world_size()
    dist.all_gather_object(told, what)
    if dist.get_rank() == 0:
        print(json.dumps(what | {"same": all(one["same"] for one in told)}), flush=True)


def main(root):
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    ways, last = list(WAYS), {}
    for way in ways:
        run = Run(way, root / way, 0)
        losses = run.train(3)
        if way not in {"ddp", "fsdp2"}:  # test_torchrun.py does that
            run = Run(way, root / way, 1)
            losses += run.train(6)
            say(saved=way, read=way, same=losses == Run(way, root / f"{way}-whole", 0).train(6))
            files, names = frozen_files(root / way)
            say(saved=way, read="linked", same=0 < 2 * files == names)
        last[way] = run.digests()
        with torch.random.fork_rng():
            plain = Run.plain(0)
        sizes = {k: v.numel() * v.element_size() for k, v in plain.state_dict().items()}
        written = bytes_written(root / way)
        say(saved=way, read="once", same={k: written[k] for k in sizes} == sizes)
    for way, other in zip(ways, [*ways[2:], *ways[:2]], strict=True):
        run = Run(other, root / way, 2)
        say(saved=way, read=other, same=run.digests() == last[way])
        run.ckpt.finish()
    for name, own in (("alike", 0), ("split", dist.get_rank())):
        ckpt = Checkpointer(nn.Linear(1, 1), dir=root / name)
        for step, _ in ckpt.steps([torch.full((3,), own + number) for number in range(4)]):
            if step == 2:
                dist.barrier()  # by now every rank was given two
        say(saved=name, read="told", same=ckpt._course.watch is None)
    train_apart(root / "apart")
    dist.destroy_process_group()


def train_apart(directory):
    """A model whose head is outside of DDP, so that each rank trains its own."""
    torch.manual_seed(0)
    model, head = nn.parallel.DistributedDataParallel(nn.Linear(3, 3)), nn.Linear(3, 3)
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
    ckpt = Checkpointer(model, optimizer, dir=directory, head=head)
    head(model(torch.full((1, 3), 1.0 + dist.get_rank()))).square().sum().backward()
    optimizer.step()
    ckpt.step()
    ckpt.finish()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
