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
import contextlib
import inspect
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from vramfarm import alike, apart, arguments, copies, data, memory, optim, resuming, rng, run, state, unpickling
from vramfarm.copies import Copier, Layout, Taken
from vramfarm.data import Feed
from vramfarm.epochs import Position, Saved
from vramfarm.frozen import LEAST_BYTES
from vramfarm.loading import Reader
from vramfarm.memory import WINDOW_BYTES
from vramfarm.orders import Complaint
from vramfarm.outset import Outset
from vramfarm.places import Place, Places
from vramfarm.protocol import ALIKE, FILES, Ended, Env, Phase, Reason, Told, Word
from vramfarm.resuming import Restored, Training
from vramfarm.run import Choice
from vramfarm.seat import NO_FROZEN, Frozen, Seat
from vramfarm.staging import Meshes
from vramfarm.state import Snapshot
from vramfarm.stepping import Stepping
from vramfarm.still import Still
from vramfarm.tending import SaverProcess, log_path
from vramfarm.typed import StateError
from vramfarm.warmup import WarmUp

_EXIT_PATIENCE_S: Final = 60.0
ALONE: Final = (
    "the loader is of a kind of its own and stays as it is, and its sampler knows nothing of the other ranks: give it a DistributedSampler, "
    "or every rank goes through all samples"
)
NO_OPTIMIZER: Final = (
    "no optimizer was given, and the model has weights that want gradients: if one trains them, its state is not saved; "
    "give it, Checkpointer(model, optimizer)"
)
_NOWHERE: Final = Place(-1, Position(), None, lambda: None)  # no loader was gone through yet
_RESERVED: Final = frozenset({"model", "rng", "loader", ALIKE})


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
        self._model = model
        self._optimizers = _named_optimizers(optimizer)
        self._objects = {name: thing for name, thing in objects.items() if thing is not None}
        self._loader = loader
        self._seed = arguments.parse_whole("seed", seed, "a whole number")
        self._allow_pickle, is_hiding = arguments.parse_flags(allow_pickle=allow_pickle, hide_copies=hide_copies)
        self._check()
        self._world = run.current_world()
        self._data_world = self._world if data_parallel is None else arguments.parse_world(data_parallel, self._world)
        if data_parallel is None and self._world.size > 1 and state.is_tensor_parallel(model):
            raise ValueError("a tensor-parallel model: say which ranks see different data: data_parallel=(rank, size)")
        self._meshes, self._of_any_rank = self._compare_ranks()
        wanted = run.wanted(dir, save_interval, keep_last, resume, staging)
        page, env = run.make_env(self._world, wanted)
        if page[Word.ENDED]:
            raise RuntimeError("this attempt's training has ended; under a supervisor there is one Checkpointer")
        self._supervised = run.is_supervised(env)
        self.grad_accum = run.grad_accum(env)
        self._staging = run.parse_staging(env.get(Env.STAGING, "auto"))
        self._available = memory.available_bytes()  # before any rank here takes of it
        self._is_bounded = self._staging == "chunked"
        self._seat = Seat(page, self._world.rank)
        self._seat.enter(Phase.LOADING)
        # Open: batches of a step that is being accumulated.
        self._step = self._resumed_step = self._open = 0
        self._position, self._done = Position(), Position()  # of the loader, and of the last step, which is saved
        self._places, self._place = Places(), _NOWHERE
        self._rng: Any = None
        self._feed: tuple[Iterable[Any], Feed] | None = None
        self._alike: alike.Watch | None = None
        # Half: left in the middle of a step, so that memory has the state of none. Cut: left before an optimizer made it, which drops its gradients.
        self._driving = self._is_half = self._is_cut = False
        self._taking, self._finished = 0, False  # taking: samples of the batch that the loop's body has
        self._is_settling = True  # there is something to look at after each step
        self._told, self._complaint = (0, 0), Complaint()
        self._frozen_told = False
        self.last_micro_batch = True
        self._known: Still | None = None
        self._outset = Outset(self._models(), self._optimizers, self._training_objects())
        self._layout: Layout | None = None
        self._warm_up: WarmUp | None = None
        self._is_warm, self._has_trained = True, False
        self._stepping = Stepping(self._optimizers, self._objects, self._seat.num_finished)
        self._copier = Copier([one for _, one in self._optimizers], hide=is_hiding)
        try:
            self.restored = self._resume(env, wanted.resume)
        except BaseException:
            if self._world.rank == 0 and not run.is_supervised(env):
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
        loader = self._loader if loader is None else loader
        if loader is None:
            raise ValueError("steps: no loader here, and none in Checkpointer(loader=...)")
        _expect_batches(loader, "steps")
        accumulate = arguments.parse_whole("steps: accumulate", accumulate, "a number of batches", least=1)
        if max_steps is not None:
            max_steps = arguments.parse_whole("steps: max_steps", max_steps, "a number of steps", least=0)
        if epochs is not None:
            epochs = arguments.parse_whole("steps: epochs", epochs, "a number of passes through the loader", least=0)
        place = self._go_to(loader)
        if epochs is None and max_steps is None:
            epochs = max(place.passes, self._position.epoch if place.has_begun else 0) + 1
        place.passes = max(place.passes, epochs or 0)
        feed = self._take_feed(loader, place)
        self._seat.start(
            self._step, max_steps=self._last_step(feed, max_steps, epochs, accumulate), samples=self._position.samples
        )
        yield from self._drive(feed, max_steps, epochs, accumulate)
        if finish:
            self._done = replace(self._position)  # what is left of an accumulation is dropped
            feed.mark()
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

    def _expect_unfinished(self, what: str) -> None:
        if self._finished:
            raise RuntimeError(
                f"{what}: the training has ended, and nothing is saved any more: steps() ends it, unless it is called with finish=False"
            )

    def report(self, *, loss: float | torch.Tensor | None = None, lr: float | torch.Tensor | None = None) -> None:
        """Hand scalars to the supervisor. A tensor is waited for, as by `.item()`."""
        self._seat.report(loss=_scalar(loss), lr=_scalar(lr))

    def save(self) -> None:
        """Ask for a save at one of the next steps, on all ranks. Returns at once. Asked on local rank 0; elsewhere it does nothing."""
        self._expect_unfinished("save")
        if self._world.rank == 0:
            self._seat.page[Word.REQUEST_SAVE] += 1

    def wait(self, timeout_s: float | None = None) -> bool:
        """
        Wait until the save that was staged last is on the disk, or has failed: `saved_step` tells.

        False after `timeout_s`, if the disk does not answer, or where one that was asked for has yet to begin: it does so at one of the next steps.
        """
        page = self._seat.page
        return self._seat.wait(timeout_s) and page[Word.REQUEST_SAVE] == page[Word.SERVED_SAVE]

    def finish(self) -> None:
        """
        Save the final state, if it is not saved yet, and record that training is done.

        `RuntimeError` where that cannot be: a rank is dead or an hour late, or the disk has not answered for ten minutes and what a slow one needs.
        """
        if self._finished:
            return
        self._count_open_step()
        if self._is_half:
            raise RuntimeError(f"the final state could not be saved: step {self._step + 1} is half made")
        ended = self._seat.finish(self._stage)
        if ended in {Ended.NO, Ended.FAILED}:
            why = self._seat.page.error() if ended is Ended.FAILED else self._seat.why_no_end()
            raise RuntimeError(f"the final state could not be saved: {why}")
        self._finished = True
        self._let_go()
        atexit.unregister(self._at_exit)
        self._tell()

    def _let_go(self) -> None:
        """Nothing is staged any more: this object and the optimizers may live on, and keep no memory of ours."""
        self._is_warm = True
        self._copier.close()
        self._stepping.close()
        if self._warm_up is not None:
            self._warm_up.close()
            self._warm_up = None
        self._seat.release()

    def _at_exit(self, pid: int) -> None:
        """
        A script that ends without `finish`, after a `break` or in a loop of its own, loses nothing;
        one that crashed only gets what it staged onto the disk.
        """
        if os.getpid() != pid:  # a fork of the script: the training is its parent's
            return
        if self._finished or self._is_half or run.has_crashed():
            self._seat.wait(_EXIT_PATIENCE_S)
            return
        self._finished = True
        self._seat.finish(self._stage, timeout_s=_EXIT_PATIENCE_S, recorded=False)
        self._tell()

    # ------------------------------------------------------------------------------- steps

    def _drive(
        self, feed: Feed, max_steps: int | None, epochs: int | None, accumulate: int
    ) -> Iterator[tuple[int, Any]]:
        position = self._position
        is_watched = feed.is_kept or not self._stepping.tells_all
        try:
            while (epochs is None or position.epoch < epochs) and not self._has_reached(max_steps):
                if self._rng is not None:  # whatever the script did since the constructor, and between epochs behind us
                    rng.put_back(self._rng)
                    self._rng = None
                self._place.has_begun = True
                empty = position.cursor == 0
                for batch in feed.rest_of_epoch(position):
                    empty = False
                    self.last_micro_batch = self._open + 1 >= accumulate
                    self._driving = True
                    self._taking = feed.count(batch, position)
                    if self._alike is not None:
                        self._alike.see(batch)
                        self._is_settling = True
                    yield self._step, batch
                    self._driving = False
                    position.advance(self._taking)
                    self._open += 1
                    if self._open >= accumulate:
                        self._open = 0
                        self._done = replace(position)
                        if is_watched:
                            self._watch(feed)
                        self._seat.count(position.samples)
                        self.step()
                    if self._has_reached(max_steps):
                        return
                if empty:
                    raise ValueError("steps: the loader gave no batch: fewer samples than one batch on every rank?")
                position.next_epoch()
                if self._open == 0:
                    self._done = replace(position)
                    feed.mark()
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
            self._open, self._done = 0, replace(self._position)
            if self._feed is not None:
                self._feed[1].mark()
            self._step += 1
            self._seat.skip(self._step)
            self._seat.finished(self._step, self._position.samples)
        else:
            self._is_cut = True

    def _watch(self, feed: Feed) -> None:
        """After a step, where something has to be seen to in each."""
        feed.mark()
        self._stepping.look()

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
        if self._is_warm and self._stepping.is_listening:
            for stranger in self._stepping.hear(self._models()):
                self._say(stranger)
        reason = self._seat.answer(self._step)
        if reason is not None:
            self._save(reason)
        if not self._is_warm:
            self._has_trained = True
            self._prepare("after")
        if self._alike is not None and (same := self._alike.is_same()) is not None:
            self._alike = None
            if same:
                self._say(alike.SAME)
        self._is_settling = not self._is_warm or self._stepping.is_listening

    def _prepare(self, place: str) -> None:
        """
        After the first step it is known what a save takes: make its memory ready while training goes on.

        Called after a step and when an optimizer begins one; whatever takes long is done there, behind the backward pass.
        """
        if (
            self._is_warm
            or not self._has_trained
            or (place == "after" and self._stepping.has_stepped_before() and not self._warm_up)
        ):
            return
        if self._warm_up is None:
            self._refuse_pickles()
            taken = self._take()
            tensors = [*taken.layout.tensors(), *taken.moving.values()]
            device = next((one.device for one in tensors if one.device.type == "cuda"), None)
            size, apart = self._decide_staging(taken)
            if self._compares_weights():  # to walk a large model would be felt in a save
                _ = self._whole_weights
            self._warm_up = WarmUp(self._seat, size, apart, device, self._rehearse)
        self._warm_up.turn(place)
        if self._warm_up.is_over:
            self._is_warm = True
            self._copier.idle = None

    def _decide_staging(self, taken: Taken) -> tuple[int, Frozen]:
        """Return how much memory to take, and for which frozen weights."""
        size, apart = taken.layout.size_bytes + len(taken.state), taken.layout.apart
        needed = (size + apart.size_bytes) * self._world.size
        self._is_bounded = memory.is_bounded(self._staging, needed, self._available)
        left = "" if self._available is None else f" of {self._available / 1e9:.3g} GB that were left"
        how = f"chunked: {WINDOW_BYTES / 1e9:.2g} GB a rank, training waits" if self._is_bounded else "full"
        self._say(f"staging: {how}; a copy of the state is about {needed / 1e9:.3g} GB{left}")
        return (WINDOW_BYTES + len(taken.state), NO_FROZEN) if self._is_bounded else (size, apart)

    def _rehearse(self, arena: memoryview) -> None:
        if self._is_bounded:
            return
        assert self._layout is not None
        self._copier.rehearse(arena, self._layout)

    def _save(self, reason: Reason) -> None:
        try:
            is_staged = self._stage(self._step)
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

    def _stage(self, step: int) -> bool:
        try:
            taken = self._take()
            if self._warm_up is not None and not self._warm_up.settle():
                self._say(f"step {step}: its staging memory is not pinned yet, so this save costs time")
        except BaseException:
            self._seat.skip(step)
            raise
        layout = taken.layout
        self._tell_of_frozen()
        if self._compares_weights() and not self._seat.page[Word.NUM_COMMITTED]:
            alike.tell_weights(self._seat, self._whole_weights)
        if self._staging == "auto" and not self._is_bounded and self._seat.is_refused():
            self._is_bounded = True
            self._say(f"staging: chunked from now on: {self._seat.page.error()}")
        if self._is_bounded:
            return self._stage_by_window(step, taken)
        fill = partial(self._copier.fill, taken=taken, may_hide=self._stepping.has_stepped_before())
        return self._seat.stage(step, layout.size_bytes, taken.state, fill, layout.apart)

    def _stage_by_window(self, step: int, taken: Taken) -> bool:
        layout = taken.layout
        if self._seat.holds(layout.apart) and (problem := self._copier.changed(layout)):
            self._seat.give_up(step, problem)
            return False
        put = partial(self._copier.put, taken=taken)
        return self._seat.stage_by_window(step, layout.sizes, taken.state, put, layout.apart)

    def _tell_of_frozen(self) -> None:
        """Once: a folder whose checkpoints share a file surprises whoever adds their sizes up."""
        size = self._known.frozen_bytes if self._known else 0
        if size >= LEAST_BYTES and not self._frozen_told:
            self._frozen_told = True
            self._say(f"frozen weights, {size / 1e9:.3g} GB, are written once; later checkpoints have links to them")

    def _take(self) -> Taken:
        before = self._known
        snapshot = self._collect()
        assert self._known is not None
        self._layout = copies.arrange(self._known, snapshot.pieces, self._layout)
        moving = {piece.box: piece.local for piece in snapshot.pieces}
        files = {FILES: self._layout.sizes} if len(self._layout.images) > 1 else {}
        raw = json.dumps(self._describe(snapshot) | files).encode()
        return Taken(self._layout, moving, raw, is_new=before is not self._known)

    def _compares_weights(self) -> bool:
        """Ranks that see the same data, as with tensor parallelism, may differ in what rounding made of it."""
        return self._world.size > 1 and self._data_world.size == self._world.size

    @cached_property
    def _whole_weights(self) -> list[tuple[str, torch.Tensor]]:
        return alike.whole_weights(self._models(), self._optimizers)

    def _tell(self) -> None:
        """Say on rank 0 what the saver did since the last step; a supervisor says it itself."""
        page, before = self._seat.page, self._told
        self._told = self._seat.hear()
        if self._told[0] and not before[0] and self._world.rank == 0 and self._compares_weights():
            name = alike.differing(page, self._whole_weights)
            if name:
                self._say(alike.OWN_WEIGHTS.format(name))
        if self._supervised or self._told == before:
            return
        if self._told[0] != before[0]:
            self._complaint = Complaint()
            seconds, size = page[Word.SAVE_NS] / 1e9, page[Word.SAVE_BYTES] / 1e6
            self._say(f"saved step {page[Word.COMMITTED_STEP]}: {size:.1f} MB in {seconds:.2f} s")
        if self._told[1] != before[1] and self._complaint.is_news(page.error(), time.monotonic()):
            self._say(page.error() if page[Word.TOLD] == Told.NEWS else f"not saved: {page.error()}")

    # ------------------------------------------------------------------------------- saving

    def _check(self) -> None:
        """Refuse now what would fail at the first save."""
        if not isinstance(self._model, nn.Module):
            raise TypeError(
                f"model: expected a torch.nn.Module, got {type(self._model).__qualname__}; others by a name of their own"
            )
        for _, optimizer in self._optimizers:
            optim.check_optimizer(optimizer)
        keywords = [*inspect.signature(Checkpointer).parameters]
        arguments.check_objects(self._objects, _RESERVED | {name for name, _ in self._optimizers}, keywords)
        arguments.check_shapes(self._models())
        optim.check_held(self._optimizers, list(self._models().values()), self._training_objects().values())
        if self._loader is not None:
            _expect_batches(self._loader, "loader")

    def _compare_ranks(self) -> tuple[Meshes, set[str]]:
        """Return what a rank's share depends on, and the objects that any rank was given: an average is often kept by the first only."""
        told = run.share(self._world, [state.outline(self._models()), [*self._training_objects()]])
        meshes = state.compare([outline for outline, _ in told], self._world.rank)
        return meshes, {name for _, names in told for name in names}

    def _collect(self) -> Snapshot:
        """Return what changes from save to save; the rest is in `_known`."""
        known = self._known = self._look_again()
        snapshot = Snapshot(self._world.rank, self._world.size, self._meshes)
        optimizers = {
            name: {
                "class": type(optimizer).__qualname__,
                "groups": snapshot.encode(known.groups(name), f"{name}.groups"),
                "state": known.states[name],
            }
            for name, optimizer in self._optimizers
        }
        objects, own_objects, told = self._collect_objects(snapshot)
        snapshot.shared = {
            "step": self._step,
            "position": self._done.dump(),
            "orders": self._places.orders(),
            **self._places.dump(self._place, self._done, self._data_world.size),
            "data_ranks": self._data_world.size,
            "models": known.models,
            "optimizers": optimizers,
            "objects": objects,
        }
        snapshot.own = {"rng": snapshot.encode_own(rng.collect(), "rng")}
        snapshot.own |= {"objects": own_objects} if own_objects else {}
        snapshot.own |= {ALIKE: told} if told else {}
        if self._world.rank and any(known.own_states.values()):
            snapshot.own["optimizers"] = known.own_states
        states, now = self._places.states(), self._places.number(self._place)
        live = data.state_of(self._loader) if self._place is _NOWHERE else None  # in a loop of the script's own
        for number, kept in (states | ({now: live} if live is not None else {})).items():
            if number == now:
                snapshot.own["loader"] = self._encode_loader(snapshot, kept, "loader")
            else:
                others = snapshot.own.setdefault("loaders", {})
                others[str(number)] = self._encode_loader(snapshot, kept, f"loader-{number}")
        return snapshot

    def _encode_loader(self, snapshot: Snapshot, kept: Any, path: str) -> Any:  # noqa: ANN401  # the loader's
        try:
            return snapshot.encode_own(kept, path)
        except StateError as error:
            rest = data.without_again(kept)
            if rest is kept:
                raise
            self._say(
                f"left in the middle of step {self._step + 1}, whose batches cannot be saved: after a resume they do not come again ({error})"
            )
            return snapshot.encode_own(rest, path)

    def _collect_objects(self, snapshot: Snapshot) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """Return what is the same on all ranks, what is this rank's own, and by what the saver sees whether the first really is."""
        shared: dict[str, Any] = {}
        own: dict[str, Any] = {}
        told: dict[str, Any] = {}
        objects = self._training_objects()
        kept_apart = apart.names(self._seat.page, self._of_any_rank)
        for name, thing in objects.items():
            state_of_it, before = thing.state_dict(), len(snapshot.pieces)
            if name in kept_apart:
                own[name] = snapshot.encode_own(state_of_it, name)
                continue
            shared[name] = snapshot.encode(state_of_it, name)
            if self._world.size > 1:
                told[name] = apart.describe(snapshot, name, shared[name], snapshot.pieces[before:])
        return shared, own, told

    def _refuse_pickles(self) -> None:
        """At the start, and after the first step, when all is there that is made late: not when it is to be loaded."""
        if self._allow_pickle:
            return
        for name, model in self._models().items():
            for key, value in state.extra_state(model):
                unpickling.refuse(f"{name}.{key}", value)
        for name, thing in self._objects.items():
            if not isinstance(thing, nn.Module):
                unpickling.refuse(name, thing.state_dict())

    def _look_again(self) -> Still:
        """Return what stays where it is: as known, or walked anew."""
        known, restless = self._known, self._copier.restless
        if known is not None and known.restless == restless and known.holds():
            return known
        if known is not None:
            restless = self._copier.restless = restless | known.thawed()
        found = Still(
            self._models(),
            self._optimizers,
            rank=self._world.rank,
            world_size=self._world.size,
            meshes=self._meshes,
            restless=restless,
        )
        for line in self._outset.changes():
            self._say(line)
        return found

    def _describe(self, snapshot: Snapshot) -> dict[str, Any]:
        """Return this rank's part of the manifest's state; what all share comes from rank 0."""
        own: dict[str, Any] = {"own": snapshot.own}
        if snapshot.rank != 0:
            return own
        return own | {"shared": snapshot.shared, "contents": [*self._names(), "rng", "data position"]}

    def _models(self) -> dict[str, nn.Module]:
        return {state.MODEL: self._model} | {n: t for n, t in self._objects.items() if isinstance(t, nn.Module)}

    def _names(self) -> list[str]:
        return [state.MODEL, *dict(self._optimizers), *self._objects]

    # ------------------------------------------------------------------------------ resuming

    def _resume(self, env: dict[str, str], resume: str) -> str | None:
        """Go on from the newest checkpoint that is whole. Return its name."""
        supervised, directory = run.is_supervised(env), Path(env[Env.CHECKPOINT_DIR])

        def choose() -> Choice:
            return run.told(env) if supervised else resuming.agree(self._world, directory, resume, self._say)

        alone = not supervised and resume == "auto"
        choice = resuming.go_on(choose, self._load, self._world, self._say, tries_older=alone)
        if choice.resume is None:
            self._collect()  # refuse now what cannot be saved; there is no optimizer state yet, and none is made
            self._refuse_pickles()
        self._start_saver(env, choice)
        if choice.resume is None:
            self._say("starting at step 0" + (" (resume: never)" if resume == "never" and not supervised else ""))
        return choice.resume.name if choice.resume else None

    def _load(self, reader: Reader) -> None:
        found = resuming.load(reader, self._training())
        self._step, self._resumed_step, self._rng = found.step, found.step, found.rng
        self._position, self._done = replace(found.position), replace(found.position)
        self._places = Places(found.places, found.position, found.loader_states, found.orders, found.data_ranks)
        self._feed = None
        if self._world.rank == 0:
            apart.keep(self._seat.page, self._of_any_rank, found.apart)
        self._report_position(found)
        about = f"{reader.manifest.ref.name} ({run.num_shards_text(reader.manifest)})"
        self._say(f"resumed from {about}\n{found.report.text()}")

    def _report_position(self, found: Restored) -> None:
        place = None if self._loader is None else self._places.of(self._loader)
        note = "" if place is None or self._loader is None else f"; {self._take_feed(self._loader, place).note}"
        if found.position.samples or not found.step:
            note = f" of loader {self._places.now + 1}" if self._places.now else note
            position = f"epoch {found.position.epoch}, {found.position.cursor} samples into it{note}"
            found.report.restored(f"data position ({position})")
        elif place is not None and place.state is not None:
            found.report.restored("the loader's own state")
        else:
            found.report.left_out("data position: the loop was the script's own, which finds its place by itself")

    def _training_objects(self) -> dict[str, Any]:
        return {name: thing for name, thing in self._objects.items() if not isinstance(thing, nn.Module)}

    def _training(self) -> Training:
        objects = self._training_objects()
        return Training(self._models(), self._optimizers, objects, self._seed, self._world, self._allow_pickle)

    def _go_to(self, loader: Iterable[Any]) -> Place:
        """Begin where this loader is. What was left of an accumulation with another one is dropped, and comes again if that one does."""
        place = self._places.of(loader)
        is_other = place is not self._place
        if self._is_cut or (is_other and self._open):
            self._stepping.drop_gradients()
            self._position, self._open, self._is_cut = replace(self._done), 0, False
        if is_other:
            self._place.position = replace(self._done)
            if place.is_new and place.number:
                self._say(
                    "a loader that this run has not seen before: it begins at its beginning, and epochs= counts from there"
                )
            self._position = replace(place.position, samples=self._done.samples)
            self._place, self._done = place, replace(self._position)
        return place

    def _take_feed(self, loader: Iterable[Any], place: Place) -> Feed:
        """One feed for a loader: it may hold workers."""
        if self._feed is not None and self._feed[0] is loader:
            return self._feed[1]
        if place.feed is not None and place.loader is loader:
            self._feed = (loader, place.feed)
            return place.feed
        saved = self._saved_of(place)
        with contextlib.nullcontext() if self._allow_pickle else unpickling.forbidden("loader"):
            feed = data.feed(loader, self._data_world, self._seed, saved)
        if saved is not None and (changed := feed.order.changed(saved.order, saved.position)):
            self._say(changed)
        self._feed = (loader, feed)
        place.order = feed.order
        place.loader, place.feed = (loader, feed) if feed.is_kept else (None, None)
        if self._data_world.size > 1 and not isinstance(feed, data.GlobalFeed):
            self._alike = alike.Watch(self._seat)
            if data.is_unshared(loader, self._data_world):
                self._say(ALONE)
        return feed

    def _saved_of(self, place: Place) -> Saved | None:
        """What the checkpoint says of a loader, until it is gone through."""
        if place.is_new or place.has_begun:
            return None
        return Saved(place.position, place.ranks, place.state, place.order)

    # ------------------------------------------------------------------------------ beginning

    def _start_saver(self, env: dict[str, str], choice: Choice) -> None:
        if self._world.rank == 0:
            env = run.saver_env(env, choice)
            run.note_saving(Path(env[Env.CHECKPOINT_DIR]), self._seat.page)
            self._seat.saver = SaverProcess(self._seat.page, env, log_path(env))
            self._seat.tend()

    def _begin(self) -> None:
        self._stepping.begin()
        if self._loader is not None:
            self._places.of(self._loader)  # the first, as at a resume
        self._tell_of_no_optimizer()
        self._is_warm = False
        self._copier.idle = self._prepare
        self._seat.warm(done=False)
        self._seat.start(self._step, samples=self._position.samples)
        run.watch_for_a_crash()
        atexit.register(self._at_exit, os.getpid())

    def _tell_of_no_optimizer(self) -> None:
        """Not refused: the model may only be looked at, or its optimizer be kept by an object that was given."""
        is_there = self._optimizers or any(hasattr(thing, "param_groups") for thing in self._objects.values())
        if not is_there and any(one.requires_grad for one in self._model.parameters()):
            self._say(NO_OPTIMIZER)

    def _say(self, text: str) -> None:
        if self._world.rank == 0:
            print(f"vramfarm: {text}", file=sys.stderr, flush=True)  # noqa: T201  # the script's log


def _named_optimizers(
    given: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
) -> list[tuple[str, torch.optim.Optimizer]]:
    several = [given] if hasattr(given, "param_groups") or not isinstance(given, Iterable) else list(given)
    for one in several:
        if not hasattr(one, "param_groups"):
            raise TypeError(
                f"optimizer: expected an optimizer or a list of them, got {type(one).__qualname__} in {type(given).__qualname__}"
            )
    return [("optimizer" if i == 0 else f"optimizer_{i + 1}", _unwrapped(one)) for i, one in enumerate(several)]


def _unwrapped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer that does the work: accelerate wraps it in one that was never initialised."""
    inner = getattr(optimizer, "optimizer", None)
    return _unwrapped(inner) if isinstance(inner, torch.optim.Optimizer) else optimizer


def _expect_batches(loader: object, where: str) -> None:
    if isinstance(loader, str | bytes) or not hasattr(loader, "__iter__"):
        raise TypeError(
            f"{where}: expected a loader, or something else that gives batches, got {type(loader).__qualname__}"
        )


def _scalar(value: float | torch.Tensor | None) -> float | None:
    """A tensor that training has a graph of is read without it: torch warns of anything else."""
    if not isinstance(value, torch.Tensor):
        return None if value is None else float(value)
    if value.numel() != 1:
        raise ValueError(f"report: expected one number, got a tensor of shape {tuple(value.shape)}: give its mean()")
    return float(value.detach())
