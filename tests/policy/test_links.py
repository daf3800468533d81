"""What links and measurements mean: classes, strategies, floors."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.facts import BusBandwidth, PeerAccess, Severity, SharedMemory, Topology
from runner.policy.links import (
    LinkClass,
    groups,
    judge_peer_access,
    judge_topology,
    link_class,
    weakest_link,
    wires,
)
from runner.policy.readings import ShmVerdict, judge_bandwidth, shared_memory_verdict
from runner.policy.wires import WIRES, floor


def board(num_cards, link, **others):
    """Cards that are all linked alike, but for pairs such as `p01="SYS"`."""
    pairs = tuple((i, j, others.get(f"p{i}{j}", link)) for i, j in combinations(range(num_cards), 2))
    return Topology(gpus=tuple(f"GPU{n}" for n in range(num_cards)), pairs=pairs)


def measured(busbw, ranks=8, size_bytes=1 << 30, models=()):
    return BusBandwidth(ranks=ranks, size_bytes=size_bytes, algbw=None, busbw=busbw, models=models)


BOARDS = {
    "NVSwitch": (board(8, "NV18"), LinkClass.NVLINK, "NV18"),
    "two bridged pairs": (board(4, "SYS", p01="NV4", p23="NV4"), LinkClass.MIXED, "SYS"),
    "PCIe": (board(4, "NODE", p23="PIX"), LinkClass.PCIE, "NODE"),
    "one card": (board(1, ""), LinkClass.SINGLE, None),
    "unequal NVLink": (board(3, "NV2", p12="NV1"), LinkClass.NVLINK, "NV1"),
}


@pytest.mark.parametrize(("topology", "expected", "weakest"), BOARDS.values(), ids=BOARDS)
def test_links_have_a_class_and_a_weakest(topology, expected, weakest):
    """
    A ring of all cards is as slow as its weakest pair.
    """
    assert (expected, weakest) == (link_class(topology), weakest_link(topology.pairs))


@given(st.lists(st.sampled_from(["SYS", "NODE", "PHB", "PXB", "PIX", "NV1", "NV4", "NV12", "NV18"]), min_size=1))
def test_the_weakest_link_does_not_depend_on_the_order(links):
    """
    And NV4 is weaker than NV12, whatever the alphabet says.
    """
    order = ["SYS", "NODE", "PHB", "PXB", "PIX", "NV1", "NV4", "NV12", "NV18"]

    assert min(links, key=order.index) == weakest_link((0, at + 1, link) for at, link in enumerate(links))


def test_bridged_pairs_are_groups_of_their_own():
    """
    Sharding within a group keeps the heavy traffic on NVLink.
    """
    topology = board(4, "SYS", p02="NV4", p13="NV4")
    finding = judge_topology(topology)[0]

    assert ((0, 2), (1, 3)) == groups(topology)
    assert Severity.WARN is finding.severity
    assert "0-2, 1-3" in finding.message
    assert "HYBRID_SHARD" in finding.hint


def test_a_mesh_that_reaches_every_card_is_no_pcie_machine():
    """
    Most pairs of a V100 board are SYS, and yet rings stay on NVLink: it is compared with its own floor.
    """
    cube = board(4, "SYS", p01="NV2", p12="NV1", p23="NV2")

    assert 1 == len(groups(cube))
    assert Severity.OK is judge_topology(cube)[0].severity
    assert ["V100 board, NVLink mesh with single links"] == [wire.title for wire in wires(cube)]


def test_what_to_expect_is_told_with_the_links():
    """
    One kind of link is named with its speed; the floor is the lowest of those it may be.
    """
    messages = [finding.message for finding in judge_topology(board(8, "NV12"))]

    assert any("A100 NVSwitch (600 GB/s)" in message and "below 190 GB/s" in message for message in messages)
    assert not any("derived" in message for message in messages)


def test_a_card_that_lost_links_is_named():
    """
    Behind a switch every pair has the same number of links.
    """
    topology = board(4, "NV18", p02="NV16", p12="NV16", p23="NV16")

    assert any("links of GPU2 are down" in finding.message for finding in judge_topology(topology))
    assert not any("are down" in finding.message for finding in judge_topology(board(3, "NV2", p12="NV1")))


@pytest.mark.parametrize(
    ("link", "expected"), [(None, Severity.WARN), (LinkClass.PCIE, Severity.WARN), (LinkClass.NVLINK, Severity.REFUSE)]
)
def test_no_peer_access_is_usual_but_not_over_nvlink(link, expected):
    """
    A consumer card is slow without it; an SXM board without it is broken.
    """
    access = PeerAccess(gpus=("GPU0", "GPU1"), pairs=((0, 1, "NS"),))

    assert expected is judge_peer_access(access, link=link)[0].severity


# --------------------------------------------------------------------------------- floors

H100 = ("NVIDIA H100 80GB HBM3",)
RTX4090 = ("NVIDIA GeForce RTX 4090",)
FIGURES = {
    "H100 with NVLS": (measured(466, models=H100), "ok", {Severity.OK}),
    "H200, ring": (measured(366, models=("NVIDIA H200",)), "ok", {Severity.OK}),
    "H100, slow": (measured(250, models=H100), "suspicious", {Severity.REFUSE}),
    "H100, NVLink not used": (measured(40, models=H100), "suspicious", {Severity.REFUSE}),
    "H100, four cards": (measured(150, ranks=4, models=H100), "suspicious", {Severity.WARN}),
    "A100 SXM": (measured(229, models=("NVIDIA A100-SXM4-80GB",)), "ok", {Severity.OK}),
    "4090 without peers": (measured(14.5, models=RTX4090), "ok", {Severity.OK}),
    "4090, derived floor": (measured(5, ranks=4, models=RTX4090), "suspicious", {Severity.WARN}),
    "4090, sourced floor": (measured(5, ranks=8, models=RTX4090), "suspicious", {Severity.REFUSE}),
    "4090, dead": (measured(2.2, ranks=2, models=RTX4090), "suspicious", {Severity.REFUSE}),
    "too small to judge": (measured(1, size_bytes=1 << 20, models=H100), "inconclusive", {Severity.OK}),
    "small and good": (measured(24.5, ranks=6, size_bytes=32 << 20, models=RTX4090), "ok", {Severity.OK}),
    "nothing known": (measured(28, size_bytes=None), "ok", {Severity.OK}),
    "one card": (measured(0, ranks=1), "inconclusive", {Severity.OK}),
}


@pytest.mark.parametrize(("figure", "verdict", "severities"), FIGURES.values(), ids=FIGURES)
def test_a_measurement_is_compared_with_its_machine(figure, verdict, severities):
    """
    Refused is only what is dead on any link or below a figure that healthy machines were seen to reach.
    """
    judged = judge_bandwidth(figure)

    assert (verdict, severities) == (judged.verdict, {finding.severity for finding in judged.findings})


def test_in_switch_reduction_that_is_off_is_a_remark():
    """
    Slower, not broken.
    """
    assert any("NVLS" in finding.message for finding in judge_bandwidth(measured(366, models=H100)).findings)
    assert not any("NVLS" in finding.message for finding in judge_bandwidth(measured(466, models=H100)).findings)


@given(st.sampled_from(WIRES), st.integers(2, 8), st.floats(3.0, 1000))
def test_a_derived_floor_refuses_nobody(wire, num_cards, busbw):
    """
    Whatever the link and the number of cards: only what is dead or sourced is refused.
    """
    lowest = floor([wire], num_cards)
    judged = judge_bandwidth(measured(busbw, ranks=num_cards), [wire])
    refused = any(finding.severity is Severity.REFUSE for finding in judged.findings)
    dead = (wire.switched and busbw < 100) or (not wire.gen and num_cards == 2 and busbw < 30)

    assert not refused or dead or (lowest is not None and lowest.sourced)


def test_a_floor_between_two_numbers_is_the_lower_neighbours():
    """
    Six cards are expected to do what four or eight do, whichever is less.
    """
    wire = next(wire for wire in WIRES if wire.title == "PCIe 5.0 x16, peer to peer")

    assert (18, 28) == (floor([wire], 6).gb_per_s, floor([wire], 2).gb_per_s)


def test_a_hidden_view_excludes_nothing():
    """
    `topo -mp` shows PCIe where there may be NVLink: the lowest floor of both counts.
    """
    hidden = Topology(gpus=("GPU0", "GPU1"), pairs=((0, 1, "SYS"),), hides_nvlink=True)

    assert any(wire.nvlinks for wire in wires(hidden))
    assert not any(wire.nvlinks for wire in wires(board(2, "SYS")))


# --------------------------------------------------------------------------------- memory

MIB = 1 << 20
SHARED = {
    "docker's default": ((64 * MIB, 64 * MIB), ShmVerdict.TOO_SMALL),
    "default, used up": ((64 * MIB, 0), ShmVerdict.TOO_SMALL_AND_FULL),
    "16 GiB": ((16384 * MIB, 16000 * MIB), ShmVerdict.OK),
    "16 GiB, used up": ((16384 * MIB, 10 * MIB), ShmVerdict.FULL),
    "16 GiB, nothing free": ((16384 * MIB, 0), ShmVerdict.FULL),
    "size only": ((16384 * MIB, None), ShmVerdict.OK),
    "nothing but a refusal": ((None, None), ShmVerdict.TOO_SMALL),
}


@pytest.mark.parametrize(("sizes", "expected"), SHARED.values(), ids=SHARED)
def test_shared_memory_is_large_enough_and_free(sizes, expected):
    """
    Both count: what an earlier run left there is not ours to use.
    """
    size_bytes, free_bytes = sizes

    assert expected is shared_memory_verdict(SharedMemory(size_bytes=size_bytes, free_bytes=free_bytes))
