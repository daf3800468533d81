"""
The tables of benchmarks/checkpoint.py that two cards are for, one after the other; on one card with one rank.

    python benchmarks/gpu/checkpoint.py FOLDER [--only peers transformer large] [--limit-s 960]

peers: 12.9 GB, all engines that are installed, two saves each. transformer: 12.8 GB, bf16 with fp32 master state, compiled, fused AdamW,
gradients accumulated; and what warming up costs. large: 24 GB a card, ours and the two that are quickest beside it.
Without cards the same, small.
"""

import argparse
import shutil
import sys
import time
from pathlib import Path

import page
from drive import HERE, finish_ranks, has_cards, launch_ranks, tail

TABLES = {
    "peers": "--dim 4096 --layers 8 --batch 24 --rounds 2 --limit-gb 2 --save-limit-s 75 --limit-s 415",
    "transformer": "--model transformer --dim 4096 --layers 4 --tokens 2048 --batch 4 --accumulate 2 --optimizer fused --compile "
    "--engines vramfarm --rounds 1 --limit-gb 1 --warm-ups 3",
    "large": "--model transformer --dim 8192 --layers 4 --vocabulary 48000 --tokens 2048 --batch 2 --accumulate 2 --optimizer foreach "
    "--engines vramfarm torch_checkpointing nvidia-resiliency-ext --rounds 1 --limit-gb 1 --save-limit-s 130",
}
SMALL = {
    "peers": "--dim 128 --layers 2 --batch 1 --tokens 8 --rounds 1 --engines vramfarm dcp.save",
    "transformer": "--model transformer --dim 128 --layers 2 --tokens 32 --batch 2 --accumulate 2 --optimizer fused "
    "--vocabulary 512 --engines vramfarm --rounds 1 --warm-ups 2",
    "large": "--model transformer --dim 256 --layers 2 --tokens 32 --batch 2 --vocabulary 512 --engines vramfarm "
    "--rounds 1 --limit-gb 0.005",
}
LIMIT_S = {"peers": 470, "transformer": 200, "large": 280}


def main():
    arguments = parse_arguments()
    folder, began = Path(arguments.folder).resolve(), time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    failed, pages = [], []
    for name in arguments.only:
        options = (TABLES if has_cards() else SMALL)[name].split()
        log, table = folder / f"checkpoint-{name}.log", folder / f"checkpoint-{name}.md"
        log.unlink(missing_ok=True)
        table.unlink(missing_ok=True)
        left = arguments.limit_s - (time.monotonic() - began)
        script = str(HERE.parent / "checkpoint.py")
        where = ["--name", f"checkpoint-{name}", "--dir", str(folder), "--out", str(folder)]
        code = finish_ranks(
            launch_ranks(min(2, page.num_ranks()), script, [*options, *where], log), min(LIMIT_S[name], left)
        )
        shutil.rmtree(folder / "bench", ignore_errors=True)
        print(f"== {name}: exit {code}\n{tail(log, 40)}", flush=True)
        pages.append(f"### {name}\n\n{table.read_text() if table.exists() else 'no table came out'}")
        failed += [f"FAILED: {name} ended with {code}"] if code or not table.exists() else []
    text = "\n".join(["## Saves", "", *pages, *failed]) + "\n"
    (folder / "checkpoint.md").write_text(text)
    print(text, flush=True)
    sys.exit(bool(failed))


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--only", nargs="*", choices=list(TABLES), default=list(TABLES))
    parser.add_argument("--limit-s", type=float, default=960)
    return parser.parse_args()


if __name__ == "__main__":
    main()
