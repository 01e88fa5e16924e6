"""When rank 0 wants a checkpoint or a stop: from the number of rounds, the clock, and signals."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping

from hpcfl.duration import seconds

SHARE = 0.1  # of the run's time that checkpoints may take where nobody says when to make them
SOONEST = 60.0  # seconds between two such checkpoints
SPEED = 1e8  # bytes per second: how long the first one takes is not known
SPARE = 2.0  # seconds before the end of the time that are left for the rest of a stop


class Agenda:
    """Only rank 0's is used. Times are those of ``clock``, in seconds."""

    def __init__(
        self,
        asked: Callable[[], str | None],
        *,
        every: int | str,
        max_walltime: str | None,
        started: float,
        size: Callable[[], int],
        environment: Mapping[str, str] = os.environ,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ):
        """asked: why somebody wants a stop, or None. every, max_walltime: run.checkpoint_every, run.max_walltime.

        started: when the process did. size: bytes of a checkpoint now, a rank's part of them.
        """
        self.started, self._asked, self._clock = started, asked, clock
        self.rounds = every if isinstance(every, int) else None
        self._auto, self.off = every == "auto", every == "off"
        timed = isinstance(every, str) and not self._auto and not self.off
        self._every = seconds("run.checkpoint_every", str(every)) if timed else None
        ends = [started + seconds("run.max_walltime", max_walltime)] if max_walltime else []
        if environment.get("SLURM_JOB_END_TIME", "").isdigit():
            ends.append(clock() + int(environment["SLURM_JOB_END_TIME"]) - wall())
        self.deadline = min(ends, default=None)
        self.count, self.seconds = 0, 0.0  # of the checkpoints made
        self._size = size
        self._took: float | None = None  # the last one
        self._last = self._planned = clock()
        self._longest = 0.0  # plan

    def stop(self) -> str | None:
        """Why to stop before the next plan: "signal SIGUSR1", "walltime", or None. To be asked once per plan."""
        now = self._clock()
        self._longest, self._planned = max(self._longest, now - self._planned), now
        reason = self._asked()
        if reason:
            return reason
        if self.deadline is not None and now + 2 * (self._longest + self._cost) + SPARE > self.deadline:
            return "walltime"
        return None

    def due(self) -> bool:
        """Whether the clock wants a checkpoint."""
        waited = self._clock() - self._last
        if self._auto:
            return waited >= max(SOONEST, self._cost / SHARE)
        return self._every is not None and waited >= self._every

    def last(self) -> bool:
        """Whether the end of the run is worth a checkpoint, from which it can be made longer."""
        return not self.off and (not self._auto or self.seconds + self._cost <= SHARE * self.elapsed)

    @property
    def elapsed(self) -> float:
        """Seconds since the process started."""
        return self._clock() - self.started

    @property
    def _cost(self) -> float:
        """Seconds that a checkpoint will take."""
        return self._size() / SPEED if self._took is None else self._took

    def saved(self, took: float, *, good: bool = True) -> None:
        """A checkpoint has been made, or tried, in so many seconds."""
        self.count, self.seconds, self._took = self.count + good, self.seconds + took, took
        self._last = self._planned = self._clock()
