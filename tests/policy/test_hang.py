"""Whether training hangs: whole hours in simulated time, looked at every five seconds."""

import random
from dataclasses import replace

import pytest

from runner.facts import CardPulse, Pulse, RankPulse, Stage
from runner.job import HangPolicy
from runner.policy.hang import Patience, Watch, cards_every_s, judge, keep, limit_s, watch

POLICY = HangPolicy()
PATIENCE = Patience()
EVERY_S = 5.0
HOUR = 3600.0


class Training:
    """Two ranks, or as many as asked for; told what happens second by second."""

    def __init__(self, *, num_ranks=2, cards=False, told=True):
        self.now, self.step, self.told, self.has_cards = 0.0, 0, told, cards
        self.ranks = [RankPulse(rank=r, pid=100 + r, state="S") for r in range(num_ranks)]
        self.pulse = Pulse(at_s=0.0)
        self.watch = watch(Watch(), self._look(), PATIENCE)
        self.verdicts = []

    def _look(self):
        ranks = tuple(replace(r, step=self.step + r.step if self.told else 0) for r in self.ranks)
        progress = "" if self.told else f"step {self.step} loss 1.0"
        return replace(self.pulse, at_s=self.now, ranks=ranks, progress=progress if self.step else "")

    def live(  # how the next `seconds` go; `cores` of each rank, steps as they come
        self,
        seconds,
        *,
        step_s=None,
        cores=(0.0, 0.0),
        prints=False,
        io=0.0,
        watts=None,
        use=0,
        memory=None,
        jump=EVERY_S,
        **pulse,
    ):
        ends, due = self.now + seconds, self.now
        self.pulse = replace(self.pulse, **pulse)
        while self.now < ends:
            due = due or self.now
            while step_s and self.now - due >= (took := step_s() if callable(step_s) else step_s):
                self.step, due = self.step + 1, due + took
            self.now += jump
            self.ranks = [
                replace(r, cpu_s=r.cpu_s + c * jump, io_bytes=r.io_bytes + int(io * jump))
                for r, c in zip(self.ranks, cores, strict=False)
            ]
            drawn = watts and watts + self.now % 7 / 100  # no two samples are the same
            cards = tuple(
                CardPulse(index=r.rank, use_percent=use, memory_percent=memory, power_w=drawn, limit_w=700)
                for r in self.ranks
                if watts
            )
            size = self.pulse.log_bytes + (100 if prints else 0)
            self.pulse = replace(self.pulse, log_bytes=size, cards=cards)
            self.watch = watch(self.watch, self._look(), PATIENCE)
            if verdict := judge(self.watch, POLICY, PATIENCE):
                self.verdicts.append((self.now, verdict))
        return self

    def trained(self, **more):
        """Ten minutes of good training come first."""
        return self.live(600, step_s=1.0, cores=(0.9,) * 9, prints=True, stage=Stage.TRAINING, **more)


# ---------------------------------------------------------------------------------- real ones


@pytest.mark.parametrize(
    ("hanging", "rank"),
    [
        pytest.param({}, None, id="ranks wait for each other"),
        pytest.param({"cores": (0.02, 0.02)}, None, id="background threads tick"),
        pytest.param({"io": 1000.0}, None, id="a heartbeat is written"),
    ],
)
def test_a_hang_is_confirmed_within_a_minute_of_the_limit(hanging, rank):
    """
    No step, no output and no work: a hang soon after the learned limit, and not before.
    """
    training = Training().trained()
    began, limit = training.now, limit_s(training.watch, POLICY, PATIENCE)

    training.live(limit + 90, **hanging)

    at, verdict = training.verdicts[0]
    assert limit <= at - began <= limit + 60
    assert rank == verdict.rank
    assert "no step for" in verdict.reason


def test_a_stopped_rank_is_named_whatever_the_others_do():
    """
    Who is stopped (SIGSTOP) is the one, though the others spin and complain.
    """
    training = Training().trained()
    began, limit = training.now, limit_s(training.watch, POLICY, PATIENCE)
    training.ranks[1] = replace(training.ranks[1], state="T")

    training.live(limit + 90, cores=(1.0, 0.0), prints=True)

    at, verdict = training.verdicts[0]
    assert limit <= at - began <= limit + 60
    assert (1, True) == (verdict.rank, "SIGSTOP" in verdict.reason)


def test_a_rank_that_is_behind_is_named():
    """
    The others made a step that it did not.
    """
    training = Training(num_ranks=3).trained()
    training.ranks[0] = replace(training.ranks[0], step=1)
    training.ranks[2] = replace(training.ranks[2], step=1)

    training.live(300)

    assert 1 == training.verdicts[0][1].rank


def test_cards_that_are_busy_at_idle_power_wait():
    """
    A collective that hangs shows 100 % use, and its ranks spin; power tells it from work.
    """
    training = Training().trained(use=100, watts=600)

    training.live(400, cores=(1.0, 1.0), use=100, watts=130)

    assert training.verdicts[0][1].reason.endswith("; cards at 100 % and 130 W, 100 % and 130 W")


@pytest.mark.parametrize(("memory", "is_hang"), [(0, True), (12, False), (None, False)])
def test_training_that_draws_little_is_told_from_a_wait_by_its_memory(memory, is_hang):
    """
    A wait draws 120 W, so power says nothing where training draws 200: but a wait leaves the card's memory alone.
    """
    training = Training().trained(use=90, watts=200, memory=15)

    training.live(600, cores=(1.0, 1.0), use=100, watts=120, memory=memory)

    assert is_hang == bool(training.verdicts)


def test_power_before_training_is_not_that_of_training():
    """
    A sample from while the model was loaded would make every card that waits look busy.
    """
    training = Training().live(10, use=0, watts=75)
    training.live(15, step_s=5.0, cores=(0.9, 0.9), prints=True, use=0, watts=80, stage=Stage.TRAINING)

    assert () == training.watch.healthy_w

    for watts in (590, 600):
        training.live(30, step_s=5.0, cores=(0.9, 0.9), prints=True, use=100, watts=watts)
    assert all(590 <= known <= 600 for known in training.watch.healthy_w)
    assert 2 == len(training.watch.healthy_w)


@pytest.mark.parametrize(
    ("since", "limit", "every"),
    [(0, 180, 60), (89, 180, 60), (90, 180, 15), (5, 10, 5), (14, 28, 7), (900, 1800, 15)],
)
def test_cards_are_asked_more_often_when_a_step_is_late(since, limit, every):
    """
    From half of the limit on, so that a rank that only spins is known by the time the limit is reached.
    """
    assert every == cards_every_s(since, limit)


def test_the_rank_whose_card_is_idle_is_named():
    """
    All other cards wait at full use and low power.
    """
    training = Training().trained(use=100, watts=600)
    training.pulse = replace(training.pulse, cards=())
    began = training.now
    while not training.verdicts:
        training.live(5, cores=(1.0, 0.0), use=100, watts=130)
        cards = (training.pulse.cards[0], replace(training.pulse.cards[1], use_percent=0))
        training.pulse = replace(training.pulse, cards=cards)
        training.watch = watch(training.watch, replace(training._look(), at_s=training.now), PATIENCE)
        training.verdicts += [(training.now, v)] if (v := judge(training.watch, POLICY, PATIENCE)) else []
        assert training.now < began + 600

    assert 1 == training.verdicts[-1][1].rank


def test_only_a_step_takes_a_verdict_back():
    """
    Who is asked for a dump computes and prints it: that is no life of its own.
    """
    training = Training().trained().live(300)
    verdict = training.verdicts[-1][1]

    training.verdicts = []
    training.live(10, cores=(1.0, 1.0), prints=True)

    assert [] == training.verdicts
    assert verdict == keep(verdict, None, has_moved=False)
    assert keep(verdict, None, has_moved=True) is None


def test_a_question_is_told():
    """
    A job that waits for an answer is told that none will come.
    """
    training = Training(told=False).live(2700, question="Continue? [y/N]")

    assert "asks 'Continue? [y/N]'" in training.verdicts[0][1].reason


def test_before_the_first_step_the_start_up_limit_holds():
    """
    Nothing at all happens: half an hour, and not more than a minute beyond.
    """
    training = Training().live(1900)

    assert 1800 <= training.verdicts[0][0] <= 1860


def test_a_rank_that_spins_in_silence_is_ended_in_the_end():
    """
    Processor time alone is believed for an hour.
    """
    training = Training().trained().live(2 * HOUR, cores=(1.0, 0.0))

    assert 3600 <= training.verdicts[0][0] - 600 <= 3700


# -------------------------------------------------------------------------------- false alarms


@pytest.mark.parametrize(
    "quietly",
    [
        pytest.param(lambda t: t.live(3400, cores=(8.0, 8.0)), id="a long compile at the start"),
        pytest.param(lambda t: t.live(3 * HOUR, cores=(1.0, 0.0), prints=True), id="tokenisation at the start"),
        pytest.param(lambda t: t.trained().live(3400, cores=(1.0, 1.0)), id="a long evaluation without a word"),
        pytest.param(lambda t: t.trained().live(4 * HOUR, cores=(1.0, 1.0), prints=True), id="a longer one that talks"),
        pytest.param(lambda t: t.trained(use=100, watts=600).live(3000, use=99, watts=500), id="cards that compute"),
        pytest.param(lambda t: t.trained().live(3000, io=50e6), id="a data set that is read from disk"),
        pytest.param(lambda t: t.trained().live(500, stage=Stage.SAVING), id="a slow checkpoint"),
        pytest.param(lambda t: t.trained().live(170), id="a pause below the floor"),
        pytest.param(lambda t: t.trained().live(800, stage=Stage.EVALUATING), id="an evaluation on a card nobody sees"),
        pytest.param(lambda t: t.trained().live(590, stage=Stage.ENDING), id="a slow end"),
        pytest.param(lambda t: t.trained().live(3000, stage=Stage.ENDING, cores=(0.9, 0.0)), id="an export at the end"),
        pytest.param(lambda t: t.trained().live(7200, jump=7200), id="the machine slept for two hours"),
    ],
)
@pytest.mark.parametrize("told", [True, False], ids=["library", "any script"])
def test_what_takes_long_is_no_hang(quietly, told):
    """
    Signs of life, or a phase that may take long, put the verdict off.
    """
    training = quietly(Training(told=told))

    assert [] == training.verdicts


def test_a_flush_to_disk_is_no_hang():
    """
    A rank waits in the kernel while what it saved is on its way; when nothing moves any more, it is one.
    """
    training = Training().trained()
    training.ranks[0] = replace(training.ranks[0], state="D")
    for look in range(120):
        training.live(5, dirty_bytes=10**11 - look * 10**8)
    assert [] == training.verdicts

    training.live(90)

    assert 0 == training.verdicts[0][1].rank


def test_a_rare_long_pause_is_learned():
    """
    An evaluation of four minutes in every hundred steps is no hang, though no sign of life is seen.
    """
    training = Training().trained()
    for _ in range(3):
        training.live(240, io=2e6)  # the first one has signs of life
        training.live(100, step_s=1.0)

    assert 1.5 * 235 <= limit_s(training.watch, POLICY, PATIENCE)
    assert [] == training.live(300).verdicts


@pytest.mark.parametrize("seed", range(4))
def test_two_hours_of_jittering_steps_are_no_hang(seed):
    """
    Step times from a tenth of a second to minutes, with pauses, raise no alarm; then a real hang does.
    """
    chance = random.Random(seed)
    usual = chance.choice([0.2, 2.0, 20.0])
    training = Training()

    def step_s():
        return usual * chance.lognormvariate(0, 0.6)

    while training.now < 2 * HOUR:
        training.live(chance.uniform(60, 900), step_s=step_s, cores=(0.05, 0.05), stage=Stage.TRAINING)
        if chance.random() < 0.3:
            training.live(chance.uniform(10, 900), cores=(1.0, 0.0))
    assert [] == training.verdicts
    began, limit = training.now, limit_s(training.watch, POLICY, PATIENCE)

    training.live(limit + 90)

    assert limit - 2 * EVERY_S <= training.verdicts[0][0] - began <= limit + 60


# ------------------------------------------------------------------------------------- limits


def test_what_the_user_set_is_the_limit():
    """
    A set time takes the place of what was learned, for steps and for saves.
    """
    training = Training().trained()
    policy = HangPolicy(step_timeout="20m", checkpoint_timeout="1h", startup_timeout="5m")

    assert 1200 == limit_s(training.watch, policy, PATIENCE)
    assert 3600 == limit_s(training.live(5, stage=Stage.SAVING).watch, policy, PATIENCE)
    assert 300 == limit_s(Training().watch, policy, PATIENCE)


def test_slow_steps_have_a_long_limit():
    """
    The safety factor times the usual step, where that is more than the floor.
    """
    training = Training().live(4 * HOUR, step_s=300.0, cores=(0.9, 0.9), stage=Stage.TRAINING)

    assert 1450 <= limit_s(training.watch, POLICY, PATIENCE) <= 1550
