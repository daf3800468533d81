"""
What a save consists of: which tensors this rank has, and what it says beside them.

Models and optimizers are walked once, and again where something is no longer where it was; all else is asked anew for each save.
"""

from __future__ import annotations

import json
from typing import Any

from vramfarm import apart, copies, data, metadata, rng, state, unpickling
from vramfarm.copies import Copier, Layout, Taken
from vramfarm.course import Course
from vramfarm.metadata import Own, Shared
from vramfarm.outset import Outset
from vramfarm.seat import Seat
from vramfarm.state import Snapshot
from vramfarm.still import Still
from vramfarm.training import Training
from vramfarm.typed import StateError


class Contents:
    """Of one rank's saves. `layout` is that of the last one: where everything goes."""

    def __init__(self, training: Training, course: Course, seat: Seat, copier: Copier) -> None:
        self._training, self._course, self._seat, self._copier = training, course, seat, copier
        self._outset = Outset(training.models, training.optimizers, training.objects)
        self._known: Still | None = None
        self.layout: Layout | None = None

    @property
    def frozen_bytes(self) -> int:
        """Of all ranks' frozen weights, as they were taken last."""
        return self._known.frozen_bytes if self._known else 0

    def check(self) -> None:
        """Refuse now what cannot be saved. There is no optimizer state yet at a fresh start, and none is made."""
        self._collect(self._look_again())
        self.refuse_pickles()

    def refuse_pickles(self) -> None:
        """At the start, and after the first step, when all is there that is made late: not when it is to be loaded."""
        if self._training.allow_pickle:
            return
        for name, model in self._training.models.items():
            for key, value in state.extra_state(model):
                unpickling.refuse(f"{name}.{key}", value)
        for name, thing in self._training.objects.items():
            unpickling.refuse(name, thing.state_dict())

    def take(self) -> Taken:
        """Take all of it as it is now; nothing is copied yet."""
        before, known = self._known, self._look_again()
        snapshot, own, shared = self._collect(known)
        self.layout = layout = copies.arrange(known, snapshot.pieces, self.layout)
        names = [*self._training.names, "rng", "data position"]
        said = metadata.dump(own, shared if snapshot.rank == 0 else None, names, layout.sizes)
        moving = {piece.box: piece.local for piece in snapshot.pieces}
        return Taken(layout, moving, json.dumps(said).encode(), is_new=before is not known)

    def _look_again(self) -> Still:
        """Return what stays where it is: as known, or walked anew."""
        known, restless, training = self._known, self._copier.restless, self._training
        if known is not None and known.restless == restless and known.holds():
            return known
        if known is not None:
            restless = self._copier.restless = restless | known.thawed()
        self._known = Still(
            training.models,
            training.optimizers,
            rank=training.world.rank,
            world_size=training.world.size,
            meshes=training.meshes,
            restless=restless,
        )
        for line in self._outset.changes():
            training.say(line)
        return self._known

    def _collect(self, known: Still) -> tuple[Snapshot, Own, Shared]:
        """Return what changes from save to save, and what is said of all."""
        training, course = self._training, self._course
        snapshot = Snapshot(training.world.rank, training.world.size, training.meshes)
        optimizers = {
            name: {
                "class": type(optimizer).__qualname__,
                "groups": snapshot.encode(known.groups(name), f"{name}.groups"),
                "state": known.states[name],
            }
            for name, optimizer in training.optimizers
        }
        objects, own_objects, told = self._collect_objects(snapshot)
        shared = Shared(
            step=self._seat.num_finished(),
            position=course.done.dump(),
            orders=course.orders(),
            places=course.places(),
            data_ranks=training.data_world.size,
            models=known.models,
            optimizers=optimizers,
            objects=objects,
        )
        numbers = snapshot.encode_own(rng.collect(), "rng")
        loader, others = course.loader_states()
        own = Own(
            rng=numbers,
            objects=own_objects,
            alike=told,
            optimizers=known.own_states if snapshot.rank and any(known.own_states.values()) else {},
            loader=None if loader is None else self._encode_loader(snapshot, loader, "loader"),
            loaders={str(n): self._encode_loader(snapshot, one, f"loader-{n}") for n, one in others.items()},
        )
        return snapshot, own, shared

    def _collect_objects(self, snapshot: Snapshot) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """Return what is the same on all ranks, what is this rank's own, and by what the saver sees whether the first really is."""
        shared: dict[str, Any] = {}
        own: dict[str, Any] = {}
        told: dict[str, Any] = {}
        kept_apart = apart.names(self._seat.page, self._training.of_any_rank)
        for name, thing in self._training.objects.items():
            state_of_it, before = thing.state_dict(), len(snapshot.pieces)
            if name in kept_apart:
                own[name] = snapshot.encode_own(state_of_it, name)
                continue
            shared[name] = snapshot.encode(state_of_it, name)
            if snapshot.world_size > 1:
                told[name] = apart.describe(snapshot, name, shared[name], snapshot.pieces[before:])
        return shared, own, told

    def _encode_loader(self, snapshot: Snapshot, kept: Any, path: str) -> Any:  # noqa: ANN401  # the loader's
        try:
            return snapshot.encode_own(kept, path)
        except StateError as error:
            rest = data.without_again(kept)
            if rest is kept:
                raise
            self._training.say(
                f"left in the middle of step {self._seat.num_finished() + 1}, whose batches cannot be saved: after a resume they do not come again ({error})"
            )
            return snapshot.encode_own(rest, path)
