"""
Adapters and optimizers of other libraries with the real ones, on the processor: saved, resumed, refused.

    train_adapters.py FOLDER

Prints one line of JSON for each check: its name and what was found.
"""

import json
import os
import sys
from pathlib import Path

import bitsandbytes as bnb
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torchao.optim import AdamW8bit
from transformers import LlamaConfig, LlamaForCausalLM

from vramfarm import Checkpointer, folder
from vramfarm.typed import StateError


def lora():
    config = LlamaConfig(
        vocab_size=400, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4
    )
    model = LlamaForCausalLM(config)
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1))


def plain():
    return nn.Sequential(nn.Linear(128, 64), nn.Tanh(), nn.Linear(64, 80))


def quantized():
    layer = bnb.nn.Linear4bit(128, 64, quant_type="nf4", compute_dtype=torch.float32)
    model = nn.Sequential(layer, nn.Linear(64, 80)).to("cpu")
    model[0].weight.requires_grad_(requires_grad=False)
    return model


def loss_of(model):
    if hasattr(model, "peft_config"):
        tokens = torch.randint(0, 400, (2, 8))
        return model(input_ids=tokens, labels=tokens).loss
    return model(torch.randn(4, 128)).square().mean()


def train(directory, steps, make, optimizer_of, seed=0):
    """Return the losses, exactly."""
    torch.manual_seed(seed)
    model, losses = make(), []
    optimizer = optimizer_of([p for p in model.parameters() if p.requires_grad])
    ckpt = Checkpointer(model, optimizer, dir=directory, keep_last=9)
    while ckpt.start_step < steps:
        torch.manual_seed(ckpt.start_step)
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
        ckpt.step()
    ckpt.finish()
    return losses


def resumes(root, make, optimizer_of, seed=1):
    """Whether a run that was interrupted, and built from other numbers then, makes the same losses."""
    whole = train(root / "whole", 6, make, optimizer_of)
    return whole == [
        *train(root / "parts", 3, make, optimizer_of),
        *train(root / "parts", 6, make, optimizer_of, seed),
    ]


def frozen(directory):
    """Size of the file of frozen weights, and how many there are for how many checkpoints."""
    files = [path.stat() for path in directory.glob("step-*/frozen-*")]
    return max(s.st_size for s in files), len({s.st_ino for s in files}), len(files)


def refusal(call, *arguments):
    try:
        call(*arguments)
    except StateError as error:
        return str(error)
    return "nothing was refused"


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01)


def main(root):
    found = {
        "lora": resumes(root / "lora", lora, adamw, 0),
        "lora written once": frozen(root / "lora/parts"),
        "lora each time": max(s.size_bytes for s in folder.committed(root / "lora/parts")[0].manifest.shards[:1]),
        "8-bit": resumes(root / "8bit", plain, lambda p: bnb.optim.AdamW8bit(p, lr=0.01, min_8bit_size=1)),
        "4-bit": resumes(root / "4bit", quantized, adamw, 0),
        "4-bit, another base": refusal(resumes, root / "other", quantized, adamw),
        "subclass": refusal(train, root / "ao", 3, plain, lambda p: AdamW8bit(p, lr=0.01)),
    }
    print(json.dumps(found), flush=True)
    os._exit(0)  # those that were refused would try once more


if __name__ == "__main__":
    main(Path(sys.argv[1]))
