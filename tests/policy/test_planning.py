"""What a model takes: the well-known table, and what must hold for any model on any number of cards."""

from dataclasses import replace
from math import isclose

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.job import ModelSize
from runner.policy.planning import (
    GB,
    Optimizer,
    Precision,
    Strategy,
    Workload,
    activations,
    cheapest,
    checkpoint_bytes,
    compute_s,
    disk_bytes,
    fits,
    host_bytes,
    memory,
    shape,
    speed_up,
    traffic_bytes,
    workload,
)

S, Opt, P = Strategy, Optimizer, Precision
EIGHT_B = Workload(parameters=8 * GB)

works = st.builds(
    Workload,
    parameters=st.integers(1_000_000, 10**12),
    strategy=st.sampled_from(S),
    optimizer=st.sampled_from(Opt),
    precision=st.sampled_from([P.FP32, P.BF16, P.FP16]),
    per_card=st.integers(1, 64),
    accumulation=st.integers(1, 64),
    sequence=st.integers(1, 131_072),
    recompute=st.booleans(),
    offload=st.booleans(),
)
numbers_of_cards = st.one_of(st.integers(1, 8), st.sampled_from([16, 32, 64, 128, 256, 512, 1024]))


@pytest.mark.parametrize(
    ("strategy", "four", "eight"),
    [
        (S.DDP, 128, 128),
        (S.ZERO1, 56, 44),
        (S.ZERO2, 44, 30),
        (S.SHARD_GRAD_OP, 44, 30),
        (S.ZERO3, 32, 16),
        (S.FULL_SHARD, 32, 16),
    ],
)
def test_an_8b_model_takes_what_the_table_says(strategy, four, eight):
    """
    GB of states a card, AdamW in bf16, on four cards and on eight.
    """
    work = replace(EIGHT_B, strategy=strategy)

    assert (four * GB, eight * GB) == (memory(work, 4).states, memory(work, 8).states)


OTHERS = {
    "an 8-bit optimizer keeps no fp32 copy": (replace(EIGHT_B, optimizer=Opt.ADAMW_8BIT), 1, 48),
    "SGD has one moment": (replace(EIGHT_B, optimizer=Opt.SGD), 1, 96),
    "Adafactor next to none": (replace(EIGHT_B, optimizer=Opt.ADAFACTOR), 1, 64),
    "fp32 costs as much": (replace(EIGHT_B, precision=P.FP32), 1, 128),
    "LoRA: the weights, and 16 bytes of each that is trained": (replace(EIGHT_B, strategy=S.LORA), 4, 17.28),
    "QLoRA: four bits": (replace(EIGHT_B, strategy=S.QLORA), 1, 5.408),
    "serving 70B in fp8": (Workload(parameters=70 * GB, strategy=S.INFERENCE, precision=P.FP8), 1, 70),
    "tensor parallel halves it": (Workload(parameters=70 * GB, strategy=S.INFERENCE, precision=P.FP8), 2, 35),
    "states in system memory": (replace(EIGHT_B, strategy=S.ZERO3, offload=True), 4, 8),
}


@pytest.mark.parametrize(("work", "cards", "expected"), OTHERS.values(), ids=OTHERS)
def test_other_ways_take_less(work, cards, expected):
    """
    GB of states a card.
    """
    assert round(expected * GB) == memory(work, cards).states


FITTING = {
    "8B, ZeRO-2 on four cards of 80 GB": (replace(EIGHT_B, strategy=S.ZERO2), 4, 80, True),
    "8B, ZeRO-2 on four cards of 48 GB": (replace(EIGHT_B, strategy=S.ZERO2), 4, 48, False),
    "8B, ZeRO-3 on four cards of 48 GB": (replace(EIGHT_B, strategy=S.ZERO3), 4, 48, True),
    "8B, ZeRO-3 on four cards of 24 GB": (replace(EIGHT_B, strategy=S.ZERO3), 4, 24, False),
    "8B, ZeRO-3 on eight cards of 24 GB": (replace(EIGHT_B, strategy=S.ZERO3), 8, 24, True),
    "8B, ZeRO-3 with offload on four cards of 24 GB": (replace(EIGHT_B, strategy=S.ZERO3, offload=True), 4, 24, True),
    "8B alone on 80 GB": (EIGHT_B, 1, 80, False),
    "8B alone on 80 GB with an 8-bit optimizer": (replace(EIGHT_B, optimizer=Opt.ADAMW_8BIT), 1, 80, True),
    "8B alone on 141 GB": (EIGHT_B, 1, 141, True),
    "13B alone on 192 GB": (Workload(parameters=13 * GB), 1, 192, False),
    "13B alone on 141 GB with an 8-bit optimizer": (
        Workload(parameters=13 * GB, optimizer=Opt.ADAMW_8BIT),
        1,
        141,
        True,
    ),
    "70B served in fp8 on 141 GB": (Workload(parameters=70 * GB, strategy=S.INFERENCE, precision=P.FP8), 1, 141, True),
    "70B with QLoRA on 80 GB": (Workload(parameters=70 * GB, strategy=S.QLORA), 1, 80, True),
}


@pytest.mark.parametrize(("work", "cards", "card_gb", "expected"), FITTING.values(), ids=FITTING)
def test_what_fits_is_what_people_run(work, cards, card_gb, expected):
    """
    With activations of one sample, and room for CUDA.
    """
    assert expected == fits(work, cards, card_gb * GB)


def test_what_sharding_everything_sends_is_what_is_measured():
    """
    8B on four cards: 35 to 50 GB a card and step; averaging the gradients of 1B on two cards: 2 GB.
    """
    assert 36 * GB == traffic_bytes(replace(EIGHT_B, strategy=S.FULL_SHARD), 4)
    assert 2 * GB == traffic_bytes(Workload(parameters=GB), 2)


def test_accumulation_spares_ddp_the_sending_and_full_shard_not():
    """
    DDP averages once a step; FULL_SHARD gathers the weights for every micro-batch.
    """
    four = replace(EIGHT_B, accumulation=4)

    assert traffic_bytes(EIGHT_B, 4) == traffic_bytes(four, 4)
    assert 4 * traffic_bytes(replace(EIGHT_B, strategy=S.ZERO3), 4) == traffic_bytes(replace(four, strategy=S.ZERO3), 4)


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [(S.DDP, 24), (S.ZERO1, 24), (S.ZERO2, 60), (S.SHARD_GRAD_OP, 96), (S.ZERO3, 144), (S.LORA, 0.48)],
)
def test_what_four_micro_batches_send_depends_on_what_is_spread(strategy, expected):
    """
    GB a card, 8B on four cards: gradients once a step, or with every micro-batch, or the weights, too.
    """
    assert expected * GB == traffic_bytes(replace(EIGHT_B, strategy=strategy, accumulation=4), 4)


def test_what_is_not_spread_is_in_system_memory_as_often_as_there_are_cards():
    """
    12 bytes a parameter of 8B, four times with DDP, once with ZeRO.
    """
    alone, spread = replace(EIGHT_B, offload=True), replace(EIGHT_B, offload=True, strategy=S.ZERO2)

    assert (384 * GB, 96 * GB) == (memory(alone, 4).host, memory(spread, 4).host)


def test_a_checkpoint_with_optimizer_states_is_over_100_gb():
    """
    8B: weights and AdamW's states; the ones that are kept, one being written, one being uploaded.
    """
    assert (112 * GB, 448 * GB) == (checkpoint_bytes(EIGHT_B), disk_bytes(EIGHT_B, keep_last=2))


def test_frozen_weights_are_on_the_disk_once():
    """
    LoRA on 8B: 16 GB once, and the adapters and their states with each checkpoint.
    """
    work = replace(EIGHT_B, strategy=S.LORA)

    assert (16.96 * GB, (16 + 4 * 0.96) * GB) == (checkpoint_bytes(work), disk_bytes(work, keep_last=2))


def test_system_memory_is_at_least_that_of_all_cards():
    """
    And more where states lie in it.
    """
    offloaded = replace(EIGHT_B, strategy=S.ZERO3, offload=True)

    assert 320 * GB == host_bytes(EIGHT_B, 4, 80 * GB)
    assert (112 + 96 + 8) * GB == host_bytes(offloaded, 4, 24 * GB)


@pytest.mark.parametrize(
    ("parameters", "layers", "hidden"), [(1e9, 17, 2201), (8e9, 34, 4403), (70e9, 71, 9072)], ids=["1B", "8B", "70B"]
)
def test_the_shape_is_near_that_of_published_models(parameters, layers, hidden):
    """
    16 layers of 2048, 32 of 4096, 80 of 8192.
    """
    assert (layers, hidden) == shape(Workload(parameters=round(parameters)))


def test_the_activations_of_a_known_model():
    """
    32 layers of 4096, 4096 tokens: 34 s·b·h a layer, or 2 s·b·h and one layer; the logits on top.
    """
    work = replace(EIGHT_B, layers=32, hidden=4096, sequence=4096, vocabulary=32_000)
    logits = 8 * 4096 * 32_000

    assert 32 * 34 * 4096 * 4096 + logits == activations(replace(work, recompute=False))
    assert (32 * 2 + 34) * 4096 * 4096 + logits == activations(work)


@pytest.mark.parametrize(("cards", "expected"), [(1, (1, 1)), (2, (1.7, 1.9)), (4, (3, 3.7))])
def test_small_models_gain_what_is_seen(cards, expected):
    """
    Where sending costs nothing.
    """
    assert expected == speed_up(cards, computing_s=1, sending_s=0)


def test_sending_for_as_long_as_computing_halves_the_speed_if_nothing_hides_it():
    """
    The lower end: four cards are two times one.
    """
    assert (2, 3.7) == speed_up(4, computing_s=1, sending_s=1)


def test_computing_again_takes_a_third_longer():
    """
    Activation checkpointing's price.
    """
    assert isclose(4 / 3, compute_s(EIGHT_B, 989) / compute_s(replace(EIGHT_B, recompute=False), 989))


def test_the_job_is_read():
    """
    job.yaml's `model` in the words of planning.
    """
    model = ModelSize(parameters=7e9, strategy="zero2", optimizer="adamw_8bit", precision="fp16")
    expected = Workload(parameters=7 * GB, strategy=S.ZERO2, optimizer=Opt.ADAMW_8BIT, precision=P.FP16, per_card=3)

    assert expected == workload(model, per_card=3)


@pytest.mark.parametrize(
    ("card_gb", "expected"),
    [(160, S.DDP), (80, S.ZERO1), (52, S.ZERO2), (48, S.FULL_SHARD), (24, S.FULL_SHARD), (10, None)],
)
def test_the_strategy_that_fits_and_sends_least_is_taken(card_gb, expected):
    """
    8B on four cards; on 24 GB with the optimizer in system memory.
    """
    found = cheapest(EIGHT_B, 4, card_gb * GB)

    assert (expected, card_gb == 24) == (found and found.strategy, bool(found and found.offload))


# -------------------------------------------------------------------------------- properties


@given(works, numbers_of_cards)
def test_nothing_is_negative(work, cards):
    """
    Whatever the model, the strategy and the number of cards.
    """
    held = memory(work, cards)

    assert 0 <= min(held.weights, held.gradients, held.optimizer, held.activations, held.working, held.host)
    assert 0 <= min(traffic_bytes(work, cards), checkpoint_bytes(work))


@given(works, st.lists(numbers_of_cards, min_size=2, max_size=2).map(sorted))
def test_more_cards_never_need_more_of_each_card(work, cards):
    """
    States are spread, or stay as they are.
    """
    few, many = cards

    assert memory(work, many).states <= memory(work, few).states


@given(works, st.lists(numbers_of_cards.filter(lambda n: n > 1), min_size=2, max_size=2).map(sorted))
def test_more_cards_never_need_more_in_all(work, cards):
    """
    With activations and working memory, from two cards on.
    """
    few, many = cards

    assert memory(work, many).total <= memory(work, few).total


@given(works, numbers_of_cards)
def test_the_shards_together_are_the_whole(work, cards):
    """
    Nothing is lost by spreading it, on the cards or in system memory.
    """
    whole, shard = memory(work, 1), memory(work, cards)

    assert whole.states + whole.host <= cards * shard.states + shard.host


@given(works, numbers_of_cards)
def test_a_further_stage_never_holds_more(work, cards):
    """
    DDP, ZeRO-1, ZeRO-2, ZeRO-3.
    """
    held = [memory(replace(work, strategy=s), cards).states for s in (S.DDP, S.ZERO1, S.ZERO2, S.ZERO3)]

    assert sorted(held, reverse=True) == held


@given(works)
def test_checkpointing_activations_never_takes_more(work):
    """
    But for a model of one layer, of which nothing can be left out.
    """
    layers, hidden = shape(work)
    inputs = 2 * layers * work.per_card * work.sequence * hidden * (2 if work.precision is P.FP32 else 1)

    assert activations(replace(work, recompute=True)) <= activations(replace(work, recompute=False)) + inputs


@given(works, numbers_of_cards)
def test_one_card_sends_nothing_and_no_card_more_than_three_times_everything(work, cards):
    """
    Per micro-batch: two gathers of the weights, one scatter of the gradients.
    """
    whole = memory(replace(work, strategy=S.DDP, offload=False), 1)
    most = 3 * max(whole.weights, 4 * work.parameters) * work.accumulation

    assert 0 == traffic_bytes(work, 1)
    assert traffic_bytes(work, cards) <= most


@given(numbers_of_cards, st.floats(1e-3, 1e3), st.floats(0, 1e3))
def test_the_gain_is_a_range_and_never_more_than_the_cards(cards, computing_s, sending_s):
    """
    The lower end is the lower.
    """
    low, high = speed_up(cards, computing_s=computing_s, sending_s=sending_s)

    assert 0 <= low <= high <= cards
