"""The order of tries of the communication test, and what they come to, over simulated machines."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.facts import Severity, Trial, TrialEnding
from runner.policy.comm import Setting, bad_cards, judge_trials, next_order
from runner.policy.wires import possible_wires

GOOD, WRONG, ERROR, SILENT, LATE = TrialEnding
GIB = 1 << 30
PCIE = Setting(num=4, wires=possible_wires(["NVIDIA RTX PRO 6000"], num_cards=4, nvlinks=0, peer=True))
NVLINK = Setting(num=8, nvlink=True, wires=possible_wires(["NVIDIA H200"], num_cards=8, nvlinks=18))
CPU = Setting(num=2, on_cards=False)


def trial(ending=GOOD, *, cards=(0, 1), env=None, busbw=None, **fields):
    speeds = () if busbw is None else ((GIB, busbw),)
    return Trial(cards=cards, ending=ending, env=env or {}, speeds=speeds, phase="reduce", **fields)


def play(setting, machine, *, seconds=8.0):
    """All tries on a machine: `machine(cards, env, number of tries before)` is a trial."""
    trials, left = [], 60.0
    while order := next_order(trials, setting, left):
        trials += [
            replace(machine(cards, order.env, len(trials)), cards=cards, env=order.env) for cards in order.groups
        ]
        left -= seconds
        assert len(trials) < 100
    return trials, judge_trials(trials, setting)[0]


def changes(trials):
    return [next(iter(one.env), "") for one in trials]


# -------------------------------------------------------------------------------- all is well


def test_cards_that_talk_are_tried_once():
    """
    The speed is told, and that it was proved.
    """
    trials, found = play(NVLINK, lambda *_: trial(busbw=467.0))

    assert ([""], Severity.OK, True) == (changes(trials), found.severity, found.facts["proved"])
    assert "8 cards talk, 467 GB/s of bus bandwidth at 1 GiB" == found.message


def test_what_is_below_a_derived_floor_is_said_only():
    """
    Nobody has published what such a machine does.
    """
    setting = Setting(num=2, wires=possible_wires(["NVIDIA RTX 4090"], num_cards=2, nvlinks=0, peer=True))

    trials, found = play(setting, lambda *_: trial(busbw=12.0))

    assert (1, Severity.WARN) == (len(trials), found.severity)
    assert "12 GB/s of bus bandwidth at 1 GiB, suspicious below 17" in found.message


# -------------------------------------------------------------------------------- changes


def test_the_first_change_that_is_proved_is_kept():
    """
    Peer access hangs on consumer cards; without it they talk, and the speed that is left is told.
    """

    def machine(cards, env, _):
        return (
            trial(busbw=25.1)
            if env == {"NCCL_P2P_DISABLE": "1"}
            else trial(SILENT, message="no word for 20 s: all of them")
        )

    trials, found = play(PCIE, machine)

    assert ["", "", "NCCL_P2P_DISABLE"] == changes(trials)
    assert (Severity.WARN, {"NCCL_P2P_DISABLE": "1"}) == (found.severity, found.facts["env"])
    assert (
        "the cards hang (no word for 20 s: all of them); with NCCL_P2P_DISABLE=1 4 cards talk, 25.1 GB/s"
        in found.message
    )


NAMED = {
    "shm": ("Error while creating shared memory segment /dev/shm/nccl-x", "NCCL_SHM_DISABLE"),
    "ib": ("ibv_create_qp failed", "NCCL_IB_DISABLE"),
    "socket": ("Bootstrap : no socket interface found", "NCCL_SOCKET_IFNAME"),
    "nvls": ("transport/nvls.cc:254 NCCL WARN Cuda failure", "NCCL_NVLS_ENABLE"),
    "nothing": ("unhandled system error", "NCCL_P2P_DISABLE"),
}


@pytest.mark.parametrize(("message", "first"), NAMED.values(), ids=NAMED)
def test_what_the_error_names_is_tried_first(message, first):
    """
    Else what helps most often.
    """
    trials, _ = play(PCIE, lambda *_: trial(ERROR, message=message))

    assert first == changes(trials)[1]


def test_wrong_sums_are_cured_or_refused():
    """
    Training on them would go on for a night and be worth nothing.
    """
    _, cured = play(PCIE, lambda _, env, __: trial(busbw=30.0) if env else trial(WRONG, num_wrong=7))
    _, refused = play(PCIE, lambda *_: trial(WRONG, num_wrong=7))

    assert (Severity.WARN, Severity.REFUSE) == (cured.severity, refused.severity)
    assert "the cards talk, and 7 sums are wrong" in refused.message


def test_slow_is_trouble_too_where_the_floor_was_published():
    """
    A change that brings the speed back is kept.
    """
    _, found = play(PCIE, lambda _, env, __: trial(busbw=33.0 if env else 8.1))

    assert {"NCCL_P2P_DISABLE": "1"} == found.facts["env"]
    assert "the cards are slow (8.1 GB/s of bus bandwidth at 1 GiB, suspicious below 25)" in found.message


def test_what_the_user_made_slow_is_not_the_machines_fault():
    """
    NVLink with peer access switched off is as slow as it was asked to be.
    """
    trials, found = play(replace(NVLINK, users={"NCCL_P2P_DISABLE"}), lambda *_: trial(busbw=12.0))

    assert (1, Severity.WARN) == (len(trials), found.severity)
    assert "NCCL_P2P_DISABLE is set: take it away unless the cards hang without it" == found.hint


def test_what_makes_nothing_slow_is_not_blamed():
    """
    The machine is: another variable that the user set has nothing to do with it.
    """
    _, found = play(replace(NVLINK, users={"NCCL_DEBUG"}), lambda *_: trial(busbw=12.0))

    assert "NCCL_DEBUG" not in found.hint
    assert "suspicious below" in found.message


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        pytest.param(CPU, "2 processes talk, 12 GB/s of bus bandwidth at 1 GiB", id="without a card"),
        pytest.param(NVLINK, "8 cards talk, 12 GB/s of bus bandwidth at 1 GiB", id="where such links do more"),
    ],
)
def test_the_users_floor_is_the_one_that_counts_and_what_reaches_it_is_enough(setting, message):
    """
    At the largest size: small ones are slow anywhere.
    """
    speeds = ((1 << 20, 1.0), (GIB, 12.0))

    trials, found = play(replace(setting, floor=12.0), lambda *_: replace(trial(), speeds=speeds))

    assert (1, Severity.OK, message) == (len(trials), found.severity, found.message)


def test_what_the_user_set_is_not_tried():
    """
    It would not be changed either.
    """
    trials, _ = play(replace(PCIE, users={"NCCL_P2P_DISABLE"}), lambda *_: trial(SILENT))

    assert "NCCL_P2P_DISABLE" not in changes(trials)


@given(
    st.builds(
        Setting,
        num=st.integers(1, 8),
        on_cards=st.booleans(),
        nvlink=st.booleans(),
        users=st.sets(st.sampled_from(["NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE"])),
    ),
    st.lists(st.tuples(st.sampled_from(TrialEnding), st.sampled_from(["", "P2P", "shm", "nvls", "ibv_x"])), min_size=1),
    st.floats(6, 30),
)
def test_whatever_happens_it_ends_and_keeps_its_rules(setting, endings, seconds):
    """
    On NVLink peer access stays; the user's variables stay; nothing is refused after one try; changes are proved ones.
    """

    def machine(_, __, number):
        ending, message = endings[number % len(endings)]
        return trial(ending, message=message)

    trials, found = play(setting, machine, seconds=seconds)

    tried = {name for one in trials for name in one.env}
    assert not tried & set(setting.users)
    assert not (setting.nvlink and "NCCL_P2P_DISABLE" in tried)
    whole = [one for one in trials if one.cards == setting.everyone]
    assert found.severity is not Severity.REFUSE or len(whole) > 1
    assert all(
        any(one.env == found.facts["env"] and one.ending is GOOD for one in whole) for _ in found.facts.get("env", ())
    )
    assert len(trials) <= 60


# -------------------------------------------------------------------------------- the card


@pytest.mark.parametrize("bad", range(8))
def test_a_bad_card_on_nvlink_is_named_and_nothing_is_switched_off(bad):
    """
    Twice all together, then pairs: four side by side, then the two suspects with others.
    """
    trials, found = play(NVLINK, lambda cards, *_: trial(SILENT if bad in cards else GOOD, busbw=467.0))

    assert {""} == set(changes(trials))
    assert 2 + 4 + 2 == len(trials)
    assert Severity.REFUSE is found.severity
    assert f"card {bad} fails with every other" in found.message
    assert "swap this machine and tell support" == found.hint


def test_a_bad_link_between_two_cards_is_named_as_a_pair():
    """
    Each of the two does well with others.
    """
    _, found = play(NVLINK, lambda cards, *_: trial(SILENT if {2, 5} <= set(cards) else GOOD, busbw=467.0), seconds=6)

    assert Severity.REFUSE is found.severity
    assert "pairs that fail: 2-5" in found.message or "every pair that was tried talks" in found.message


def test_trouble_that_does_not_come_again_is_said_only():
    """
    A machine is not thrown away for one bad try.
    """
    _, found = play(NVLINK, lambda _, __, number: trial(busbw=467.0) if number else trial(SILENT, message="no word"))

    assert Severity.WARN is found.severity
    assert found.facts["proved"]
    assert "the first time it failed: the cards hang (no word)" in found.message


def test_no_time_for_a_second_try_refuses_nothing():
    """
    One try that takes the whole minute.
    """
    _, found = play(NVLINK, lambda *_: trial(SILENT), seconds=60)

    assert Severity.WARN is found.severity


def test_two_cards_have_no_other_pair():
    """
    All together is the pair.
    """
    trials, found = play(replace(NVLINK, num=2), lambda *_: trial(SILENT))

    assert (2, Severity.REFUSE) == (len(trials), found.severity)
    assert bad_cards(trials) == (0, 1) or "twice" in found.message


# ------------------------------------------------------------------------------- other cases


def test_a_slow_start_says_nothing_of_the_cards():
    """
    torch on a cold network disk may take a minute.
    """
    trials, found = play(NVLINK, lambda *_: trial(LATE, message="no word for 40 s: card 3 after import"))

    assert (1, Severity.WARN) == (len(trials), found.severity)
    assert "not tested: no word for 40 s" in found.message


def test_a_second_try_that_came_too_late_says_nothing_either():
    """
    Whatever the first one was: it may have been a slow start, too.
    """
    late = trial(LATE, cards=NVLINK.everyone, message="no word for 40 s")

    (found,) = judge_trials([trial(SILENT, cards=NVLINK.everyone), late], NVLINK)

    assert (Severity.WARN, "not tested: no word for 40 s") == (found.severity, found.message)


def test_trouble_of_one_try_is_not_said_to_come_twice():
    """
    And processes on the CPU are no reason to swap a machine.
    """
    silent = trial(SILENT, message="no word for 20 s")

    (once,), (twice,) = judge_trials([silent], CPU), judge_trials([silent, silent], CPU)

    assert (Severity.WARN, "the processes hang (no word for 20 s)", "") == (once.severity, once.message, once.hint)
    assert (Severity.REFUSE, True, "") == (twice.severity, twice.message.endswith(", twice"), twice.hint)


def test_one_card_must_compute():
    """
    With what torch says of it; the second time it is refused.
    """
    one = Setting(num=1)
    _, well = play(one, lambda *_: trial(devices=({"torch": "2.9.0", "cuda": "12.8"},)))
    trials, ill = play(one, lambda *_: trial(ERROR, message="card 0: RuntimeError: no kernel image is available"))

    assert ("torch", Severity.OK) == (well.name, well.severity)
    assert "the card computes (torch 2.9.0, CUDA 12.8)" == well.message
    assert ("torch", Severity.REFUSE, 2) == (ill.name, ill.severity, len(trials))


def test_a_card_that_fails_before_it_talks_is_no_matter_of_links():
    """
    No change of NCCL's would help.
    """
    failing = replace(trial(ERROR, message="card 1: system not yet initialized"), phase="device")
    trials, found = play(PCIE, lambda *_: failing)

    assert ["", ""] == changes(trials)
    assert ("torch", Severity.REFUSE) == (found.name, found.severity)


def test_the_users_floor_counts_without_a_card_too():
    """
    preflight.min_bus_bandwidth is a promise that somebody needs.
    """
    setting = replace(CPU, floor=5.0)

    assert Severity.REFUSE is play(setting, lambda *_: trial(busbw=0.4))[1].severity
    assert Severity.OK is play(setting, lambda *_: trial(busbw=6.0))[1].severity
    assert Severity.OK is play(CPU, lambda *_: trial(busbw=0.4))[1].severity
