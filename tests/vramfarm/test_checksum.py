"""The checksum of a chunk: one number, whoever computes it."""

import subprocess
import sys
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vramfarm.checksum import crc32, find_crc64nvme

BROKEN = "raise RuntimeError('built for another processor')"
WRONG = "def crc32(data, before=0): return 7"
SAY = "import vramfarm.checksum as c; print(c.crc32(b'123456789'))"
WRONG_64 = "def crc64nvme(data, before=0): return 0xAE8B14860A799888"  # right for the standard's own example
SAY_64 = "import vramfarm.checksum as c; print(c.find_crc64nvme())"


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


def bit_by_bit(raw):
    """CRC64NVME as its standard defines it."""
    register = 2**64 - 1
    for byte in raw:
        register ^= byte
        for _ in range(8):
            register = register >> 1 ^ (0x9A6C9329AC4BC9B5 if register & 1 else 0)
    return register ^ 2**64 - 1


@given(st.binary(max_size=600), st.binary(max_size=600))
def test_crc64nvme_is_that_of_its_standard(first, second):
    """
    A store computes it for itself and refuses what differs.
    """
    crc64nvme = find_crc64nvme()

    assert bit_by_bit(first + second) == crc64nvme(memoryview(second), crc64nvme(memoryview(first), 0))


@pytest.mark.parametrize("code", [pytest.param(BROKEN, id="broken"), pytest.param(WRONG_64, id="wrong")])
def test_a_crc64nvme_that_cannot_be_believed_is_none(tmp_path, code):
    """
    As where nothing is installed: a checkpoint is written without it.
    """
    package = tmp_path / "awscrt"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "checksums.py").write_text(code)
    env = {"PYTHONPATH": f"{tmp_path}:."}

    out = subprocess.run([sys.executable, "-c", SAY_64], env=env, capture_output=True, text=True, check=True).stdout

    assert "None\n" == out
