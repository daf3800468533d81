"""
Read a checkpoint on any number of ranks: with the library, and with torch's own reader.

    reshard.py FOLDER OUT

OUT.<rank> gets the step, a digest of every tensor (gathered), and which samples the rest of the epoch would be.
"""

import hashlib
import json
import os
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset
from train_small import Net, spread

from vramfarm import Checkpointer, folder

warnings.simplefilter("ignore")


def digests(model, optimizer):
    tensors = {f"model.{k}": v for k, v in model.state_dict().items()}
    names = [n for n, _ in model.named_parameters()]
    for i, inner in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.state.{names[i]}.{k}": v for k, v in inner.items()}
    return {key: digest(tensor) for key, tensor in sorted(tensors.items())}


def digest(tensor):
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return hashlib.sha256(whole.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def by_torch(path, model):
    wanted = {f"model.{k}": v for k, v in model.state_dict().items()}
    for tensor in wanted.values():
        (tensor.to_local() if isinstance(tensor, DTensor) else tensor).fill_(0)
    dcp.load(wanted, storage_reader=HuggingFaceStorageReader(str(path)))
    return {key: digest(tensor) for key, tensor in sorted(wanted.items())}


def main():
    checkpoints, out = Path(sys.argv[1]) / "checkpoints", sys.argv[2]
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(9)  # so that nothing is equal by chance
    model = spread("fsdp2", Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    loader = DataLoader(TensorDataset(torch.arange(92)), batch_size=4, shuffle=True)
    ckpt = Checkpointer(model, optimizer, dir=checkpoints, loader=loader)
    ours = digests(model, optimizer)
    theirs = by_torch(folder.committed(checkpoints)[0].path, model)
    assert theirs == {key: ours[key] for key in theirs}
    rest = [i for (batch,) in ckpt._course.feed_of(loader).rest_of_epoch(ckpt._position) for i in batch.tolist()]
    Path(f"{out}.{dist.get_rank()}").write_text(json.dumps([ckpt.start_step, ours, rest]))
    ckpt.finish()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)
