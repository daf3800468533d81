import base64
import http.server
import io
import os
import shutil
import subprocess
import sys
import tarfile
import threading
import venv
import zipfile
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import ClassVar
from urllib.parse import unquote

import pytest

from runner.errors import JobError
from runner.job import ArchiveSource, GitSource, PathSource
from runner.supervise import source as sources
from runner.supervise.archive import unpack
from runner.supervise.source import bring


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """A training environment."""
    folder = tmp_path_factory.mktemp("training") / "env"
    venv.create(folder, with_pip=False, symlinks=True)
    return folder


@pytest.fixture
def fetch(tmp_path, environment):
    """Bring a source into a run folder, without pauses between tries."""

    def run(source, setup=(), *, digest="d1", timeout_s=20.0, **options):
        return bring(
            source,
            setup,
            run_dir=tmp_path / "run",
            digest=digest,
            config_dir=tmp_path,
            python=environment / "bin" / "python",
            timeout_s=timeout_s,
            pauses_s=(0.0, 0.0),
            **options,
        )

    return run


def git(folder, *arguments):
    who = ("-c", "user.name=a", "-c", "user.email=a@example.com", "-c", "init.defaultBranch=main")
    done = subprocess.run(["git", *who, *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path):
    """Two commits; the first is tagged."""
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init", "--quiet")
    for text in ("one", "two"):
        (folder / "train.py").write_text(text)
        git(folder, "add", "train.py")
        git(folder, "commit", "--quiet", "-m", text)
        if text == "one":
            git(folder, "tag", "v1")
    return folder


def make_tar(path, **files):
    with tarfile.open(path, "w:gz") as tar:
        for name, text in files.items():
            info = tarfile.TarInfo(name.replace("__", "/"))
            info.size = len(text)
            tar.addfile(info, io.BytesIO(text.encode()))
    return path


# ------------------------------------------------------------------------------------ code


def test_a_path_is_used_in_place(fetch, tmp_path):
    """
    A folder is relative to job.yaml and is not copied.
    """
    (tmp_path / "code").mkdir()

    assert tmp_path / "code" == fetch(PathSource(path="code"))


def test_a_path_that_is_not_there_is_the_jobs_fault(fetch, tmp_path):
    """
    The message names the whole path.
    """
    with pytest.raises(JobError, match=f"source: expected a folder, found none at {tmp_path}/code"):
        fetch(PathSource(path="code"))


@pytest.mark.parametrize(
    ("ref", "text"),
    [
        pytest.param("HEAD", "two", id="default"),
        pytest.param("main", "two", id="branch"),
        pytest.param("v1", "one", id="tag"),
        pytest.param("{whole}", "one", id="commit"),
        pytest.param("{short}", "one", id="short commit"),
    ],
)
def test_a_repository_is_brought_at_a_ref(fetch, repository, ref, text):
    """
    Branch, tag or commit: the code is what it names.
    """
    whole = git(repository, "rev-parse", "v1")

    folder = fetch(GitSource(git=f"file://{repository}", ref=ref.format(whole=whole, short=whole[:8])))

    assert text == (folder / "train.py").read_text()


@pytest.mark.parametrize(
    ("address", "ref", "message"),
    [
        pytest.param("file://{}", "nothing", "at nothing: git checkout: fatal: .*nothing", id="ref"),
        pytest.param(
            "/nowhere", "HEAD", "source: /nowhere at HEAD: git fetch: fatal: '/nowhere' does not appear", id="address"
        ),
        pytest.param("--upload-pack=x", "HEAD", "source: expected an address and a ref", id="option"),
    ],
)
def test_a_repository_that_cannot_be_is_the_jobs_fault(fetch, repository, address, ref, message):
    """
    The message names address, ref, and what git said.
    """
    with pytest.raises(JobError, match=message):
        fetch(GitSource(git=address.format(repository), ref=ref))


def test_a_server_that_is_not_reached_may_be_reached_later(fetch):
    """
    Network trouble is not the job's fault, after three tries.
    """
    with pytest.raises(ConnectionError, match="Failed to connect"):
        fetch(GitSource(git="http://127.0.0.1:9/x.git"))


TOKEN = "t%40ken%2FSECRET"  # as an address has it


class Guarded(http.server.SimpleHTTPRequestHandler):
    """A private repository, as files. Whenever it is asked it notes whose command line has the token."""

    seen: ClassVar[list[bytes]] = []
    served: ClassVar[list[str]] = []

    def do_GET(self):
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):
                self.seen.extend(line for line in [path.read_bytes()] if b"SECRET" in line)
        wanted = base64.b64encode(f"user:{unquote(TOKEN)}".encode()).decode()
        if self.headers["Authorization"] != f"Basic {wanted}":
            self.send_response(401)
            self.send_header("WWW-Authenticate", 'Basic realm="private"')
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.served.append(self.path)
        super().do_GET()

    def log_message(self, *_):
        pass


def test_a_password_in_an_address_is_for_its_server_only(fetch, repository):
    """
    The private repository comes, with no command line that has the token; a wrong one is said without it.
    """
    git(repository, "update-server-info")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Guarded, directory=repository)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        host = f"127.0.0.1:{server.server_port}/.git"

        folder = fetch(GitSource(git=f"http://user:{TOKEN}@{host}", ref="v1"))
        with pytest.raises(JobError, match=f"source: http://{host} at v1: .*Authentication failed") as caught:
            fetch(GitSource(git=f"http://user:SECRET-too@{host}", ref="v1"), digest="d2")
        server.shutdown()

    assert ("one", []) == ((folder / "train.py").read_text(), Guarded.seen)
    assert Guarded.served
    assert "SECRET" not in f"{caught.value} {caught.value.hint}"
    assert "SECRET" not in "".join(path.read_text() for path in (folder / ".git").rglob("*") if path.name == "config")


def test_half_a_clone_is_not_taken_for_the_code(fetch, repository, tmp_path):
    """
    What a killed task left is thrown away; what is whole is kept.
    """
    half = tmp_path / "run" / "source" / ".d1.tmp"
    half.mkdir(parents=True)
    (half / "train.py").write_text("half")

    folder = fetch(GitSource(git=str(repository)))
    (folder / "mine").touch()

    assert ("two", True) == ((folder / "train.py").read_text(), (fetch(GitSource(git="/gone")) / "mine").exists())


@pytest.mark.parametrize("address", ["code.tar.gz", "file://{}/code.tar.gz", "{}/code.tar.gz"])
def test_an_archive_on_this_disk_is_unpacked(fetch, tmp_path, address):
    """
    By a path beside job.yaml, a whole path, or file://.
    """
    make_tar(tmp_path / "code.tar.gz", pkg__train="hello")

    folder = fetch(ArchiveSource(archive=address.format(tmp_path)))

    assert "hello" == (folder / "pkg" / "train").read_text()


class Site(http.server.SimpleHTTPRequestHandler):
    """Fails the first request of each path that begins with /flaky."""

    seen: set[str] = set()  # noqa: RUF012  # one site a test

    def do_GET(self):
        if self.path.startswith("/flaky") and self.path not in self.seen:
            self.seen.add(self.path)
            self.send_error(503)
            return
        super().do_GET()

    def log_message(self, *arguments):
        pass


@pytest.fixture
def site(tmp_path):
    folder = tmp_path / "site"
    folder.mkdir()

    def handler(*arguments):
        return Site(*arguments, directory=str(folder))

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield folder, f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_an_archive_is_downloaded_in_spite_of_a_busy_server(fetch, site):
    """
    A server that is busy once is asked again.
    """
    folder, url = site
    make_tar(folder / "flaky.tar.gz", train="hello")

    assert "hello" == (fetch(ArchiveSource(archive=f"{url}/flaky.tar.gz")) / "train").read_text()


@pytest.mark.parametrize(
    ("address", "message"),
    [
        pytest.param("{url}/none.tar.gz", "the server answered 404", id="missing"),
        pytest.param("http://example.com/code.tar.gz", "expected a path, file:// or https://", id="not encrypted"),
        pytest.param("s3://bucket/code.tar.gz", "expected a path, file:// or https://", id="s3"),
        pytest.param("none.tar.gz", "expected an archive, found none at", id="no file"),
    ],
)
def test_an_archive_that_cannot_be_had_is_the_jobs_fault(fetch, site, address, message):
    """
    The message names the address and what came instead.
    """
    with pytest.raises(JobError, match=message):
        fetch(ArchiveSource(archive=address.format(url=site[1])))


# --------------------------------------------------------------------------------- archives


def evil_tar(path, name, **fields):
    with tarfile.open(path, "w") as tar:
        info = tarfile.TarInfo(name)
        for field, value in fields.items():
            setattr(info, field, value)
        tar.addfile(info)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        pytest.param("../outside", {}, id="parent"),
        pytest.param("link", {"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"}, id="absolute link"),
        pytest.param("link", {"type": tarfile.SYMTYPE, "linkname": "../x"}, id="link outside"),
        pytest.param("link", {"type": tarfile.LNKTYPE, "linkname": "../x"}, id="hard link outside"),
        pytest.param("device", {"type": tarfile.CHRTYPE}, id="device"),
    ],
)
def test_a_tar_that_reaches_outside_is_refused(tmp_path, name, fields):
    """
    Nothing lands outside the folder.
    """
    evil_tar(tmp_path / "a.tar", name, **fields)
    (tmp_path / "to").mkdir()

    with pytest.raises(JobError, match="cannot be unpacked"):
        unpack(tmp_path / "a.tar", tmp_path / "to")

    assert {"a.tar", "to"} == {entry.name for entry in tmp_path.iterdir()}


@pytest.mark.parametrize("name", ["../outside", "/outside", "a/../../outside", "a\\..\\b"])
def test_a_zip_that_reaches_outside_is_refused(tmp_path, name):
    """
    The same holds for zip.
    """
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as file:
        file.writestr(name, "x")

    with pytest.raises(JobError, match="is a link or reaches outside"):
        unpack(tmp_path / "a.zip", tmp_path)


def test_a_zip_keeps_what_can_be_run(tmp_path):
    """
    Scripts stay executable, folders are made.
    """
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as file:
        script = zipfile.ZipInfo("bin/go.sh")
        script.external_attr = 0o100755 << 16
        file.writestr(script, "#!/bin/sh\n")
        file.writestr("empty/", "")

    unpack(tmp_path / "a.zip", tmp_path / "to")

    assert (True, True) == (os.access(tmp_path / "to/bin/go.sh", os.X_OK), (tmp_path / "to/empty").is_dir())


@pytest.mark.skipif(shutil.which("zstd") is None, reason="zstd is not installed")
def test_a_zstd_archive_is_unpacked(tmp_path):
    """
    By the zstd program, where there is one.
    """
    make_tar(tmp_path / "a.tar.gz", train="hello")
    subprocess.run("gunzip -c a.tar.gz | zstd -q -o a.tar.zst", shell=True, cwd=tmp_path, check=True)

    unpack(tmp_path / "a.tar.zst", tmp_path / "to")

    assert "hello" == (tmp_path / "to" / "train").read_text()


@pytest.mark.skipif(shutil.which("zstd") is not None, reason="zstd is installed")
def test_without_zstd_the_message_says_what_to_do(tmp_path):
    """
    A program that is missing is named, and the way round it.
    """
    (tmp_path / "a.tar.zst").write_bytes(b"\x28\xb5\x2f\xfd....")

    with pytest.raises(JobError, match="needs the program zstd, found none") as caught:
        unpack(tmp_path / "a.tar.zst", tmp_path)

    assert "use .tar.gz, or install zstd" == caught.value.hint


@pytest.mark.parametrize("kind", ["tar.gz", "zip"])
def test_an_archive_that_grows_too_large_is_refused(tmp_path, kind):
    """
    A few kilobytes may hold gigabytes.
    """
    path = tmp_path / f"a.{kind}"
    if kind == "zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
            file.writestr("big", "0" * 1_000_000)
    else:
        make_tar(path, big="0" * 1_000_000)

    with pytest.raises(JobError, match="unpacks to more than"):
        unpack(path, tmp_path, max_bytes=999_999)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        pytest.param(b"<html>", "expected .tar, .tar.gz, .tar.zst or .zip, got something else", id="a web page"),
        pytest.param(b"PK\x03\x04cut", "cannot be unpacked", id="half a zip"),
    ],
)
def test_what_is_no_archive_is_refused(tmp_path, raw, message):
    """
    A login page saved under the archive's name is told as one.
    """
    (tmp_path / "a").write_bytes(raw)

    with pytest.raises(JobError, match=message):
        unpack(tmp_path / "a", tmp_path)


# ---------------------------------------------------------------------------------- set-up


@pytest.fixture
def log(tmp_path):
    return tmp_path / "run" / "logs" / "setup.log"


def test_setup_runs_once_in_the_code_with_the_training_environment(fetch, environment, tmp_path, log):
    """
    `python` is the training interpreter; what ran once does not run again.
    """
    commands = ("python -c 'import sys; print(sys.prefix)'", "pwd; echo $VIRTUAL_ENV; echo x >> ran")
    for _ in range(2):
        fetch(None, commands)

    assert "x\n" == (tmp_path / "ran").read_text()
    assert [str(environment), str(tmp_path), str(environment)] == [
        line for line in log.read_text().splitlines() if not line.startswith("$")
    ]


def test_setup_runs_again_in_a_fresh_environment(fetch, environment, tmp_path):
    """
    The run folder outlives a container; what set-up installed does not.
    """
    fetch(None, ("echo x >> ran",), digest="d2")
    next(environment.glob("lib/python*/site-packages/.vramfarm-setup-d2")).unlink()

    fetch(None, ("echo x >> ran",), digest="d2")

    assert "x\nx\n" == (tmp_path / "ran").read_text()


def test_a_failing_command_is_the_jobs_fault(fetch, tmp_path, log):
    """
    The message has the command, its code and its last lines; nothing counts as done.
    """
    with pytest.raises(JobError) as caught:
        fetch(None, ("echo one; echo two >&2; exit 3",), digest="d3")

    assert "setup: 'echo one; echo two >&2; exit 3' ended with exit code 3: one | two" == str(caught.value)
    assert f"its output is in {log}" == caught.value.hint
    assert not list((tmp_path / "run").glob("source/d3.done"))


def test_a_command_is_tried_again_when_the_network_fails(fetch, tmp_path):
    """
    A name that cannot be resolved now may be in a moment.
    """
    command = "echo x >> tries; [ $(wc -l < tries) -ge 3 ] || { echo 'Temporary failure in name resolution'; exit 1; }"

    fetch(None, (command,), digest="d4")

    assert "x\nx\nx\n" == (tmp_path / "tries").read_text()


def test_a_network_that_stays_away_is_not_the_jobs_fault(fetch):
    """
    After three tries it is left to be tried later.
    """
    with pytest.raises(ConnectionError, match="ended with exit code 1: Could not resolve host: packages"):
        fetch(None, ("echo 'Could not resolve host: packages.example'; exit 1",), digest="d5")


def test_a_command_that_hangs_is_ended_with_all_it_started(fetch, tmp_path):
    """
    A question on the terminal, or a download that stands still, is not waited for.
    """
    with pytest.raises(JobError, match="took longer than 1s"):
        fetch(None, ("sleep 60 & echo $! > child; wait",), digest="d6", timeout_s=1.4)

    child = int((tmp_path / "child").read_text())
    state = Path(f"/proc/{child}/stat")
    assert not state.exists() or state.read_text().split()[2] == "Z"


def test_secrets_of_the_supervisor_do_not_reach_setup():
    """
    Set-up is the user's code: it gets no provider's key, but what marks it as ours.
    """
    outer = {
        "VRAMFARM_API_KEY": "k",
        "RUNPOD_API_KEY": "k",
        "VRAMFARM_RUN": "/run",
        "HF_TOKEN": "t",
        "PYTHONHOME": "/x",
    }

    env = sources.setup_environment(outer, Path(sys.executable), frozenset({"RUNPOD_API_KEY"}))

    assert {"VRAMFARM_RUN", "HF_TOKEN"} == outer.keys() & env.keys()
