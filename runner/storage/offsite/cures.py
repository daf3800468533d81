"""
What botocore raises, in plain words: where, what, and the cure. Whether trying again can help, and whether
somebody can mend it while a run goes on, is decided here.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Final
from urllib.parse import urlsplit

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionClosedError,
    ConnectTimeoutError,
    CredentialRetrievalError,
    HTTPClientError,
    IncompleteReadError,
    MetadataRetrievalError,
    ReadTimeoutError,
    SSLError,
)
from botocore.exceptions import ConnectionError as BotoConnectionError
from urllib3.exceptions import (
    HTTPError as BrokenAnswer,
)  # botocore lets it through where the body of a refusal breaks off

from runner.errors import one_line
from runner.storage.offsite.contract import OffsiteError

NONE_OF_S3: Final = "is offload.endpoint one of S3, and nothing before it that answers in its place?"
NO_ANSWER: Final = (BotoConnectionError, HTTPClientError, IncompleteReadError, BrokenAnswer)
BUCKET_TWICE: Final = (
    "offload.endpoint (or AWS_ENDPOINT_URL) names the bucket already: leave it out there, as in https://host:9000"
)
_REGION_HINT: Final = "the bucket is in another region: set offload.region"
_FULL: Final = "the store is full: make room, raise the quota, or keep fewer (offload.keep_last)"
_ILL: Final = "is the store full? its own log says what is wrong with it"  # SeaweedFS says no more
_ILL_READ: Final = "its own log says what is wrong with it: a disk of the store, perhaps"
_READS: Final = ("Get", "Head", "List")  # names of operations begin so
_HINTS: Final[Mapping[str, str]] = {
    "AccessDenied": "the key may not do this: check its rights and the bucket's policy (list, get, put, delete)",
    "403": "wrong key, or one that may not do this: check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, and its rights",
    "InvalidAccessKeyId": "check AWS_ACCESS_KEY_ID: this server does not know it",
    "SignatureDoesNotMatch": "check AWS_SECRET_ACCESS_KEY: it does not belong to this key",
    "ExpiredToken": "the credentials have expired: get new ones, or ones that are renewed (an instance role)",
    "TokenRefreshRequired": "the credentials have expired: get new ones, or ones that are renewed (an instance role)",
    "InvalidToken": "check AWS_SESSION_TOKEN: it does not belong to this key",
    "NoSuchBucket": "make the bucket, or correct offload.to",
    "InvalidBucketName": "correct the bucket's name in offload.to",
    "PermanentRedirect": _REGION_HINT,
    "301": _REGION_HINT,
    "AuthorizationHeaderMalformed": _REGION_HINT,
    "IllegalLocationConstraintException": _REGION_HINT,
    "InvalidObjectState": "it is archived: have the store restore the object, and end the lifecycle rule that moved it",
    "RequestTimeTooSkewed": "this machine's clock is wrong: set it (timedatectl set-ntp true, or ntpdate)",
    "AccountProblem": "the store's owner must settle the account",
    "QuotaExceeded": _FULL,
    "XMinioStorageFull": _FULL,
    "XMinioAdminBucketQuotaExceeded": _FULL,
    "507": _FULL,
    "400": "S3 says why, and this does not: is offload.endpoint one of S3, and is it https there?",
    "NotImplemented": "this server cannot do what is needed: write, list, read and delete of plain objects, and parts",
}
_BUSY: Final = "the store is busy or down: it is asked again; if it stays so, ask its owner"
_WORDS: Final[Mapping[str, str]] = {  # a cure, too, which says nothing of whether trying again helps
    "405": "this place takes no objects: is offload.endpoint one of S3, and not a page of it, or a copy for readers?",
    "InvalidRequest": "the store says what it misses in this request, its own log says more; is offload.endpoint one of S3?",
    "SlowDown": "too many requests at once: it is asked again, more slowly; if it stays so, ask the store's owner for a higher rate",
    "502": _BUSY,
    "503": _BUSY,
    "504": _BUSY,
}
_CURABLE_STATUS: Final = frozenset({401, 403, 507})  # whoever says no may say yes tomorrow, or to a new key
_CURABLE: Final = frozenset(
    {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "InvalidToken", "InvalidIdentityToken"}
    | {"QuotaExceeded", "XMinioAdminBucketQuotaExceeded"}
)
_HTTP: Final = "write http:// in offload.endpoint (or AWS_ENDPOINT_URL), or have the server speak https"
_HTTPS: Final = "write https:// in offload.endpoint (or AWS_ENDPOINT_URL)"
_PLAIN: Final = frozenset({"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST", "UNKNOWN_PROTOCOL"})
_ASKS_S: Final = 3.0
_UNREACHABLE: Final = "check offload.endpoint and the network"
_FILES: Final = "the AWS configuration files (AWS_PROFILE, AWS_CONFIG_FILE, AWS_SHARED_CREDENTIALS_FILE)"
_KEYS: Final = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give the server a role"
_ADDRESS: Final = "expected https://host: offload.endpoint, else AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL"
_SSO: Final = "log in again (aws sso login); a run that is to outlive a login wants a key or a role"
_LOGIN: Final = "log in again (aws login); a run that is to outlive a login wants a key or a role"
_MFA: Final = "nobody is there to type a code: give a key, a session of your own (AWS_SESSION_TOKEN), or a role"
_REGION: Final = "correct offload.region, or AWS_REGION"
# By the names of botocore's classes, not all of which every version has. What is wrong with credentials may be mended
# on this machine while a run goes on; the rest not.
_CREDENTIALS: Final[Mapping[str, str]] = {
    "NoCredentialsError": _KEYS,
    "PartialCredentialsError": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY belong together: set both",
    "ProfileNotFound": "AWS_PROFILE names it: correct or unset that, or write the profile into the AWS configuration files",
    "ConfigParseError": f"correct {_FILES}",
    "ConfigNotFound": f"correct {_FILES}",
    "InvalidConfigError": f"correct {_FILES}",
    "UnknownCredentialError": f"correct {_FILES}",
    "MissingDependencyException": "the profile asks for what is not installed here: give a key or a role",
    "TokenRetrievalError": _SSO,
    "SSOError": _SSO,
    "LoginError": _LOGIN,
    "RefreshWithMFAUnsupportedError": _MFA,
    "EOFError": _MFA,  # of the prompt for it
    "InvalidIMDSEndpointError": "correct AWS_EC2_METADATA_SERVICE_ENDPOINT",
    "InvalidIMDSEndpointModeError": "correct AWS_EC2_METADATA_SERVICE_ENDPOINT_MODE",
}
_SETTINGS: Final[Mapping[str, str]] = {
    "InvalidRegionError": _REGION,
    "NoRegionError": _REGION,
    "UnknownRegionError": _REGION,
    "EndpointProviderError": _ADDRESS,
    "InvalidEndpointConfigurationError": _ADDRESS,
    "InvalidDNSNameError": "correct the bucket's name in offload.to, or set offload.addressing to path",
    "ParamValidationError": "correct offload.to: s3://bucket/prefix",
    "InvalidDefaultsMode": "correct AWS_DEFAULTS_MODE",
    "InvalidSTSRegionalEndpointsConfigError": "correct AWS_STS_REGIONAL_ENDPOINTS",
    "InvalidS3UsEast1RegionalEndpointConfigError": "correct AWS_S3_US_EAST_1_REGIONAL_ENDPOINT",
    "InvalidProxiesConfigError": "correct HTTP_PROXY and HTTPS_PROXY",
    "BotoCoreError": "check offload in job.yaml, and what begins with AWS_ in the environment",
}
_PROVIDERS: Final[Mapping[str, str]] = {  # of credentials that did not come
    "custom-process": f"the credential_process failed: run it by hand; it is in {_FILES}",
    "sso": _SSO,
    "login": _LOGIN,
}
_NO_ROLE: Final = "the credentials of this machine's role did not come: does it still have one?"
DAMAGED: Final = frozenset(
    {"BadDigest", "IncompleteBody", "XAmzContentSHA256Mismatch", "XAmzContentChecksumMismatch"}  # MinIO's for a CRC
)
_SHORT: Final[Mapping[type[Exception], str]] = {
    ConnectTimeoutError: "no connection in time",
    ReadTimeoutError: "nothing came in time",
    ConnectionClosedError: "the connection was closed",
}
_PASSING: Final = DAMAGED | {"RequestTimeout", "NoSuchUpload", "NoSuchKey"}
_PASSING_STATUS: Final = frozenset({404, 408, 409, 412, 425, 429})
_MAX_SAID: Final = 300


@contextmanager
def plain_words(where: str) -> Iterator[None]:
    """Whatever botocore raises, as an `OffsiteError` that says what to do."""
    try:
        yield
    except ClientError as error:
        raise _refused(where, error) from error
    except NO_ANSWER as error:
        raise _unanswered(where, error) from error
    except (CredentialRetrievalError, MetadataRetrievalError) as error:
        hint = _PROVIDERS.get(str(error.kwargs.get("provider")), _NO_ROLE)
        raise OffsiteError(f"{where}: {_said(error).removesuffix(':')}", hint=hint, final=False) from error
    except (BotoCoreError, EOFError) as error:
        raise misconfigured(where, error) from error
    except (FileNotFoundError, PermissionError) as error:
        raise _no_token(where, error) from error
    except (LookupError, ValueError) as error:
        what = f"{where}: the answer is none of S3: {type(error).__name__}: {_said(error)}"
        raise OffsiteError(what, hint=NONE_OF_S3, final=False) from error


def misconfigured(where: str, error: Exception) -> OffsiteError:
    """What was not even sent: by the first of its classes that is known."""
    names = [kind.__name__ for kind in type(error).__mro__]
    if found := next((_CREDENTIALS[name] for name in names if name in _CREDENTIALS), None):
        return OffsiteError(f"{where}: {_PLAINER.get(names[0]) or _said(error)}", hint=found, final=True, curable=True)
    if hint := next((_SETTINGS[name] for name in names if name in _SETTINGS), None):
        return OffsiteError(f"{where}: {_said(error)}", hint=hint, final=True)
    hint = _ADDRESS if str(error).startswith("Invalid") else _SETTINGS["BotoCoreError"]
    return OffsiteError(f"{where}: {_said(error)}", hint=hint, final=True)


_PLAINER: Final[Mapping[str, str]] = {
    "NoCredentialsError": "expected credentials, found none",
    "EOFError": "the profile asks for an MFA code",
}


def _no_token(where: str, error: OSError) -> OffsiteError:
    """A file that the environment names; those of checkpoints have their own words."""
    hint = "is it mounted? AWS_WEB_IDENTITY_TOKEN_FILE or AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE names it"
    return OffsiteError(f"{where}: {error.filename}: {error.strerror}", hint=hint, final=True, curable=True)


def _said(text: object) -> str:
    """In one line, and nothing that a terminal would obey."""
    return one_line(" ".join(str(text).split())[:_MAX_SAID])


def code_of(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def _refused(where: str, error: ClientError) -> OffsiteError:
    code, fields = code_of(error), error.response.get("Error", {})
    answer = error.response.get("ResponseMetadata", {})
    status = answer.get("HTTPStatusCode", 0)
    said = _said(fields.get("Message", ""))
    passing = code in _PASSING or status >= 500 or status in _PASSING_STATUS  # noqa: PLR2004  # the server's fault
    bare = "" if status == 400 and code != "400" else str(status)  # noqa: PLR2004  # a 400 with a code says why: some pass, some are of one object
    hint = _HINTS.get(code) or _HINTS.get(bare, "")
    region = fields.get("Region") or answer.get("HTTPHeaders", {}).get("x-amz-bucket-region")
    if hint == _REGION_HINT and region:
        hint = f"{hint} to {_said(region)}"
    final, curable = bool(hint) or not passing, code in _CURABLE or status in _CURABLE_STATUS
    of_object = final and not (hint or curable)
    ill = _ILL_READ if error.operation_name.startswith(_READS) else _ILL
    hint = _WORDS.get(code) or hint or (ill if code == "InternalError" else _WORDS.get(str(status), ""))
    what = f"{where}: the store answered {status} {_said(code)}: {said}"
    is_ill = status == 500 and not final  # noqa: PLR2004  # 502 to 504 are of who stands before it
    return OffsiteError(what, hint=hint, final=final, curable=curable, of_object=of_object, of_server=is_ill)


def _unanswered(where: str, error: Exception) -> OffsiteError:
    told = getattr(error, "kwargs", {})
    what = f"{where}: no answer{_from(told)}: {_why(error)}"
    if not isinstance(error, SSLError):
        if isinstance(error, ConnectionClosedError) and _is_asked_plainly(str(told.get("endpoint_url", ""))):
            return OffsiteError(f"{what}: expected http there, found https", hint=_HTTPS, final=True, curable=True)
        return OffsiteError(what, hint=_UNREACHABLE, final=False)
    if _reason(error) in _PLAIN:
        return OffsiteError(f"{what}: expected https there, found http", hint=_HTTP, final=True, curable=True)
    if "CERTIFICATE_VERIFY_FAILED" in str(error):
        hint = "a server with a CA of its own: put the CA's certificate into a file, name it in AWS_CA_BUNDLE; is the clock right?"
        return OffsiteError(f"{what}: its certificate is not trusted", hint=hint, final=True)
    return OffsiteError(what, hint="check offload.endpoint: is it https there, or http?", final=False)


def _reason(error: BaseException) -> str:
    """Of the SSL library, whatever is around it."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLError) and cause.reason:
            return cause.reason
        cause = cause.__cause__ or cause.__context__
    return ""


def _is_asked_plainly(address: str) -> bool:
    """Whether who closed the connection speaks TLS: most such servers close it without a word that says so."""
    found = urlsplit(address)
    if found.scheme != "http" or not found.hostname:
        return False
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # nothing is sent
    with suppress(OSError, ValueError):
        place = (found.hostname, found.port or 80)
        with socket.create_connection(place, _ASKS_S) as plain, context.wrap_socket(plain):
            return True
    return False


def _from(told: Mapping[str, Any]) -> str:
    """Of an address its host: there may be a password before it."""
    proxy, server = (urlsplit(told.get(name, "")).netloc.rpartition("@")[2] for name in ("proxy_url", "endpoint_url"))
    return f" from the proxy {proxy}" if proxy else f" from {server}" if server else ""


def _why(error: Exception) -> str:
    """In a few words: botocore repeats the whole address, urllib3 names its own objects."""
    if type(error) in _SHORT:
        return _SHORT[type(error)]
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLError) and cause.reason:
            return cause.reason.replace("_", " ").lower()
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror.lower()
        cause = cause.__cause__ or cause.__context__
    return "a header is none" if "header value" in str(error) else str(error)  # it would tell what is in it
