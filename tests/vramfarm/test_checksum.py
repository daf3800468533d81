"""The checksum of a chunk: one number, whoever computes it."""

import subprocess
import sys
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vramfarm.checksum import crc32

BROKEN = "raise RuntimeError('built for another processor')"
WRONG = "def crc32(data, before=0): return 7"
SAY = "import vramfarm.checksum as c; print(c.crc32(b'123456789'))"


@given(st.binary(max_size=3000), st.integers(0, 2**32 - 1))
def test_any_implementation_gives_the_number_that_zlib_gives(raw, before):
    """
    A checkpoint that one machine wrote is verified on another, with and without the fast one.
    """
    assert zlib.crc32(raw, before) == crc32(memoryview(raw), before)


@pytest.mark.parametrize("code", [pytest.param(BROKEN, id="broken"), pytest.param(WRONG, id="wrong")])
def test_a_package_that_cannot_be_believed_is_not_used(tmp_path, code):
    """
    Somebody else's `isal`, or one that does not load, costs speed and never a checkpoint.
    """
    package = tmp_path / "isal"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "isal_zlib.py").write_text(code)
    env = {"PYTHONPATH": f"{tmp_path}:."}

    out = subprocess.run([sys.executable, "-c", SAY], env=env, capture_output=True, text=True, check=True).stdout

    assert 0xCBF43926 == int(out)
