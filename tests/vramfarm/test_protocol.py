"""The manifest and the control page: what comes out is what went in, and nothing else is believed."""

import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vramfarm import protocol
from vramfarm.protocol import ControlPage, EndRecord, Manifest, ProtocolError, Ref, Shard, Slot, Word

SIZES = st.integers(1, 5 * protocol.CHUNK_BYTES)
NUMBERS = st.integers(0, protocol.MAX_NUMBER - 1)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@st.composite
def manifests(draw):
    sizes = draw(st.lists(SIZES, min_size=1, max_size=3))
    shards = tuple(
        Shard(
            protocol.shard_name(i, len(sizes)), size, sums, draw(st.sampled_from([(), tuple(~n % 2**64 for n in sums)]))
        )
        for i, size in enumerate(sizes)
        for sums in [tuple(range(-(-size // protocol.CHUNK_BYTES)))]
    )
    return Manifest(
        job=draw(st.text(max_size=9)),
        lineage=draw(NUMBERS),
        step=draw(NUMBERS),
        id=f"{draw(st.integers(0, 2**32 - 1)):08x}",
        attempt=draw(NUMBERS),
        world_size=len(sizes),
        written_at="2026-01-01T00:00:00+00:00",
        algorithm="crc32",
        shards=shards,
        contents=("model",),
        state=draw(st.dictionaries(st.text(max_size=5), JSON, max_size=3)),
    )


@given(manifests())
def test_a_manifest_comes_back_as_it_was(manifest):
    """
    Written and read again, a manifest is the same.
    """
    parsed = protocol.parse_manifest(protocol.dump_manifest(manifest))

    assert manifest == parsed
    assert [shard.crc64nvme for shard in manifest.shards] == [shard.crc64nvme for shard in parsed.shards]


def one_shard(**fields):
    """Bytes of a manifest whose one shard, of two chunks, has these fields beside or in place of its own."""
    shard = {"path": "shard", "size_bytes": protocol.CHUNK_BYTES + 1, "checksums": [1, 2], **fields}
    shards = (Shard("shard", protocol.CHUNK_BYTES + 1, (1, 2)),)
    manifest = Manifest("job", 0, 5, "0123abcd", 1, 1, "2026-01-01T00:00:00+00:00", "crc32", shards)
    return protocol.seal(json.loads(protocol.dump_manifest(manifest)) | {"shards": [shard]})


@pytest.mark.parametrize(
    "value", [[], [1], [1, 2, 3], [1, -1], [1, 2**64], [1, True], [1, 2.0], [1, "2"], "12", None, {}], ids=repr
)
@pytest.mark.parametrize("name", ["checksums", "crc64nvme"])
def test_a_list_of_checksums_has_a_number_for_each_chunk(name, value):
    """
    Both lists; whoever reads the manifest adds them up.
    """
    with pytest.raises(ProtocolError, match=f"shards.{name}|^{protocol.MANIFEST}: {name}: "):
        protocol.parse_manifest(one_shard(**{name: value}))


def test_what_a_shard_may_also_say_keeps_no_reader_from_the_rest():
    """
    A manifest without CRC64NVME is as it was before there was one; of a later one a reader takes what it knows.
    """
    plain, later = one_shard(), one_shard(crc64nvme=[3, 2**64 - 1], another=[1.5])

    assert protocol.parse_manifest(plain) == protocol.parse_manifest(later)
    assert (3, 2**64 - 1) == protocol.parse_manifest(later).shards[0].crc64nvme
    assert "crc64nvme" not in json.loads(protocol.dump_manifest(protocol.parse_manifest(plain)))["shards"][0]


@given(manifests(), st.integers(min_value=0), st.integers(0, 7))
def test_a_bit_of_a_manifest_that_flips_changes_nothing_unseen(manifest, place, bit):
    """
    What it says of shards and of training is what was written, or it is refused: `0.001` may not become `0.003`.
    """
    raw = bytearray(protocol.dump_manifest(manifest))
    raw[place % len(raw)] ^= 1 << bit

    try:
        parsed = protocol.parse_manifest(bytes(raw))
    except ProtocolError:
        return

    assert protocol.dump_manifest(manifest) == protocol.dump_manifest(parsed)


def test_a_manifest_of_before_has_no_checksum_of_its_own():
    """
    It is read as it was.
    """
    fields = json.loads(one_shard())
    del fields["crc32"]

    assert protocol.parse_manifest(one_shard()) == protocol.parse_manifest(json.dumps(fields).encode())


@given(st.binary(max_size=60) | JSON.map(lambda value: json.dumps(value).encode()))
def test_what_is_no_manifest_is_refused(raw):
    """
    Whatever the bytes are, there is one kind of error.
    """
    with pytest.raises(ProtocolError):
        protocol.parse_manifest(raw)


@given(
    manifests(),
    st.sampled_from(["job", "lineage", "step", "id", "shards", "chunk_bytes", "format", "contents", "state"]),
    JSON,
)
def test_a_manifest_with_a_wrong_field_is_refused_or_whole(manifest, name, value):
    """
    A field changed by anybody makes an error or another whole manifest, never something between.
    """
    fields = json.loads(protocol.dump_manifest(manifest)) | {name: value}

    try:
        parsed = protocol.parse_manifest(protocol.seal(fields))
    except ProtocolError:
        return

    assert parsed == protocol.parse_manifest(protocol.dump_manifest(parsed))


@pytest.mark.parametrize(
    "path", ["../x", "/etc/passwd", "a/../b", "a//b", "./a", "", "a\\b", "a\0b", protocol.MANIFEST, ".", ".."]
)
def test_no_path_leaves_the_folder(path):
    """
    A shard's path stays inside its checkpoint and is spelled in one way.
    """
    assert not protocol.is_inside(path)


@pytest.mark.parametrize(
    "name", ["step-5-0123abcd", "step-00000005-0123ABCD", ".tmp-00000005-0123abcd", "step-00000005-0123abcd.1", ""]
)
def test_other_names_are_no_checkpoints(name):
    """
    Only the one form of a name is taken for a checkpoint.
    """
    with pytest.raises(ProtocolError):
        protocol.parse_name(name)


def test_the_newest_is_that_of_the_newest_lineage():
    """
    A rolled-back run's checkpoints are newer than the higher steps it left behind.
    """
    old, new = Ref(0, 900, 1, "00000000"), Ref(1, 100, 1, "00000000")

    assert [old, new] == sorted([new, old])
    assert (900, "00000000") == protocol.parse_name(old.name)


def test_two_mappings_of_a_page_see_the_same_words(tmp_path):
    """
    Whoever opens the page by its path reads what others wrote.
    """
    page = ControlPage.create(tmp_path / "page", num_ranks=2)
    other = ControlPage.open(tmp_path / "page")

    page[Word.PROPOSED_STEP] = 7
    page.put(1, Slot.STEP, 2**63)
    page.put_float(1, Slot.LOSS, 0.1)
    page.set_error("disk full: ü" + "x" * 5000)

    assert (2, 7, 2**63, 0.1) == (
        other.num_ranks,
        other[Word.PROPOSED_STEP],
        other.get(1, Slot.STEP),
        other.get_float(1, Slot.LOSS),
    )
    assert other.error().startswith("disk full: üxx")
    page.close()
    other.close()


def test_a_complaint_about_a_folder_of_any_bytes_is_told(tmp_path):
    """
    Whoever complains does not die of the folder's name.
    """
    page = ControlPage.create(tmp_path / "page", num_ranks=1)

    page.set_error(os.fsdecode(b"/night-\xff: no room"))

    assert r"/night-\udcff: no room" == page.error()


def test_a_file_that_is_no_page_is_refused(tmp_path):
    """
    Neither a short file nor one without the mark is mapped.
    """
    (tmp_path / "short").write_bytes(b"x")
    (tmp_path / "zeros").write_bytes(bytes(protocol.PAGE_BYTES))

    for name in ("short", "zeros"):
        with pytest.raises(ProtocolError):
            ControlPage.open(tmp_path / name)


@given(st.binary(max_size=40) | JSON.map(lambda value: json.dumps(value).encode()))
def test_an_end_record_is_refused_unless_it_is_one(raw):
    """
    An end that cannot be read is no end.
    """
    try:
        record = protocol.parse_end(raw)
    except ProtocolError:
        return

    assert record == protocol.parse_end(record.dump())


def test_an_end_record_comes_back_as_it_was():
    """
    Written and read again, it is the same.
    """
    assert EndRecord("left", 5) == protocol.parse_end(EndRecord("left", 5).dump())


def test_a_process_is_known_by_pid_and_start():
    """
    A live process has a start time that stays; one that is gone has none.
    """
    mine = protocol.process_started(os.getpid())

    assert mine == protocol.process_started(os.getpid()) > 0
    assert 0 == protocol.process_started(2**22 + 1)
