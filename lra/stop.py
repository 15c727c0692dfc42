"""Being told to stop: Ctrl-C and SIGTERM end a run with a checkpoint and a row."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager


class Stop:
    """Turns signals into ``KeyboardInterrupt``: at once, or while ``deferred`` at the next ``check``.

    An update must not be cut in the middle: the weights would be half new. What comes before it can take minutes on a
    CPU and is ``interruptible`` all the same. A second signal does not wait.
    """

    def __init__(self) -> None:
        self.requested = False
        self._deferred = False
        self._interruptible = False

    @contextmanager
    def listening(self) -> Iterator["Stop"]:
        """Handle the signals inside the block."""
        previous = {number: signal.signal(number, self._handle) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield self
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Inside the block a first signal only sets ``requested``."""
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Inside the block, which may stand in a ``deferred`` one, a signal interrupts at once."""
        self._interruptible = True
        try:
            yield
        finally:
            self._interruptible = False

    def check(self) -> None:
        """Raise ``KeyboardInterrupt`` if a signal came."""
        if self.requested:
            raise KeyboardInterrupt

    def _handle(self, number: int, frame: object) -> None:
        first, self.requested = not self.requested, True
        if first and self._deferred and not self._interruptible:
            return
        # another signal, sent to the whole group or by a dying parent, must not cut off the writing of the row
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt
