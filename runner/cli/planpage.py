"""What `plan` prints for a person: a table and plain advice, in 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any, Final

from runner.cli.output import table
from runner.figures import size, span
from runner.policy.fleet import strategy_name
from runner.policy.planning import GB, Strategy

_WIDTH: Final = 80
_LABEL: Final = 11
_SHOWN_MACHINES: Final = 4

Answer = Mapping[str, Any]


def page(answer: Answer) -> Iterator[str]:
    """Lines of at most 80 columns, in the order in which one decides."""
    if answer["model"] is not None:
        yield from _row("model", _model(answer["model"]))
        yield ""
        yield from _strategies(answer)
        yield ""
        yield from _row("each card", _each_card(answer))
        yield from _row("disk", _disk(answer))
        yield from _cards(answer)
    for batch in answer["batch"] or ():
        yield from _row(
            "batch", "{samples} a step = {per_card} a card x {cards} cards x {accumulation}".format(**batch)
        )
    if measured := answer["measured"]:
        yield from _row("measured", _measured(measured))
    if cadence := answer["cadence"]:
        yield from _row("cadence", _cadence(cadence))
    if end := answer["end"]:
        yield from _row("end", _end(end))
    if answer["model"] is not None:
        yield from _machines(answer)
    yield from _rows("advice", answer["advice"])
    yield from _rows("run now", answer.get("next", ()))


def _row(label: str, text: str) -> Iterator[str]:
    yield from textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=label.ljust(_LABEL),
        subsequent_indent=" " * _LABEL,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _rows(label: str, texts: Iterator[str] | list[str] | tuple[()]) -> Iterator[str]:
    for number, text in enumerate(texts):
        yield from _row("" if number else label, text)


def _model(model: Answer) -> str:
    shape = f"{model['layers']} layers of {model['hidden']}{' (estimated)' if model['estimated_shape'] else ''}"
    at_once = f"{model['per_card']} x {model['sequence']} tokens a card at once"
    if model["strategy"] == Strategy.INFERENCE:
        return f"{_count(model['parameters'])} parameters in {model['precision']}, inference; {shape}; {at_once}"
    kept = "activation checkpointing" if model["recompute"] else "all activations kept"
    offload = ", optimizer in system memory" if model["offload"] else ""
    return (
        f"{_count(model['parameters'])} parameters, {strategy_name(Strategy(model['strategy']))}, {model['optimizer']}, "
        f"{model['precision']}{offload}; {shape}; {at_once}, {kept}"
    )


def _count(number: int) -> str:
    """8B, 350M."""
    for unit, letter in ((10**12, "T"), (10**9, "B"), (10**6, "M")):
        if number >= unit:
            return f"{number / unit:.3g}{letter}"
    return str(number)


def _strategies(answer: Answer) -> Iterator[str]:
    rows = answer["strategies"]
    counts = sorted({row["cards"] for row in rows})
    by_name: dict[str, dict[int, str]] = {}
    for row in rows:
        cell = f"{row['states_bytes'] / GB:.1f}{'*' if row['fits'] else ' '}"
        by_name.setdefault(strategy_name(Strategy(row["strategy"])), {})[row["cards"]] = cell.rjust(8)
    head = ("GB of states a card", *(f"{n} card{'' if n == 1 else 's'}".rjust(8) for n in counts))
    yield from table([head, *((name, *(cells[n] for n in counts)) for name, cells in by_name.items())]).splitlines()
    if gpu := answer["gpu"]:
        yield f"* fits on {gpu['name']} ({gpu['memory_gb']} GB), with what comes on top"


def _each_card(answer: Answer) -> str:
    held, gpu = answer["memory"], answer["gpu"]
    what = "keys and values" if answer["model"]["strategy"] == Strategy.INFERENCE else "activations"
    kept = (
        ""
        if not answer["model"]["recompute"] or what != "activations"
        else (f" ({size(held['activations_without_checkpointing'])} without activation checkpointing)")
    )
    working = f", {size(held['working'])} to communicate" if held["working"] else ""
    host = f"; {size(held['host'])} in system memory" if held["host"] else ""
    total = f"{size(held['total'])}{_of_card(held, gpu)}"
    return (
        f"{size(held['states'])} of states, {size(held['activations'])} of {what}{kept}{working}, "
        f"{size(held['context'])} for CUDA and NCCL: {total}{host}"
    )


def _of_card(held: Answer, gpu: Answer | None) -> str:
    return f" of {gpu['memory_gb']} GB, {'fits' if held['fits'] else 'DOES NOT FIT'}" if gpu else ""


def _disk(answer: Answer) -> str:
    if answer["model"]["strategy"] == Strategy.INFERENCE:
        return f"the weights, {size(answer['checkpoint_bytes'])}"
    return (
        f"a checkpoint {size(answer['checkpoint_bytes'])}; {size(answer['disk_bytes'])} for those kept, "
        "one being written and one being uploaded"
    )


def _cards(answer: Answer) -> Iterator[str]:
    """What depends on how many cards there are, and of which kind."""
    if "ram_bytes" in answer:
        yield from _row("RAM", f"{size(answer['ram_bytes'])} or more")
    if answer.get("traffic_bytes"):
        yield from _row("link", _link(answer))
    if "speed_up" in answer and (answer["cards"] or 1) > 1:
        low, high = answer["speed_up"]
        yield from _row("speed", f"{low:.1f} to {high:.1f} times one card")
    if "cost_per_hour" in answer:
        yield from _row("cost", _cost(answer))


def _link(answer: Answer) -> str:
    sent = f"each card sends {size(answer['traffic_bytes'])} a step"
    if answer.get("traffic_s") is None:
        return f"{sent}; how fast the link is, is not known here" if "compute_s" in answer else sent
    return (
        f"{sent}: {_short(answer['traffic_s'])} at {answer['link_gb_per_s']:.0f} GB/s; "
        f"it computes {_short(answer['compute_s'])} a step"
    )


def _short(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds < 60 else span(seconds)  # noqa: PLR2004  # a minute


def _cost(answer: Answer) -> str:
    parts = [f"{_range(answer['cost_per_hour'])} EUR an hour"]
    if whole := answer.get("run"):
        about = (
            "at most " + whole["at_most"] if "at_most" in whole else " to ".join(map(span, sorted(whole["seconds"])))
        )
        parts.append(f"the run {_range(whole['cost'])} EUR ({about})")
    return "; ".join(parts)


def _range(pair: list[str]) -> str:
    return pair[0] if pair[0] == pair[1] else f"{pair[0]} to {pair[1]}"


def _machines(answer: Answer) -> Iterator[str]:
    found = answer["machines"]
    if not found:
        yield from _row("machines", f"none in {answer['catalogue']} holds it")
        return
    for number, one in enumerate(found[:_SHOWN_MACHINES]):
        lacks = f"; short of {', '.join(one['lacks'])}" if one["lacks"] else ""
        offload = ", optimizer in system memory" if one["offload"] else ""
        how = f"{strategy_name(Strategy(one['strategy']))}{offload}" if one["cards"] > 1 or offload else "alone"
        what = f"{one['cards']} x {one['name']}"
        name = what if one["id"] == what else f"{one['id']}: {what}"
        text = f"{name}, {one['price_per_hour']} {one['currency']}/h, {how}{lacks}"
        yield from _row("" if number else "machines", text)
    yield from _row("", f"{len(found)} in all, by price, from {answer['catalogue']}")


def _measured(measured: Answer) -> str:
    """What the run itself has found out."""
    parts = [f"{_short(measured['step_s'])} a step"]
    if measured["seconds"]:
        parts.append(f"{measured['max_steps']} of them take {span(measured['seconds'])}")
    if measured["cost"]:
        parts.append(f"and cost {_range(measured['cost'])} EUR")
    return ", ".join(parts)


def _cadence(cadence: Answer) -> str:
    upload = f", an upload {span(cadence['upload_s'])}" if cadence["upload_s"] else ""
    between = f"a failure every {span(cadence['between_failures_s'])}{', assumed' if cadence['assumed'] else ''}"
    worth = "" if cadence["matters"] else "; the difference hardly matters"
    who = "let the script " if cadence["by_script"] else ""
    return (
        f"{who}save every {cadence['save_interval']} (now {cadence['now']}): {cadence['why']}; "
        f"a save takes {cadence['save_s']:.1f}s{upload}, {between}{worth}"
    )


def _end(end: Answer) -> str:
    who = "the script is" if end["by_script"] else "it is"
    upload = f" and an upload of {span(end['upload_s'])}" if end["upload_s"] else ""
    took = f"a save of {_short(end['save_s'])}{' (by its size, until one was timed)' if end['assumed'] else ''}{upload}"
    only = "; one that makes none at SIGTERM loses the steps since its last save" if end["by_script"] else ""
    return f"{who} asked to save and leave {span(end['kept_s'])} before a limit: half a minute, and twice {took}{only}"
