"""
The trainer's three lines.

    ckpt = Checkpointer(model, optimizer, scheduler=scheduler, loader=loader)
    for step, batch in ckpt.steps(loader, max_steps=10_000):
        ...; optimizer.step(); optimizer.zero_grad()

It resumes by itself, saves by the clock, and leaves when the supervisor asks. After the
constructor no rank waits for another; a step without a save costs a few stores.
"""

from __future__ import annotations

import atexit
import inspect
import os
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from vramfarm import alike, apart, arguments, resuming, run, training
from vramfarm.course import Course
from vramfarm.data import Feed
from vramfarm.epochs import Position
from vramfarm.loading import Reader
from vramfarm.protocol import Ended, Env, Phase, Reason, Word
from vramfarm.run import Choice
from vramfarm.saves import Saves
from vramfarm.seat import Seat
from vramfarm.stepping import Stepping
from vramfarm.tending import SaverProcess, log_path

_EXIT_PATIENCE_S: Final = 60.0


class Checkpointer:
    """
    Saves and resumes one training run: `model`, optimizers, and anything named that has state_dict and load_state_dict.
    It is made on every rank, which waits there for the others.

    `dir`, `save_interval`, `keep_last` and `resume` ("auto", "never" or a checkpoint's folder) are
    for runs without a supervisor; under one, its word counts. `data_parallel` is (rank, size) among
    the ranks that see different data; with tensor parallelism these are not all ranks.
    `staging` is "full", memory for a copy of the state, "chunked", a little memory and a training that waits
    while it is written, or "auto", full where there is enough. `hide_copies=False` is for scripts that change weights by other means than optimizer.step() between two
    steps: a save then costs the time of one copy from the device. `allow_pickle=True` is for modules and objects that unpickle what they
    are given back (FP8 layers of Transformer Engine do), where nobody else can write to the checkpoints.
    """

    def __init__(  # noqa: PLR0913  # the API: every keyword is one thing to say
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = (),
        *,
        loader: Iterable[Any] | None = None,
        dir: str | Path = "checkpoints",  # noqa: A002  # reads well where it is used
        save_interval: float | str | timedelta = "30m",
        keep_last: int = 2,
        resume: str = "auto",
        seed: int = 0,
        data_parallel: tuple[int, int] | None = None,
        hide_copies: bool = True,
        staging: str = "auto",
        allow_pickle: bool = False,
        **objects: Any,  # noqa: ANN401  # duck-typed: state_dict and load_state_dict
    ) -> None:
        allow_pickle, is_hiding = arguments.parse_flags(allow_pickle=allow_pickle, hide_copies=hide_copies)
        self._training = training.parse(
            model,
            optimizer,
            objects,
            loader,
            seed=seed,
            allow_pickle=allow_pickle,
            data_parallel=data_parallel,
            keywords=[*inspect.signature(Checkpointer).parameters],
        )
        world = self._training.world
        wanted = run.wanted(dir, save_interval, keep_last, resume, staging)
        page, env = run.make_env(world, wanted)
        if page[Word.ENDED]:
            raise RuntimeError("this attempt's training has ended; under a supervisor there is one Checkpointer")
        self._is_supervised = run.is_supervised(env)
        self.grad_accum = run.grad_accum(env)
        self.last_micro_batch = True
        self._seat = Seat(page, world.rank)
        self._seat.enter(Phase.LOADING)
        self._step = self._resumed_step = 0
        # Driving: the loop's body has a batch, of so many samples. Half: left in the middle of a step, so that memory has the state of none.
        self._driving = self._is_half = self._finished = False
        self._is_fork = False  # of the process that trains, which has the page and the saver
        self._taking = 0
        self._is_settling = True  # there is something to look at after each step
        self._course = Course(self._training, self._seat)
        self._stepping = Stepping(self._training.optimizers, self._training.named, self._seat.num_finished)
        self._saves = Saves(
            self._training,
            self._course,
            self._stepping,
            self._seat,
            staging=run.parse_staging(env.get(Env.STAGING, "auto")),
            hide=is_hiding,
        )
        try:
            self.restored = self._resume(env, wanted.resume)
        except BaseException:
            if world.rank == 0 and not self._is_supervised:
                page.path.unlink(missing_ok=True)  # there is no saver to do it
            raise
        self._begin()

    # ------------------------------------------------------------------ what a script uses

    @property
    def start_step(self) -> int:
        """How many optimizer steps are behind us; a loop of one's own begins here."""
        return self._step

    @property
    def saved_step(self) -> int:
        """Return the step of the newest save that is on the disk, durably; of one that was resumed from as long as there is no newer one."""
        return self._seat.page[Word.COMMITTED_STEP] or self._resumed_step

    def steps(
        self,
        loader: Iterable[Any] | None = None,
        *,
        max_steps: int | None = None,
        epochs: int | None = None,
        accumulate: int = 1,
        finish: bool = True,
    ) -> Iterator[tuple[int, Any]]:
        """
        Yield (step, batch) from where we are, and finish at the end. With neither limit: one pass, with the next call one more.

        `finish=False` ends the loop without ending the training, for a validation between epochs; `finish()`
        or the script's end does that then. `RuntimeError` after the end.

        A step ends when the loop's body comes back, with `accumulate` after that many batches
        (`last_micro_batch` says which one completes the step). What is left of an epoch goes on
        with the next; at the very end, and where another loader comes next, it is dropped. The samples of a step
        that is left before its optimizer made it come again with the next loop, and its gradients are dropped.

        Each loader has a position of its own, and `epochs` counts what it has been gone through. Loaders over the
        same dataset are the same one; one that was not seen before begins at its beginning.

        `accumulate=ckpt.grad_accum` keeps job.yaml's global batch on any number of cards. It is not
        the default: a loop that steps its optimizer with every batch would be counted wrong.
        """
        self._expect_unfinished("steps")
        if self._driving:
            raise RuntimeError(
                "steps: another steps() loop has not ended: it is around this one, or was left while its iterator is kept; close() that first"
            )
        self._compare(accumulate)
        self._is_half = False
        loader = self._training.loader if loader is None else loader
        if loader is None:
            raise ValueError("steps: no loader here, and none in Checkpointer(loader=...)")
        arguments.check_loader(loader, "steps")
        max_steps, epochs, accumulate = arguments.parse_limits(max_steps, epochs, accumulate)
        arguments.parse_flags(**{"steps: finish": finish})
        course = self._course
        if course.enter(loader):
            self._stepping.drop_gradients()
        epochs = course.plan_passes(epochs, is_bounded=max_steps is not None)
        feed = course.feed_of(loader)
        last = self._last_step(feed, max_steps, epochs, accumulate)
        self._seat.start(self._step, max_steps=last, samples=self._position.samples)
        yield from self._drive(feed, max_steps, epochs, accumulate)
        if finish:
            course.mark()  # what is left of an accumulation is dropped
            self.finish()

    def step(self) -> None:
        """Say that an optimizer step is done: in a loop of one's own, after each. Leaves the process when asked to."""
        # Where training has emptied the caches each line of this costs a microsecond or more.
        if self._driving or self._finished:
            self._expect_own_loop()
        self._step = step = self._step + 1
        if self._seat.passes(step) or self._is_settling:
            self._attend()

    def _expect_own_loop(self) -> None:
        self._expect_unfinished("step")
        raise RuntimeError("step: ckpt.steps() counts the steps by itself; call step() in a loop of your own only")

    def _expect_no_fork(self, what: str) -> None:
        if self._is_fork:
            raise RuntimeError(f"{what}: this process is a fork of the one that trains, and only that one saves")

    def _expect_unfinished(self, what: str) -> None:
        self._expect_no_fork(what)
        if self._finished:
            raise RuntimeError(
                f"{what}: the training has ended, and nothing is saved any more: steps() ends it, unless it is called with finish=False"
            )

    def report(self, *, loss: float | torch.Tensor | None = None, lr: float | torch.Tensor | None = None) -> None:
        """Hand scalars to the supervisor. A tensor is waited for, as by `.item()`."""
        self._seat.report(loss=arguments.parse_scalar("loss", loss), lr=arguments.parse_scalar("lr", lr))

    def save(self) -> None:
        """Ask for a save at one of the next steps, on all ranks. Returns at once. Asked on local rank 0; elsewhere it does nothing."""
        self._expect_unfinished("save")
        if self._training.world.rank == 0:
            self._seat.page[Word.REQUEST_SAVE] += 1

    def wait(self, timeout_s: float | None = None) -> bool:
        """
        Wait until the save that was staged last is on the disk, or has failed: `saved_step` tells.

        False after `timeout_s`, if the disk does not answer, or where one that was asked for has yet to begin: it does so at one of the next steps.
        """
        page = self._seat.page
        if timeout_s is not None:
            timeout_s = max(0.0, arguments.parse_number("wait: timeout_s", timeout_s))  # of nan none
        return self._seat.wait(timeout_s) and page[Word.REQUEST_SAVE] == page[Word.SERVED_SAVE]

    def finish(self) -> None:
        """
        Save the final state, if it is not saved yet, and record that training is done.

        `RuntimeError` where that cannot be: a rank is dead or an hour late, or the disk has not answered for ten minutes and what a slow one needs.
        """
        self._expect_no_fork("finish")
        if self._finished:
            return
        self._count_open_step()
        if self._is_half:
            raise RuntimeError(f"the final state could not be saved: step {self._step + 1} is half made")
        ended = self._seat.finish(self._saves.stage)
        if ended in {Ended.NO, Ended.FAILED}:
            why = self._seat.page.error() if ended is Ended.FAILED else self._seat.why_no_end()
            raise RuntimeError(f"the final state could not be saved: {why}")
        self._finished = True
        self._let_go()
        atexit.unregister(self._at_exit)
        self._tell()

    def _let_go(self) -> None:
        self._saves.close()
        self._stepping.close()

    def _tell(self) -> None:
        self._saves.tell(is_supervised=self._is_supervised)

    def _become_fork(self) -> None:
        self._is_fork, self._finished, self._driving = True, True, False

    def _at_exit(self) -> None:
        """
        A script that ends without `finish`, after a `break` or in a loop of its own, loses nothing;
        one that crashed only gets what it staged onto the disk.
        """
        if self._is_fork:
            return
        if self._finished or self._is_half or run.has_crashed():
            self._seat.wait(_EXIT_PATIENCE_S)
            return
        self._finished = True
        ended = self._seat.finish(self._saves.stage, timeout_s=_EXIT_PATIENCE_S, recorded=False)
        self._tell()
        if ended in {Ended.NO, Ended.FAILED}:
            why = (
                self._seat.page.error()
                if ended is Ended.FAILED
                else f"it is not on the disk after {_EXIT_PATIENCE_S:.0f} s"
            )
            self._say(f"the script ends, and its last state is not saved: {why}; finish() would have raised")

    # ------------------------------------------------------------------------------- steps

    def _drive(
        self, feed: Feed, max_steps: int | None, epochs: int | None, accumulate: int
    ) -> Iterator[tuple[int, Any]]:
        # Each line of a batch's costs training time: nothing is called that need not be.
        course, position = self._course, self._position
        is_watched = feed.is_kept or not self._stepping.tells_all
        try:
            while (epochs is None or position.epoch < epochs) and not self._has_reached(max_steps):
                course.begin_epoch()
                empty = position.cursor == 0
                for batch in feed.rest_of_epoch(position):
                    empty = False
                    self.last_micro_batch = course.num_open + 1 >= accumulate
                    self._driving = True
                    self._taking = feed.count(batch, position)
                    if course.watch is not None:
                        course.watch.see(batch)
                        self._is_settling = True
                    yield self._step, batch
                    self._driving = False
                    position.advance(self._taking)
                    course.num_open += 1
                    if course.num_open >= accumulate:
                        course.num_open = 0
                        course.done = replace(position)
                        if is_watched:
                            feed.mark()
                            self._stepping.look()
                        self._seat.count(position.samples)
                        self.step()
                    if self._has_reached(max_steps):
                        return
                if empty:
                    raise ValueError("steps: the loader gave no batch: fewer samples than one batch on every rank?")
                position.next_epoch()
                if course.num_open == 0:
                    course.mark()
        finally:  # after a break
            self._count_open_step()

    def _compare(self, accumulate: int) -> None:
        if accumulate != self.grad_accum and Env.GRAD_ACCUM in os.environ:
            self._say(
                f"job.yaml's batch is kept by {self.grad_accum} batches a step on these cards, this loop takes {accumulate}: "
                "pass accumulate=ckpt.grad_accum, and step the optimizer when ckpt.last_micro_batch"
            )

    def _count_open_step(self) -> None:
        """
        A body that does not come back made a step if an optimizer did. It is not saved now.

        Where another one was due, as when an exception comes between two, nothing is saved any more.
        """
        if not self._driving:
            return
        self._driving = False
        made = self._stepping.is_made()
        if made and self._stepping.is_one_missing():
            self._is_half = True
            self._seat.skip(self._step + 1)
            self._say(
                f"left in the middle of step {self._step + 1}, when not all optimizers had stepped: it is not saved"
            )
        elif made:
            self._position.advance(self._taking)
            self._course.num_open = 0
            self._course.mark()
            self._step += 1
            self._seat.skip(self._step)
            self._seat.finished(self._step, self._position.samples)
        else:
            self._course.is_cut = True

    @property
    def _position(self) -> Position:
        return self._course.position

    def _has_reached(self, max_steps: int | None) -> bool:
        return max_steps is not None and self._step >= max_steps

    def _last_step(self, feed: Feed, max_steps: int | None, epochs: int | None, accumulate: int) -> int:
        """For people who look: 0 where it is not known."""
        batches = 0 if epochs is None else feed.num_batches(self._position, epochs)
        known = [n for n in (max_steps, self._step + batches // accumulate if batches else None) if n is not None]
        return min(known, default=0)

    def _attend(self) -> None:
        """What steps have to see to now and then."""
        self._tell()  # first: what is wrong with the next save would stand for what was with the last
        if self._saves.is_warm and self._stepping.is_listening:
            for stranger in self._stepping.hear(self._training.models):
                self._say(stranger)
        reason = self._seat.answer(self._step)
        if reason is not None:
            self._save(reason)
        self._saves.warm()
        watch = self._course.watch
        if watch is not None and (same := watch.is_same()) is not None:
            self._course.watch = None
            if same:
                self._say(alike.SAME)
        self._is_settling = not self._saves.is_warm or self._stepping.is_listening

    def _save(self, reason: Reason) -> None:
        try:
            is_staged = self._saves.stage(self._step)
        except Exception as error:
            if reason is Reason.LEAVE:
                raise
            self._seat.give_up(
                self._step, f"its state could not be taken: {error!r}"
            )  # training goes on, the next save tries again
            return
        self._stepping.listen()
        if is_staged and reason is Reason.LEAVE and self._seat.leave(self._step):
            self._finished = True
            self._say(f"left at step {self._step}, saved")
            raise SystemExit(0)

    # --------------------------------------------------------------- resuming and beginning

    def _resume(self, env: dict[str, str], resume: str) -> str | None:
        """Go on from the newest checkpoint that is whole. Return its name."""
        choice = resuming.go_on(env, resume, self._training, self._load)
        if choice.resume is None:
            self._saves.contents.check()
        self._start_saver(env, choice)
        if choice.resume is None:
            self._say(
                "starting at step 0" + (" (resume: never)" if resume == "never" and not self._is_supervised else "")
            )
        return choice.resume.name if choice.resume else None

    def _load(self, reader: Reader) -> None:
        found = resuming.load(reader, self._training)
        self._step = self._resumed_step = found.step
        self._course.go_on(found)
        if self._training.world.rank == 0:
            apart.keep(self._seat.page, self._training.of_any_rank, found.apart)
        about = f"{reader.manifest.ref.name} ({run.num_shards_text(reader.manifest)})"
        self._say(f"resumed from {about}\n{found.report.text()}")

    def _start_saver(self, env: dict[str, str], choice: Choice) -> None:
        if self._training.world.rank == 0:
            env = run.saver_env(env, choice)
            run.note_saving(Path(env[Env.CHECKPOINT_DIR]), self._seat.page)
            self._seat.saver = SaverProcess(self._seat.page, env, log_path(env))
            self._seat.tend()

    def _begin(self) -> None:
        self._stepping.begin()
        self._course.begin()
        if self._training.lacks_optimizer():
            self._say(training.NO_OPTIMIZER)
        self._saves.begin()
        self._seat.start(self._step, samples=self._position.samples)
        run.watch_for_a_crash()
        atexit.register(self._at_exit)
        become_fork = weakref.WeakMethod(self._become_fork)  # what is told of forks is told for good
        os.register_at_fork(after_in_child=lambda: (become := become_fork()) and become())

    def _say(self, text: str) -> None:
        self._training.say(text)
