"""
What is saved equals the tensors at the save's step, bit for bit, while training goes on at full speed.

    python benchmarks/gpu/check_bytes.py FOLDER [--cases fsdp2 "no protection"] [--limit-s 150]

Each case trains with almost no work between two optimizer steps, so a copy that is not protected is torn: one case
takes the protection away, and must go wrong for the others to mean anything. Without cards nothing is hidden, and
cases that need a card are left out.
"""

import argparse
import os
import shutil
import sys
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import page
import torch
import torch.distributed as dist
from drive import end, launch, torchrun
from model import about, join
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy, fully_shard

from vramfarm import Checkpointer, copies, folder, staging
from vramfarm.loading import Reader
from vramfarm.protocol import Word

HAS_CARD = torch.cuda.is_available()
DIM, LAYERS = (2048, 4) if HAS_CARD else (512, 4)
STEPS = 36
SAVES = 6  # asked for
KEPT = 12  # steps whose tensors are kept, and no fewer than until their save is written


class Net(nn.Module):
    def __init__(self, layers=LAYERS):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, 2 * DIM) for _ in range(layers))
        self.norm = nn.BatchNorm1d(2 * DIM)
        self.gain = nn.Parameter(torch.ones(3, 5).t())  # with holes in memory

    def forward(self, x):
        total = sum(layer(x) for layer in self.layers)
        return self.norm(total) * self.gain.sum()


def spread(model, way, device):
    """Over all ranks, by FSDP2, or by FSDP1 in one of two ways: with the parameters as they were, or flat ones."""
    if not way:
        return model
    model.gain = nn.Parameter(torch.ones(5, device=device))
    if way == "fsdp2":
        for layer in model.layers:
            fully_shard(layer)
        return fully_shard(model)
    flat = {
        "use_orig_params": False,
        "sharding_strategy": ShardingStrategy.SHARD_GRAD_OP,
        "mixed_precision": MixedPrecision(torch.bfloat16, torch.float32, torch.bfloat16),
    }
    options = {"device_id": device, **(flat if way == "fsdp1 flat" else {"use_orig_params": True})}
    model.layers = nn.ModuleList(FullyShardedDataParallel(layer, **options) for layer in model.layers)
    return FullyShardedDataParallel(model, **options)


def clean(name):
    return name.replace("_fsdp_wrapped_module.", "").replace("_orig_mod.", "")


@dataclass(frozen=True)
class Part:
    """What this rank has of a tensor: a box of it that begins at `offsets`, or `cut`, a range of its elements."""

    local: torch.Tensor
    offsets: tuple[int, ...] = ()
    cut: slice | None = None


def parts(model, optimizer, more=()):
    """Everything that a save must hold, by its name there."""
    if isinstance(model, FullyShardedDataParallel):
        return dict(flat_parts(model, optimizer))
    found = {f"model.{n}": t for n, t in model.state_dict().items()}
    names = {id(p): n for n, p in model.named_parameters()}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            found[f"optimizer.state.{names[id(parameter)]}.{key}"] = value
    for name, module in more:
        found |= {f"{name}.{n}": t for n, t in module.state_dict().items()}
    return {clean(k): Part(staging.local_of(t), staging.local_box(t)[1]) for k, t in found.items()}


def flat_parts(model, optimizer):
    """The same of FSDP1, by what torch itself notes of its flat parameters: ours is not asked."""
    for name, buffer in model.named_buffers():
        yield clean(f"model.{name}"), Part(buffer, (0,) * buffer.dim())
    for prefix, unit in model.named_modules():
        if not isinstance(unit, FullyShardedDataParallel) or unit._handle is None:
            continue
        flat = unit._handle.flat_param
        for number, (name, info) in enumerate(zip(flat._fqns, flat._shard_param_infos, strict=True)):
            if not info.in_shard:
                continue
            name = clean(f"{prefix}.{name}" if prefix else name)  # noqa: PLW2901  # as it is in the model
            holder = flat if flat._params is None else flat._params[number]
            cut = slice(info.intra_param_start_idx, info.intra_param_end_idx + 1)
            here = slice(info.offset_in_shard, info.offset_in_shard + cut.stop - cut.start)
            for key, value in {f"model.{name}": holder, **_states(optimizer, holder, name)}.items():
                local = value.detach().flatten()
                local = local[here] if holder is flat and value.dim() else local
                yield key, Part(local, cut=cut) if value.dim() else Part(value)


def _states(optimizer, holder, name):
    return {f"optimizer.state.{name}.{key}": value for key, value in optimizer.state.get(holder, {}).items()}


def copy_of(live):
    return {k: part.local.clone() for k, part in live.items()}


def differences(stored, then, live):
    """Names of tensors that are not what they were then."""
    reader, read = Reader(stored), {}
    for name, part in live.items():
        if part.cut is None:
            read[name] = torch.empty_like(part.local)
            reader.read_into(name, read[name], part.offsets)
        else:
            read[name] = reader.whole(name)
    reader.flush()
    return [name for name, part in live.items() if not _is_same(read[name], part.cut, then[name])]


def _is_same(read, cut, then):
    return torch.equal(read if cut is None else read.flatten()[cut].to(then.device), then)


def prepare(path, device, *, seed=0, layers=LAYERS, way="", compiled=False, kind="foreach", average=False, frozen=False, staged="full"):  # fmt: skip
    """Model, optimizer, average and library, as a script makes them."""
    torch.manual_seed(seed)
    model = Net(layers).to(device)
    if frozen:
        for layer in model.layers[::2]:
            layer.requires_grad_(False)
    bare = spread(model, way, device)
    trained = [p for p in bare.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, **{kind: True})
    ema = torch.optim.swa_utils.AveragedModel(bare) if average else None
    model = torch.compile(bare) if compiled else bare
    ckpt = Checkpointer(model, optimizer, ema=ema, dir=path, save_interval="24h", keep_last=50, staging=staged)
    return model, bare, optimizer, ema, ckpt


def train(path, device, *, accumulate=1, between=None, sabotage=False, **options):
    model, bare, optimizer, ema, ckpt = prepare(path, device, **options)
    if sabotage:
        unprotect(ckpt._saves._copier, optimizer)
    more = [("ema", ema)] if ema else []
    history = {}
    page = ckpt._seat.page
    x = torch.randn(64, DIM, device=device)
    asked = 0
    while ckpt.start_step < STEPS:
        for _ in range(accumulate):
            model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if ema:
            ema.update_parameters(bare)
        live = parts(bare, optimizer, more)
        history[ckpt.start_step + 1] = copy_of(live)
        ckpt.step()
        if between:
            between(bare, ckpt.start_step)
        if ckpt._saves.is_warm and asked < SAVES:
            ckpt.save()  # again and again: while one is written, too
            asked += 1
        if not ckpt._seat.is_copying():
            time.sleep(0.06)  # let the writer get on, but never between a save and the next optimizer's step
        for step in [s for s in history if s < ckpt.start_step - KEPT]:
            if step not in {s.manifest.step for s in folder.committed(path)} and step != page[Word.SAVING_STEP]:
                del history[step]
    ckpt.wait()
    failed = page[Word.NUM_FAILED]
    said = page.error()
    ckpt.finish()
    stored = [one for one in folder.committed(path) if one.manifest.step in history]
    wrong = {one.manifest.step: differences(one, history[one.manifest.step], live) for one in stored}
    hidden = ckpt._saves._copier._hide
    return {
        "checked": len(wrong),
        "wrong": {step: names for step, names in wrong.items() if names},
        "failed": failed,
        "said": said,
        "hidden": hidden and options.get("staged", "full") == "full" and HAS_CARD,
        "linked": any(shard.path.startswith("frozen-") for one in stored for shard in one.manifest.shards),
        "resumed": resume(path, device, history, options),
    }


def resume(path, device, history, options):
    """Names of tensors that another process's training would not go on from as they were."""
    _, bare, optimizer, ema, ckpt = prepare(path, device, seed=1, **options)
    live, then = parts(bare, optimizer, [("ema", ema)] if ema else []), history[ckpt.start_step]
    ckpt.finish()
    return [name for name in then if name not in live or not torch.equal(live[name].local, then[name])]


def unprotect(copier, optimizer):
    """The optimizer is no longer held back, and nobody looks whether it should have been."""

    def hook(*_):
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


@dataclass(frozen=True)
class Case:
    """`torn`: it must go wrong. `gives_up`: saves that cannot be right are given up, the others are right."""

    options: dict[str, Any] = field(default_factory=dict)
    torn: bool = False
    gives_up: bool = False
    needs_card: bool = False


CASES = {
    "foreach": Case(),
    "no protection": Case({"sabotage": True, "layers": 16}, torn=True, needs_card=True),
    "fsdp2": Case({"way": "fsdp2"}),
    "fsdp1": Case({"way": "fsdp1"}),
    "fsdp1, flat parameters, bf16": Case({"way": "fsdp1 flat"}),
    "half of the weights frozen": Case({"frozen": True}),
    "half frozen, fsdp2": Case({"frozen": True, "way": "fsdp2"}),
    "chunked": Case({"staged": "chunked"}),
    "chunked, half frozen, fsdp2": Case({"staged": "chunked", "frozen": True, "way": "fsdp2"}),
    "weights clamped outside the optimizer": Case({"between": clamp}, gives_up=True, needs_card=True),
    "data exchanged": Case({"between": exchange}),
    "average": Case({"average": True}),
    "fused": Case({"kind": "fused"}),
    "capturable": Case({"kind": "capturable"}, needs_card=True),
    "compiled, accumulated": Case({"compiled": True, "accumulate": 3}, needs_card=True),
    "fsdp2 fused compiled": Case({"way": "fsdp2", "kind": "fused", "compiled": True}, needs_card=True),
}


def run(case, path, device):
    check = copies._Copy._check
    try:
        return train(path, device, **case.options)
    except Exception as error:  # noqa: BLE001  # the other cases count, too
        traceback.print_exc()
        return {"error": repr(error)[:200]}
    finally:
        copies._Copy._check = check


def problem(case, found):
    """What is not as it must be, from what all ranks found; empty if nothing is."""
    if errors := [one["error"] for one in found if "error" in one]:
        return errors[0]
    wrong = [f"step {step}: {len(names)} tensors" for one in found for step, names in one["wrong"].items()]
    if case.torn:
        return "" if wrong else "nothing was torn, so the other cases prove nothing"
    few = min(one["checked"] for one in found) < (1 if case.gives_up else 2)
    complaints = {
        f"differ: {', '.join(wrong)}": bool(wrong),
        "too few checkpoints to speak of": few,
        f"resumed otherwise: {', '.join(name for one in found for name in one['resumed'][:3])}": any(
            one["resumed"] for one in found
        ),
        "no save was given up": case.gives_up and not found[0]["failed"],
        "the frozen weights are in no file of their own": case.options.get("frozen") and not found[0]["linked"],
        "the copy was not hidden": HAS_CARD
        and not (found[0]["hidden"] or case.gives_up or case.options.get("staged") == "chunked"),
    }
    return "; ".join(text for text, is_so in complaints.items() if is_so)


def row(name, found, text, seconds):
    if any("error" in one for one in found):
        return f"| {name} | | | | | | {text.replace('|', '/')} |"
    checked, torn = (sum(one["checked"] for one in found), sum(len(one["wrong"]) for one in found))
    hidden = "yes" if all(one["hidden"] for one in found) else "no"
    print(f"{name}: {seconds:.1f} s: {found}", flush=True)
    resumed = sum(len(one["resumed"]) for one in found)
    return f"| {name} | {hidden} | {checked} | {torn} | {resumed} | {found[0]['failed']} | {text or 'as it must be'} |"


def main():
    arguments = parse_arguments()
    if "RANK" not in os.environ:
        sys.exit(start(arguments))
    device, began = join(), time.monotonic()
    rows, failures, late = [], [], []
    for name in arguments.cases or CASES:
        case = CASES[name]
        over = torch.tensor([float(time.monotonic() - began > arguments.limit_s - 12)])
        dist.all_reduce(over)
        if (case.needs_card and not HAS_CARD) or over.item():
            late.append(name)
            continue
        started, path = time.monotonic(), Path(arguments.folder) / "bytes" / name.replace(" ", "-")
        found = [None] * dist.get_world_size()
        dist.all_gather_object(found, run(case, path, device))
        text = problem(case, found)
        failures += [f"{name}: {text}"] if text else []
        if dist.get_rank() == 0:
            rows.append(row(name, found, text, time.monotonic() - started))
            shutil.rmtree(path, ignore_errors=True)
        dist.barrier()
    if dist.get_rank() == 0:
        write(arguments, rows, failures, late)
    dist.barrier()
    sys.stdout.flush()
    os._exit(bool(failures))


def write(arguments, rows, failures, late):
    text = [
        about(),
        "",
        "| case | copied beside the training | checkpoints compared, all ranks | of them torn | tensors that differ after a resume | saves given up | |",
        "|---|---|---|---|---|---|---|",
        *rows,
        "",
        *([f"left out: {', '.join(late)}"] if late else []),
        *(f"FAILED: {one}" for one in failures),
    ]
    (Path(arguments.folder) / "check_bytes.md").write_text("\n".join(text) + "\n")
    print("\n".join(text), flush=True)


def start(arguments):
    """Both ranks, with a bound: one that waits for another that failed would wait for ten minutes."""
    Path(arguments.folder).mkdir(parents=True, exist_ok=True)
    shutil.rmtree(Path(arguments.folder) / "bytes", ignore_errors=True)
    log = Path(arguments.folder) / "check_bytes.log"
    log.unlink(missing_ok=True)
    process = launch(torchrun(page.num_ranks(), "check_bytes.py", sys.argv[1:]), log)
    until, at = time.monotonic() + arguments.limit_s + 30, 0
    while process.poll() is None and time.monotonic() < until:
        time.sleep(0.5)
        at = _pass_on(log, at)
    end(process, 5)
    _pass_on(log, at)
    return int(process.returncode != 0)


def _pass_on(log, at):
    raw = log.read_bytes()[at:]
    print(raw.decode(errors="replace"), end="", flush=True)
    return at + len(raw)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--cases", nargs="*", choices=list(CASES), metavar="CASE", help="; ".join(CASES))
    parser.add_argument("--limit-s", type=float, default=150 if HAS_CARD else 300)
    return parser.parse_args()


if __name__ == "__main__":
    main()
