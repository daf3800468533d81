"""
What a disk refuses, in plain words: whether trying again can help, and the cure. One table, for a folder that
is a store and for the places on this disk that data and checkpoints are brought to.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from runner.storage.disk import LINK
from runner.storage.offsite.contract import OffsiteError

_SPARE_BYTES: Final = 64 << 20  # left free on a disk that something is brought to
_OURS: Final = "may this user write there?"
_FULL: Final = "free some space there, or {less}"
# What only a person mends, and how; all else, such as ESTALE and EIO of a network disk, may pass by itself.
_CURES: Final[Mapping[int, str]] = {
    errno.EACCES: _OURS,
    errno.EPERM: _OURS,
    errno.EROFS: "mount it so that it can be written, or correct {key}",
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.ENOTDIR: "correct {key}: a part of it is a file",
    errno.EEXIST: "a file is where a folder belongs: remove it, or correct {key}",
    errno.EISDIR: "a folder is where a file belongs: remove it, or correct {key}",
    errno.ENOTEMPTY: "a folder is where a file belongs: remove it, or correct {key}",
    errno.ELOOP: "correct {key}: its links lead in a circle",
    errno.ENAMETOOLONG: "shorten the name, or the folders in {key}",
    errno.EILSEQ: "this disk has no way to write this name: rename the file, or use another disk",
    errno.EFBIG: "this disk takes no file of this size: use another one",
    errno.EXDEV: "a part of it is another disk: name a folder on one disk in {key}",
    errno.ENOTSUP: "this disk cannot do what is needed (plain files, renamed): use another one",
    errno.ENOSYS: "this disk cannot do what is needed (plain files, renamed): use another one",
}
_NO_LINK: Final = "remove the link, or name the folder that it leads to: nothing is stored or read through one"
_CURABLE: Final = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT})
_OF_OBJECT: Final = frozenset(
    {errno.ENAMETOOLONG, errno.EEXIST, errno.EISDIR, errno.ENOTEMPTY, errno.ENOTDIR, errno.EILSEQ, errno.EFBIG}
)
# By names alone: no disk could hold both `a` and `a/b`.
NO_PLACE: Final = _OF_OBJECT - {errno.EFBIG}
LESS: Final[Mapping[str, str]] = {  # what else to do about a full disk, by the key of job.yaml that names the place
    "offload.to": "lower offload.keep_last",
    "data.to": "bring less, or rent a machine with a larger disk",
    "checkpoint.dir": "rent a machine with a larger disk",
}


def refused(where: str, error: OSError, key: str) -> OffsiteError:
    """What to say, and whether to try again; `key` of job.yaml named the place."""
    hint = _NO_LINK if error.strerror == LINK else _CURES.get(error.errno or 0, "").format(key=key, less=LESS[key])
    return OffsiteError(
        f"{where}: {error.strerror or error}",
        hint=hint,
        final=bool(hint),
        curable=error.errno in _CURABLE,
        of_object=error.errno in _OF_OBJECT,
    )


def place_of(error: OSError, otherwise: Path) -> str:
    """Where it went wrong: of a rename, where to."""
    return str(error.filename2 or error.filename or otherwise)


def expect_room(what: str, num_bytes: int, folder: Path, hint: str) -> None:
    """
    Room in `folder` for so many bytes more, and to spare: a full disk would stop more than this. Where all of
    them have their place already, nothing is asked for.
    """
    needed, free = num_bytes + _SPARE_BYTES, shutil.disk_usage(folder).free
    if num_bytes > 0 and needed > free:
        raise OffsiteError(
            f"{folder}: expected {needed / 1e9:.3f} GB free {what}, found {free / 1e9:.3f}",
            hint=f"free some space, {hint}",
            final=True,
            curable=True,
        )
