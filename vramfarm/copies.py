"""
Copies from where the tensors are into the staging memory, without the training waiting for them.

What `optimizer.step()` alone changes is copied beside the next forward and backward, and the next
optimizer's step waits for that on the device. All else is copied before the training goes on. The
rule: where it is not certain that a copy can be hidden, it is not hidden.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

import torch
from torch import Tensor

from vramfarm import frozen, memory, staging
from vramfarm.frozen import LEAST_BYTES
from vramfarm.image import SMALL_BYTES, Box, Image, Placed, lay_out, lay_out_all, places
from vramfarm.memory import PIECE_BYTES
from vramfarm.seat import NO_FROZEN, Frozen
from vramfarm.staging import Piece
from vramfarm.still import Still


@dataclass(frozen=True)
class Layout:
    """
    Where everything of this rank goes. `still` are the tensors that stay where they are, of them `owned` the optimizers'.

    `guards` change when somebody else than the optimizers changes those. `frozen` is the layout of the file that is written once; `token` names its bytes.
    """

    images: tuple[Image, ...]
    known: Still
    signature: tuple[Any, ...]
    still: Mapping[Box, Tensor]
    owned: frozenset[Box]
    guards: tuple[Tensor, ...] = ()
    frozen: Layout | None = None
    token: int = 0

    @property
    def sizes(self) -> list[int]:
        return [image.size_bytes for image in self.images]

    @property
    def size_bytes(self) -> int:
        return places(self.sizes)[-1][1]

    @property
    def frozen_weights(self) -> Frozen:
        return NO_FROZEN if self.frozen is None else Frozen(self.frozen.token, self.frozen.size_bytes)

    def tensors(self) -> list[Tensor]:
        return [*self.still.values(), *(self.frozen.still.values() if self.frozen else ())]


@dataclass(frozen=True)
class Taken:
    """What one save takes. `is_new`: the tensors are not where they were at the last save."""

    layout: Layout
    moving: Mapping[Box, Tensor]
    state: bytes
    is_new: bool


def arrange(known: Still, moving: Sequence[Piece], before: Layout | None) -> Layout:
    """Return the layout before, if it still fits."""
    signature = tuple((p.box, p.copy, p.copies, p.spread) for p in moving)
    if before is not None and before.known is known and before.signature == signature:
        return before
    # By themselves: what moves may come, grow and go, and who wrote a frozen weight writes it from then on.
    mine = [*staging.choose(known.pieces), *staging.choose(moving)]
    once = before.frozen if before is not None and before.known is known else _lay_out_frozen(known, mine)
    if once is not None:
        mine = [piece for piece in mine if piece.box not in once.still]
    moves = {piece.box.key for piece in moving}
    still = {piece.box: piece.local for piece in mine if piece.box.key not in moves}
    owned = frozenset(box for box in still if box.key in known.owned)
    return Layout(
        lay_out_all(piece.box for piece in mine), known, signature, still, owned, guards=known.guards, frozen=once
    )


def _lay_out_frozen(known: Still, mine: Sequence[Piece]) -> Layout | None:
    """All of them may be copied late: that they did not change meanwhile is looked at."""
    first = {piece.box.key: piece for piece in reversed(mine) if piece.box.key in known.frozen}
    still = {piece.box: piece.local for piece in first.values()}  # edges are little, and saved each time
    image = lay_out(still)
    if image.size_bytes < LEAST_BYTES:
        return None
    return Layout((image,), known, (), still, frozenset(still), token=int.from_bytes(os.urandom(7), "little") + 1)


class Copier:
    """
    Fills staging memory. `hide=False` never lets training run beside a copy.

    `idle` is called when an optimizer's step begins: the device is busy with the backward pass then.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], *, hide: bool) -> None:
        self._hide = hide and bool(optimizers)
        self._plan: _Plan | None = None
        self._frozen: _FrozenPlan | None = None
        self.restless: frozenset[str] = frozenset()
        self._copy: _Copy | None = None
        self._latest: _Copy | None = None
        self.idle: Callable[[str], None] | None = None
        self._hooks: list[Any] = []
        for optimizer in optimizers:
            if hasattr(optimizer, "register_step_pre_hook"):
                self._hooks.append(optimizer.register_step_pre_hook(torch.compiler.disable(self._before)))
            else:
                self._hide = False

    def close(self) -> None:
        self._plan = self._frozen = self._copy = self._latest = self.idle = None
        for hook in self._hooks:
            hook.remove()

    def fill(
        self, arena: memoryview, frozen_memory: memoryview, taken: Taken, *, may_hide: bool
    ) -> Callable[[], str] | None:
        """
        Begin to write the image of a shard, and that of the frozen weights where there is memory for them.

        `may_hide`: an optimizer called us in the last step, so it will in the next. Return what waits for the rest and says what is wrong, None if nothing is left.
        """
        layout = taken.layout
        _put_headers(arena, layout)
        plan = self._planned(arena, layout)
        if self._latest is not None and not self._latest.is_true:
            self._hide = False
        hide = self._hide and may_hide and not taken.is_new
        with torch.no_grad():
            at = memory.address_of(frozen_memory) - memory.address_of(arena) if frozen_memory else 0
            look = self._fill_frozen(frozen_memory, at, layout, hide=hide)
            self._copy = self._latest = plan.start(taken.moving, hide=hide)
        ways = [one for one in (self._copy and self._copy.wait, look) if one]
        return (lambda: next(filter(None, (way() for way in ways)), "")) if ways else None

    def put(self, to: memoryview, number: int, begin: int, *, taken: Taken) -> None:
        """Write a part of an image, from `begin` on; training waits. The frozen weights are behind the last."""
        layout = taken.layout
        if number == len(layout.images):
            assert layout.frozen is not None
            layout, number = layout.frozen, 0
            if begin == 0:
                self._planned_frozen(layout).remember()
        with torch.no_grad():
            _put(to, begin, layout, layout.images[number], taken.moving)

    def changed(self, layout: Layout) -> str:
        """Say which frozen weights are not those that were staged; empty if all are."""
        look = self._fill_frozen(memoryview(b""), 0, layout, hide=False)
        return look() if look else ""

    def _fill_frozen(
        self, frozen_memory: memoryview, at: int, layout: Layout, *, hide: bool
    ) -> Callable[[], str] | None:
        """Stage the frozen weights, or find out whether they are still those that were staged."""
        if layout.frozen is None:
            self._frozen = None
            return None
        plan = self._planned_frozen(layout.frozen)
        differing = plan.stage(frozen_memory, at=at, hide=hide) if frozen_memory else plan.look()

        def look() -> str:
            changed = differing()
            self.restless |= changed
            if not changed:
                return ""
            return (
                f"{len(changed)} weights that want no gradient were changed all the same, {min(changed)} for one; "
                "they are saved with the others from now on"
            )

        return look

    def rehearse(self, arena: memoryview, layout: Layout) -> None:
        """Make the first save as quick as the others: plan it, and copy a little, which wakes the device's copy engine."""
        with torch.no_grad():
            self._planned(arena, layout).rehearse()
            if layout.frozen is not None:
                self._planned_frozen(layout.frozen).rehearse()

    def _planned(self, arena: memoryview, layout: Layout) -> _Plan:
        if self._plan is None or not self._plan.fits(arena, layout):
            self._plan = _Plan(arena, layout)
        return self._plan

    def _planned_frozen(self, layout: Layout) -> _FrozenPlan:
        if self._frozen is None or self._frozen.layout is not layout:
            self._frozen = _FrozenPlan(layout)
        return self._frozen

    def _before(self, *_: object) -> None:
        """An optimizer is about to change what may still be read."""
        if self._copy is not None and not self._copy.hold_back():
            self._copy = None
        if self.idle is not None:
            self.idle("before")


class _Copy:
    """Copies on their way, and the tensors that must not change before they are there."""

    def __init__(self, events: Sequence[tuple[torch.device, torch.cuda.Event]], kept: Sequence[Tensor]) -> None:
        self._events = events
        self._kept = kept
        self._lock = threading.Lock()
        self._versions: list[int] | None = [one._version for one in kept]  # noqa: SLF001  # every change in place counts it up
        self.is_true = True

    def hold_back(self) -> bool:
        """Let the device's next work wait for the copies; no process waits. False: they are done."""
        self._check()
        waiting = [(device, event) for device, event in self._events if not event.query()]
        for device, event in waiting:
            torch.cuda.current_stream(device).wait_event(event)
        return bool(waiting)

    def wait(self) -> str:
        """Wait for the copies, on a thread. Says so if somebody changed a tensor while it was read."""
        for _, event in self._events:
            event.synchronize()
        return "" if self._check() else _CHANGED

    def let_wait(self, stream: torch.cuda.Stream) -> None:
        for _, event in self._events:
            stream.wait_event(event)

    def _check(self) -> bool:
        """Once: when the next optimizer's step begins, or when all is copied before that."""
        with self._lock:
            if self._versions is not None:
                self.is_true = self._versions == [one._version for one in self._kept]  # noqa: SLF001
                self._versions = None
            return self.is_true


@dataclass
class _Lane:
    """
    Copies of one device: `of` to `to`. Rows of small tensors are gathered first; `scattered` have holes in memory.
    """

    to: list[Tensor] = field(default_factory=list)
    of: list[Tensor] = field(default_factory=list)
    rows: list[tuple[list[Tensor], Tensor, list[Tensor]]] = field(default_factory=list)
    scattered: list[tuple[list[Tensor], Tensor]] = field(default_factory=list)

    def copy(self, at_most: int | None = None) -> None:
        for parts, scratch, row in self.rows[:at_most]:
            torch.cat(row, out=scratch)
            _copy(parts, _cut(scratch, parts))
        for parts, tensor in self.scattered[:at_most]:
            _copy(parts, _cut(_flat(tensor.contiguous()), parts))
        if self.to:
            _copy(self.to[:at_most], self.of[:at_most])


_Lanes = dict[torch.device, _Lane]


class _Plan:
    """The copies of a layout into one arena, made ready: only the calls are left."""

    def __init__(self, arena: memoryview, layout: Layout, *, at: int = 0) -> None:
        """The layout begins `at` bytes behind where the pinned pieces do."""
        self._address = memory.address_of(arena)
        self._at = at
        self._layout = layout
        self._raw = staging.as_tensor(arena)
        placed = [p for image in layout.images for p in image.placed if p.end > p.begin]
        still = layout.still
        owned = [p for p in placed if p.box in layout.owned and still[p.box].device.type == "cuda"]
        shown = [p for p in placed if p.box in still and p not in set(owned)]
        self._kept = [*(still[p.box] for p in owned), *layout.guards]
        self._owned = self._arrange(owned, still)
        self._shown = self._arrange(shown, still)
        self._moving = [p for p in placed if p.box not in still]
        self._sides = {device: torch.cuda.Stream(device) for device in self._owned}

    def fits(self, arena: memoryview, layout: Layout) -> bool:
        return self._layout is layout and self._address == memory.address_of(arena)

    def start(self, moving: Mapping[Box, Tensor], *, hide: bool) -> _Copy | None:
        """Begin all copies; those from the processor's own memory are done on return."""
        at_once = [self._arrange(self._moving, moving), self._shown] + ([] if hide else [self._owned])
        events = [self._start_beside(device, lane) for device, lane in self._owned.items()] if hide else []
        for device in {device for lanes in at_once for device in lanes if device.type == "cuda"}:
            for lanes in at_once:
                lanes.get(device, _Lane()).copy()
            events.append((device, _mark(torch.cuda.current_stream(device))))
        for lanes in at_once:  # last: devices work beside us
            lanes.get(_CPU, _Lane()).copy()
        return _Copy(events, self._kept if hide else []) if events else None

    def rehearse(self) -> None:
        for device, lane in self._owned.items():
            side = self._sides[device]
            with torch.cuda.stream(side):
                lane.copy(at_most=2)
            torch.cuda.current_stream(device).wait_event(_mark(side))  # nothing comes after a save that was before it

    def _start_beside(self, device: torch.device, lane: _Lane) -> tuple[torch.device, torch.cuda.Event]:
        side = self._sides[device]
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            lane.copy()
        return device, _mark(side)

    def _arrange(self, placed: Sequence[Placed], tensors: Mapping[Box, Tensor]) -> _Lanes:
        lanes: _Lanes = {}
        for row in _rows(placed, tensors):
            found = [tensors[one.box] for one in row]
            lane = lanes.setdefault(found[0].device, _Lane())
            begin, end = row[0].begin, row[-1].end
            if len(row) > 1:
                scratch = torch.empty(end - begin, dtype=torch.uint8, device=found[0].device)
                lane.rows.append((self._parts(begin, end), scratch, [_flat(one) for one in found]))
            elif found[0].is_contiguous():
                parts = self._parts(begin, end)
                lane.to += parts
                lane.of += _cut(_flat(found[0]), parts)
            else:
                lane.scattered.append((self._parts(begin, end), found[0]))
        return lanes

    def _parts(self, begin: int, end: int) -> list[Tensor]:
        """Cut where pinned pieces meet: no copy may lie across two of them."""
        next_piece = -(-(self._at + begin + 1) // PIECE_BYTES) * PIECE_BYTES - self._at
        cuts = [begin, *range(next_piece, end, PIECE_BYTES), end]
        return [self._raw[a:b] for a, b in pairwise(cuts)]


class _FrozenPlan:
    """A file that is written once: its copy, made once, and the sums by which it is known again."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._keys, self.tensors = [box.key for box in layout.still], list(layout.still.values())
        self._sums: frozen.Sums = {}
        self._sides = {one.device: torch.cuda.Stream(one.device) for one in self.tensors if one.device.type == "cuda"}

    def stage(self, arena: memoryview, *, at: int, hide: bool) -> Callable[[], set[str]]:
        """Summed now, then copied, then summed again: if it is the same, so is what was copied between."""
        _put_headers(arena, self.layout)
        self.remember()
        copy = _Plan(arena, self.layout, at=at).start({}, hide=hide)
        return self.look(after=copy) if copy else set

    def remember(self) -> None:
        self._sums = frozen.sums(self.tensors)

    def rehearse(self) -> None:
        """The first look pins memory for its answer, which may stop whoever asks the device for something."""
        sums = frozen.sums(self.tensors)
        frozen.differing(self._keys, self.tensors, sums, sums)

    def look(self, after: _Copy | None = None) -> Callable[[], set[str]]:
        """Sum again, beside the training. Return what waits for that and says which of them differ."""
        with contextlib.ExitStack() as stack:
            for device, side in self._sides.items():
                side.wait_stream(torch.cuda.current_stream(device))
                if after is not None:
                    after.let_wait(side)
                stack.enter_context(torch.cuda.stream(side))
            differing = frozen.differing(self._keys, self.tensors, self._sums, frozen.sums(self.tensors))
            done = [_mark(side) for side in self._sides.values()]

        def names() -> set[str]:
            for event in done:
                event.synchronize()
            return differing()

        return names


_CPU: Final = torch.device("cpu")
_CHANGED: Final = "the weights were changed outside of optimizer.step() while they were copied; from now on training waits for the copy"


def _rows(placed: Sequence[Placed], tensors: Mapping[Box, Tensor]) -> Iterator[list[Placed]]:
    """Yield tensors one by one, but small ones of a device that lie in a row together."""
    row: list[Placed] = []
    for one in placed:
        tensor = tensors[one.box]
        joins = _is_small(one, tensor)
        if row and not (joins and row[-1].end == one.begin and tensors[row[-1].box].device == tensor.device):
            yield row
            row = []
        row.append(one)
        if not joins:
            yield row
            row = []
    if row:
        yield row


def _put_headers(arena: memoryview, layout: Layout) -> None:
    for image in layout.images:
        arena[image.begin : image.begin + len(image.header)] = image.header


def _put(to: memoryview, begin: int, layout: Layout, image: Image, moving: Mapping[Box, Tensor]) -> None:
    """Write the bytes of an image from `begin` on, as many as there is room for."""
    raw = staging.as_tensor(to)
    if begin < len(image.header):
        part = image.header[begin : begin + len(to)]
        to[: len(part)] = part
    begin += image.begin
    end = begin + len(to)
    for one in image.placed:
        a, b = max(one.begin, begin), min(one.end, end)
        if a < b:
            tensor = layout.still[one.box] if one.box in layout.still else moving[one.box]
            raw[a - begin : b - begin].copy_(_flat(tensor.contiguous())[a - one.begin : b - one.begin])


def _is_small(placed: Placed, tensor: Tensor) -> bool:
    return tensor.device.type == "cuda" and placed.end - placed.begin <= SMALL_BYTES and tensor.is_contiguous()


def _flat(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor without holes."""
    return tensor.reshape(-1).view(torch.uint8)


def _cut(flat: Tensor, parts: Sequence[Tensor]) -> list[Tensor]:
    return list(flat.split([len(part) for part in parts]))


def _copy(to: list[Tensor], of: list[Tensor]) -> None:
    torch._foreach_copy_(to, of, non_blocking=True)  # one call instead of a thousand


def _mark(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event(blocking=True)  # a thread that waits for it sleeps
    event.record(stream)
    return event
