"""
Python values as JSON and back, exactly: integer keys, tuples, nan, bytes, counters.

Plain JSON turns `{1: 2}` into `{"1": 2}`, and a scheduler's decay silently stops. What cannot be
carried exactly is refused by name; nothing is ever pickled.
"""

from __future__ import annotations

import base64
import json
import math
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any, Final

TAG: Final = "$"
_NUMBERS: Final = "biufc"  # kinds of numpy types
_MAX_BITS: Final = 14_000  # of a whole number: Python writes no longer ones as text
_DOUBLE: Final = 8  # bytes: so many of a numpy number are Python's own
LARGE_BYTES: Final = (
    64 << 10
)  # an array from here on is the leaf's: as JSON it would take a third more, and its reader's patience

Leaf = Callable[[str, Any], Any]


class StateError(TypeError):
    """A state cannot be saved, or does not fit what it is loaded into; the text names the key."""


def refuse(path: str, value: object) -> Any:  # noqa: ANN401  # stands in for a leaf encoder, never returns
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    dtype = f" with dtype {value.dtype}" if hasattr(value, "dtype") else ""
    raise StateError(f"{path}: cannot be saved without pickle: a value of type {kind}{dtype}")


def encode(value: Any, path: str, leaf: Leaf = refuse) -> Any:  # noqa: ANN401, PLR0911  # any value a state_dict may hold; one line a kind
    """Return JSON for `value`. `leaf(path, value)` answers for types not known here."""
    kind = type(value)
    if kind is int and value.bit_length() > _MAX_BITS:
        raise StateError(
            f"{path}: cannot be saved: a whole number of {value.bit_length()} bits, of {_MAX_BITS} at most"
        )
    if value is None or kind in {bool, int, str}:
        return value
    if kind.__module__ == "numpy":  # before numbers: some of its are Python's, too, and would come back as those
        return _encode_numpy(value, path, leaf)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else _tagged("float", repr(float(value)))
    if kind is list:
        return [encode(item, f"{path}[{i}]", leaf) for i, item in enumerate(value)]
    if kind in _SEQUENCES:
        items = [encode(item, f"{path}[{i}]", leaf) for i, item in enumerate(value)]
        return _tagged(
            _SEQUENCES[kind], items if kind is tuple else sorted(items, key=json.dumps)
        )  # each process has an order of its own
    if kind in _MAPPINGS:
        return _encode_mapping(value, path, leaf)
    if kind in {bytes, bytearray}:
        return _tagged(kind.__name__, base64.b64encode(value).decode())
    return leaf(path, value)


def _encode_mapping(value: Any, path: str, leaf: Leaf) -> Any:  # noqa: ANN401  # see encode
    keys = list(value)
    plain = type(value) is dict and all(type(k) is str for k in keys) and TAG not in keys and keys == sorted(keys)
    if plain:
        return {k: encode(v, f"{path}.{k}", leaf) for k, v in value.items()}
    pairs = [[encode(k, f"{path}.{k} (key)", leaf), encode(v, f"{path}.{k}", leaf)] for k, v in value.items()]
    return _tagged(_MAPPINGS[type(value)], pairs)


def _encode_numpy(value: Any, path: str, leaf: Leaf) -> Any:  # noqa: ANN401  # see encode
    dtype = getattr(value, "dtype", None)
    if getattr(dtype, "kind", "") not in _NUMBERS or (type(value).__name__ != "ndarray" and value.shape != ()):
        return refuse(path, value)
    if type(value).__name__ != "ndarray":
        is_python_exact = value.dtype.kind != "c" and value.dtype.itemsize <= _DOUBLE
        number = value.item() if is_python_exact else value.reshape(1)
        return _tagged("number", [value.dtype.str, encode(number, path, leaf)])
    if value.nbytes >= LARGE_BYTES and leaf is not refuse:
        in_order = value if value.flags.c_contiguous else value.copy(order="C")
        return _tagged("array", [value.dtype.str, list(value.shape), leaf(path, in_order.reshape(-1).view("u1"))])
    raw = base64.b64encode(value.tobytes()).decode()
    return _tagged("ndarray", [value.dtype.str, list(value.shape), raw])


def _tagged(kind: str, value: object) -> dict[str, object]:
    return {TAG: kind, "v": value}


def decode(value: Any, leaf: Leaf = refuse) -> Any:  # noqa: ANN401  # see encode
    """Return what `encode` was given. `leaf(kind, v)` answers for kinds not known here."""
    if isinstance(value, list):
        return [decode(item, leaf) for item in value]
    if not isinstance(value, dict):
        return value
    if TAG not in value:
        return {k: decode(v, leaf) for k, v in value.items()}
    kind, inner = value[TAG], value.get("v")
    if kind in _DECODERS:
        return _DECODERS[kind](inner, leaf)
    return leaf(kind, inner)


def _decode_number(inner: Any, leaf: Leaf) -> Any:  # noqa: ANN401  # see encode
    import numpy as np  # noqa: PLC0415  # only where one was saved

    dtype, number = inner
    return np.asarray(decode(number, leaf), _expect_numbers(np.dtype(dtype))).reshape(1)[0]


def _decode_ndarray(inner: Any, _: Leaf) -> Any:  # noqa: ANN401  # see encode
    import numpy as np  # noqa: PLC0415  # only where an array was saved

    dtype, shape, raw = inner
    return np.frombuffer(base64.b64decode(raw), _expect_numbers(np.dtype(dtype))).reshape(shape).copy()


def _decode_array(inner: Any, leaf: Leaf) -> Any:  # noqa: ANN401  # see encode
    """In the leaf's memory, which may be filled later."""
    import numpy as np  # noqa: PLC0415  # only where an array was saved

    dtype, shape, flat = inner
    return decode(flat, leaf).numpy().view(_expect_numbers(np.dtype(dtype))).reshape(shape)


def _expect_numbers(dtype: Any) -> Any:  # noqa: ANN401  # numpy's
    if dtype.kind not in _NUMBERS:
        raise StateError(f"the checkpoint holds an array of {dtype.str!r}; expected numbers")
    return dtype


def _pairs(inner: Any, leaf: Leaf) -> list[tuple[Any, Any]]:  # noqa: ANN401  # see encode
    return [(decode(k, leaf), decode(v, leaf)) for k, v in inner]


_SEQUENCES: Final[dict[type, str]] = {tuple: "tuple", set: "set", frozenset: "frozenset"}
_MAPPINGS: Final[dict[type, str]] = {dict: "dict", OrderedDict: "OrderedDict", Counter: "Counter"}
_DECODERS: Final[dict[str, Callable[[Any, Leaf], Any]]] = {
    "tuple": lambda inner, leaf: tuple(decode(inner, leaf)),
    "set": lambda inner, leaf: set(decode(inner, leaf)),
    "frozenset": lambda inner, leaf: frozenset(decode(inner, leaf)),
    "dict": lambda inner, leaf: dict(_pairs(inner, leaf)),
    "OrderedDict": lambda inner, leaf: OrderedDict(_pairs(inner, leaf)),
    "Counter": lambda inner, leaf: Counter(dict(_pairs(inner, leaf))),
    "float": lambda inner, _: float(inner),
    "bytes": lambda inner, _: base64.b64decode(inner),
    "bytearray": lambda inner, _: bytearray(base64.b64decode(inner)),
    "number": _decode_number,
    "ndarray": _decode_ndarray,
    "array": _decode_array,
}


def numpy_module() -> Any | None:  # noqa: ANN401  # numpy is not ours to import
    """Return numpy if the training script uses it."""
    return sys.modules.get("numpy")
