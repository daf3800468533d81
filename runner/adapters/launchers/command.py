"""A program that starts its processes itself. `python` means the training interpreter."""

from __future__ import annotations

from runner.adapters.launchers.launch import Launch


def argv(launch: Launch) -> tuple[str, ...]:
    program, *arguments = launch.command
    return (launch.python if _is_python(program) else program, *arguments)


def target(words: tuple[str, ...]) -> str | None:
    return None if _is_python(words[0]) else words[0]


def _is_python(program: str) -> bool:
    return program in {"python", "python3"}
