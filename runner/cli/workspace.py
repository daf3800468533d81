"""The folder in which runs have their folders: what a provider saves when it stops a server."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

WORKSPACE_VARIABLE: Final = "VRAMFARM_WORKSPACE"


def workspace_of(env: Mapping[str, str]) -> Path:
    """$VRAMFARM_WORKSPACE; else /workspace where there is one that we may write; else the current folder."""
    if named := env.get(WORKSPACE_VARIABLE):
        return Path(named).absolute()
    usual = Path("/workspace")
    return usual if os.access(usual, os.W_OK) else Path.cwd()
