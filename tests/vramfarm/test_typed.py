"""Python values in JSON: exact, or refused by name."""

import json
import math
from collections import Counter, OrderedDict

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vramfarm import state, typed
from vramfarm.typed import StateError

KEYS = st.text(max_size=4) | st.integers() | st.booleans() | st.none() | st.tuples(st.integers(), st.text(max_size=2))
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(codec=None), max_size=5)
    | st.binary(max_size=5)
    | st.binary(max_size=5).map(bytearray)
    | st.frozensets(st.integers(), max_size=3)
    | st.dictionaries(KEYS, st.integers(), max_size=3).map(Counter)
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=3)
        | st.dictionaries(st.sampled_from(["$", "v", "a"]), inner, max_size=3)
        | st.dictionaries(KEYS, inner, max_size=3).map(OrderedDict)
    ),
    max_leaves=10,
)


def there_and_back(value):
    return typed.decode(json.loads(json.dumps(typed.encode(value, "x"), allow_nan=False, sort_keys=True)))


def kinds(value):
    """The value with every type beside it: 1, True and 1.0 are equal, but not the same."""
    if isinstance(value, dict):
        return type(value), [(kinds(k), kinds(v)) for k, v in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [kinds(v) for v in value]
    return type(value), value


@given(VALUES)
def test_a_value_comes_back_as_it_was(value):
    """
    Value, types and order of keys survive, through JSON that sorts its keys.
    """
    assert kinds(value) == kinds(there_and_back(value))


def test_what_json_cannot_say():
    """
    Not a number, infinities and the sign of zero survive.
    """
    nan, inf, zero = there_and_back([math.nan, -math.inf, -0.0])

    assert math.isnan(nan)
    assert (-math.inf, "-0.0") == (inf, str(zero))


NUMBERS = [
    np.int64(3),
    np.float64(0.1),
    np.float32(2.5),
    np.float16("nan"),
    np.bool_(True),
    np.longdouble(1) / 3,
    np.complex64(1 + 2j),
    np.array(3.5),
    np.arange(6, dtype=np.uint32).reshape(2, 3),
    np.arange(4, dtype=">f4"),
]


@pytest.mark.parametrize("value", NUMBERS, ids=repr)
def test_numpy_comes_back(value):
    """
    As what it was: a number is none of Python's, an array without dimensions no number.
    """
    (back,) = there_and_back([value])

    assert type(value) is type(back)
    assert (value.dtype, value.shape) == (back.dtype, back.shape)
    assert np.array_equal(value, back, equal_nan=True)


def test_a_type_of_numpys_that_is_refused_is_named():
    """
    An array of numbers would do, so which kind it is has to be said.
    """
    with pytest.raises(StateError, match=r"x: cannot be saved .* numpy.ndarray with dtype <U2"):
        typed.encode(np.array(["a", "bc"]), "x")


@pytest.mark.parametrize(
    "value", [object(), lambda: 0, 1j, torch.nn.ReLU, np.array([object()])], ids=lambda v: type(v).__name__
)
def test_what_would_need_pickle_is_refused_by_name(value):
    """
    The message names the key, so that the script's author finds it.
    """
    with pytest.raises(StateError, match=r"^ema\.things\[1\]\.5"):
        typed.encode({"things": [0, {5: value}]}, "ema")


def test_what_no_text_can_hold_is_refused_by_name():
    """
    At the start, and not in each save: a number that Python writes no text of, and what has no end.
    """
    endless = {}
    endless["again"] = [endless]

    with pytest.raises(StateError, match=r"^ema\.steps: cannot be saved: a whole number of 16610 bits"):
        state.Snapshot(0, 1).encode({"steps": 10**5000}, "ema")
    with pytest.raises(StateError, match=r"^ema: cannot be saved: it has itself in it, or is nested too deeply$"):
        state.Snapshot(0, 1).encode(endless, "ema")
    assert {"steps": -(10**4000)} == typed.decode(typed.encode({"steps": -(10**4000)}, "ema"))


def test_tensors_sizes_and_types_inside_a_state():
    """
    Tensors go to the shards under the name of their place, all else into the JSON.
    """
    snapshot = state.Snapshot(rank=0, world_size=1)
    value = {"a": [torch.tensor(3)], "size": torch.Size([2]), "dtype": torch.bfloat16}

    encoded = json.loads(json.dumps(snapshot.encode(value, "ema")))
    tensors = {piece.box.key: piece.local for piece in snapshot.pieces}

    assert ["ema.a[0]"] == list(tensors)
    assert value == state.decode(encoded, tensors.__getitem__)


def test_an_unknown_kind_is_refused():
    """
    What a later version wrote is not guessed at.
    """
    with pytest.raises(StateError, match="unknown kind: 'lambda'"):
        state.decode({"$": "lambda", "v": "..."}, lambda key: torch.zeros(1))
