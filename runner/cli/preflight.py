"""`preflight`: look at this machine with the eyes of a job, and say go, go with these changes, or swap it."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from runner.adapters.providers import with_secrets
from runner.adapters.rented import rented
from runner.adapters.secrets import with_store_keys
from runner.cli.load import load_job
from runner.cli.loop import find_out, find_wrong
from runner.cli.naming import add_job, named_job
from runner.cli.output import out, out_json
from runner.facts import Preflight, Severity, Verdict
from runner.policy.findings import refuse
from runner.policy.limits import deadline
from runner.policy.preflight import decide_verdict, exit_code_of
from runner.preflight import Mission, look_at_code, look_at_machine
from runner.storage.offsite.staging import is_staged
from runner.supervise.attempt import PREVENTION
from runner.supervise.source import source_folder
from runner.world import Setting

_MARKS: Final = {Severity.OK: "ok", Severity.WARN: "warning", Severity.REFUSE: "refuse"}
_VERDICTS: Final = {
    Verdict.GO: "go",
    Verdict.CHANGES: "go, with these changes",
    Verdict.SWAP: "swap this machine",
    Verdict.REFUSE: "this job cannot run",
}


def configure(parser: argparse.ArgumentParser) -> None:
    add_job(parser)
    parser.add_argument("--json", action="store_true", help="verdict, reasons, changes and findings, as JSON")


def run(args: argparse.Namespace) -> int:
    env = with_secrets(os.environ)
    loaded = load_job(named_job(args), env)
    setting = find_out(loaded, env, rented(loaded.job, env), accept_change=True)
    if wrong := find_wrong(setting):
        raise wrong
    found = _look(setting, env)
    if args.json:
        out_json(as_json(found))
    else:
        for line in describe(found):
            out(line)
    return exit_code_of(found)


def _look(setting: Setting, env: dict[str, str]) -> Preflight:
    """The same as `run` does it. Code that is still to be brought is not looked at."""
    job = setting.job
    code = source_folder(
        job.source,
        run_dir=Path(job.run_dir),
        digest=setting.setup_digest,
        config_dir=setting.config_dir,
    )
    mission = Mission(
        job=job,
        python=setting.python,
        num_procs=setting.num_procs,
        num_cards=setting.num_cards,
        run_dir=Path(job.run_dir),
        workdir=code / job.workdir if job.workdir else code,
        env=with_store_keys(env),
        server=setting.server,
        needs_data=not is_staged([item.to for item in job.data], Path(job.run_dir), setting.data_digest),
        deadline_at=deadline(job.limits, datetime.now(UTC), setting.server),
    )
    refused = [refuse("cards", setting.refusal)] if setting.refusal else []
    findings = [*refused, *look_at_machine(mission), *(look_at_code(mission) if code.is_dir() else ())]
    return decide_verdict(findings, users={*job.env, *job.secrets, *env})


def as_json(found: Preflight) -> dict[str, object]:
    return {
        "verdict": found.verdict,
        "reasons": list(found.reasons),
        "changes": dict(found.env),
        "environment": dict(PREVENTION),
        "findings": [asdict(finding) for finding in found.findings],
    }


def describe(found: Preflight) -> Iterator[str]:
    """A line a finding, then what every attempt gets, then the verdict."""
    for finding in found.findings:
        yield f"{_MARKS[finding.severity]:<8} {finding.name:<14} {finding.message}"
        if finding.hint and finding.severity is not Severity.OK:
            yield f"{'':<8} {'hint':<14} {finding.hint}"
    told = " ".join(f"{name}={value}" for name, value in PREVENTION.items())
    yield f"{'set':<8} {'always':<14} {told} (unless you set them)"
    if found.env:
        yield f"{'set':<8} {'here':<14} {' '.join(f'{name}={value}' for name, value in found.env.items())}"
    if found.verdict is Verdict.REFUSE:
        yield f"verdict: {_VERDICTS[found.verdict]}: {'; '.join(found.reasons)}"
        return
    yield f"verdict: {_VERDICTS[found.verdict]}"
    yield from (f"  {reason}" for reason in found.reasons)
