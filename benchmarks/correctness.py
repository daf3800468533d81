"""
What may go wrong while a checkpoint is written or read, done to our engine and to torch's DCP in one run.

    make correctness ROUNDS=300        or: python benchmarks/correctness.py --rounds 300 --out build/correctness
    --jobs 32        the rounds of a row, and the rows, side by side in so many processes; one table

Ranks are forked from this process, which has imported torch once; they are real processes with a real process
group, and they are really killed. A state is right when all its numbers are those of one step. Written are
DIR/correctness.json and DIR/correctness.md. The exit code is 1 if ours fails a row.

What DCP does here is what its functions do as they come: a new folder a save, the newest with a `.metadata` is taken.
"""

import argparse
import atexit
import contextlib
import ctypes
import hashlib
import json
import mmap
import os
import pickle
import platform
import random
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # it is about the processor, and torch takes a card where it finds one
import torch
import torch._dynamo  # here, so that not every rank imports what torch imports late
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, StateDictType, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.side_by_side import parse_jobs, side_by_side
from vramfarm import Checkpointer, folder
from vramfarm.epochs import GlobalBatches, World
from vramfarm.loading import Reader
from vramfarm.protocol import Arena, Slot, Word
from vramfarm.run import ResumeError
from vramfarm.typed import StateError

warnings.simplefilter("ignore")
PATIENCE_S = 180
NEWNS = 0x00020000
NEWUSER = 0x10000000
libc = ctypes.CDLL(None, use_errno=True)


class MissingError(Exception):
    """This machine cannot do that."""


# ------------------------------------------------------------------------------------- ranks


class Ranks:
    """Forked processes with a process group. `board` is memory that they and we share: 8-byte numbers."""

    def __init__(self, size, target, *arguments, log):
        self.board = Board()
        self.rendezvous = tempfile.mktemp(prefix="rendezvous-", dir=log.parent)
        self.log = log
        self.pids = [self._fork(rank, size, target, arguments) for rank in range(size)]

    def _fork(self, rank, size, target, arguments):
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            out = os.open(f"{self.log}.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(out, 1)
            os.dup2(out, 2)
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
            os.environ.update({name: str(value) for name, value in place.items()})
            if size > 1:
                dist.init_process_group("gloo", init_method=f"file://{self.rendezvous}", rank=rank, world_size=size)
            code = target(rank, self.board, *arguments) or 0
        except SystemExit as end:
            code = end.code or 0
        except BaseException:  # noqa: BLE001  # a rank that raised is a result
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)

    def wait(self, timeout_s=PATIENCE_S):
        """Exit codes. None: it had to be killed."""
        until, codes = time.monotonic() + timeout_s, {}
        while len(codes) < len(self.pids) and time.monotonic() < until:
            for pid in [p for p in self.pids if p not in codes]:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    codes[pid] = os.waitstatus_to_exitcode(status)
            time.sleep(0.003)
        left = [p for p in self.pids if p not in codes]
        for pid in left:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        with contextlib.suppress(OSError):
            Path(self.rendezvous).unlink()
        return [codes.get(pid) for pid in self.pids]

    def kill(self, dice=None):
        pids = dice.sample(self.pids, len(self.pids)) if dice else self.pids
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            time.sleep(dice.random() * 0.02 if dice else 0)
        self.wait()

    def until(self, word, value=1):
        """Wait until a number on the board is at least `value`."""
        limit = time.monotonic() + PATIENCE_S
        while self.board[word] < value:
            dead = [p for p in self.pids if os.waitid(os.P_PID, p, os.WEXITED | os.WNOHANG | os.WNOWAIT)]
            if time.monotonic() > limit or dead:
                self.kill()
                raise TimeoutError(f"{self.log}: ranks did not come to {word}")
            time.sleep(0.002)


class Board:
    """READY: ranks that train. DURABLE: the newest step that the engine called done. FLAG: a row's own."""

    READY, DURABLE, FLAG, SAVER, FOUND, LOW, HIGH = range(0, 56, 8)

    def __init__(self):
        self.memory = mmap.mmap(-1, 4096)

    def __getitem__(self, at):
        return struct.unpack_from("<q", self.memory, at)[0]

    def __setitem__(self, at, value):
        struct.pack_into("<q", self.memory, at, int(value))


def leave():
    """The interpreter's own end, from within a fork: threads are waited for, exit functions run."""
    threading._shutdown()
    atexit._run_exitfuncs()
    raise SystemExit(0)


# ------------------------------------------------------------------------------------- state


class Model(nn.Module):
    """All its numbers are those of one step, so that a mixture is seen."""

    def __init__(self, rows=256, columns=64):
        super().__init__()
        size = dist.get_world_size() if dist.is_initialized() else 1
        mesh = init_device_mesh("cpu", (size,)) if size > 1 else None
        for name in "abcd":
            local = torch.zeros(rows // size, columns)
            value = DTensor.from_local(local, mesh, [Shard(0)], run_check=False) if mesh else local
            self.register_parameter(name, nn.Parameter(value, requires_grad=False))

    def locals(self):
        return [p.data.to_local() if isinstance(p.data, DTensor) else p.data for p in self.parameters()]

    def set(self, step):
        for one in self.locals():
            one.fill_(step)

    def report(self, board, step):
        """What was loaded, for the one who looks."""
        board[Board.FOUND] = step
        board[Board.LOW] = min(one.min().item() for one in self.locals())
        board[Board.HIGH] = max(one.max().item() for one in self.locals())


def found(board):
    """(step, whether every number is that of this step)."""
    return board[Board.FOUND], board[Board.FOUND] == board[Board.LOW] == board[Board.HIGH]


class Ours:
    name = "vramfarm"

    def __init__(self, root, model, optimizer=(), **more):
        self.model = model
        place = (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
        self.ckpt = Checkpointer(
            model, optimizer, dir=Path(root) / "checkpoints", save_interval="24h", data_parallel=place, **more
        )
        self.page, self.seat = self.ckpt._seat.page, self.ckpt._seat
        self.step = self.ckpt.start_step

    def advance(self, board=None):
        """One step of training; a save is asked for whenever none is on its way."""
        self.step += 1
        self.model.set(self.step)
        if self.page[Word.REQUEST_SAVE] == self.page[Word.SERVED_SAVE] and not self.page[Word.SAVING_STEP]:
            self.ckpt.save()
        self.ckpt.step()
        if board is not None:
            board[Board.DURABLE] = max(self.page[Word.COMMITTED_STEP], board[Board.DURABLE])
            board[Board.SAVER] = self.page[Word.SAVER_PID]
        time.sleep(0.001)

    def save_now(self):
        """Step until one more save is on the disk; its step."""
        before = self.page[Word.NUM_COMMITTED]
        while self.page[Word.NUM_COMMITTED] == before:
            self.advance()
        return self.page[Word.COMMITTED_STEP]

    @staticmethod
    def newest(root):
        return folder.committed(Path(root) / "checkpoints")[0].path


class Dcp:
    name = "DCP"

    def __init__(self, root, model, **_):
        self.model, self.root = model, Path(root)
        self.group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self.pending, self.step = None, 0
        if self.complete(root):
            self.load(self.newest(root))

    @staticmethod
    def complete(root):
        return [p.parent for p in Path(root).glob("step-*/.metadata")]

    @classmethod
    def newest(cls, root):
        return max(cls.complete(root))

    def state(self):
        return {"model": self.model.state_dict(), "step": torch.tensor(self.step)}

    def load(self, path):
        state = self.state()
        dcp.load(state, checkpoint_id=str(path))
        self.step = int(state["step"])

    def save_async(self, **more):
        path = self.root / f"step-{self.step:08d}"
        self.pending = dcp.async_save(self.state(), checkpoint_id=str(path), process_group=self.group, **more)

    def advance(self, board=None):
        self.step += 1
        self.model.set(self.step)
        if self.step % 10 == 0:
            if self.pending is not None:
                self.pending.result()
                if board is not None:
                    board[Board.DURABLE] = self.step - 10
            self.save_async()
        time.sleep(0.001)

    def save_now(self):
        self.step += 1
        self.model.set(self.step)
        dcp.save(self.state(), checkpoint_id=str(self.root / f"step-{self.step:08d}"))
        return self.step


# -------------------------------------------------------------------------------------- rows


@dataclass
class Outcome:
    """`good` of `rounds` were as they must be; `says`: what was seen, in a few words."""

    good: int
    rounds: int
    says: str = ""
    skipped: bool = False

    @property
    def passed(self):
        return self.good == self.rounds

    def text(self):
        return (
            f"– {self.says}" if self.skipped else f"{self.good} of {self.rounds}" + (f": {self.says}" * bool(self.says))
        )


def look(engine, root, at):
    """Load what is there into one process, as a restart would. (step, right), or None if it is refused."""

    def target(_, board):
        model = Model(512, 512) if at.name == "large" else Model()
        loaded = engine(root, model)
        model.report(board, loaded.step)

    ranks = Ranks(1, target, log=at / "look")
    return found(ranks.board) if ranks.wait() == [0] else None


def killed(engine, at, rounds, dice):
    """SIGKILL of all ranks at random moments; of ours the saver, too, now and then."""

    def target(rank, board):
        model = Model()
        training = engine(at, model)
        if rank == 0:
            model.report(board, training.step)
        dist.barrier()
        board[Board.READY] = 1
        while True:
            training.advance(board if rank == 0 else None)

    wrong, durable, saves = [], 0, 0
    for number in range(rounds):
        ranks = Ranks(2, target, log=at / "killed")
        ranks.until(Board.READY)
        step, right = found(ranks.board)
        if not right or step < durable:
            wrong.append(
                f"round {number}: step {step}, {durable} was done, {ranks.board[Board.LOW]}–{ranks.board[Board.HIGH]}"
            )
        time.sleep(dice.random() * 0.4)
        if dice.random() < 0.3 and ranks.board[Board.SAVER]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(ranks.board[Board.SAVER], signal.SIGKILL)
        ranks.kill(dice)
        durable = max(durable, ranks.board[Board.DURABLE])
        saves += durable > 0
        if engine is Dcp:
            for old in sorted(Dcp.complete(at))[:-2]:
                shutil.rmtree(old)
    last = look(engine, at, at)
    if last is None or not last[1] or last[0] < durable:
        wrong.append(f"at the end: {last}, {durable} was done")
    return Outcome(rounds - len(wrong), rounds, "; ".join(wrong[:2]))


class Straggler(FileSystemWriter):
    """A rank whose disk is slow."""

    def __init__(self, path, wait_s, **more):
        super().__init__(path, **more)
        self.wait_s = wait_s

    def write_data(self, *arguments):
        time.sleep(self.wait_s)
        return super().write_data(*arguments)


def straggler(engine, at, rounds, dice):
    """One rank writes late, all are killed between. For DCP in the folder of the last save, as `save_dir: last` does."""

    def target(rank, board, root):
        training = engine(root, Model())
        dist.barrier()
        if engine is Ours:
            training.save_now()
            page = training.page
            while rank == 0 or page[Word.PROPOSED_STEP] <= page[Word.COMMITTED_STEP]:
                training.advance()
                if (
                    rank == 0
                    and page.get(0, Slot.ARENA_STATE) == Arena.READY
                    and page[Word.SAVING_STEP] > page[Word.COMMITTED_STEP]
                ):
                    board[Board.FLAG] = 1
            time.sleep(PATIENCE_S)
        training.save_now()
        path = root / "step-00000001"
        training.step = 2
        training.model.set(2)
        dist.barrier()
        if rank == 0:
            threading.Timer(0.3, board.__setitem__, (Board.FLAG, 1)).start()
        dcp.save(training.state(), storage_writer=Straggler(str(path), 60 * rank), checkpoint_id=str(path))

    good, says = 0, ""
    for number in range(rounds):
        root = at / str(number)
        root.mkdir()
        ranks = Ranks(2, target, root, log=at / "straggler")
        ranks.until(Board.FLAG)
        ranks.kill(dice)
        seen = look(engine, root, at)
        good += seen is not None and seen[1]
        if seen is not None and not seen[1]:
            says = "loaded with success: numbers of two steps in one state"
        elif seen is None:
            says = says or "the old checkpoint is gone, the new one is not there"
        shutil.rmtree(root)
    return Outcome(good, rounds, says)


def power(engine, at, rounds, dice):
    """An image of the disk at the moment when the save is done, as the next boot finds it."""

    def target(rank, board, disk, root, lost):
        training = engine(root, Model())
        step = training.save_now()
        if rank == 0:
            shutil.copyfile(disk, lost)
            board[Board.FLAG] = step
        dist.barrier()

    good, says = 0, ""
    for number in range(rounds):
        # names of their own: a filesystem that is still busy may write into its image when it is let go of
        disk, lost = at / f"disk-{number}", at / f"lost-{number}"
        with contextlib.ExitStack() as mounts:
            with disk.open("wb") as file:
                file.truncate(24 << 20)
            run("mkfs.ext4", "-q", "-b", "4096", disk)
            root = mounted(mounts, disk, at / f"now-{number}")
            ranks = Ranks(2, target, disk, root, lost, log=at / "power")
            ranks.wait()
            seen = look(engine, mounted(mounts, lost, at / f"then-{number}"), at)
        right = seen == (ranks.board[Board.FLAG], True)
        good += right
        says = says if right else "it was done, and is not there"
        if not right:
            print(f"power {engine.name}: step {ranks.board[Board.FLAG]} was done, found {seen}", flush=True)
        disk.unlink()
        lost.unlink()
    return Outcome(good, rounds, says)


def mounted(mounts, image, place):
    place.mkdir(exist_ok=True)
    run("mount", "-o", "loop", image, place)
    mounts.callback(lambda: run("umount", "-l", place))
    return place


def run(*argv):
    try:
        subprocess.run([str(a) for a in argv], check=True, capture_output=True, timeout=60)
    except (OSError, subprocess.CalledProcessError) as error:
        raise MissingError(f"{argv[0]}: {getattr(error, 'stderr', b'') or error}") from None


def write_error(engine, at, rounds, dice):
    """A write that fails. Of DCP's two writer threads either may meet it."""

    def ours(rank, board, root):
        training = Ours(root, Model())
        before = training.save_now()
        resource.prlimit(training.page[Word.SAVER_PID], resource.RLIMIT_FSIZE, (100_000, -1))
        while "File too large" not in training.page.error():
            training.advance()
        kept = training.page[Word.COMMITTED_STEP]  # perhaps of a save that was on its way
        resource.prlimit(training.page[Word.SAVER_PID], resource.RLIMIT_FSIZE, (-1, -1))
        board[Board.FLAG] = before <= kept < training.save_now()

    def theirs(rank, board, root):
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, -1))
        _saved_or_said(board, root)

    good = 0
    for number in range(rounds):
        root = at / str(number)
        root.mkdir()
        ranks = Ranks(1, ours if engine is Ours else theirs, root, log=at / "error")
        ranks.wait()
        good += ranks.board[Board.FLAG] == 1
        shutil.rmtree(root)
    return Outcome(good, rounds, "" if good == rounds else _LOST)


def _saved_or_said(board, root):
    """Whether DCP saved it, or said that it did not."""
    state = {"large": torch.full((100_000,), 7.0), "small": torch.full((100,), 7.0)}
    writer = FileSystemWriter(str(root), thread_count=2, single_file_per_rank=False)
    try:
        dcp.save(state, storage_writer=writer, no_dist=True)
    except BaseException:  # noqa: BLE001  # it says so: right
        board[Board.FLAG] = 1
        return
    target = {name: torch.zeros_like(value) for name, value in state.items()}
    dcp.load(target, checkpoint_id=str(root), no_dist=True)
    board[Board.FLAG] = all(torch.equal(target[name], state[name]) for name in state)


_LOST = "`save` returned, and the tensor is not there"


def no_room(engine, at, rounds, dice):
    """A disk that is full before the save is whole."""

    def ours(rank, board, root):
        training = Ours(root, Model())
        before = training.save_now()
        with (root / "filler").open("wb", buffering=0) as filler:
            while "free some space there" not in training.page.error():
                with contextlib.suppress(OSError):  # an older checkpoint may go to make room for a newer one
                    filler.write(bytes(1 << 20))
                training.advance()
        kept = training.page[Word.COMMITTED_STEP]
        (root / "filler").unlink()
        board[Board.FLAG] = before <= kept < training.save_now()

    def theirs(rank, board, root):
        _saved_or_said(board, root)

    good, size = 0, "4m" if engine is Ours else "256k"
    for number in range(rounds):
        root = at / str(number)
        root.mkdir()
        run("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", root)
        try:
            ranks = Ranks(1, ours if engine is Ours else theirs, root, log=at / "room")
            ranks.wait()
        finally:
            run("umount", "-l", root)
        good += ranks.board[Board.FLAG] == 1
    return Outcome(good, rounds, "" if good == rounds else _LOST)


def destroyed(engine, at, rounds, dice):
    """destroy_process_group() and the end of the script while a save is on its way; the exit code is 0."""

    def target(rank, board, root):
        training = engine(root, Model(512, 512))
        if engine is Ours:
            page = training.page
            while not training.seat.is_pending() and not page[Word.COMMITTED_STEP]:
                training.advance()
            board[Board.FLAG] = page[Word.PROPOSED_STEP]
            training.ckpt._finished = True  # its last save would hide what this is about
        else:
            training.step = 1
            training.model.set(1)
            board[Board.FLAG] = 1
            training.save_async()
        dist.destroy_process_group()
        leave()

    at = at / "large"
    at.mkdir()
    good, says = 0, ""
    for number in range(rounds):
        root = at / str(number)
        root.mkdir()
        ranks = Ranks(2, target, root, log=at / "destroyed")
        codes = ranks.wait()
        seen = look(engine, root, at)
        right = codes == [0, 0] and seen == (ranks.board[Board.FLAG], True)
        good += right
        if not right:
            says = f"exit codes {codes[0]}, {codes[1]}, and " + (
                "half of the numbers are there" if seen else "no checkpoint"
            )
        shutil.rmtree(root)
    return Outcome(good, rounds, says)


def saved_twice(engine, at):
    """A folder with two checkpoints."""

    def target(rank, board):
        training = engine(at / "saved", Model())
        training.save_now()
        training.save_now()

    (at / "saved").mkdir()
    assert Ranks(2, target, log=at / "twice").wait() == [0, 0], f"{at}: could not be saved"


def flipped(engine, at, rounds, dice):
    """One bit of a shard is another. Refused, or an older one is taken, or the bit did not matter: never another state."""
    saved_twice(engine, at)
    wrong, refused = 0, 0
    for _ in range(rounds):
        shutil.copytree(at / "saved", at / "copy")
        newest = engine.newest(at / "copy")
        shard = dice.choice(sorted(p for p in newest.iterdir() if p.suffix in {".safetensors", ".distcp"}))
        with shard.open("r+b") as file:
            place = dice.randrange(shard.stat().st_size)
            file.seek(place)
            byte = file.read(1)[0]
            file.seek(place)
            file.write(bytes([byte ^ (1 << dice.randrange(8))]))
        seen = look(engine, at / "copy", at)
        refused += seen is None
        wrong += seen is not None and not seen[1]
        shutil.rmtree(at / "copy")
    return Outcome(rounds - wrong, rounds, "other numbers were loaded" * bool(wrong))


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def hostile(engine, at, rounds, dice):
    """Each file of a checkpoint in turn is a pickle that runs code."""
    saved_twice(engine, at)
    names = sorted(p.name for p in engine.newest(at / "saved").iterdir())
    good = 0
    for name in names:
        shutil.copytree(at / "saved", at / "copy")
        newest = engine.newest(at / "copy")
        (newest / name).write_bytes(pickle.dumps(Bomb(at / "ran")))
        if engine is Ours and name.endswith(".safetensors"):  # and its manifest agrees
            _agree(newest, name)
        look(engine, at / "copy", at)
        good += not (at / "ran").exists()
        (at / "ran").unlink(missing_ok=True)
        shutil.rmtree(at / "copy")
    return Outcome(good, len(names), "the code ran" if good < len(names) else "")


def _agree(path, name):
    import zlib

    raw = (path / name).read_bytes()
    manifest = json.loads((path / "MANIFEST.json").read_bytes())
    for shard in manifest["shards"]:
        if shard["path"] == name:
            shard.update(size_bytes=len(raw), checksums=[zlib.crc32(raw)])
    (path / "MANIFEST.json").write_text(json.dumps(manifest))


def small_shm(engine, at, rounds, dice):
    """/dev/shm of 64 MiB, as Docker gives it, and a state of 134 MB. DCP in its process mode."""

    def target(rank, board):
        if libc.unshare(NEWNS) and libc.unshare(NEWUSER | NEWNS):
            raise SystemExit(77)
        libc.mount(b"none", b"/", None, 0x44000, None)  # ours alone
        if libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, b"size=64m"):
            raise SystemExit(77)
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        training = engine(at, Model(4096, 2048))
        if engine is Ours:
            training.save_now()
        else:
            dist.init_process_group("gloo", init_method=f"file://{at}/alone", rank=0, world_size=1)
            training.save_async(async_checkpointer_type=AsyncCheckpointerType.PROCESS)
            training.pending.result()
        board[Board.FLAG] = training.page[Word.NUM_COMMITTED] if engine is Ours else len(Dcp.complete(at))

    ranks = Ranks(1, target, log=at / "shm")
    if ranks.wait() == [77]:
        raise MissingError("no mount namespace")
    good = ranks.board[Board.FLAG] == 1
    return Outcome(int(good), 1, "" if good else _last_error(at / "shm.0"))


def _last_error(log):
    lines = [line.strip() for line in log.read_text().splitlines() if "Error: " in line]
    return re.sub(r"</.*?>", "…", lines[0])[:120] if lines else "it did not come to an end"


# ----------------------------------------------------------------------------- real trainings


class Net(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.first, self.norm = nn.Linear(8, 24), nn.LayerNorm(24)
        self.drop, self.last = nn.Dropout(dropout), nn.Linear(24, 8)

    def forward(self, x):
        return self.last(self.drop(torch.relu(self.norm(self.first(x)))))


def spread(dropout=0.0, way="FSDP2"):
    torch.manual_seed(0)
    model = Net(dropout)
    if dist.is_initialized():
        model = WAYS[way](model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def fsdp1(model, **more):
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **{"use_orig_params": True, **more})


def fsdp1_nested(model):
    model.first = fsdp1(model.first, use_orig_params=False)
    return fsdp1(model, use_orig_params=False, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)


def fsdp2(model):
    fully_shard(model.first)
    return fully_shard(model)


WAYS = {
    "FSDP2": fsdp2,
    "FSDP1": fsdp1,
    "FSDP1, flat in the optimizer": fsdp1_nested,
    "DDP": nn.parallel.DistributedDataParallel,
}


def learn(model, optimizer, x):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item().hex()


def gathered_fsdp1(model, optimizer):
    """Weights as torch brings them together; what the optimizer has of each, in the order of the ranks."""
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        found = dict(model.state_dict())
    if not model._use_orig_params:
        states = FullyShardedDataParallel.full_optim_state_dict(model, optimizer, rank0_only=False)["state"]
        return found | {f"{name}.{key}": value for name, inner in states.items() for key, value in inner.items()}
    mine = [optimizer.state.get(p, {}) for p in model.parameters()]
    told = [None] * dist.get_world_size()
    dist.all_gather_object(told, mine)
    for name, *parts in zip([name for name in found if "norm.n" not in name], *told, strict=True):
        there = [part for part in parts if part]
        for key in there[0] if there else ():
            found[f"{name}.{key}"] = torch.cat([part[key].flatten() for part in there])[: found[name].numel()]
        if there:
            found[f"{name}.step"] = there[0]["step"]
    return found


def gathered(model, optimizer):
    if isinstance(model, FullyShardedDataParallel):
        return gathered_fsdp1(model, optimizer)
    model = getattr(model, "module", model)
    found = dict(model.state_dict())
    names = [name for name, _ in model.named_parameters()]
    for number, inner in optimizer.state_dict()["state"].items():
        found |= {f"{names[number]}.{key}": value for key, value in inner.items()}
    return found


def digest(model, optimizer):
    found = gathered(model, optimizer)
    total = hashlib.sha256()
    for name, value in sorted(found.items()):
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        total.update(name.encode() + whole.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return int.from_bytes(total.digest()[:7], "little")


def full_state(model, optimizer):
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments}


def theirs_load(path, model, optimizer):
    state = full_state(model, optimizer)
    dcp.load(state, checkpoint_id=str(path))
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def resharded(engine, at, rounds, dice):
    """FSDP2 with AdamW, from one number of ranks to the next: the same bits in weights and optimizer."""
    worlds = [1, 2, 4, 8, 4, 2, 1, 8] if rounds >= 10 else [1, 2, 4, 1]
    return _from_one_to_the_next(engine, at, worlds, ["FSDP2"] * len(worlds), " → ".join(map(str, worlds)) + " ranks")


def rewrapped(engine, at, rounds, dice):
    """The same from one way of spreading a model to the next."""
    ways = ["FSDP1", "FSDP2", "FSDP1, flat in the optimizer", "DDP", "FSDP1"]
    return _from_one_to_the_next(engine, at, [2, 3, 4, 2, 2], ways, " → ".join(ways) + ", 2 to 4 ranks")


def _from_one_to_the_next(engine, at, worlds, ways, says):
    def target(rank, board, number):
        model, optimizer = spread(way=ways[number])
        here, before = at / f"at-{number}", at / f"at-{number - 1}"
        if engine is Ours:
            if number:
                shutil.copytree(before / "checkpoints", here / "checkpoints") if rank == 0 else None
                dist.barrier() if dist.is_initialized() else None
            ckpt = Checkpointer(model, optimizer, dir=here / "checkpoints", save_interval="24h")
        elif number:
            theirs_load(before, model, optimizer)
        loaded = digest(model, optimizer)
        learn(model, optimizer, torch.full((4, 8), 0.1 * number + 0.3))
        board[Board.FOUND], board[Board.FLAG] = loaded, digest(model, optimizer)
        if engine is Ours:
            ckpt.step()
            ckpt.finish()
        else:
            dcp.save(full_state(model, optimizer), checkpoint_id=str(here))

    good, expected = 0, None
    for number, size in enumerate(worlds):
        ranks = Ranks(size, target, number, log=at / "reshard")
        codes = ranks.wait()
        good += not any(codes) and expected in {None, ranks.board[Board.FOUND]}
        expected = ranks.board[Board.FLAG]
    return Outcome(good, len(worlds), says)


def resumed(engine, at, rounds, dice):
    """A run that was interrupted twice makes the losses of one that was not, to the last bit; every sample once an epoch."""

    def target(rank, board, root, steps):
        model, optimizer = spread(0.2 if engine is Ours else 0.0)
        data = torch.arange(48 * 8).reshape(48, 8).float().sin()
        with (root / f"out.{rank}").open("a") as out:
            if engine is Ours:
                loader = DataLoader(TensorDataset(torch.arange(48), data), batch_size=4, shuffle=True)
                ckpt = Checkpointer(model, optimizer, loader=loader, dir=root / "checkpoints", save_interval="24h")
                for step, (index, x) in ckpt.steps(loader, max_steps=steps):
                    print(step, learn(model, optimizer, x), index.tolist(), file=out, flush=True)
                return
            old = Dcp.complete(root)
            begin = int(max(old).name[5:]) if old else 0
            if old:
                theirs_load(max(old), model, optimizer)
            for step in range(begin, steps):
                at_step = (8 * step + 4 * rank) % 48
                print(step, learn(model, optimizer, data[at_step : at_step + 4]), file=out, flush=True)
            dcp.save(full_state(model, optimizer), checkpoint_id=str(root / f"step-{steps:08d}"))

    def lines(name):
        return [(at / name / f"out.{rank}").read_text().splitlines() for rank in range(2)]

    for name, stops in (("whole", [14]), ("parts", [5, 9, 14])):
        (at / name).mkdir()
        for steps in stops:
            assert Ranks(2, target, at / name, steps, log=at / "resume").wait() == [0, 0], f"{at}/resume"
    good = lines("whole") == lines("parts")
    if engine is Ours:
        epochs = [
            sorted(
                i for r in range(2) for line in lines("parts")[r][b : b + 6] for i in json.loads(line.split(" ", 2)[2])
            )
            for b in (0, 6)
        ]
        return Outcome(int(good and epochs == [list(range(48))] * 2), 1, "with dropout and shuffled data")
    return Outcome(int(good), 1, "no dropout; order of the data and random numbers are the script's to keep")


def accounted(engine, at, rounds, dice):
    """From one number of ranks to the next, in the middle of an epoch and at its end: each step the same 16 samples, shared by more or fewer micro-batches."""
    if engine is not Ours:
        return Outcome(0, 0, "the order of the data is the script's to keep", skipped=True)

    def target(rank, board, size, steps):
        model, optimizer = spread()
        data = TensorDataset(torch.arange(96), torch.arange(96 * 8).reshape(96, 8).float().sin())
        loader = DataLoader(data, batch_size=2, shuffle=True, num_workers=1, persistent_workers=True)
        ckpt = Checkpointer(model, optimizer, loader=loader, dir=at / "checkpoints", save_interval="24h")
        with (at / f"out.{rank}").open("a") as out:
            for step, (index, x) in ckpt.steps(loader, max_steps=steps, accumulate=8 // size):
                model(x).square().mean().backward()
                if ckpt.last_micro_batch:
                    optimizer.step()
                    optimizer.zero_grad()
                print(step, *index.tolist(), file=out, flush=True)

    for size, steps in ((8, 3), (4, 6), (2, 8), (1, 13), (8, 18)):
        assert not any(Ranks(size, target, size, steps, log=at / "accounted").wait()), f"{at}/accounted"
    told = [[] for _ in range(18)]
    for line in (line for rank in range(8) for line in (at / f"out.{rank}").read_text().splitlines()):
        step, *index = map(int, line.split())
        told[step] += index
    order = GlobalBatches(96, 16, World(0, 1), shuffle=True, seed=0, drop_last=False)
    expected = []
    for epoch in range(3):
        order.seek(epoch, 0)
        expected += order
    good = sum(sorted(a) == sorted(b) for a, b in zip(told, expected, strict=True))
    return Outcome(good, len(expected), "8 → 4 → 2 → 1 → 8 ranks, three epochs, with workers")


def same_keys(engine, at, rounds, dice):
    """The names of what is saved do not depend on what is wrapped around the model."""

    def compiled_inside(model):
        model.first = checkpoint_wrapper(torch.compile(model.first, backend="eager"))
        return model

    def activation(model):
        model.first = checkpoint_wrapper(model.first)
        return model

    kinds = {
        "compile": lambda m: torch.compile(m, backend="eager"),
        "activation checkpointing": activation,
        "compile in activation checkpointing": compiled_inside,
        "DDP": nn.parallel.DistributedDataParallel,
        "FSDP2": fully_shard,
        "FSDP1": fsdp1,
    }
    plain = set(Net().state_dict())

    def target(rank, board):
        for number, (name, wrap) in enumerate(kinds.items()):
            dist.barrier()
            try:
                model = wrap(Net())
                if engine is Ours:
                    ckpt = Checkpointer(model, dir=at / f"keys-{number}", save_interval="24h")
                    ckpt.step()
                    ckpt.finish()
                    keys = {
                        k.removeprefix("model.")
                        for k in Reader(folder.committed(at / f"keys-{number}")[0]).keys
                        if k.startswith("model.")
                    }
                else:
                    keys = set(get_model_state_dict(model))
            except (StateError, ValueError, RuntimeError) as error:
                print(name, "refused", repr(error)[:300], flush=True)
                board[Board.FLAG + 64 + 8 * number] = 2
                continue
            print(name, keys ^ plain, flush=True)
            board[Board.FLAG + 64 + 8 * number] = keys == plain

    ranks = Ranks(2, target, log=at / "keys")
    codes = ranks.wait()
    marks = {name: ranks.board[Board.FLAG + 64 + 8 * i] for i, name in enumerate(kinds)}
    refused = [name for name, mark in marks.items() if mark == 2]
    other = [name for name, mark in marks.items() if mark == 0]
    says = [f"refused: {', '.join(refused)}"] * bool(refused) + [f"other names: {', '.join(other)}"] * bool(other)
    good = sum(mark == 1 for mark in marks.values()) if codes == [0, 0] else 0
    return Outcome(good, len(kinds) - len(refused), "; ".join(says))


def two_runs(engine, at, rounds, dice):
    """Two runs that were given one folder: no state is a mixture, and none of the two believes to be saved when it is not."""

    def target(rank, board, root, add):
        model = Model()
        if engine is Ours:
            try:
                training = Ours(root, model)
            except ResumeError:
                board[Board.FLAG] = 2
                return
            training.save_now()
            board[Board.READY] = 1
            time.sleep(PATIENCE_S)  # it is killed when the other has seen it
            return
        training = Dcp(root, model)
        training.step = 1 + add
        model.set(1 + add)
        path = root / "step-00000001"
        time.sleep(0.05 * (add != 0))
        wait_s = 0.3 * (rank == (1 if add else 0))  # disks are uneven
        dcp.save(training.state(), storage_writer=Straggler(str(path), wait_s), checkpoint_id=str(path))
        board[Board.FLAG] = 1

    rounds = 1 if engine is Ours else rounds
    good, says = 0, ""
    for number in range(rounds):
        root = at / str(number)
        root.mkdir()
        size = 1 if engine is Ours else 2
        first = Ranks(size, target, root, 0, log=at / "first")
        if engine is Ours:
            first.until(Board.READY)
        second = Ranks(size, target, root, 100, log=at / "second")
        second.wait()
        if engine is Ours:
            first.kill()
        else:
            first.wait()
        seen = look(engine, root, at)
        told = (
            second.board[Board.FLAG] == 2 if engine is Ours else first.board[Board.FLAG] + second.board[Board.FLAG] < 2
        )
        right = seen is not None and seen[1] and told
        good += right
        if engine is Ours:
            says = "the second is refused" if right else f"{seen}"
        elif not right:
            says = "both saves returned, and " + (
                "numbers of both runs are in one state" if seen and not seen[1] else "one of them is not there"
            )
    return Outcome(good, rounds, says)


@dataclass(frozen=True)
class Row:
    name: str
    act: object
    share: float = 0.2  # of the rounds
    least: int = 2
    divides: bool = True  # its rounds know nothing of each other


ROWS = (
    Row(
        "ranks killed with SIGKILL at random moments: the newest is one step's state, and none that was done is lost",
        killed,
        1.0,
    ),
    Row("one rank writes late, all are killed meanwhile", straggler),
    Row("power lost when the save is done", power),
    Row("a write fails (EFBIG)", write_error, 0.2),
    Row("no room on the disk for all of it (ENOSPC)", no_room, 0.1),
    Row("`destroy_process_group()` and exit before the save is on the disk", destroyed),
    Row("one bit of a shard flipped", flipped, 0.5),
    Row("every file in turn a hostile pickle", hostile, divides=False),
    Row("/dev/shm of 64 MiB, 67 MB of state", small_shm, divides=False),
    Row("FSDP2 with AdamW from one number of ranks to the next, bit for bit", resharded, divides=False),
    Row("FSDP1, FSDP2 and DDP in turn, with AdamW, bit for bit", rewrapped, divides=False),
    Row("resumed twice: the losses of the undisturbed run, bit for bit", resumed, divides=False),
    Row(
        "the samples of each step from one number of ranks to the next, with gradient accumulation",
        accounted,
        divides=False,
    ),
    Row("names without wrappers", same_keys, divides=False),
    Row("two runs, one folder", two_runs),
)


@dataclass(frozen=True)
class Part:
    """Some of a row's rounds, in a process and a folder of their own."""

    row: Row
    engine: type
    rounds: int
    seed: int
    at: Path

    def play(self):
        began = time.monotonic()
        self.at.mkdir()
        try:
            outcome = self.row.act(self.engine, self.at, self.rounds, random.Random(self.seed))
        except MissingError as error:
            outcome = Outcome(0, 0, f"not possible here: {error}"[:120], skipped=True)
        except (AssertionError, TimeoutError, IndexError, ValueError) as error:
            outcome = Outcome(0, self.rounds, repr(error)[:200])
        used, name = sum(os.times()[:4]), self.row.act.__name__
        told = f"{used:6.1f} CPU s {time.monotonic() - began:6.1f} s  {name:12} {self.engine.name:9} {outcome.text()}"
        print(told, flush=True)
        if outcome.passed:
            shutil.rmtree(self.at, ignore_errors=True)
        return asdict(outcome)


def parts_of(number, row, engine, arguments, out):
    wanted = (engine is Dcp and arguments.dcp_rounds) or arguments.rounds
    rounds = max(row.least, round(row.share * wanted))
    shares = min(arguments.jobs, rounds // row.least) if row.divides else 1
    sizes = [rounds // shares + (share < rounds % shares) for share in range(shares)]
    return [
        Part(row, engine, size, arguments.seed + 1000 * share, out / f"{number:02d}-{engine.name}-{share}")
        for share, size in enumerate(sizes)
    ]


def joined(outcomes):
    """What was seen: first where it was not as it must be."""
    says = [one.says for one in sorted(outcomes, key=lambda one: one.passed) if one.says]
    good, rounds = (sum(getattr(one, name) for one in outcomes) for name in ("good", "rounds"))
    return Outcome(good, rounds, "".join(says[:1]), skipped=all(one.skipped for one in outcomes))


def main():
    arguments = parse_arguments()
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    out = Path(arguments.out).absolute()
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    rows = [row for row in ROWS if not arguments.only or row.act.__name__ in arguments.only]
    parts = [
        p for n, row in enumerate(rows) for engine in (Ours, Dcp) for p in parts_of(n, row, engine, arguments, out)
    ]
    found = {(row, engine): [] for row in rows for engine in (Ours, Dcp)}
    for part, told in side_by_side(Part.play, parts, arguments.jobs):
        outcome = Outcome(**told) if told else Outcome(0, part.rounds, f"it broke off: {part.at}")
        found[part.row, part.engine].append(outcome)
    rows = [(row.name, {engine.name: joined(found[row, engine]) for engine in (Ours, Dcp)}) for row in rows]
    write(out, arguments, rows)
    failed = [name for name, found in rows if not found["vramfarm"].passed]
    sys.exit(1 if failed else 0)


def write(out, arguments, rows):
    about = {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "rounds": arguments.rounds,
        "seed": arguments.seed,
        "jobs": arguments.jobs,
    }
    data = {
        name: {engine: asdict(one) | {"passed": one.passed} for engine, one in found.items()} for name, found in rows
    }
    (out / "correctness.json").write_text(json.dumps({"about": about, "rows": data}, indent=1))
    lines = [
        f"{about['date']}, torch {about['torch']}, `make correctness ROUNDS={about['rounds']} JOBS={about['jobs']}`, seed {about['seed']}",
        "",
        "| | vramfarm | DCP as it comes |",
        "|---|---|---|",
        *(f"| {name} | {_cell(found['vramfarm'])} | {_cell(found['DCP'])} |" for name, found in rows),
    ]
    (out / "correctness.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def _cell(outcome):
    return outcome.text() if outcome.passed else f"**{outcome.text()}**"


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--dcp-rounds", type=int, help="other ones for DCP, where only ours is judged")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=parse_jobs, default=1, help="so many processes, each with some rounds of a row")
    parser.add_argument("--out", default="build/correctness")
    parser.add_argument("--only", nargs="*", default=[], help="names of rows' functions")
    return parser.parse_args()


if __name__ == "__main__":
    main()
