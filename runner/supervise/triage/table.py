"""
Which line says what: one row for a class of errors, in the order in which rows are tried.

A row recognises what a library, a driver or the kernel prints, never what a script's author
wrote. `weight` says how exactly the line names the cause: 3 the cause itself, 2 its class,
1 a consequence that has no better line.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum
from typing import Final


class Kind(IntEnum):
    """How near a line is to the cause; the smaller wins."""

    HOST = 0  # the kernel, the container engine, the package manager or a probe says it
    CAUSE = 1  # a rank says it, and we know what it means
    ERROR = 2  # an exception that no row knows
    DEATH = 3  # a rank ended without a word; the launcher says how
    CALLED = 4  # a process that a rank started failed; only that one knows why
    HINT = 5  # a warning that names a cause, and ended nothing
    WAIT = 6  # somebody waited for a rank that did not come
    ECHO = 7  # follows from another error; never the cause


@dataclass(frozen=True, slots=True)
class Row:
    pattern: re.Pattern[str]
    label: str
    kind: Kind
    weight: int


@dataclass(frozen=True, slots=True)
class Context:
    """An error whose words alone mislead: where it was raised says what it is."""

    frames: re.Pattern[str]
    words: re.Pattern[str]
    label: str
    kind: Kind
    weight: int


# What a shell says of a command that it could not run: `run.sh: line 3: …`, `sh: 3: …`, `bash: …`.
SHELL: Final = re.compile(
    r"^(?:-?(?:\S*/)?(?:ba|da|z|k)?sh:(?:\d+:)? (?:(?:line )?\d+: )?|\S+: (?:line )?\d+: |(?:\S*/)?env: )"
)


_ERRNO: Final = "(?:Permission denied|No such file or directory|Not a directory|Is a directory|File exists|Argument list too long|Exec format error|required file not found)"


def _row(label: str, pattern: str, weight: int = 2, kind: Kind = Kind.CAUSE) -> Row:
    return Row(re.compile(pattern), label, kind, weight)


def _host(label: str, pattern: str, weight: int = 3) -> Row:
    return _row(label, pattern, weight, Kind.HOST)


# Printed by the launcher, and in good runs too: says nothing about a cause.
NOISE: Final = re.compile(
    r"ChildFailedError|SignalException: Process \d+ got signal: (?!1\b|2\b|3\b|15\b)|closing signal SIG|"
    r"exitcode\s*: -15|exitcode\s*: -6|signal_handler|Killing subprocess|"
    r"OMP_NUM_THREADS environment variable for each|FutureWarning|DeprecationWarning|ResourceWarning|"
    r"^\s+warnings\.warn\(|pip's dependency resolver does not currently|Forcefully terminating all other processes|"
    r"has NOT been destroyed|destroy_process_group|leaked semaphore|"
    r"^(?:future|task|handle): <(?:Task|Future|_GatheringFuture|Handle|TimerHandle)\b|"
    r"^CUDA kernel errors might be asynchronously|For debugging consider passing|TORCH_USE_CUDA_DSA|"
    r"oom_reaper: reaped|SXid .*Non-fatal|^(?!.*Weights only load failed).*PyTorch 2\.6, we changed the default value of the `weights_only`|"
    r"Xid \(PCI:[^)]*\): (?:43|45|63|73|92|121|156),|"
    r"Xid \(PCI:[^)]*\): 154,(?!.*(?:Reset Required|Drain and Reset|[Rr]eboot))"
)

# What a script says of itself when it ends itself: its author's words are all there is.
OWN_WORDS: Final = frozenset({"nan_loss"})

# Printed by those who live on and by those who clean up, because of an error elsewhere.
ECHO: Final = re.compile(
    r"exits with return code = (?!-(?:4|7|8|9|11)\b)|NCCL communicator was aborted|"
    r"Some NCCL operations have failed or timed out|taking the entire process down|last enqueued (?:NCCL )?work|"
    r"watchdog thread terminated with exception|preparing to dump debug info|detected by watchdog|"
    r"terminate called (?:after|without)|^\s+what\(\):|Fatal Python error: Aborted|"
    r"ncclRemoteError|remote process exited or there was a network error|"
    r"onnection closed by (?:remote )?peer|Connection closed by localRank|onnection reset by peer.*(?:GLHF|gloo)|"
    r"pair\.cc:\d+\]|ncclInternalError|internal error - please report|Socket recv failed while polling|"
    r"NCCL error in: |ncclUnhandledCudaError|ncclInvalidUsage: |ncclSystemError: |Failed to execute operation|"
    r"Call to (?:recv|send) (?:from|to) .* failed|unable to (?:receive|send) .*peer|"
    r"store->(?:get|set|wait|add)\(.*\) got error: (?!wait timeout|Socket Timeout)|"
    r'Failed to check the "should dump" flag|sendBytes|recvBytes|recvValue|Broken pipe|recvVector|is still running|'
    r"DataLoader worker \(pid.*exited unexpectedly|killed by signal: Terminated|background workers are no longer|"
    r"Caught \w+ in (?:DataLoader worker|pin memory|replica)|unexpected pos \d+ vs|"
    r"^KeyboardInterrupt\b|^SystemExit|^(?:\w+\.)*(?:ProcessExitedException|ProcessRaisedException)|^GeneratorExit|"
    r"[Tt]ried to allocate (?:more than )?1EB|Unable to locate package|Unable to acquire the dpkg frontend lock|"
    r"^(?:\w+\.)*(?:Base)?ExceptionGroup: .* sub-exceptions?\)|"
    r"srun: error: .*(?:Exited with exit code|Terminated)|Primary job +terminated normally|"
    r"unhandled system error|unhandled cuda error|is another process using it|returned non-zero exit status"
)

WATCHDOG: Final = re.compile(
    r"Watchdog caught collective operation timeout: \w+\((?:SeqNum=(?P<seq>\d+))?(?:, )?(?:OpType=(?P<op>\w+))?"
    r"(?:, NumelIn=(?P<numel>\d+))?.*?(?:Timeout\(ms\)=(?P<limit>\d+))?\)(?: ran for (?P<ran>\d+) milliseconds)?"
)
GLOO_WAIT: Final = re.compile(r"Timed out waiting \d+ms for (?:recv|send) operation")
HEARTBEAT: Final = re.compile(r"Heartbeat monitor timed out|watchdog got stuck for \d+ seconds")
STORE_WAIT: Final = re.compile(
    r"waitForInput: .*(?:likely a timeout|timed out after)|got error: (?:wait timeout|Socket Timeout)|"
    r"failed to pass monitoredBarrier|wait timeout after \d+ms"
)
WAITS: Final = (
    ("watchdog", WATCHDOG),
    ("gloo", GLOO_WAIT),
    ("heartbeat", HEARTBEAT),
    ("store", STORE_WAIT),
)


def _context(label: str, frames: str, words: str, weight: int = 2, kind: Kind = Kind.CAUSE) -> Context:
    return Context(re.compile(frames), re.compile(words), label, kind, weight)


CONTEXTS: Final = (
    _context("", r"multiprocessing/(?:spawn|forkserver)\.py", r"^EOFError|UnpicklingError", 0, Kind.ECHO),  # of a child whose parent failed to send it
    _context("checkpoint_corrupt", r"torch/serialization\.py", r"^OSError: \[Errno 22\]|^EOFError"),  # of a zip file without its end, of an empty file
    _context("port_in_use", r"/accelerate/", r"^ConnectionError: .*\bport\b"),  # it is taken, on this machine
    _context("network_reset", r"/(?:urllib3?|http|requests|httpx2?|httpcore2?|aiohttp|botocore|huggingface_hub)/", r"gaierror|Name or service not known|^OSError: \[Errno 1\d\d\]|^(?:socket\.)?timeout\b|^TimeoutError", 1),
)  # fmt: skip

CALLED: Final = re.compile(r"CalledProcessError: Command .* returned non-zero exit status")

_XID: Final = r"NVRM: Xid \(PCI:[^)]*\): "

ROWS: Final = (
    # ---- the kernel
    _host("xid79_fallen_off_bus", _XID + r"79,|[Ff]allen off the bus"),
    _host("xid119_gsp", _XID + r"(?:119|120|46|62|109|158),"),
    _host("gpu_hbm_failing", _XID + r"64,|[Rr]emapping [Ff]ailure [Oo]ccurred\s*:\s*Yes|row remapp\w* fail"),
    _host("gpu_ecc", _XID + r"(?:48|95|140|171|172|94),"),
    _host("nvlink5_fault", _XID + r"(?:14[4-9]|150|155|157),(?!.*[Nn]on-?fatal)|" + _XID + r"136,"),
    _host("xid74_nvlink", _XID + r"74,|SXid \(PCI:[^)]*\): \d+, Fatal", 2),
    _host("gpu_ecc", _XID + r"154,", 1),
    _host("cuda_unknown_999", _XID + r"143,"),
    _row("cuda_illegal_access", _XID + r"(?:13|31|32|11|25|69|80|137),"),
    _host("disk_io_error", r"I/O error,? (?:dev|on|while)|blk_update_request: .*I/O error|EXT4-fs error|XFS .*(?:I/O|metadata) error|nvme\w* .*(?:controller is down|timeout, (?:aborting|reset))"),
    _host("host_oom", r"(?:Out of memory|Memory cgroup out of memory|oom-kill).*?[Kk]ill(?:ed)? process|invoked oom-killer|oom_kill_process|oom_kill [1-9]", 2),
    # ---- the container engine, the package manager, probes
    _host("docker_no_gpu_runtime", r"could not select device driver|nknown or invalid runtime name|unknown runtime specified|nvidia-container-cli: (?!requirement|initialization error: nvml error: driver/library)"),
    _host("driver_too_old", r"nvidia-container-cli: requirement error|unsatisfied condition: cuda"),
    _host("driver_library_mismatch", r"(?i)driver/library version mismatch"),
    _host("container_lost_gpu", r"Failed to initialize NVML: Unknown Error", 2),
    _host("fabric_manager_failed", r"(?i)nvidia-fabricmanager\S* .*fail|fabric ?manager.*(?:failed|don't match|mismatch|exit-code)|Fabric\b[^:]*State\s*:\s*Fail|Fabric\b.*Status\s*:\s*(?!Success|N/A|\s)"),
    _host("apt_lock", r"Could not get lock /var/(?:lib|cache)/|Waiting for cache lock|dpkg was interrupted"),
    _host("apt_bad_signature", r"(?i)NO_PUBKEY|(?:is|are) not signed|signatures? (?:couldn't be verified|(?:were|was) invalid)|EXPKEYSIG|BADSIG|At least one invalid signature"),
    _host("clock_skew", r"Release file .* is not (?:yet valid|valid yet)"),
    _host("apt_mirror", r"[WE]: Failed to fetch|Hash Sum mismatch|File has unexpected size|index files failed to download|Unable to fetch some archives|Temporary failure resolving"),
    # ---- processes that a rank started; tried before ECHO
    _row("user_exception", CALLED.pattern + r"|DataLoader worker \(pid\(?s?\)? \d+\) exited unexpectedly with exit code [1-9]", 1, Kind.CALLED),
    # ---- data and model access
    _row("clock_skew", r"RequestTimeTooSkewed|certificate is not yet valid|Token used too early|clock skew", 3),
    _row("s3_token_expired", r"ExpiredToken|security token included in the request is expired|token has expired|TokenRefreshRequired", 3),
    _row("s3_no_bucket", r"NoSuchBucket|specified bucket does not exist|PermanentRedirect", 3),
    _row("s3_bad_key", r"InvalidAccessKeyId|SignatureDoesNotMatch|Unable to locate credentials|NoCredentialsError|PartialCredentialsError|InvalidToken\b|\((?:AccessDenied|403)\) when calling|InvalidClientTokenId|error \(Forbidden\)", 3),
    _row("s3_slowdown", r"\bSlowDown\b|reduce your request rate|\(Throttling\w*\)|TooManyRequestsException|RequestLimitExceeded", 3),
    _row("s3_entity_too_large", r"EntityTooLarge|exceeds the maximum allowed (?:object )?size|Part number must be an integer between 1 and 10000", 3),
    _row("hf_rate_limit_429", r"429 (?:Client Error|Too Many)|Too Many Requests|RateLimitError", 3),
    _row("hf_offline_not_cached", r"OfflineModeIsEnabled|HF_HUB_OFFLINE|TRANSFORMERS_OFFLINE|LocalEntryNotFoundError.*(?:offline|disabled)|outgoing traffic has been disabled|^(?!.*how (?:you can|to) run the library in).*offline mode", 3),
    _row("hf_token_401", r"401 Client Error|401 Unauthorized|Invalid user(?:name or password| token)|Invalid credentials in Authorization|must be authenticated|have a valid token|LocalTokenNotFoundError|Token is required", 3),
    _row("hf_gated_403", r"GatedRepoError|403 Client Error|403 Forbidden|not in the authorized list|Cannot access gated repo|awaiting a review|trying to access a gated repo", 3),
    _row("network_reset", r"error happened while trying to locate the file on the Hub|couldn't connect to '?https?://", 1),
    _row("hf_offline_not_cached", r"LocalEntryNotFoundError|couldn't find (?:it|them) in the cached files|cannot find the (?:requested|appropriate) (?:files|snapshot).*(?:cache|disk)", 1),
    _row("wandb_no_key", r"api_key not configured|wandb\S* .*No API key configured|WANDB_API_KEY .*not set", 3),
    _row("wandb_prompt", r"wandb: (?:\(\d\)|Enter your choice|Paste an API key)|wandb: You can find your API key", 1, Kind.HINT),
    # ---- devices and drivers
    _row("gpu_ecc", r"uncorrectable ECC error|CUDA_ERROR_ECC_UNCORRECTABLE|ECC error encountered", 3),
    _row("xid74_nvlink", r"uncorrectable NVLink error", 3),
    _row("fabric_manager_down", r"system not yet initialized|error \(?802\)?|Error 802", 3),
    _row("driver_too_old_forward_compat", r"forward compatibility was attempted|Error 804|error \(804\)", 3),
    _row("driver_too_old", r"driver on your system is too old|CUDA driver version is insufficient", 3),
    _row("gpu_busy", r"CUDA-capable device\(s\) is/are busy|all CUDA-capable devices are busy|CUDA error: device busy|exclusive[- ]process", 3),
    _row("wrong_arch", r"is not compatible with the current PyTorch installation|no kernel image is available|sm_\d+\w?'? is not (?:supported|compatible|defined)|Unsupported gpu architecture|only supports? (?:Ampere|Hopper) GPUs|Torch not compiled with CUDA enabled|doesn't have NCCL built in|compiled without GPU support", 3),
    _row("docker_no_gpu_runtime", r"Found no NVIDIA driver|ProcessGroupNCCL is only supported with GPUs, no GPUs found", 2),
    _row("docker_no_gpu_runtime", r"No CUDA GPUs are available", 1),
    _row("duplicate_gpu", r"Duplicate GPU detected", 3),
    _row("wrong_nproc", r"invalid device ordinal|num_gpus.*but only \d+ (?:are|is) available|nproc.per.node.*(?:exceed|greater|more)", 3),
    _row("cuda_unknown_999", r"CUDA unknown error|cudaErrorUnknown|Error 999|error \(999\)|CUDA driver initialization failed", 3),
    _row("cuda_in_forked_worker", r"Cannot re-initialize CUDA in forked subprocess", 3),
    _row("device_side_assert", r"\.cuh?:\d+: .*block: \[.*Assertion|device-side assert", 3),
    _row("fabric_nvls", r"nvls\.cc.*NCCL WARN|NVLS|[Mm]ulticast .*(?:fail|bind)|(?:fail|bind).*[Mm]ulticast", 3),
    _row("cuda_illegal_access_nccl", r"(?:NCCL WARN .*|^Cuda failure .*)illegal memory access", 3),
    _row("cuda_oom_nccl", r"(?:NCCL WARN .*|^Cuda failure .*)out of memory|Failed to CUDA (?:calloc|malloc|host alloc)", 3),
    _row("cuda_illegal_access", r"illegal memory access|misaligned address|an illegal instruction|unspecified launch failure|CUDA_ERROR_ILLEGAL_ADDRESS", 2),
    _row("cuda_oom", r"CUDA out of memory|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED|hipErrorOutOfMemory|OutOfMemoryError|CUDA_ERROR_OUT_OF_MEMORY", 3),
    _row("container_lost_gpu", r"CUDA error: unknown error", 1),
    # ---- shared memory, disk, limits
    _row("shm_leaked_segments", r"\bdev/shm\b.*(?:leaked|stale|left ?over|older than|previous)|(?:leaked|stale|left ?over).*/dev/shm", 3),
    _row("shm_too_small", r"posix_fallocate failed|creating shared memory segment|insufficient shared memory|out of shared memory|unable to (?:open|allocate|resize|write) (?:shared memory|.*torch_\d+)|shm.*No space left|No space left.*(?:shm|torch_\d+_)|killed by signal: Bus error|Error while attaching to shared memory", 3),
    _row("disk_quota", r"Disk quota exceeded|\[Errno 122\]|os error 122", 3),
    _row("disk_full", r"No space left on device|one more checkpoint needs .* are free|\[Errno 28\]|os error 28|ENOSPC", 3),
    _row("disk_full", r"PytorchStreamWriter failed writing|basic_ios::clear: iostream error|inline_container\.cc:\d+\] \. unexpected pos \d+ vs", 1),  # of torch.save, which does not ask why
    _row("disk_io_error", r"\[Errno 5\]|Input/output error|os error 5\)|\[Errno 30\] Read-only|Remote I/O error|\[Errno 121\]", 3),
    _row("too_many_open_files", r"Too many open files|\[Errno 24\]|received 0 items of ancdata|os error 24\)", 3),
    _row("no_c_compiler", r"(?:[Nn]o such file|Permission denied|[Cc]annot find|not found).*\bptxas|\bptxas\b.*(?:not found|No such file)", 3),
    _row("triton_cache_shared_fs", r"\[Errno (?:116|26|39)\].*(?:triton|inductor|cache)|(?:triton|inductor|torchinductor).*(?:Stale file handle|Text file busy|Directory not empty|is on (?:an? )?(?:NFS|network))", 3),
    _row("triton_cache_race", r"(?:FileNotFoundError|PermissionError|FileExistsError|OSError|ImportError).*(?:torchinductor_|/triton/|\.triton/|/inductor)", 3),
    _row("no_c_compiler", r"Failed to find C compiler|C compiler cannot create|(?:gcc|cc|g\+\+|c\+\+|nvcc|ninja): (?:command )?not found|command '?\S*(?:gcc|cc|g\+\+|nvcc)'? failed|Ninja is required|No such file or directory: '\S*(?:gcc|cc|g\+\+|nvcc|ninja)'|[Nn]o (?:working )?C\+?\+? compiler|InvalidCxxCompiler|MissingCUDAException|CUDA_HOME (?:environment variable is not set|does not exist)|Python\.h: No such file", 3),
    _row("no_c_compiler", r"Error building extension '", 1),
    _row("thread_limit", r"can't start new thread|pthread_create failed|Thread creation failed|\[Errno 11\] Resource temporarily|fork: (?:retry: )?Resource temporarily|pthread_create.*Resource temporarily|RLIMIT_NPROC", 3),
    _row("library_mismatch", r"undefined symbol|version `\S+' not found|cannot open shared object file|version mismatch.*(?:cudnn|NCCL|library)|symbol lookup error|binary incompatibility|compiled (?:against|using) (?!NumPy 1\.x).*(?:incompatible|NumPy|different)|CUDAMismatchException|OMP: Error #15|MKL_THREADING_LAYER=\w+ is incompatible|Intel MKL FATAL ERROR", 3),
    _row("library_mismatch", r"compiled using NumPy 1\.x cannot be run in", 1, Kind.HINT),
    # ---- checkpoints and weights
    _row("file_is_lfs_pointer_or_html", r"Unsupported operand \d+\b|invalid load key, '[v<]'|HeaderTooLarge|deserializing header: header too large|git-lfs\.github\.com|looks like .*(?:HTML|LFS)", 3),
    _row("weights_only", r"Unsupported global: GLOBAL", 3),
    _row("weights_only", r"Weights only load failed", 2),
    _row("checkpoint_corrupt", r"PytorchStreamReader failed|invalid header or archive is corrupted|file might be corrupted|unexpected EOF, expected|pickle data was truncated|Ran out of input|invalid load key|not a zip file|failed finding central directory|BadZipFile|storage has wrong byte size", 3),
    _row("download_truncated", r"MetadataIncompleteBuffer|InvalidHeader(?:Length|Deserialization)?|deserializing header: |Consistency check failed|IncompleteMetadata|file should be of size \d+ but has size", 3),
    _row("ckpt_zero3_empty", r"(?:size mismatch|copying a param).*torch\.Size\(\[0\]\)", 3),
    _row("state_dict_mismatch", r"loading state_dict for|(?:Missing|Unexpected) key\(s\) in state_dict|size mismatch for \S+: copying a param|optimizer's size|state dict contains a (?:parameter group|different number)|different number of parameter groups", 2),
    # ---- launcher and collectives
    _row("launcher_arguments", r"^(?:run|runner|launch)\.py: error: (?:ambiguous option: |the following arguments are required: (?:training|user)_script|argument \S*--?(?:nproc|n?nodes|log.dir|redirects|tee|max.restarts|rdzv|num_|hostfile))", 3),
    _row("port_in_use", r"EADDRINUSE|[Aa]ddress already in use|\[Errno 98\]", 3),
    _row("rendezvous_bad_hostname", r"gaierror|Name or service not known|nodename nor servname|gai error|[Ff]ailed to resolve host|No address associated with hostname", 2),
    _row("rendezvous_timeout", r"clients joined|RendezvousTimeoutError|RendezvousConnectionError|waiting for clients", 3),
    _row("ddp_model_mismatch", r"DDP expects same model across all ranks|appears not to match (?:sizes|strides) .*rank 0", 3),
    _row("ddp_unused_parameters", r"Expected to have finished reduction in the prior iteration|parameters that were not used in producing loss|marked (?:as )?ready twice", 3),
    _row("collective_mismatch", r"Detected mismatch between collectives|[Mm]ismatched? collective|collective.*shapes? (?:are )?not match|op\.preamble\.length <= op\.nbytes", 3),
    _row("nccl_network", r"NCCL WARN .*(?:no socket interface|No interface found|NET/IB|ibv_|Connection refused|No route to host|[Nn]etwork is unreachable|connect (?:to|returned)|Connection timed out)|Bootstrap : no socket interface|ncclSystemError.*socket|unable to find any (?:usable )?interface", 2),
    # ---- numerics
    _row("fp16_loss_scale_exhausted", r"loss scale already at minimum|Minimum loss scale reached|minimum loss scale .*(?:reached|exhaust)", 3),
    _row("nan_one_rank_skips_collective", r"(?i)\b(?:nan|non-?finite|inf)\b.*\bskip(?:ping|ped)?\b|\bskip(?:ping|ped)?\b.*\b(?:nan|non-?finite)\b", 1, Kind.HINT),
    _row("nan_loss", r"(?i)\bloss(?: value)? (?:is|became|=|:) ?(?:nan|inf|non-?finite).*(?:stop|abort|exit|halt|terminat)|(?i:FloatingPointError|(?:Error|Exception): .*\b(?:loss|grad\w*)\b.*\b(?:nan|non-?finite|infinite)\b|(?:Error|Exception): .*\b(?:nan|non-?finite)\b.*\b(?:loss|grad\w*))", 3),
    # ---- memory of the host
    _row("host_oom_worker", r"DataLoader worker .*killed by signal: Killed", 3),
    _row("host_oom", r"DefaultCPUAllocator|\[Errno 12\]|Cannot allocate memory|^MemoryError\b|std::bad_alloc|numpy\S*MemoryError|Unable to allocate \S+ \w?iB|^memory allocation of \d+ bytes failed|Detected \d+ oom[_-]kill", 3),
    # ---- processes
    _row("segfault", r"Fatal Python error: (?!Aborted)|killed by signal: Segmentation fault|Segmentation fault(?: \(core dumped\))?|double free or corruption|corrupted size vs|malloc\(\): |(?:free|munmap_chunk)\(\): invalid|stack smashing detected|Illegal instruction(?: \(core dumped\))?|Aborted \(core dumped\)|Speicherzugriffsfehler|Erreur de segmentation|Violación de segmento|Errore di segmentazione", 2),
    _row("sighup", r"Received 1 death signal|got signal: 1\b", 1),
    _row("sigterm_external", r"Received (?:2|3|15) death signal|got signal: (?:2|3|15)\b", 1),
    # ---- Python's own
    _row("missing_module", r"ModuleNotFoundError|ImportError: (?:No module named|.*(?:not installed|doesn't seem to be installed|pip install|not found in your environment))|cannot import name|Cannot find a working triton installation|No matching distribution found|Could not find a version that satisfies", 2),
    _row("missing_module", rf"(?:: command not found|: \d+: .*: not found)$|{SHELL.pattern}.*: not found$|^zsh:\d*:? command not found: |^(?:\S*/)?env: .*: No such file or directory$", 1, Kind.HINT),
    _row("user_exception", rf"{SHELL.pattern}(?:.*: {_ERRNO}|.*can't cd to \S.*)$|^[a-z][\w.+-]*: .*: {_ERRNO}$|^zsh:\d*:? (?:permission denied|no such file or directory|exec format error): ", 1, Kind.HINT),
    _row("torch_extensions_lock", r"torch_extensions/\S*lock\b", 3, Kind.HOST),
    _row("tokenizers_fork_deadlock", r"The current process just got forked", 1, Kind.HINT),
    _row("dataset_missing", r"FileNotFoundError|NotADirectoryError|DatasetNotFoundError|DataFilesNotFoundError", 1),
    _row("network_reset", r"ConnectionResetError|Connection aborted|RemoteDisconnected|ReadTimeout|ConnectTimeout|ConnectionError\b|Max retries exceeded|NameResolutionError|Temporary failure in name resolution|IncompleteRead|ChunkedEncodingError|EndpointConnectionError|ProtocolError|SSLError|\b(?:httpx|httpcore)\d?\.(?:Connect|Read|Write|Pool|RemoteProtocol)\w*|ServerDisconnected|ClientPayloadError|ClientConnector\w*Error|urlopen error|Could not resolve host|NewConnectionError|Data processing error: |Transport endpoint is not connected|Stale file handle|\[Errno 1(?:01|03|10|13)\]|50[0234] (?:Server Error|Bad Gateway|Service)|Connection reset by peer|curl: \(\d+\)|fetch-pack: unexpected disconnect", 1),
)  # fmt: skip

# what lines tell beside errors: it makes a label more exact
SIGNS: Final = {
    "p2p": re.compile(r"via P2P|P2P/|p2p\.cc|P2P Chunksize"),
    "acs": re.compile(r"ReqRedir\+"),
    "nvlink": re.compile(r"\bNV\d{1,2}\b"),
    "host_memory": re.compile(r"(?i)cpu rss|\brss\b|CPU Virtual Memory|\bRAM\b|host memory|OOMKilled=true|oom_kill [1-9]"),
    "kernel_oom": re.compile(r"(?i)out of memory: kill|invoked oom-killer|OOMKilled=true|oom_kill [1-9]"),
    "preparing": re.compile(r"(?i)\b(?:tokenizing|pre-?processing|grouping texts|packing|building (?:index|dataset|cache))\b|\b(?:map|filter|generating \w+ split)\b.*(?:\d%|examples/s)"),
    "stall": re.compile(r"(?i)no (?:output|progress|step\w*|log\w*|line\w*)\b.*\b(?:for|since|in)\b|\bstall|\bhangs?\b|waits? (?:for|on) (?:stdin|a prompt)"),
    "busy_cards": re.compile(r"(?i)(?:util|use|usage)\w*\W{0,3}(?:100(?:\s?%)?[/, ]*)+"),
    "clock": re.compile(r"(?i)(?:system clock|chronyd?|timesyncd|ntpd?)\b.*(?:wrong|step|jump|adjust|chang|forward|backward|offset)|time jump"),
    "no_xid": re.compile(r"(?i)no (?:new )?xid|dmesg\b.*(?:clean|empty|nothing)"),
    "bad_card": re.compile(r"Xid \(PCI:[^)]*\): (?:92|63|48|64|94|95),|(?i:(?:volatile|aggregate|uncorrect\w+)[^:]*ecc[^:]*:\s*[1-9])|(?i:ecc errors?\W+[1-9]\d*)|(?i:remapped rows.*[1-9])"),
    "shm_leftovers": re.compile(r"\bdev/shm\b.*(?:nccl-|torch_|sem\.|files?\b|segments?\b).*|(?:leaked|left ?over|stale|orphan)\w* .*(?:shm|shared memory|segment)"),
    "nan": re.compile(r"(?i)\bloss\w*\W{0,4}nan\b|\bnan\b.*(?:loss|grad|step|batch)|grad_?norm\W{0,4}(?:nan|inf)\b"),
}  # fmt: skip
