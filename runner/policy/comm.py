"""
The communication test: which try comes next, and what all tries together mean.

On trouble it is tried again with single changes, and the first that is proved is kept. Where the cards are linked by
NVLink, peer access is never switched off to hide a fault; then pairs are tried, to name the card.
A machine is refused only when trouble came twice.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from runner.facts import BusBandwidth, Finding, Severity, Trial, TrialEnding
from runner.policy.findings import ok
from runner.policy.readings import BandwidthVerdict, judge_bandwidth
from runner.policy.wires import Wire

TOTAL_S: Final = 60.0  # for all tries together
LEAST_S: Final = 8.0  # below that another try would prove nothing

# In the order in which they help; what the error says may put one first.
_CHANGES: Final[tuple[tuple[str, str, re.Pattern[str]], ...]] = (
    ("NCCL_P2P_DISABLE", "1", re.compile(r"P2P|peer access|\bIPC\b", re.IGNORECASE)),
    ("NCCL_SHM_DISABLE", "1", re.compile(r"shared memory|/dev/shm|posix_fallocate|\bshm\b", re.IGNORECASE)),
    ("NCCL_IB_DISABLE", "1", re.compile(r"\bibv?_|\bIB\b|mlx\d|InfiniBand|RoCE", re.IGNORECASE)),
    ("NCCL_SOCKET_IFNAME", "lo", re.compile(r"socket interface|Bootstrap|no route|Connection refused", re.IGNORECASE)),
    ("NCCL_NVLS_ENABLE", "0", re.compile(r"nvls|multicast", re.IGNORECASE)),
    ("NCCL_CUMEM_ENABLE", "0", re.compile(r"cuMem|register|allocation", re.IGNORECASE)),
)
_UNASKED: Final = ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE")  # tried whatever the error says
_PEER: Final = "NCCL_P2P_DISABLE"
_PAIR: Final = 2
_SLOWING: Final = frozenset(
    {_PEER, "NCCL_P2P_LEVEL", "NCCL_SHM_DISABLE", "NCCL_ALGO", "NCCL_PROTO", "NCCL_MAX_NCHANNELS"}
)
_ALONE: Final = ("device", "computed")  # phases before a card talks to another


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """
    What is tested: how many cards, and what is between them. `floor` is the user's, in GB/s; None: by the links.

    `users`: names of variables that are set already and are left alone. `on_cards` False: processes on the CPU.
    """

    num: int
    on_cards: bool = True
    nvlink: bool = False
    wires: tuple[Wire, ...] = ()
    models: tuple[str, ...] = ()
    floor: float | None = None
    users: Collection[str] = ()

    @property
    def everyone(self) -> tuple[int, ...]:
        return tuple(range(self.num))


@dataclass(frozen=True, slots=True)
class Order:
    """The next try: groups of cards, side by side, all with one change or none."""

    groups: tuple[tuple[int, ...], ...]
    env: Mapping[str, str]


# ---------------------------------------------------------------------------------- next try


def next_order(trials: Sequence[Trial], setting: Setting, left_s: float = TOTAL_S) -> Order | None:
    """What to try after these; None when nothing more is to be learned, or there is no time."""
    everyone = setting.everyone
    if not trials:
        return Order((everyone,), {})
    if left_s < LEAST_S or is_over(trials, setting):
        return None
    whole = [trial for trial in trials if trial.cards == everyone]
    is_silent_or_slow = whole[0].ending in {TrialEnding.SILENT, TrialEnding.GOOD}
    if len(whole) == 1 and is_silent_or_slow:
        return Order((everyone,), {})  # what comes once may be chance, or a cold start: a change would prove nothing
    change = {} if whole[0].phase in _ALONE or setting.num < _PAIR else _next_change(whole, setting)
    if change:
        return Order((everyone,), change)
    if len([trial for trial in whole if not trial.env]) < 2:  # noqa: PLR2004  # an error that does not come again
        return Order((everyone,), {})
    pairs = () if whole[0].phase in _ALONE else next_pairs(trials, setting)
    return Order(pairs, {}) if pairs else None


def is_over(trials: Sequence[Trial], setting: Setting) -> bool:
    """Whether they talk, with or without a change; or nothing can be said of them."""
    last = [trial for trial in trials if trial.cards == setting.everyone][-1]
    return last.ending is TrialEnding.LATE or is_well(last, setting)


def is_well(trial: Trial, setting: Setting) -> bool:
    """The right sum, and no slower than such a machine must be. Slow only by a derived floor is well."""
    return trial.ending is TrialEnding.GOOD and _speed(trial, setting).severity is not Severity.REFUSE


def _next_change(whole: Sequence[Trial], setting: Setting) -> Mapping[str, str]:
    """The change not yet tried that fits best: first those that the error names."""
    if not setting.on_cards:
        return {}
    said = whole[0].message
    named = [(name, value) for name, value, words in _CHANGES if words.search(said)]
    usual = [(name, value) for name, value, _ in _CHANGES if name in _UNASKED and not setting.nvlink]
    tried = {name for trial in whole for name in trial.env}
    for name, value in (*named, *usual):
        hides = setting.nvlink and name == _PEER
        if name not in tried and name not in setting.users and not hides:
            return {name: value}
    return {}


def next_pairs(trials: Sequence[Trial], setting: Setting) -> tuple[tuple[int, ...], ...]:
    """
    Disjoint pairs for one more round; none when a card is named, or every pair was tried.

    A pair that fails is split: each of its cards is tried with one that is known to be well.
    """
    pairs = [trial for trial in trials if len(trial.cards) == _PAIR < setting.num]
    if not setting.on_cards or setting.num <= _PAIR or bad_cards(pairs):
        return ()
    tried = {trial.cards for trial in pairs}
    well = {card for trial in pairs if trial.ending is TrialEnding.GOOD for card in trial.cards}
    suspects = sorted({card for cards in tried for card in cards} - well)
    if not suspects:
        return _one_round(setting.num, tried)
    partners = [card for card in setting.everyone if card not in suspects]
    found: list[tuple[int, ...]] = []
    for card in suspects:
        other = next((one for one in partners if _pair(card, one) not in tried), None)
        if other is not None:
            partners.remove(other)
            found.append(_pair(card, other))
    return tuple(found)


def _one_round(num: int, tried: Collection[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """As many pairs as can be tried side by side, each for the first time."""
    free, found = list(range(num)), []
    while len(free) >= _PAIR:
        one = free.pop(0)
        other = next((card for card in free if (one, card) not in tried), None)
        if other is not None:
            free.remove(other)
            found.append((one, other))
    return tuple(found)


def _pair(one: int, other: int) -> tuple[int, int]:
    return (min(one, other), max(one, other))


def bad_cards(pairs: Sequence[Trial]) -> tuple[int, ...]:
    """Cards of which two pairs failed while their partners do well with others."""
    failed = [trial.cards for trial in pairs if trial.ending is not TrialEnding.GOOD]
    well = {card for trial in pairs if trial.ending is TrialEnding.GOOD for card in trial.cards}
    counts = {card: sum(card in cards for cards in failed) for cards in failed for card in cards}
    return tuple(sorted(card for card, count in counts.items() if count >= _PAIR and card not in well))


# ------------------------------------------------------------------------------------ meaning


def judge_trials(trials: Sequence[Trial], setting: Setting) -> tuple[Finding, ...]:
    """What the tries mean. `proved` in the facts: these cards did talk."""
    whole = [trial for trial in trials if trial.cards == setting.everyone]
    first, last = whole[0], whole[-1]
    if first.ending is TrialEnding.LATE or last.ending is TrialEnding.LATE:
        return (
            _finding(Severity.WARN, f"not tested: {(first if first.ending is TrialEnding.LATE else last).message}"),
        )
    if setting.num < _PAIR or (first.phase in _ALONE and last.phase in _ALONE):
        return (_alone(whole, setting),)
    well = next((trial for trial in whole if is_well(trial, setting)), None)
    if well is None:
        return _refused(trials, whole, setting)
    speed = _speed(well, setting)
    if well is first:
        return (_finding(speed.severity, f"{_talk(setting)}, {speed.message}", speed.hint, proved=True),)
    if not well.env:
        message = f"{_talk(setting)}, {speed.message}; the first time it failed: {_trouble(first, setting)}"
        return (_finding(Severity.WARN, message, "if training hangs, swap this machine", proved=True),)
    message = f"{_trouble(first, setting)}; with {_told(well.env)} {_talk(setting)}, {speed.message}"
    return (_finding(Severity.WARN, message, "", proved=True, env=dict(well.env)),)


def _alone(whole: Sequence[Trial], setting: Setting) -> Finding:
    """Of one card, or of cards that did not get as far as talking."""
    last = whole[-1]
    if last.ending is TrialEnding.GOOD:
        return ok("torch", f"the card computes{_version(last)}")
    hint = "an image whose torch fits this driver and card, or another machine"
    what = "the card cannot" if setting.num < _PAIR else "not every card can"
    severity = Severity.REFUSE if len(whole) > 1 else Severity.WARN
    return Finding(name="torch", severity=severity, message=f"{what} be used: {last.message}", hint=hint)


def _version(trial: Trial) -> str:
    told = next(iter(trial.devices), {})
    return f" (torch {told.get('torch')}, CUDA {told.get('cuda')})" if told else ""


def _refused(trials: Sequence[Trial], whole: Sequence[Trial], setting: Setting) -> tuple[Finding, ...]:
    """Trouble that came once, with no time left to see whether it comes again, is only said."""
    plain = [trial for trial in whole if not trial.env]
    pairs = [trial for trial in trials if len(trial.cards) == _PAIR < setting.num]
    changes = [_told(trial.env) for trial in whole if trial.env]
    told = _trouble(whole[0], setting) + (f"; not cured by {', '.join(changes)}" if changes else "")
    severity = Severity.REFUSE if len(whole) > 1 else Severity.WARN
    told += ", twice" if len(plain) > 1 else ""
    named = bad_cards(pairs)
    failed = [trial.cards for trial in pairs if trial.ending is not TrialEnding.GOOD]
    if named:
        told += f"; card {' and '.join(map(str, named))} fails with every other"
    elif failed:
        told += f"; pairs that fail: {', '.join('-'.join(map(str, cards)) for cards in failed)}"
    elif pairs:
        told += "; every pair that was tried talks"
    return (_finding(severity, told, "swap this machine and tell support" if setting.on_cards else ""),)


def _trouble(trial: Trial, setting: Setting) -> str:
    who = "the cards" if setting.on_cards else "the processes"
    match trial.ending:
        case TrialEnding.SILENT:
            return f"{who} hang ({trial.message})"
        case TrialEnding.ERROR:
            return f"{who} do not talk ({trial.message})"
        case TrialEnding.WRONG:
            return f"{who} talk, and {trial.num_wrong} sums are wrong"
        case TrialEnding.GOOD | TrialEnding.LATE:
            return f"{who} are slow ({_speed(trial, setting).message})"


def _talk(setting: Setting) -> str:
    return f"{setting.num} {'cards' if setting.on_cards else 'processes'} talk"


def _told(env: Mapping[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in env.items())


def _speed(trial: Trial, setting: Setting) -> Finding:
    """The largest size against the floor: the user's, or what such links do at the least."""
    if not trial.speeds:
        return _finding(Severity.OK, "no speed was measured")
    size, busbw = trial.speeds[-1]
    told = f"{busbw:.3g} GB/s of bus bandwidth at {_size(size)}"
    if setting.floor is not None and busbw < setting.floor:
        message = f"{told}; preflight.min_bus_bandwidth is {setting.floor:g}"
        return _finding(Severity.REFUSE, message, "another machine, or a lower preflight.min_bus_bandwidth")
    if setting.floor is not None or not setting.on_cards:
        return _finding(Severity.OK, told)
    return _against_links(size, busbw, told, setting)


def _against_links(size: int, busbw: float, told: str, setting: Setting) -> Finding:
    measured = BusBandwidth(ranks=setting.num, size_bytes=size, algbw=None, busbw=busbw, models=setting.models)
    judged = judge_bandwidth(measured, wires=setting.wires)
    if judged.verdict is not BandwidthVerdict.SUSPICIOUS:
        return _finding(Severity.OK, told)
    floor = f", suspicious below {judged.floor.gb_per_s:g}" if judged.floor else ""
    if slowing := sorted(_SLOWING & set(setting.users)):
        hint = f"{', '.join(slowing)} is set: take it away unless the cards hang without it"
        return _finding(Severity.WARN, f"{told}{floor}", hint)
    worst = judged.findings[0]
    return _finding(worst.severity, f"{told}{floor}", worst.hint)


def _size(size: int) -> str:
    return f"{size >> 30} GiB" if size >= 1 << 30 else f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


def _finding(severity: Severity, message: str, hint: str = "", **facts: object) -> Finding:
    return Finding(name="comm", severity=severity, message=message, hint=hint, facts=facts)
