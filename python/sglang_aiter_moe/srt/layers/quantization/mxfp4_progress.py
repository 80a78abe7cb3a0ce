"""Progress of laying out a whole model: a bar on a terminal, else a line now and then; one per rank."""

from __future__ import annotations

import logging
import sys
import time
import weakref
from typing import Any, TextIO

logger = logging.getLogger(__name__)

#: Seconds between two lines in a log.
EVERY = 10.0
_BAR = 24


class Progress:
    """Counts the layers that have been planned in this process, and those of them that are laid out.

    Args:
        stream: where a bar goes if it is a terminal; standard error by default.
        clock: seconds.
    """

    def __init__(self, stream: TextIO | None = None, clock: Any = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._planned: weakref.WeakSet = weakref.WeakSet()
        self._done: weakref.WeakSet = weakref.WeakSet()
        self._bytes = 0
        self._started: float | None = None
        self._said = 0.0

    def planned(self, layer: Any) -> None:
        """One more layer will be laid out."""
        self._planned.add(layer)

    def done(self, layer: Any, rank: int) -> None:
        """A layer is laid out, for the first time or again after an update."""
        now = self._clock()
        if self._started is None or layer in self._done:  # a first layer, or a new round
            self._done.clear()
            self._bytes = 0
            self._started, self._said = now, now
        self._done.add(layer)
        self._bytes += sum(p.numel() * p.element_size() for p in layer.parameters(recurse=False))
        finished = len(self._done) >= len(self._planned)
        self._show(rank, now, finished)
        if finished:
            self._done.clear()
            self._started = None

    def _show(self, rank: int, now: float, finished: bool) -> None:
        stream = self._stream or sys.stderr
        done, total = len(self._done), len(self._planned)
        seconds = now - (now if self._started is None else self._started)
        text = f"rank {rank}: {done}/{total} MoE layers laid out, {self._bytes / 2**30:.1f} GiB, {seconds:.0f} s"
        if stream.isatty():
            filled = "#" * (_BAR * done // max(total, 1))
            # Each rank has a line of its own, below the cursor; drawn in one write, and the cursor put back.
            down, up = "\n" * rank, f"\x1b[{rank}A" if rank else ""
            stream.write(f"{down}\r\x1b[K[{filled:-<{_BAR}}] {text}{up}\r")
            if finished:
                stream.write("\n")
            stream.flush()
        if finished:
            logger.info("%s", text)
        elif not stream.isatty() and now - self._said >= EVERY:
            self._said = now
            left = seconds / done * (total - done)
            logger.info("%s, about %.0f s left", text, left)


#: Of this process.
PROGRESS = Progress()
