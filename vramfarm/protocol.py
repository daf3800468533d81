"""
What the trainer's side and the supervisor say to each other, and nothing else.

Standard library only, Python 3.10+. `runner` may import this module, `vramfarm` never
imports `runner`. Three contracts live here:

- **the folder**: what a checkpoint is called and what its manifest says;
- **the control page**: a few words of shared memory by which ranks, saver and supervisor
  agree on steps without a blocking call;
- **the environment**: the names by which the supervisor tells a rank what it needs.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import re
import struct
import zlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from pathlib import Path, PurePosixPath
from typing import Any, Final

# --------------------------------------------------------------------------- environment


class Env:
    """Names of environment variables. All are set by the supervisor and read by the library."""

    CONTROL = "VRAMFARM_CONTROL"  # path of the control page
    RUN = "VRAMFARM_RUN"  # the run folder: every process of a run carries it
    ATTEMPT = "VRAMFARM_ATTEMPT"  # number of the attempt, from 1
    ATTEMPT_ID = "VRAMFARM_ATTEMPT_ID"  # unique; every process of an attempt carries it
    ROLE = "VRAMFARM_ROLE"  # "shim", "saver" or "task"; ranks and their workers have none
    JOB = "VRAMFARM_JOB"
    CHECKPOINT_DIR = "VRAMFARM_CHECKPOINT_DIR"
    SAVE_INTERVAL_S = "VRAMFARM_SAVE_INTERVAL_S"
    LINEAGE = "VRAMFARM_LINEAGE"
    RESUME = "VRAMFARM_RESUME"  # folder of the checkpoint to resume from; "none": start at step 0
    END_FILE = "VRAMFARM_END_FILE"  # where the saver writes the `EndRecord`
    SAVER_PYTHON = "VRAMFARM_SAVER_PYTHON"  # interpreter for the saver; default: the rank's own
    WORLD_SIZE = "VRAMFARM_WORLD_SIZE"  # processes that the launcher starts
    GRAD_ACCUM = "VRAMFARM_GRAD_ACCUM"  # micro-batches a step; like the next two only where job.yaml has a batch
    BATCH_PER_CARD = "VRAMFARM_BATCH_PER_CARD"  # samples of a micro-batch
    GLOBAL_BATCH = "VRAMFARM_GLOBAL_BATCH"  # samples a step, all cards together
    STAGING = "VRAMFARM_STAGING"  # "auto", "full" or "chunked": memory for a save
    KEEP_LAST = "VRAMFARM_KEEP_LAST"  # only without a supervisor: the saver itself keeps this many


# -------------------------------------------------------------------------------- folder

FORMAT: Final = "vramfarm/1"
MANIFEST: Final = "MANIFEST.json"
TEMPORARY: Final = ".tmp-"  # being written
REMOVED: Final = ".removed-"  # out of sight, bytes follow
DAMAGED: Final = ".damaged-"  # failed its checksums; kept for a human
SAVER_LOCK: Final = ".saver.lock"  # flock held by the one saver that writes into the folder
CHUNK_BYTES: Final = 8 << 20
ALGORITHM: Final = "crc32"  # of the chunks; `zlib.crc32`
MAX_SHARDS: Final = 65_536
MAX_NUMBER: Final = (
    1 << 62
)  # what counts steps, attempts and lineages stays below it: more would not fit a word of the page
MAX_MANIFEST_BYTES: Final = (
    16 << 20
)  # enough for 10 TB, for 4 with both lists; hostile JSON of this size takes half a GB to read
LATE_S: Final = 120.0  # that others wait for a rank before it is named
LAST_RANK_S: Final = 3600.0  # that ranks which are done wait for one that is not

_SEAL = re.compile(rb', "crc32": (\d{1,10})\}\Z')  # how a manifest ends; those of before have none
_SEAL_BYTES: Final = 22  # at most
_NAME = re.compile(r"step-(?P<step>\d{8,})-(?P<id>[0-9a-f]{8})")


class ProtocolError(ValueError):
    """Bytes that came from a disk or a store do not follow the contract."""


@dataclass(frozen=True, order=True)
class Ref:
    """
    Identity of a checkpoint. Order is age: the newest of the newest lineage is the greatest.

    `attempt` orders two checkpoints of one step: the later attempt's is the newer.
    """

    lineage: int
    step: int
    attempt: int
    id: str

    @property
    def name(self) -> str:
        """Name of its folder, here and offsite."""
        return f"step-{self.step:08d}-{self.id}"


def parse_name(name: str) -> tuple[int, str]:
    """Return (step, id) of a checkpoint folder's name; `ProtocolError` if it is none."""
    match = _NAME.fullmatch(name)
    if match is None:
        msg = f"{name!r}: expected a name like step-00000500-0123abcd"
        raise ProtocolError(msg)
    return int(match["step"]), match["id"]


def is_name(text: str) -> bool:
    """Whether a checkpoint's folder may have this name."""
    return _NAME.fullmatch(text) is not None


def shard_name(rank: int, world_size: int) -> str:
    return f"shard-{rank:05d}-of-{world_size:05d}.safetensors"


def apart_bits(objects: Iterable[str], chosen: Collection[str]) -> int:
    """Return the bits of `Word.APART` for the chosen ones of these objects, of all ranks; from the 64th by name on they share one."""
    bits = 0
    for number, name in enumerate(sorted(objects)):
        bits |= (name in chosen) << min(number, 63)
    return bits


def edges_name(rank: int, world_size: int, number: int) -> str:
    """Further boxes of tensors of which a rank has no single box: a file has each name once."""
    return f"edges-{rank:05d}-of-{world_size:05d}-{number}.safetensors"


def frozen_name(rank: int, world_size: int) -> str:
    """A rank's frozen weights: a file that is written once, and has a name in every checkpoint that needs it."""
    return f"frozen-{rank:05d}-of-{world_size:05d}.safetensors"


@dataclass(frozen=True)
class Shard:
    """
    One file of a checkpoint: `checksums` has one entry per `CHUNK_BYTES`, the last may be short.

    `crc64nvme` has as many, for a store that confirms it, or none: who saved could not compute them.
    """

    path: str
    size_bytes: int
    checksums: tuple[int, ...]
    crc64nvme: tuple[int, ...] = field(default=(), compare=False)  # says no more of the bytes


@dataclass(frozen=True)
class Manifest:
    """
    A committed checkpoint. It names only shards that are durable.

    `state` is JSON of the trainer's side (param groups, schedulers, data position); the
    supervisor carries it and never looks inside. Two manifests may name one file twice: a
    shard with the same path, size and checksums holds frozen weights, and is written once.
    """

    job: str
    lineage: int
    step: int
    id: str
    attempt: int
    world_size: int
    written_at: str
    algorithm: str
    shards: tuple[Shard, ...]
    contents: tuple[str, ...] = ()
    reason: str = "interval"
    framework: str = "vramfarm"
    state: dict[str, Any] = field(default_factory=dict)

    @property
    def ref(self) -> Ref:
        return Ref(self.lineage, self.step, self.attempt, self.id)

    @property
    def size_bytes(self) -> int:
        return sum(shard.size_bytes for shard in self.shards)


def dump_manifest(manifest: Manifest) -> bytes:
    """Bytes of MANIFEST.json; `parse_manifest` gives the manifest back."""
    fields = {"format": FORMAT, "chunk_bytes": CHUNK_BYTES, **asdict(manifest)}
    for shard in fields["shards"]:
        if not shard["crc64nvme"]:
            del shard["crc64nvme"]
    return seal(fields)


def seal(fields: Mapping[str, Any]) -> bytes:
    """Bytes of a manifest with these fields, and at its end the checksum of all before."""
    unsealed = {name: value for name, value in fields.items() if name != "crc32"}
    raw = json.dumps(unsealed, sort_keys=True, allow_nan=True).encode()
    return raw[:-1] + b', "crc32": %d}' % zlib.crc32(raw)


def _is_as_written(raw: bytes) -> bool:
    """Whether its own checksum is right: where a disk changed a byte, what it says of training may still look sane."""
    seal = _SEAL.search(raw, max(len(raw) - _SEAL_BYTES, 0))
    return seal is not None and int(seal[1]) == zlib.crc32(b"}", zlib.crc32(memoryview(raw)[: seal.start()]))


def parse_manifest(raw: bytes) -> Manifest:
    """
    Return the manifest, or raise `ProtocolError` naming the field.

    Nothing here trusts its input: it may come out of somebody else's bucket.
    """
    try:
        fields = json.loads(raw)
    except (ValueError, RecursionError) as error:
        msg = f"{MANIFEST}: not JSON: {error}"
        raise ProtocolError(msg) from None
    _expect(isinstance(fields, dict), "", "an object", fields)
    _expect("crc32" not in fields or _is_as_written(raw), "crc32", "the checksum of its bytes", fields.get("crc32"))
    _expect(fields.get("format") == FORMAT, "format", repr(FORMAT), fields.get("format"))
    _expect(fields.get("chunk_bytes") == CHUNK_BYTES, "chunk_bytes", str(CHUNK_BYTES), fields.get("chunk_bytes"))
    known: dict[str, Any] = {name: _whole(fields, name) for name in ("lineage", "step", "attempt", "world_size")}
    known |= {name: _text(fields, name) for name in ("job", "id", "written_at", "algorithm", "reason", "framework")}
    manifest = Manifest(
        **known,
        contents=tuple(_list_of(fields, "contents", str)),
        shards=_parse_shards(fields),
        state=fields.get("state", {}),
    )
    _expect(isinstance(manifest.state, dict), "state", "an object", manifest.state)
    _expect(_NAME.fullmatch(manifest.ref.name) is not None, "id", "8 hexadecimal digits", manifest.id)
    return manifest


def _parse_shards(fields: dict[str, Any]) -> tuple[Shard, ...]:
    raw = _list_of(fields, "shards", dict)
    _expect(0 < len(raw) <= MAX_SHARDS, "shards", f"1 to {MAX_SHARDS} entries", len(raw))
    shards = tuple(_parse_shard(entry) for entry in raw)
    paths = [shard.path for shard in shards]
    _expect(len(set(paths)) == len(paths), "shards", "distinct paths", "a path named twice")
    return shards


def _parse_shard(entry: dict[str, Any]) -> Shard:
    path = _text(entry, "path")
    _expect(is_inside(path), "shards.path", "a relative path inside the checkpoint", path)
    size = _whole(entry, "size_bytes")
    further = _parse_checksums(entry, "crc64nvme", size) if "crc64nvme" in entry else ()
    return Shard(path, size, _parse_checksums(entry, "checksums", size), further)


def _parse_checksums(entry: dict[str, Any], name: str, size: int) -> tuple[int, ...]:
    checksums = tuple(_list_of(entry, name, int))
    _expect(len(checksums) == math.ceil(size / CHUNK_BYTES), f"shards.{name}", "one per chunk", len(checksums))
    _expect(all(0 <= c < 1 << 64 for c in checksums), f"shards.{name}", "64-bit numbers", "a larger one")
    return checksums


def is_inside(path: str) -> bool:
    """Whether a relative path stays in its folder and is spelled in one way only."""
    parts = PurePosixPath(path).parts
    plain = bool(parts) and "/".join(parts) == path and "\\" not in path and path.isprintable()
    return plain and parts[0] not in {"/", MANIFEST} and ".." not in parts


def _expect(ok: bool, where: str, expected: str, found: object) -> None:  # noqa: FBT001  # reads as a claim
    if not ok:
        msg = f"{MANIFEST}: {where or 'document'}: expected {expected}, got {str(found)[:80]!r}"
        raise ProtocolError(msg)


def _whole(fields: dict[str, Any], name: str) -> int:
    value = fields.get(name)
    _expect(type(value) is int and 0 <= value < MAX_NUMBER, name, f"a whole number below {MAX_NUMBER}", value)
    return int(value)  # type: ignore[arg-type]  # checked above


def _text(fields: dict[str, Any], name: str) -> str:
    value = fields.get(name)
    _expect(isinstance(value, str) and len(value) <= 4096, name, "a text", value)  # noqa: PLR2004
    return str(value)


def _list_of(fields: dict[str, Any], name: str, kind: type) -> list[Any]:
    value = fields.get(name)
    _expect(isinstance(value, list) and all(type(v) is kind for v in value), name, f"a list of {kind.__name__}", value)
    return value  # type: ignore[return-value]  # checked above


# ---------------------------------------------------------------------------- end record


@dataclass(frozen=True)
class EndRecord:
    """
    How training ended, written durably by the saver: `left` (interrupted, saved at `step`)
    or `done`. Exit codes do not cross torchrun, so this is what counts.
    """

    kind: str
    step: int

    def dump(self) -> bytes:
        return json.dumps(asdict(self)).encode()


def parse_end(raw: bytes) -> EndRecord:
    try:
        fields = json.loads(raw)
        record = EndRecord(kind=fields["kind"], step=int(fields["step"]))
    except (ValueError, KeyError, TypeError) as error:
        msg = f"end record: {error!r}"
        raise ProtocolError(msg) from None
    if record.kind not in {"left", "done"}:
        msg = f"end record: kind: expected left or done, got {record.kind!r}"
        raise ProtocolError(msg)
    return record


# ------------------------------------------------------------------------------ processes


def process_started(pid: int) -> int:
    """Start time of a live process in clock ticks, as in `Word.SAVER_STARTED`; 0 if it is gone or a zombie."""
    fields = _stat(pid)
    return 0 if fields[0] in {"", "Z", "X"} else int(fields[19])


def process_state(pid: int) -> str:
    """What a process does, for people; empty if there is nothing to say."""
    return _STATES.get(_stat(pid)[0], "")


def is_rank_alive(page: ControlPage, rank: int) -> bool:
    """Whether the process that has entered its name there is the one that lives under that number."""
    pid = page.get(rank, Slot.PID)
    return pid != 0 and process_started(pid) == page.get(rank, Slot.STARTED)


def describe_rank(page: ControlPage, rank: int) -> str:
    """Say which process it is, what that does, and where it is."""
    pid = page.get(rank, Slot.PID)
    doing = process_state(pid)
    return f"rank {rank}, process {pid}, {doing and doing + ', '}at step {page.get(rank, Slot.STEP)}"


def _stat(pid: int) -> list[str]:
    """Fields of /proc/<pid>/stat from the state on, which is empty when it is gone."""
    try:
        raw = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return [""]
    return raw[raw.rindex(b")") + 2 :].decode().split()


_STATES: Final = {
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
    "D": "waiting for a disk, or for the server behind it",
}


# -------------------------------------------------------------------------- control page


class Word(IntEnum):
    """
    Index of each 64-bit word of the page's head. Who writes it stands beside it.

    A word has one writer at a time; 8-byte aligned stores are atomic on x86-64 and arm64.
    """

    MAGIC = 0  # creator, last
    NUM_RANKS = 1  # creator: ranks on this machine
    SAVER_PID = 2  # saver
    SAVER_STARTED = 3  # saver: start time in clock ticks, field 22 of /proc/<pid>/stat
    SAVER_BEAT_NS = 4  # saver: time.monotonic_ns(), many times a second
    PROPOSED_STEP = 5  # saver: the step of the next save
    DECISION = 6  # saver: `Decision` on PROPOSED_STEP
    REASON = 7  # saver: `Reason` of that save
    REQUEST_SAVE = 8  # supervisor or user: counts up to ask for a save
    REQUEST_LEAVE = 9  # supervisor: 1 asks for save and leave
    SAVING_STEP = 10  # saver: step being staged or written, 0 when idle
    NUM_COMMITTED = 11  # saver: saves committed by this attempt
    COMMITTED_STEP = 12  # saver: the newest of them
    NUM_FAILED = 13  # saver, and whoever killed it: saves that failed or were skipped; `error()` has the text
    SAVE_NS = 14  # saver: duration of the last commit, staged to durable
    SAVE_BYTES = 15  # saver: size of the last commit
    ENDED = 16  # saver: `Ended`, after the end record is durable
    APART = 19  # saver, and local rank 0 before there is one: a bit for each object by name, 1 where ranks have a state of their own
    UNRECORDED = 18  # local rank 0: 1 means a last save at the script's exit, which records no end
    SERVED_SAVE = 17  # saver: the REQUEST_SAVE that was answered last, by a commit or a failure
    TOLD = 20  # whoever wrote the text of `error()`: `Told`, what it is about


class Slot(IntEnum):
    """Index of each 64-bit word of a rank's slot. The rank writes them, but for what says otherwise."""

    PID = 0
    STARTED = 1
    STEP = 2  # optimizer steps finished
    MAX_STEPS = 3  # 0: unknown
    PHASE = 4  # `Phase`
    BEAT_NS = 5
    LOSS = 6  # double
    LR = 7  # double
    ARENA_FD = 8  # staging memory is /proc/<PID>/fd/<ARENA_FD>
    ARENA_BYTES = 9
    ARENA_STATE = 10  # `Arena`; rank: ANNOUNCED, FILLING, READY; saver: MAPPED, or NONE if there is no memory
    ARENA_STEP = 11  # step of the bytes in it, or on their way into it
    SAMPLES = 12  # samples consumed by all ranks together
    IMAGE_BYTES = 13  # size of the shard, and of its edges behind it; the arena begins with their bytes
    STATE_BYTES = 14  # size of the JSON, the rank's part of `Manifest.state`
    VOID_STEP = 15  # step of a save that this rank could not take part in
    WARMING = 16  # 1: its staging memory is being prepared; a save now would cost training time
    FROZEN = 17  # names the bytes of its frozen weights; 0: it has none
    FROZEN_BYTES = 18  # of them staged with this save; 0: the saver has them
    FROZEN_AT = 19  # where in the arena they begin, on a page
    FROZEN_HELD = 20  # saver: the FROZEN that its newest checkpoint has
    STATE_AT = 21  # where in the arena the JSON begins
    WINDOW_BYTES = 22  # the arena holds so much of an image at a time; 0: all of it
    WINDOWS = 23  # windows filled in this save so far; READY from the first on
    FIRST_BATCH = 25  # a sum of the first batch that it was given; 0: not yet
    SECOND_BATCH = 26
    WEIGHTS = (
        27  # sums of some of its weights, of 16 bits each, at the save that it staged last before one was committed
    )
    WINDOWS_TAKEN = 24  # saver: of them written; the rank sets it to 0 before the first


class Decision(IntEnum):
    NONE = 0
    PROPOSED = 1
    COMMITTED = 2
    ABORTED = 3


class Reason(IntEnum):
    """Why a save is made. LEAVE: ranks exit after it. FINAL: training is done."""

    INTERVAL = 0
    ASKED = 1
    LEAVE = 2
    FINAL = 3


class Phase(IntEnum):
    STARTING = 0
    LOADING = 1
    TRAINING = 2
    SAVING = 3
    DONE = 4
    LEFT = 5


class Arena(IntEnum):
    NONE = 0
    ANNOUNCED = 1
    MAPPED = 2
    FILLING = 3
    READY = 4


class Ended(IntEnum):
    """How it ended. FAILED: the final save failed again and again; there is no end record."""

    NO = 0
    LEFT = 1
    DONE = 2
    FAILED = 3


class Told(IntEnum):
    """What the page's text is about. The text itself is for people only."""

    FAILURE = 0  # of a save, or of what belongs to one
    HINDRANCE = 1  # a rank's own: why it takes no part in a save, whose failure it explains
    WAITING = 2  # for a rank; nothing has failed yet
    DEATH = 3  # the saver's own last words
    NEWS = 4  # counted as a failure, so that it is read, and nothing is lost


MAX_RANKS: Final = 64
_MAGIC: Final = 0x31454741504D5256  # "VRMPAGE1"
_HEAD_WORDS: Final = 32
_SLOT_WORDS: Final = 32
_TEXT_BYTES: Final = 1024
_TEXT_AT: Final = 8 * (_HEAD_WORDS + MAX_RANKS * _SLOT_WORDS)
PAGE_BYTES: Final = _TEXT_AT + _TEXT_BYTES


class ControlPage:
    """
    Shared memory of one attempt, a small file that any of its processes can open by path.

    `words` are those of the head, then those of each rank's slot. Reading and writing a word costs well under a microsecond. The page outlives whoever
    made it; remove the file when the attempt is over.
    """

    def __init__(self, path: str | os.PathLike[str], memory: mmap.mmap) -> None:
        self.path = Path(path)
        self._memory = memory
        self.words = memoryview(memory)[:_TEXT_AT].cast("Q")
        self._floats = memoryview(memory)[:_TEXT_AT].cast("d")

    @classmethod
    def create(cls, path: str | os.PathLike[str], *, num_ranks: int) -> ControlPage:
        """Make a new page; its memory is reserved now, so that no later store can fail."""
        if not 0 < num_ranks <= MAX_RANKS:
            msg = f"ranks on this machine: expected 1 to {MAX_RANKS}, got {num_ranks}"
            raise ProtocolError(msg)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, PAGE_BYTES)
            page = cls(path, mmap.mmap(fd, PAGE_BYTES))
        except BaseException:
            Path(path).unlink()
            raise
        finally:
            os.close(fd)
        page[Word.NUM_RANKS] = num_ranks
        page[Word.MAGIC] = _MAGIC
        return page

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> ControlPage:
        """Map a page that exists; `OSError` if it does not, `ProtocolError` if it is not one."""
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            size = os.fstat(fd).st_size
            if size != PAGE_BYTES:
                msg = f"{path}: expected a control page of {PAGE_BYTES} bytes, got {size}"
                raise ProtocolError(msg)
            page = cls(path, mmap.mmap(fd, PAGE_BYTES))
        finally:
            os.close(fd)
        if page[Word.MAGIC] != _MAGIC:
            msg = f"{path}: not a control page"
            raise ProtocolError(msg)
        return page

    @property
    def num_ranks(self) -> int:
        return self.words[Word.NUM_RANKS]

    def __getitem__(self, word: Word) -> int:
        return self.words[word]

    def __setitem__(self, word: Word, value: int) -> None:
        self.words[word] = value

    @staticmethod
    def index(rank: int, slot: Slot) -> int:
        """Where in `words` a rank's slot has this one."""
        return _HEAD_WORDS + rank * _SLOT_WORDS + slot

    def get(self, rank: int, slot: Slot) -> int:
        return self.words[_HEAD_WORDS + rank * _SLOT_WORDS + slot]

    def put(self, rank: int, slot: Slot, value: int) -> None:
        self.words[_HEAD_WORDS + rank * _SLOT_WORDS + slot] = value

    def get_float(self, rank: int, slot: Slot) -> float:
        return self._floats[_HEAD_WORDS + rank * _SLOT_WORDS + slot]

    def put_float(self, rank: int, slot: Slot, value: float) -> None:
        self._floats[_HEAD_WORDS + rank * _SLOT_WORDS + slot] = value

    def error(self) -> str:
        """The last complaint, of a saver or a rank, for a human; empty if there is none. `Word.TOLD` says what it is about."""
        (length,) = struct.unpack_from("<Q", self._memory, _TEXT_AT)
        start = _TEXT_AT + 8
        return bytes(self._memory[start : start + min(length, _TEXT_BYTES - 8)]).decode(errors="replace")

    def set_error(self, text: str, told: Told = Told.FAILURE) -> None:
        raw = text.encode(errors="backslashreplace")[: _TEXT_BYTES - 8]  # a folder's name may be any bytes
        struct.pack_into("<Q", self._memory, _TEXT_AT, 0)
        self[Word.TOLD] = told
        self._memory[_TEXT_AT + 8 : _TEXT_AT + 8 + len(raw)] = raw
        struct.pack_into("<Q", self._memory, _TEXT_AT, len(raw))

    def close(self) -> None:
        self.words.release()
        self._floats.release()
        self._memory.close()
