"""
What is saved equals the tensors at the save's step, bit for bit, while training goes on at full speed.

    torchrun --nproc-per-node 2 benchmarks/gpu/check_bytes.py FOLDER

Each case trains with almost no work between two optimizer steps, so a copy that is not protected is torn: the last
case takes the protection away, and must go wrong for the others to mean anything.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from vramfarm import Checkpointer, copies, folder, staging
from vramfarm.loading import Reader
from vramfarm.protocol import Word

DIM, LAYERS = 2048, 6
STEPS = 60


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, 2 * DIM) for _ in range(LAYERS))
        self.norm = nn.BatchNorm1d(2 * DIM)
        self.gain = nn.Parameter(torch.ones(3, 5).t())  # with holes in memory

    def forward(self, x):
        total = sum(layer(x) for layer in self.layers)
        return self.norm(total) * self.gain.sum()


def tensors(model, optimizer, more=()):
    """Everything that a save must hold, by its name there: this rank's part."""
    found = {f"model.{n}": t for n, t in model.state_dict().items()}
    names = {id(p): n for n, p in model.named_parameters()}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            found[f"optimizer.state.{names[id(parameter)]}.{key}"] = value
    for name, module in more:
        found |= {f"{name}.{n}": t for n, t in module.state_dict().items()}
    return found


def copy_of(found):
    return {k: staging.local_of(t).clone() for k, t in found.items()}


def differences(stored, history, live):
    """Names of tensors that are not what they were at the checkpoint's step."""
    reader, then = Reader(stored), history[stored.manifest.step]
    wrong = []
    for key, tensor in live.items():
        name = key.replace("_orig_mod.", "")
        read = torch.empty_like(staging.local_of(tensor))
        reader.read_into(name, read, staging.local_box(tensor)[1])
        reader.flush()
        if not torch.equal(read, then[key]):
            wrong.append(name)
    return wrong


def train(
    path,
    *,
    shard=False,
    compiled=False,
    accumulate=1,
    kind="foreach",
    between=None,
    average=False,
    sabotage=False,
):
    torch.manual_seed(0)
    model = Net().cuda()
    if shard:
        model.gain = nn.Parameter(torch.ones(5))
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
    bare = model
    if compiled:
        model = torch.compile(model)
    optimizer = torch.optim.AdamW(bare.parameters(), lr=1e-3, **{kind: True})
    ema = torch.optim.swa_utils.AveragedModel(bare) if average else None
    ckpt = Checkpointer(model, optimizer, ema=ema, dir=path, save_interval="24h", keep_last=50)
    if sabotage:
        unprotect(ckpt._copier, optimizer)
    history = {}
    page = ckpt._seat.page
    x = torch.randn(64, DIM, device="cuda")
    asked = 0
    more = [("ema", ema)] if average else []
    while ckpt.start_step < STEPS:
        for _ in range(accumulate):
            model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if average:
            ema.update_parameters(bare)
        live = tensors(bare, optimizer, more)
        history[ckpt.start_step + 1] = copy_of(live)
        ckpt.step()
        if between:
            between(bare, ckpt.start_step)
        if ckpt._is_warm and asked < 12:
            ckpt.save()  # again and again: while one is written, too
            asked += 1
        if not ckpt._seat.is_copying():
            time.sleep(0.06)  # let the writer get on, but never between a save and the next optimizer's step
        for step in [s for s in history if s < ckpt.start_step - 14]:
            if step not in {s.manifest.step for s in folder.committed(path)} and step != page[Word.SAVING_STEP]:
                del history[step]
    ckpt.wait()
    failed = page[Word.NUM_FAILED]
    said = page.error()
    ckpt.finish()
    wrong = [
        (s.manifest.step, differences(s, history, live)) for s in folder.committed(path) if s.manifest.step in history
    ]
    hidden = ckpt._copier._hide
    return {"checked": len(wrong), "wrong": [w for w in wrong if w[1]], "failed": failed, "said": said, "hide": hidden}


def unprotect(copier, optimizer):
    """The optimizer is no longer held back, and nobody looks whether it should have been."""

    def hook(*_):
        copier._steps_now = True
        if copier.idle is not None:
            copier.idle("before")

    for key in list(optimizer._optimizer_step_pre_hooks):
        optimizer._optimizer_step_pre_hooks[key] = hook
    copies._Copy._check = lambda _: True


def clamp(model, _):
    with torch.no_grad():
        for layer in model.layers:
            layer.weight.clamp_(-0.05, 0.05)


def exchange(model, step):
    if step % 3 == 0:
        for layer in model.layers:
            layer.weight.data = layer.weight.data.clone()


CASES = {
    "foreach": {},
    "fused": {"kind": "fused"},
    "capturable": {"kind": "capturable"},
    "fsdp2": {"shard": True},
    "fsdp2 fused compiled": {"shard": True, "kind": "fused", "compiled": True},
    "compiled, accumulated": {"compiled": True, "accumulate": 3},
    "average": {"average": True},
    "data exchanged": {"between": exchange},
    "weights clamped outside the optimizer": {"between": clamp},
    "no protection": {"sabotage": True},
}


def main():
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl")
    for name, options in CASES.items():
        try:
            found = train(Path(sys.argv[1]) / name.replace(" ", "-"), **options)
        except Exception as error:  # noqa: BLE001  # the other cases count, too
            import traceback

            traceback.print_exc()
            found = repr(error)[:300]
        print(f"rank {rank}: {name}: {found}", flush=True)
        dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
