"""A package that is installed, and must not be found by one that would use it only because it is there."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def hidden(package: str) -> Iterator[None]:
    """Whoever imports it meanwhile gets an ImportError, as where it is not installed."""
    known = sys.modules.pop(package, None)
    sys.modules[package] = None  # type: ignore[assignment]  # what Python itself takes for that
    try:
        yield
    finally:
        del sys.modules[package]
        if known is not None:
            sys.modules[package] = known
