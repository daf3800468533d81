"""
Making the staging memory ready while training goes on.

The saver gives it its pages; then they enter this process's page table, on a thread; then they are
pinned for the device, piece by piece. Pinning stops whoever asks the device for something. So it is
done where training itself has nothing to ask: when the device has work for long enough.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import torch

from vramfarm import memory
from vramfarm.memory import PIECE_BYTES
from vramfarm.seat import Frozen, Seat

_SHARE: Final = 0.3  # of the time for which the device has work
_FRUITLESS: Final = 12  # turns without a piece, then a thread does it
_PAUSE: Final = 10  # of the thread, in times of a piece
_LONG_S: Final = 0.02
_LOOKS: Final = 2  # the shortest of the last looks counts


class WarmUp:
    """From the first finished step to staging memory that is ready. A turn costs microseconds, or time that nobody misses."""

    def __init__(
        self,
        seat: Seat,
        size: int,
        apart: Frozen,
        device: torch.device | None,
        rehearse: Callable[[memoryview], None],
    ) -> None:
        self._seat = seat
        self._rehearse = rehearse
        self._memory = seat.prepare(size, apart)
        self._pins = Pins(self._memory, device) if device is not None and self._memory is not None else None
        self._thread: threading.Thread | None = None
        self._waited = 0
        self.is_over = False
        if self._memory is None:
            self._end()

    def turn(self, place: str) -> None:
        """Do what can be done now. `place` names where in the training's step we are."""
        if self.is_over:
            return
        if self._pins is not None:
            self._pins.look(place)
        if self._thread is None:
            self._begin_mapping()
        elif not self._thread.is_alive() and (self._pins is None or self._pins.turn(place)):
            self._finish(place)

    def settle(self) -> bool:
        """Before a save: whether the memory is as it should be. Nothing runs beside the save."""
        if self._pins is not None:
            self._pins.stop()
        return self._pins is None or self._pins.is_whole()

    def close(self) -> None:
        """The memory is no longer needed."""
        if self._pins is not None:
            self._pins.stop()
            self._pins.release()

    def _begin_mapping(self) -> None:
        is_mapped = self._seat.is_mapped()
        if is_mapped is None:
            self._end()
        elif is_mapped:
            assert self._memory is not None
            self._thread = threading.Thread(target=memory.populate_slowly, args=(self._memory,), daemon=True)
            self._thread.start()

    def _finish(self, place: str) -> None:
        """A save in between may have the memory; then it needs no rehearsal."""
        self._waited += 1
        if self._pins is not None and not self._pins.has_time(place) and self._waited < _FRUITLESS:
            return
        if self._memory is not None and not self._seat.is_pending():
            self._rehearse(self._memory)
        self._end()

    def _end(self) -> None:
        self.is_over = True
        self._seat.warm(done=True)


class Pins:
    """Memory that is pinned for a device a piece at a time."""

    def __init__(self, arena: memoryview, device: torch.device) -> None:
        self._arena = arena
        self._device = device
        self._address = memory.address_of(arena)
        self._done = 0
        self._pinned: list[int] = []
        self.release = weakref.finalize(self, _unpin, arena, self._pinned)  # before the memory goes
        self.release.atexit = False
        self._cost_s = 0.004
        self._places: dict[str, _Place] = {}
        self._clock = torch.cuda.Stream(device)
        self._fruitless = 0
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._spent_s = 0.0
        self.problem = ""

    def look(self, place: str) -> None:
        self._places.setdefault(place, _Place(self._device, self._clock)).look()

    def turn(self, place: str) -> bool:
        """Pin while the device is surely busy. True: all of it is pinned, or cannot be."""
        if self._is_done():
            return True
        if self._thread is not None:
            return False
        busy = self._places[place]
        until = time.perf_counter() + busy.expected_s() * _SHARE
        before = self._done
        while time.perf_counter() + self._cost_s < until and busy.is_busy() and not self._is_done():
            self._pin()
        self._fruitless = 0 if self._done > before else self._fruitless + 1
        if self._fruitless >= _FRUITLESS:
            self._fruitless = 0
            self._thread = threading.Thread(target=self._pin_slowly, daemon=True)
            self._thread.start()
        return self._is_done()

    def has_time(self, place: str) -> bool:
        """Whether a longer call would go unnoticed here and now."""
        busy = self._places[place]
        return busy.expected_s() * _SHARE > _LONG_S and busy.is_busy()

    def stop(self) -> None:
        if self._thread is not None:
            self._stopping = True
            self._thread.join()
            self._thread, self._stopping = None, False

    def is_whole(self) -> bool:
        return self._done >= len(self._arena)

    def _is_done(self) -> bool:
        return self.is_whole() or bool(self.problem)

    def _pin(self) -> None:
        length = min(PIECE_BYTES, len(self._arena) - self._done)
        started = time.perf_counter()
        code = int(torch.cuda.cudart().cudaHostRegister(self._address + self._done, length, 0))
        took = time.perf_counter() - started
        self._cost_s = max(took, 0.8 * self._cost_s)
        self._spent_s += took
        if code != 0:
            self.problem = f"the device does not pin memory (error {code})"
            with contextlib.suppress(RuntimeError):  # the next call would be blamed for it
                torch.zeros(1, device=self._device)
            return
        self._pinned.append(self._address + self._done)
        self._done += length

    def _pin_slowly(self) -> None:
        torch.cuda.set_device(self._device)
        while not (self._is_done() or self._stopping):
            self._pin()
            time.sleep(_PAUSE * self._cost_s)


def _unpin(_: memoryview, addresses: list[int]) -> None:
    for address in addresses:
        torch.cuda.cudart().cudaHostUnregister(address)
    addresses.clear()


class _Place:
    """A place in the training's step: for how long the device had work when we came by."""

    def __init__(self, device: torch.device, clock: torch.cuda.Stream) -> None:
        self._device, self._clock = device, clock
        self._found: deque[float] = deque(maxlen=_LOOKS)
        self._now: tuple[Any, Any] | None = None

    def look(self) -> None:
        """The clock's stream has no work: its mark says when we asked, the other when the work was done."""
        if self._now is not None and self._now[1].query():
            self._found.append(max(0.0, self._now[0].elapsed_time(self._now[1])) / 1e3)
        asked, done = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        asked.record(self._clock)
        done.record(torch.cuda.current_stream(self._device))
        self._now = (asked, done)

    def expected_s(self) -> float:
        return min(self._found) if len(self._found) == _LOOKS else 0.0

    def is_busy(self) -> bool:
        return self._now is not None and not self._now[1].query()
