"""
What each label means: its category, what happened, what to do, and what the runner does.

The set of labels is closed. `user_exception` and `unknown` are the honest answers where
nothing else fits. All words are ours: no text of a log or of a thread is ever shown as advice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from runner.facts import Decision

_RESUME: Final = Decision.RESUME
_AS_IS: Final = Decision.RETRY_AS_IS
_ENV: Final = Decision.RETRY_ENV
_USER: Final = Decision.GIVE_UP_USER
_MACHINE: Final = Decision.GIVE_UP_MACHINE

_NO_P2P: Final = {"NCCL_P2P_DISABLE": "1"}
_OWN_CACHES: Final = {
    "TRITON_CACHE_DIR": "/tmp/triton-$LOCAL_RANK",  # noqa: S108  # each rank's own, on a local disk
    "TORCHINDUCTOR_CACHE_DIR": "/tmp/inductor-$LOCAL_RANK",  # noqa: S108  # the same
}
_OTHER_SERVER: Final = "leave this server; the next one resumes from the checkpoint"


@dataclass(frozen=True, slots=True)
class Meaning:
    """`env` is the one change that a retry makes; where it is empty, `remedy` says what changes."""

    category: str
    decision: Decision
    cause: str
    remedy: str
    env: Mapping[str, str] = field(default_factory=dict)


def _in(
    category: str, **labels: tuple[Decision, str, str] | tuple[Decision, str, str, dict[str, str]]
) -> dict[str, Meaning]:
    return {label: Meaning(category, *told) for label, told in labels.items()}


MEANINGS: Final[Mapping[str, Meaning]] = MappingProxyType(
    {
        **_in(
            "checkpoint",
            checkpoint_corrupt=(
                _RESUME,
                "a checkpoint file is cut short or damaged",
                "resume from the newest checkpoint that verifies; check for a full disk",
            ),
            ckpt_zero3_empty=(
                _USER,
                "the checkpoint holds empty tensors: ZeRO-3 saved its placeholders instead of gathered weights",
                "gather the weights when saving (stage3_gather_16bit_weights_on_model_save), or convert the sharded checkpoint",
            ),
            download_truncated=(
                _ENV,
                "a weight file was only partly downloaded",
                "delete the file from the cache and download it again",
            ),
            file_is_lfs_pointer_or_html=(
                _USER,
                "the file is not a checkpoint but a Git LFS pointer or an HTML page",
                "download the real file; no loading option helps",
            ),
            state_dict_mismatch=(
                _USER,
                "the checkpoint belongs to another model: names or shapes of its parameters differ",
                "load it with the configuration it was written with, or strip the wrapper's prefix from its keys",
            ),
            weights_only=(
                _ENV,
                "the checkpoint holds Python objects, which torch 2.6 and newer refuse to load by default",
                "allow it for files that this job wrote itself",
                {"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"},
            ),
        ),
        **_in(
            "container",
            container_lost_gpu=(
                _RESUME,
                "the container lost its right to use the cards, as happens when systemd on the host reloads",
                "start a fresh container and resume; if it happens again, leave this server",
            ),
        ),
        **_in(
            "credentials",
            hf_gated_403=(
                _USER,
                "the token is valid, but its account may not read this repository",
                "ask for access on the model's page, with the account that owns the token",
            ),
            hf_token_401=(_USER, "the Hugging Face token is missing or not valid", "set a valid HF_TOKEN in secrets"),
            s3_bad_key=(
                _USER,
                "the object store refuses the key",
                "check access key, secret, endpoint and the key's rights",
            ),
            s3_token_expired=(
                _USER,
                "the temporary credentials of the object store have expired",
                "use credentials that outlive the job, then start it again",
            ),
            wandb_no_key=(
                _ENV,
                "there is no Weights & Biases key on this server",
                "log offline, or put WANDB_API_KEY into secrets",
                {"WANDB_MODE": "offline"},
            ),
        ),
        **_in(
            "data",
            dataset_missing=(
                _USER,
                "a file that the script reads is not on this server",
                "fetch the data before training (`data`), or correct the path",
            ),
        ),
        **_in(
            "disk",
            disk_full=(
                _USER,
                "the disk is full",
                "keep fewer checkpoints, clear caches, or take a server with a larger disk",
            ),
            disk_quota=(
                _USER,
                "the volume's quota is used up, though the disk may show free space",
                "free space on the volume or raise its quota",
            ),
        ),
        **_in(
            "environment",
            library_mismatch=(
                _ENV,
                "a library was found that does not match the one it was built against",
                "start without a foreign LD_LIBRARY_PATH; keep only one build of each CUDA library",
                {"LD_LIBRARY_PATH": ""},
            ),
            no_c_compiler=(
                _ENV,
                "the image has no C compiler or build tool, which compiled kernels need",
                "install build-essential in setup",
            ),
            thread_limit=(
                _ENV,
                "the limit of threads or processes is used up",
                "use fewer threads in each process",
                {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            ),
            too_many_open_files=(
                _ENV,
                "the limit of open files is used up",
                "raise it (ulimit -n 65535), or share tensors through the file system",
            ),
            triton_cache_race=(
                _ENV,
                "ranks compiled into one cache folder and overwrote each other's files",
                "give each rank a cache of its own",
                _OWN_CACHES,
            ),
            triton_cache_shared_fs=(
                _ENV,
                "the cache of compiled kernels is on a shared file system that does not keep up",
                "put the cache on a local disk",
                _OWN_CACHES,
            ),
            wrong_arch=(
                _USER,
                "this build of torch, or of an extension, has no code for these cards",
                "install a build for the cards' architecture",
            ),
        ),
        **_in(
            "gpu_memory",
            cuda_oom=(
                _USER,
                "a card ran out of memory, and hardly any of it lies unused",
                "lower the batch size or length, or checkpoint activations",
            ),
            cuda_oom_fragmentation=(
                _ENV,
                "a card ran out of memory while more than was asked for lies reserved but unused",
                "let segments grow, which avoids the fragments",
                {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
            ),
            cuda_oom_nccl=(
                _USER,
                "a card had no memory left for NCCL's own buffers, which are outside torch's pool",
                "leave more memory free: a smaller batch, or a lower memory fraction",
            ),
            gpu_occupied=(
                _AS_IS,
                "another process holds most of the card's memory",
                "end left-over processes and start again; if they are not yours, leave this server",
            ),
        ),
        **_in(
            "host_memory",
            host_oom=(
                _RESUME,
                "the kernel killed a process for memory",
                "use fewer data workers and less offload, or take a server with more memory",
            ),
            host_oom_leak=(
                _RESUME,
                "host memory grew with the steps until the kernel killed a process: a leak",
                "resume; then find what is kept per step, often in the data set",
            ),
            host_oom_worker=(
                _RESUME,
                "the kernel killed a data worker for memory",
                "use fewer data workers and a smaller prefetch",
            ),
        ),
        **_in(
            "launcher",
            port_in_use=(
                _ENV,
                "the rendezvous port is taken, usually by an earlier attempt or a second job",
                "end what is left over and take a free port",
                {"MASTER_PORT": "<free port>"},
            ),
            rendezvous_bad_hostname=(
                _ENV,
                "the rendezvous address cannot be resolved",
                "use the loopback address on a single server",
                {"MASTER_ADDR": "127.0.0.1"},
            ),
            rendezvous_timeout=(
                _USER,
                "not all processes arrived at the start; the one that reports this only waited",
                "find out why the others did not start: check their number, their resources, their own logs",
            ),
        ),
        **_in(
            "machine",
            clock_skew=(_MACHINE, "this server's clock is wrong", _OTHER_SERVER),
            cuda_unknown_999=(_MACHINE, "CUDA cannot start here", _OTHER_SERVER),
            disk_io_error=(_MACHINE, "this server's disk returns errors", _OTHER_SERVER),
            docker_no_gpu_runtime=(_MACHINE, "Docker on this server cannot hand out cards", _OTHER_SERVER),
            driver_library_mismatch=(
                _MACHINE,
                "the driver's files were updated while the old driver is still loaded",
                _OTHER_SERVER,
            ),
            driver_too_old=(
                _MACHINE,
                "this server's driver is older than the image's CUDA needs",
                "take a server with a newer driver, or an image for an older CUDA",
            ),
            driver_too_old_forward_compat=(
                _MACHINE,
                "the driver is older than the image's CUDA, and these cards have no forward compatibility",
                "take a server with a newer driver, or an image for an older CUDA",
            ),
            fabric_manager_down=(
                _MACHINE,
                "the service that sets up NVSwitch is not running, so CUDA cannot start",
                _OTHER_SERVER,
            ),
            fabric_manager_failed=(_MACHINE, "the service that sets up NVSwitch failed", _OTHER_SERVER),
            fabric_nvls=(
                _ENV,
                "NVSwitch multicast does not work here",
                "do without it once; if it fails again, leave this server",
                {"NCCL_NVLS_ENABLE": "0"},
            ),
            gpu_busy=(_MACHINE, "a card is held by somebody else", _OTHER_SERVER),
            gpu_ecc=(_MACHINE, "a card's memory returned wrong data that could not be corrected", _OTHER_SERVER),
            gpu_hbm_failing=(_MACHINE, "a card's memory is failing and has no spare rows left", _OTHER_SERVER),
            nan_from_bad_gpu=(_MACHINE, "the loss became NaN while a card reports memory errors", _OTHER_SERVER),
            nvlink5_fault=(_MACHINE, "NVLink reports a fatal fault", _OTHER_SERVER),
            xid119_gsp=(_MACHINE, "a card's own controller stopped answering", _OTHER_SERVER),
            xid74_nvlink=(_MACHINE, "a link between cards is bad, and the kernel log confirms it", _OTHER_SERVER),
            xid79_fallen_off_bus=(_MACHINE, "a card vanished from the bus", _OTHER_SERVER),
        ),
        **_in(
            "nccl",
            cuda_illegal_access_nccl=(
                _ENV,
                "a transfer between cards touched memory it should not",
                "transfer through the host once",
                _NO_P2P,
            ),
            nccl_hang_heartbeat=(
                _ENV,
                "a CUDA or NCCL call blocked on every rank, usually a broken path between cards",
                "transfer through the host once; if it happens again, leave this server",
                _NO_P2P,
            ),
            nccl_network=(
                _ENV,
                "NCCL cannot use the network interface it chose",
                "stay on one server's own interfaces",
                {"NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo"},
            ),
            nccl_timeout=(
                _RESUME,
                "all ranks arrived at the same collective, and it never finished",
                "resume; if it happens again, transfer through the host, then leave this server",
            ),
            nccl_timeout_clock_jump=(
                _RESUME,
                "the clock jumped, and the time-out saw hours that did not pass",
                "resume; no rank was at fault",
            ),
            nccl_timeout_missing_rank=(
                _RESUME,
                "the others waited for a rank that did not arrive",
                "resume; if it happens again, see what that rank does at this step",
            ),
            p2p_broken_zero_params=(
                _ENV,
                "a rank received zeros: transfers between cards do not work here",
                "transfer through the host",
                _NO_P2P,
            ),
            p2p_hang=(
                _ENV,
                "the first transfer between cards never finished: cards cannot reach each other here",
                "transfer through the host",
                _NO_P2P,
            ),
            p2p_hang_acs=(
                _ENV,
                "the bus redirects transfers between cards (ACS), and they hang",
                "transfer through the host",
                _NO_P2P,
            ),
        ),
        **_in(
            "network_storage",
            hf_rate_limit_429=(
                _AS_IS,
                "the server that is asked for files limits the rate",
                "wait and start again; download once, not on every rank",
            ),
            network_reset=(_RESUME, "a connection to the outside broke", "resume; the network may be back"),
            s3_slowdown=(
                _RESUME,
                "the object store asks for fewer requests",
                "resume, with patient retries",
                {"AWS_RETRY_MODE": "adaptive", "AWS_MAX_ATTEMPTS": "10"},
            ),
        ),
        **_in(
            "numerics",
            fp16_loss_scale_exhausted=(
                _USER,
                "fp16 overflowed at every step: training diverged",
                "use bf16, a lower learning rate, or an earlier checkpoint",
            ),
            nan_loss=(
                _USER,
                "the loss became NaN and the script stopped itself",
                "go back to an earlier checkpoint with a lower learning rate; look at the data of that step",
            ),
            nan_one_rank_skips_collective=(
                _USER,
                "one rank skipped a NaN step, and with it a collective that the others wait in",
                "decide together: all ranks skip, or none",
            ),
        ),
        **_in(
            "process",
            rank_stuck=(
                _RESUME,
                "the others waited for a rank that said nothing: it hung",
                "resume; if it happens again, see what that rank does at this step",
            ),
            segfault=(
                _RESUME,
                "native code crashed",
                "resume; if it happens again, look at the extension named above the crash",
            ),
            segfault_startup=(
                _USER,
                "native code crashed before the first step: packages do not fit each other",
                "install torch and its extensions from matching builds",
            ),
            sigkill_unknown=(
                _RESUME,
                "a rank was killed from outside and could not say a word",
                "resume; look at host memory, which is the usual reason",
            ),
        ),
        **_in(
            "setup",
            apt_bad_signature=(
                _AS_IS,
                "a package list has a signature that is not valid",
                "wait and start again; correct the key if it stays",
            ),
            apt_lock=(_AS_IS, "the fresh server is still installing its own updates", "wait and start again"),
            apt_mirror=(_AS_IS, "the package mirror was being updated or not reachable", "wait and start again"),
        ),
        **_in(
            "shm",
            shm_leaked_segments=(
                _ENV,
                "shared memory is full of segments that an earlier attempt left",
                "remove them and start again",
            ),
            shm_too_small=(
                _ENV,
                "the container's shared memory is too small",
                "give the container more (--shm-size=16g or --ipc=host)",
            ),
        ),
        **_in(
            "signal",
            sighup=(
                _RESUME,
                "the session or terminal that started the launcher went away",
                "resume under the runner, which does not depend on a terminal",
            ),
            sigterm_external=(_RESUME, "somebody outside asked the launcher to end", "resume"),
        ),
        **_in(
            "stall",
            tokenizers_fork_deadlock=(
                _ENV,
                "tokenizer threads were copied into data workers and lock each other",
                "do without the threads",
                {"TOKENIZERS_PARALLELISM": "false"},
            ),
            torch_extensions_lock=(
                _ENV,
                "an earlier attempt left a lock in the build folder of extensions",
                "remove the lock and start again",
            ),
            wandb_prompt=(
                _ENV,
                "Weights & Biases asks a question and waits for ever",
                "log offline, or put WANDB_API_KEY into secrets",
                {"WANDB_MODE": "offline"},
            ),
        ),
        **_in(
            "unknown",
            unknown=(_RESUME, "nothing in the logs says why", "resume once; look at the evidence if it happens again"),
        ),
        **_in(
            "user_code",
            collective_mismatch=(
                _USER,
                "ranks call different collectives, or with different sizes",
                "make every rank take the same path through the model",
            ),
            cuda_illegal_access=(
                _USER,
                "a kernel touched memory it should not",
                "run once with CUDA_LAUNCH_BLOCKING=1, and look at custom kernels and indices",
            ),
            cuda_in_forked_worker=(
                _USER,
                "a data worker uses the card after a fork",
                "keep the data set on the CPU, or start workers with spawn",
            ),
            ddp_model_mismatch=(_USER, "ranks build different models", "build the model in the same way on every rank"),
            ddp_unused_parameters=(
                _USER,
                "some parameters got no gradient",
                "use every parameter in the loss, or set find_unused_parameters",
            ),
            device_side_assert=(
                _USER,
                "an index is outside of its table, often a token or a label",
                "check the ids against the size of the embedding or of the classes",
            ),
            duplicate_gpu=(
                _USER,
                "two ranks use the same card",
                "call torch.cuda.set_device(LOCAL_RANK) before anything else",
            ),
            nvlink_false_alarm=(
                _USER,
                "the error names NVLink, but the kernel log shows a fault of the program",
                "look for an illegal access in custom kernels",
            ),
            port_in_use_rank_bug=(
                _USER,
                "several ranks try to open the same port",
                "let only rank 0 listen: take rank and address from the environment",
            ),
            s3_entity_too_large=(_USER, "an upload is larger than the store takes in one piece", "upload in parts"),
            uneven_data=(
                _USER,
                "ranks have different amounts of data, and one left the epoch early",
                "drop the last batches, or join ranks with uneven inputs",
            ),
            user_exception=(_USER, "the training script raised this error itself", "correct the script"),
        ),
        **_in(
            "user_config",
            hf_offline_not_cached=(
                _USER,
                "offline mode is on, and the files are not in the cache",
                "download them first, or leave offline mode",
            ),
            missing_module=(_USER, "a Python package is missing", "install it in setup"),
            s3_no_bucket=(_USER, "the bucket does not exist there", "check its name, region and endpoint"),
            timeout_preprocessing=(
                _USER,
                "one rank was still preparing data when the others' time ran out",
                "prepare the data before training, or raise the time-out",
            ),
            launcher_arguments=(
                _USER,
                "the launcher could not read its command line, and started no script",
                "correct command in job.yaml: an option of the script that the launcher takes for one of its own is written out, or renamed in the script",
            ),
            wrong_nproc=(
                _USER,
                "more processes were started than there are cards to see",
                "start one process for each card",
            ),
        ),
    }
)
