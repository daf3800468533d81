"""What every page of figures has: where the cards are, which machine it was, and a table in FOLDER/NAME.md."""

import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def ask(*argv: str, timeout_s: float = 30) -> str:
    """What a program prints; nothing where it is not there, fails or is slow."""
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def environment(**more: str) -> dict[str, str]:
    """For every process that a benchmark starts: this checkout, and no multicast where nobody asked for it."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    ours = {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1", "NCCL_NVLS_ENABLE": "0"}
    return {**ours, **os.environ, "PYTHONPATH": ours["PYTHONPATH"], **more}


def cards() -> list[str]:
    """Names of the cards that nvidia-smi knows of and this process may use."""
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    which = [] if allowed is None else [f"--id={allowed}"]
    told = ask("nvidia-smi", *which, "--query-gpu=name", "--format=csv,noheader") if allowed != "" else ""
    return [line.strip() for line in told.splitlines()]


def num_ranks() -> int:
    """A process a card; two without cards."""
    return len(cards()) or 2


def link() -> str:
    """What `nvidia-smi topo -m` has between the first two cards: NV18, PHB; empty for fewer than two."""
    rows = [line.split() for line in ask("nvidia-smi", "topo", "-m").splitlines()]
    row = next((row for row in rows if row and row[0].endswith("GPU0") and len(row) > 2 and "X" in row), [])
    return row[row.index("X") + 1] if row else ""


def machine() -> str:
    """One line: date, torch, NCCL, driver, cards, cores."""
    found = cards()
    code = "import torch; print(torch.__version__, '.'.join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else '-')"
    torch, _, nccl = ask(sys.executable, "-W", "ignore", "-c", code, timeout_s=120).strip().partition(" ")
    driver = ask("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split("\n")[0]
    told = [
        f"{datetime.now(UTC):%Y-%m-%d}",
        f"torch {torch or '?'}, Python {platform.python_version()}",
        f"NCCL {nccl}, driver {driver}, {len(found)} x {found[0]} ({link() or 'one card'})"
        if found
        else "no card: two processes over gloo",
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
    ]
    return "; ".join(told)


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """As Markdown; what would end a cell is taken out."""

    def line(cells):
        return "| " + " | ".join(str(cell).replace("|", "/").replace("\n", " ") for cell in cells) + " |"

    return "\n".join([line(head), "|" + "---|" * len(head), *map(line, rows)])


def write(folder: Path, name: str, *parts: str) -> None:
    """FOLDER/NAME.md, and the same to read now."""
    folder.mkdir(parents=True, exist_ok=True)
    text = "\n\n".join(part for part in parts if part) + "\n"
    (folder / f"{name}.md").write_text(text)
    print(text, flush=True)
