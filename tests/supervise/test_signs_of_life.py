"""What is seen of an attempt from outside: processes, cards, dumps, stacks; and what hostile ones do."""

import json
import os
import pickle
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from runner.facts import CardPulse, Exit, Live, Stage
from runner.supervise import autopsy, recorder
from runner.supervise.cards import Cards, parse
from runner.supervise.pulse import PulseReader
from runner.supervise.triage import first_error
from tests.supervise.conftest import until
from vramfarm.protocol import ControlPage, Phase, Slot

BUSY = "import time\nend = time.monotonic() + 60\nwhile time.monotonic() < end: pass"


@pytest.fixture
def reader(tmp_path):
    (tmp_path / "logs").mkdir()
    return PulseReader(tmp_path / "logs", Cards("/nonexistent"))


def live(*processes):
    return Live(attempt_id="a", trainers=tuple(p.pid for p in processes), savers=())


# ------------------------------------------------------------------------------------- pulses


def test_work_of_a_worker_counts_for_its_rank(run_python, reader):
    """
    A rank that waits for its own worker is not idle.
    """
    rank = run_python(f"import subprocess, sys; subprocess.run([sys.executable, '-c', {BUSY!r}])", LOCAL_RANK="3")
    child = int(until(lambda: Path(f"/proc/{rank.pid}/task/{rank.pid}/children").read_text().strip()))
    both = Live(attempt_id="a", trainers=(rank.pid, child), savers=())

    before = reader.read(both, None, cards_every_s=60)
    until(lambda: reader.read(both, None, cards_every_s=60).ranks[0].cpu_s > before.ranks[0].cpu_s + 0.2, 30)

    (pulse,) = reader.read(both, None, cards_every_s=60).ranks
    assert (3, rank.pid, "S") == (pulse.rank, pulse.pid, pulse.state)


def test_a_stopped_rank_is_seen(run_python, reader):
    """
    SIGSTOP shows as state T.
    """
    rank = run_python(BUSY, LOCAL_RANK="0")
    until(lambda: any(seen.cpu_s > 0 for seen in reader.read(live(rank), None, cards_every_s=60).ranks))

    os.kill(rank.pid, 19)

    until(lambda: reader.read(live(rank), None, cards_every_s=60).ranks[0].state == "T")


def test_steps_and_stage_come_from_the_page(run_python, reader, tmp_path):
    """
    Who uses the library says which rank it is, its step, and that it saves.
    """
    rank = run_python("import time; time.sleep(60)")
    page = ControlPage.create(tmp_path / "page", num_ranks=1)
    for slot, value in ((Slot.PID, rank.pid), (Slot.STEP, 7), (Slot.PHASE, Phase.SAVING)):
        page.put(0, slot, value)

    pulse = reader.read(live(rank), page, cards_every_s=60)

    assert (Stage.SAVING, 7) == (pulse.stage, pulse.ranks[0].step)
    page.close()


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        pytest.param("step 7 loss 1.5\nhello\n", ("step 7 loss 1.5", "", Stage.TRAINING), id="a step"),
        pytest.param("Map:  7%|x| 7/99 [00:01<00:02, 3.0 examples/s]\n", ("", "", Stage.TRAINING), id="no step"),
        pytest.param(
            "step 7 loss 1.5\nEvaluating on 500 samples\n", ("step 7 loss 1.5", "", Stage.EVALUATING), id="eval"
        ),
        pytest.param("loading\nOverwrite? [y/N] ", ("", "Overwrite? [y/N]", Stage.TRAINING), id="a question"),
        pytest.param("loading\n 7%|#  | 7/99 [y/N]:\r", ("", "", Stage.TRAINING), id="a bar asks nothing"),
        pytest.param("\x00\xff\n" * 99, ("", "", Stage.TRAINING), id="noise"),
    ],
)
def test_what_logs_tell(run_python, reader, tmp_path, text, seen):
    """
    The last line of progress, whether it evaluates, and a question that stands there unanswered.
    """
    rank = run_python("import time; time.sleep(60)", LOCAL_RANK="0")
    (tmp_path / "logs" / "launcher.log").write_bytes(text.encode("latin-1"))
    reader.read(live(rank), None, cards_every_s=60)

    pulse = reader.read(live(rank), None, cards_every_s=60)

    assert seen == (pulse.progress, pulse.question, pulse.stage)


# -------------------------------------------------------------------------------------- cards


def test_the_table_of_cards_is_read():
    """
    What is not told is not known; a card that is held down says why, once.
    """
    table = (
        "0, GPU-aa, 100, 22, 612.31, 700.00, 61000, 81559, 61, Not Active, Not Active, Not Active, Not Active\n"
        "1, GPU-bb, [N/A], [N/A], [Not Supported], 700.00, [N/A], 81559, 33, Active, Active, Not Active, Active\n"
        "Unable to determine the device handle for GPU2: 0000:91:00.0: GPU is lost.\n"
    )

    assert (
        CardPulse(
            index=0,
            use_percent=100.0,
            memory_percent=22.0,
            power_w=612.31,
            limit_w=700.0,
            used_bytes=61000 << 20,
            total_bytes=81559 << 20,
            temperature=61.0,
        ),
        CardPulse(
            index=1,
            limit_w=700.0,
            total_bytes=81559 << 20,
            temperature=33.0,
            throttled=("too hot", "hardware slowdown"),
        ),
    ) == parse(table)


@pytest.mark.parametrize(
    ("visible", "watts"),
    [
        (None, [0, 10, 20, 30]),
        ("2,3", [20, 30]),
        ("GPU-dd,0", [30, 0]),
        ("3,7,0", [30]),  # CUDA stops at the first that it does not know
        ("", []),
    ],
)
def test_cards_are_numbered_as_training_does(visible, watts):
    """
    What is on cards that the job cannot see says nothing about it.
    """
    rows = [
        f"{at}, GPU-{c}{c}1, 9, 4, {at}0, 700, 1, 2, 3, Not Active, Not Active, Not Active, Not Active"
        for at, c in enumerate("abcd")
    ]

    cards = parse("\n".join(rows), visible)

    assert list(enumerate(watts)) == [(card.index, card.power_w) for card in cards]


def test_a_driver_that_hangs_is_not_waited_for(tmp_path):
    """
    Asking costs nothing while there is no answer, and the answer is taken when it comes.
    """
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nsleep 0.5\necho '0, GPU-aa, 1, 2, 2, 3, 4, 5, 6, Active, Active, Active, Active'\n")
    program.chmod(0o755)
    cards = Cards(str(program))

    began = time.monotonic()
    assert () == cards.look(0.0, every_s=60)
    assert time.monotonic() - began < 0.4
    until(lambda: cards.look(1.0, every_s=60), 20)


# ------------------------------------------------------------------------------------- autopsy


class Trap:
    def __reduce__(self):
        return os.mkdir, ("trapped",)


@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(pickle.dumps({"entries": [Trap()]}), id="it would run something"),
        pytest.param(b"\x80\x04garbage", id="no pickle"),
        pytest.param(pickle.dumps([1]), id="another shape"),
        pytest.param(b"", id="empty"),
    ],
)
def test_nothing_in_a_dump_runs(tmp_path, monkeypatch, raw):
    """
    A dump that is not plain data says nothing.
    """
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dump").write_bytes(raw)

    assert [] == recorder.parse_dump(tmp_path / "dump")


def nested(depth=100_000):
    """Sizes that Python cannot print: lists in lists."""
    head = pickle.dumps({"entries": [{"input_sizes": 7}]}, protocol=2)
    at = head.index(b"K\x07")
    return head[:at] + b"]" * (depth + 1) + b"a" * depth + head[at + 2 :]


def repeated(depth):
    """A few bytes that Python would print as ten to the power of this many."""
    sizes = [1]
    for _ in range(depth):
        sizes = [sizes] * 10
    return pickle.dumps({"entries": [{"input_sizes": sizes}]})


@pytest.mark.parametrize("raw", [nested(), repeated(9)], ids=["deep", "wide"])
def test_a_small_dump_of_endless_lists_is_read_in_no_time(tmp_path, raw):
    """
    The runner reads dumps itself: nothing in them may take all of its memory, or its time.
    """
    (tmp_path / "dump").write_bytes(raw)

    began = time.process_time()
    (told,) = recorder.parse_dump(tmp_path / "dump")

    assert time.process_time() - began < 5, "printing all of it takes minutes"
    assert told["input_sizes"].startswith("[[[...]")


def test_the_flight_recorder_is_asked_and_names_who_did_not_come(tmp_path, marker):
    """
    Dumps come through the pipes' trigger; the rank with fewer collectives is the one.
    """
    logs = tmp_path / "logs"
    logs.mkdir()
    fifo = tmp_path / "page.fr-0.pipe"
    os.mkfifo(fifo)
    reading = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    for rank, last in ((0, 12), (1, 11)):
        entries = [
            {"collective_seq_id": n, "profiling_name": "nccl:all_reduce", "state": "scheduled"} for n in (10, last)
        ]
        (logs / f"{recorder.DUMP}{rank}").write_bytes(pickle.dumps({"entries": entries}))
    scene = autopsy.Scene(
        attempt_id=marker,
        logs=logs,
        folder=tmp_path / "evidence",
        pipes=str(tmp_path / "page.fr-"),
        python="",
        hang={"rank": None},
    )

    assert "flight recorder" in autopsy.collect(scene)

    assert b"1\n" == os.read(reading, 9)
    assert 1 == json.loads((tmp_path / "evidence" / autopsy.HANG_FILE).read_text())["rank"]
    verdict, *ranks = (tmp_path / "evidence" / "flight-recorder.txt").read_text().splitlines()
    assert "rank 1 did not come to collective 12, all_reduce of None" == verdict
    assert ["collective_seq_id=12" in ranks[0], "collective_seq_id=11" in ranks[1]] == [True, True]
    os.close(reading)


PY_SPY = next(
    (
        path
        for path in (Path(sys.executable).with_name("py-spy"), shutil.which("py-spy"))
        if path and Path(path).exists()
    ),
    None,
)
LOADS = (
    "import os, time\ndef loads_for_ever():\n  open(f'here-{os.getpid()}', 'w')\n  time.sleep(600)\nloads_for_ever()"
)
WAITS = LOADS.replace("loads_for_ever", "waits_for_the_others")
WITH_WORKER = f"import subprocess, sys\nworker = subprocess.Popen([sys.executable, '-c', {LOADS!r}])\n{WAITS}"


@pytest.mark.skipif(PY_SPY is None, reason="py-spy is not installed: pip install '.[evidence]'")
def test_stacks_of_all_ranks_and_their_workers_are_in_the_evidence(run_python, tmp_path, marker):
    """
    By py-spy, while they hang: the signal that kills them may print nothing where a library has it.
    """
    ranks = [run_python(WITH_WORKER, LOCAL_RANK=str(rank)) for rank in range(2)]
    until(lambda: len(list(tmp_path.glob("here-*"))) == 4, 30)
    spied = subprocess.run([PY_SPY, "dump", "--pid", str(ranks[0].pid)], capture_output=True, text=True, check=False)
    if "ermission" in spied.stderr:
        pytest.skip(f"py-spy may not look at processes here: {spied.stderr.strip()[:100]}")
    scene = autopsy.Scene(
        attempt_id=marker, logs=tmp_path, folder=tmp_path / "evidence", pipes="", python=sys.executable, hang={}
    )

    assert "stacks" in autopsy.collect(scene)

    told = {path.name: path.read_text() for path in (tmp_path / "evidence").glob("stack-*")}
    for rank, found in enumerate(ranks):
        assert "waits_for_the_others (<string>:" in told[f"stack-{rank}-{found.pid}.txt"]
    assert 2 == sum("loads_for_ever (<string>:" in text for text in told.values()), told


def collectives(*operations, group="default_pg", first=7, sizes=((4,),), **more):
    """Collectives as a dump has them, numbered from `first`."""
    return [
        {
            "process_group": ("0", group),
            "collective_seq_id": number,
            "profiling_name": f"nccl:{operation}",
            "input_sizes": [list(size) for size in sizes],
            "state": "completed",
            "is_p2p": False,
            **more,
        }
        for number, operation in enumerate(operations, first)
    ]


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        pytest.param(
            {
                0: collectives("all_reduce", "all_reduce"),
                1: collectives("all_reduce", "_all_gather_base", "all_reduce"),
            },
            recorder.Recorded(differ={0: "all_reduce of [[4]]", 1: "_all_gather_base"}),
            id="different collectives, and who went on is not the one",
        ),
        pytest.param(
            {0: collectives("all_reduce"), 1: collectives("all_reduce", sizes=((8,),))},
            recorder.Recorded(differ={0: "all_reduce of [[4]]", 1: "all_reduce of [[8]]"}),
            id="different sizes",
        ),
        pytest.param(
            {0: collectives("broadcast", sizes=((1,),)), 1: collectives("broadcast", sizes=((2,),))},
            recorder.Recorded(),
            id="sizes of what moves data may differ",
        ),
        pytest.param(
            {
                0: [*collectives("all_reduce", group="tensor", first=90), *collectives("all_reduce", "all_reduce")],
                1: [*collectives("all_reduce", group="data", first=3), *collectives("all_reduce")],
            },
            recorder.Recorded(behind=1),
            id="groups count for themselves",
        ),
        pytest.param(
            {0: collectives("all_reduce"), 1: collectives("all_reduce"), 2: collectives("send", first=40, is_p2p=True)},
            recorder.Recorded(),
            id="what two send each other is no collective",
        ),
        pytest.param({0: collectives("all_reduce")}, recorder.Recorded(), id="one dump alone says nothing"),
    ],
)
def test_dumps_of_ranks_are_compared(told, expected):
    """
    Under one number all ranks of a group must be in the same collective; else the one that came to fewer is named.
    """
    assert expected == recorder.compare(told)


def test_a_dump_that_is_still_being_written_is_waited_for(tmp_path, marker):
    """
    A half of it is no dump; the rest comes within seconds.
    """
    logs, whole = tmp_path, pickle.dumps({"entries": collectives("all_reduce", "all_reduce")})
    fifos = [tmp_path / f"page.fr-{rank}.pipe" for rank in (0, 1)]
    for fifo in fifos:
        os.mkfifo(fifo)
    reading = [os.open(fifo, os.O_RDONLY | os.O_NONBLOCK) for fifo in fifos]
    (logs / f"{recorder.DUMP}0").write_bytes(pickle.dumps({"entries": collectives("all_reduce")}))
    (logs / f"{recorder.DUMP}1").write_bytes(whole[:40])
    later = threading.Timer(0.5, (logs / f"{recorder.DUMP}1").write_bytes, (whole,))
    later.start()
    scene = autopsy.Scene(
        attempt_id=marker, logs=logs, folder=tmp_path / "e", pipes=str(tmp_path / "page.fr-"), python="", hang={}
    )

    autopsy.collect(scene)

    assert 0 == json.loads((tmp_path / "e" / autopsy.HANG_FILE).read_text())["rank"]
    for fd in reading:
        os.close(fd)


def test_a_stopped_rank_is_not_waited_for(tmp_path, marker, run_python):
    """
    It could not answer: its pipe is left alone, and the evidence is there at once.
    """
    rank = run_python("import time; time.sleep(60)", LOCAL_RANK="0")
    until(lambda: autopsy.rank_of(rank.pid) == 0)
    os.kill(rank.pid, 19)
    until(lambda: ") T " in Path(f"/proc/{rank.pid}/stat").read_text())
    fifo = tmp_path / "page.fr-0.pipe"
    os.mkfifo(fifo)
    reading = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    scene = autopsy.Scene(
        attempt_id=marker, logs=tmp_path, folder=tmp_path / "e", pipes=str(tmp_path / "page.fr-"), python="", hang={}
    )

    began = time.monotonic()
    autopsy.collect(scene)

    assert time.monotonic() - began < autopsy._DUMP_WAIT_S
    assert b"" == os.read(reading, 9)
    os.close(reading)


# -------------------------------------------------------------------------------------- triage

WAITING = '  File "/x/site-packages/torch/distributed/distributed_c10d.py", line 9 in all_reduce\n  File "/job/train.py", line 5 in step\n'
LOADING = '  File "/x/site-packages/torch/utils/data/dataloader.py", line 9 in _next\n  File "/job/train.py", line 4 in step\n'


def hung(folder, ranks, hang, spied=None):
    """Logs of an attempt that was ended by SIGABRT."""
    (folder / "logs").mkdir()
    for rank, text in ranks.items():
        log = folder / "logs" / "id" / "attempt_0" / str(rank) / "stderr.log"
        log.parent.mkdir(parents=True)
        log.write_text(text)
    evidence = folder / "evidence"
    evidence.mkdir()
    for name, text in (spied or {}).items():
        (evidence / name).write_text(text)
    (folder / "logs" / autopsy.HANG_FILE).write_text(
        json.dumps({"reason": "no step", "evidence": str(evidence), **hang})
    )
    return first_error(folder / "logs", Exit(code=-9))


def aborted(frames):
    return f'Fatal Python error: Aborted\n\nThread 0x00007f (most recent call first):\n  File "/x/y.py", line 1 in poll\n\nCurrent thread 0x00007e (most recent call first):\n{frames}\nExtension modules: numpy (total: 1)\n'


def test_the_rank_that_waits_for_no_other_is_the_one(tmp_path):
    """
    Two wait in a collective, the third for its data.
    """
    found = hung(tmp_path, {0: aborted(WAITING), 1: aborted(LOADING), 2: aborted(WAITING)}, {"rank": None})

    assert ("rank_stuck", 1, "high") == (found.label, found.rank, found.confidence)
    assert '  File "/job/train.py", line 4 in step' == found.primary_line
    assert found.summary.startswith("hang: rank 1 waits for its data, in step (train.py:4); no step; see ")


def test_stacks_of_py_spy_do_as_well(tmp_path):
    """
    Where the signal printed nothing.
    """
    spied = {
        "stack-0-11.txt": 'Thread 11 (idle): "MainThread"\n    all_reduce (torch/distributed/distributed_c10d.py:9)\n',
        "stack-1-12.txt": 'Thread 12 (idle): "MainThread"\n    read (/job/data.py:3)\nThread 13 (idle): "x"\n    a (b.py:1)\n',
    }

    found = hung(tmp_path, {}, {"rank": None}, spied)

    assert ("rank_stuck", 1) == (found.label, found.rank)
    assert "in read (data.py:3)" in found.summary


@pytest.mark.parametrize("packages", ["", "/venv/lib/python3.11/site-packages/"], ids=["shortened", "whole"])
def test_the_script_is_named_also_where_one_rank_printed_nothing(tmp_path, packages):
    """
    By its stack of py-spy, in which torch's own frames come first.
    """
    frames = f"    all_gather ({packages}torch/distributed/distributed_c10d.py:9)\n    main (/job/train.py:38)\n"
    spied = {"stack-1-12.txt": f'Thread 12 (idle): "MainThread"\n{frames}'}

    found = hung(tmp_path, {0: aborted(WAITING)}, {"rank": None}, spied)

    assert "rank 1 waits in all_gather, in main (train.py:38)" in found.summary


def test_ranks_that_wait_at_different_places_took_different_paths(tmp_path):
    """
    The same collective called from two lines: each waits for the other.
    """
    other = WAITING.replace("line 5 in step", "line 8 in evaluate")

    found = hung(tmp_path, {0: aborted(WAITING), 1: aborted(other)}, {"rank": None})

    assert ("collective_mismatch", None) == (found.label, found.rank)
    assert "rank 0 waits in all_reduce, in step (train.py:5); rank 1 waits in all_reduce, in evaluate" in found.summary


def test_ranks_that_send_to_each_other_may_be_at_different_places(tmp_path):
    """
    A pipeline's stages do not take the same path: that says nothing about a hang.
    """
    sends = WAITING.replace("all_reduce", "send")
    receives = WAITING.replace("all_reduce", "recv").replace("line 5 in step", "line 8 in stage")

    found = hung(tmp_path, {0: aborted(sends), 1: aborted(receives)}, {"rank": None})

    assert "rank_stuck" == found.label


def test_what_the_flight_recorder_says_is_told(tmp_path):
    """
    On cards no stack says in which collective a rank waits: it waits for its card.
    """
    differ = {"0": "all_reduce of [[4]]", "1": "_all_gather_base"}

    found = hung(tmp_path, {}, {"rank": None, "differ": differ})

    assert ("collective_mismatch", None, "high") == (found.label, found.rank, found.confidence)
    assert "rank 0 is in all_reduce of [[4]]; rank 1 is in _all_gather_base" in found.summary


TIMED_OUT = "[rank0]:[E1 ProcessGroupNCCL.cpp:1] [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE, NumelIn=4, NumelOut=4, Timeout(ms)=10000) ran for 10006 milliseconds before timing out.\n"


@pytest.mark.parametrize(
    ("dumps", "expected"),
    [
        pytest.param(
            {0: collectives("all_reduce"), 1: collectives("_all_gather_base")},
            ("collective_mismatch", None),
            id="differ",
        ),
        pytest.param(
            {0: collectives("all_reduce", "all_reduce"), 1: collectives("all_reduce")},
            ("nccl_timeout_missing_rank", 1),
            id="behind",
        ),
        pytest.param({}, ("nccl_timeout", None), id="no dump"),
    ],
)
def test_dumps_of_a_time_out_tell_who_it_was(tmp_path, dumps, expected):
    """
    NCCL's own time-out came first: every rank wrote its dump beside the logs.
    """
    (tmp_path / "rank0.log").write_text(TIMED_OUT)
    for rank, entries in dumps.items():
        (tmp_path / f"{recorder.DUMP}{rank}").write_bytes(pickle.dumps({"entries": entries}))

    found = first_error(tmp_path)

    assert expected == (found.label, found.rank)


def test_an_error_before_the_hang_is_the_cause(tmp_path):
    """
    A rank that failed, and whose process stayed: the others only waited for it.
    """
    failed = (
        'Traceback (most recent call last):\n  File "t.py", line 1, in f\nOSError: [Errno 28] No space left on device\n'
    )

    found = hung(tmp_path, {0: failed + aborted(WAITING), 1: aborted(WAITING)}, {"rank": None})

    assert ("disk_full", 0) == (found.label, found.rank)


@pytest.mark.parametrize("raw", [b"", b"[1]", b"{", b'{"rank": "x", "evidence": 5, "step": []}'])
def test_a_record_that_is_garbled_breaks_nothing(tmp_path, raw):
    """
    There is a diagnosis whatever stands there.
    """
    (tmp_path / autopsy.HANG_FILE).write_bytes(raw)
    (tmp_path / "launcher.log").write_text("x\n")

    assert first_error(tmp_path, Exit(code=-9)).summary
