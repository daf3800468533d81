"""Serves a simulated VRAMfarm until its container ends; says where, and with which key."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from tests.farmhouse import open_farm

with open_farm(Path("/state")) as farm:
    sys.stdout.write(f"{farm.url} {farm.farm.account_key}\n")
    sys.stdout.flush()
    time.sleep(86_400)
