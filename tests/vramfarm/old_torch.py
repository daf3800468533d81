"""
Under another torch: train and resume, read what the newest torch saved, and save what it reads.

    old_torch.py FOLDER

FOLDER/checkpoints was saved by two ranks with FSDP2. Prints JSON: the version, digests of every tensor as our loader
reads them, as a restored model has them, and as torch's own reader does where it has a public one; and which folder
has what this torch saved.
"""

import hashlib
import json
import shutil
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from train_small import Net

from vramfarm import Checkpointer, folder
from vramfarm.loading import Reader

warnings.simplefilter("ignore")


def digest(tensor):
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(raw).hexdigest()[:16]


def as_read(checkpoints):
    reader = Reader(folder.committed(checkpoints)[0])
    return {key: digest(reader.read(key)) for key in sorted(reader.keys)}


def make():
    model = Net()
    model.scale = nn.Parameter(model.scale.detach().reshape(1))  # as fully_shard wanted it
    model.gain = nn.Parameter(model.gain.detach().float())
    return model


def by_torch(path, model):
    reader = getattr(dcp, "HuggingFaceStorageReader", None)
    if reader is None:
        return None
    wanted = {f"model.{key}": torch.zeros_like(value) for key, value in model.state_dict().items()}
    dcp.load(wanted, storage_reader=reader(str(path)), no_dist=True)
    return {key: digest(value) for key, value in sorted(wanted.items())}


def main():
    given, mine = Path(sys.argv[1]) / "checkpoints", Path("saved-by-another-torch")
    shutil.copytree(given, mine)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    ckpt = Checkpointer(model, optimizer, dir=mine)
    restored = {f"model.{key}": digest(value) for key, value in sorted(model.state_dict().items())}
    model(torch.ones(4, 7)).mean().backward()
    optimizer.step()
    ckpt.step()
    ckpt.finish()
    found = {
        "torch": torch.__version__,
        "read": as_read(given),
        "restored": restored,
        "by_torch": by_torch(folder.committed(given)[0].path, model),
        "saved": as_read(mine),
    }
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
