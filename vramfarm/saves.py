"""
This rank's part in saves: its staging memory is made ready beside the first steps, then each save's contents are staged in it,
and what the saver made of them is told.
"""

from __future__ import annotations

import time
from functools import cached_property, partial

import torch

from vramfarm import alike, memory
from vramfarm.contents import Contents
from vramfarm.copies import Copier, Taken
from vramfarm.course import Course
from vramfarm.frozen import LEAST_BYTES
from vramfarm.memory import WINDOW_BYTES
from vramfarm.orders import Complaint
from vramfarm.protocol import Told, Word
from vramfarm.seat import NO_FROZEN, Frozen, Seat
from vramfarm.stepping import Stepping
from vramfarm.training import Training
from vramfarm.warmup import WarmUp


class Saves:
    """`staging` is as wanted: "full", "chunked" or "auto". `is_warm`: nothing is left to be made ready."""

    def __init__(  # noqa: PLR0913  # what a save is made of, and how
        self, training: Training, course: Course, stepping: Stepping, seat: Seat, *, staging: str, hide: bool
    ) -> None:
        self._training, self._stepping, self._seat = training, stepping, seat
        self._copier = Copier([one for _, one in training.optimizers], hide=hide)
        self.contents = Contents(training, course, seat, self._copier)
        self._staging, self._is_bounded = staging, staging == "chunked"
        self._available = memory.available_bytes()  # before any rank here takes of it
        self._warm_up: WarmUp | None = None
        self.is_warm, self._has_trained = True, False
        self._is_frozen_told = False
        self._told, self._complaint = (0, 0), Complaint()

    def begin(self) -> None:
        """Training begins: memory is made ready after its first step."""
        self.is_warm = False
        self._copier.idle = self._prepare
        self._seat.warm(done=False)

    def close(self) -> None:
        """Nothing is staged any more: this object and the optimizers may live on, and keep no memory of ours."""
        self.is_warm = True
        self._copier.close()
        if self._warm_up is not None:
            self._warm_up.close()
            self._warm_up = None
        self._seat.release()

    # ---------------------------------------------------------------------- making ready

    def warm(self) -> None:
        """After a step: go on with what is to be made ready."""
        if not self.is_warm:
            self._has_trained = True
            self._prepare("after")

    def _prepare(self, when: str) -> None:
        """
        After the first step it is known what a save takes: make its memory ready while training goes on.

        Called after a step and when an optimizer begins one; whatever takes long is done there, behind the backward pass.
        """
        is_early = when == "after" and self._stepping.has_stepped_before() and not self._warm_up
        if self.is_warm or not self._has_trained or is_early:
            return
        if self._warm_up is None:
            self._warm_up = self._begin_warm_up()
        self._warm_up.turn(when)
        if self._warm_up.is_over:
            self.is_warm = True
            self._copier.idle = None

    def _begin_warm_up(self) -> WarmUp:
        self.contents.refuse_pickles()
        taken = self.contents.take()
        tensors = [*taken.layout.tensors(), *taken.moving.values()]
        device = next((one.device for one in tensors if one.device.type == "cuda"), None)
        size, frozen = self._decide_staging(taken)
        if self._compares_weights:  # to walk a large model would be felt in a save
            _ = self._whole_weights
        return WarmUp(self._seat, size, frozen, device, self._rehearse)

    def _decide_staging(self, taken: Taken) -> tuple[int, Frozen]:
        """Return how much memory to take, and for which frozen weights."""
        size, frozen = taken.layout.size_bytes + len(taken.state), taken.layout.frozen_weights
        needed = (size + frozen.size_bytes) * self._training.world.size
        self._is_bounded = memory.is_bounded(self._staging, needed, self._available)
        free = "" if self._available is None else f" of {self._available / 1e9:.3g} GB that were left"
        how = f"chunked: {WINDOW_BYTES / 1e9:.2g} GB a rank, training waits" if self._is_bounded else "full"
        self._training.say(f"staging: {how}; a copy of the state is about {needed / 1e9:.3g} GB{free}")
        return (WINDOW_BYTES + len(taken.state), NO_FROZEN) if self._is_bounded else (size, frozen)

    def _rehearse(self, arena: memoryview) -> None:
        layout = self.contents.layout
        if layout is not None and layout.size_bytes <= len(arena) and not self._is_bounded:
            self._copier.rehearse(arena, layout)

    # --------------------------------------------------------------------------- staging

    def stage(self, step: int) -> bool:
        """Stage the state as it is now for the save of `step`. Return whether it is; whatever is raised, the other ranks know of it."""
        try:
            taken = self.contents.take()
            if self._warm_up is not None and not self._warm_up.settle():
                self._training.say(f"step {step}: its staging memory is not pinned yet, so this save costs time")
        except BaseException:
            self._seat.skip(step)
            raise
        layout = taken.layout
        self._tell_of_frozen()
        if self._compares_weights and not self._seat.page[Word.NUM_COMMITTED]:
            alike.tell_weights(self._seat, self._whole_weights)
        if self._staging == "auto" and not self._is_bounded and self._seat.is_refused():
            self._is_bounded = True
            self._training.say(f"staging: chunked from now on: {self._seat.page.error()}")
        if self._is_bounded:
            return self._stage_by_window(step, taken)
        fill = partial(self._copier.fill, taken=taken, may_hide=self._stepping.has_stepped_before())
        return self._seat.stage(step, layout.size_bytes, taken.state, fill, layout.frozen_weights)

    def _stage_by_window(self, step: int, taken: Taken) -> bool:
        layout = taken.layout
        if self._seat.holds(layout.frozen_weights) and (problem := self._copier.changed(layout)):
            self._seat.give_up(step, problem)
            return False
        put = partial(self._copier.put, taken=taken)
        return self._seat.stage_by_window(step, layout.sizes, taken.state, put, layout.frozen_weights)

    def _tell_of_frozen(self) -> None:
        """Once: a folder whose checkpoints share a file surprises whoever adds their sizes up."""
        size = self.contents.frozen_bytes
        if size >= LEAST_BYTES and not self._is_frozen_told:
            self._is_frozen_told = True
            self._training.say(
                f"frozen weights, {size / 1e9:.3g} GB, are written once; later checkpoints have links to them"
            )

    @property
    def _compares_weights(self) -> bool:
        """Ranks that see the same data, as with tensor parallelism, may differ in what rounding made of it."""
        return self._training.world.size > 1 and self._training.data_world.size == self._training.world.size

    @cached_property
    def _whole_weights(self) -> list[tuple[str, torch.Tensor]]:
        return alike.whole_weights(self._training.models, self._training.optimizers)

    # --------------------------------------------------------------------------- telling

    def tell(self, *, is_supervised: bool) -> None:
        """Say on rank 0 what the saver did since we were here last; a supervisor says it itself."""
        page, before, say = self._seat.page, self._told, self._training.say
        self._told = self._seat.hear()
        if self._told[0] and not before[0] and self._seat.rank == 0 and self._compares_weights:
            name = alike.differing(page, self._whole_weights)
            if name:
                say(alike.OWN_WEIGHTS.format(name))
        if is_supervised or self._told == before:
            return
        if self._told[0] != before[0]:
            self._complaint = Complaint()
            seconds, size = page[Word.SAVE_NS] / 1e9, page[Word.SAVE_BYTES] / 1e6
            say(f"saved step {page[Word.COMMITTED_STEP]}: {size:.1f} MB in {seconds:.2f} s")
        if self._told[1] != before[1] and self._complaint.is_news(page.error(), time.monotonic()):
            say(page.error() if page[Word.TOLD] == Told.NEWS else f"not saved: {page.error()}")
