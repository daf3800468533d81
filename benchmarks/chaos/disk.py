"""A disk that can lose power: ext4 in a file. Root, and a loop device."""

import contextlib
import os
import shutil
import subprocess
from pathlib import Path

SIZE = 4 << 30  # sparse
COMMIT_S = 300  # of the journal: only what is synced is written meanwhile, and what the storm has written
OPTIONS = ("", "noauto_da_alloc", "data=writeback,noauto_da_alloc", "nodelalloc,data=writeback")


class Folder:
    """A disk that keeps all that was written, whoever dies."""

    def __init__(self, place: Path) -> None:
        self.place = place
        place.mkdir(parents=True)

    def wipe(self) -> None:
        """Another machine: an empty disk."""
        for path in self.place.iterdir():
            if path.name != "lost+found":
                shutil.rmtree(path)

    def close(self) -> None:
        shutil.rmtree(self.place, ignore_errors=True)


class PowerDisk(Folder):
    """Mounted at `place` from the first day on. What it holds when power is lost is what the kernel has sent to the device."""

    def __init__(self, place: Path, memory: Path, options: str = "") -> None:
        super().__init__(place)
        self._memory, self._options = memory, options
        self._number = 0
        with self._image.open("wb") as file:
            file.truncate(SIZE)
        run("mkfs.ext4", "-q", "-E", "lazy_itable_init=1,lazy_journal_init=1", "-m", "0", "-J", "size=8", self._image)
        self._mount()

    def lose_power(self, dice) -> None:
        """Everything that used it is dead. Of what was not synced, some files may have been written all the same."""
        for path in self._unsynced(dice):
            with contextlib.suppress(OSError):
                fd = os.open(path, os.O_RDONLY)
                os.fsync(fd)
                os.close(fd)
        old = self._image
        self._number += 1
        run("cp", "--sparse=always", old, self._image)
        run("umount", "-l", self.place)
        old.unlink()
        self._mount()

    def _unsynced(self, dice) -> list[Path]:
        files = [path for path in self.place.rglob("*") if path.is_file() and not path.is_symlink()]
        return dice.sample(files, dice.choice((0, 0, 1, 2)) if len(files) > 1 else 0)

    def close(self) -> None:
        with contextlib.suppress(subprocess.CalledProcessError):
            run("umount", "-l", self.place)
        self._image.unlink(missing_ok=True)

    @property
    def _image(self) -> Path:
        return self._memory.with_name(f"{self._memory.name}-{self._number}")

    def _mount(self) -> None:
        options = ",".join(filter(None, ("loop", f"commit={COMMIT_S}", self._options)))
        run("mount", "-o", options, self._image, self.place)


def why_no_power(folder: Path) -> str:
    """Why this machine mounts no loop device; empty if it does."""
    image = Path("/dev/shm") / f"chaos-try-{os.getpid()}"
    try:
        PowerDisk(folder, image).close()
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    except subprocess.CalledProcessError as error:
        return " ".join(error.stderr.decode(errors="replace").split())
    finally:
        image.with_name(f"{image.name}-0").unlink(missing_ok=True)
    return ""


def run(*argv: object) -> None:
    subprocess.run([str(a) for a in argv], check=True, capture_output=True, timeout=60)


def written(path: Path) -> int:
    """When; 0 of a file that is gone."""
    with contextlib.suppress(OSError):
        return path.stat().st_mtime_ns
    return 0
