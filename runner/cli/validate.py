"""`validate`: what a job would do, in plain words, and what is worth a second look."""

from __future__ import annotations

import argparse
import difflib
import os
import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from runner.adapters.frameworks import framework_name
from runner.adapters.launchers import Launch, check_command, check_first_word, split_command
from runner.adapters.providers import PROVIDERS
from runner.adapters.providers.contract import Answer, Keep
from runner.adapters.secrets import FOLDER, find_values
from runner.addresses import scheme_of
from runner.cli.load import CHECK_IT, LoadedJob, load_job, place_of
from runner.cli.naming import add_job, named_job
from runner.cli.output import out, out_json
from runner.cli.planned import check_framework, planned
from runner.cli.script import check_script
from runner.errors import JobError
from runner.facts import ServerState
from runner.figures import size, span
from runner.job import (
    ArchiveSource,
    AtEnd,
    Batch,
    FrameworkName,
    GitSource,
    Job,
    OnLimit,
    PathSource,
    ProviderName,
    format_duration,
)
from runner.policy.limits import next_time
from runner.policy.resume import is_elsewhere
from runner.storage.offsite.outputs import tell_left

_VARIABLE: Final = re.compile(r"\$\{?[A-Za-z_]\w*\}?")
_PLACEHOLDER: Final = re.compile(r"(?<!\$)\{([A-Za-z_]+)\}")
_FILLED: Final = (
    *("workspace", "name", "date", "config_dir"),
    *("resume_args", "checkpoint_dir", "grad_accum", "world_size"),
)
_RARE: Final = timedelta(hours=2)


def configure(parser: argparse.ArgumentParser) -> None:
    add_job(parser)
    parser.add_argument("--json", action="store_true", help="the job with every default, and the warnings, as JSON")


def run(args: argparse.Namespace) -> int:
    try:
        loaded = load_job(named_job(args), os.environ)
    except JobError as error:  # nobody is told to do what was just done
        raise JobError(str(error), hint=error.hint.removeprefix(CHECK_IT)) from None
    check_framework(loaded.job, partial(place_of, loaded))
    check_script(loaded)
    warnings = [
        *planned(loaded.job),
        *_what_is_missing(loaded),
        *_warn_of_placeholders(loaded),
        *_warn_of_variables(loaded),
        *_warn_of_batch(loaded.job),
        *_warn_of_fork(loaded.job),
        *_warn_of_the_time(loaded, datetime.now(UTC)),
        *warn(loaded.job, os.environ),
    ]
    if args.json:
        out_json({"job": loaded.job.model_dump(mode="json", by_alias=True), "warnings": warnings})
        return 0
    for topic, text in describe(loaded, datetime.now(UTC)):
        out(f"{topic:<10} {text}")
    for warning in warnings:
        out(f"warning: {warning}")
    return 0


def describe(loaded: LoadedJob, now: datetime) -> Iterator[tuple[str, str]]:
    """What the job would do, a topic a line."""
    job = loaded.job
    yield "job", f"{job.name}: {job.launcher} {' '.join(job.command.split())}"
    yield "code", _code(loaded)
    yield "cards", _cards(job)
    yield "saves", _saves(job)
    yield "copies", _copies(job)
    yield "failures", _failures(job)
    yield "limits", _limits(job, now)
    yield "at the end", _end(job)
    if after := _afterwards(job):
        yield "after it", after


def _code(loaded: LoadedJob) -> str:
    job = loaded.job
    match job.source:
        case GitSource(git=git, ref=ref):
            where = f"{ref} of {git}"
        case PathSource(path=path):
            where = path
        case ArchiveSource(archive=archive):
            where = archive
        case None:
            where = "already here"
    base = "the source's folder" if job.source else str(loaded.folder)
    workdir = base if job.workdir is None else job.workdir if job.workdir[0] == "/" else f"{base}/{job.workdir}"
    steps = f"; before that: {', '.join(job.setup)}" if job.setup else ""
    return f"{where}; runs in {workdir}{steps}"


def _cards(job: Job) -> str:
    cards = "all there are" if job.cards == "all" else f"{job.cards}, or the machine is refused"
    batch = f"; {_batch(job.batch)}" if job.batch else ""
    return (f"{cards}; without any, {job.cpu_processes} processes on the CPU" if job.cpu_processes else cards) + batch


def _batch(batch: Batch) -> str:
    micro_batches = batch.global_ // batch.per_card
    return f"{batch.global_} samples a step on any number of them that divides {micro_batches}, {batch.per_card} a card"


def _saves(job: Job) -> str:
    policy, framework = job.checkpoint, framework_name(job)
    resume = {"auto": "goes on from the newest that verifies", "never": "starts over"}
    if framework is not FrameworkName.VRAMFARM:
        return (
            f"by {framework}, as often as the script does, into {policy.watch}; complete ones are copied, and the last "
            f"{policy.keep_last} stay in {policy.dir}; {resume.get(policy.resume, f'goes on from {policy.resume}')}"
            if framework is not FrameworkName.NONE
            else "NONE that anybody watches (framework: none)"
        )
    return (
        f"every {format_duration(policy.save_interval)}, the last {policy.keep_last} stay in {policy.dir}; "
        f"{resume.get(policy.resume, f'goes on from {policy.resume}')}"
    )


def _copies(job: Job) -> str:
    policy = job.offload
    if policy.to is None:
        return "NONE: checkpoints stay on this machine's disk"
    limit = f", at most {size(policy.max_bandwidth)}/s" if policy.max_bandwidth else ""
    return f"each checkpoint to {policy.to}/{job.name}, the last {policy.keep_last} stay there{limit}"


def _failures(job: Job) -> str:
    policy = job.restart
    return (
        f"starts again after {format_duration(policy.initial_delay)}, later up to {format_duration(policy.max_delay)}; "
        f"gives up after {policy.max_restarts_without_progress} in a row without a new checkpoint"
    )


def _limits(job: Job, now: datetime) -> str:
    limits = job.limits
    until = next_time(limits.until, now) if limits.until else now
    parts = [
        format_duration(limits.max_duration) if limits.max_duration else "",
        f"at {limits.until} ({_moment(until, now)})" if limits.until else "",
        f"{limits.max_cost} spent" if limits.max_cost is not None else "",
    ]
    first = ", ".join(filter(None, parts)) or "24h (no limit is set)"
    then = "what is only here is saved first" if limits.on_limit is OnLimit.KEEP_DATA else "not a minute more"
    return f"{first}; then the server stops, {then}"


def _moment(at: datetime, now: datetime) -> str:
    """`in 8h 12m, 2026-12-01 06:00 UTC`: who wrote no zone, or another day, sees it."""
    when = f"in {span((at - now).total_seconds())}" if at > now else f"{span((now - at).total_seconds())} ago"
    return f"{when}, {at.astimezone(UTC):%Y-%m-%d %H:%M} UTC"


def _end(job: Job) -> str:
    if job.provider.kind is ProviderName.NONE:
        return "no server to stop; `run` ends when the job does"
    kept = f"with {job.finish.save_folder} saved by the provider"
    safe = f"its disk deleted if everything is verified in the store, else {kept}" if job.offload.to else kept
    success = f"the server stops, {safe}" if job.finish.on_success is AtEnd.STOP else "the server stays"
    failure = "the same after a failure" if job.finish.on_failure is AtEnd.STOP else "after a failure it stays"
    if job.finish.on_success is AtEnd.KEEP and job.finish.on_failure is AtEnd.STOP:
        failure = f"after a failure it stops, {safe}"
    return f"{success}; {failure}"


def _afterwards(job: Job) -> str:
    """What the provider that job.yaml names bills when the server is off; of another it is told at the start."""
    provider = PROVIDERS.get(job.provider.kind)
    if provider is None or job.finish.on_success is AtEnd.KEEP:
        return ""
    kept = provider.explain(Keep(job.finish.save_folder), Answer(ServerState.UNKNOWN))
    if not job.offload.to:
        return kept
    return f"{provider.explain(Keep(None), Answer(ServerState.UNKNOWN))}; if something is only there: {kept}"


def _what_is_missing(loaded: LoadedJob) -> Iterator[str]:
    """Where the code is already here, so must be the script; it may still be on its way to another machine."""
    job = loaded.job
    code = loaded.folder / job.workdir if job.workdir else loaded.folder
    words = split_command(job.command, resume_args=(), values={})
    try:
        if job.source is not None:
            check_first_word(job.launcher, words, cwd=None)
        elif not words or "{" not in words[0]:
            check_command(job.launcher, Launch(python="python", command=words, num_procs=1, log_dir=code), cwd=code)
    except JobError as error:
        yield f"{error}; {error.hint}" if error.hint else f"{error}"


def _warn_of_placeholders(loaded: LoadedJob) -> Iterator[str]:
    """They are not refused: braces may be the script's own."""
    for name in dict.fromkeys(_PLACEHOLDER.findall(loaded.written.command)):
        if name in _FILLED:
            continue
        close = difflib.get_close_matches(name, _FILLED, n=1)
        meant = f", did you mean {{{close[0]}}}?" if close else ""
        yield f"{place_of(loaded, 'command')}command: nobody fills in {{{name}}}: the script gets it as it stands{meant}"


def _warn_of_variables(loaded: LoadedJob) -> Iterator[str]:
    """No shell reads the command, nor values of `env`; it may be text all the same."""
    job = loaded.written
    words = split_command(job.command, resume_args=(), values={})
    texts = [] if "-c" in words else [("command", job.command)]
    for key, text in [*texts, *((f"env.{name}", value) for name, value in job.env.items())]:
        for name in dict.fromkeys(_VARIABLE.findall(text)):
            yield f"{place_of(loaded, key)}{key}: {name} stays as it stands: no shell reads it; write the value out, or have the script read the variable"


def _warn_of_batch(job: Job) -> Iterator[str]:
    if job.batch is None and "{grad_accum}" in job.command:
        yield "command: {grad_accum} is always 1 as long as there is no `batch`"


def _warn_of_fork(job: Job) -> Iterator[str]:
    place = job.checkpoint.resume
    if is_elsewhere(place) and "://" not in place and not Path(place).is_dir():
        yield f"checkpoint.resume: expected a folder at {place}, found none here; the first start would be refused"


def _warn_of_the_time(loaded: LoadedJob, now: datetime) -> Iterator[str]:
    """Not refused: a run that is here may have reached its limit, and has its last things to copy."""
    text = loaded.job.limits.until
    if text and (at := next_time(text, now)) <= now:
        zone = "" if datetime.fromisoformat(text).tzinfo else "; no zone is named, which means UTC"
        yield f"{place_of(loaded, 'limits.until')}limits.until: expected a time in the future, found {text} ({_moment(at, now)}{zone}): the job would end before it trains"


def warn(job: Job, env: Mapping[str, str]) -> Iterator[str]:
    """What is allowed, and yet rarely meant."""
    yield from _not_kept(job)
    yield from _not_sent(job)
    if job.offload.to is None:
        yield "offload.to: nothing is copied off this machine; when the server is lost, so are the checkpoints"
    elif scheme_of(job.offload.to) == "file":
        yield "offload.to: a folder protects only if it is on another machine's disk"
    elif (path := urlsplit(job.offload.endpoint or "").path).strip("/"):
        yield f"offload.endpoint: has a path ({path}): offload.to names the bucket, the endpoint only the host, as in https://host:9000"
    yield from _passwords(job)
    if job.checkpoint.save_interval > _RARE:
        yield f"checkpoint.save_interval: a crash costs up to {format_duration(job.checkpoint.save_interval)} of training"
    if job.finish.on_success is AtEnd.KEEP:
        yield "finish.on_success: the server stays, and costs, after the job is done"
    if job.limits.on_limit is OnLimit.STOP_ANYWAY:
        yield "limits.on_limit: at the limit the server stops even with checkpoints that are only on its disk"
    if job.name == "job":
        yield "name: not set; a second job without a name is refused as a changed one"
    there = find_values((*job.secrets, *job.notify), env)
    for name in (*job.secrets, *job.notify):
        if name not in there:
            yield f"{name}: not in the environment here, nor in {FOLDER}"


def _not_kept(job: Job) -> Iterator[str]:
    checkpoints = ("checkpoint.dir", job.checkpoint.dir, "the checkpoints")
    outputs = (("outputs", output, "what of it the store does not take") for output in job.outputs)
    for key, place, what in (checkpoints, *outputs):
        if not Path(place).is_relative_to(job.finish.save_folder):
            yield (
                f"{key}: {place} is outside finish.save_folder ({job.finish.save_folder}): "
                f"a provider that keeps that folder does not keep {what}"
            )


def _not_sent(job: Job) -> Iterator[str]:
    if left := tell_left(job):
        yield f"outputs: this does not get into the store, so that the run ends with 4: {left}"


def _passwords(job: Job) -> Iterator[str]:
    plain = job.without_passwords()
    for key, is_secret in (("source", plain.source != job.source), ("offload.endpoint", plain.offload != job.offload)):
        if is_secret:
            yield f"{key}: has a password or a token in its address: whoever reads job.yaml can use it"
