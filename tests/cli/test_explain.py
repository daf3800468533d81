"""`explain`: saved readings in plain words, for people and for scripts."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from runner.cli.main import main

ROOT = Path(__file__).parents[2]
CORPUS = {
    record["id"]: record
    for record in map(json.loads, (ROOT / "tests" / "data" / "machines" / "machines.jsonl").read_text().splitlines())
}


@pytest.fixture
def saved(tmp_path):
    """A file with these bytes; returns its path."""

    def save(content):
        path = tmp_path / "reading.txt"
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return str(path)

    return save


@pytest.mark.parametrize("record", CORPUS.values(), ids=CORPUS)
def test_every_real_reading_has_json_and_words(record, saved, capsys):
    """
    Exit code 0 for what was read, 2 for what is broken; JSON in either case.
    """
    path = saved(record["text"])
    expected = 2 if record["expected"].get("error") else 0

    assert expected == main(["explain", path, "--json"])
    assert record["kind"] == json.loads(capsys.readouterr().out)["kind"]
    assert expected == main(["explain", path])
    assert re.search(r"^(ok|warning|refuse): ", capsys.readouterr().out, re.MULTILINE)


TOPO_KEYS = {"kind", "gpus", "pairs", "link_class", "weakest_link", "all_pairs_nvlink", "error", "findings"}


def test_json_of_a_topology_has_its_keys_even_when_it_is_cut(saved, capsys):
    """
    A script finds the same fields, and `message`.
    """
    whole = CORPUS["topo-h800-x4-forum"]["text"]

    assert 0 == main(["explain", saved(whole), "--json"])
    assert set(json.loads(capsys.readouterr().out)) >= TOPO_KEYS
    assert 2 == main(["explain", saved("\n".join(whole.splitlines()[:2])), "--json"])
    cut = json.loads(capsys.readouterr().out)
    assert set(cut) >= TOPO_KEYS | {"message"}
    assert ("topo", True, "unknown") == (cut["kind"], cut["error"], cut["link_class"])


def test_what_is_no_reading_is_unknown(saved, capsys):
    """
    The message says what is known.
    """
    assert 2 == main(["explain", saved(b"\x00\x01\x02"), "--json"])
    fields = json.loads(capsys.readouterr().out)

    assert ("unknown", True, "this is no text") == (fields["kind"], fields["error"], fields["message"])
    assert "nvidia-smi topo -m" in fields["findings"][0]["hint"]


def test_a_dash_reads_standard_input():
    """
    For pasting.
    """
    argv = (sys.executable, "-m", "runner", "explain", "-", "--json")
    text = CORPUS["shm-docker-default-h100"]["text"].encode()
    done = subprocess.run(argv, input=text, capture_output=True, cwd=ROOT, timeout=60, check=True)

    assert 67108864 == json.loads(done.stdout)["size_bytes"]


def test_a_file_that_is_not_there_is_a_usage_error(capsys):
    """
    With the path, and without a traceback.
    """
    assert 2 == main(["explain", "/nowhere/topo.txt"])
    assert "/nowhere/topo.txt: expected a file that can be read" in capsys.readouterr().err


def test_a_file_without_end_is_read_in_part(saved, capsys):
    """
    A log of gigabytes takes no more memory than its beginning.
    """
    text = CORPUS["topo-h800-x4-forum"]["text"]

    assert 0 == main(["explain", saved(text + "\nx" * (3 << 20)), "--json"])
    fields = json.loads(capsys.readouterr().out)
    assert (True, 6) == (fields["truncated"], len(fields["pairs"]))


def test_the_page_shows_what_is_printed(saved, capsys):
    """
    The example in the documentation is real.
    """
    reading, printed = re.findall(r"```text\n(.*?)```", (ROOT / "docs" / "explain.md").read_text(), re.DOTALL)

    assert 0 == main(["explain", saved(reading)])
    assert printed == capsys.readouterr().out
