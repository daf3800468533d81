"""How far a script without the library is, by what it prints."""

from __future__ import annotations

import pytest

from runner.facts import Attempt, Observed, Progress
from runner.folder import RunFolder
from runner.job import GuardPolicy, HangPolicy
from runner.sight import AttemptSight, HangWatch
from runner.supervise.cards import Cards
from runner.supervise.clock import Clock
from runner.supervise.steps import Guess, Mark, StepReader, follow, read_line
from vramfarm.protocol import Ref

HF_BAR = " 16%|█▌        | 81/500 [00:10<00:55,  7.50it/s]"
HF_LOG = "{'loss': 1.2034, 'grad_norm': 0.71, 'learning_rate': 4.2e-05, 'epoch': 0.5}"
HF_END = "{'train_runtime': 61.2, 'train_samples_per_second': 65.3, 'train_loss': 2.11, 'epoch': 3.0}"
LIGHTNING = "Epoch 2:  45%|████▌     | 45/100 [00:10<00:12,  4.40it/s, v_num=0, train_loss=0.512]"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("step 81 loss 0.19", Mark(step=81, loss=0.19), id="plain"),
        pytest.param("step 81/500 loss 0.19", Mark(step=81, total=500, loss=0.19), id="with its total"),
        pytest.param("step: 1,200 | train loss: 1.5e-3 | lr 2e-4", Mark(step=1200, loss=0.0015), id="thousands"),
        pytest.param("iter 30: loss 2.3456, time 12.1ms", Mark(step=30, loss=2.3456), id="nanoGPT"),
        pytest.param("[rank0] global_step=7 loss=-.5", Mark(step=7, loss=-0.5), id="key and value"),
        pytest.param("Epoch [2/10], Step [100/600], Loss: 0.5", Mark(step=700, total=6000, loss=0.5), id="by epoch"),
        pytest.param(HF_BAR, Mark(step=81, total=500, is_bar=True), id="bar of the HF Trainer"),
        pytest.param(HF_LOG, Mark(loss=1.2034), id="log of the HF Trainer"),
        pytest.param("{'loss': '1.203', 'epoch': '0.5'}", Mark(loss=1.203), id="log of a newer one"),
        pytest.param(HF_END, None, id="its average at the end"),
        pytest.param("{'eval_loss': 1.9, 'epoch': 1.0}", None, id="its evaluation"),
        pytest.param(LIGHTNING, Mark(step=245, loss=0.512, is_bar=True), id="Lightning"),
        pytest.param("Validation DataLoader 0:  50%|# | 5/10 [00:00<00:00, 9.9it/s]", None, id="its validation"),
        pytest.param("Loading checkpoint shards:  50%|##| 1/2 [00:01<00:01, 1.0s/it]", None, id="loading"),
        pytest.param("epoch 3 loss 0.5", Mark(loss=0.5), id="epochs are no steps"),
        pytest.param("step 5 of the set-up: pip install", None, id="no loss, no step"),
        pytest.param("hello", None, id="no number"),
    ],
)
def test_a_line_says_step_and_loss(text, expected):
    """
    Lines as trainers print them; what loads, evaluates or sums up says nothing.
    """
    assert expected == read_line(text)


def test_the_bar_of_an_evaluation_is_no_step():
    """
    Not in the midst of training, nor after it; nor do steps go back.
    """
    guess, steps = Guess(), []
    for step, total in ((80, 100), (81, 100), (1, 9), (9, 9), (80, 100), (100, 100), (9, 9), (1, 200)):
        guess = follow(guess, Mark(step=step, total=total, is_bar=True))
        steps.append(guess.newest.step)

    assert [80, 81, 81, 81, 81, 100, 100, 1] == steps


def test_words_are_believed_before_bars():
    """
    A bar may count anything; a line that says step is taken at its word.
    """
    guess = Guess()
    for text in (
        " 10%|# | 10/99 [00:01<00:09, 9.9it/s]",
        " 20%|# | 20/99 [00:01<00:09, 9.9it/s]",
        "step 7 loss 1",
        HF_BAR,
    ):
        mark = read_line(text)
        assert mark is not None
        guess = follow(guess, mark)

    assert 7 == guess.newest.step


def test_steps_loss_and_rate_come_from_the_log_of_rank_0(tmp_path):
    """
    From the second step on; a last line without an end counts when nobody writes any more.
    """
    reader, log = StepReader(tmp_path), tmp_path / "launcher.log"
    log.write_text("step 10/500 loss 2.5\n")
    reader.look(0.0)
    once = reader.fill(Progress())
    log.write_text("step 10/500 loss 2.5\nnoise\nstep 20/500 loss 2.25\nstep 30/500 loss 2.1")
    reader.look(10.0)
    twice = reader.fill(Progress(num_failed=1))
    reader.look(15.0, ended=True)
    ended = reader.fill(Progress())

    assert Progress() == once
    assert Progress(step=20, max_steps=500, loss=2.25, phase="training", num_failed=1, from_log=True) == twice
    assert (30, 2.1, 2.0) == (ended.step, ended.loss, ended.steps_per_s)


def test_a_bar_and_its_losses_come_together(tmp_path):
    """
    The HF Trainer wipes its bar, prints its losses and draws the bar again, all into one file.
    """
    bars = "".join(f"\r  1%|  | {step}/500 [00:10<00:55,  7.50it/s]" for step in (79, 80, 81))
    (tmp_path / "launcher.log").write_text(f"{bars}\r{' ' * 40}\r{HF_LOG}\n\r{HF_BAR.replace('81/', '82/')}\r")
    reader = StepReader(tmp_path)
    reader.look(0.0)

    found = reader.fill(Progress())

    assert (82, 500, 1.2034) == (found.step, found.max_steps, found.loss)


def test_what_ranks_report_themselves_stands(tmp_path):
    """
    A log is asked only where nobody is attached.
    """
    (tmp_path / "launcher.log").write_text("step 10 loss 2.5\nstep 20 loss 2.25\n")
    reader = StepReader(tmp_path)
    reader.look(0.0)

    assert Progress(attached=True, step=3) == reader.fill(Progress(attached=True, step=3))


def test_an_attempt_that_has_ended_is_read_to_its_last_line(tmp_path):
    """
    Its step and the beginning of its training are known, a resumed one's that counts anew, too.
    """
    folder, clock = RunFolder(root=tmp_path), Clock()
    resumed = Attempt(
        number=1, id="none", resume=Ref(1, 60, 1, "0" * 8), lineage=1, boot_id="b", launched_at=clock.now()
    )
    log = folder.attempt(1) / "launcher.log"
    log.parent.mkdir(parents=True)
    log.write_text("".join(f"step {step}/32 loss 0.5\n" for step in range(1, 33)))
    sight = AttemptSight(folder, HangWatch(HangPolicy(), folder, Cards("")), GuardPolicy(), clock)

    seen = sight.look(Observed(now=clock.now(), boot_id="b", life="l"), resumed)

    assert (32, 32, True, False) == (
        seen.progress.step,
        seen.progress.max_steps,
        seen.progress.from_log,
        seen.progress.attached,
    )
    assert seen.now == seen.first_step_at
