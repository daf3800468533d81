"""
Where training is in its data: which loader it goes through, how far, and how much of that the steps have used.

A loop's body may be left anywhere. So two positions are kept: of the batches that were given out, and of the last step
that is done, which is saved; what lies between them comes again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Final

from vramfarm import alike, data, rng, unpickling
from vramfarm.data import Feed
from vramfarm.epochs import Position, Saved
from vramfarm.places import Place, Places
from vramfarm.resuming import Restored
from vramfarm.seat import Seat
from vramfarm.training import Training

ALONE: Final = (
    "the loader is of a kind of its own and stays as it is, and its sampler knows nothing of the other ranks: give it a DistributedSampler, "
    "or every rank goes through all samples"
)
_NOWHERE: Final = Place(-1, Position(), None, lambda: None)  # no loader was gone through yet


class Course:
    """
    `position` is the loader's, `done` that of the last step. Between them are `num_open` batches of a step that is being accumulated.

    `is_cut`: a step was left before an optimizer made it, which drops its gradients. `watch` compares the ranks' first batches.
    """

    def __init__(self, training: Training, seat: Seat) -> None:
        self._training, self._seat = training, seat
        self.position, self.done = Position(), Position()
        self.num_open, self.is_cut = 0, False
        self.watch: alike.Watch | None = None
        self._places, self._place = Places(), _NOWHERE
        self._feed: tuple[Iterable[Any], Feed] | None = None
        self._rng: Any = None

    # ---------------------------------------------------------------------------- resuming

    def go_on(self, found: Restored) -> None:
        """From where a checkpoint was saved; its report says so."""
        self.position, self.done = replace(found.position), replace(found.position)
        self._places, self._feed, self._rng = found.places, None, found.rng
        self._report(found)

    def _report(self, found: Restored) -> None:
        loader = self._training.loader
        place = None if loader is None else self._places.of(loader)
        note = "" if loader is None else f"; {self.feed_of(loader).note}"
        if found.position.samples or not found.step:
            note = f" of loader {self._places.now + 1}" if self._places.now else note
            position = f"epoch {found.position.epoch}, {found.position.cursor} samples into it{note}"
            found.report.restored(f"data position ({position})")
        elif place is not None and place.state is not None:
            found.report.restored("the loader's own state")
        else:
            found.report.left_out("data position: the loop was the script's own, which finds its place by itself")

    def begin(self) -> None:
        """The loader that was given is the first, as at a resume."""
        if self._training.loader is not None:
            self._places.of(self._training.loader)

    # -------------------------------------------------------------------- going through it

    def enter(self, loader: Iterable[Any]) -> bool:
        """
        Begin where this loader is. Return whether a step was dropped that is not done.

        What was left of an accumulation with another loader comes again if that one does.
        """
        place = self._places.of(loader)
        is_other = place is not self._place
        is_dropped = self.is_cut or (is_other and self.num_open > 0)
        if is_dropped:
            self.position, self.num_open, self.is_cut = replace(self.done), 0, False
        if is_other:
            self._place.position = replace(self.done)
            if place.is_new and place.number:
                self._training.say(
                    "a loader that this run has not seen before: it begins at its beginning, and epochs= counts from there"
                )
            self.position = replace(place.position, samples=self.done.samples)
            self._place, self.done = place, replace(self.position)
        return is_dropped

    def plan_passes(self, epochs: int | None, *, is_bounded: bool) -> int | None:
        """Return how often this loader will have been gone through: as asked, and with no bound at all once more than it was."""
        place = self._place
        if epochs is None and not is_bounded:
            epochs = max(place.passes, self.position.epoch if place.has_begun else 0) + 1
        place.passes = max(place.passes, epochs or 0)
        return epochs

    def begin_epoch(self) -> None:
        """Whatever the script did since the constructor is behind us, and so are its random numbers."""
        if self._rng is not None:
            rng.put_back(self._rng)
            self._rng = None
        self._place.has_begun = True

    def mark(self) -> None:
        """All that was given out is used, or dropped."""
        self.done = replace(self.position)
        if self._feed is not None:
            self._feed[1].mark()

    def feed_of(self, loader: Iterable[Any]) -> Feed:
        """One for a loader: it may hold workers."""
        if self._feed is not None and self._feed[0] is loader:
            return self._feed[1]
        place = self._places.of(loader)
        feed = place.feed if place.feed is not None and place.loader is loader else self._make_feed(loader, place)
        self._feed = (loader, feed)
        return feed

    def _make_feed(self, loader: Iterable[Any], place: Place) -> Feed:
        training, saved = self._training, _saved_of(place)
        with contextlib.nullcontext() if training.allow_pickle else unpickling.forbidden("loader"):
            feed = data.feed(loader, training.data_world, training.seed, saved)
        if saved is not None and (changed := feed.order.changed(saved.order, saved.position)):
            training.say(changed)
        place.order = feed.order
        place.loader, place.feed = (loader, feed) if feed.is_kept else (None, None)
        if training.data_world.size > 1 and not isinstance(feed, data.GlobalFeed):
            self.watch = alike.Watch(self._seat)
            if data.is_unshared(loader, training.data_world):
                training.say(ALONE)
        return feed

    # ------------------------------------------------------------------------------ saving

    def orders(self) -> dict[str, Any]:
        return self._places.orders()

    def places(self) -> dict[str, Any] | None:
        """Return the positions of all loaders, where there are several."""
        return self._places.dump(self._place, self.done, self._training.data_world.size)

    def loader_states(self) -> tuple[Any, dict[int, Any]]:
        """Return what the loader that is gone through keeps by itself, None if nothing, and what the others keep, by their numbers."""
        states, now = self._places.states(), self._places.number(self._place)
        live = (
            data.state_of(self._training.loader) if self._place is _NOWHERE else None
        )  # in a loop of the script's own
        mine = states.pop(now, None)
        return mine if live is None else live, states


def _saved_of(place: Place) -> Saved | None:
    """What the checkpoint says of a loader, until it is gone through."""
    if place.is_new or place.has_begun:
        return None
    return Saved(place.position, place.ranks, place.state, place.order)
