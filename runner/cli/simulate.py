"""`simulate`: the local VRAMfarm, an extra of its own."""

from __future__ import annotations

import argparse
from importlib.util import find_spec

from runner.errors import JobError

_NEEDS = ("fastapi", "uvicorn")


def configure(parser: argparse.ArgumentParser) -> None:
    """Nothing: the simulator reads its own arguments."""


def run(args: argparse.Namespace) -> int:
    if missing := [name for name in _NEEDS if find_spec(name) is None]:
        raise JobError(
            f"simulate: expected the packages {' and '.join(_NEEDS)}, found no {' and no '.join(missing)}",
            hint="pip install 'vramfarm-runner[simulate]'",
        )
    from runner.simulator.main import main  # noqa: PLC0415  # an extra: not everybody has it

    return main(args.rest)
