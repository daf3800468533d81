import json
import os
import subprocess
import sys
import venv
from datetime import UTC, datetime
from pathlib import Path

import pytest

from runner.errors import JobError, MachineError
from runner.probes import machine

H200 = "NVIDIA H200, 143771, 570.86.15"
needs_users = pytest.mark.skipif(os.geteuid() == 0, reason="root may read and write everything")


@pytest.fixture
def smi(tmp_path):
    """A program that answers as nvidia-smi."""

    def make(script):
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        return str(program)

    return make


def listing(*cards):
    return "cat <<'.'\n" + "\n".join(f"{i}, GPU-{i}a, {card}" for i, card in enumerate(cards)) + "\n."


def test_no_driver_means_no_cards():
    """
    A machine without cards is no error; whether that will do is decided elsewhere.
    """
    assert () == machine.read_cards(program="/nowhere/nvidia-smi")


def test_a_broken_driver_is_the_machines_fault(smi):
    """
    A driver that answers with an error means cards that cannot be used.
    """
    program = smi("echo 'Failed to initialize NVML: Driver/library version mismatch' >&2; exit 18")

    with pytest.raises(MachineError, match="Failed to initialize NVML: Driver/library version mismatch"):
        machine.read_cards(program=program)


def test_a_driver_without_cards_is_a_finding(smi):
    """
    nvidia-smi ends with an error where there is no card; that is an answer.
    """
    assert () == machine.read_cards(program=smi("echo 'No devices were found'; exit 6"))


def test_a_driver_that_hangs_is_not_waited_for(smi):
    """
    A lost card makes nvidia-smi hang: the probe ends in time.
    """
    with pytest.raises(MachineError, match="expected an answer within 0s, got none: a card or the driver hangs"):
        machine.read_cards(program=smi("exec sleep 60"), timeout_s=0.2)


@pytest.mark.parametrize(
    ("names", "indices"),
    [
        pytest.param(None, [0, 1, 2], id="unset"),
        pytest.param("2,0", [2, 0], id="indices"),
        pytest.param("GPU-1", [1], id="start of a UUID"),
        pytest.param("", [], id="empty"),
        pytest.param("-1", [], id="none"),
        pytest.param("0,7,1", [0], id="ends at the first unknown"),
    ],
)
def test_hidden_cards_do_not_count(smi, names, indices):
    """
    CUDA_VISIBLE_DEVICES is read as CUDA reads it.
    """
    cards = machine.read_cards(program=smi(listing(H200, H200, H200)))

    assert indices == [card.index for card in machine.visible(cards, names)]


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """A virtual environment without torch."""
    folder = tmp_path_factory.mktemp("environment") / "env"
    venv.create(folder, with_pip=False, symlinks=True)
    return folder


def test_an_interpreter_is_taken_as_given():
    """
    A path is used as it is, with the versions of Python and torch.
    """
    found = machine.find_python(sys.executable)

    assert (sys.executable, sys.version.split()[0]) == (str(found.path), found.version)
    assert found.torch


def test_a_virtual_environment_is_taken_by_its_folder():
    """
    A folder means its bin/python, not what that links to.
    """
    found = machine.find_python(sys.prefix)

    assert Path(sys.prefix, "bin", "python") == found.path


def test_auto_passes_over_an_environment_without_torch(bare):
    """
    The first that has torch: here the supervisor's own.
    """
    found = machine.find_python("auto", path=str(bare / "bin"))

    assert sys.executable == str(found.path)


def test_a_folder_without_python_is_the_jobs_fault(tmp_path):
    """
    The message names what was given.
    """
    with pytest.raises(
        JobError, match=f"python: expected an interpreter or a virtual environment, found none at {tmp_path}"
    ):
        machine.find_python(str(tmp_path))


def test_an_environment_without_torch_is_the_jobs_fault(bare):
    """
    Better here than on eight ranks.
    """
    with pytest.raises(JobError, match=rf"python: expected torch in {bare} \(Python 3.*\), found none"):
        machine.find_python(str(bare))


def test_no_torch_anywhere_names_what_was_tried(bare):
    """
    The message lists the interpreters that were asked.
    """
    code = "from runner.probes import machine; machine.find_python('auto', path='/nowhere')"
    env = {"PYTHONPATH": str(Path(machine.__file__).parents[2])}

    done = subprocess.run([bare / "bin/python", "-c", code], env=env, capture_output=True, text=True, check=False)

    assert f"python: auto: expected torch, found none in {bare}/bin/python" in done.stderr


def test_a_file_named_torch_is_not_torch(bare, tmp_path, monkeypatch):
    """
    A torch.py where the supervisor stands is not taken for the library.
    """
    (tmp_path / "torch.py").touch()
    monkeypatch.chdir(tmp_path)

    with pytest.raises(JobError, match="expected torch"):
        machine.find_python(str(bare))


def test_an_interpreter_that_hangs_is_not_waited_for(tmp_path):
    """
    The search for torch is bounded.
    """
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)

    with pytest.raises(JobError, match="found none at"):
        machine.find_python(str(program), timeout_s=0.2)


@pytest.mark.parametrize(
    ("raw", "at"),
    [
        pytest.param(
            json.dumps({"first_boot_at": "2026-01-01T00:00:00+00:00"}), datetime(2026, 1, 1, tzinfo=UTC), id="written"
        ),
        pytest.param("{", None, id="torn"),
    ],
)
def test_the_first_boot_is_the_guardians_word(tmp_path, raw, at):
    """
    Cost counts from there; without it there is no cost to tell.
    """
    (tmp_path / ".vramfarm").mkdir()
    (tmp_path / ".vramfarm" / "guardian.json").write_text(raw)

    assert at == machine.first_boot_at(tmp_path)
