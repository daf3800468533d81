"""What the storm of `make chaos` plans."""

from benchmarks.chaos.plan import BLOWS, PAIRS, plan


def test_every_part_is_struck_at_every_point_in_as_few_rounds_as_can_be():
    """
    Whatever seed it begins at, a multiple of those rounds: none is left to luck, and each time the order is another.
    """
    rounds = len(PAIRS) // BLOWS
    planned = [[plan(seed).blows for seed in range(rounds * k, rounds * (k + 1))] for k in (0, 7)]
    pairs = [[(blow.when, blow.whom) for blows in some for blow in blows] for some in planned]

    assert sorted(PAIRS) == sorted(pairs[0])
    assert sorted(PAIRS) == sorted(pairs[1])
    assert pairs[0] != pairs[1]


def test_a_seed_plans_the_same_again():
    """
    A round that failed is played again by its seed.
    """
    assert plan(17) == plan(17)
