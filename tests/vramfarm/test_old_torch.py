"""
The oldest torch that we support, and the oldest whose own public reader reads our shards.

VRAMFARM_OLD_TORCH names their interpreters, with colons between them; `make test-old-torch` installs both.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PYTHONS = [python for python in os.environ.get("VRAMFARM_OLD_TORCH", "").split(":") if python]
ENV = {**os.environ, "PYTHONPATH": str(HERE.parents[1]), "OMP_NUM_THREADS": "1"}

pytestmark = [
    pytest.mark.skipif(not PYTHONS, reason="VRAMFARM_OLD_TORCH names no interpreter: make test-old-torch"),
    pytest.mark.timeout(900),
]


def run(python, cwd, *arguments):
    cwd.mkdir(exist_ok=True)
    done = subprocess.run(
        [python, *map(str, arguments)], cwd=cwd, env=ENV, capture_output=True, text=True, timeout=400, check=False
    )
    assert 0 == done.returncode, done.stderr
    return done.stdout


def torchrun(python, cwd, *arguments):
    return run(python, cwd, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *arguments)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder that this torch saved with two ranks."""
    cwd = tmp_path_factory.mktemp("new")
    torchrun(sys.executable, cwd, HERE / "train_small.py", "fsdp2", "job:9")
    return cwd / "job"


@pytest.mark.parametrize("python", PYTHONS)
def test_another_torch_reads_what_this_one_saved_and_the_other_way_round(python, saved, tmp_path):
    """
    Every tensor, bit for bit; and by torch's own reader, where that torch has a public one.
    """
    found = json.loads(run(python, tmp_path, HERE / "old_torch.py", saved))
    code = "import json, sys; from pathlib import Path; from old_torch import as_read; "
    code += "print(json.dumps([as_read(Path(p)) for p in sys.argv[1:]]))"
    env_path = f"import sys; sys.path[:0] = [{str(HERE)!r}]; "
    here = json.loads(
        run(sys.executable, tmp_path, "-c", env_path + code, saved / "checkpoints", "saved-by-another-torch")
    )
    weights = {key: value for key, value in here[0].items() if key.startswith("model.")}

    print(f"torch {found['torch']}: {len(here[0])} tensors read, its own reader: {found['by_torch'] is not None}")
    assert here == [found["read"], found["saved"]]
    assert weights == found["restored"]
    assert found["by_torch"] in (None, weights)
    assert found["read"] != found["saved"]


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("kind", ["plain", "fsdp2"])
def test_another_torch_trains_and_resumes(python, kind, tmp_path):
    """
    Resumed twice, alone and with FSDP2 on two ranks: the losses of the undisturbed run, to the last bit.
    """
    arguments = (HERE / "train_small.py", kind, "whole:26", "parts:9", "parts:11", "parts:26")
    if kind == "plain":
        run(python, tmp_path, *arguments)
    else:
        version = run(python, tmp_path, "-W", "ignore", "-c", "import torch; print(torch.__version__)")
        if version.startswith("2.6."):
            pytest.skip("torch 2.6 has no FSDP2 without a card")
        torchrun(python, tmp_path, *arguments)

    whole, parts = (
        [path.read_text() for path in sorted((tmp_path / name).glob("out.*"))] for name in ("whole", "parts")
    )
    assert 26 == len(whole[0].splitlines())
    assert whole == parts


@pytest.mark.parametrize("python", PYTHONS)
def test_another_torch_has_the_fsdp1_that_we_know(python, tmp_path):
    """
    Its private names for what lies where are the same, and every check of the newest torch passes.
    """
    said = torchrun(python, tmp_path, HERE / "flat_run.py", tmp_path)
    checks = [json.loads(line) for line in said.splitlines() if line.startswith("{")]

    assert [] == [check for check in checks if not check["same"]]
    assert len(checks) in {32, 38}, said  # with a reader of its own


@pytest.mark.skipif(len(PYTHONS) < 2, reason="one interpreter: it need not have a reader")
def test_one_of_them_has_a_reader_of_its_own():
    """
    Else the claim about torch's own reader would be checked by nobody.
    """
    code = "import torch.distributed.checkpoint as d; print(hasattr(d, 'HuggingFaceStorageReader'))"

    assert "True\n" in [run(python, Path.cwd(), "-W", "ignore", "-c", code) for python in PYTHONS]
