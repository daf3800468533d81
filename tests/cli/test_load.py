"""job.yaml: each mistake has its exact line, whatever comes in."""

import base64
import time
from pathlib import Path

import pytest

from runner.cli.load import MAX_BYTES, load_job
from runner.errors import JobError


def load(text: str, **env: str):
    return load_job(None, {"RUNNER_JOB": text, "VRAMFARM_WORKSPACE": "/w", **env}).job


def mistakes(tmp_path: Path, text: str) -> list[str]:
    """The lines of the error, with the file's folder left out."""
    path = tmp_path / "job.yaml"
    path.write_text(text)
    with pytest.raises(JobError) as caught:
        load_job(str(path), {})
    assert 2 == caught.value.exit_code
    return str(caught.value).replace(f"{tmp_path}/", "").splitlines()


MISTAKES = {
    "empty file": ("", "job.yaml: expected keys and values such as command: train.py, found nothing"),
    "only a comment": ("# later\n", "job.yaml: expected keys and values such as command: train.py, found nothing"),
    "a list": ("- a\n- b\n", "job.yaml:1: expected keys and values such as command: train.py, found a list"),
    "a word": ("train.py", "job.yaml:1: expected keys and values such as command: train.py, found 'train.py'"),
    "no command": ("name: a", "job.yaml:1: command: missing; say what to run, such as command: train.py"),
    "empty command": ("command: ''", "job.yaml:1: command: must not be empty"),
    "null command": ("command:", "job.yaml:1: command: must be text, got nothing"),
    "misspelt key": ("command: t\ncomand: t", "job.yaml:2: comand: unknown key, did you mean 'command'?"),
    "misspelt nested key": (
        "command: t\ncheckpoint:\n  keep_lats: 2",
        "job.yaml:3: checkpoint.keep_lats: unknown key, did you mean 'keep_last'?",
    ),
    "key of another section": (
        "command: t\nsave_interval: 30m",
        "job.yaml:2: save_interval: unknown key, it belongs under 'checkpoint'",
    ),
    "key of the top level": (
        "command: t\nfinish:\n  workdir: /x",
        "job.yaml:3: finish.workdir: unknown key, it belongs at the top level",
    ),
    "key like no other": (
        "command: t\npreflight: {zzz: 1}",
        "job.yaml:2: preflight.zzz: unknown key; known here: comm_test, min_bus_bandwidth",
    ),
    "too few kept": (
        "command: t\ncheckpoint:\n\n  keep_last: 1",
        "job.yaml:4: checkpoint.keep_last: must be at least 2, got 1",
    ),
    "duration without unit": (
        "command: t\ncheckpoint: {save_interval: 30}",
        "job.yaml:2: checkpoint.save_interval: must be a duration such as 90s, 30m or 1h30m, got 30",
    ),
    "a choice or a duration": (
        "command: t\nhang: {step_timeout: soon}",
        "job.yaml:2: hang.step_timeout: must be auto or a duration such as 90s, 30m or 1h30m, got 'soon'",
    ),
    "a size without its unit": (
        "command: t\nlogs: {max_size: 1000}",
        "job.yaml:2: logs.max_size: must be a size with its unit such as 64MiB or 10GB, got 1000",
    ),
    "a size without its unit, as text": (
        "command: t\noffload: {max_bandwidth: '50000000'}",
        "job.yaml:2: offload.max_bandwidth: must be a size with its unit such as 64MiB or 10GB, got '50000000'",
    ),
    "a choice, or a size without its unit": (
        "command: t\npreflight: {min_bus_bandwidth: 5000000000}",
        "job.yaml:2: preflight.min_bus_bandwidth: must be auto or a size with its unit such as 64MiB or 10GB, got 5000000000",
    ),
    "a size of next to nothing": (
        "command: t\noffload: {max_bandwidth: 50B}",
        "job.yaml:2: offload.max_bandwidth: must be at least 1KB, got '50B'",
    ),
    "no bandwidth": (
        "command: t\noffload: {max_bandwidth: 0}",
        "job.yaml:2: offload.max_bandwidth: must be a size with its unit such as 64MiB or 10GB, got 0",
    ),
    "a variable the system refuses": (
        'command: t\nenv: {"A=B": "1"}',
        "job.yaml:2: env: must have names without '=' (write NAME: value); not so: 'A=B'",
    ),
    "size": (
        "command: t\noffload: {max_bandwidth: 5 parsecs}",
        "job.yaml:2: offload.max_bandwidth: must be a size with its unit such as 64MiB or 10GB, got '5 parsecs'",
    ),
    "money": (
        "command: t\nlimits: {max_cost: -3}",
        "job.yaml:2: limits.max_cost: must be an amount of money such as 300 or 12.50, got -3",
    ),
    "clock without a zone": (
        "command: t\nlimits: {until: '07:00'}",
        "job.yaml:2: limits.until: must be a clock time with a zone such as 07:00 Europe/Berlin, or an ISO date and time such as 2026-12-01T07:00+01:00, got '07:00'",
    ),
    "date without a clock": (
        "command: t\nlimits: {until: '20261130'}",
        "job.yaml:2: limits.until: must be a clock time with a zone such as 07:00 Europe/Berlin, or an ISO date and time such as 2026-12-01T07:00+01:00, got '20261130'",
    ),
    "no time between saves": (
        "command: t\ncheckpoint: {save_interval: 0s}",
        "job.yaml:2: checkpoint.save_interval: must be more than 0, got '0s'",
    ),
    "a step in no time": (
        "command: t\nhang: {step_timeout: 0s}",
        "job.yaml:2: hang.step_timeout: must be auto or more than 0, got '0s'",
    ),
    "no time at all": (
        "command: t\nlimits: {max_duration: 0s}",
        "job.yaml:2: limits.max_duration: must be more than 0, got '0s'",
    ),
    "an age": (
        "command: t\nlimits: {max_duration: 99999999999d}",
        "job.yaml:2: limits.max_duration: must be a duration of at most 3650d, got '99999999999d'",
    ),
    "no money": ("command: t\nlimits: {max_cost: 0}", "job.yaml:2: limits.max_cost: must be more than 0, got 0"),
    "too many kept": (
        "command: t\ncheckpoint: {keep_last: 999999999999999999999999}",
        "job.yaml:2: checkpoint.keep_last: must be at most 10000, got 999999999999999999999999",
    ),
    "open quotes": (
        "name: a\ncommand: train.py 'x",
        "job.yaml:2: command: cannot be split into words: no closing quotation; close the quotes",
    ),
    "wrong choice": (
        "command: t\nfinish: {on_success: stay}",
        "job.yaml:2: finish.on_success: must be stop or keep, got 'stay'",
    ),
    "number for text": ("command: t\nname: 7", "job.yaml:2: name: must be text, got 7"),
    "text for number": (
        "command: t\nmodel: {parameters: many}",
        "job.yaml:2: model.parameters: must be a number such as 0.5 or 8e9, got 'many'",
    ),
    "endless number": (
        "command: t\nmodel: {parameters: 1e999}",
        "job.yaml:2: model.parameters: must be a finite number, got 1e999",
    ),
    "list for number": ("command: t\ncards: [1]", "job.yaml:2: cards: must be all or a whole number, got a list"),
    "no cards": ("command: t\ncards: 0", "job.yaml:2: cards: must be all, or 1 to 64, got 0"),
    "word for yes or no": (
        "command: t\npreflight: {comm_test: maybe}",
        "job.yaml:2: preflight.comm_test: must be true or false, got 'maybe'",
    ),
    "text for section": (
        "command: t\ncheckpoint: 3",
        "job.yaml:2: checkpoint: must be a section of keys and values, got 3",
    ),
    "section for list": ("command: t\nsetup: {a: b}", "job.yaml:2: setup: must be a list, got a section"),
    "item of a list": ("command: t\nsetup:\n- a\n- 2", "job.yaml:4: setup[2]: must be text, got 2"),
    "key of an item": ("command: t\ndata:\n- from: s3://a/b", "job.yaml:3: data[1].to: missing"),
    "data from nowhere": (
        "command: t\ndata: [{from: ./corpus, to: /c}]",
        "job.yaml:2: data[1].from: must be s3://bucket/path or file:///path, got './corpus'",
    ),
    "outputs of one name": (
        "command: t\noutputs: [/a/logs, /b/logs]",
        "job.yaml:2: outputs: must have folders of different names, which they keep in the store; not so: logs",
    ),
    "no kind of source": ("command: t\nsource: {gti: x}", "job.yaml:2: source: must have one of git, path, archive"),
    "key of a source": (
        "command: t\nsource:\n  git: a\n  reff: b",
        "job.yaml:4: source.reff: unknown key, did you mean 'ref'?",
    ),
    "path as a store": (
        "command: t\noffload: {to: /mnt/x}",
        "job.yaml:2: offload.to: must be s3://bucket/prefix or file:///folder, got '/mnt/x'",
    ),
    "host in a file address": (
        "command: t\noffload: {to: 'file://host/x'}",
        "job.yaml:2: offload.to: must be s3://bucket/prefix or file:///folder, got 'file://host/x'",
    ),
    "a way out of the bucket": (
        "command: t\noffload: {to: s3://runs/../a}",
        "job.yaml:2: offload.to: must be s3://bucket/prefix or file:///folder, got 's3://runs/../a'",
    ),
    "two slashes between names": (
        "command: t\noffload: {to: s3://runs//a}",
        "job.yaml:2: offload.to: must be s3://bucket/prefix or file:///folder, got 's3://runs//a'",
    ),
    "a zero byte in an address": (
        'command: t\noffload: {to: "s3://runs/a\\0b"}',
        "job.yaml:2: offload.to: must be s3://bucket/prefix or file:///folder, got 's3://runs/a\\x00b'",
    ),
    "an endpoint without its scheme": (
        "command: t\noffload: {to: s3://runs, endpoint: 'me:hunter2@127.0.0.1:9000'}",
        "job.yaml:2: offload.endpoint: expected http:// or https:// and a host, found no such address",
    ),
    "a region of words": (
        "command: t\noffload: {to: s3://runs, region: us east 1}",
        "job.yaml:2: offload.region: must be one word such as eu-central-1, got 'us east 1'",
    ),
    "an endpoint that nothing asks": (
        "command: t\noffload:\n  to: file:///mnt\n  endpoint: http://127.0.0.1:9000",
        "job.yaml:4: offload.endpoint: expected an s3:// address that it is for, found none: offload.to is a folder; leave one of them out",
    ),
    "nothing in env": ("command: t\nenv:\n  A:", "job.yaml:3: env.A: must be text, got nothing"),
    "placeholder": (
        "command: t\ncheckpoint:\n  dir: '/w/{nmae}/c'",
        "job.yaml:3: checkpoint.dir: expected {workspace}, {name}, {date} or {config_dir}, found {nmae}",
    ),
    "key twice": ("command: t\ncommand: u", "job.yaml:2: command: written twice, first in line 1"),
    "no YAML": (
        "command: a: b",
        "job.yaml:1: not YAML: a second ': ' in one line, or a line that is indented too far; text with ': ' in it needs quotes",
    ),
    "a quote that is not closed": (
        "command: t\nname: 'a\ncards: 1\n",
        "job.yaml:4: not YAML: the quote of line 2 is never closed",
    ),
    "an unquoted variable": (
        "command: t\nenv: {X: ${NOPE}}",
        "job.yaml:2: not YAML: expected ',' or '}', but got '{', in the brackets of line 2; text with { or [ in it wants quotes",
    ),
    "a bracket that is not closed": (
        "command: t\nsecrets: [A\ncards: 1\n",
        "job.yaml:3: not YAML: expected ',' or ']', but got ':', in the brackets of line 2; text with { or [ in it wants quotes",
    ),
    "a merge": ("command: t\ncheckpoint:\n  <<: {}", "job.yaml:3: <<: nothing is merged here; write the keys out"),
    "a key of another tool": (
        "command: t\nlimits: {max_hours: 8}",
        "job.yaml:2: limits.max_hours: unknown key; known here: max_duration, until, max_cost, on_limit",
    ),
    "parameters by a letter": (
        "command: t\nmodel: {parameters: 8B}",
        "job.yaml:2: model.parameters: must be a number such as 0.5 or 8e9, got '8B'",
    ),
    "tab": ("command: t\nfinish:\n\thold: 0s", "job.yaml:3: not YAML: a tab; YAML is indented with spaces"),
    "two documents": ("command: t\n---\ncommand: u", "job.yaml:2: a second document starts here; one file is one job"),
    "unknown alias": ("command: *x", "job.yaml:1: *x: nothing above is called &x"),
    "tag": (
        "command: !!python/object:os.system [x]",
        "job.yaml:1: tag:yaml.org,2002:python/object:os.system: tags mean nothing here; leave it out",
    ),
    "list as key": ("? [command]\n: t", "job.yaml:1: a key must be text"),
    "control character": (
        "command: \x01",
        "job.yaml: not YAML: unacceptable character #x0001: special characters are not allowed",
    ),
}


@pytest.mark.parametrize(("text", "expected"), MISTAKES.values(), ids=MISTAKES.keys())
def test_each_mistake_has_its_exact_line(tmp_path, text, expected):
    """
    A mistake is one line: file, line of the key, key, what was expected, what was found.
    """
    assert [expected] == mistakes(tmp_path, text)


def test_all_mistakes_come_at_once_in_the_order_of_their_lines(tmp_path):
    """
    Nobody fixes a job one error message at a time.
    """
    text = "cards: 0\ncheckpoint:\n  keep_last: 1\n  save_interval: x\nsecrets: [A]\ncolour: red\n"

    found = [line.split(": ")[0:2] for line in mistakes(tmp_path, text)]

    expected = [
        ["job.yaml:1", "cards"],
        ["job.yaml:1", "command"],
        ["job.yaml:3", "checkpoint.keep_last"],
        ["job.yaml:4", "checkpoint.save_interval"],
        ["job.yaml:6", "colour"],
    ]
    assert expected == sorted(found)


@pytest.mark.parametrize(
    "section",
    [
        "secrets: [sk-live/0123456789]",
        "notify: ['https://hook/0123456789']",
        "notify: sk-0123456789",
        "env: sk-0123456789",
    ],
)
def test_a_secret_in_the_wrong_place_is_not_repeated(tmp_path, section):
    """
    Messages end up in logs, and a value where a name belongs may be a secret.
    """
    found = mistakes(tmp_path, f"command: t\n{section}\n")

    assert "0123456789" not in "\n".join(found)


BOMBS = {
    "deep": "[" * 100_000,
    "deep mapping": "{a: " * 100_000,
    "deep dashes": "- " * 100_000,
    "aliases": "a: &a [x,x,x,x,x,x,x,x,x,x]\n"
    + "".join(f"{b}: &{b} [{','.join([f'*{a}'] * 10)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)),
    "many": "a: [" + "x," * 200_000 + "]",
    "itself": "a: &a [*a]",
}


@pytest.mark.parametrize("text", BOMBS.values(), ids=BOMBS.keys())
def test_a_bomb_is_refused_at_once(tmp_path, text):
    """
    A document that stands for much more than its size is refused before it is built.
    """
    started = time.monotonic()

    assert 1 == len(mistakes(tmp_path, text))
    assert time.monotonic() - started < 10


def test_a_file_of_more_than_a_mebibyte_is_refused(tmp_path):
    """
    Somebody named the data set instead of the job.
    """
    assert ["job.yaml: expected a job.yaml of at most 1 MiB, found more"] == mistakes(tmp_path, "#" * (MAX_BYTES + 1))


def test_text_that_is_not_utf8_names_its_line(tmp_path):
    """
    An editor's Latin-1 is found by its line.
    """
    path = tmp_path / "job.yaml"
    path.write_bytes(b"command: t\nname: \xe9\n")

    with pytest.raises(JobError, match=r"job.yaml:2: expected UTF-8 text, found byte 0xe9"):
        load_job(str(path), {})


def test_yaml_12_reads_what_is_meant():
    """
    `8e9` is a number, `no` and `1:30` are text, and values of env are text as they were written.
    """
    job = load(
        "command: t\nname: no\nmodel: {parameters: 8e9}\n"
        "env: {THREADS: 8, RATE: 1e3, FLAG: false, CLOCK: 1:30, OFF: no, DAY: 2026-01-01}\n"
    )

    assert 8e9 == job.model.parameters
    assert "no" == job.name
    expected = {"THREADS": "8", "RATE": "1e3", "FLAG": "false", "CLOCK": "1:30", "OFF": "no", "DAY": "2026-01-01"}
    assert expected == job.env


def test_an_empty_section_means_its_defaults():
    """
    `offload:` with nothing under it is what is left when somebody comments out its lines.
    """
    assert load("command: t") == load("command: t\noffload:\ncheckpoint:\nlimits:\n")


def test_aliases_are_understood():
    """
    An honest anchor is no bomb.
    """
    assert ("a", "a") == load("command: t\nsetup: [&x a, *x]").setup


@pytest.mark.parametrize("encode", [base64.b64encode, base64.urlsafe_b64encode, base64.encodebytes])
def test_the_variable_may_hold_base64(encode):
    """
    Launch forms of providers do not keep line breaks.
    """
    text = "command: train.py --x ???>>>\nname: from-variable\n"

    assert "from-variable" == load(encode(text.encode()).decode()).name


def test_no_job_says_what_to_do():
    """
    Without a source and without the variable there is one hint: how to name the file.
    """
    with pytest.raises(JobError) as caught:
        load_job(None, {})

    assert caught.value.hint.startswith("name a file")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("ftp://u:pw@host/job.yaml?key=1", "ftp://host/job.yaml: expected a path, - or an https:// or s3:// address"),
        ("/does/not/exist.yaml", "/does/not/exist.yaml: cannot be read: no such file or directory"),
        ("/", "/: expected a file, found a folder"),
    ],
)
def test_a_source_that_cannot_be_read(source, expected):
    """
    One line says which source and why, without what an address may hide.
    """
    with pytest.raises(JobError) as caught:
        load_job(source, {})

    assert expected == str(caught.value)


def test_an_https_address_that_does_not_answer_is_one_line():
    """
    Nobody listens on port 1.
    """
    with pytest.raises(JobError, match=r"^https://127.0.0.1:1/job.yaml: cannot be read: .*refused"):
        load_job("https://127.0.0.1:1/job.yaml?token=x", {})


def test_folders_and_names_are_filled_in(tmp_path):
    """
    Placeholders are gone, and relative folders start at job.yaml, wherever it was called from.
    """
    path = tmp_path / "night" / "job.yaml"
    path.parent.mkdir()
    path.write_text(
        'name: "n-{date}"\n'
        "command: train.py --day {date} {resume_args}\n"
        "source: {path: ../code}\n"
        "data: [{from: 's3://b/{date}', to: '{workspace}/in'}]\n"
        "offload: {to: 'file://{config_dir}/../store'}\n"
    )

    job = load_job(str(path), {"VRAMFARM_WORKSPACE": "/w", "RUNNER_DATE": "2026-01-31"}).job

    assert "n-2026-01-31" == job.name
    assert "train.py --day 2026-01-31 {resume_args}" == job.command
    assert str(tmp_path / "code") == job.source.path
    assert ("s3://b/2026-01-31", "/w/in") == (job.data[0].source, job.data[0].to)
    assert f"file://{tmp_path}/store" == job.offload.to
    assert "/w/n-2026-01-31/checkpoints" == job.checkpoint.dir
    assert "/w" == job.finish.save_folder


def test_an_endpoint_may_be_where_the_data_is():
    """
    Checkpoints go to a folder then, and the server is asked for the data only.
    """
    job = load("command: t\noffload: {to: 'file:///mnt', endpoint: 'http://h:9'}\ndata: [{from: 's3://b/a', to: /c}]")

    assert "http://h:9" == job.offload.endpoint


def test_outputs_need_a_store():
    """
    A folder that is to be copied, and nowhere to copy it, is a mistake that costs a night's work.
    """
    with pytest.raises(JobError, match=r"outputs: expected a store to copy them to \(offload\.to\), found none"):
        load("command: t\noutputs: [/board]")


@pytest.mark.parametrize(
    ("output", "what"),
    [
        ("{workspace}", r"run folder \(/w/n\)"),
        ("/w/n", r"run folder \(/w/n\)"),
        ("{workspace}/{name}/checkpoints", r"checkpoints \(/w/n/checkpoints\)"),
        ("{workspace}/n/checkpoints/step-1", r"checkpoints \(/w/n/checkpoints\)"),
    ],
)
def test_outputs_are_the_scripts_own_folders(tmp_path, output, what):
    """
    The runner's records change all the time, and checkpoints would go up twice and stay for ever.
    """
    (tmp_path / "job.yaml").write_text(f"command: t\nname: n\noffload: {{to: s3://b}}\noutputs: ['{output}']")
    with pytest.raises(JobError, match=f"job.yaml:4: outputs: /w.*found one of the {what}; name the folders"):
        load_job(str(tmp_path / "job.yaml"), {"VRAMFARM_WORKSPACE": "/w"})


@pytest.mark.parametrize(
    ("target", "what"), [("", "run folder"), ("n", "run folder"), ("n/checkpoints", "checkpoints")]
)
def test_a_link_to_the_runners_own_folders_is_no_output(tmp_path, target, what):
    """
    It is what it leads to.
    """
    (tmp_path / "w" / "n" / "checkpoints").mkdir(parents=True)
    (tmp_path / "w" / "o").symlink_to(tmp_path / "w" / target)
    (tmp_path / "job.yaml").write_text("command: t\nname: n\noffload: {to: s3://b}\noutputs: ['{workspace}/o']")
    with pytest.raises(JobError, match=f"job.yaml:4: outputs: .*/w/o: expected .* found one of the {what}"):
        load_job(str(tmp_path / "job.yaml"), {"VRAMFARM_WORKSPACE": str(tmp_path / "w")})


def test_a_value_is_not_filled_twice():
    """
    What was put in is not searched again: a folder called `{name}` stays one.
    """
    job = load("command: t\nworkdir: '{workspace}'", VRAMFARM_WORKSPACE="/x{name}").workdir

    assert "/x{name}" == job
