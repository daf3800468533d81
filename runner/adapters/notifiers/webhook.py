"""
A JSON object, posted. `text` is the message in words, which Slack and its likes show.
"""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Mapping


def notify(url: str, message: Mapping[str, object], timeout_s: float) -> str:
    """Post `message`; never raises. Returns why it failed, or ""."""
    try:
        body = json.dumps(dict(message), default=str).encode()
        request = urllib.request.Request(url, data=body, headers={"Content-Type": "application/json"}, method="POST")  # noqa: S310  # the scheme was looked at
        with urllib.request.urlopen(request, timeout=timeout_s):  # noqa: S310  # as above
            return ""
    except urllib.error.HTTPError as error:
        with error:
            return f"HTTP {error.code}"
    except urllib.error.URLError as error:
        return f"no connection: {error.reason}"
    except (OSError, ValueError, http.client.HTTPException) as error:
        return type(error).__name__  # its text may repeat the address
