"""A file that says what went wrong in the runner itself, without anybody's secrets."""

from __future__ import annotations

import os
import platform
import re
import sys
import tempfile
import traceback
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from runner import __version__
from runner.cli.naming import workspace_of
from vramfarm.protocol import Env

_PACKAGES: Final = ("botocore", "pydantic", "ruamel.yaml", "structlog", "tenacity", "watchdog")
_SECRET_NAME: Final = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL|NOTIFY|AUTH", re.IGNORECASE)
_QUERY: Final = re.compile(r"(://)[^/@\s]*@|(\?)[^\s'\"]+")
_SHORTEST_SECRET: Final = 6


def write_bug_report(error: BaseException, arguments: Sequence[str], env: Mapping[str, str]) -> Path | None:
    """
    Write the report to where a rented server's disk is most likely to be kept; say where it is.

    The run folder if there is one, then the workspace's own, then the temporary files.
    """
    text = _hide(_report(error, arguments), env)
    name = f"bug-{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{os.getpid()}.txt"
    run_dir = env.get(Env.RUN)
    folders = (*([Path(run_dir)] if run_dir else []), workspace_of(env) / ".vramfarm", Path(tempfile.gettempdir()))
    for folder in folders:
        path = folder / name
        try:
            path.write_text(text, encoding="utf-8")
        except OSError:
            continue  # a full or missing disk; the next folder may do
        return path
    return None


def where(error: BaseException) -> str:
    """`file.py:12` of the innermost line."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "?"


def _report(error: BaseException, arguments: Sequence[str]) -> str:
    head = (
        f"vramfarm-runner {__version__}, Python {platform.python_version()}, {platform.platform()}",
        ", ".join(f"{name} {_version(name)}" for name in _PACKAGES),
        f"arguments: {' '.join(arguments)}",
        f"interpreter: {sys.executable}",
    )
    return "\n".join((*head, "", *_lines(error)))


def _lines(error: BaseException) -> Iterable[str]:
    return (line.rstrip("\n") for line in traceback.format_exception(error))


def _version(package: str) -> str:
    try:
        from importlib import metadata  # noqa: PLC0415  # slow, and most commands have nothing to report

        return metadata.version(package)
    except ImportError:
        return "missing"
    except OSError:
        return "unknown"  # what is reported may be that no file can be opened


def _hide(text: str, env: Mapping[str, str]) -> str:
    """Put names where values of variables that look secret stood, and cut what follows `?` in addresses."""
    secrets = {v: k for k, v in env.items() if _SECRET_NAME.search(k) and len(v) >= _SHORTEST_SECRET}
    for value in sorted(secrets, key=len, reverse=True):
        text = text.replace(value, f"${secrets[value]}")
    return _QUERY.sub(lambda match: f"{match[1] or match[2]}…", text)
