"""What torch.compile does while a run is on: seconds, graphs, graph breaks."""

import time


class CompileWatch:
    """Counts from its creation until ``close``. Compiling of the backward pass and recompiling count as well."""

    def __init__(self) -> None:
        # a second of import, for those who compile only
        from torch._dynamo.callback import callback_handler
        from torch._dynamo.utils import counters

        self.seconds = 0.0
        self._depth, self._start = 0, 0.0
        self._counters, self._handler = counters, callback_handler
        self._before = self._counts()
        callback_handler.register_start_callback(self._begin)
        callback_handler.register_end_callback(self._end)

    def close(self) -> None:
        """Stop counting; ``seconds`` stays."""
        self._handler.remove_start_callback(self._begin)
        self._handler.remove_end_callback(self._end)

    @property
    def graphs(self) -> int:
        """Graphs captured, those of a recompilation included."""
        return self._counts()[0] - self._before[0]

    @property
    def graph_breaks(self) -> int:
        """Times that capture stopped and plain Python went on."""
        return self._counts()[1] - self._before[1]

    def _counts(self) -> tuple[int, int]:
        return self._counters["stats"]["unique_graphs"], sum(self._counters["graph_break"].values())

    def _begin(self, *_: object) -> None:
        self._depth += 1
        if self._depth == 1:
            self._start = time.perf_counter()

    def _end(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self.seconds += time.perf_counter() - self._start
