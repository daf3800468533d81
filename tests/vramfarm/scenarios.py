"""
Trainings made of features by chance, each played undisturbed and in pieces, and compared bit for bit.

    scenarios.py FOLDER FIRST_SEED SEEDS [--seconds S] [--jobs N] [--device cuda]

A seed chooses how a model is spread, its optimizers, objects, data, what happens between saves, and how each piece ends:
finished, left, crashed, or killed while a save is on its way. One process imports torch; every rank of every piece is a
fork of it. On cards, ranks share them by gloo; where a model is spread, which takes NCCL, there is one for each card. After so many seconds no further seed is begun. Prints one line of JSON for each seed that
has a fault, and at last how many seeds, pieces and saves there were, and what was left out.
"""

import argparse
import atexit
import contextlib
import gc
import hashlib
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import threading
import time
import traceback
import warnings
from collections import Counter, OrderedDict
from dataclasses import asdict, dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path

os.environ |= {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}  # the same sums; no card before a fork
import numpy as np
import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, WeightedRandomSampler

from benchmarks.side_by_side import parse_jobs, side_by_side
from tests.vramfarm.own_objects import Kept
from vramfarm import Checkpointer, folder
from vramfarm.loading import Reader
from vramfarm.protocol import Word

try:
    from torchdata.stateful_dataloader import StatefulDataLoader
except ImportError:
    StatefulDataLoader = None
warnings.simplefilter("ignore")
SAMPLES, BATCH = 24, 2
OBJECTS = (
    "same",
    "grows",
    "shrinks",
    "own",
    "later",
    "stops",
    "keys",
    "deep",
    "kinds",
    "average",
    "bits",
    "first",
    "last",
)
ENDS = ("finish", "leave", "crash", "kill", "kill-staged", "kill one")
RANKS = {"plain": (1,), "hsdp": (2, 4), "fsdp-tp": (2, 4)}  # how many there may be; else up to three
SHARDED = {"fsdp2", "fsdp1", "flat", "hsdp", "tp", "fsdp-tp"}
TENSOR = {"tp", "fsdp-tp"}
BY_TENSOR = {"first": ColwiseParallel(), "last": RowwiseParallel()}


@dataclass(frozen=True)
class Scenario:
    """One training. `parts`: ranks, the step at which a piece ends, how, and where it begins: at the newest, back at the oldest, or in a folder beside."""

    seed: int
    spread: str
    ranks: int
    steps: int
    accumulate: int
    optimizer: str
    second_every: int
    scheduler: bool
    scaler: bool
    norm: bool
    tied: bool
    odd: bool
    compiled: bool
    frozen_kb: int
    frozen_inside: bool
    ema: str
    clock: bool
    keep_last: int
    waits: bool
    trained_side: tuple[tuple[int, ...], ...]
    changes: tuple[tuple[int, str], ...]
    objects: tuple[str, ...]
    turn: int
    loader: str
    workers: int
    persistent: bool
    loop: str
    staging: str
    hide: bool
    to_none: bool
    asks: tuple[int, ...]
    trouble: tuple[tuple[int, str], ...]
    parts: tuple[tuple[int, int, str, str], ...]
    device: str = "cpu"


def choose(seed, num_cards=0):
    pick = random.Random(seed)
    spread = pick.choice(("plain", "ddp", "ddp", "fsdp2", "fsdp1", "flat", "hsdp", "tp", "fsdp-tp"))
    if num_cards == 1 and spread in SHARDED:
        spread = "ddp"
    numbers = RANKS.get(spread, (1, 2, 3))
    if num_cards and spread in SHARDED:
        numbers = [n for n in numbers if n <= num_cards]
    ranks, steps = pick.choice([n for n in numbers if n != 1] or numbers), pick.randint(10, 18)
    sharded, is_tensor = spread in SHARDED, spread in TENSOR
    cuts = sorted(pick.sample(range(2, steps), pick.randint(1, 3)))
    changes_ranks = pick.random() < 0.3
    parts = [
        (
            pick.choice(numbers) if changes_ranks else ranks,
            cut,
            pick.choice(ENDS),
            pick.choice(("newest", "newest", "newest", "back", "beside")),
        )
        for cut in cuts
    ]
    workers = pick.choice((0, 0, 0, 0, 0, 0, 1, 2))
    scaler, odd = not sharded and pick.random() < 0.3, pick.random() < 0.5
    return Scenario(
        seed=seed,
        device="cuda" if num_cards else "cpu",
        spread=spread,
        ranks=ranks,
        steps=steps,
        accumulate=pick.choice((1, 1, 2, 3)),
        optimizer=pick.choice(("adam", "fused", "foreach", "sgd", "late-momentum", "adagrad", "tensor-lr")),
        second_every=pick.choice((1, 1, 2, 3)),
        scheduler=pick.random() < 0.5,
        scaler=scaler and not (num_cards and odd),  # on a card it knows no gradients of bfloat16
        norm=not changes_ranks
        and (spread == "ddp" or ranks == 1),  # an odd rest of an epoch may be one sample, which it refuses
        tied=pick.random() < 0.3 and not is_tensor,
        odd=odd,
        compiled=pick.random() < 0.2 and not is_tensor,
        frozen_kb=pick.choice((0, 8, 700, 1500, 3000)),
        frozen_inside=pick.random() < 0.3 and spread != "flat" and not is_tensor,
        ema=pick.choice(("", "", "in place", "data")),
        clock=pick.random() < 0.2,
        keep_last=pick.choice((1, 2, 99, 99)),
        waits=pick.random() < 0.3,
        trained_side=tuple(
            tuple(s for s in range(steps) if (s + shift) // every % 2 == 0)
            for every, shift in ((pick.choice((3, 5, 30)), pick.randint(0, 5)) for _ in range(3))
        ),
        changes=tuple(
            (pick.randrange(steps), pick.choice(("in place", "data", "rebound", "caught", "validate", "one rank")))
            for _ in range(pick.randint(0, 4))
        ),
        objects=tuple(pick.sample(OBJECTS, pick.randint(0, 5))),
        turn=pick.randint(1, steps),
        loader=pick.choice(
            (
                "shuffled",
                "ordered",
                "distributed",
                "weighted",
                "stateful" if StatefulDataLoader else "distributed",
                "list",
            )
        ),
        workers=workers,
        persistent=workers > 0 and pick.random() < 0.5,
        loop=pick.choice(("max_steps", "epochs", "break", "own", "two", "left")),
        staging=pick.choice(("full", "full", "chunked")),
        hide=pick.random() < 0.7,
        to_none=pick.random() < 0.5,
        asks=tuple(sorted(pick.sample(range(steps), pick.randint(1, 5)))),
        trouble=tuple(
            (pick.randrange(steps), pick.choice(("full", "saver killed"))) for _ in range(pick.choice((0, 0, 0, 1, 2)))
        ),
        parts=(*parts, (ranks, steps, "finish", "newest")),
    )


@dataclass(frozen=True)
class Piece:
    """One start of it, in a folder: so many ranks, until a step, how it ends, and what it goes on from."""

    where: Path
    number: int
    ranks: int
    until: int
    end: str
    resume: str = "auto"

    def __str__(self):
        return f"{self.where.name}, piece {self.number} ({self.ranks} ranks until {self.until}, {self.end})"


# ------------------------------------------------------------------------------ a training


class Trunk(nn.Module):
    """What is spread."""

    def __init__(self, told):
        super().__init__()
        inner = 12 if told.spread in TENSOR else 7  # which a tensor is parallel by, even
        self.first = nn.Linear(5, inner)
        if told.norm:
            self.norm = nn.BatchNorm1d(7)
        self.drop = nn.Dropout(0.2)
        self.last = nn.Linear(inner, 5)
        if told.frozen_inside:
            self.base = nn.Parameter(torch.randn(7, 150_001), requires_grad=False)
        if told.tied:
            self.twin = nn.Linear(5, 7, bias=False)
            self.twin.weight = self.first.weight

    def forward(self, x):
        x = self.first(x)
        x = self.norm(x) if hasattr(self, "norm") else x
        x = self.drop(torch.relu(x))
        x = x + self.base[:, 3] if hasattr(self, "base") else x
        return self.last(x + self.twin(torch.ones(5, device=x.device)) if hasattr(self, "twin") else x)


class Net(nn.Module):
    """A trunk, layers beside it that come and go as trained ones, frozen weights, and tensors of all kinds."""

    def __init__(self, told):
        super().__init__()
        self.trunk = Trunk(told)
        self.side = nn.ModuleList(nn.Linear(5, 5, bias=n > 0) for n in range(3))
        rows = told.frozen_kb // 3
        self.frozen = nn.ParameterList(
            nn.Parameter(torch.randn(rows, 256), requires_grad=False) for _ in range(3 * (rows > 0))
        )
        if told.odd:
            self.scale = nn.Parameter(torch.tensor(1.5))
            self.gain = nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
            self.nothing = nn.Parameter(torch.zeros(0, 3), requires_grad=False)
            self.register_buffer("count", torch.tensor(3))
            self.register_buffer("low", torch.ones(3, dtype=torch.float16))
            self.register_buffer("mask", torch.tensor([True, False]))
            self.register_buffer("none", torch.zeros(2, 0, dtype=torch.int32))
            self.register_buffer("turned", torch.randn(4, 6).t())

    def forward(self, x):
        x = self.trunk(x)
        for one in self.side:
            x = x + one(x)
        for one in self.frozen:
            x = x + one[0, :5]
        return x * self.scale * self.gain.float().mean() + self.count if hasattr(self, "scale") else x


class Pairs:
    """Batches of a kind of their own, which know how far they are in an epoch only."""

    def __init__(self, rank):
        self.rank = rank

    def __iter__(self):
        for n in range(4 + self.rank // 9):
            ids = (torch.tensor([2 * n, 2 * n + 1]) + 8 * self.rank) % SAMPLES
            yield ids, samples()[ids]


def samples():
    return torch.arange(SAMPLES * 5.0).reshape(SAMPLES, 5).sin()


def loader_of(told, rank, ranks):
    data = TensorDataset(torch.arange(SAMPLES), samples())
    more = {"batch_size": BATCH, "num_workers": told.workers, "persistent_workers": told.persistent}
    match told.loader:
        case "shuffled":
            return DataLoader(data, shuffle=True, **more)
        case "ordered":
            return DataLoader(data, **more)
        case "distributed":
            return DataLoader(data, sampler=DistributedSampler(data, ranks, rank, seed=3), **more)
        case "weighted":
            return DataLoader(data, sampler=WeightedRandomSampler(torch.arange(1.0, SAMPLES + 1), 12), **more)
        case "stateful":
            return StatefulDataLoader(data, sampler=DistributedSampler(data, ranks, rank), **more)
    return Pairs(rank)


def object_of(kind, told, rank, step, net):
    """The state that an object of this kind has after so many steps."""
    differs = {"own": True, "later": step >= told.turn, "stops": step < told.turn}
    mine = rank if differs.get(kind) else 0
    by_kind = {
        "same": lambda: {"at": step, "values": torch.full((3,), float(step))},
        "grows": lambda: {"seen": np.arange(step * 5000.0), "n": [step] * step},
        "shrinks": lambda: {"seen": torch.arange(70_000 - 3_000 * step), "empty": torch.zeros(0)},
        "keys": lambda: {f"k{step % 3}": torch.tensor(step), **({"large": torch.ones(300_000)} if step % 2 else {})},
        "deep": lambda: OrderedDict(
            a=({1: torch.ones(2), "x": float("nan")}, [np.float32(step)]), b=Counter(u=step), c={3, 4}, d=b"x"
        ),
        "kinds": lambda: {"it": [torch.ones(step, 2), step, np.full((2, 40_000), step, "i4"), None][step % 4]},
        "average": lambda: {"of": {n: p.detach().clone() for n, p in net.named_parameters() if p.requires_grad}},
        "bits": lambda: {"a": torch.tensor([step], dtype=torch.uint8), "b": torch.ones(3, dtype=torch.bfloat16) * step},
    }
    others = {"seen": torch.full((1 + mine * 30_000,), float(mine)), "at": step} | ({"who": mine} if mine else {})
    return by_kind.get(kind, lambda: others)()


def ema_of(net):
    """An average that is a module: it wants no gradients, and is changed all the same."""
    weights = {
        f"side{n}": nn.Parameter(one.weight.detach().clone(), requires_grad=False) for n, one in enumerate(net.side)
    }
    return nn.ParameterDict(
        {**weights, "large": nn.Parameter(net.side[0].weight.new_zeros(700_000), requires_grad=False)}
    )


def optimizer_of(kind, parameters):
    parameters = list(parameters)
    groups = [{"params": parameters[:1], "lr": 0.05}, {"params": parameters[1:]}]
    match kind:
        case "adam":
            return torch.optim.Adam(groups, lr=0.02)
        case "fused":
            return torch.optim.AdamW(groups, lr=0.02, fused=True)
        case "foreach":
            return torch.optim.AdamW(groups, lr=0.02, foreach=True, amsgrad=True)
        case "adagrad":
            return torch.optim.Adagrad(groups, lr=0.02)
        case "tensor-lr":
            return torch.optim.Adam(parameters, lr=torch.tensor(0.02))
    return torch.optim.SGD(groups, lr=0.02, momentum=0.9 if kind == "sgd" else 0)


def place(told, rank):
    """Where a rank trains; several share a card where there are too few."""
    if told.device == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def same_data(told, ranks):
    """How many ranks, side by side, see the same data."""
    return {"tp": ranks, "fsdp-tp": 2}.get(told.spread, 1)


def spread_out(told, net, device):
    if not dist.is_initialized():
        return
    match told.spread:
        case "ddp":
            # Else its second step has other buckets than the first, in which three ranks' gradients are added up in another order.
            net.trunk = nn.parallel.DistributedDataParallel(net.trunk, find_unused_parameters=True)
        case "fsdp2":
            mesh = init_device_mesh(device.type, (dist.get_world_size(),))
            if not told.tied:
                fully_shard(net.trunk.first, mesh=mesh)
            fully_shard(net.trunk, mesh=mesh)
        case "hsdp":
            fully_shard(net.trunk, mesh=two_ways(device, "replicate", "shard"))
        case "tp":
            parallelize_module(net.trunk, init_device_mesh(device.type, (dist.get_world_size(),)), BY_TENSOR)
        case "fsdp-tp":
            mesh = two_ways(device, "data", "tensor")
            parallelize_module(net.trunk, mesh["tensor"], BY_TENSOR)
            fully_shard(net.trunk, mesh=mesh["data"])
        case "fsdp1" | "flat":
            net.trunk = FullyShardedDataParallel(net.trunk, use_orig_params=told.spread == "fsdp1", device_id=device)


def two_ways(device, *names):
    return init_device_mesh(device.type, (dist.get_world_size() // 2, 2), mesh_dim_names=names)


class Play:
    """One rank of one piece. What it says, line by line, is what each step left behind."""

    def __init__(self, told, piece, rank, out):
        self.told, self.rank, self.out = told, rank, out
        self.ranks, self.until, self.end = piece.ranks, piece.until, piece.end
        torch.manual_seed(told.seed)
        self.device = place(told, rank)
        self.net = net = Net(told).to(self.device)
        spread_out(told, net, self.device)
        torch.manual_seed(1000 * told.seed + rank)
        random.seed(rank)
        np.random.seed(rank)  # noqa: NPY002  # what is saved is the generator that scripts use by default
        trunk = list(dict.fromkeys(net.trunk.parameters()))
        beside = [*net.side.parameters(), *([net.scale, net.gain] if told.odd else [])]
        second = "foreach" if told.optimizer == "tensor-lr" else told.optimizer
        self.optimizers = [optimizer_of(told.optimizer, trunk), optimizer_of(second, beside)]
        self.reduced = [] if told.spread == "plain" else trunk
        things = {}
        if told.scheduler and told.optimizer != "tensor-lr":
            things["scheduler"] = torch.optim.lr_scheduler.StepLR(self.optimizers[0], 3, 0.5)
        self.scaler = torch.amp.GradScaler(told.device, init_scale=4.0, growth_interval=3) if told.scaler else None
        self.ema = ema_of(net) if told.ema else None
        elsewhere = {"first": rank > 0, "last": rank < piece.ranks - 1}  # some keep an average on one rank only
        kinds = [kind for kind in told.objects if not elsewhere.get(kind)]
        self.kept = {kind: Kept(object_of(kind, told, rank, 0, net)) for kind in kinds}
        self.things = things
        same = same_data(told, piece.ranks)
        data = rank // same, piece.ranks // same
        self.loader, self.other = (loader_of(told, *data) for _ in range(2))
        model = torch.compile(net, backend="eager") if told.compiled else net
        self.ckpt = Checkpointer(
            model,
            self.optimizers,
            dir=piece.where / "checkpoints",
            resume=piece.resume,
            data_parallel=data if same > 1 or told.spread in TENSOR else None,
            keep_last=told.keep_last,
            save_interval=0.05 if told.clock else "1h",
            ema=self.ema,
            loader=self.loader if told.loop != "own" else None,
            hide_copies=told.hide,
            staging=told.staging,
            scaler=self.scaler,
            **things,
            **self.kept,
        )
        self.ids = []
        self.say(start=self.ckpt.start_step, restored=self.ckpt.restored, digests=self.digests())

    def say(self, **what):
        self.out.write(json.dumps(what) + "\n")
        self.out.flush()

    # ------------------------------------------------------------------------------ steps

    def run(self):
        try:
            self.loop()
        finally:
            page = self.ckpt._seat.page
            self.say(
                committed=page[Word.NUM_COMMITTED],
                failed=page[Word.NUM_FAILED],
                asked=page[Word.REQUEST_SAVE],
                error=page.error(),
            )

    def loop(self):
        match self.told.loop:
            case "own":
                self.loop_of_its_own()
            case "epochs":
                self.loop_by_epochs()
            case "two":
                self.loop_by_turns()
            case "left":
                self.loop_that_is_left()
            case _:
                self.loop_by_steps()

    def loop_of_its_own(self):
        for step in range(self.ckpt.start_step, self.until):
            for n in range(self.told.accumulate):
                self.micro(
                    step, torch.tensor([n]), torch.randn(2, 5, device=self.device), n == self.told.accumulate - 1
                )
            self.ckpt.step()
        if self.end == "finish":
            self.ckpt.finish()

    def loop_by_epochs(self):
        told, ckpt, epoch = self.told, self.ckpt, 0
        while ckpt.start_step < self.until:
            epoch += 1
            for step, (ids, x) in ckpt.steps(
                epochs=epoch, max_steps=self.until, accumulate=told.accumulate, finish=False
            ):
                self.micro(step, ids, x, ckpt.last_micro_batch)
            if ckpt.start_step < self.until:
                self.validate()
        if self.end == "finish":
            ckpt.finish()

    def loop_by_steps(self):
        """With a `break` where nothing else ends it."""
        told, ckpt, finishes = self.told, self.ckpt, self.end == "finish"
        limit = {"max_steps": self.until} if finishes or told.loop == "max_steps" else {"epochs": 1000}
        for step, (ids, x) in ckpt.steps(accumulate=told.accumulate, finish=finishes, **limit):
            self.micro(step, ids, x, ckpt.last_micro_batch)
            if step + 1 >= self.until and ckpt.last_micro_batch and "epochs" in limit:
                break

    def loop_by_turns(self):
        """Two loaders, three steps each."""
        ckpt = self.ckpt
        while ckpt.start_step < self.until:
            turn = ckpt.start_step // 3
            until = min(self.until, 3 * turn + 3)
            for step, (ids, x) in ckpt.steps(
                (self.loader, self.other)[turn % 2], max_steps=until, accumulate=self.told.accumulate, finish=False
            ):
                self.micro(step, ids, x, ckpt.last_micro_batch)
            self.ids = []  # what was left of an accumulation comes again
        if self.end == "finish":
            ckpt.finish()

    def loop_that_is_left(self):
        """Before the step is made: its samples come again."""
        ckpt, told = self.ckpt, self.told
        was_left = False
        while ckpt.start_step < self.until:
            for step, (ids, x) in ckpt.steps(max_steps=self.until, accumulate=told.accumulate, finish=False):
                if step == told.turn and not was_left:
                    was_left = True
                    break
                self.micro(step, ids, x, ckpt.last_micro_batch)
            self.ids = []
        if self.end == "finish":
            ckpt.finish()

    def validate(self):
        self.net.eval()
        with torch.no_grad():
            self.net(torch.randn(3, 5, device=self.device))
        self.net.train()

    def micro(self, step, ids, x, is_last):
        told = self.told
        if not self.ids:
            self.begin(step)
        self.ids.append([self.ckpt._position.epoch, *ids.tolist()])
        loss = self.net(x.to(self.device)).square().mean() / told.accumulate
        if self.scaler is not None:
            loss = self.scaler.scale(loss) * (float("inf") if step % 5 == 3 else 1)
        loss.backward()
        if is_last:
            self.make(step)
            self.say(step=step + 1, loss=loss.item().hex(), ids=self.ids, digests=self.digests(), rng=self.rng())
            self.ids = []
            self.disturb(step)

    def begin(self, step):
        """What the script does before a step, by the number of the step alone."""
        told, net = self.told, self.net
        for side, trained in zip(net.side, told.trained_side, strict=True):
            side.requires_grad_(step in trained)
        if not any(one.requires_grad for side in net.side for one in side.parameters()) and not told.odd:
            net.side[0].requires_grad_(True)
        for at, what in told.changes:
            if at == step:
                self.change(what)
        if told.optimizer == "late-momentum" and step >= told.turn:
            for group in (group for one in self.optimizers for group in one.param_groups):
                group["momentum"] = 0.9

    def change(self, what):
        target = self.net.frozen[-1] if len(self.net.frozen) else self.net.side[2].weight
        match what:
            case "in place":
                with torch.no_grad():
                    target.add_(1)
            case "data":
                target.data.mul_(2)
            case "rebound":
                target.data = target.data + 1
            case "one rank":
                if self.rank == 0:
                    target.data.mul_(1)  # counted by nobody, and nothing changes
            case "caught":
                with contextlib.suppress(ValueError):
                    int("none")
            case "validate":
                self.validate()

    def make(self, step):
        told = self.told
        self.average()
        for number, one in enumerate(self.optimizers):
            if number and step % told.second_every:
                continue
            if self.scaler is None:
                one.step()
            elif any(p.grad is not None for g in one.param_groups for p in g["params"]):
                self.scaler.step(one)
        if self.scaler is not None:
            self.scaler.update()
        for one in self.optimizers:
            one.zero_grad(set_to_none=told.to_none or bool(told.trained_side))
        for thing in self.things.values():
            thing.step()
        self.blend()
        for kind, kept in self.kept.items():
            kept.state = object_of(kind, told, self.rank, step + 1, self.net)

    def blend(self):
        """The average that is a module, in one of the two ways that are usual."""
        for n, side in enumerate(self.net.side if self.ema is not None else ()):
            now = self.ema[f"side{n}"]
            with torch.no_grad():
                (now if self.told.ema == "in place" else now.data).lerp_(side.weight, 0.1)

    def average(self):
        """The gradients of all that no wrapper sees to."""
        reduced = set(map(id, self.reduced))
        for one in self.net.parameters() if self.ranks > 1 else ():
            if one.grad is not None and id(one) not in reduced:
                dist.all_reduce(one.grad)
                one.grad /= self.ranks

    def disturb(self, step):
        """Ask for saves, and end as this piece is to end."""
        if step in self.told.asks:
            self.ckpt.save() if self.rank == 0 else None
        if self.told.waits and step - 2 in self.told.asks:
            self.ckpt.wait(10)
        time.sleep(0.01)
        if self.rank == 0:
            self.make_trouble(step)
        kills = self.end == "kill-staged" and step + 1 >= self.until - 3 and self.ckpt._seat.is_pending()
        dies = self.end in {"kill", "kill-staged"} or (self.end == "kill one" and self.rank == self.ranks - 1)
        if kills or (dies and step + 1 >= self.until):
            os.kill(os.getpid(), signal.SIGKILL)
        if self.end == "crash" and step + 1 >= self.until:
            raise SystemError("crash")

    def make_trouble(self, step):
        """The saver dies, or nothing more fits on its disk, for three steps at most and never at the end."""
        for at, what in self.told.trouble:
            if what == "saver killed" and at == step:
                self.to_saver(lambda pid: os.kill(pid, signal.SIGKILL))
            elif what == "full" and at <= step < at + 3:
                self.to_saver(lambda pid: resource.prlimit(pid, resource.RLIMIT_FSIZE, (8192, -1)))
        full = any(what == "full" and at <= step < at + 3 for at, what in self.told.trouble)
        if not full or step + 1 >= self.until:
            self.to_saver(lambda pid: resource.prlimit(pid, resource.RLIMIT_FSIZE, (-1, -1)))

    def to_saver(self, act):
        if pid := self.ckpt._seat.page[Word.SAVER_PID]:
            with contextlib.suppress(ProcessLookupError):
                act(pid)

    # ------------------------------------------------------------------------- what there is

    def digests(self):
        found, names = {}, {}
        for name, one in [*self.net.named_parameters(remove_duplicate=False), *self.net.named_buffers()]:
            clean = (
                name.replace("trunk.module.", "trunk.").replace("_fsdp_wrapped_module.", "").replace("_orig_mod.", "")
            )
            names.setdefault(id(one), clean)
            local = isinstance(self.net.trunk, FullyShardedDataParallel) and clean.startswith("trunk.")
            found[f"{'local' if local else 'model'}.{clean}"] = digest(one)
        for number, optimizer in enumerate(self.optimizers):
            prefix = f"optimizer{'_2' * number}"
            for parameter, state in optimizer.state.items():
                name = names[id(parameter)]
                local = isinstance(self.net.trunk, FullyShardedDataParallel) and name.startswith("trunk.")
                for key, value in state.items() if parameter.numel() or not local else ():
                    found[f"{'local.' * local}{prefix}.state.{name}.{key}"] = digest(value)
            groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
            found[f"groups.{number}"] = digest(groups)
        objects = {**self.things, **self.kept, **({"scaler": self.scaler} if self.scaler else {})}
        if self.ema is not None:
            found |= {f"ema.{n}": digest(one) for n, one in self.ema.items()}
        return found | {f"object.{n}": digest(thing.state_dict()) for n, thing in objects.items()}

    def rng(self):
        card = [torch.cuda.get_rng_state()] if self.device.type == "cuda" else []
        return digest([torch.get_rng_state(), *card, repr(random.getstate()), np.random.get_state()[1]])  # noqa: NPY002  # see above


def digest(value):
    found = hashlib.sha256()
    for part in parts_of(value):
        found.update(part)
    return found.hexdigest()[:12]


def parts_of(value):
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if isinstance(value, torch.Tensor):
        yield f"{tuple(value.shape)}{value.dtype}".encode()
        yield value.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes()
    elif isinstance(value, np.ndarray):
        yield f"{value.shape}{value.dtype}".encode()
        yield value.tobytes()
    elif isinstance(value, dict):
        yield type(value).__name__.encode()
        for key, inner in value.items():
            yield repr(key).encode()
            yield from parts_of(inner)
    elif isinstance(value, list | tuple):
        yield type(value).__name__.encode()
        for inner in value:
            yield from parts_of(inner)
    else:
        yield f"{type(value).__name__}{value!r}".encode()


# -------------------------------------------------------------------------- processes


def fork(job, out):
    """Start a process that does this and ends as a script ends. Return its number; in the process itself, never return."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    fd = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    code = 0
    try:
        job()
    except BaseException:  # noqa: BLE001  # a process ends here, as it would
        code, sys.last_value = 1, sys.exc_info()[1]
        sys.excepthook(*sys.exc_info())
    threading._shutdown()
    atexit._run_exitfuncs()  # as an interpreter ends, but for what it takes apart then: half of a piece's time
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def wait_for(pids, limit_s):
    """Return their exit codes. When one dies of a signal the others follow soon."""
    codes, until = {}, time.monotonic() + limit_s
    while len(codes) < len(pids):
        for pid in [one for one in pids if one not in codes]:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[pid] = os.waitstatus_to_exitcode(status)
                if codes[pid]:
                    until = min(until, time.monotonic() + 20)
        if time.monotonic() > until:
            for pid in [one for one in pids if one not in codes]:
                os.kill(pid, signal.SIGKILL)
            until = time.monotonic() + 60
        time.sleep(0.01)
    return [codes[pid] for pid in pids]


def rank_of(told, piece, rank):
    def job():
        if piece.ranks > 1 or told.spread in SHARDED:
            store = f"file://{piece.where}/store.{piece.number}"
            backend = "cpu:gloo,cuda:nccl" if told.device == "cuda" and told.spread in SHARDED else "gloo"
            dist.init_process_group(backend, init_method=store, rank=rank, world_size=piece.ranks)
        with (piece.where / f"out.{piece.number}.{rank}").open("a") as out:
            Play(told, piece, rank, out).run()
        if dist.is_initialized() and piece.end == "finish":
            dist.destroy_process_group()

    return job


def lines_of(piece):
    """Return what each rank said; of one that was killed without its last, half a line."""
    texts = [(piece.where / f"out.{piece.number}.{rank}").read_text() for rank in range(piece.ranks)]
    return [[json.loads(line) for line in text.splitlines() if line.endswith("}")] for text in texts]


class Faults(list):
    def expect(self, what, wanted, got):
        if wanted != got:
            self.append(f"{what}: expected {str(wanted)[:300]}, got {str(got)[:300]}")


# ------------------------------------------------------------------------------- what must hold


class Story:
    """What the pieces of a training did, beside one that was not disturbed."""

    def __init__(self, told, root, counted):
        self.told, self.root, self.counted, self.faults = told, root, counted, Faults()
        self.made, self.path = {}, {}  # by step: what each rank said of it, at last; the samples of those that count
        self.stored = {}  # by the name of a checkpoint: what each rank said of its step
        self.last, self.is_same = 0, True  # committed; no other number of ranks was there yet
        self.whole = []

    def play(self):
        told = self.told
        whole = self.start(Piece(self.root / "whole", 0, told.ranks, told.steps, "finish"))
        self.whole = [{line["step"]: line for line in lines if "step" in line} for lines in whole or []]
        where = self.root / "pieces"
        for number, (ranks, until, end, begins) in enumerate(told.parts):
            found = folder.committed(where / "checkpoints") if begins != "newest" else []
            resume = found[-1] if found else None
            where = self.root / f"beside-{number}" if found and begins == "beside" else where
            piece = Piece(where, number, ranks, until, end, str(resume.path) if resume else "auto")
            self.last = resume.manifest.step if resume else self.last
            lines = None if self.faults else self.start(piece)
            if lines is not None:
                self.look_at(piece, lines)
        if told.loop in {"max_steps", "epochs", "break", "left"} and told.loader in {
            "shuffled",
            "ordered",
            "distributed",
        }:
            self.expect_each_sample_once()
        return self.faults

    def start(self, piece):
        """Return what its ranks said; None where it did not do what it was to do."""
        piece.where.mkdir(parents=True, exist_ok=True)
        log = piece.where / f"log.{piece.number}"
        codes = wait_for([fork(rank_of(self.told, piece, rank), log) for rank in range(piece.ranks)], 120)
        self.counted["pieces"] += 1
        lines = lines_of(piece)
        if not all(lines) or (piece.end in {"finish", "leave"} and any(codes)):
            errors = [
                line for line in log.read_text(errors="replace").splitlines() if "Error" in line or "vramfarm" in line
            ]
            self.faults.append(f"{piece}: exit codes {codes}: {errors[-4:]}")
            return None
        for end in (line for line in lines[0] if "committed" in line):
            self.counted.update(committed=end["committed"], failed=end["failed"])
            if end["failed"] > end["committed"] + 4:
                self.faults.append(f"{piece}: {end['failed']} saves failed, {end['committed']} did not: {end['error']}")
        return lines

    def look_at(self, piece, lines):
        begin = lines[0][0]["start"]
        if begin < self.last:
            self.faults.append(f"{piece}: begins at step {begin}, and {self.last} was committed")
        if begin:
            self.expect_given_back(piece, lines, self.stored.get(lines[0][0]["restored"], self.made.get(begin)))
        self.is_same = self.is_same and piece.ranks == self.told.ranks
        self.path = {step: ids for step, ids in self.path.items() if step <= begin}
        for step in sorted({line["step"] for several in lines for line in several if "step" in line}):
            of_each = [next((one for one in several if one.get("step") == step), None) for several in lines]
            self.made[step] = of_each
            different_data = of_each[:: same_data(self.told, piece.ranks)]
            self.path[step] = [ids for one in different_data if one for ids in one["ids"]]
            self.expect_undisturbed(piece, step, of_each)
        stored = folder.committed(piece.where / "checkpoints")
        self.last = stored[0].manifest.step if stored else 0
        for one in stored:
            self.stored.setdefault(one.path.name, self.made[one.manifest.step])
        if piece.end in {"finish", "leave"}:
            self.faults.expect(f"{piece}: the last that was committed", piece.until, self.last)
        self.verify(piece)

    def expect_given_back(self, piece, lines, before):
        """What it begins with is what the step left behind that it goes on from, on this rank where each has its own."""
        if before is None:
            self.faults.append(f"{piece}: goes on from a step that no rank made")
            return
        for rank, several in enumerate(lines):
            now, first, then = several[0]["digests"], before[0]["digests"], before[rank % len(before)]["digests"]
            own = ("object.", "local.") if piece.ranks == len(before) else ("object.",)
            wanted = {k: v for k, v in first.items() if not k.startswith(("object.", "local."))}
            wanted |= {k: v for k, v in then.items() if k.startswith(own) and (k in now or piece.ranks == len(before))}
            given = {
                k: v
                for k, v in now.items()
                if piece.ranks == len(before) or not k.startswith(("local.", "object.last"))
            }
            wanted.pop("object.last", None) if piece.ranks != len(before) else None
            if wrong := different(wanted, given):
                self.faults.append(f"{piece}: rank {rank} was given back something else: {wrong[:6]}")

    def expect_undisturbed(self, piece, step, of_each):
        for rank, (line, known) in enumerate(zip(of_each, self.whole, strict=False)):
            if line is None or not self.is_same or self.faults:
                continue
            wrong = [k for k in ("loss", "ids", "rng") if line[k] != known[step][k]]
            wrong += different(line["digests"], known[step]["digests"])
            wrong = [k for k in wrong if rank == 0 or ".norm." not in k]  # buffers are rank 0's
            if wrong:
                self.faults.append(f"{piece}: rank {rank}, step {step} is not as in the undisturbed run: {wrong[:6]}")

    def verify(self, piece):
        """In a process of its own: all bytes are what was written, and torch's own reader sees the same."""
        out, checkpoints = piece.where / f"verified.{piece.number}", piece.where / "checkpoints"

        def job():
            found = []
            for stored in folder.committed(checkpoints):
                if (line := self.stored[stored.path.name][0]) is not None:
                    found += [f"step {stored.manifest.step}: {one}" for one in unlike(stored, line["digests"])]
            out.write_text(json.dumps(found))

        log = piece.where / f"log.verify.{piece.number}"
        codes = wait_for([fork(job, log)], 60)
        self.faults.expect(f"{piece}: verify", ([0], ""), (codes, log.read_text()[-300:]))
        if out.exists() and (found := json.loads(out.read_text())):
            self.faults.append(f"{piece}: {found[:4]}")

    def expect_each_sample_once(self):
        """None is left out of an epoch, and none comes twice but those that fill the last batch."""
        epochs = {}
        for step in sorted(self.path):
            for epoch, *ids in self.path[step]:
                epochs.setdefault(epoch, []).extend(ids)
        for epoch, ids in epochs.items():
            again = [i for i, times in Counter(ids).items() if times > 1]
            if len(again) > 2 or (epoch < max(epochs) and len(set(ids)) != SAMPLES):
                self.faults.append(f"epoch {epoch}: {len(set(ids))} of {SAMPLES} samples, these came again: {again}")


def different(a, b):
    return sorted(k for k in a.keys() | b.keys() if a.get(k) != b.get(k))


def unlike(stored, digests):
    """Yield what a checkpoint has, and torch's reader reads, otherwise than the rank had it."""
    reader = Reader(stored)
    mine = {key: reader.whole(key) for key in reader.keys}
    reader.flush()
    wanted = {k: v for k, v in digests.items() if k.startswith(("model.", "optimizer", "ema."))}
    by_torch = {key: torch.zeros_like(mine[key]) for key in wanted.keys() & mine.keys()}
    dcp.load(by_torch, storage_reader=HuggingFaceStorageReader(str(stored.path)), no_dist=True)
    for key, known in wanted.items():
        if key not in mine:
            yield f"{key} is not there"
        elif digest(mine[key]) != known:
            yield f"{key} is another"
        elif digest(by_torch[key]) != known:
            yield f"{key} is another to torch"


def play(options, seed):
    """In a process of its own: what its pieces came to, and what was wrong."""
    told, where, counted = choose(seed, options.num_cards), options.folder / f"seed-{seed}", Counter()
    shutil.rmtree(where, ignore_errors=True)
    try:
        faults = Story(told, where, counted).play()
    except Exception:  # noqa: BLE001  # it is told with its seed
        faults = [traceback.format_exc()]
    if not faults:
        shutil.rmtree(where, ignore_errors=True)
    return {"counted": counted, "faults": faults, "scenario": asdict(told)}


def count_cards():
    """In a fork: a process that has looked cannot be forked and train."""
    with multiprocessing.get_context("fork").Pool(1) as other:
        return other.apply(torch.cuda.device_count)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("first", type=int)
    parser.add_argument("seeds", type=int)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--jobs", type=parse_jobs, default=1)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    until = time.monotonic() + options.seconds
    options.num_cards = count_cards() if options.device == "cuda" else 0
    if options.device == "cuda" and not options.num_cards:
        parser.error("--device cuda: no card here")
    torch.set_num_threads(1)
    gc.freeze()  # or each fork's collector would copy all of torch
    counted = Counter(faulty=0, seeds=0)
    seeds = takewhile(lambda _: time.monotonic() < until, range(options.first, options.first + options.seeds))
    for seed, end in side_by_side(partial(play, options), seeds, options.jobs):
        told = end or {"counted": {}, "faults": ["its process died"]}
        counted.update({"seeds": 1, "faulty": bool(told["faults"]), **told["counted"]})
        if told["faults"]:
            print(json.dumps({"seed": seed, **told}), flush=True)
    left_out = [] if StatefulDataLoader else ["StatefulDataLoader: no torchdata"]
    print(json.dumps({**counted, "left_out": left_out}), flush=True)
    return bool(counted["faulty"])


if __name__ == "__main__":
    sys.exit(main())
