"""What findings come to."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.facts import (
    CardReport,
    CardState,
    DiskRate,
    FabricState,
    Finding,
    Host,
    PcieLink,
    Severity,
    SharedMemory,
    StoreTrial,
    Verdict,
)
from runner.job import Job
from runner.policy import preflight
from runner.policy.preflight import decide_verdict, tell_verdict

GIB = 1 << 30
NOW = datetime(2026, 1, 1, tzinfo=UTC)
JOB = Job(command="train.py")
BIG = Job.model_validate(
    {
        "command": "train.py",
        "model": {"parameters": 6.6e9},
        "checkpoint": {"save_interval": "15m"},
        "offload": {"to": "s3://bucket/runs"},
    }
)
CARD = CardState(index=0, name="NVIDIA H100 80GB HBM3", memory_bytes=80 * GIB)


def finding(severity, name="x", message="m", **facts):
    return Finding(name=name, severity=severity, message=message, facts=facts)


def told(findings):
    return [(one.severity, one.message) for one in findings]


# ----------------------------------------------------------------------------------- verdict


def test_nothing_odd_is_go():
    """
    And nothing is changed.
    """
    found = decide_verdict([finding(Severity.OK)])

    assert (Verdict.GO, {}, ()) == (found.verdict, found.env, found.reasons)


def test_what_cannot_be_cured_does_not_refuse():
    """
    A warning is said, and the job is tried.
    """
    found = decide_verdict([finding(Severity.WARN, message="slow")])

    assert Verdict.GO is found.verdict
    assert "preflight: go: slow" == tell_verdict(found)


def test_a_cure_is_a_change_with_its_reason():
    """
    The environment for the attempts, and why in plain words.
    """
    found = decide_verdict([finding(Severity.WARN, message="/dev/shm is small", env={"NCCL_SHM_DISABLE": "1"})])

    assert (Verdict.CHANGES, {"NCCL_SHM_DISABLE": "1"}) == (found.verdict, found.env)
    assert ("/dev/shm is small; going on with NCCL_SHM_DISABLE=1",) == found.reasons


def test_what_the_user_set_is_not_changed():
    """
    Whoever writes a variable into job.yaml means it.
    """
    cure = finding(Severity.WARN, env={"NCCL_SHM_DISABLE": "1"})

    assert Verdict.GO is decide_verdict([cure], users={"NCCL_SHM_DISABLE"}).verdict


def test_one_refusal_is_a_swap():
    """
    Whatever else there is; every reason is told.
    """
    found = decide_verdict(
        [
            finding(Severity.REFUSE, message="fabric is down"),
            finding(Severity.WARN, env={"A": "1"}),
            finding(Severity.REFUSE, message="no sum"),
        ]
    )

    assert (Verdict.SWAP, ("fabric is down", "no sum"), {}) == (found.verdict, found.reasons, found.env)


def test_cards_that_talk_acquit_a_table_that_says_they_cannot():
    """
    A test that was passed outweighs what the driver says of peer access.
    """
    denied = finding(Severity.REFUSE, name="p2p", message="no peer access, although NVLink is there")

    assert Verdict.SWAP is decide_verdict([denied]).verdict
    assert Verdict.GO is decide_verdict([denied, finding(Severity.OK, name="comm", proved=True)]).verdict


@given(
    st.lists(st.builds(finding, st.sampled_from(Severity), env=st.dictionaries(st.sampled_from("ABC"), st.just("1")))),
    st.sets(st.sampled_from("ABC")),
)
def test_a_verdict_follows_from_severities_alone(findings, users):
    """
    Swap if and only if something refuses; changes if and only if something is changed that is not the user's.
    """
    found = decide_verdict(findings, users=users)

    refused = any(one.severity is Severity.REFUSE for one in findings)
    curable = any(set(one.facts["env"]) - users for one in findings)
    assert (Verdict.SWAP if refused else Verdict.CHANGES if curable else Verdict.GO) is found.verdict
    assert not set(found.env) & users
    assert bool(found.reasons) is (found.verdict is not Verdict.GO)


# ------------------------------------------------------------------------------------- cards

CARDS = {
    "well": (CARD, None, ""),
    "row lost": (replace(CARD, remap_failed=True), Severity.REFUSE, "could not be replaced"),
    "wants a reset": (replace(CARD, recovery="Drain and Reset"), Severity.REFUSE, "asks for 'Drain and Reset'"),
    "wants to be drained": (replace(CARD, recovery="Drain P2P"), Severity.WARN, "asks for 'Drain P2P'"),
    "row pending": (replace(CARD, remap_pending=True), Severity.WARN, "waits for a reset"),
    "memory errors": (replace(CARD, uncorrected=3), Severity.WARN, "3 uncorrectable memory errors"),
    "prohibited": (replace(CARD, compute_mode="Prohibited"), Severity.REFUSE, "nothing may run on it"),
    "exclusive": (replace(CARD, compute_mode="Exclusive_Process"), None, ""),
    "mig": (replace(CARD, mig=True), Severity.WARN, "MIG is on"),
    "in use": (replace(CARD, used_bytes=9 * GIB), Severity.WARN, "in use, 9.0 GiB"),
    "a process": (replace(CARD, processes=("python (pid 7, 9 MiB)",)), Severity.WARN, "python (pid 7"),
    "capped": (replace(CARD, power_limit_w=350, power_default_w=700), Severity.WARN, "350 W of its 700 W"),
    "hot": (replace(CARD, slowdowns=("too hot",)), Severity.WARN, "held back now: too hot"),
    "narrow": (replace(CARD, pcie=PcieLink(width=4, width_max=16)), Severity.WARN, "4 lanes of 16"),
    "no fabric": (
        replace(CARD, fabric=FabricState(state="In Progress", status="N/A")),
        Severity.REFUSE,
        "not ready in the NVLink fabric",
    ),
}


@pytest.mark.parametrize(("card", "severity", "words"), CARDS.values(), ids=CARDS)
def test_a_card_is_judged(card, severity, words):
    """
    Only what no job can run on refuses.
    """
    findings = preflight.judge_report(CardReport(cards=(card,), driver="550", cuda="12.4"), JOB)

    odd = [one for one in findings if one.severity is not Severity.OK]
    assert [severity] * (severity is not None) == [one.severity for one in odd]
    assert words in "".join(one.message for one in odd)


def test_unlike_cards_are_told_unless_one_is_wanted():
    """
    The slowest sets the pace for all.
    """
    report = CardReport(cards=(CARD, replace(CARD, index=1, name="NVIDIA L4", memory_bytes=24 * GIB)))

    assert (
        "cards differ: NVIDIA H100 80GB HBM3 80 GiB, NVIDIA L4 24 GiB" == preflight.judge_report(report, JOB)[0].message
    )
    assert Severity.OK is preflight.judge_report(report, Job(command="x", cards=1))[0].severity


def test_only_xids_of_hardware_are_told():
    """
    Most of them are faults of programs; none refuses, since an earlier tenant's may be cured.
    """
    assert () == preflight.judge_xids([("0:91", 31), ("0:91", 43)])
    (one,) = preflight.judge_xids([("0:91", 31), ("0:91", 79)])
    assert (Severity.WARN, "the kernel's log has 0:91: Xid 79, fallen off the bus") == (one.severity, one.message)


@pytest.mark.parametrize(
    ("strategy", "nvlink", "num_procs", "expected"),
    [("fsdp_full_shard", False, 4, 1), ("fsdp_full_shard", True, 4, 0), ("ddp", False, 4, 0), ("zero3", False, 1, 0)],
)
def test_a_strategy_that_sends_weights_wants_nvlink(strategy, nvlink, num_procs, expected):
    """
    Over PCIe the cards wait: said before, not found out in the morning.
    """
    job = Job.model_validate({"command": "x", "model": {"parameters": 8e9, "strategy": strategy}})

    assert expected == len(preflight.judge_strategy(job, nvlink=nvlink, num_procs=num_procs))


# -------------------------------------------------------------------------------- the machine

HOST = Host(
    cores=32,
    memory_bytes=512 * GIB,
    shared_memory=SharedMemory(size_bytes=64 * GIB, used_bytes=0, free_bytes=64 * GIB),
    open_files=1 << 20,
)
HOSTS = {
    "well": (HOST, []),
    "small shm": (
        replace(HOST, shared_memory=SharedMemory(size_bytes=64 << 20, used_bytes=0, free_bytes=64 << 20)),
        ["shared_memory"],
    ),
    "little memory": (replace(HOST, memory_bytes=64 * GIB), ["memory"]),
    "a limit": (replace(HOST, memory_limit_bytes=64 * GIB), ["memory"]),
    "few files": (replace(HOST, open_files=1024), ["limits"]),
    "few cores": (replace(HOST, cores=4), ["cores"]),
}


@pytest.mark.parametrize(("host", "odd"), HOSTS.values(), ids=HOSTS)
def test_a_machine_is_judged_by_what_the_job_needs(host, odd):
    """
    Four cards with 320 GiB, a checkpoint of 100 GB: none of these keeps a job from trying.
    """
    findings = preflight.judge_host(host, num_procs=4, card_bytes=320 * GIB, checkpoint=100 * 10**9)

    assert odd == [one.name for one in findings if one.severity is Severity.WARN]
    assert not [one for one in findings if one.severity is Severity.REFUSE]


def test_small_shared_memory_is_gone_around():
    """
    The cards use another way; the cure and the flag are told.
    """
    host = HOSTS["small shm"][0]

    found = decide_verdict(preflight.judge_host(host, num_procs=2, card_bytes=0, checkpoint=None))

    assert (Verdict.CHANGES, {"NCCL_SHM_DISABLE": "1"}) == (found.verdict, found.env)
    assert "64.0 MiB" in found.reasons[0]


# ---------------------------------------------------------------------------- disk and store


def test_the_store_is_too_slow_in_the_articles_manner():
    """
    What is needed, and what there is.
    """
    _, one = preflight.judge_store(StoreTrial(address="s3://b", rate=31e6), BIG, 92 * 10**9)

    assert "a 92 GB checkpoint every 15 min needs 102 MB/s; the store takes 31 MB/s" == one.message
    assert "checkpoint.save_interval: 50m or more" == one.hint


STORES = {
    "well": (StoreTrial(address="s3://b", rate=500e6), []),
    "keeps all": (StoreTrial(address="s3://b", rate=500e6, deletes=False), ["does not let us delete"]),
    "replaces": (StoreTrial(address="s3://b", rate=500e6, is_exclusive=False), ["two machines could write one run"]),
    "begins anew": (
        StoreTrial(address="s3://b", rate=500e6, missing_rights=("s3:ListBucketMultipartUploads",)),
        ["the key lacks s3:ListBucketMultipartUploads: an upload that was killed begins anew"],
    ),
    "leaves parts": (
        StoreTrial(address="s3://b", rate=500e6, missing_rights=("s3:AbortMultipartUpload",)),
        ["the key lacks s3:AbortMultipartUpload: what is left half sent may stay and cost money"],
    ),
    "clock": (StoreTrial(address="s3://b", rate=500e6, skew_s=-900), ["900 s apart"]),
}


@pytest.mark.parametrize(("trial", "words"), STORES.values(), ids=STORES)
def test_a_store_is_judged(trial, words):
    """
    What would fail with the first checkpoint, or the third.
    """
    odd = [one.message for one in preflight.judge_store(trial, BIG, 92 * 10**9) if one.severity is not Severity.OK]

    assert len(words) == len(odd)
    assert all(word in message for word, message in zip(words, odd, strict=True))


def test_what_a_store_confirms_is_said_beside_what_it_does_not_let_us():
    """
    Whoever reads a warning still wants to know how copies are compared there; nothing is called deleted that stays.
    """
    trial = StoreTrial(address="s3://b", rate=500e6, deletes=False, confirms="it confirms the CRC32 of whole files")

    told = [one.message for one in preflight.judge_store(trial, BIG, 92 * 10**9) if one.severity is Severity.OK]

    assert ["s3://b: written, read back; 500 MB/s; it confirms the CRC32 of whole files"] == told


DISKS = {
    "well": (DiskRate(folder="/w", free_bytes=10**12, rate=1e9), []),
    "small": (DiskRate(folder="/w", free_bytes=3 * 10**11, rate=1e9), ["2 + 2 checkpoints of 92 GB need 368 GB"]),
    "slow": (DiskRate(folder="/w", free_bytes=10**12, rate=5e7), ["needs 102 MB/s; the disk writes 50 MB/s"]),
    "no volume": (
        DiskRate(folder="/w", free_bytes=10**12, rate=1e9, kind="overlay", is_volume=False),
        ["goes with the container"],
    ),
}


@pytest.mark.parametrize(("rate", "words"), DISKS.values(), ids=DISKS)
def test_a_disk_is_judged(rate, words):
    """
    Room for keep_last + 2 checkpoints, and a save that ends before the next one.
    """
    odd = [one.message for one in preflight.judge_disk(rate, BIG, 92 * 10**9) if one.severity is not Severity.OK]

    assert len(words) == len(odd)
    assert all(word in message for word, message in zip(words, odd, strict=True))


def test_a_checkpoints_size_is_measured_estimated_or_unknown():
    """
    In this order.
    """
    assert 7 == preflight.expected_checkpoint(BIG, 7)
    assert 9e10 < preflight.expected_checkpoint(BIG, None) < 9.5e10
    assert preflight.expected_checkpoint(JOB, None) is None


def test_the_last_upload_must_fit_before_the_deadline():
    """
    An hour of upload, two hours left: said.
    """
    late = preflight.judge_end(NOW + timedelta(hours=2), NOW, checkpoint=36 * 10**9, rate=1e7)
    early = preflight.judge_end(NOW + timedelta(hours=20), NOW, checkpoint=36 * 10**9, rate=1e7)

    assert ["the last upload takes about 60 min of the 120 min until the deadline"] == [one.message for one in late]
    assert () == early


# ---------------------------------------------------------------------------------- software


def look(env=None, **found):
    given = {"missing": (), "hidden": (), "imports": ()} | found
    findings = preflight.judge_software(JOB, env or {}, **given)
    return [one.message for one in findings if one.severity is Severity.WARN]


def test_what_the_script_will_not_find_is_said():
    """
    Said and tried: an image may find it in a way that we do not know.
    """
    assert ["modules that the training python does not have: flash_attn"] == look(missing=("flash_attn",))
    assert ["/job/torch.py hides the module of that name"] == look(hidden=("/job/torch.py",))


def test_wandb_without_a_key_writes_to_disk():
    """
    It would ask at a prompt that nobody sees.
    """
    assert ["the script uses W&B and there is no key: it writes to disk (WANDB_MODE=offline)"] == look(
        imports=("wandb",)
    )
    assert [] == look({"WANDB_API_KEY": "k"}, imports=("wandb",))
    assert [] == look(imports=("wandb",), keys=("wandb",))


def test_every_finding_is_explained_in_the_table():
    """
    docs/preflight.md is made of it.
    """
    source = __import__("pathlib").Path(preflight.__file__).read_text()
    names = set(__import__("re").findall(r'\b(?:ok|warn|refuse|swap)\("([a-z_.0-9]+)"', source))

    assert names <= preflight.CHECKS.keys()
    assert len(names) > 10


@pytest.mark.parametrize(("cores", "num_procs", "threads"), [(32, 4, 8), (4, 8, 1), (256, 2, 16), (8, 0, 8)])
def test_cores_are_shared_out(cores, num_procs, threads):
    """
    At least one thread each, and no more than help.
    """
    assert threads == preflight.share_cores(cores, num_procs)
