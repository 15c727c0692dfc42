"""Parts of a step, timed without waiting for the device between them."""

from collections import defaultdict
from collections.abc import Callable

import torch


class HostLaps:
    """Reads the clock at the end of each part: where work is done when its call returns."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seconds: dict[str, float] = {}
        self._last = 0.0

    def begin(self) -> None:
        """The step begins."""
        self._seconds = defaultdict(float)
        self._last = self._clock()

    def lap(self, name: str) -> None:
        """The part ``name`` ends here."""
        now = self._clock()
        self._seconds[name] += now - self._last
        self._last = now

    def seconds(self) -> dict[str, float]:
        """Of each part of the step."""
        return dict(self._seconds)


class DeviceLaps:
    """Marks the device's stream with events and reads them when the step is over and the device idle."""

    def __init__(self, compile_seconds: Callable[[], float]) -> None:
        self._compile_seconds = compile_seconds
        self._events: list[torch.cuda.Event] = []
        self._marks: list[tuple[str, float]] = []

    def begin(self) -> None:
        """The step begins."""
        self._marks = []
        self._mark("")

    def lap(self, name: str) -> None:
        """The part ``name`` ends here."""
        self._mark(name)

    def seconds(self) -> dict[str, float]:
        """Of each part of the step; the device must have reached the last mark."""
        found: dict[str, float] = defaultdict(float)
        for i, (name, compiled) in enumerate(self._marks[1:], 1):
            elapsed = self._events[i - 1].elapsed_time(self._events[i]) / 1e3
            # the device idles while the host compiles
            found[name] += max(0.0, elapsed - (compiled - self._marks[i - 1][1]))
        return dict(found)

    def _mark(self, name: str) -> None:
        if len(self._marks) == len(self._events):
            self._events.append(torch.cuda.Event(enable_timing=True))
        self._events[len(self._marks)].record()
        self._marks.append((name, self._compile_seconds()))
