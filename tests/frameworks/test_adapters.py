"""PEFT, bitsandbytes and torchao, the real ones, on the processor."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MISSING = [name for name in ("peft", "bitsandbytes", "torchao") if find_spec(name) is None]


@pytest.mark.timeout(600)  # 20 s of processor; a busy machine gives it slowly
@pytest.mark.skipif(bool(MISSING), reason=f"{' and '.join(MISSING)} not installed: pip install '.[frameworks]'")
def test_adapters_and_small_optimizers_resume_or_are_refused_by_name(tmp_path: Path):
    """
    LoRA resumes to the last bit, its base written once; so do 8-bit optimizers and adapters on a 4-bit base. Another base, and state that
    only its type can read, are refused by name and never silently another.
    """
    argv = (sys.executable, "-W", "ignore", Path(__file__).with_name("train_adapters.py"), tmp_path)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}
    env |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=580, check=False)
    assert 0 == done.returncode, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    base, files, names = found["lora written once"]

    assert [True] * 3 == [found[name] for name in ("lora", "8-bit", "4-bit")]
    assert (1, 2) == (files, names)
    assert base > 1_000_000 > found["lora each time"]
    assert "GB, are written once" in done.stderr
    assert "weight.quant_state.bitsandbytes__nf4: the module makes them anew" in found["4-bit, another base"]
    assert "exp_avg: cannot be saved: a tensor of type torchao.optim" in found["subclass"]
