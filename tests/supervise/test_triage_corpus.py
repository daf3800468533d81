"""
Real failures: composed logs with real signatures, and the same logs as other machines would write them.

`failures.jsonl` says for each which line is the first real error, which are as good, which must
not be taken, what it is called and what follows from it.
"""

import json
import random
import re
from pathlib import Path

import pytest

from runner.supervise.triage import first_error
from runner.supervise.triage.meanings import MEANINGS
from runner.supervise.triage.table import OWN_WORDS

CORPUS = [
    json.loads(line) for line in (Path(__file__).parents[1] / "data/failures/failures.jsonl").read_text().splitlines()
]
BAR = " 45%|████▌     | 450/1000 [00:10<00:12, 44.01it/s]"


def test_the_first_error_is_found_and_named(tmp_path):
    """
    Line and decision of 95 in 100 failures, the label of 90, the rank of 95, and never an echo.
    """
    scores = score(tmp_path, lambda text, _: text)

    assert scores["decoys"] == []
    assert scores["line"] >= 0.95, scores
    assert scores["decision"] >= 0.95, scores
    assert scores["label"] >= 0.90, scores
    assert scores["rank"] >= 0.95, scores


QUOTED = """step 1 loss 2.3
Traceback (most recent call last):
  File "/workspace/train.py", line 9, in <module>
    check(config)
  File "/workspace/config.py", line 4, in check
    {statement}
{kind}: notes: expected no copy of a log, found {line}
"""


@pytest.mark.parametrize(
    ("statement", "kind"),
    [("raise ValueError(f'notes: {notes!r}')", "ValueError"), ("assert not notes, notes", "AssertionError")],
    ids=["raise", "assert"],
)
def test_what_a_script_raises_is_its_authors_whatever_it_quotes(tmp_path, statement, kind):
    """
    The first error line of every failure there is, in a message of the script's own: never the class of what is quoted.
    """
    wrong = {}
    for case in CORPUS:
        log = QUOTED.format(statement=statement, kind=kind, line=case["primary_line"].strip()[:160])
        label = diagnose(tmp_path, log).label
        if label not in {"user_exception", *OWN_WORDS}:
            wrong[case["id"]] = label

    assert {} == wrong


def test_every_label_of_the_corpus_has_a_meaning():
    """
    The set of labels is closed, and its categories are the corpus's.
    """
    told = {case["label"]: case["category"] for case in CORPUS}

    assert told == {label: MEANINGS[label].category for label in told}


def test_the_change_of_environment_is_one_that_helps(tmp_path):
    """
    What a retry changes is what the corpus says; what is no variable is told in the remedy.
    """
    wrong = {}
    for case in CORPUS:
        found = diagnose(tmp_path, case["log"])
        variables = {name: value for name, value in case["remedy_env"].items() if name.isupper()}
        if dict(found.env) != variables:
            wrong[case["id"]] = (dict(found.env), variables)

    assert {} == wrong


def other_ranks(text, rng):
    """Ranks 1 to 7 change places; rank 0 keeps the store, so it stays."""
    others = list(range(1, 8))
    rng.shuffle(others)
    new = {str(old): str(rank) for old, rank in enumerate((0, *others))}
    pattern = (
        r"(\[rank|\[Rank |\bRank |local_rank: |rank      : |localRank |\[RANK:|Ranks? |Proxy Service |from rank )(\d)\b"
    )
    text = re.sub(pattern, lambda m: m[1] + new[m[2]], text)
    return re.sub(r"(?m)^(\S+:\d+:\d+ \[)(\d)\]", lambda m: f"{m[1]}{new[m[2]]}]", text)


def other_paths(text, _rng):
    return (
        text.replace("/workspace/", "/mnt/vol-7/exp 3/").replace("python3.11", "python3.12").replace("gpu-box", "n17")
    )


def other_steps(text, rng):
    factor = rng.randrange(2, 50)
    return re.sub(r"(?i)(\bstep:? )(\d+)", lambda m: f"{m[1]}{int(m[2]) * factor}", text)


def time_stamps(text, _rng):
    """As `docker logs -t` has them."""
    return on_lines(text, lambda line: f"2026-03-01T10:20:30.123456789Z {line}")


def default_prefix(text, _rng):
    """As torchrun --tee has them, after init: the rank is said twice."""
    return on_lines(text, lambda line: re.sub(r"^\[rank(\d)\]", r"[default\1]:[rank\1]", line))


def colours(text, _rng):
    return on_lines(text, lambda line: f"\x1b[1;31m{line}\x1b[0m")


def bars(text, _rng):
    """A bar that was drawn before a line shares it."""
    return on_lines(text, lambda line: f"{BAR}\r{line}")


def chatter(text, rng):
    """Somebody prints in between, which says nothing."""
    lines = []
    for line in text.split("\n"):
        lines += (
            [line]
            if rng.random() < 0.7
            else [line, f"[INFO] worker {rng.randrange(9)} alive, queue {rng.randrange(99)}"]
        )
    return "\n".join(lines)


def interleaved(text, rng):
    """Lines of ranks that name themselves are mixed; each rank's keep their order."""
    lines = text.split("\n")
    for _ in range(4 * len(lines)):
        at = rng.randrange(len(lines) - 1) if len(lines) > 1 else 0
        pair = lines[at : at + 2]
        ranks = [m[1] for line in pair if (m := re.match(r"\[rank(\d)\]", line))]
        if len(ranks) == 2 and ranks[0] != ranks[1] and "Traceback" not in pair[1] and ":[" not in "".join(pair):
            lines[at : at + 2] = reversed(pair)
    return "\n".join(lines)


def one_end(text, _rng):
    return text.replace("\n", "\r\n")


@pytest.mark.parametrize(
    "change",
    [other_ranks, other_paths, other_steps, time_stamps, default_prefix, colours, bars, chatter, interleaved, one_end],
    ids=lambda change: change.__name__,
)
def test_another_machine_s_log_of_the_same_failure_says_the_same(tmp_path, change):
    """
    Neither ranks, paths, numbers, prefixes, colours, bars nor what stands in between matter.
    """
    scores = score(tmp_path, change)

    assert scores["decoys"] == []
    assert scores["line"] >= 0.95, scores
    assert scores["decision"] >= 0.95, scores
    assert scores["label"] >= 0.90, scores


def on_lines(text, change):
    return "\n".join(change(line) for line in text.split("\n"))


def diagnose(tmp_path, text):
    log = tmp_path / "train.log"
    log.write_bytes(text.encode())
    return first_error(log)


def score(tmp_path, change):
    """Shares of the corpus that are right after a change, and which are not."""
    right = dict.fromkeys(("line", "decision", "label", "rank"), 0)
    misses, decoys = {}, []
    for case in CORPUS:
        seed = case["id"]
        found = diagnose(tmp_path, change(case["log"], random.Random(seed)))
        good = [change(line, random.Random(seed)) for line in (case["primary_line"], *case["primary_alternates"])]
        bad = [change(line, random.Random(seed)) for line in case["secondary_lines"]]
        judged = {
            "line": found.primary_line in {line.split("\n")[0] for line in good},
            "decision": found.decision in {case["retry_class"], *case.get("retry_class_alternates", ())},
            "label": found.label in {case["label"], *case.get("label_alternates", ())},
            "rank": found.rank == case["primary_rank"],
        }
        for name, is_right in judged.items():
            right[name] += is_right
        decoys += [case["id"]] if found.primary_line in {line.split("\n")[0] for line in bad} else []
        if not all(judged.values()):
            misses[case["id"]] = (found.label, found.decision, found.rank, found.primary_line_no)
    return {name: count / len(CORPUS) for name, count in right.items()} | {"misses": misses, "decoys": decoys}
