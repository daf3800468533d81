"""
One training on all cards, then on half of them, then on all again: the same weights, the same batches, each sample once.

    python benchmarks/gpu/resume.py FOLDER [--limit-s 90] [--steps 12] [--size "--layers 8 --hidden 1024 --per-card 16 …"]

Each part trains as many steps, saves its end and is gone; the next one goes on from there. Compared are checksums of
every whole tensor as it is in the training before and after the change, and in the checkpoint between them.
"""

import argparse
import shutil
import sys
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import page
from drive import SMALL, finish_ranks, has_cards, launch_ranks, lines, size_of, tail

MOST = page.num_ranks()
RANKS = (MOST, 1 if MOST % 2 else MOST // 2, MOST)
LARGE = "--layers 4 --hidden 1024 --vocabulary 8192 --sequence 1024 --per-card 16"


def train(folder, part, arguments, limit_s):
    """One part of the training; its exit code."""
    options = [
        *size_of(arguments.size, MOST),
        *("--out", str(folder / f"part-{part}")),
        *("--steps", str(arguments.steps * (part + 1))),
        *("--dir", str(folder / "checkpoints"), "--interval", "24h", "--digest", "--quit"),
    ]
    return finish_ranks(launch_ranks(RANKS[part], "train.py", options, folder / f"part-{part}.log"), limit_s)


def stored(folder):
    """The newest checkpoint: its step, and a checksum of each whole tensor of weights and optimizer."""
    import torch

    from vramfarm import folder as checkpoints
    from vramfarm.loading import Reader

    newest = max(checkpoints.committed(folder), key=lambda one: one.manifest.step)
    reader = Reader(newest)
    found = {}
    for key in reader.keys:
        if key.startswith(("model.", "optimizer.state.")):
            raw = reader.read(key).contiguous().reshape(-1).view(torch.uint8).numpy()
            found[key] = zlib.crc32(memoryview(raw))
    return newest.manifest.step, newest.manifest.size_bytes, found


def event(folder, part, name, rank=0):
    found = [one for one in lines(folder / f"part-{part}/events-{rank}.jsonl") if one["event"] == name]
    return found[-1] if found else None


def differing(one, other):
    return sorted(key for key in one.keys() | other.keys() if one.get(key) != other.get(key))


def samples(folder):
    """The ids that each step took, of all ranks."""
    found = {}
    for part, ranks in enumerate(RANKS):
        for rank in range(ranks):
            for one in lines(folder / f"part-{part}/samples-{rank}.jsonl"):
                found.setdefault(one["step"], []).extend(one["ids"])
    return found


def left_out(taken, arguments):
    """The places of the epoch's order up to where the training is: which of them no step has taken."""
    from vramfarm.epochs import GlobalBatches, World

    words = size_of(arguments.size, MOST)
    size = dict(zip(words[::2], words[1::2], strict=True))
    whole = GlobalBatches(
        arguments.samples, int(size["--global-batch"]), World(0, 1), shuffle=True, seed=7, drop_last=True
    )
    expected = [id for batch, _ in zip(whole, range(3 * arguments.steps), strict=False) for id in batch]  # noqa: A001
    return len(set(expected) - set(taken)), int(size["--global-batch"])


def main():
    arguments = parse_arguments()
    began = time.monotonic()
    folder = Path(arguments.folder).resolve() / "resume"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    failures, rows, kept, reading = [], [], {}, None

    def say(text):
        print(f"{time.monotonic() - began:6.1f} {text}", flush=True)

    readers = ThreadPoolExecutor(1)  # reads a checkpoint while the next part starts
    readers.submit(__import__, "torch")
    for part, ranks in enumerate(RANKS):
        code = train(folder, part, arguments, arguments.limit_s - (time.monotonic() - began))
        begin, final = event(folder, part, "restored"), event(folder, part, "ended")
        say(f"{ranks} ranks: exit {code}, {begin and begin['step']} to {final and final['step']}")
        if code or not (begin and final):
            failures.append(f"part {part} on {ranks} ended with {code}")
            say(tail(folder / f"part-{part}.log", 30))
            break
        if part:
            step, size, saved = reading.result()
            if step != kept["step"]:
                failures.append(f"the newest checkpoint was of step {step}, not {kept['step']}")
            wrong = differing(kept["digest"], begin["digest"])
            in_file = differing(saved, kept["digest"])
            rows.append((RANKS[part - 1], ranks, begin["step"], size, len(saved), len(wrong), len(in_file)))
            failures += [f"{RANKS[part - 1]} to {ranks}: {one} differs" for one in (wrong + in_file)[:5]]
            if begin["step"] != kept["step"]:
                failures.append(f"went on from step {begin['step']}, not {kept['step']}")
        kept, reading = final, readers.submit(stored, folder / "checkpoints")
    by_step = samples(folder)
    taken = [one for ids in by_step.values() for one in ids]
    missing, batch = left_out(taken, arguments)
    twice = len(taken) - len(set(taken))
    odd = {step: len(ids) for step, ids in by_step.items() if len(ids) != batch}
    if missing or twice or odd or len(by_step) != 3 * arguments.steps:
        failures.append(f"{missing} samples left out, {twice} twice, batches that are not {batch}: {odd}")
    write(folder.parent, arguments, rows, (by_step, taken, missing, twice, batch), failures)
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    sys.exit(bool(failures))


def write(folder, arguments, rows, found, failures):
    from model import about

    by_step, taken, missing, twice, batch = found
    text = [
        f"{about()}; {arguments.size}",
        "",
        "| ranks | at step | checkpoint, GB | tensors of weights and optimizer | differ after the change | differ in the checkpoint |",
        "|---|---|---|---|---|---|",
    ]
    text += [
        f"| {a} → {b} | {step} | {size / 1e9:.2f} | {count} | {wrong} | {in_file} |"
        for a, b, step, size, count, wrong, in_file in rows
    ]
    text += [
        "",
        f"{len(by_step)} steps of {batch} samples each, whatever the number of ranks: {len(taken)} samples, {twice} taken twice, {missing} left out.",
        *(f"FAILED: {one}" for one in failures),
    ]
    (folder / "resume.md").write_text("\n".join(text) + "\n")
    print("\n".join(text), flush=True)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--limit-s", type=float, default=90 if has_cards() else 300)
    parser.add_argument("--steps", type=int, default=12, help="of each part")
    parser.add_argument("--size", default=LARGE if has_cards() else SMALL)
    parser.add_argument("--samples", type=int, default=100_000, help="as train.py has it")
    return parser.parse_args()


if __name__ == "__main__":
    main()
