"""What an S3 server's refusal answers to who has tried something out."""

from collections.abc import Callable
from typing import Any, Final, TypedDict

from botocore.exceptions import ClientError

from runner.storage.offsite.cures import code_of

UNABLE: Final = frozenset(
    {"NotImplemented", "InvalidArgument", "InvalidRequest", "MalformedXML", "UnsupportedArgument", "400", "501"}
)
FORBIDDEN: Final = frozenset({"AccessDenied", "403"})


class Condition(TypedDict, total=False):
    """Under which something is written; else it `is_taken`."""

    IfNoneMatch: str
    IfMatch: str


def is_refused(call: Callable[..., Any], *args: Any, **fields: Any) -> bool:  # noqa: ANN401  # botocore's
    """Whether what is wrong in a request is told; a server that fails says nothing."""
    try:
        call(*args, **fields)
    except ClientError as error:
        if is_servers(error):
            raise
        return True
    return False


def is_servers(error: ClientError) -> bool:
    """Whether it is the server's own fault, which says nothing of what it was asked."""
    return error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0) >= 500  # noqa: PLR2004


def is_forbidden(call: Callable[[], object]) -> bool:
    try:
        call()
    except ClientError as error:
        if code_of(error) in FORBIDDEN:
            return True
        if code_of(error) not in UNABLE:  # what a server cannot do, no right gives
            raise
    return False


def is_taken(error: ClientError) -> bool:
    return code_of(error) in {"PreconditionFailed", "412"}
