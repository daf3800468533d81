"""Checkpoints to test with."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from runner.storage.checkpoints import CheckpointDir
from runner.storage.checksums import describe_file
from vramfarm.checksum import find_crc64nvme
from vramfarm.protocol import ALGORITHM, CHUNK_BYTES, Manifest, Shard

SHARDS = {"shard-00000-of-00002.safetensors": b"zero" * 50, "extra/shard-00001-of-00002.safetensors": b"one" * 70}


def fill(folder: Path, step: int = 500, *, lineage: int = 1, shards: Mapping[str, bytes] = SHARDS) -> Manifest:
    """Write the shards of a checkpoint and return its manifest, which is not written."""
    for path, data in shards.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    return Manifest(
        job="test",
        lineage=lineage,
        step=step,
        id=f"{step:08x}",
        attempt=1,
        world_size=2,
        written_at="2026-01-01T00:00:00+00:00",
        algorithm=ALGORITHM,
        shards=tuple(describe(folder / path, path) for path in shards),
    )


def describe(path: Path, name: str) -> Shard:
    """As the saver describes it, where it can compute CRC64NVME."""
    crc64nvme = find_crc64nvme()
    if crc64nvme is None:
        return describe_file(path, name)
    with path.open("rb") as file:
        sums = tuple(crc64nvme(chunk, 0) for chunk in iter(lambda: file.read(CHUNK_BYTES), b""))
    return replace(describe_file(path, name), crc64nvme=sums)


def without_crc64nvme(manifest: Manifest) -> Manifest:
    """As it was written before there was one, or where it cannot be computed."""
    return replace(manifest, shards=tuple(replace(shard, crc64nvme=()) for shard in manifest.shards))


def commit(
    directory: CheckpointDir, step: int = 500, *, lineage: int = 1, shards: Mapping[str, bytes] = SHARDS
) -> Manifest:
    temporary = directory.root / f".tmp-{step:08d}"
    manifest = fill(temporary, step, lineage=lineage, shards=shards)
    directory.adopt(temporary, manifest)
    return manifest


ODD_NAMES = [
    "ideo\u3000space",
    "nbsp\u00a0x",
    "fam\U0001f468\u200d\U0001f469",
    "two\nlines",
    "tab\tx",
    "\x7f",
    "L" * 250,
]
