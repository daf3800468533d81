"""
The first real error of an attempt: which rank, which line, what it is called, what to do.

When one rank dies the others complain louder: what they print is secondary and is never
chosen while anything better is there. Torchrun itself always exits 1, and what it names as
the root cause is only the first it noticed.

`sources` finds the files, `lines` reads them within bounds, `table` recognises single
lines, `tracebacks` reads those, `evidence` the structure of all, `choose` decides (with `silence` where nobody says the cause,
`hung` where the supervisor ended it, and `refine` where numbers do, or the disk kept all of them from a word), `meanings` explains, and `advice` a single error, `telling` says it in one line.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from runner.facts import Diagnosis, Exit
from runner.supervise.recorder import compare, read_dumps
from runner.supervise.triage.advice import advise
from runner.supervise.triage.choose import choose, diagnose, words_about
from runner.supervise.triage.evidence import gather
from runner.supervise.triage.hung import explain, read_hang
from runner.supervise.triage.refine import DISK_FULL, is_full, tell_full, weigh_disk
from runner.supervise.triage.sources import attempt_folder, find_sources, read_kills, read_source
from runner.supervise.triage.telling import tell


def first_error(path: Path, ended: Exit | None = None, *, free_bytes: int | None = None) -> Diagnosis:
    """
    Return what went wrong first, from a log or a folder of logs; with `ended`, how the launcher ended.

    `free_bytes`: what the disk of a run that has just ended has left; a full one keeps logs from saying so.
    Reads within bounds and never fails on what is in a log.
    """
    sources = find_sources(path)
    root = attempt_folder(path)
    hang = read_hang(root)
    lines = (read_source(source, index) for index, source in enumerate(sources))
    kept = list(lines) if hang else None  # a hang leaves little, and it is read twice
    seen = gather(kept or lines)
    seen.ranks |= {source.rank for source in sources if source.rank is not None}
    seen.kills = read_kills(root)
    seen.recorded = compare(read_dumps(root))
    seen.launcher_code = ended.code if ended else None
    chosen, told = explain(hang, seen, kept or []) if hang else (choose(seen), "")
    if chosen.label == "unknown" and free_bytes is not None and is_full(free_bytes):
        chosen, told = DISK_FULL, tell_full(path, free_bytes)
    chosen = weigh_disk(chosen, free_bytes)
    files = [source.path for source in sources]
    found = advise(diagnose(chosen), words_about(chosen, seen))
    return replace(found, summary=told or tell(chosen, seen, files=files, folder=root, ended=ended))
