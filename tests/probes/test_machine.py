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
from runner.probes.finding import Severity

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


def test_cards_are_counted_and_named(smi):
    """
    Eight like cards are one line.
    """
    finding = machine.probe_cards({}, program=smi(listing(*[H200] * 8)))

    assert (Severity.OK, "8 x NVIDIA H200, 140 GiB, driver 570.86.15") == (finding.severity, finding.message)
    assert 8 == finding.facts["count"]


def test_no_driver_is_a_finding():
    """
    A machine without cards is told as one; whether that will do is decided elsewhere.
    """
    finding = machine.probe_cards({}, program="/nowhere/nvidia-smi")

    assert (Severity.WARN, "no card found", 0) == (finding.severity, finding.message, finding.facts["count"])


def test_a_driver_without_cards_is_a_finding(smi):
    """
    nvidia-smi ends with an error where there is no card; that is an answer.
    """
    assert () == machine.read_cards(program=smi("echo 'No devices were found'; exit 6"))


def test_cards_that_differ_are_told(smi):
    """
    Unlike cards work, at the pace of the slowest.
    """
    finding = machine.probe_cards({}, program=smi(listing(H200, "NVIDIA L4, 23034, 570.86.15")))

    assert (Severity.WARN, "cards differ: NVIDIA H200, NVIDIA L4") == (finding.severity, finding.message)


def test_a_broken_driver_is_a_refusal(smi):
    """
    A driver that answers with an error means cards that cannot be used.
    """
    program = smi("echo 'Failed to initialize NVML: Driver/library version mismatch' >&2; exit 18")

    finding = machine.probe_cards({}, program=program)

    assert Severity.REFUSE is finding.severity
    assert "Failed to initialize NVML: Driver/library version mismatch" in finding.message


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


def test_a_disk_is_really_written(tmp_path):
    """
    The folder is made, written, synced, and left empty.
    """
    finding = machine.probe_disk(tmp_path / "run")

    assert (Severity.OK, []) == (finding.severity, list((tmp_path / "run").iterdir()))
    assert finding.facts["free_bytes"] > 0


@pytest.mark.parametrize("folder", ["/proc/nowhere", "/dev/null/x"])
def test_a_folder_that_cannot_be_written_is_a_refusal(folder):
    """
    Training that cannot save is not begun.
    """
    finding = machine.probe_disk(Path(folder))

    assert Severity.REFUSE is finding.severity
    assert finding.message.startswith(f"{folder}: expected a folder that can be written, got: ")


def test_small_shared_memory_is_told(tmp_path):
    """
    Docker's 64 MB are named with the cure; a host's half of the memory is fine.
    """
    assert Severity.OK is machine.probe_shared_memory(tmp_path).severity

    finding = machine.probe_shared_memory(tmp_path / "none")

    assert (Severity.WARN, True) == (finding.severity, "--shm-size" in finding.hint)


def test_a_readable_folder_is_fine(tmp_path):
    """
    Nothing to say about data that can be read.
    """
    (tmp_path / "data").touch()

    assert Severity.OK is machine.probe_readable(tmp_path).severity


def test_a_missing_folder_is_a_refusal(tmp_path):
    """
    The message says what was expected and what was found.
    """
    finding = machine.probe_readable(tmp_path / "none")

    assert f"{tmp_path}/none: expected a folder that can be read, got: No such file or directory" == finding.message


@needs_users
def test_an_unreadable_file_is_named(tmp_path):
    """
    One file without permission is found before the job stumbles over it.
    """
    (tmp_path / "data").touch(mode=0o000)

    assert f"{tmp_path}/data: cannot be read" == machine.probe_readable(tmp_path).message


# ---------------------------------------------------------------------------------- python


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
