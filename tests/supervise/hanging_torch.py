"""
A plain training loop under torchrun, without the library, that hangs on purpose: `mismatch` or `loader`.

The first attempt hangs at step 25; a later one ends well.
"""

import os
import sys
import time

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

KIND, STEPS, HANGS_AT = sys.argv[1], 30, 25
HANGS = os.environ["VRAMFARM_ATTEMPT"] == "1"
STEP_S = 0.4 if HANGS else 0.02  # a runner that looks once a second has learned from its steps, when it hangs


class Samples(Dataset):
    def __len__(self):
        return STEPS

    def __getitem__(self, at):
        if HANGS and KIND == "loader" and at == HANGS_AT and os.environ["RANK"] == "1":
            time.sleep(3600)
        return torch.ones(4)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    weights = torch.zeros(4)
    for step, batch in enumerate(DataLoader(Samples(), batch_size=1, num_workers=1), 1):
        time.sleep(STEP_S)
        if HANGS and KIND == "mismatch" and step == HANGS_AT and rank == 1:
            gathered = [torch.zeros(4), torch.zeros(4)]
            dist.all_gather(gathered, weights)
        gradient = batch[0].clone()
        dist.all_reduce(gradient)
        weights -= 0.1 * gradient
        print(f"step {step} loss {float(weights.sum()):.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
