"""What a round of the storm does, from its seed: whom it kills, and at which point of a save."""

import random
from dataclasses import dataclass

from benchmarks.chaos.disk import OPTIONS

BLOWS = 3
DROPOUT = 0.1

# Where in a save, or beside one: an operation of the process that makes it, which stands still there while others are killed.
POINTS = {
    "folder made": "mkdir {c}/.tmp-*",
    "shard opened": "open {c}/.tmp-*/shard-*",
    "shard written": "write {c}/.tmp-*/shard-*",
    "shard cut to size": "truncate {c}/.tmp-*/shard-*",
    "shard synced": "fsync {c}/.tmp-*/shard-*",
    "manifest opened": "open {c}/.tmp-*/MANIFEST.json",
    "manifest written": "write {c}/.tmp-*/MANIFEST.json",
    "manifest synced": "fsync {c}/.tmp-*/MANIFEST.json",
    "folder synced": "fsync {c}/.tmp-*",
    "commit": "rename {c}/.tmp-*",
    "commit synced": "fsync {c}",
    "old one renamed": "rename {c}/step-*",
    "old one removed": "remove {c}/.removed-*/*",
    "end recorded": "rename chaos/logs/attempt-*/end.json.partial",
    "exit recorded": "rename chaos/logs/attempt-*/exit.json.tmp",
    "journal written": "write chaos/journal.jsonl",
    "journal synced": "fsync chaos/journal.jsonl",
}
# The same of what goes to the store and comes from it: the request of whoever makes it is held there. `unseen`: the server has not had it;
# `unheard`: it has done it, and nobody hears of that.
REQUESTS = {
    "shard put": ("PutObject|UploadPart", r".*/checkpoints/.*\.safetensors"),
    "manifest put": ("PutObject", r".*/checkpoints/.*/MANIFEST\.json"),
    "lease put": ("PutObject", r".*/lease\.json"),
    "copy removed": ("DeleteObject", ".*/checkpoints/.*"),
    "end told": ("PutObject", r".*/outcome\.json"),
}
STORE_POINTS = {f"{name}, {how}": (*what, how) for name, what in REQUESTS.items() for how in ("unseen", "unheard")}
MOMENTS = ("any time", "starting", "training", "proposed", "staging", "uploading", "ending")
AT_THE_END = (
    "end recorded",
    "exit recorded",
    "ending",
    "end told, unseen",
    "end told, unheard",
)  # of an attempt: what else a round does comes before
NAMES = {
    "all": "all at once",
    "power": "power lost",
    "tasks": "uploads and other tasks",
    "rank": "one rank",
    "ranks": "all ranks",
}
VICTIMS = ("rank", "ranks", "saver", "launcher", "shim", "guardian", "runner", "tasks", "all", "power")
GONE = {("exit recorded", whom) for whom in ("rank", "ranks", "launcher")}  # dead by then: nobody to kill
PAIRS = [(when, whom) for when in (*POINTS, *MOMENTS) for whom in VICTIMS if (when, whom) not in GONE]
STORE_PAIRS = [
    (when, whom)
    for when in STORE_POINTS
    for whom in ("tasks", "runner", "guardian", "ranks", "all", "power")
    if not (when.startswith("end told") and whom == "ranks")  # gone, too
]


@dataclass(frozen=True)
class Blow:
    """`whom` at `when`: a moment or a named point. After `all` and `power` the run is begun again with `ranks`."""

    when: str
    whom: str
    ranks: int = 2
    wiped: bool = False  # the next start finds an empty disk

    def __str__(self) -> str:
        after = f", then {self.ranks} rank" if self.ranks != 2 else ""
        return f"{self.whom} at: {self.when}{after}{', then an empty disk' if self.wiped else ''}"


@dataclass
class Plan:
    seed: int
    blows: list[Blow]
    dropout: float
    options: str


def plan(seed: int, pairs: list[tuple[str, str]] = PAIRS) -> Plan:
    """All that is by chance, from the seed. Blows take turns, so that every point meets every victim."""
    dice = random.Random(seed)
    blows = [_blow(dice, *_pair(BLOWS * seed + number, pairs)) for number in range(BLOWS)]
    blows.sort(key=lambda blow: blow.when in AT_THE_END)
    same = all(blow.ranks == 2 for blow in blows)
    return Plan(seed, blows, DROPOUT if same else 0.0, dice.choice(OPTIONS))


def _pair(number: int, pairs: list[tuple[str, str]]) -> tuple[str, str]:
    """All of them one after the other, and again in another order."""
    again, place = divmod(number, len(pairs))
    return random.Random(again).sample(pairs, len(pairs))[place]


def _blow(dice: random.Random, when: str, whom: str) -> Blow:
    wiped = whom == "all" and dice.random() < 0.35
    ranks = 1 if whom in {"all", "power"} and dice.random() < 0.35 else 2
    return Blow(when, whom, ranks, wiped)
