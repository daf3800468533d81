"""
Errors that a script or a library raises and that no label names, but everybody's nights know: one cure each.

A row recognises the error's own words, the rest of its message, or the statement that raised it. The first
that matches is told instead of what the label means in general; what it matches is certain.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Final

from runner.facts import Decision, Diagnosis

_USER: Final = Decision.GIVE_UP_USER


@dataclass(frozen=True, slots=True)
class Advice:
    words: re.Pattern[str]
    cause: str
    remedy: str
    decision: Decision | None = None  # where it is not the label's
    is_certain: bool = True


def _when(words: str, cause: str, remedy: str, decision: Decision | None = None) -> Advice:
    return Advice(re.compile(words), cause, remedy, decision)


def _perhaps(words: str, cause: str, remedy: str, decision: Decision | None = None) -> Advice:
    return Advice(re.compile(words), cause, remedy, decision, is_certain=False)


ADVICE: Final = (
    # ---- the script and how it is started
    _when(r"^(?:SyntaxError|IndentationError|TabError)\b", "the script is not valid Python", "correct the line that is named"),
    _when(r"^NameError\b", "the script uses a name that is defined nowhere", "correct the line that is named"),
    _when(r"^\S+: error: (?:unrecognized arguments|the following arguments|argument )|No such option|can't open file", "the command line is wrong", "correct `command` in job.yaml"),
    _when(r"BdbQuit|^\(Pdb\)", "a breakpoint was left in the script, and nobody is there to answer", "remove breakpoint() and pdb.set_trace()"),
    _when(r"EOF when reading a line|^EOFError .*getpass\(", "the script asked for input, and nobody answers", "give the answer by an option or a variable"),
    _when(r"bootstrapping phase", "a process was started while the script was still being imported", 'put what starts it under if __name__ == "__main__":'),
    _when(r"[Cc]an't pickle|[Cc]annot pickle|PicklingError", "an object cannot be sent to another process", "define it at the top of a module: no lambda, no local function, no open file"),
    _perhaps(r"CalledProcessError", "a command that the script started failed", "run that command by hand; what it printed stands above the traceback"),
    _perhaps(r"DataLoader worker .*exited unexpectedly", "a data worker ended by itself and left no traceback", "run once with num_workers=0, which shows the error"),
    _perhaps(r"BrokenProcessPool|BrokenExecutor", "a process of the script's pool was killed or crashed", "look at host memory, which is the usual reason; use fewer processes", Decision.RESUME),
    _when(r"environment variable \w+ expected, but not set", "the script was started without a launcher", "set launcher: torchrun in job.yaml"),
    _when(r"Default process group has not been initialized", "a collective was called before init_process_group", "call it first, and start the script by a launcher"),
    _when(r"^RecursionError", "a function calls itself endlessly", "correct the function that is named"),
    _when(r"panicked at|PanicException", "a library written in Rust (tokenizers, polars, safetensors) met data that it did not expect", "look at the data that it was given; install a newer version"),
    _when(r"could not read Username|Authentication failed|Permission denied \(publickey|Host key verification", "the code's repository is private, and there is no key for it", "put a token into secrets, or ship the code with the job"),
    # ---- settings
    _when(r"got an unexpected keyword argument", "the installed version of a library knows no such option", "pin the version that the script was written for"),
    _when(r"Some (?:specified arguments|keys) are not used by the HfArgumentParser|Could not override '|is not in struct|Extra inputs are not permitted", "the configuration has a key that nobody reads", "correct the key that is named"),
    _when(r"^Primary config", "the folder or file of the configuration is not there", "correct config_path and config_name, or ship the file with the job"),
    _when(r"validation errors? for |MissingMandatoryValue|Field required", "the configuration lacks a value, or one has the wrong type", "correct the key that is named"),
    _when(r"^yaml\.|^(?:json\.\w+\.)?JSONDecodeError|^toml\w*\.", "a file of settings or data cannot be parsed", "look at the file at the line that is named; an empty one was cut while it was written"),
    _when(r"Output directory .* already exists", "the script refuses a folder that an earlier attempt filled", "let it go on from the newest checkpoint, or write elsewhere"),
    # ---- memory and sizes
    _when(r"DefaultCPUAllocator|Unable to allocate \S+ [PEZY]iB|1EB", "the script asked for more memory than any machine has", "a size was computed wrong: print the shape before it", _USER),
    _when(r"index out of range in self", "an index is larger than the embedding table", "check the token ids against the vocabulary; resize the embeddings"),
    _when(r"Expected all tensors to be on the same device", "tensors of one operation are on different devices", "move the one that is named to the model's device"),
    # ---- models and data
    _when(r"trust_remote_code|contains custom code which must be executed", "the model brings its own code, which is not run unasked", "read that code, then pass trust_remote_code=True"),
    _when(r"does not recognize this architecture|[Tt]okenizer class \S+ does not exist", "the installed transformers is older than the model", "pip install a newer transformers in setup"),
    _when(r"instantiate the backend tokenizer", "no tokenizer was found there, or the package that reads it is missing", "check the path; pip install sentencepiece tiktoken in setup"),
    _when(r"is not a (?:valid model identifier|local folder)|RepositoryNotFoundError|Repository Not Found", "there is no such model or data set, or it is private", "check its name; of a private one, set HF_TOKEN in secrets"),
    _when(r"UnidentifiedImageError|image file is truncated|ArrowInvalid|Parquet magic bytes|^tarfile\.ReadError|^zlib\.error|^\S*LZMAError", "a file of the data set is damaged", "download it again, or skip what cannot be read"),
    _when(r"^UnicodeEncodeError: 'ascii'", "the log's encoding is ASCII", "set PYTHONUTF8=1 in env"),
    _perhaps(r"^PermissionError", "the job may not read or write that path", "change its owner, or write below {checkpoint_dir} or /tmp"),
    # ---- builds of packages
    _when(r"undefined symbol: _ZN?K?\w*(?:c10|torch|at)\d*\w*|undefined symbol: \S*(?:c10|torch)", "an extension was built for another version of torch", "reinstall it for this torch: pip install --no-build-isolation --force-reinstall --no-deps", _USER),
    _when(r"version `GLIBC_", "the package was built for a newer system than the image", "use a newer image, or an older build of the package", _USER),
    _when(r"lib(?:GL|gl\w+|SM|Xext|Xrender|sndfile|jpeg|turbojpeg)\S*: cannot open shared object", "a system library is missing in the image", "apt-get install it in setup (libGL.so.1: libgl1)", _USER),
    _when(r"cannot open shared object file", "a library that a package was built against is not in the image", "install the build for this image's CUDA", _USER),
    _when(r"does not match the version torch was compiled with|CUDAMismatchException", "the image's CUDA toolkit is of another version than the one torch was built for", "use an image with torch's version of CUDA", _USER),
    _when(r"OMP: Error #15|MKL_THREADING_LAYER|Intel MKL FATAL", "two OpenMP or MKL libraries are loaded", "install numpy and torch from one source; set MKL_THREADING_LAYER=GNU in env", _USER),
    _when(r"not compiled with CUDA enabled|have NCCL built in|compiled without GPU support", "the installed torch, or extension, is a build for the processor only", "install the build for CUDA (pip install torch --index-url of the CUDA version)"),
    _when(r"(?:[Nn]o such file|denied|[Cc]annot find|not found).*ptxas|ptxas.*not found", "Triton's compiler ptxas is missing or may not be run", "reinstall triton, or set TRITON_PTXAS_PATH to the toolkit's", _USER),
    _when(r"CUDA_HOME|MissingCUDA|nvcc", "an extension is compiled at run time, and the image has no CUDA toolkit", "use a -devel image, or install the toolkit and set CUDA_HOME", _USER),
    _perhaps(r"Error building extension", "an extension that is compiled at run time does not compile", "the compiler's first error stands above; check that its version, CUDA and torch fit", _USER),
    _when(r"cannot import name", "the installed version of a package has no such name", "pin the version that the script was written for"),
    _when(r"No matching distribution|Cannot install .* conflicting dependencies|Could not find a version that satisfies", "pip knows no such package or version for this Python", "correct its name or version in setup"),
    _when(r"cannot execute: required file not found\s*$|bad interpreter: ", "the program that the file's first line (#!) names is not there", "correct that line or install the program in setup; a file with Windows line endings needs dos2unix"),
    _when(r"^(?!\w+Error).*: Exec format error\s*$|^zsh:\d*:? exec format", "the file is not a program for this machine: built for another processor, or a script without its first line (#!)", "build it here, or start it by its interpreter: bash FILE"),
    _when(r"^(?!\w+Error)\S+: (?:(?:line )?\d+: )?\S*/\S+: Permission denied\s*$|^zsh:\d*:? permission denied", "the file may not be run as a program, or not be written", "chmod +x it in the repository, or start it by its interpreter: bash FILE"),
    _when(r"can't cd to |: (?:line )?\d+: cd: |^\S+: (?:line )?\d+: \S+: No such file or directory\s*$", "a folder or file that the shell script names is not there", "check the path against the source and the data of this job"),
    _when(r"command not found|: not found$|^(?:\S*/)?env: .*: No such file", "a program is not installed, or not on PATH", "install it in setup"),
    _when(r"Fatal Python error: (?:init_|_PyImport|Py_Initialize)", "Python finds no library of its own", "remove PYTHONHOME and PYTHONPATH from env"),
    _perhaps(r"Found no NVIDIA driver|No CUDA GPUs are available|no GPUs found", "this process sees no card", "start the container with --gpus all; look at CUDA_VISIBLE_DEVICES; else leave this server"),
    _when(r"support bf16|bf16 is (?:only )?(?:not )?supported", "this card, or this build of torch, has no bf16", "use fp16, or a card from Ampere on"),
    _when(r"C\+?\+? compiler", "the image has no C compiler, which torch.compile and Triton need", "apt-get install build-essential in setup"),
    _when(r"^(?:torch\._(?:dynamo|inductor)\.exc\.|\S*Backend\w*Failed)", "torch.compile failed on the line that is named", "correct that line, or leave the function out with torch.compiler.disable"),
)  # fmt: skip


# What these mean in general is no cure for the case at hand.
_GENERAL: Final = frozenset({
    "docker_no_gpu_runtime",
    "hf_token_401",
    "library_mismatch",
    "missing_module",
    "no_c_compiler",
    "segfault_startup",
    "user_exception",
    "wrong_arch",
})  # fmt: skip


def advise(found: Diagnosis, words: str) -> Diagnosis:
    """Return the diagnosis with the cure for just this error, if there is one."""
    row = next((row for row in ADVICE if row.words.search(words)), None)
    if row is None or found.label not in _GENERAL:
        return found
    return replace(
        found,
        cause=row.cause,
        remedy=row.remedy,
        decision=row.decision or found.decision,
        env={} if row.decision else found.env,
        confidence="high" if row.is_certain and found.confidence == "medium" else found.confidence,
    )
