"""
Answers that are not what was asked for: RFC 9457, with a code that clients branch on.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final

_CODES: Final[Mapping[int, str]] = {
    400: "malformed_request",
    401: "invalid_key",
    402: "insufficient_balance",
    403: "key_scope",
    404: "not_found",
    409: "invalid_state",
    422: "validation_error",
    429: "rate_limited",
    500: "internal",
    502: "upstream",
    503: "unavailable",
}
_RETRYABLE: Final = frozenset({409, 429, 500, 502, 503, 504})


class Problem(Exception):  # noqa: N818  # the standard's word
    """Raised anywhere below the API; answered as it is."""

    def __init__(self, status: int, detail: str, *, code: str = "", **more: Any) -> None:  # noqa: ANN401  # JSON
        super().__init__(detail)
        self.status = status
        self.headers: dict[str, str] = {}
        self.code = code or _CODES.get(status, "internal")
        self.fields = {
            "type": "about:blank",
            "title": HTTPStatus(status).phrase,
            "status": status,
            "code": self.code,
            "detail": detail,
            "retryable": status in _RETRYABLE,
            "request_id": f"req_{secrets.token_hex(8)}",
            **more,
        }
