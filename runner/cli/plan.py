"""
`plan`: what a job takes before anything is rented: memory, batch, cadence, cost, the machines
that hold it, and what `run` would do now.

Everything in it is an estimate but what comes from a run folder or a catalogue.
"""

from __future__ import annotations

import argparse
import os
import re
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from enum import StrEnum
from typing import Any, Final

from pydantic import ValidationError

from runner.cli.estimate import Asked, estimate
from runner.cli.foresee import foresee
from runner.cli.load import LoadedJob, load_job
from runner.cli.naming import add_job, named_job
from runner.cli.output import out, out_json
from runner.cli.planpage import page
from runner.errors import JobError, MachineError
from runner.job import Batch, parse_duration
from runner.policy.cadence import Rental
from runner.policy.fleet import CARDS, CardKind, find_card
from runner.policy.planning import TRAINED_IN, Optimizer, Precision, Strategy, Workload, workload
from runner.probes.machine import Card, read_cards, visible

_MOST_CARDS: Final = 1024
_MOST_PARAMETERS: Final = 10**14
_NUMBER: Final = re.compile(r"(\d+(?:\.\d+)?(?:[eE]\+?\d+)?)([kKmMbBgGtT]?)")
_UNITS: Final = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}


def configure(parser: argparse.ArgumentParser) -> None:
    add_job(parser)
    parser.add_argument(
        "--parameters", metavar="N", help="number of parameters, such as 8e9 or 8B; with it no job is needed"
    )
    parser.add_argument("--cards", metavar="N", help="number of cards (1 to 1024)")
    parser.add_argument("--gpu", metavar="NAME", help=f"kind of card: {', '.join(card.slug for card in CARDS)}")
    parser.add_argument("--strategy", **_one_of(Strategy, "how the model is split over the cards"))
    parser.add_argument("--optimizer", **_one_of(Optimizer, "optimizer"))
    parser.add_argument(
        "--precision", **_one_of(Precision, "precision of the weights (fp8 and int4 for inference only)")
    )
    parser.add_argument("--global-batch", metavar="N", help="samples per optimizer step on all cards together")
    parser.add_argument("--per-card", metavar="N", help="samples that a card processes at once")
    parser.add_argument("--sequence", metavar="N", help="tokens per sample (default: 2048)")
    parser.add_argument("--layers", metavar="N", help="number of layers (default: estimated from the parameters)")
    parser.add_argument("--hidden", metavar="N", help="width of a layer (default: estimated from the parameters)")
    parser.add_argument("--vocabulary", metavar="N", help="size of the vocabulary (default: 128000)")
    parser.add_argument("--no-activation-checkpointing", action="store_true", help="keep all activations in memory")
    parser.add_argument("--cpu-offload", action="store_true", help="keep optimizer states in system memory")
    parser.add_argument("--tokens", metavar="N", help="tokens of the whole run, to estimate its time and cost")
    parser.add_argument("--rental", default=Rental.ON_DEMAND, **_one_of(Rental, "how the server is rented"))
    parser.add_argument("--mtbf", metavar="TIME", help="mean time between failures, such as 12h")
    parser.add_argument(
        "--save-time", metavar="TIME", help="how long a save takes, such as 8s, if no run has measured it"
    )
    parser.add_argument(
        "--upload-time", metavar="TIME", help="how long an upload takes, such as 10m, if no run has measured it"
    )
    parser.add_argument("--offline", action="store_true", help="ask neither the provider nor the store")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _one_of(names: type[StrEnum], meaning: str) -> dict[str, Any]:
    """All names in one word are wider than a terminal."""
    return {"choices": [name.value for name in names], "metavar": "NAME", "help": f"{meaning}: {', '.join(names)}"}


def run(args: argparse.Namespace) -> int:
    source = named_job(args)
    loaded = None if args.parameters and source is None else load_job(source, os.environ)
    asked = _asked(args, loaded)
    answer = estimate(asked)
    if loaded is not None:
        answer["next"] = _next(loaded, asked)
    if args.json:
        out_json(answer)
        return 0
    for line in page(answer):
        out(line)
    return 0


def _next(loaded: LoadedJob, asked: Asked) -> list[str]:
    num_procs = asked.cards or loaded.job.cpu_processes
    try:
        return list(foresee(loaded, num_procs, ask_store=not asked.offline))
    except OSError as error:
        return [f"{error.filename or loaded.job.run_dir}: {error.strerror}: what is in the run folder cannot be seen"]


# ---------------------------------------------------------------------------- what is asked


def _asked(args: argparse.Namespace, loaded: LoadedJob | None) -> Asked:
    job = None if loaded is None else loaded.job
    here = _here() if args.gpu is None else ()
    cards = _count("--cards", args.cards, _MOST_CARDS) or _cards_of(loaded, len(here))
    card = _kind(here[0]) if here else None
    if args.gpu is not None and (card := find_card(args.gpu)) is None:
        raise JobError(f"--gpu: expected one of {', '.join(one.slug for one in CARDS)}, got {args.gpu!r}")
    batch = _batch(args, loaded)
    return Asked(
        work=_work(args, loaded, batch, cards or 1),
        cards=cards,
        card=card,
        batch=batch,
        keep_last=job.checkpoint.keep_last if job else 2,
        tokens=_count("--tokens", args.tokens, 10**18) or 0,
        duration=job.limits.max_duration if job else None,
        rental=Rental(args.rental),
        between_failures=_time("--mtbf", args.mtbf),
        save_s=(_time("--save-time", args.save_time) or timedelta()).total_seconds(),
        upload_s=(_time("--upload-time", args.upload_time) or timedelta()).total_seconds(),
        loaded=loaded,
        offline=args.offline,
    )


def _here() -> tuple[Card, ...]:
    """The cards of this machine, if it is one that trains."""
    try:
        return visible(read_cards(timeout_s=10), os.environ.get("CUDA_VISIBLE_DEVICES"))
    except MachineError:
        return ()


def _kind(card: Card) -> CardKind | None:
    """Some kinds are sold with less memory than the table has: the driver knows."""
    kind, memory_gb = find_card(card.name), round(card.memory_bytes / 2**30)
    return (
        kind if kind is None or memory_gb >= kind.memory_gb - 2 or not memory_gb else replace(kind, memory_gb=memory_gb)
    )


def _cards_of(loaded: LoadedJob | None, here: int) -> int | None:
    if loaded is not None and isinstance(loaded.job.cards, int):
        return loaded.job.cards
    return here or None


def _batch(args: argparse.Namespace, loaded: LoadedJob | None) -> Batch | None:
    """The job's, with what the options say instead."""
    of_job = loaded.job.batch if loaded else None
    samples = _count("--global-batch", args.global_batch, 10**9) or (of_job.global_ if of_job else None)
    per_card = _count("--per-card", args.per_card, 10**6) or (of_job.per_card if of_job else 1)
    if samples is None:
        return None
    try:
        return Batch.model_validate({"global": samples, "per_card": per_card})
    except ValidationError as error:
        raise JobError(f"batch: {error.errors()[0]['ctx']['error']}") from None


def _work(args: argparse.Namespace, loaded: LoadedJob | None, batch: Batch | None, cards: int) -> Workload | None:
    model = loaded.job.model if loaded else None
    parameters = _count("--parameters", args.parameters, _MOST_PARAMETERS)
    if model is None and parameters is None:
        return None
    of_job = workload(model) if model else Workload(parameters=parameters or 1)
    per_card = batch.per_card if batch else _count("--per-card", args.per_card, 10**6) or 1
    told: dict[str, Any] = {
        "parameters": parameters,
        "strategy": args.strategy and Strategy(args.strategy),
        "optimizer": args.optimizer and Optimizer(args.optimizer),
        "precision": args.precision and Precision(args.precision),
        "sequence": _count("--sequence", args.sequence, 10**8),
        "layers": _count("--layers", args.layers, 10**4),
        "hidden": _count("--hidden", args.hidden, 10**6),
        "vocabulary": _count("--vocabulary", args.vocabulary, 10**8),
    }
    work = replace(
        of_job,
        per_card=per_card,
        accumulation=max(batch.global_ // (per_card * cards), 1) if batch else 1,
        recompute=of_job.recompute and not args.no_activation_checkpointing,
        offload=of_job.offload or args.cpu_offload,
        **{name: value for name, value in told.items() if value},
    )
    if work.precision not in TRAINED_IN and work.strategy is not Strategy.INFERENCE:
        raise JobError(f"--precision: {work.precision} is for inference only, expected fp32, bf16 or fp16")
    return work


def _count(name: str, text: str | None, most: int) -> int | None:
    """`8`, `8e9`, `8B`; None where it is not given."""
    if text is None:
        return None
    match = _NUMBER.fullmatch(text.strip().replace("_", ""))
    number = Decimal(match[1]) * _UNITS[match[2].lower()] if match else Decimal(0)
    if not 1 <= number <= most:
        raise JobError(f"{name}: expected a number from 1 to {most:g}, got {text!r}")
    return int(number)


def _time(name: str, text: str | None) -> timedelta | None:
    if text is None:
        return None
    try:
        found = parse_duration(text)
    except ValueError as error:
        raise JobError(f"{name}: {error}") from None
    if not found:
        raise JobError(f"{name}: must be more than nothing, got {text!r}")
    return found
