"""Train a step, save, export, and load the export into a fresh model by nothing but safetensors."""

import subprocess
import sys
import warnings
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

from vramfarm import Checkpointer

warnings.simplefilter("ignore")


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embed.weight
        self.odd = nn.Parameter(torch.randint(-(2**31), 2**31 - 1, (70_000,), dtype=torch.int32).view(torch.float32))

    def forward(self, x):
        return self.head(self.norm(self.embed(x)))


def same(a, b):
    if a.dtype == torch.bfloat16:  # which NaN, torch decides by the processor
        a, b = (torch.where(one.isnan(), torch.tensor(1.5, dtype=one.dtype), one) for one in (a, b))
    raw = [one.contiguous().reshape(-1).view(torch.uint8) for one in (a, b)]
    return a.dtype == b.dtype and torch.equal(*raw)


def main():
    torch.set_num_threads(1)
    model = Tied()
    compiled = torch.compile(model, backend="eager")
    optimizer = torch.optim.AdamW([model.embed.weight, *model.norm.parameters()])
    ckpt = Checkpointer(compiled, optimizer)
    compiled(torch.arange(50)).square().mean().backward()
    optimizer.step()
    ckpt.step()
    ckpt.finish()
    for folder, *more in (["f32"], ["bf16", "--dtype", "bf16"]):
        argv = [sys.executable, "-m", "runner", "checkpoints", "export", "checkpoints", "--to", folder, *more]
        subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)
    whole, half = (load_file(Path(name) / "model.safetensors") for name in ("f32", "bf16"))
    fresh = Tied()
    fresh.load_state_dict(whole)
    found = [all(same(a, b) for a, b in zip(fresh.state_dict().values(), model.state_dict().values(), strict=True))]
    wanted = {k: v.bfloat16() if v.dtype == torch.float32 else v for k, v in model.state_dict().items()}
    found += [wanted.keys() == half.keys() and all(same(half[k], v) for k, v in wanted.items())]
    sys.stdout.write(", ".join("equal" if one else "different" for one in found) + "\n")


if __name__ == "__main__":
    main()
