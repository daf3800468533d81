"""
A small GPT learns Python: bytes of the standard library's own source files.

    torchrun --nproc-per-node 2 train.py --steps 400

Plain PyTorch, and three lines of vramfarm (marked). Kill it at any moment and start it again:
it goes on from its last checkpoint, and ends with the same loss to the last digit.
"""

import argparse
import os
import sysconfig
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from vramfarm import Checkpointer  # 1


class Bytes(Dataset):
    def __init__(self, context: int) -> None:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        self.text = torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8)
        self.context = context

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.context

    def __getitem__(self, i: int) -> Tensor:
        return self.text[i * self.context : (i + 1) * self.context + 1].long()


class GPT(nn.Module):
    def __init__(self, context: int, layers: int, dim: int) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(256, dim), nn.Embedding(context, dim)
        block = nn.TransformerEncoderLayer(
            dim, dim // 32, 4 * dim, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, layers, nn.LayerNorm(dim), enable_nested_tensor=False)
        self.head = nn.Linear(dim, 256)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        return self.head(self.blocks(self.token(x) + self.place.weight[: x.shape[1]], mask, is_causal=True))


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in {"steps": 400, "batch": 12, "context": 128, "layers": 2, "dim": 128, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds to wait in every step")
    args = parser.parse_args()
    torch.set_num_threads(1)
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device(f"cuda:{local_rank}" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.manual_seed(args.seed)
    gpt = GPT(args.context, args.layers, args.dim).to(device)
    model = DistributedDataParallel(gpt) if dist.is_initialized() else gpt
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    data = Bytes(args.context)
    loader = DataLoader(data, batch_size=args.batch, shuffle=True, drop_last=True)

    ckpt = Checkpointer(model, optimizer, scheduler=scheduler, loader=loader, seed=args.seed)  # 2
    for step, batch in ckpt.steps(loader, max_steps=args.steps):  # 3
        loss = loss_of(model, batch.to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        ckpt.report(loss=loss.item(), lr=scheduler.get_last_lr()[0])
        if local_rank == 0 and (step + 1) % 20 == 0:
            print(f"step {step + 1} loss {loss.item():.4f}", flush=True)
        time.sleep(args.pause)

    if local_rank == 0:
        sample = torch.stack([data[i] for i in range(0, len(data), len(data) // 64)])
        with torch.no_grad():
            print(f"final loss {loss_of(gpt.eval(), sample.to(device)).item():.12f}")


if __name__ == "__main__":
    main()
