"""
Ours and what others have, behind one face: `step` after each optimizer step, `begin` a save, `is_done`.

`begin` returns when training may go on; what it took is part of the step. `done_at` is when an engine says that it is
done; then every rank syncs all of its files, on a thread, and `synced_at` is when that is over. What an engine has synced
itself costs nothing there.
"""

import contextlib
import os
import shutil
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

from vramfarm import Checkpointer
from vramfarm.protocol import Arena, Slot, Word


class Engine:
    name = ""
    rounds = 99

    def __init__(self, model, optimizer, folder):
        self.model, self.optimizer = model, optimizer
        self.folder = Path(folder) / self.name.replace(" ", "-")
        self.done_at = self.synced_at = self.error = self.last = None

    def guard(self):
        """Called before optimizer.step(), where an engine wants that."""

    def step(self):
        pass

    def is_done(self):
        return self.synced_at is not None

    def tidy(self):
        """Only one engine's checkpoint is on the disk at a time."""
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(self.folder, ignore_errors=True)
        dist.barrier()

    def path(self, number):
        """A new folder for a save."""
        self.last = self.folder / str(number)
        self.last.mkdir(parents=True, exist_ok=True)
        return str(self.last)

    def state(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def when_done(self, *futures):
        """Note the moment, without a look from the training loop."""

        def wait():
            try:
                for future in futures:
                    future.result()
                self.done_at = time.perf_counter()
                sync(self.last)
            except Exception as error:  # noqa: BLE001  # a peer that fails is a result
                self.error = error
            self.done_at = self.done_at or time.perf_counter()
            self.synced_at = time.perf_counter()

        threading.Thread(target=wait, daemon=True).start()

    def close(self):
        pass


class Nothing:
    """What calling an engine costs at least."""

    def guard(self):
        pass

    def step(self):
        pass


class Ours(Engine):
    name = "vramfarm"

    def __init__(self, model, optimizer, folder):
        super().__init__(model, optimizer, folder)
        self.ckpt = Checkpointer(model, optimizer, dir=self.folder, save_interval="24h", keep_last=1)
        self.page = self.ckpt._seat.page
        self.before = 0
        self.step = self.ckpt.step  # as a script calls it

    def begin(self, _):
        """The saver chooses one of the next steps. Time counts from when the state is staged."""
        self.before = self.page[Word.NUM_COMMITTED]
        self.ckpt.save()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self):
        ranks, page = range(dist.get_world_size()), self.page
        while page[Word.NUM_COMMITTED] == self.before and not (
            page[Word.SAVING_STEP] and all(page.get(rank, Slot.ARENA_STATE) == Arena.READY for rank in ranks)
        ):
            time.sleep(0.001)  # until all have staged it
        self.staged_at, used = time.perf_counter(), self.saver_cpu_s()
        while self.page[Word.NUM_COMMITTED] == self.before:
            time.sleep(0.002)
        self.writer_cpu_s = self.saver_cpu_s() - used
        self.done_at = self.synced_at = time.perf_counter()

    def saver_cpu_s(self):
        """Processor time of the saver, all of its threads."""
        tasks = Path(f"/proc/{self.page[Word.SAVER_PID]}/task").glob("*/schedstat")
        return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9

    def staging_bytes(self):
        """Of all ranks."""
        return sum(self.page.get(rank, Slot.ARENA_BYTES) for rank in range(dist.get_world_size()))

    def tidy(self):
        """The saver itself keeps one."""
        dist.barrier()

    def commits(self):
        """What the saver says of each save."""
        log = self.folder.parent / "saver.log"
        return [line for line in log.read_text().splitlines() if "commit step=" in line] if log.exists() else []


class DcpSave(Engine):
    name = "dcp.save"
    rounds = 2

    def begin(self, number):
        dcp.save(self.state(), checkpoint_id=self.path(number))
        self.when_done()


class DcpAsync(DcpSave):
    name = "dcp.async_save"
    kind = "THREAD"
    stager = False

    def __init__(self, model, optimizer, folder):
        super().__init__(model, optimizer, folder)
        self.options = {
            "process_group": dist.new_group(backend="gloo")
        }  # its thread must not meet the training's collectives
        if self.kind == "PROCESS":
            from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

            self.options["async_checkpointer_type"] = AsyncCheckpointerType.PROCESS
        if self.stager:
            from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

            cuda = torch.cuda.is_available()
            options = StagingOptions(
                use_pinned_memory=cuda, use_shared_memory=True, use_async_staging=cuda, use_non_blocking_copy=cuda
            )
            self.options["async_stager"] = DefaultStager(options)

    def begin(self, number):
        self.staging = None
        answer = dcp.async_save(self.state(), checkpoint_id=self.path(number), **self.options)
        if hasattr(answer, "upload_completion"):
            self.staging = answer.staging_completion
            answer = answer.upload_completion
        self.when_done(answer)

    def guard(self):
        if getattr(self, "staging", None) is not None:
            self.staging.result()


class DcpProcess(DcpAsync):
    name = "dcp.async_save process"
    kind = "PROCESS"


class DcpProcessStager(DcpProcess):
    name = "dcp.async_save process+stager"
    stager = True


class TorchSave(Engine):
    name = "torch.save rank 0"
    rounds = 1

    def begin(self, number):
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        model, optimizer = get_state_dict(self.model, self.optimizer, options=options)
        path = self.path(number)
        if dist.get_rank() == 0:
            torch.save({"model": model, "optimizer": optimizer}, f"{path}/state.pt")
        dist.barrier()
        self.when_done()


class Accelerate(Engine):
    """What `accelerator.save_state` calls for a model under FSDP with SHARDED_STATE_DICT."""

    name = "accelerate.save_state"
    rounds = 2

    def __init__(self, model, optimizer, folder):
        super().__init__(model, optimizer, folder)
        from accelerate import Accelerator, FullyShardedDataParallelPlugin

        self.plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
        self.accelerator = Accelerator(cpu=not torch.cuda.is_available())

    def begin(self, number):
        from accelerate.utils import save_fsdp_model, save_fsdp_optimizer

        path = self.path(number)
        save_fsdp_model(self.plugin, self.accelerator, self.model, path)
        save_fsdp_optimizer(self.plugin, self.accelerator, self.optimizer, self.model, path)
        self.when_done()


class Lightning(Engine):
    """What Lightning's ModelParallelStrategy calls for a sharded checkpoint."""

    name = "Lightning sharded"
    rounds = 2

    def __init__(self, model, optimizer, folder):
        super().__init__(model, optimizer, folder)
        try:
            from lightning.fabric.strategies import model_parallel
        except ImportError:  # as pytorch-lightning has it
            from lightning_fabric.strategies import model_parallel

        self.strategy = model_parallel

    def begin(self, number):
        state = {"model": self.model, "optimizer": self.optimizer, "step": number}
        path = Path(self.path(number))
        self.strategy._save_checkpoint(path=path, state=state, full_state_dict=False, rank=dist.get_rank())
        dist.barrier()
        self.when_done()


class TorchCheckpointing(Engine):
    name = "torch_checkpointing"
    warm = False

    def __init__(self, model, optimizer, folder):
        super().__init__(model, optimizer, folder)
        from torch_checkpointing.checkpoint_manager import CheckpointManager
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        config = CheckpointManager.Config.with_async_save()
        config.storage_config = LocalFileSystemStorageConfig(use_direct_io=False)  # the default fails on ext4
        if not torch.cuda.is_available():
            staging = config.save.staging_config
            staging.use_pinned_memory = staging.use_cuda_non_blocking_copy = staging.use_async_staging = False
        self.manager = config.build()

    def begin(self, number):
        self.when_done(self.manager.save(self.path(number), self.state()))

    def guard(self):
        with self.manager.lock():
            pass  # an optimizer step that begins now waits for the capture

    def close(self):
        self.manager.close()


class Nvrx(Engine):
    name = "nvidia-resiliency-ext"
    is_under_way = False

    def __init__(self, model, optimizer, folder):
        super().__init__(model, optimizer, folder)
        from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue

        self.queue = AsyncCallsQueue(persistent=True)

    def begin(self, number):
        from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncRequest
        from nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async import FileSystemWriterAsync
        from nvidia_resiliency_ext.checkpointing.async_ckpt.state_dict_saver import (
            save_state_dict_async_finalize,
            save_state_dict_async_plan,
        )

        writer = FileSystemWriterAsync(self.path(number), thread_count=2)
        answer = save_state_dict_async_plan(self.state(), writer, enable_cache=True)
        call, preload, arguments = writer.get_save_function_and_args()
        self.queue.schedule_async_request(
            AsyncRequest(call, arguments, [lambda: save_state_dict_async_finalize(*answer)], preload_fn=preload)
        )
        self.is_under_way = True

    def step(self):
        if self.is_under_way and self.queue.maybe_finalize_async_calls(blocking=False):
            self.is_under_way = False
            self.when_done()

    def close(self):
        self.queue.close()


class TorchSnapshot(Engine):
    name = "torchsnapshot"
    rounds = 1

    def begin(self, number):
        from torchsnapshot import Snapshot, StateDict

        flat = {}
        for kind, entries in self.state().items():
            for key, value in dcp._nested_dict.flatten_state_dict({kind: entries})[0].items():
                flat[key] = value.to_local() if hasattr(value, "to_local") else value
        pending = Snapshot.async_take(self.path(number), {"state": StateDict(state=flat)})
        self.when_done(_Waiting(pending))


class _Waiting:
    def __init__(self, pending):
        self.pending = pending

    def result(self):
        self.pending.wait()


ALL = [
    Ours,
    TorchCheckpointing,
    Nvrx,
    DcpAsync,
    DcpProcess,
    DcpProcessStager,
    DcpSave,
    TorchSnapshot,
    Accelerate,
    Lightning,
    TorchSave,
]


def sync(folder):
    """All files of a folder onto the disk, and their names."""
    for path in (folder, *folder.rglob("*")):
        with contextlib.suppress(FileNotFoundError):  # another rank has renamed it
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)


def build(names, model, optimizer, folder, say):
    """Return the engines that start here; say why others do not."""
    engines = []
    for kind in ALL:
        if names and kind.name not in names:
            continue
        try:
            engines.append(kind(model, optimizer, folder))
        except Exception as error:  # noqa: BLE001  # a peer that is not installed, or not for this machine
            say(f"{kind.name}: left out: {error!r}"[:300])
    return engines
