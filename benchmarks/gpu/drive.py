"""What scripts here that start trainings share: sizes, launches that end, and what the trainings wrote down."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
MARK = "BENCHMARK_LAUNCH"  # whatever a launch starts carries it
LARGE = "--layers 8 --hidden 1024 --vocabulary 8192 --sequence 1024 --per-card 24"
SMALL = "--layers 2 --hidden 128 --vocabulary 512 --sequence 64 --per-card 4"


def size_of(text, ranks):
    """The options of train.py, with a global batch of one micro-batch for each rank where none is told."""
    words = text.split()
    if "--global-batch" in words:
        return words
    return [*words, "--global-batch", str(ranks * int(words[words.index("--per-card") + 1]))]


def has_cards():
    """Asked of the driver's files: torch would hold a card for as long as this process lives."""
    return Path("/dev/nvidia0").exists()


def environment():
    """Of a process that is started here, also by one that torchrun started."""
    outer = {k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC_")}
    paths = [str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return {
        **outer,
        "PYTHONPATH": os.pathsep.join(p for p in paths if p),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
        "NCCL_NVLS_ENABLE": os.environ.get("NCCL_NVLS_ENABLE", "0"),
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # the same sums in the same order
    }


def runner_python(folder):
    """An interpreter that has the runner also under -I, whether it is installed or not."""
    home = Path(folder) / "python"
    venv.create(home, with_pip=False, symlinks=True, system_site_packages=True)
    places = [ROOT, *(p for p in sys.path if p and Path(p).is_dir() and Path(p) != HERE and "lib-dynload" not in p)]
    (packages,) = home.glob("lib/python*/site-packages")
    (packages / "here.pth").write_text("".join(f"{place}\n" for place in places))
    return str(home / "bin" / "python")


def torchrun(num_processes, script, arguments):
    base = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    return [*base, "--nproc-per-node", str(num_processes), str(HERE / script), *arguments]


def launch(argv, log, **more):
    mark = f"{os.environ.get(MARK, '')}/{os.urandom(4).hex()}"  # what it starts in turn is its, too
    with Path(log).open("ab") as file:
        process = subprocess.Popen(
            argv, env=environment() | more | {MARK: mark}, stdout=file, stderr=file, start_new_session=True
        )
    process.mark = mark
    return process


def launch_ranks(num_ranks, script, arguments, log):
    """The same without torchrun, which needs three seconds to begin and two to end."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = str(listening.getsockname()[1])
    argv = [sys.executable, "-W", "ignore", str(HERE / script), *arguments]
    base = {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
    base |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [launch(argv, log, **base, RANK=str(rank), LOCAL_RANK=str(rank)) for rank in range(num_ranks)]


def finish_ranks(processes, limit_s):
    """The exit code of the first that failed, 0 if none did. One that fails ends all."""
    until = time.monotonic() + limit_s
    while time.monotonic() < until:
        codes = [process.poll() for process in processes]
        if None not in codes or any(codes):
            break
        time.sleep(0.05)
    late = [process for process in processes if process.poll() is None]
    for process in processes:
        end(process, 1)  # and what those that ended left behind
    for process in late:
        process.returncode = process.returncode or -9
    return next((process.returncode for process in processes if process.returncode), 0)


def finish(process, limit_s):
    """The exit code; what is over its time is ended with all that it started, and counts as -9."""
    try:
        return process.wait(max(limit_s, 0.1))
    except subprocess.TimeoutExpired:
        end(process)
        return -9


def end(process, patience_s=10):
    """Ask a launch to end, and kill what is left of it: its ranks are in sessions of their own."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(patience_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    mark, until = f"{MARK}={process.mark}".encode(), time.monotonic() + 10
    while sum(_kill_marked(folder, mark) for folder in Path("/proc").glob("[0-9]*")) and time.monotonic() < until:
        time.sleep(0.05)  # memory that is given back takes its time


def _kill_marked(folder, mark):
    """Whether there was something to kill."""
    try:
        if not any(one.startswith(mark) for one in (folder / "environ").read_bytes().split(b"\0")):
            return False
        os.kill(int(folder.name), signal.SIGKILL)
    except OSError:  # gone, or not ours
        return False
    return True


def lines(path):
    """Whole lines of JSON, of a file that may still grow, or not be there yet."""
    try:
        raw = Path(path).read_bytes()
    except OSError:
        return []
    return [json.loads(line) for line in raw.split(b"\n")[:-1] if line]


def tail(path, count=15):
    try:
        return "\n".join(Path(path).read_text(errors="replace").splitlines()[-count:])
    except OSError:
        return ""
