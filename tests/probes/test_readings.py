"""Saved readings: what real machines printed, dialects nobody has seen yet, and what is no reading at all."""

import json
import time
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.cli.explain import as_json
from runner.facts import Broken, BusBandwidth, CardTable, Fabric, MemoryLimit, PeerAccess, SharedMemory, Topology
from runner.probes.readings import read

CORPUS = [
    json.loads(line)
    for line in (Path(__file__).parents[1] / "data" / "machines" / "machines.jsonl").read_text().splitlines()
]
REAL = {record["id"]: record["text"] for record in CORPUS}
# What no text can tell: remarks, exit codes, and in a topology what another command said of peer access.
BESIDE = {
    "topo": {"notes", "exit_code", "suspicious", "p2p_ok", "p2p_pairs_ok"},
    "p2p": {"notes", "link_class", "weakest_link", "all_pairs_nvlink"},
}


def told(text):
    return json.loads(json.dumps(as_json(read(text))))


# ------------------------------------------------------------------------------ the corpus


@pytest.mark.parametrize("kind", ["topo", "p2p", "fabric", "query", "shm", "busbw"])
def test_real_readings_are_read_as_they_should_be(kind):
    """
    Every fact of every real reading, the broken ones too. A miss is named.
    """
    records = [record for record in CORPUS if record["kind"] == kind]
    found = [(record, told(record["text"])) for record in records]
    misses = [
        (record["id"], field, expected, fields.get(field, "missing"))
        for record, fields in found
        for field, expected in ({"error": False} | record["expected"] | {"kind": kind}).items()
        if field not in BESIDE.get(kind, {"notes"}) and (field not in fields or fields[field] != expected)
    ]

    assert [] == misses
    assert records


def test_a_broken_reading_says_what_and_what_to_do():
    """
    An error has a message and a hint; a text that can be read has no message.
    """
    broken = [fields for record in CORPUS if (fields := told(record["text"]))["error"]]

    assert 5 == len(broken)
    assert all(fields["message"] and fields["findings"][0]["hint"] for fields in broken)


# ------------------------------------------------------------------------- unseen dialects

LINKS = ["NV1", "NV2", "NV4", "NV12", "NV18", "SYS", "NODE", "PHB", "PXB", "PIX", "SOC"]
NICS = ["NIC0", "NIC11", "mlx5_0", "mlx5_bond_0", "hfi1_0", "ibp3s0", "bnxt_re0"]
AFFINITY = {"CPU Affinity": "0-23,48-71", "NUMA Affinity": "0-1", "GPU NUMA ID": "N/A"}


@st.composite
def topologies(draw):
    """A topology, and a text of it in a dialect that the driver could print tomorrow."""
    numbers = sorted(draw(st.sets(st.integers(0, 15), min_size=2, max_size=8)))
    gpus = [f"GPU{n}" for n in numbers]
    nics = draw(st.lists(st.sampled_from(NICS), unique=True, max_size=4))
    names = [*gpus, *nics]
    links = {frozenset(pair): draw(st.sampled_from(LINKS)) for pair in combinations(names, 2)}
    columns = draw(st.permutations(names)) if draw(st.booleans()) else names
    affinity = draw(st.lists(st.sampled_from(sorted(AFFINITY)), unique=True))
    gap = draw(st.sampled_from(["\t", "  ", " \t ", "        "]))
    head_glue = draw(st.sampled_from([gap, ""]))
    head = gap + gap.join(columns) + gap + head_glue.join(affinity)
    if draw(st.booleans()):
        head = f"\x1b[4m{head}\x1b[0m"
    rows = []
    for name in draw(st.permutations(names)):
        cells = [" X " if name == other else links[frozenset((name, other))] for other in columns]
        ends = [AFFINITY[a] if draw(st.booleans()) else "" for a in affinity] if name in gpus else []
        rows.append(f"{name}{gap}{gap.join(cells)}{gap}{gap.join(ends)}")
    body = [draw(st.sampled_from(["", "  ", "    "])) + head, *rows]
    legend = ["", "Legend:", "", "  X    = Self", "  PIX  = Connection traversing at most", "         a bridge"]
    before = draw(st.sampled_from([[], ["$ nvidia-smi topo -m"], ["--- at 09:34 ---", ""]]))
    lines = [*before, *body, *(legend if draw(st.booleans()) else [])]
    pairs = [[a, b, links[frozenset((f"GPU{a}", f"GPU{b}"))]] for a, b in combinations(numbers, 2)]
    return draw(st.sampled_from(["\n", "\r\n"])).join(lines), gpus, pairs


@settings(deadline=None, max_examples=150)
@given(topologies())
def test_a_topology_is_read_by_its_structure(drawn):
    """
    Columns in any order, network cards anywhere, holes in the numbering, affinity empty, absent or run together.
    """
    text, gpus, pairs = drawn
    fields = told(text)

    assert (gpus, pairs, False) == (fields["gpus"], fields["pairs"], fields["error"])


@settings(deadline=None, max_examples=100)
@given(topologies(), st.data())
def test_a_cut_topology_is_an_error_or_whole(drawn, data):
    """
    Wherever a copy ends, no pair is invented, and no pair is silently lost.
    """
    text, _, pairs = drawn
    fields = told(text[: data.draw(st.integers(0, len(text)))])

    if fields["error"]:
        assert fields["message"]
        return
    seen = [pair for pair in pairs if f"GPU{pair[0]}" in fields["gpus"] and f"GPU{pair[1]}" in fields["gpus"]]
    assert [pair[:2] for pair in seen] == [pair[:2] for pair in fields["pairs"]]


def test_a_table_without_its_head_is_read_by_the_self_entries():
    """
    The head scrolled away; the diagonal names the columns.
    """
    text = "GPU0\t X \tNV4\tSYS\t0-23\nGPU1\tNV4\t X \tPHB\t0-23\nGPU3\tSYS\tPHB\t X \t24-47\n"

    assert [[0, 1, "NV4"], [0, 3, "SYS"], [1, 3, "PHB"]] == told(text)["pairs"]


def test_a_table_that_a_narrow_terminal_broke_is_put_together():
    """
    Copied from eighty columns: head and rows go on in the next line.
    """
    text = "      GPU0  GPU1\nGPU2  CPU Affinity\nGPU0   X    NV4\nSYS   0-23\nGPU1  NV4    X\nSYS   0-23\nGPU2  SYS   SYS\n X    24-47\n"

    assert [[0, 1, "NV4"], [0, 2, "SYS"], [1, 2, "SYS"]] == told(text)["pairs"]


def test_links_and_affinity_that_run_together_are_told_apart():
    """
    `NV120-23` may be NV12 or NV1: the other side of the pair decides.
    """
    text = "\tGPU0\tGPU1CPU AffinityNUMA Affinity\nGPU0\tX\tNV120-230N/A\nGPU1\tNV12\tX24-471N/A\n"

    assert [[0, 1, "NV12"]] == told(text)["pairs"]


def test_a_self_entry_in_the_wrong_place_is_an_error():
    """
    Columns that slipped give pairs that are not there.
    """
    fields = told("\tGPU0\tGPU1\tGPU2\nGPU0\tX\tNV4\tSYS\nGPU1\tX\tNV4\tSYS\nGPU2\tSYS\tSYS\tX\n")

    assert (True, "unknown") == (fields["error"], fields["link_class"])
    assert "row GPU1" in fields["message"]


def test_sides_that_differ_count_as_the_weaker():
    """
    Both are named in a finding.
    """
    fields = told("\tGPU0\tGPU1\nGPU0\tX\tNV4\nGPU1\tSYS\tX\n")

    assert [[0, 1, "SYS"]] == fields["pairs"]
    assert any("0-1 are told differently" in finding["message"] for finding in fields["findings"])


def test_a_text_from_powershell_is_read():
    """
    Its redirect writes UTF-16.
    """
    text = "\tGPU0\tGPU1\r\nGPU0\tX\tPHB\r\nGPU1\tPHB\tX\r\n"

    assert [[0, 1, "PHB"]] == told(text.encode("utf-16"))["pairs"]


def test_markdown_tables_are_tables():
    """
    As people paste them into tickets.
    """
    text = "| | GPU0 | GPU1 | CPU Affinity |\n|---|---|---|---|\n| GPU0 | X | PHB | 0-7 |\n| GPU1 | PHB | X | 0-7 |\n"

    assert [[0, 1, "PHB"]] == told(text)["pairs"]


PEERS = {
    "bandwidth test, sentences": "Device=0 CAN Access Peer Device=1\nDevice=1 CANNOT Access Peer Device=0\n",
    "bandwidth test, matrix": "P2P Connectivity Matrix\n     D\\D     0     1\n     0\t     1     0\n     1\t     0     1\n",
    "one side only": " \tGPU0\tGPU1\n GPU0\tX\tOK\n GPU1\tDR\tX\n",
}


@pytest.mark.parametrize("text", PEERS.values(), ids=PEERS)
def test_peer_access_counts_only_where_both_sides_have_it(text):
    """
    One side that is refused is a refusal.
    """
    fields = told(text)

    assert ("p2p", False, False) == (fields["kind"], fields["p2p_all_ok"], fields["p2p_any_ok"])
    assert 1 == len(fields["not_ok"])


SHARED = {
    "kilobytes": "Filesystem     1K-blocks  Used Available Use% Mounted on\nshm 65536 0 65536 0% /dev/shm",
    "posix": "Filesystem 1024-blocks Used Available Capacity Mounted on\nshm 65536 0 65536 0% /dev/shm",
    "bytes": "Filesystem 1B-blocks Used Available Use% Mounted on\nshm 67108864 0 67108864 0% /dev/shm",
    "with a type": "Filesystem Type Size Used Avail Use% Mounted on\nshm tmpfs 64M 0 64M 0% /dev/shm",
    "German": "Dateisystem Größe Benutzt Verf. Verw% Eingehängt auf\nshm 64M 0 64M 0% /dev/shm",
    "broken line": "Filesystem Size Used Avail Use% Mounted on\na-very-long-name-of-a-file-system\n 64M 0 64M 0% /dev/shm",
    "mount": "shm on /dev/shm type tmpfs (rw,nosuid,nodev,noexec,relatime,size=65536k)",
    "/proc/mounts": "shm /dev/shm tmpfs rw,nosuid,nodev,noexec,relatime,size=65536k,inode64 0 0",
}


@pytest.mark.parametrize("text", SHARED.values(), ids=SHARED)
def test_shared_memory_is_read_in_every_unit_and_language(text):
    """
    64 MiB, however they are written.
    """
    fields = told(text)

    assert (67108864, "too_small") == (fields["size_bytes"], fields["verdict"])


LIMITS = {
    "grep": ("/sys/fs/cgroup/memory.current:1048576\n/sys/fs/cgroup/memory.max:8589934592", 8589934592),
    "head": ("==> /sys/fs/cgroup/memory.max <==\n8589934592\n", 8589934592),
    "-1": ("$ cat /sys/fs/cgroup/memory/memory.limit_in_bytes\n-1", None),
    "max": ("memory.max: max", None),
}


@pytest.mark.parametrize(("text", "expected"), LIMITS.values(), ids=LIMITS)
def test_limits_are_found_by_the_names_of_their_files(text, expected):
    """
    Usage that stands first is not the limit.
    """
    assert expected == told(text)["limit_bytes"]


FABRICS = {
    "completed": ("State : Completed\n Status : Success\n Health\n  Summary : Healthy", True),
    "completed, unhealthy": ("State : Completed\n Status : Success\n Health\n  Summary : Unhealthy", False),
    "completed, a route is bad": ("State : Completed\n Status : Success\n Health\n  Route Unhealthy : True", False),
    "failed": ("State : Completed\n Status : Unknown Error", False),
    "not started": ("State : Not Started\n Status : N/A", False),
    "none on this card": ("State : N/A\n Status : N/A", None),
}


@pytest.mark.parametrize(("block", "expected"), FABRICS.values(), ids=FABRICS)
def test_a_fabric_is_ready_when_it_is_joined_and_well(block, expected):
    """
    Completed is not enough.
    """
    indented = "\n".join(f"        {line}" for line in block.splitlines())

    assert expected is told(f"    Fabric\n{indented}\n")["ready"]


def test_one_card_of_eight_holds_the_fabric_up():
    """
    All have to join.
    """
    well = "    Fabric\n        State : Completed\n        Status : Success\n"
    fields = told("GPU 00000000:01:00.0\n".join([well] * 7 + [well.replace("Completed", "In Progress")]))

    assert (8, False) == (len(fields["fabric"]), fields["ready"])


BANDWIDTHS = {
    "torch benchmark": (
        (
            "The average bandwidth of all_reduce with a 4.0GB payload (5 trials, 8 ranks):\n"
            " algbw: 260.695 GBps (2085.6 Gbps)\n busbw: 456.216 GBps (3649.7 Gbps)\n"
        ),
        (8, 4 << 30, 456.216),
    ),
    "old nccl-tests, no root": (
        (
            "#       size  count  type  redop  time  algbw  busbw  error  time  algbw  busbw  error\n"
            "# Rank 0 Pid 1 on n device 0 [0x07] A100-SXM4-40GB\n# Rank 1 Pid 1 on n device 1 [0x0f] A100-SXM4-40GB\n"
            "1073741824  268435456  float  sum  4800  223.7  223.7  2e-07  4700  228.4  228.4  2e-07\n"
        ),
        (2, 1 << 30, 228.4),
    ),
    "smallest size last": (
        (
            "# nThread 1 nGpus 4 minBytes 8\n"
            "1073741824 268435456 float sum -1 63624 16.88 25.31 0 63640 16.87 25.30 0\n8 2 float sum -1 10 0.01 0.01 0 10 0.01 0.01 0"
        ),
        (4, 1 << 30, 25.31),
    ),
}


@pytest.mark.parametrize(("text", "expected"), BANDWIDTHS.values(), ids=BANDWIDTHS)
def test_bandwidth_is_that_of_the_largest_size(text, expected):
    """
    Whoever printed it.
    """
    fields = told(text)

    assert expected == (fields["ranks"], fields["size_bytes"], fields["busbw"])


def test_wrong_sums_are_wrong_however_fast():
    """
    Nothing learnt on such cards can be trusted.
    """
    text = REAL["busbw-v100x8-oci-1g"].replace("Out of bounds values : 0 OK", "Out of bounds values : 7 FAILED")

    assert ("wrong", 7) == (told(text)["verdict"], told(text)["num_wrong"])


def test_a_test_that_failed_is_broken():
    """
    The head was printed, then NCCL gave up.
    """
    head = REAL["busbw-v100x8-oci-1g"].partition("  1073741824 ")[0]
    fields = told(f"{head}node: Test NCCL failure common.cu:958 'unhandled system error'\n")

    assert ("busbw", True) == (fields["kind"], fields["error"])
    assert "unhandled system error" in fields["message"]


def test_the_sentence_of_a_quick_test_gives_an_upper_limit():
    """
    Without the number of cards it is not judged, unless it is hopeless.
    """
    assert "inconclusive" == told("123.4 all-reduces of 1 GiB per second\n")["verdict"]
    assert "suspicious" == told("0.9 all-reduces of 1 GiB per second\n")["verdict"]


def test_a_row_of_a_lost_card_is_a_problem():
    """
    The other seven do not hide it.
    """
    fields = told("index, name, memory.total [MiB]\n0, NVIDIA H200, 143771 MiB\n1, [Unknown Error], [Unknown Error]\n")

    assert (2, True, ["gpu 1 unknown error"]) == (fields["rows"], fields["error"], fields["problems"])


def test_a_row_that_is_cut_is_a_problem():
    """
    A copy that ended in the middle of a line.
    """
    fields = told("index, name, memory.total [MiB]\n0, NVIDIA H200, 143771 MiB\n1, NVIDIA H2")

    assert (1, True) == (fields["rows"], fields["error"])


CUT = {
    "topo": "\tGPU0\tGPU1\tCPU Affinity\n",
    "p2p": "$ nvidia-smi topo -p2p r\n \tGPU0\tGPU1\n",
    "fabric": "    Fabric\n",
    "query": "index, name, memory.total [MiB]\n",
    "shm": "Filesystem      Size  Used Avail Use% Mounted on\nshm              64M",
    "busbw": "# nThread 1 nGpus 8 minBytes 8\n#\n# Using devices\n",
}


@pytest.mark.parametrize(("kind", "text"), CUT.items(), ids=CUT)
def test_what_only_began_is_broken_and_its_kind_is_told(kind, text):
    """
    A copy that ended too soon is not an unknown thing.
    """
    fields = told(text)

    assert (kind, True) == (fields["kind"], fields["error"])
    assert fields["findings"][0]["hint"]


NO_HEADS = {
    "old names": ("A100-SXM4-40GB, 40536 MiB\nA100-SXM4-40GB, 40536 MiB\n", 2),
    "driver": ("0, NVIDIA GeForce RTX 4090, 24564 MiB, 535.129.03, P8, [N/A]\n", 1),
}


@pytest.mark.parametrize(("text", "expected"), NO_HEADS.values(), ids=NO_HEADS)
def test_a_table_without_a_head_is_known_by_its_cells(text, expected):
    """
    `noheader` is what scripts save.
    """
    assert ("query", expected) == (told(text)["kind"], told(text)["rows"])


# ------------------------------------------------------------------------- hostile readings

HOSTILE = {
    "nothing": b"",
    "blanks": b" \n\t\n",
    "binary": bytes(range(256)) * 100,
    "prose": b"hello, is this the right place?",
    "a million lines": b"GPU0 X NV4\n" * 1_000_000,
    "a million heads": b"\tGPU0\tGPU1\n" * 400_000,
    "one long line": b"GPU0 " * 1_000_000,
    "long words": b"GPU0 " + b"NV1" * 1_000_000,
    "colours only": b"\x1b[4m" * 500_000,
    "unclosed colours": b"\x1b]" * 500_000,
    "many cards": b"\t".join(b"GPU%d" % n for n in range(1500)) + b"\nGPU0\tX" + b"\tSYS" * 1499,
    "wide numbers": b"9" * 4_000_000,
    "many commas": b"," * 4_000_000,
    "many blanks": (b"a" + b" " * 7_000 + b":\n") * 500,
    "blanks in fields": (b"    Fabric\n" + b"     a:" + b" " * 7_000 + b"b" * 900 + b"\n") * 500,
    "blanks in sentences": (b"Device" + b" " * 7_900 + b"\n") * 500,
    "many full disks": b"/dev/shm/ " * 400_000,
    "many numbers": b"1 GP 1 x " * 450_000,
    "short rows": b"# size count type busbw\n" + b"1 1 float\n" * 250_000,
}


@pytest.mark.parametrize("raw", HOSTILE.values(), ids=HOSTILE)
def test_whatever_comes_is_answered_soon(raw):
    """
    No traceback and no long wait, whatever the bytes.
    """
    started = time.process_time()
    fields = as_json(read(raw))

    assert 5 > time.process_time() - started
    assert fields["error"]


@settings(deadline=None, max_examples=200)
@given(
    st.one_of(st.text(), st.binary(), st.text(alphabet="GPU01 XNVSYSOK\t\n|=%,[]:./dev/shmabcusbwGB").map(str.encode))
)
def test_no_text_is_a_traceback(raw):
    """
    Anything is a reading or broken.
    """
    assert isinstance(
        read(raw),
        Topology | PeerAccess | Fabric | CardTable | SharedMemory | MemoryLimit | BusBandwidth | Broken,
    )


@settings(deadline=None, max_examples=200)
@given(st.sampled_from(CORPUS), st.data())
def test_no_mutilated_reading_is_a_traceback(record, data):
    """
    Real readings, cut anywhere, with anything put in between.
    """
    text = record["text"]
    start, end = sorted((data.draw(st.integers(0, len(text))), data.draw(st.integers(0, len(text)))))
    fields = told(text[:start] + data.draw(st.text(max_size=20)) + text[end:])

    assert fields.get("message") or not fields["error"]
