"""The trainer's side: `from vramfarm import Checkpointer`. torch is imported only when it is needed."""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["Checkpointer"]

if TYPE_CHECKING:
    from vramfarm.checkpointer import Checkpointer


def __getattr__(name: str) -> Any:  # noqa: ANN401  # PEP 562: the supervisor and the saver never load torch
    if name in __all__:
        from vramfarm import checkpointer  # noqa: PLC0415  # lazily, see above

        return getattr(checkpointer, name)
    msg = f"module 'vramfarm' has no attribute {name!r}"
    raise AttributeError(msg)
