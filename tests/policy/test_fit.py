"""Whether the cards that are there hold the job."""

import pytest

from runner.facts import Severity
from runner.job import Job
from runner.policy.preflight import judge_fit

H100 = 81_559 << 20
RTX_4090 = 24_564 << 20


def told(strategy, card_bytes, num_procs=8, **model):
    wish = {"command": "train.py", "model": {"parameters": 8e9, "strategy": strategy} | model}
    return judge_fit(Job.model_validate(wish), num_procs=num_procs, card_bytes=card_bytes)


def test_a_job_that_fits_says_how_much_it_takes():
    """
    8B with FULL_SHARD on eight H100.
    """
    (finding,) = told("fsdp_full_shard", H100)

    assert (
        Severity.OK,
        "FSDP FULL_SHARD is expected to take 22 of the 86 GB of each card (1 x 2048 tokens at once)",
    ) == (
        finding.severity,
        finding.message,
    )


@pytest.mark.parametrize(
    ("strategy", "card_bytes", "num_procs", "model", "expected"),
    [
        ("ddp", H100, 8, {}, "ZeRO-1 fits here"),
        ("fsdp_full_shard", RTX_4090, 4, {}, "FSDP FULL_SHARD with the optimizer in system memory fits here"),
        (
            "ddp",
            RTX_4090,
            8,
            {"parameters": 7e11},
            "a smaller per_card, shorter sequences, an 8-bit optimizer, or bigger cards",
        ),
        (
            "zero3",
            H100,
            8,
            {"sequence": 1_000_000},
            "a smaller per_card, shorter sequences, an 8-bit optimizer, or bigger cards",
        ),
    ],
    ids=["DDP", "4090", "700B", "a million tokens"],
)
def test_a_job_that_does_not_fit_is_warned_of_with_what_would(strategy, card_bytes, num_procs, model, expected):
    """
    Before the first step, and not by the first step.
    """
    (finding,) = told(strategy, card_bytes, num_procs, **model)

    assert (Severity.WARN, expected) == (finding.severity, finding.hint)
    assert finding.message.endswith("out of memory within the first steps")


def test_without_a_model_or_a_size_nothing_is_judged():
    """
    No guess is better than a wrong one.
    """
    assert ((), ()) == (judge_fit(Job(command="train.py"), num_procs=8, card_bytes=H100), told("ddp", 0))
