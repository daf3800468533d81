"""What is written down is true: generated pages, examples, the README."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.cli.load import load_job
from runner.docs import DOCS, job_schema, main
from runner.errors import ALL_ERRORS
from runner.job import Job, format_duration, format_size, parse_duration, parse_size

ROOT = DOCS.parent
EXAMPLES = sorted((ROOT / "configs").glob("*.yaml"))


def test_generated_pages_say_what_the_code_says(capsys):
    """
    A field or an exit code that changes without its page is found; `make docs` writes it anew.
    """
    assert (0, "") == (main(["--check"]), capsys.readouterr().err)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_every_example_is_a_job(path):
    """
    An example that is refused teaches the wrong thing.
    """
    assert isinstance(load_job(str(path), {}).job, Job)


def test_there_are_examples():
    """
    The table above is not empty by accident.
    """
    assert {"minimal.yaml", "quickstart.yaml"} <= {path.name for path in EXAMPLES}


def test_the_job_in_the_readme_is_the_minimal_example(tmp_path):
    """
    The first thing that people copy is checked with the examples.
    """
    (block,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    copied = tmp_path / "job.yaml"
    copied.write_text(block)

    assert load_job(str(copied), {}).written == load_job(str(ROOT / "configs" / "minimal.yaml"), {}).written
    assert 12 >= len(block.splitlines())


@pytest.mark.parametrize("page", sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")]), ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path):
    """
    A page that was moved takes its links along.
    """
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())

    assert [] == [target for target in targets if not (page.parent / target).exists()]


def test_exit_codes_are_unique():
    """
    A script can tell how a run ended.
    """
    codes = [error.exit_code for error in ALL_ERRORS]

    assert sorted(set(codes)) == sorted(codes)


def test_the_schema_for_editors_knows_every_key_with_its_default():
    """
    Editors offer the keys of job.yaml, with defaults as job.yaml writes them.
    """
    schema = json.loads(job_schema())

    assert set(Job.model_fields) == set(schema["properties"])
    assert "30m" == schema["$defs"]["CheckpointPolicy"]["properties"]["save_interval"]["default"]
    assert "4GiB" == schema["$defs"]["LogPolicy"]["properties"]["max_size"]["default"]


@settings(deadline=None)
@given(st.timedeltas(min_value=parse_duration("0s"), max_value=parse_duration("1000d")))
def test_a_duration_is_read_back_as_it_was_written(duration):
    """
    To the millisecond: nobody waits for less.
    """
    written = format_duration(duration)

    assert written == format_duration(parse_duration(written))
    assert abs(parse_duration(written) - duration) <= parse_duration("1ms")


@given(st.integers(0, 10**16))
def test_a_size_is_read_back_as_it_was_written(num_bytes):
    """
    To the byte, so that a job that was accepted, or is handed to a server, is the job that was written.
    """
    assert num_bytes == parse_size(format_size(num_bytes))


def test_a_job_is_read_back_with_its_sizes():
    """
    What `validate --json` and the run folder hold is a job again, and has units as job.yaml has.
    """
    written = {
        "command": "t",
        "offload": {"max_bandwidth": "50MB/s"},
        "logs": {"max_size": "64 MiB"},
        "preflight": {"min_bus_bandwidth": "1.5GB"},
    }
    job = Job.model_validate(written)

    dumped = job.model_dump(mode="json", by_alias=True)

    sizes = (dumped["offload"]["max_bandwidth"], dumped["logs"]["max_size"], dumped["preflight"]["min_bus_bandwidth"])
    assert ("50MB", "64MiB", "1500MB") == sizes
    assert job == Job.model_validate(dumped)
