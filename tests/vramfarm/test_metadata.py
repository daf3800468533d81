"""The keys of a manifest's state: as they are on disks, whatever they are called here."""

import pytest

from vramfarm import metadata
from vramfarm.metadata import Own, Shared

SHARED = {
    "step": 3,
    "position": {"epoch": 0},
    "orders": {},
    "data_ranks": 2,
    "models": {"model": {}},
    "optimizers": {},
    "objects": {"ema": 1},
}
SEVERAL = {"now": 1, "all": []}


def test_what_ranks_say_has_the_keys_of_checkpoints_that_are_on_disks():
    """
    What there is nothing of is left out of a rank's own, but a loader's state that is empty; rank 0 says what is shared.
    """
    first = metadata.dump(Own(rng={"a": 1}), Shared(**SHARED), ["model"], [8])
    loaders = {"loader": {}, "loaders": {"1": 5}}
    second = metadata.dump(Own(rng=[2], objects={"replay": 1}, alike={"ema": []}, **loaders), None, ["model"], [8, 4])

    assert {"own": {"rng": {"a": 1}}, "shared": SHARED, "contents": ["model"]} == first
    assert {
        "own": {"rng": [2], "objects": {"replay": 1}, "alike": {"ema": []}, **loaders},
        "files": [8, 4],
    } == second
    assert {"places": SEVERAL} | SHARED == Shared(**SHARED, places=SEVERAL).dump()


def test_the_saver_takes_out_what_is_for_it():
    """
    The rest of what a rank says is the manifest's, and comes back as it was; also from a version that says more.
    """
    said = [metadata.dump(Own(rng=rank, alike={"ema": [1, []]}), None, [], [8, 4]) for rank in range(2)]
    said[0] |= {"shared": SHARED, "contents": ["model"]}

    assert [({"ema": [1, []]}, [8, 4], {})] * 2 == [
        (metadata.take_alike(one), metadata.take_sizes(one, 12), metadata.own_objects(one)) for one in said
    ]
    assert [{}, [12]] == [metadata.take_alike(said[0]), metadata.take_sizes(said[0], 12)]
    assert [("model",), ()] == [metadata.contents(one) for one in said]
    said[1]["own"] |= {"later": 1}
    found = metadata.parse({"ranks": {str(rank): one for rank, one in enumerate(said)}, "frozen": {}})
    assert (Shared(**SHARED), [Own(rng=0), Own(rng=1)]) == (found.shared, found.own)


@pytest.mark.parametrize("key", ["step", "position", "data_ranks", "models", "optimizers", "objects"])
def test_what_every_rank_says_is_not_left_out(key):
    """
    Only what has come later, or is not always there, may be missing.
    """
    shared = {name: value for name, value in SHARED.items() if name != key}

    with pytest.raises(TypeError, match=key):
        metadata.parse({"ranks": {"0": {"own": {"rng": 0}, "shared": shared}}})
