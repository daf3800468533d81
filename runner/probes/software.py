"""What the training script will find in its environment. Looked for, not imported."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from runner.probes.command import ask

_LIMIT_S: Final = 30.0

# Runs in the training interpreter, whose syntax is the script's. Only imports that stand alone at the left edge count:
# one under `try` or `if` may fail by intention. The script's own folder comes first, as when it is run.
_LOOK: Final = """
import ast, importlib.util, json, os, sys
script, wanted = sys.argv[1], sys.argv[2:]
names, folder = list(wanted), ""
moves = False
if script:
    folder = os.path.dirname(os.path.abspath(script))
    tree = ast.parse(open(script, "rb").read())
    for node in tree.body:
        if isinstance(node, ast.Import): names += [alias.name.split(".")[0] for alias in node.names]
        if isinstance(node, ast.ImportFrom) and not node.level: names.append((node.module or "").split(".")[0])
    moves = any(isinstance(node, ast.Attribute) and node.attr == "path" and getattr(node.value, "id", "") == "sys" for node in ast.walk(tree))
sys.path = [folder] * bool(folder) + [place for place in sys.path if place]
def origin(name):
    try: spec = importlib.util.find_spec(name)
    except (ImportError, ValueError): return None
    return None if spec is None else spec.origin or next(iter(spec.submodule_search_locations or []), "")
missing = sorted({name for name in names if name and name not in sys.modules and origin(name) is None})
known = {"torch", "numpy", "transformers", "accelerate", "datasets", "deepspeed", *sys.stdlib_module_names}
hidden = []
for name in sorted(known if folder else ()):
    for place in (os.path.join(folder, name + ".py"), os.path.join(folder, name, "__init__.py")):
        if os.path.exists(place): hidden.append(place)
print(json.dumps({"missing": missing, "hidden": hidden, "imports": sorted(set(names)), "moves": moves}))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Imports:
    """`missing` modules cannot be found, `hidden` files stand before a module of the same name."""

    missing: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()
    imports: tuple[str, ...] = ()
    moves: bool = False  # the script changes sys.path: what is missing may be found after all
    problem: str = ""


def look_at_imports(python: str, script: Path | None, modules: Sequence[str], *, env: Mapping[str, str]) -> Imports:
    """Which modules the script, and the launcher, will look for in vain."""
    argv = (python, "-c", _LOOK, str(script or ""), *modules)
    answer = ask(argv, timeout_s=_LIMIT_S, env=env)
    if answer.code != 0:
        lines = answer.err.strip().splitlines() or ["no answer"]
        return Imports(problem=lines[-1])
    told = json.loads(answer.out)
    return Imports(
        missing=tuple(told["missing"]),
        hidden=tuple(told["hidden"]),
        imports=tuple(told["imports"]),
        moves=told["moves"],
    )
