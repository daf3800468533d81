"""
What lies between the S3 store and the network: the client, its time limits, and how its bodies leave.
"""

from __future__ import annotations

import gc
import io
import os
import ssl
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast
from weakref import WeakKeyDictionary

from runner.storage.offsite.bodies import Leaving
from runner.storage.offsite.contract import PROBE, Addressing, OffsiteError, Where
from runner.storage.offsite.cures import DAMAGED, misconfigured
from runner.storage.offsite.hidden import hidden
from runner.storage.offsite.pace import Pace

with hidden("awscrt"):  # botocore would import it, for 40 ms and 7 MB, and sign with it instead of by itself
    import botocore.session
    from botocore.awsrequest import (
        AWSHTTPConnection,
        AWSHTTPConnectionPool,
        AWSHTTPSConnection,
        AWSHTTPSConnectionPool,
    )
    from botocore.config import Config
    from botocore.loaders import JSONFileLoader, Loader

if TYPE_CHECKING:  # stubs only, not installed with the runner
    from mypy_boto3_s3 import S3Client

MAX_ATTEMPTS: Final = 4
_PEM: Final = "it must be PEM (-----BEGIN CERTIFICATE-----), whole, and this user must be able to read it"
TIMEOUTS_S: Final = (15.0, 60.0)  # to connect, and for a block of a body; between two pieces of an answer


def connect(
    offload: Where, env: Mapping[str, str], *, num_connections: int, pace: Pace, timeouts_s: tuple[float, float]
) -> S3Client:
    """
    A client with time limits and bounded retries.

    Credentials come from `env`, else from where botocore looks; those of an instance role or of STS are
    renewed by botocore while the client lives. What `offload` leaves open is as `env` says, else as the
    profile of the AWS configuration files does.
    """
    session = botocore.session.get_session()
    session.register_component("data_loader", _loader(session.get_config_variable("data_path")))
    profile = _profile(session)
    endpoint = offload.endpoint or env.get("AWS_ENDPOINT_URL_S3") or env.get("AWS_ENDPOINT_URL") or profile.endpoint
    region = offload.region or env.get("AWS_REGION") or env.get("AWS_DEFAULT_REGION") or profile.region
    config = Config(
        connect_timeout=timeouts_s[0],
        read_timeout=timeouts_s[1],
        retries={"mode": "standard", "total_max_attempts": MAX_ATTEMPTS},
        max_pool_connections=num_connections,
        tcp_keepalive=True,
        s3={
            "addressing_style": _addressing(offload, endpoint, profile),
            "payload_signing_enabled": False,  # each body has a digest among the headers, which are signed
        },
        request_checksum_calculation="when_required",  # we send our own
        response_checksum_validation="when_required",
    )
    try:
        client = session.create_client(
            "s3",
            region_name=region or "us-east-1",
            endpoint_url=endpoint or None,
            verify=_own_ca(env, profile),
            aws_access_key_id=_key(env, "AWS_ACCESS_KEY_ID"),
            aws_secret_access_key=_key(env, "AWS_SECRET_ACCESS_KEY"),
            aws_session_token=_key(env, "AWS_SESSION_TOKEN"),
            config=config,
        )
    except ValueError as error:
        raise misconfigured(offload.to or "", error) from error
    client.meta.events.register("before-send.s3", lambda request, **_: _wrap_body(request, pace))
    _connect_by({"http": _Pool, "https": _SecurePool}, client)
    client.meta.events.register_last("before-parameter-build.s3", _ends_here)
    client.meta.events.register("needs-retry.s3", _damaged_on_its_way)  # type: ignore[arg-type]  # its answer counts
    return cast("S3Client", client)


def _ends_here(model: Any, context: dict[str, Any], **_: Any) -> None:  # noqa: ANN401  # botocore's
    """
    Botocore asks the bucket for its region where an answer leads elsewhere without saying where; where that answer
    leads elsewhere, too, it asks the bucket again, until Python has no stack left.
    """
    if model.name == "HeadBucket":
        context["s3_redirect"] = {**context.get("s3_redirect", {}), "redirected": True}


class _Files(JSONFileLoader):
    def load_file(self, file_path: str) -> Any:  # noqa: ANN401  # JSON
        """Botocore's descriptions are kept to the end: looking through them for garbage, again and again, takes longer than reading them."""
        collects = gc.isenabled()
        gc.disable()
        try:
            return super().load_file(file_path)
        finally:
            gc.freeze()
            if collects:
                gc.enable()


class _Loader(Loader):
    """Botocore's own looks into the folders of all its four hundred services for the name of one; and each session has another."""

    FILE_LOADER_CLASS = _Files

    def list_available_services(self, type_name: str) -> list[str]:
        del type_name
        return [name for folder in self.search_paths if Path(folder).is_dir() for name in os.listdir(folder)]  # noqa: PTH208  # names only


@cache
def _loader(more: str | None) -> _Loader:
    """What one client has read from botocore's files, the next one need not."""
    return _Loader(extra_search_paths=more.split(os.pathsep) if more else None)


def _key(env: Mapping[str, str], name: str) -> str | None:
    """Whatever is around it, such as the line's end of a file, is none of it; what is in it would be told in an error."""
    value = env.get(name, "").strip()
    if not all("!" <= character <= "~" for character in value):
        hint = "is it cut in two, or quoted twice?"
        raise OffsiteError(f"{name}: expected one word, found more", hint=hint, final=True, curable=True)
    return value or None


def _damaged_on_its_way(response: Any, attempts: int, request_dict: Any, **_: Any) -> float | None:  # noqa: ANN401  # botocore's
    """Seconds to wait before a request is sent again that the server refused for its bytes; botocore takes that for our fault."""
    code = response[1].get("Error", {}).get("Code") if response else None
    if code not in DAMAGED or attempts >= MAX_ATTEMPTS or PROBE in request_dict["url_path"]:
        return None
    return 0.2 * attempts


@dataclass(frozen=True, slots=True, kw_only=True)
class _Profile:
    """What the AWS configuration files say of the store, in the profile that counts. Empty: nothing."""

    endpoint: str
    region: str
    addressing: str
    ca_bundle: str


def _profile(session: botocore.session.Session) -> _Profile:
    scoped = session.get_scoped_config()
    own = session.full_config.get("services", {}).get(scoped.get("services"), {}).get("s3", {})
    s3 = scoped.get("s3", {})
    return _Profile(
        endpoint=own.get("endpoint_url") or scoped.get("endpoint_url", ""),
        region=scoped.get("region", ""),
        addressing=s3.get("addressing_style", "") if isinstance(s3, dict) else "",
        ca_bundle=scoped.get("ca_bundle", ""),
    )


def _addressing(offload: Where, endpoint: str, profile: _Profile) -> Addressing:
    """Every server but AWS understands the bucket in the path; AWS wants it in the host's name."""
    if offload.addressing != "auto":
        return offload.addressing
    if profile.addressing in {"path", "virtual"}:
        return cast("Addressing", profile.addressing)
    return "path" if endpoint else "auto"


def _own_ca(env: Mapping[str, str], profile: _Profile) -> str | None:
    """Read here once: what the library says of such a file with each request sounds like the server's fault."""
    bundle = env.get("AWS_CA_BUNDLE") or profile.ca_bundle or None
    try:
        if bundle:
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(bundle)
    except OSError as error:
        is_none = isinstance(error, FileNotFoundError | IsADirectoryError)
        raise OffsiteError(
            f"AWS_CA_BUNDLE: expected a file of certificates, found {'none' if is_none else 'no whole one'} at {bundle}",
            hint="in a container, mount it first" if is_none else _PEM,
            final=True,
        ) from error
    return bundle


def _wrap_body(request: Any, pace: Pace) -> None:  # noqa: ANN401  # botocore's prepared request
    """
    After it was signed, so that only what leaves is paced, not what is read for the signature.

    Nobody waits for a server's word before a body (`Expect`), which costs each part a turn, and a long one where the server is busy. A server
    that does not want it closes the connection, and may not be heard; so from the second attempt on it is asked first. From then on
    a file is read as it leaves, too: whether it was damaged here, or on its way, is told by that.
    """
    if request.body:
        is_first = request.headers.get("amz-sdk-request", b"").startswith(b"attempt=1")
        if is_first:
            request.headers.pop("Expect", None)
        body = io.BytesIO(request.body) if isinstance(request.body, bytes | bytearray) else request.body
        request.body = Leaving(body, pace, may_pass=is_first)


class _Connection(AWSHTTPConnection):
    """By plain http; a body that knows it may leave past Python."""

    def request(self, method: str, url: str, body: Any = None, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  # botocore's
        if isinstance(body, Leaving):
            body.connection = self
        return super().request(method, url, body, *args, **kwargs)


class _Pool(AWSHTTPConnectionPool):
    ConnectionCls = _Connection


class _SecureConnection(AWSHTTPSConnection):
    """Botocore has each connection read who is to be trusted, 26 ms, into a context that they all share: once will do."""

    def connect(self) -> None:
        if self.proxy is None and self.ssl_context and self.ca_certs and _trusts(self.ssl_context, self.ca_certs):
            self.ca_certs = None
        super().connect()


class _SecurePool(AWSHTTPSConnectionPool):
    ConnectionCls = _SecureConnection


_trusted: Final[WeakKeyDictionary[ssl.SSLContext, str]] = WeakKeyDictionary()
_trusting: Final = threading.Lock()


def _trusts(context: ssl.SSLContext, ca_certs: str) -> bool:
    """False: this file cannot be read, which the connection finds out and tells by itself."""
    with _trusting:
        if _trusted.get(context) != ca_certs:
            try:
                context.load_verify_locations(ca_certs)
            except OSError:
                return False
            _trusted[context] = ca_certs
    return True


def _connect_by(pools: Mapping[str, type[object]], client: Any) -> None:  # noqa: ANN401  # below what is public of it
    """Botocore has no way to say so. A version that keeps its pools elsewhere sends as before: all bodies are read."""
    session = getattr(getattr(client, "_endpoint", None), "http_session", None)
    getattr(session, "_pool_classes_by_scheme", {}).update(pools)
