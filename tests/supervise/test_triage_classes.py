"""Classes of failures that the corpus does not have, and what only structure can tell."""

import pytest

from runner.supervise.triage import first_error
from runner.supervise.triage.meanings import MEANINGS

TABLE = """\
E0101 10:00:05.902000 4121 torch/distributed/elastic/multiprocessing/api.py:869] failed (exitcode: {code}) local_rank: {rank} (pid: 12) of binary: /usr/bin/python3.11
Traceback (most recent call last):
  File "/usr/local/bin/torchrun", line 8, in <module>
    sys.exit(main())
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
Failures:
{others}
Root Cause (first observed failure):
[0]:
  rank      : {rank} (local_rank: {rank})
  exitcode  : {code} (pid: 12)
  error_file: <N/A>
"""
PEER = (
    "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:561] Connection closed by peer [127.0.0.1]:4"
)
STEPS = "step 100 loss 0.81\nstep 101 loss 0.80\n"


def table(rank, code=1, others=()):
    rows = "\n".join(
        f"[{n}]:\n  rank      : {r} (local_rank: {r})\n  exitcode  : {c} (pid: {n})"
        for n, (r, c) in enumerate(others, 1)
    )
    return TABLE.format(rank=rank, code=code, others=rows)


def raised(rank, error, frame="train.py", line="    f()"):
    text = f'Traceback (most recent call last):\n  File "/w/{frame}", line 5, in <module>\n{line}\n{error}\n'
    return "".join(f"[rank{rank}]: {part}\n" for part in text.splitlines()) if rank is not None else text


def watchdog(rank, *, seq=812, op="ALLREDUCE", numel=4096, limit=600000, ran=600037):
    return (
        f"[rank{rank}]:[E101 10:00:00.929096625 ProcessGroupNCCL.cpp:632] [Rank {rank}] Watchdog caught collective "
        f"operation timeout: WorkNCCL(SeqNum={seq}, OpType={op}, NumelIn={numel}, NumelOut={numel}, Timeout(ms)={limit}) "
        f"ran for {ran} milliseconds before timing out.\n"
    )


CLASSES = [
    # ---- what a rank raises
    ("ckpt_zero3_empty", raised(0, "RuntimeError: Error(s) in loading state_dict for Llama:\n\tsize mismatch for w: copying a param with shape torch.Size([0]) from checkpoint, the shape in current model is torch.Size([4096]).")),
    ("download_truncated", raised(None, "OSError: Consistency check failed: file should be of size 4976698672 but has size 1073741824 (model-00001-of-00004.safetensors).")),
    ("file_is_lfs_pointer_or_html", raised(None, "_pickle.UnpicklingError: invalid load key, 'v'.")),
    ("file_is_lfs_pointer_or_html", raised(None, "safetensors_rust.SafetensorError: Error while deserializing header: HeaderTooLarge")),
    ("checkpoint_corrupt", raised(1, "EOFError: Ran out of input")),
    ("hf_token_401", raised(None, "huggingface_hub.errors.HfHubHTTPError: 401 Client Error: Unauthorized for url: https://huggingface.co/api/whoami-v2\nInvalid username or password.")),
    ("hf_gated_403", raised(None, "requests.exceptions.HTTPError: 403 Client Error: Forbidden for url: https://huggingface.co/meta/x")),
    ("s3_token_expired", raised(0, "botocore.exceptions.ClientError: An error occurred (ExpiredToken) when calling the PutObject operation: The provided token has expired.")),
    ("s3_bad_key", raised(0, "botocore.exceptions.NoCredentialsError: Unable to locate credentials")),
    ("s3_entity_too_large", raised(0, "botocore.exceptions.ClientError: An error occurred (EntityTooLarge) when calling the PutObject operation: Your proposed upload exceeds the maximum allowed size")),
    ("network_reset", STEPS + raised(0, "requests.exceptions.ConnectionError: ('Connection aborted.', ConnectionResetError(104, 'Connection reset by peer'))")),
    ("network_reset", raised(0, "urllib3.exceptions.MaxRetryError: HTTPSConnectionPool(host='x', port=443): Max retries exceeded with url: /a (Caused by NameResolutionError(...))")),
    ("hf_offline_not_cached", raised(None, "huggingface_hub.errors.OfflineModeIsEnabled: Cannot reach https://huggingface.co/x: offline mode is enabled.")),
    ("thread_limit", "OpenBLAS blas_thread_init: pthread_create failed for thread 12 of 64: Resource temporarily unavailable\n" + table(0, -11)),
    ("thread_limit", raised(0, "RuntimeError: can't start new thread")),
    ("triton_cache_shared_fs", raised(2, "OSError: [Errno 116] Stale file handle: '/root/.triton/cache/ab12/x.cubin'")),
    ("library_mismatch", raised(None, "ImportError: libcudnn.so.9: cannot open shared object file: No such file or directory")),
    ("gpu_busy", raised(0, "RuntimeError: CUDA error: CUDA-capable device(s) is/are busy or unavailable")),
    ("driver_too_old_forward_compat", raised(None, "RuntimeError: Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before calling NumCudaDevices() that might have already set an error? Error 804: forward compatibility was attempted on non supported HW")),
    ("fabric_nvls", "n:1:2 [0] transport/nvls.cc:244 NCCL WARN Cuda failure 1 'invalid argument'\n" + raised(0, "torch.distributed.DistBackendError: NCCL error in: x.cpp:1, unhandled cuda error, NCCL version 2.20")),
    ("nccl_network", "n:1:2 [0] misc/socket.cc:484 NCCL WARN socketStartConnect: Connect to 10.0.0.2<4> failed : No route to host\n" + raised(0, "torch.distributed.DistBackendError: NCCL error in: x.cpp:1, unhandled system error")),
    ("rendezvous_bad_hostname", raised(None, "socket.gaierror: [Errno -2] Name or service not known")),
    ("launcher_arguments", "usage: run.py [-h] training_script ...\nrun.py: error: ambiguous option: --log could match --log-dir, --logs-specs\n"),
    ("port_in_use_rank_bug", raised(1, "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. port: 29500, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use")),
    ("p2p_broken_zero_params", raised(0, "RuntimeError: DDP expects same model across all ranks, but Rank 0 has 148 params, while rank 1 has inconsistent 0 params.")),
    ("gpu_occupied", raised(0, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB of which 1.06 GiB is free. Process 999 has 71.20 GiB memory in use. Process 1000 has 6.80 GiB memory in use. Of the allocated memory 6.10 GiB is allocated by PyTorch, and 120.00 MiB is reserved by PyTorch but unallocated.")),
    ("disk_io_error", raised(0, "OSError: [Errno 5] Input/output error: '/data/shard-7.tar'")),
    ("host_oom", STEPS + raised(0, "RuntimeError: [enforce fail at alloc_cpu.cpp:114] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 9663676416 bytes. Error code 12 (Cannot allocate memory)")),
    ("fp16_loss_scale_exhausted", raised(0, "FloatingPointError: Minimum loss scale reached (0.0001). Your loss is probably exploding.")),
    ("nan_loss", STEPS + raised(0, "ValueError: loss is nan at step 102")),
    # ---- what the machine says
    ("docker_no_gpu_runtime", "docker: Error response from daemon: unknown or invalid runtime name: nvidia.\n[runner] training not started"),
    ("driver_too_old", "nvidia-container-cli: requirement error: unsatisfied condition: cuda>=12.4, please update your driver to a newer version"),
    ("fabric_manager_failed", "[host] systemd[1]: nvidia-fabricmanager.service: Failed with result 'exit-code'.\n" + raised(None, "RuntimeError: No CUDA GPUs are available")),
    ("gpu_hbm_failing", "[1.2] NVRM: Xid (PCI:0000:4b:00): 64, pid=1, name=python, Row Remapper Error: remapping failed\n" + raised(2, "RuntimeError: CUDA error: uncorrectable ECC error encountered")),
    ("gpu_ecc", "[1.2] NVRM: Xid (PCI:0000:4b:00): 48, pid=1, name=python, DBE\n[1.3] NVRM: Xid (PCI:0000:4b:00): 45, pid=1, Ch 8\n" + watchdog(0)),
    ("nvlink5_fault", "[1.2] NVRM: Xid (PCI:0000:4b:00): 145, RLW_CTRL Fatal Link 03\n" + watchdog(0)),
    ("disk_io_error", "[1.2] blk_update_request: I/O error, dev nvme0n1, sector 123\n" + watchdog(0)),
    ("apt_bad_signature", "W: GPG error: https://x focal InRelease: The following signatures couldn't be verified because the public key is not available: NO_PUBKEY A4B469963BF863CC\nE: The repository is not signed.\n[runner] setup step 'apt' exit code 100"),
    ("shm_leaked_segments", "[runner] /dev/shm: 63 of 64 GB used, 1211 files torch_*, older than this attempt\n" + raised(0, "RuntimeError: unable to write to file </torch_88_1>: No space left on device (28)")),
    ("nvlink_false_alarm", "[1.2] NVRM: Xid (PCI:0000:4b:00): 31, pid=9, name=python, MMU Fault\n" + raised(1, "RuntimeError: CUDA error: uncorrectable NVLink error detected during the execution")),
    ("nan_from_bad_gpu", "[runner] nvidia-smi: GPU 3 Volatile Uncorr. ECC: 4\n" + STEPS + raised(0, "ValueError: loss is nan at step 102")),
    ("gpu_hbm_failing", "[1.2] NVRM: Xid (PCI:0000:4b:00): 48, pid=1, DBE\n[runner] nvidia-smi -q: Remapping Failure Occurred : Yes\n" + watchdog(0)),
    ("fabric_manager_down", "[startup-check] torch: RuntimeError: Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized\n" + raised(None, "AssertionError")),
    ("missing_module", "[runner] previous attempt ended: OSError: [Errno 28] No space left on device\n" + raised(0, "ModuleNotFoundError: No module named 'x'")),
    # ---- what only silence says
    ("sigterm_external", STEPS + "W0101 10:00:00.1 1 torch/distributed/elastic/agent/server/api.py:719] Received 15 death signal, shutting down workers\n"),
    ("host_oom_leak", "".join(f"step {n * 1000} loss 0.5 cpu rss {20 + 30 * n} GB\n" for n in range(1, 5)) + table(1, -9)),
    ("nccl_timeout_missing_rank", STEPS + watchdog(0) + watchdog(1) + watchdog(3) + table(0, -6, [(1, -6), (2, -15), (3, -6)])),
    ("nccl_timeout_clock_jump", STEPS + watchdog(0, ran=86400123) + watchdog(1, ran=86400123) + table(0, -6)),
    ("p2p_hang", watchdog(0, seq=1) + watchdog(1, seq=1) + table(0, -6, [(1, -6)])),
    ("nccl_timeout", "[startup-check] GPU topology: GPU0-GPU1 NV18\n" + watchdog(0, seq=1) + watchdog(1, seq=1) + table(0, -6, [(1, -6)])),
    ("nccl_timeout", STEPS + watchdog(0) + watchdog(1) + table(0, -6, [(1, -6)])),
    ("uneven_data", STEPS + watchdog(0) + watchdog(1) + watchdog(2, op="ALLGATHER", numel=2) + table(0, -6, [(1, -6), (2, -6)])),
    ("nan_one_rank_skips_collective", STEPS + "[rank3] step 102: loss is nan, skipping backward\n" + watchdog(0) + watchdog(1) + watchdog(3) + table(0, -6)),
    ("tokenizers_fork_deadlock", "huggingface/tokenizers: The current process just got forked, after parallelism has already been used. Disabling parallelism to avoid deadlocks...\n[runner] no output for 900 s; gpu util 0/0 %"),
    ("segfault", STEPS + raised(1, PEER) + table(0, -11, [(1, -15)])),
    ("user_exception", raised(1, PEER) + table(0, 3, [(1, -15)])),
    ("cuda_illegal_access_nccl", "n:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM\n" + raised(0, "RuntimeError: CUDA error: an illegal memory access was encountered", "torch/distributed/distributed_c10d.py")),
    # ---- packages, compilers, other languages
    ("wrong_arch", "ptxas fatal   : Value 'sm_120' is not defined for option 'gpu-name'"),
    ("no_c_compiler", raised(None, "FileNotFoundError: [Errno 2] No such file or directory: '/usr/lib/python3/site-packages/triton/backends/nvidia/bin/ptxas'")),
    ("no_c_compiler", raised(None, "OSError: CUDA_HOME environment variable is not set. Please set it to your CUDA install root.")),
    ("library_mismatch", raised(None, "deepspeed.ops.op_builder.builder.CUDAMismatchException: >- DeepSpeed Op Builder: Installed CUDA version 12.1 does not match the version torch was compiled with 11.8")),
    ("library_mismatch", "OMP: Error #15: Initializing libiomp5.so, but found libomp.so already initialized."),
    ("missing_module", raised(None, "ImportError: Using `load_in_8bit=True` requires Accelerate: `pip install accelerate`")),
    ("docker_no_gpu_runtime", raised(None, "RuntimeError: Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU")),
    ("host_oom", STEPS + "memory allocation of 34359738368 bytes failed\nAborted (core dumped)"),
    ("host_oom", STEPS + "slurmstepd: error: Detected 1 oom_kill event in StepId=77.0. Some of the step tasks have been OOM Killed."),
    ("segfault", STEPS + "free(): invalid pointer\nAborted (core dumped)"),
    ("segfault", STEPS + "train.sh: Zeile 3:  4121 Speicherzugriffsfehler  python train.py"),
    ("sigkill_unknown", STEPS + "train.sh: Zeile 3:  4121 Getötet                 python train.py"),
    ("disk_full", STEPS + raised(1, "OSError: [Errno 28] Auf dem Gerät ist kein Speicherplatz mehr verfügbar: '/out/a.pt'")),
    ("disk_full", STEPS + raised(0, "RuntimeError: [enforce fail at inline_container.cc:858] . PytorchStreamWriter failed writing file data/7: file write failed")),
    ("disk_full", STEPS + raised(0, "RuntimeError: [enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")),
    ("network_reset", STEPS + raised(1, "OSError: [Errno 107] Transport endpoint is not connected: '/mnt/s3/a'")),
    ("network_reset", STEPS + raised(1, "OSError: [Errno 116] Stale file handle: '/mnt/data/a.bin'")),
    ("network_reset", "Cloning into 'b'...\nfatal: unable to access 'https://github.com/a/b/': Could not resolve host: github.com"),
    ("sigterm_external", STEPS + raised(1, PEER) + table(0, -2, [(1, 1)])),
    ("checkpoint_corrupt", raised(None, "EOFError", "site-packages/torch/serialization.py")),
    ("user_exception", "Primary config directory not found.\nCheck that the config directory exists"),
    ("user_exception", "start\nbash: line 1: DATA_DIR: unbound variable"),
    ("user_exception", "ERROR: Cannot install torch==99.9 because these package versions have conflicting dependencies."),
    ("unknown", raised(1, PEER)),
    ("unknown", ""),
]  # fmt: skip


RETRYING = "WARNING - 429 Client Error: Too Many Requests, retrying in 5 s\n"
ACCELERATE = "subprocess.CalledProcessError: Command '['/usr/bin/python', 'train.py']' returned non-zero exit status 1."
STORE = "torch.distributed.DistBackendError: [{0}] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value store by key '0', but store->get('0') got error: Connection reset by peer."

STRUCTURE = {
    "only the first attempt of a launcher that restarts": (
        STEPS + raised(2, "KeyError: 'labels'") + table(2) + "step 1 loss 2.0\nstep 2 loss 1.9\n" + raised(0, PEER) + raised(1, "torch.cuda.OutOfMemoryError: CUDA out of memory.") + table(0),
        "user_exception", 2, "KeyError",
    ),
    "a retry that helped is no error": (RETRYING + STEPS * 2 + raised(1, "ValueError: bad"), "user_exception", 1, "ValueError"),
    "a retry before a real error is no error": (RETRYING + raised(1, "ValueError: bad"), "user_exception", 1, "ValueError"),
    "a batch that was skipped for memory": (
        "CUDA out of memory. Tried to allocate 2 GiB: batch skipped\n" + STEPS * 2 + raised(3, "ZeroDivisionError: division by zero"),
        "user_exception", 3, "ZeroDivisionError",
    ),
    "an exception that was logged and survived": (
        raised(None, "ValueError: broken image") + STEPS * 2 + raised(1, "KeyError: 'x'"), "user_exception", 1, "KeyError",
    ),
    "an old Xid": (
        "[Mon Jan  5 07:00:00 2026] NVRM: Xid (PCI:0000:cb:00): 79, pid=1, GPU has fallen off the bus.\n"
        "[rank0]:[E105 12:00:00.9 ProcessGroupNCCL.cpp:1] [Rank 0] Some NCCL operations have failed or timed out.\n"
        + raised(0, "ValueError: bad"),
        "user_exception", 0, "ValueError",
    ),
    "an Xid that follows": (
        "[1.1] NVRM: Xid (PCI:0000:cb:00): 43, pid=1, Ch 8\n[1.2] NVRM: Xid (PCI:0000:cb:00): 45, pid=1, caused by previous Xid 43\n" + raised(0, "ValueError: bad"),
        "user_exception", 0, "ValueError",
    ),
    "an allocation of an impossible size": (
        raised(2, "RuntimeError: Tried to allocate more than 1EB memory.") + raised(1, "ValueError: bad"), "user_exception", 1, "ValueError",
    ),
    "who lost the store points to rank 0": (
        raised(None, "ValueError: bad") + raised(3, STORE.format(3)), "user_exception", 0, "ValueError",
    ),
    "a vague cause after an error": (
        raised(2, "ValueError: bad") + raised(0, "FileNotFoundError: [Errno 2] No such file or directory: '/w/out/last.tmp'"), "user_exception", 2, "ValueError",
    ),
    "what a rank says last": (
        raised(1, "KeyError: 'retried'") + raised(1, "ValueError: bad"), "user_exception", 1, "ValueError",
    ),
    "arguments": ("usage: train.py [-h]\ntrain.py: error: unrecognized arguments: --lrr\n" + table(1), "user_exception", 1, "unrecognized"),
    "a box around the traceback": (
        "╭───── Traceback (most recent call last) ─────╮\n│ /w/train.py:12 in main │\n│ ❱ 12 │   raise ValueError('CUDA out of memory') │\n╰─────╯\nKeyError: 'CUDA'\n" + table(0),
        "user_exception", 0, "KeyError",
    ),
    "a source line is no error": (
        raised(0, "ValueError: bad", line='    raise OSError("No space left on device")'), "user_exception", 0, "ValueError",
    ),
    "while cleaning up": (
        raised(None, "OSError: [Errno 28] No space left on device") + "\nDuring handling of the above exception, another exception occurred:\n\n"
        + raised(None, "RuntimeError: [enforce fail at inline_container.cc:337] . unexpected pos 1 vs 2") + table(1),
        "disk_full", 1, "Errno 28",
    ),
    "the last of those raised while handling": (
        raised(None, "KeyError: 'a'") + "\nDuring handling of the above exception, another exception occurred:\n\n" + raised(None, "ValueError: no a") + table(1),
        "user_exception", 1, "ValueError",
    ),
    "the cause that an error names": (
        raised(None, "KeyError: 'a'") + "\nThe above exception was the direct cause of the following exception:\n\n" + raised(None, "RuntimeError: loader failed") + table(1),
        "user_exception", 1, "KeyError",
    ),
    "DeepSpeed has no table": (
        STEPS + "[2025-01-01 10:00:00,1] [INFO] [launch.py:319:sigkill_handler] Killing subprocess 7\n[2025-01-01 10:00:01,1] [ERROR] [launch.py:325:sigkill_handler] ['python', '-u', 't.py'] exits with return code = -9\n",
        "sigkill_unknown", None, "return code = -9",
    ),
    "a spawned process": (
        STEPS + raised(None, "torch.multiprocessing.spawn.ProcessExitedException: process 1 terminated with signal SIGSEGV"), "segfault", None, "SIGSEGV",
    ),
    "a collective that others broke off is no cause": (
        STEPS + raised(0, "RuntimeError: something strange", "torch/distributed/distributed_c10d.py") + table(2, -9, [(0, 1)]), "sigkill_unknown", 2, "-9",
    ),
    "torchrun was stopped": (
        STEPS + "W1 torch/distributed/elastic/agent/server/api.py:719] Received 15 death signal, shutting down workers\n"
        + raised(None, "torch.distributed.elastic.multiprocessing.api.SignalException: Process 9 got signal: 15"),
        "sigterm_external", None, "Received 15",
    ),
    "who exited with 0 is not in the table": (
        STEPS + raised(3, PEER) + raised(1, PEER) + table(1, 1, [(0, -15), (3, -15)]), "uneven_data", 2, "Connection closed",
    ),
    "two that exited with 0": (
        STEPS + raised(3, PEER) + raised(0, PEER) + table(0, 1, [(3, 1)]), "uneven_data", None, "Connection closed",
    ),
    "NCCL's last error": (
        raised(1, "torch.distributed.DistBackendError: NCCL error in: x.cpp:1, invalid usage\nncclInvalidUsage: This usually reflects invalid usage.\nLast error:\nDuplicate GPU detected : rank 1 and rank 0 both on CUDA device 2000"),
        "duplicate_gpu", 1, "Duplicate GPU",
    ),
    "a panic of Rust": (
        STEPS + "\nthread '<unnamed>' (4121) panicked at tokenizers/src/tokenizer/mod.rs:744:9:\nindex out of bounds: the len is 3 but the index is 7\n" + raised(None, "pyo3_runtime.PanicException: index out of bounds: the len is 3 but the index is 7"),
        "user_exception", None, "panicked at tokenizers",
    ),
    "a panic of Go": ("panic: runtime error: index out of range [3] with length 3\n\ngoroutine 1 [running]:\nmain.main()\n\t/app/main.go:9 +0x1d\nexit status 2\n", "user_exception", None, "panic: runtime error"),
    "mpirun's last word": (
        STEPS + "Primary job  terminated normally, but 1 process returned\na non-zero exit code.\nmpirun noticed that process rank 1 with PID 0 on node n1 exited on signal 9 (Killed).\n",
        "sigkill_unknown", 1, "exited on signal 9",
    ),
    "srun's last word": (STEPS + raised(None, "KeyError: 'labels'") + "srun: error: n1: task 0: Exited with exit code 1\n", "user_exception", None, "KeyError"),
    "accelerate's last word": (STEPS + raised(None, "ValueError: bad") + raised(None, ACCELERATE, "accelerate"), "user_exception", None, "ValueError"),
    "accelerate's only word": (STEPS + raised(None, ACCELERATE, "accelerate"), "user_exception", None, "CalledProcessError"),
    "Lightning's last word": (
        STEPS + raised(1, "ValueError: bad") + "[rank: 1] Child process with PID 4126 terminated with code 1. Forcefully terminating all other processes to avoid zombies\n",
        "user_exception", 1, "ValueError",
    ),
    "a group in a group": (
        STEPS + '  + Exception Group Traceback (most recent call last):\n  |   File "/w/a.py", line 1, in <module>\n  | ExceptionGroup: outer (2 sub-exceptions)\n'
        '  +-+---------------- 1 ----------------\n    | Exception Group Traceback (most recent call last):\n    |   File "/w/a.py", line 9, in g\n    | ExceptionGroup: inner (1 sub-exception)\n'
        '    +-+---------------- 1 ----------------\n      | Traceback (most recent call last):\n      |   File "/w/data.py", line 7, in read\n      | ValueError: bad magic\n      +------------------------------------\n'
        "    +---------------- 2 ----------------\n    | OSError: [Errno 28] No space left on device\n    +------------------------------------\n",
        "user_exception", None, "ValueError: bad magic",
    ),
    "a child that was sent too little": (
        STEPS + raised(None, "EOFError: Ran out of input", "usr/lib/python3.11/multiprocessing/spawn.py") + raised(None, "AttributeError: Can't get local object 'main.<locals>.collate'"),
        "user_exception", None, "Can't get local object",
    ),
    "a traceback that a destructor leaves": (
        STEPS + "Exception ignored in: <function _MultiProcessingDataLoaderIter.__del__ at 0x7f>\n" + raised(None, "AssertionError: can only test a child process") + raised(None, "KeyError: 'labels'"),
        "user_exception", None, "KeyError",
    ),
    "what a compiler quotes": (
        STEPS + raised(None, "torch._dynamo.exc.BackendCompilerFailed: backend='inductor' raised:\nRuntimeError: Triton Error [CUDA]: device kernel image is invalid\n\nSet TORCH_LOGS for more"),
        "user_exception", None, "RuntimeError: Triton Error",
    ),
    "chatter before the error": (
        "E0000 00:00:1700000000.1 77 cuda_dnn.cc:8310] Unable to register cuDNN factory: Attempting to register factory for plugin cuDNN\nfatal: not a git repository (or any of the parent directories): .git\n"
        "ERROR: pip's dependency resolver does not currently take into account all the packages that are installed.\nA module that was compiled using NumPy 1.x cannot be run in\nNumPy 2.1.0 as it may crash.\n"
        "[W socket.cpp:697] [c10d] The client socket has failed to connect to [localhost]:29500 (errno: 97 - Address family not supported by protocol).\nbash: nvidia-smi: command not found\n"
        + raised(2, "ZeroDivisionError: division by zero"),
        "user_exception", 2, "ZeroDivisionError",
    ),
    "a command of the script": (
        STEPS + "rsync: connection unexpectedly ended\n" + raised(1, "subprocess.CalledProcessError: Command '['rsync', 'a', 'b']' returned non-zero exit status 12.") + raised(0, PEER), "user_exception", 1, "CalledProcessError",
    ),
    "a fake table": (
        raised(1, "ValueError: bad") + "[rank0]:   rank      : 0 (local_rank: 0)\n[rank0]:   exitcode  : -9 (pid: 1)\n", "user_exception", 1, "ValueError",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("log", "label", "rank", "words"), STRUCTURE.values(), ids=STRUCTURE)
def test_what_follows_from_what_decides(tmp_path, log, label, rank, words):
    """
    Neither the first nor the last nor the loudest line is taken for what it is not.
    """
    found = diagnose(tmp_path, log)

    assert (label, rank) == (found.label, found.rank), found
    assert words in found.primary_line


@pytest.mark.parametrize(("label", "log"), [pytest.param(*case, id=f"{n}-{case[0]}") for n, case in enumerate(CLASSES)])
def test_a_class_of_failures_is_named(tmp_path, label, log):
    """
    Whatever the rank, path or wording of a script: what the libraries and the kernel say has a name.
    """
    assert label == diagnose(tmp_path, log).label


def test_labels_that_are_promised_are_reached(tmp_path):
    """
    Between them, corpus and classes reach every label: a meaning that nothing leads to would be dead.
    """
    from tests.supervise.test_triage_corpus import CORPUS  # noqa: PLC0415  # data of the other module

    reached = {case["label"] for case in CORPUS} | {label for label, _ in CLASSES}

    assert set() == set(MEANINGS) - reached


def diagnose(tmp_path, text):
    log = tmp_path / "train.log"
    log.write_text(text)
    return first_error(log)
