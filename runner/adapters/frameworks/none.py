"""A script whose checkpoints are its own affair."""

from runner.adapters.frameworks.files import itself, unwatched

uses_library = False
flag = ""
saves = unwatched
resume_path = itself
