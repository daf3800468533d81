"""`plan`: what a job takes, in 80 columns or JSON; and what `run` would do now, without doing it."""

import fcntl
import json
import os
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from runner.cli.main import main
from runner.facts import Attempt, Conclusion, Ending, Exit, Machine, Outcome
from runner.policy.ledger import dump
from runner.results import dump_conclusion
from runner.storage import journal as events
from runner.storage.disk import Disk
from runner.storage.journal import Journal
from tests.farmhouse import open_farm
from vramfarm.checksum import crc32
from vramfarm.protocol import Env, Manifest, Shard, dump_manifest, shard_name

NOW = datetime.now(UTC) - timedelta(minutes=1)  # a back-off of ten seconds is over
EIGHT_B = ("--parameters", "8e9", "--cards", "4", "--gpu", "h100", "--strategy", "fsdp_full_shard")


@pytest.fixture
def plan(capsys, tmp_path, monkeypatch):
    """Run `plan`; return its exit code, its output and its complaints."""
    monkeypatch.setenv("VRAMFARM_WORKSPACE", str(tmp_path))

    def run(*arguments):
        code = main(["plan", *map(str, arguments)])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


@pytest.fixture
def answer(plan):
    """The same as data."""

    def run(*arguments):
        code, out, err = plan(*arguments, "--json")
        assert (0, "") == (code, err)
        return json.loads(out)

    return run


def write_checkpoint(root: Path, step: int, world_size: int = 8) -> str:
    shard = Shard(shard_name(0, 1), 3, (crc32(b"abc"),))
    manifest = Manifest("night", 0, step, "0123abcd", 1, world_size, NOW.isoformat(), "crc32", (shard,))
    folder = root / manifest.ref.name
    folder.mkdir(parents=True)
    (folder / shard.path).write_bytes(b"abc")
    (folder / "MANIFEST.json").write_bytes(dump_manifest(manifest))
    return manifest.ref.name


@pytest.fixture
def job(tmp_path):
    """A job.yaml whose run folder is `tmp_path/night`."""

    def write(**fields):
        path = tmp_path / "job.yaml"
        path.write_text(json.dumps({"name": "night", "command": "train.py", "cpu_processes": 4} | fields))
        return path

    return write


@pytest.fixture
def ran(tmp_path):
    """A run folder with one attempt on eight cards that ended like this."""

    def write(ending=Ending.FAILED, conclusion=None):
        folder = tmp_path / "night"
        folder.mkdir()
        journal = Journal(folder / "journal.jsonl", Disk())
        journal.append(events.accepted(NOW))
        attempt = Attempt(
            number=1, id="x" * 32, resume=None, lineage=0, boot_id="b", launched_at=NOW, world_size=8, global_batch=32
        )
        journal.append(events.launched(attempt))
        if ending is None:
            return folder
        journal.append(events.exited(ending, Exit(code=1), step=500, reason="CUDA error", at=NOW))
        if conclusion:
            journal.append(events.concluded(Conclusion(outcome=conclusion, reason="training is done", at=NOW)))
        return folder

    return write


# ------------------------------------------------------------------------------------- sums


def test_the_table_of_an_8b_model_is_printed(plan):
    """
    GB of states a card, and which of them fit on 80 GB.
    """
    code, out, err = plan(*EIGHT_B)
    table = {
        line[:22].strip(): line[22:].split()
        for line in out.splitlines()
        if line.count("128.0") == 1 or line.startswith("DDP")
    }

    assert (0, "") == (code, err)
    assert ["128.0", "128.0", "128.0", "128.0"] == table["DDP"]
    assert ["128.0", "80.0", "56.0*", "44.0*"] == table["ZeRO-1"]
    assert ["128.0", "72.0*", "44.0*", "30.0*"] == table["ZeRO-2"] == table["FSDP SHARD_GRAD_OP"]
    assert ["128.0", "64.0*", "32.0*", "16.0*"] == table["ZeRO-3"] == table["FSDP FULL_SHARD"]


@pytest.mark.parametrize(
    "arguments",
    [
        EIGHT_B,
        ("--parameters", "70B", "--strategy", "inference", "--precision", "fp8"),
        ("--parameters", "1e12", "--cards", "1024", "--gpu", "b200", "--strategy", "zero3", "--tokens", "1T"),
        ("--parameters", "350M", "--cards", "2", "--gpu", "4090", "--save-time", "8s", "--upload-time", "12m"),
        ("--parameters", "13B", "--strategy", "qlora", "--cpu-offload"),
    ],
    ids=["8B", "inference", "1T", "350M", "qlora"],
)
def test_it_fits_into_80_columns(arguments, plan):
    """
    A terminal on a phone, at night.
    """
    code, out, _ = plan(*arguments)

    assert 0 == code
    assert [] == [line for line in out.splitlines() if len(line) > 80 or line != line.rstrip()]


def test_the_same_is_data(answer):
    """
    Bytes and seconds, for scripts.
    """
    told = answer(*EIGHT_B, "--tokens", "1e9")

    assert (32e9, True) == (told["memory"]["states"], told["memory"]["fits"])
    assert (112e9, 448e9, 320e9, 36e9) == tuple(
        told[name] for name in ("checkpoint_bytes", "disk_bytes", "ram_bytes", "traffic_bytes")
    )
    assert told["traffic_s"] == pytest.approx(36 / told["link_gb_per_s"])
    assert ["8.80", "15.60"] == told["cost_per_hour"]
    assert told["run"]["seconds"] == sorted(told["run"]["seconds"])
    assert told["advice"][0].startswith("one card does it: H200 SXM (141 GB")


def test_more_cards_than_a_machine_has_are_planned_without_seconds(answer):
    """
    The network between machines is not known here.
    """
    told = answer("--parameters", "70B", "--cards", "64", "--gpu", "h100", "--strategy", "zero3")

    assert (70 * 16 / 64, None) == (told["memory"]["states"] / 1e9, told["traffic_s"])
    assert "speed_up" not in told


def test_the_job_says_what_is_trained(answer, job):
    """
    Its model, its batch, its limit; an option wins over it.
    """
    path = job(
        model={"parameters": 8e9, "strategy": "zero2"},
        batch={"global": 64, "per_card": 2},
        limits={"max_duration": "10h"},
    )
    told = answer("--config", path, "--cards", "4", "--gpu", "h100", "--optimizer", "sgd")

    assert ("zero2", "sgd", 8) == tuple(told["model"][name] for name in ("strategy", "optimizer", "accumulation"))
    assert [{"samples": 64, "per_card": 2, "cards": 4, "accumulation": 8}] == told["batch"]
    assert {"at_most": "10h", "cost": ["88.00", "156.00"]} == told["run"]


def test_the_cadence_is_advised_from_what_a_save_takes(answer):
    """
    A server that may be taken away at any moment, and an upload that is quick.
    """
    told = answer(*EIGHT_B, "--save-time", "8s", "--upload-time", "30s", "--rental", "interruptible")["cadence"]

    assert ("5m35s", True, True) == (told["save_interval"], told["matters"], told["assumed"])


def test_a_run_that_has_been_going_says_what_it_measured(answer, job, tmp_path):
    """
    Half a second a step, saves of eight seconds; a status that makes no sense is nothing.
    """
    (tmp_path / "night").mkdir()
    status = tmp_path / "night" / "status.json"
    status.write_text(json.dumps({"steps_per_s": 2.0, "max_steps": 72_000, "last_save_s": 8.0}))
    path = job(model={"parameters": 8e9})
    told = answer("--config", path, "--cards", "4", "--gpu", "h100")
    status.write_text(json.dumps({"steps_per_s": "fast", "max_steps": -1, "last_save_s": [8]}))
    odd = answer("--config", path, "--cards", "4", "--gpu", "h100")

    assert {"step_s": 0.5, "max_steps": 72_000, "seconds": 36_000.0, "cost": ["88.00", "156.00"]} == told["measured"]
    assert 8.0 == told["cadence"]["save_s"]
    assert (None, None) == (odd["measured"], odd["cadence"])


@pytest.mark.parametrize(
    ("options", "fields", "expected"),
    [
        (("--save-time", "8s", "--upload-time", "3m"), {}, (406.0, 8.0, False, False)),
        ((), {}, (478.0, 224.0, True, False)),
        ((), {"framework": "hf_trainer", "command": "train.py {resume_args}"}, (478.0, 224.0, True, True)),
        ((), {"limits": {"max_duration": "10m"}}, (150.0, 224.0, True, False)),
    ],
)
def test_how_long_before_a_limit_it_is_asked_to_leave_is_said(answer, job, options, fields, expected):
    """
    Twice a save and its upload, and half a minute; by the size of a checkpoint until one was timed; at most a quarter of the time.
    """
    end = answer("--config", job(model={"parameters": 8e9}, **fields), *options)["end"]

    assert expected == (round(end["kept_s"], 2), round(end["save_s"], 2), end["assumed"], end["by_script"])


def test_on_a_machine_with_cards_they_are_what_is_planned_for(answer, tmp_path, monkeypatch):
    """
    Four A100, of the smaller kind: the driver knows how much memory they have.
    """
    smi = tmp_path / "nvidia-smi"
    rows = "".join(f"echo '{n}, GPU-{n}, NVIDIA A100-SXM4-40GB, 40960, 570.124'\n" for n in range(4))
    smi.write_text(f"#!/bin/sh\n{rows}")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    told = answer("--parameters", "8e9", "--strategy", "zero3")

    assert (4, {"slug": "a100", "name": "A100 SXM", "memory_gb": 40}) == (told["cards"], told["gpu"])
    assert told["memory"]["fits"]


NONSENSE = {
    "no parameters": ("--parameters", "0"),
    "a negative number": ("--parameters", "-8"),
    "not a number": ("--parameters", "nan"),
    "more than there is": ("--parameters", "1e999"),
    "no card": ("--parameters", "8e9", "--cards", "0"),
    "half a card": ("--parameters", "8e9", "--cards", "0.5"),
    "too many": ("--parameters", "8e9", "--cards", "2000"),
    "an unknown card": ("--parameters", "8e9", "--gpu", "voodoo"),
    "training in 8 bits": ("--parameters", "8e9", "--precision", "fp8"),
    "a time without a unit": ("--parameters", "8e9", "--save-time", "8"),
    "no time": ("--parameters", "8e9", "--mtbf", "0s"),
    "an odd batch": ("--parameters", "8e9", "--global-batch", "63", "--per-card", "2"),
    "three cards for 64": ("--parameters", "8e9", "--global-batch", "64", "--cards", "3"),
}


@pytest.mark.parametrize("arguments", NONSENSE.values(), ids=NONSENSE)
def test_nonsense_is_refused_in_one_line(arguments, plan):
    """
    What was expected and what was found.
    """
    code, out, err = plan(*arguments)

    assert (2, "", 1) == (code, out, len(err.splitlines()))
    assert err.startswith(("error: --", "error: batch: global 6"))


def test_the_catalogue_is_asked_where_there_is_a_key(answer, tmp_path, monkeypatch):
    """
    A real simulator over HTTP: its machines and its prices, and the reason where it does not answer.
    """
    with open_farm(tmp_path / "farm") as house:
        monkeypatch.setenv("VRAMFARM_API_URL", house.url)
        monkeypatch.setenv("VRAMFARM_API_KEY", house.farm.account_key)
        told = answer(*EIGHT_B)
    gone = answer(*EIGHT_B)

    assert ("VRAMfarm's catalogue", "m_h100x4", False) == (
        told["catalogue"],
        told["machines"][0]["id"],
        told["machines"][0]["offload"],
    )
    assert ["15.60", "15.60"] == told["cost_per_hour"]
    assert gone["catalogue"].startswith("the built-in table (rough prices; the catalogue cannot be read: no answer")


# ------------------------------------------------------------------------------ what run does


def test_a_new_run_would_begin_at_step_0(answer, job, tmp_path):
    """
    And nothing is made: no run folder.
    """
    told = answer("--config", job())["next"]

    assert ["launch attempt 1 from step 0 (lineage 1)"] == told
    assert not (tmp_path / "night").exists()


def test_a_failed_attempt_goes_on_from_its_checkpoint(answer, job, ran):
    """
    On half the cards: the batch that is kept is said as `run` says it.
    """
    name = write_checkpoint(ran() / "checkpoints", 500)
    path = job(batch={"global": 32, "per_card": 2})
    before = sorted(os.walk(path.parent))
    told = answer("--config", path)["next"]

    assert [
        f"launch attempt 2 from step 500 ({name})",
        "global batch 32 is kept: 2 a card x 4 cards x 4 (VRAMFARM_GRAD_ACCUM); before: 8 cards",
    ] == told
    assert before == sorted(os.walk(path.parent))


def test_the_wait_after_a_failure_is_foreseen(answer, job, ran):
    """
    Eleven hours of it, so that no slow machine can be late.
    """
    write_checkpoint(ran() / "checkpoints", 500)
    told = answer("--config", job(restart={"initial_delay": "11h", "max_delay": "11h"}))["next"]

    assert ("wait 10h ", ": the last attempt failed just now") == (told[0][:9], told[0][12:])
    assert told[1].startswith("launch attempt 2 from step 500")


def test_what_only_the_store_has_would_be_restored(answer, job, tmp_path):
    """
    A new machine; without asking the store it would be a guess, and it is said so.
    """
    name = write_checkpoint(tmp_path / "store" / "night" / "checkpoints", 700)
    path = job(offload={"to": f"file://{tmp_path}/store"})

    assert [
        f"restore {name} from the store: this disk does not have it",
        f"launch attempt 1 from step 700 ({name})",
    ] == answer("--config", path)["next"][:2]
    guess = answer("--config", path, "--offline")["next"]
    assert guess[0].endswith("was not asked; a newer checkpoint there would be restored")


@pytest.mark.parametrize(
    ("number", "limits", "expected"),
    [
        pytest.param(1, {}, "conclude stopped: asked to stop (on an earlier machine)", id="it is over there"),
        pytest.param(2, {}, "open the run again", id="it trained after that end"),
        pytest.param(
            2, {"max_duration": "1h"}, "conclude limit: limits.max_duration is reached", id="its time is used"
        ),
    ],
)
def test_what_other_machines_did_counts(answer, job, tmp_path, number, limits, expected):  # noqa: PLR0917
    """
    An end that was one only until the next attempt is none; their attempts and their time count as in `run`.
    """
    begun = NOW - timedelta(hours=2)
    trained = Attempt(number=number, id="a", resume=None, lineage=0, boot_id="b", launched_at=begun)
    machine = Machine(id="m", opened_at=begun, paid_from=begun, seen_at=NOW, attempts=(trained,))
    over = Conclusion(outcome=Outcome.STOPPED, reason="asked to stop", at=NOW)
    write_checkpoint(tmp_path / "store" / "night" / "checkpoints", 700)
    for name, fields in (("ledger.json", dump((machine,))), ("outcome.json", dump_conclusion(over, attempt=1))):
        (tmp_path / "store" / "night" / name).write_text(json.dumps(fields))

    told = answer("--config", job(offload={"to": f"file://{tmp_path}/store"}, limits=limits))["next"]

    assert any(line.startswith(expected) for line in told), told
    assert ("launch attempt 3" in " ".join(told)) == (not limits and number > 1)


def test_a_run_that_is_over_trains_nothing(answer, job, ran):
    """
    A boot after the end only stops the server again.
    """
    ran(Ending.SUCCEEDED, Outcome.SUCCEEDED)

    assert ["end with exit code 0: training is done"] == answer("--config", job())["next"]


def test_a_second_runner_is_foreseen_to_be_refused(answer, job, ran):
    """
    Another one holds the lock.
    """
    with (ran() / "lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        told = answer("--config", job())["next"]

    assert ["a runner is at work on this run: see status; a second one is refused (exit 5)"] == told


def test_ranks_that_live_on_without_a_runner_are_seen(answer, job, ran):
    """
    The runner was killed; its training was not. And when the training has ended, how it did is read.
    """
    folder = ran(ending=None)
    write_checkpoint(folder / "checkpoints", 500)
    with subprocess.Popen(["sleep", "60"], env={Env.ATTEMPT_ID: "x" * 32}) as rank:
        living = answer("--config", job())["next"]
        rank.kill()
    at = folder / "logs" / "attempt-0001"
    at.mkdir(parents=True)
    (at / "exit.json").write_text('{"code": 0}')
    ended = answer("--config", job())["next"]

    assert ["attempt 1 is still training without its runner: `run` goes on watching it"] == living
    assert ["attempt succeeded at step 0 (exit 0)", "conclude succeeded: training is done"] == ended[:2]


def test_a_store_that_cannot_be_asked_is_said(answer, job, tmp_path):
    """
    The plan is given all the same.
    """
    (tmp_path / "file").write_text("no folder")
    told = answer("--config", job(offload={"to": f"file://{tmp_path}/file/store"}))["next"]

    assert "cannot be asked from here" in told[0]
    assert "launch attempt 1 from step 0 (lineage 1)" == told[-1]


def test_the_page_shows_what_the_command_prints(plan):
    """
    docs/plan.md is written from it; `plan` that says something else must change the page, too.
    """
    text = (Path(__file__).parents[2] / "docs" / "plan.md").read_text()
    command, _, shown = text.split("```console\n$ vramfarm-runner plan ", 1)[1].split("```")[0].partition("\n")

    assert shown == plan(*command.split())[1]
