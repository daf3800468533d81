"""
A trainer without torch: it speaks the whole protocol as the library does, and starts in milliseconds.

    python tests/fake_trainer.py --steps 100 --step-time 0.01 --bytes 200000 [--crash-at N] [--fail-before-attach]

Under a supervisor it is told everything by the environment. Alone it is one rank, or with
VRAMFARM_CONTROL, RANK and WORLD_SIZE one of several. What it saves is `content(rank, step)`, so
anybody can tell what a checkpoint must hold.
"""

import argparse
import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

from vramfarm import protocol
from vramfarm.protocol import Ended, Env, Phase, Reason
from vramfarm.seat import DISK_S, Seat, create_page, open_page
from vramfarm.tending import SILENCE_S, SaverProcess, log_path


def content(rank, step, num_bytes):
    """Bytes of the shard that rank `rank` saves at `step`: a safetensors file of one tensor."""
    tensor = {"dtype": "U8", "shape": [num_bytes], "data_offsets": [0, num_bytes]}
    header = json.dumps({f"fake.{rank}": tensor}).encode()
    header += b" " * (-len(header) % 8)
    pattern = hashlib.sha256(f"{rank}:{step}".encode()).digest()
    return len(header).to_bytes(8, "little") + header + (pattern * (num_bytes // 32 + 1))[:num_bytes]


def stop_myself():
    os.kill(os.getpid(), signal.SIGSTOP)


def ask():
    print("Overwrite the output folder? [y/N] ", end="", flush=True)
    os.read(os.pipe()[0], 1)


def look_busy():
    """An evaluation: no step, no word, but work."""
    until = time.monotonic() + 8
    while time.monotonic() < until:
        sum(range(10_000))


HANGS = {
    "sleep": lambda: None,
    "stop": stop_myself,
    "ask": ask,
}


def parse_arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--step-time", type=float, default=0.01)
    parser.add_argument("--bytes", type=int, default=200_000)
    parser.add_argument(
        "--crash-at", type=int, default=0, help="exit 13 after this step, in the first --crash-attempts attempts"
    )
    parser.add_argument("--crash-attempts", type=int, default=1)
    parser.add_argument(
        "--hang-at",
        type=int,
        default=0,
        help="make no more steps after this one, in the first --crash-attempts attempts",
    )
    parser.add_argument("--hang", choices=HANGS, default="sleep", help="in which way")
    parser.add_argument("--hang-rank", type=int, help="only this one; without it all of them")
    parser.add_argument(
        "--copy-time", type=float, default=0, help="training goes on while a save is copied for so long"
    )
    parser.add_argument(
        "--saver-silence", type=float, default=SILENCE_S, help="a saver that says nothing for so long is replaced"
    )
    parser.add_argument(
        "--disk-patience",
        type=float,
        default=DISK_S,
        help="a save that waits so long for its disk is waited for no more",
    )
    parser.add_argument(
        "--exit-patience", type=float, help="at its end it waits for so long, as at an interpreter's exit"
    )
    parser.add_argument("--nan-at", type=int, default=0, help="the loss is not a number from this step on")
    parser.add_argument("--busy-at", type=int, default=0, help="compute something else for 8 s after this step")
    parser.add_argument("--fail-before-attach", action="store_true")
    return parser.parse_args()


def take_seat(env, rank, world_size, silence_s, disk_s):
    page = open_page(env) or create_page(world_size)
    defaults = {Env.CHECKPOINT_DIR: str(Path("checkpoints").absolute()), Env.SAVE_INTERVAL_S: "1800"}
    env = defaults | env if Env.CONTROL in env else {Env.KEEP_LAST: "2"} | defaults | env
    saver = SaverProcess(page, env, log_path(env), silence_s=silence_s) if rank == 0 else None
    return Seat(page, rank, saver, disk_s=disk_s)


def resumed_step(env):
    """Read the checkpoint named by the supervisor as the library would: manifest first, then what it names."""
    folder = env.get(Env.RESUME, "none")
    if folder == "none":
        return 0
    manifest = protocol.parse_manifest((Path(folder) / protocol.MANIFEST).read_bytes())
    assert all((Path(folder) / s.path).stat().st_size == s.size_bytes for s in manifest.shards)
    assert manifest.state["ranks"]["0"]["step"] == manifest.step
    return manifest.step


class Trainer:
    def __init__(self, arguments, env):
        self.arguments = arguments
        self.rank = int(env.get("LOCAL_RANK", env.get("RANK", "0")))
        self.world_size = int(env.get("LOCAL_WORLD_SIZE", env.get("WORLD_SIZE", "1")))
        self.crashes = int(env.get(Env.ATTEMPT, "1")) <= arguments.crash_attempts
        self.seat = take_seat(env, self.rank, self.world_size, arguments.saver_silence, arguments.disk_patience)
        self.seat.enter(Phase.LOADING)
        self.first = resumed_step(env)

    def stage(self, step):
        image = content(self.rank, step, self.arguments.bytes)
        state = json.dumps({"step": step, "contents": ["fake"]}).encode()

        def rest(memory):
            time.sleep(self.arguments.copy_time)
            memory[:] = image
            return ""

        def fill(memory, _):
            if self.arguments.copy_time:
                return lambda: rest(memory)
            memory[:] = image
            return None

        return self.seat.stage(step, len(image), state, fill)

    def train(self):
        self.seat.start(self.first, max_steps=self.arguments.steps)
        print(f"rank {self.rank}: training from step {self.first}", flush=True)
        for step in range(self.first + 1, self.arguments.steps + 1):
            time.sleep(self.arguments.step_time)
            self.seat.report(loss=float("nan") if 0 < self.arguments.nan_at <= step else 1 / step, lr=0.001)
            reason = self.seat.finished(step, samples=step * self.world_size)
            if reason is not None and self.stage(step) and reason is Reason.LEAVE and self.seat.leave(step):
                print(f"rank {self.rank}: left at step {step}", flush=True)
                return 0
            self.misbehave(step)
        ended = self.seat.finish(self.stage, timeout_s=self.arguments.exit_patience)
        if ended is Ended.NO:
            print(f"rank {self.rank}: {self.seat.why_no_end()}", file=sys.stderr, flush=True)
        print(f"rank {self.rank}: {ended.name.lower()} at step {self.arguments.steps}", flush=True)
        return 0 if ended is Ended.DONE else 1

    def misbehave(self, step):
        if step == self.arguments.busy_at:
            look_busy()
        if self.crashes and step == self.arguments.crash_at:
            print(f"rank {self.rank}: RuntimeError: crashed on purpose at step {step}", file=sys.stderr, flush=True)
            os._exit(13)
        if self.crashes and step == self.arguments.hang_at and self.arguments.hang_rank in {None, self.rank}:
            HANGS[self.arguments.hang]()
        while self.crashes and step == self.arguments.hang_at:
            time.sleep(0.1)


def main():
    arguments = parse_arguments()
    if arguments.fail_before_attach:
        print("ImportError: failed on purpose before attaching", file=sys.stderr)
        return 1
    return Trainer(arguments, dict(os.environ)).train()


if __name__ == "__main__":
    sys.exit(main())
