import pytest

from runner.supervise.logs import Follower, Line, clean, find_streams, read_tail, stream_of, tail


@pytest.fixture
def folder(tmp_path):
    """An attempt's folder, as torchrun and the shim leave it."""
    for rank in (0, 1):
        logs = tmp_path / "0b1c_abc" / "attempt_0" / str(rank)
        logs.mkdir(parents=True)
        (logs / "stdout.log").write_text(f"out {rank}\n")
        (logs / "stderr.log").write_text("")
    (tmp_path / "launcher.log").write_text("started\n")
    return tmp_path


def append(folder, raw, rank=0):
    with (folder / f"0b1c_abc/attempt_0/{rank}/stdout.log").open("ab") as file:
        file.write(raw)


def texts(lines):
    return [line.text for line in lines]


def test_every_stream_of_an_attempt_is_found(folder):
    """
    The launcher comes first, then each rank's error output and output.
    """
    found = [(stream.rank, stream.name) for stream in find_streams(folder)]

    assert [(-1, "output"), (0, "stderr"), (0, "stdout"), (1, "stderr"), (1, "stdout")] == found


def test_streams_of_deepspeeds_launcher_are_found(tmp_path):
    """
    DeepSpeed writes one file a rank.
    """
    (tmp_path / "20260101120000_rank11.log").touch()

    assert [(11, "output")] == [(stream.rank, stream.name) for stream in find_streams(tmp_path)]


def test_a_follower_reads_each_line_once(folder):
    """
    A line comes once, when it is whole, with its rank and stream.
    """
    follower = Follower(folder, rank=0)
    first = follower.read()
    append(folder, b"step 1\nstep")

    second = follower.read()
    append(folder, b" 2\n")

    expected = [Line(0, "stdout", text) for text in ("out 0", "step 1", "step 2")]
    assert expected == [*first, *second, *follower.read()]


def test_a_stream_that_appears_later_is_followed(folder):
    """
    Ranks start after the launcher: their files are found when they come.
    """
    follower = Follower(folder)
    follower.read()
    late = folder / "0b1c_abc/attempt_0/2"
    late.mkdir()
    (late / "stdout.log").write_text("here\n")

    assert (Line(2, "stdout", "here"),) == follower.read()


def test_a_reader_who_would_be_buried_gets_the_last_lines(folder):
    """
    And the number of those that were left out.
    """
    follower = Follower(folder, rank=0)
    follower.skip()
    with (folder / "0b1c_abc/attempt_0/0/stdout.log").open("a") as log:
        log.write("".join(f"line {i}\n" for i in range(1000)))

    lines = follower.read(limit_lines=3)

    assert [997, 998, 999] == [int(line.text.split()[1]) for line in lines]
    assert 997 == follower.num_dropped


def test_a_last_line_without_an_end_is_not_lost(folder):
    """
    When nobody writes any more, what has no end is a line too.
    """
    follower = Follower(folder, rank=0)
    append(folder, b"dying wor")
    follower.read()

    assert ["dying wor"] == texts(follower.finish())


def test_a_read_is_bounded(folder):
    """
    A flood is read in pieces; nothing is lost between them.
    """
    follower = Follower(folder, rank=1)
    append(folder, b"x" * 99 + b"\n" + b"y" * 99 + b"\n", rank=1)
    pieces = [texts(follower.read(limit_bytes=200)) for _ in range(3)]

    assert [["out 1"], ["x" * 99], ["y" * 99]] == pieces


def test_a_line_of_megabytes_is_cut(folder):
    """
    A line that never ends takes no memory; the next one is whole again.
    """
    follower = Follower(folder, rank=0)
    append(folder, b"z" * 5_000_000)
    for _ in range(20):
        assert [] == [t for t in texts(follower.read()) if t != "out 0"]
    append(folder, b"\nnext\n")

    cut, following = texts(follower.read())
    assert (16_384, "next") == (len(cut), following)


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        pytest.param(b" 10%|#   |\r 50%|###  |", " 50%|###  |", id="progress bar"),
        pytest.param(b" 50%|###  |\r", " 50%|###  |", id="bar that ends with a return"),
        pytest.param(
            b" 50%|###  |\rTraceback (most recent call last):",
            "Traceback (most recent call last):",
            id="error after a bar",
        ),
        pytest.param(b"\x1b[31mred\x1b[0m\x1b[2K\x07", "red", id="escapes"),
        pytest.param(b"\xff\xfe\x00ok", "��ok", id="binary"),
        pytest.param(b"", "", id="empty"),
        pytest.param("Verlust fällt".encode(), "Verlust fällt", id="unicode"),
    ],
)
def test_what_comes_out_is_plain_text(raw, text):
    """
    Of a bar the last state, and nothing that moves a cursor.
    """
    assert text == clean(raw)


def test_the_end_of_a_file_is_read_within_a_bound(tmp_path):
    """
    Of a huge file only the end is read.
    """
    path = tmp_path / "log"
    path.write_bytes(b"".join(b"line %06d\n" % i for i in range(1000)))

    assert ["998", "line 000999"] == read_tail(path, limit_bytes=16)


@pytest.mark.parametrize("raw", [b"", b"one", b"one\n"])
def test_short_files_are_read_whole(tmp_path, raw):
    """
    With or without a last newline, there is one line in a file of one line.
    """
    path = tmp_path / "log"
    path.write_bytes(raw)

    assert raw.decode().split() == read_tail(path)


def test_a_file_that_is_gone_has_no_lines(tmp_path):
    """
    Logs may be removed while they are looked for.
    """
    assert [] == read_tail(tmp_path / "none")


def test_tail_takes_the_last_lines_of_one_rank(folder):
    """
    `logs --rank 1 -n 2` shows two lines of each stream of that rank.
    """
    append(folder, b"a\nb\n", rank=1)

    assert [["a", "b"], []] == [texts(tail(folder, number, rank=1)) for number in (2, 0)]


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("launcher.log", (-1, "output")),
        ("none_abc/attempt_0/3/stderr.log", (3, "stderr")),
        ("host_rank12.log", (12, "output")),
        ("none_abc/attempt_0/x/stderr.log", None),
        ("a/none_abc/attempt_0/3/stderr.log", None),
        ("a/host_rank12.log", None),
        ("MANIFEST.json", None),
        ("", None),
    ],
)
def test_by_its_path_a_log_is_known_before_it_is_there(path, expected):
    """
    What is no log is not fetched from a bucket.
    """
    assert expected == stream_of(path)
