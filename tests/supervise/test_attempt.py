import json
import os
import pickle
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import vramfarm
from runner.errors import JobError
from runner.facts import Exit
from runner.job import Batch
from runner.supervise import attempt, process
from tests.supervise.conftest import until
from vramfarm.protocol import EndRecord, Env

SLEEP = ("sleep", "60")


@pytest.fixture
def spec(marker, tmp_path):
    run_dir = tmp_path / "run"
    return attempt.LaunchSpec(
        number=1,
        id=marker,
        argv=SLEEP,
        cwd=tmp_path,
        run_dir=run_dir,
        folder=run_dir / "logs" / "attempt-0001",
        control=run_dir / "page",
        job="job",
        checkpoint_dir=run_dir / "checkpoints",
        save_interval_s=1800.0,
        lineage=1,
    )


def python(code):
    return (sys.executable, "-c", code)


def ended(spec):
    """Start, wait until no process is left, return the exit."""
    attempt.start(spec)
    until(lambda: attempt.live(spec.id) is None, 20)
    return attempt.read_exit(spec.folder)


def launcher_log(spec):
    return (spec.folder / "launcher.log").read_text()


def test_each_rank_gets_its_share_of_the_threads(spec):
    """
    Unless the user, or the image, says another number.
    """
    shared = replace(spec, num_threads=8)

    assert ["8", "8"] == [attempt.environment(shared, {})[name] for name in attempt.THREADS]
    assert "2" == attempt.environment(shared, {"OMP_NUM_THREADS": "2"})["OMP_NUM_THREADS"]
    assert "3" == attempt.environment(replace(shared, env={"OMP_NUM_THREADS": "3"}), {})["OMP_NUM_THREADS"]


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        pytest.param(("true",), 0, id="success"),
        pytest.param(("sh", "-c", "exit 3"), 3, id="failure"),
        pytest.param(("sh", "-c", "kill -KILL $$"), -9, id="signal"),
        pytest.param(("/no/such/launcher",), 127, id="not found"),
        pytest.param(("/etc/passwd",), 126, id="not executable"),
    ],
)
def test_the_exit_of_the_launcher_is_recorded(spec, argv, code):
    """
    However the launcher ends, or fails to begin, its code can be read afterwards.
    """
    assert Exit(code=code) == ended(replace(spec, argv=argv))


def test_a_launcher_that_cannot_start_says_why(spec):
    """
    The launcher's log names the program that was not found.
    """
    ended(replace(spec, argv=("/no/such/launcher",)))

    assert "vramfarm-runner: cannot start /no/such/launcher: No such file or directory\n" == launcher_log(spec)


def test_output_of_the_launcher_is_logged_and_its_input_is_empty(spec):
    """
    Both streams go to launcher.log; a question on standard input ends at once.
    """
    ended(replace(spec, argv=("sh", "-c", "echo out; echo err >&2; cat; echo end")))

    assert "out\nerr\nend\n" == launcher_log(spec)


def test_a_change_is_in_the_environment_unless_the_user_set_it(spec):
    """
    A retry's change wins over the image's environment and over our own; job.yaml wins over it.
    """
    changed = replace(
        spec, changes={"LD_LIBRARY_PATH": "", "NCCL_DEBUG": "INFO", "A": "1"}, env={"A": "2"}, secrets={"B": "3"}
    )

    env = attempt.environment(changed, {"LD_LIBRARY_PATH": "/foreign"})

    assert ("", "INFO", "2", "3") == tuple(env[name] for name in ("LD_LIBRARY_PATH", "NCCL_DEBUG", "A", "B"))


def test_a_change_names_a_port_that_is_free_now(spec):
    """
    What only a launch can know is put in at the launch.
    """
    changed = replace(spec, changes={"MASTER_PORT": "<free port>"})

    assert 1024 < int(attempt.environment(changed, {})["MASTER_PORT"]) < 65536


def test_the_exit_survives_the_runner(spec, tmp_path):
    """
    A runner that is killed right after the launch changes nothing for the attempt.
    """
    runner = tmp_path / "launching.py"
    runner.write_text(
        "import os, sys, pickle\n"
        "from runner.supervise import attempt\n"
        "attempt.start(pickle.load(sys.stdin.buffer))\n"
        "os.kill(os.getpid(), 9)\n"
    )
    given = replace(spec, argv=("sh", "-c", "sleep 0.5; exit 5"))
    subprocess.run([sys.executable, runner], input=pickle.dumps(given), timeout=20, check=False)

    until(lambda: attempt.live(spec.id) is None)
    assert Exit(code=5) == attempt.read_exit(spec.folder)


def test_hangup_interrupt_and_termination_do_not_end_the_shim(spec):
    """
    A terminal that goes away ends nothing; the launcher gets signals as any program does.
    """
    attempt.start(replace(spec, argv=python("import signal, time; print(repr(signal.getsignal(1))); time.sleep(60)")))
    until(lambda: "SIG_DFL" in launcher_log(spec))
    shim = json.loads((spec.folder / "shim.json").read_text())["pid"]

    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        os.kill(shim, number)

    assert None is attempt.read_exit(spec.folder)
    assert 2 == len(attempt.live(spec.id).trainers)


def test_killing_ends_every_trainer_and_keeps_the_exit(spec):
    """
    Ranks in sessions of their own and ranks that ignore signals are ended; the record is written.
    """
    code = "import os, signal, time; signal.signal(15, signal.SIG_IGN); os.fork() or os.setsid(); time.sleep(60)"
    attempt.start(replace(spec, argv=python(code)))
    until(lambda: len(attempt.live(spec.id).trainers) == 3)

    left = attempt.kill(spec.id)

    assert ((), None, Exit(code=-9)) == (left, attempt.live(spec.id), attempt.read_exit(spec.folder))


DAEMONS = """
import os, subprocess
for env in ({}, None, {**os.environ, "VRAMFARM_ROLE": "saver"}):
    subprocess.Popen(["sleep", "61"], env=env, start_new_session=True)
"""


def test_a_daemon_that_outlives_the_launcher_is_named_and_ended(spec):
    """
    Also one with an environment and a session of its own, which nobody finds by the attempt's mark; a saver has its time.
    """
    attempt.start(replace(spec, argv=python(DAEMONS)))
    until((spec.folder / "exit.json").exists)
    until(lambda: attempt.find_shim(spec.folder) is None)
    live = attempt.live(spec.id, spec.folder)

    marked = attempt.live(spec.id).trainers

    left = attempt.kill(spec.id, spec.folder)

    assert (2, 1) == (len(live.trainers), len(marked))
    assert {f"{pid} sleep 61" for pid in live.trainers} == set(live.left)
    after = attempt.live(spec.id, spec.folder)
    assert ((), (), live.savers) == (left, after.trainers, after.savers)
    attempt.kill(spec.id, savers=True)


def test_killing_spares_the_saver(spec, marker, run_python):
    """
    A staged save commits although all ranks are killed; only when asked to are savers killed.
    """
    saver = run_python("import time; time.sleep(60)", **{Env.ROLE: "saver"})
    attempt.start(spec)

    attempt.kill(spec.id)

    live = attempt.live(spec.id)
    assert ((), (saver.pid,)) == (live.trainers, live.savers)
    assert () == attempt.kill(spec.id, savers=True)
    assert None is attempt.live(spec.id)


def test_an_exit_is_not_known_while_the_shim_lives(spec):
    """
    As long as the shim lives its word is awaited; if it dies silent, nobody knows.
    """
    attempt.start(spec)
    until((spec.folder / "shim.json").exists)
    before = attempt.read_exit(spec.folder)

    process.end_all(lambda: process.find(Env.ATTEMPT_ID, spec.id))

    assert (None, Exit(code=None)) == (before, attempt.read_exit(spec.folder))


def shim_and_launcher(spec):
    """Both, once the shim has written down whom it watches."""

    def written():
        path = spec.folder / "shim.json"
        fields = json.loads(path.read_text()) if path.exists() else {}
        return "launcher" in fields and (fields["pid"], fields["launcher"]["pid"])

    return until(written)


@pytest.mark.parametrize(
    ("dead", "is_unwatched"),
    [
        pytest.param((), False, id="none"),
        pytest.param((0,), False, id="the shim: the launcher watches"),
        pytest.param((0, 1), True, id="shim and launcher"),
    ],
)
def test_ranks_are_watched_as_long_as_the_launcher_or_its_shim_lives(spec, dead, is_unwatched):
    """
    When both are gone, ranks would wait for a dead one for ever.
    """
    rank = "import os, time; os.fork() or os.setsid(); time.sleep(60)"
    attempt.start(replace(spec, argv=python(rank)))
    until(lambda: len(attempt.live(spec.id).trainers) == 3)
    both = shim_and_launcher(spec)
    started = {pid: process.identify(pid).started for pid in both}

    for index in dead:
        os.kill(both[index], signal.SIGKILL)
    gone = [both[index] for index in dead]
    until(lambda: not any(process.is_alive(process.Process(pid, started[pid])) for pid in gone))

    assert is_unwatched is attempt.is_unwatched(spec.folder)


def test_an_attempt_that_was_never_started_has_an_unknown_exit(tmp_path):
    """
    A runner that died between writing down a launch and launching leaves no riddle.
    """
    assert Exit(code=None) == attempt.read_exit(tmp_path / "attempt-0007")


@pytest.mark.parametrize(
    ("raw", "record"),
    [
        pytest.param(b'{"kind": "left", "step": 7}', EndRecord("left", 7), id="left"),
        pytest.param(b"", None, id="lost by the disk"),
        pytest.param(None, None, id="none"),
    ],
)
def test_the_end_is_what_the_saver_wrote(tmp_path, raw, record):
    """
    An end record that cannot be read counts as none.
    """
    if raw is not None:
        (tmp_path / "end.json").write_bytes(raw)

    assert record == attempt.read_end(tmp_path)


def test_an_attempt_is_started_once(spec):
    """
    A second start of the same attempt is a fault of ours and is refused.
    """
    attempt.start(spec)

    with pytest.raises(FileExistsError):
        attempt.start(spec)


def test_a_missing_workdir_is_the_jobs_fault(spec, tmp_path):
    """
    The message names the folder, and no attempt folder is left behind.
    """
    with pytest.raises(JobError, match=r"workdir: expected a folder, found none at .*/nowhere"):
        attempt.start(replace(spec, cwd=tmp_path / "nowhere"))

    assert not spec.folder.exists()


def test_files_of_the_user_do_not_break_the_shim(spec, tmp_path):
    """
    A json.py in the working folder, or on PYTHONPATH, hides nothing from the shim.
    """
    (tmp_path / "json.py").write_text("raise RuntimeError('mine')")

    assert Exit(code=0) == ended(replace(spec, argv=("true",), env={"PYTHONPATH": str(tmp_path)}))


def test_cores_are_not_dumped_and_files_may_be_opened(spec):
    """
    A crash of eight ranks does not fill the disk; data workers may open as many files as the system allows.
    """
    code = "import resource as r; print(r.getrlimit(r.RLIMIT_CORE), r.getrlimit(r.RLIMIT_NOFILE)[0] >= 4096)"

    ended(replace(spec, argv=python(code)))

    assert "(0, 0) True\n" == launcher_log(spec)


# ---------------------------------------------------------------------------- environment


def test_secrets_of_the_supervisor_do_not_reach_the_training(spec):
    """
    Provider keys, and everything that is named, are kept out.
    """
    outer = {"VRAMFARM_API_KEY": "k", "RUNPOD_API_KEY": "k", "HOME": "/root", Env.ATTEMPT_ID: "another"}

    env = attempt.environment(replace(spec, withhold=frozenset({"RUNPOD_API_KEY"})), outer)

    assert {"HOME"} == outer.keys() & env.keys() - {Env.ATTEMPT_ID}
    assert spec.id == env[Env.ATTEMPT_ID]


def test_the_user_has_the_last_word_but_on_the_protocol(spec):
    """
    Prevention gives way to the image, the image to the job, the job to secrets, all to ours.
    """
    outer = {"NCCL_DEBUG": "INFO", "A": "image", "B": "image", "C": "image"}
    given = replace(spec, env={"B": "job", "C": "job", Env.ATTEMPT: "99"}, secrets={"C": "secret"})

    env = attempt.environment(given, outer)

    assert ("INFO", "image", "job", "secret", "1") == tuple(env[n] for n in ("NCCL_DEBUG", "A", "B", "C", Env.ATTEMPT))
    assert "1" == env["PYTHONFAULTHANDLER"]


@pytest.mark.parametrize(
    ("installed", "told"),
    [("torch-2.6.0+cu124", True), ("torch-2.11.0+cu130", False), ("torchvision-0.2.0", False)],
)
def test_the_flight_recorder_writes_where_it_is_looked_for(spec, tmp_path, installed, told):
    """
    Torch before 2.9 knows it by other names, and newer torch complains of these.
    """
    (tmp_path / f"env/lib/python3.12/site-packages/{installed}.dist-info").mkdir(parents=True)
    given = replace(spec, python=str(tmp_path / "env" / "bin" / "python"))

    env = attempt.environment(given, {})

    dump = str(spec.folder / "flight_recorder_rank_")
    assert dump == env["TORCH_FR_DUMP_TEMP_FILE"]
    old = [env.get(name) for name in ("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCH_NCCL_TRACE_BUFFER_SIZE")]
    assert ([dump, "2000"] if told else [None, None]) == old


def test_the_training_environment_is_activated(spec, tmp_path):
    """
    Programs that torch looks for (ninja) are those beside the training interpreter.
    """
    (tmp_path / "env" / "bin").mkdir(parents=True)
    (tmp_path / "env" / "pyvenv.cfg").touch()
    given = replace(spec, python=str(tmp_path / "env" / "bin" / "python"))

    env = attempt.environment(given, {"PATH": "/usr/bin"})

    assert (f"{tmp_path}/env/bin:/usr/bin", f"{tmp_path}/env") == (env["PATH"], env["VIRTUAL_ENV"])


@pytest.mark.parametrize(
    ("outer", "netrc", "mode"),
    [
        pytest.param({}, "", "offline", id="no key"),
        pytest.param({"WANDB_API_KEY": "k"}, "", None, id="key"),
        pytest.param({}, "machine api.wandb.ai password k", None, id="logged in"),
        pytest.param({"WANDB_MODE": "disabled"}, "", "disabled", id="the user's choice"),
    ],
)
def test_without_a_key_wandb_writes_to_disk(spec, tmp_path, outer, netrc, mode):
    """
    A missing W&B key does not end a night's run.
    """
    (tmp_path / ".netrc").write_text(netrc)

    env = attempt.environment(spec, {"HOME": str(tmp_path), **outer})

    assert mode == env.get("WANDB_MODE")


def test_the_library_can_be_imported_and_nothing_else_comes_with_it(spec):
    """
    PYTHONPATH ends with a folder that holds the library alone; what the user has there comes first.
    """
    code = "import vramfarm, importlib.util as u; print(vramfarm.__path__[0], u.find_spec('runner'))"
    given = replace(spec, argv=(sys.executable, "-S", "-c", code), env={"PYTHONPATH": "/mine"})

    ended(given)

    lib = spec.run_dir / "lib"
    assert [Path("vramfarm")] == [p.relative_to(lib) for p in lib.iterdir()]
    assert f"/mine:{lib}" == attempt.environment(given, {})["PYTHONPATH"]
    assert f"{lib}/vramfarm None\n" == launcher_log(spec)


def test_a_link_to_an_older_library_is_replaced(tmp_path):
    """
    After the image was renewed the run uses its library.
    """
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "vramfarm").symlink_to("/old/vramfarm")

    attempt.link_library(tmp_path)

    assert Path(vramfarm.__file__).parent == (tmp_path / "lib" / "vramfarm").resolve()


def test_the_batch_is_exported_as_the_job_wishes_it(spec):
    """
    What a script needs to keep the global batch; nothing where the job leaves it to the script.
    """
    names = (Env.WORLD_SIZE, Env.GRAD_ACCUM, Env.BATCH_PER_CARD, Env.GLOBAL_BATCH)
    batch = Batch.model_validate({"global": 256, "per_card": 4})
    wished = attempt.environment(replace(spec, num_procs=4, batch=batch, grad_accum=16), {Env.GRAD_ACCUM: "7"})
    without = attempt.environment(replace(spec, num_procs=4), {Env.GRAD_ACCUM: "7"})

    assert ["4", "16", "4", "256"] == [wished.get(name) for name in names]
    assert ["4", None, None, None] == [without.get(name) for name in names]
