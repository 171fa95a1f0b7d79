"""Transfers: how long a schedule waits for the copies that it offloads and loads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from recoup.schedules.actions import Advance, Drop, Invert, Load, Offload, Reverse, Schedule, Tape
from recoup.schedules.costs import Cost

__all__ = ["waiting_seconds"]

_BACKWARD = 2.0  # time of backward in forwards, as in `trace`


def waiting_seconds(
    schedule: Schedule,
    costs: Sequence[Cost],
    bytes_per_second: Mapping[str, float],
    in_flight_bytes: int,
) -> float:
    """Return the time that a schedule waits for copies, which run behind the computation.

    Args:
        schedule: a schedule that can be executed.
        costs: the cost of each stage; times in seconds.
        bytes_per_second: the bandwidth of each place that the schedule offloads to, which copies
            one state at a time.
        in_flight_bytes: the bound on bytes in flight.

    Example:
        >>> from recoup.schedules import Cost, offloaded
        >>> from recoup.schedules.transfers import waiting_seconds
        >>> costs = [Cost(1.0, 100, 100)] * 8
        >>> fast, slow = {"host": 100.0}, {"host": 50.0}
        >>> [waiting_seconds(offloaded(8), costs, speed, 200) for speed in (fast, slow)]
        [0.0, 4.0]
    """
    clock = _Clock(costs, bytes_per_second, in_flight_bytes)
    for action in schedule.actions:
        match action:
            case Advance(start, stop):
                clock.now += sum(cost.seconds for cost in costs[start:stop])
            case Tape(index):
                clock.now += costs[index].seconds
            case Invert(index):
                clock.now += costs[index].seconds + costs[index].invert_seconds
            case Reverse(index):
                clock.now += _BACKWARD * costs[index].seconds
            case Offload(index, to):
                clock.offload(index, to)
            case Load(index):
                clock.load(index)
            case Drop(index):
                clock.drop(index)
            case _:
                pass
    return clock.waited


class _Clock:
    """The time of a schedule, and the copies that are under way."""

    def __init__(
        self, costs: Sequence[Cost], bytes_per_second: Mapping[str, float], in_flight_bytes: int
    ) -> None:
        self.now = self.waited = 0.0
        self._costs = costs
        self._speeds = bytes_per_second
        self._bound = in_flight_bytes
        self._free: dict[str, float] = {}  # when a place begins its next copy
        self._away: dict[int, tuple[str, float]] = {}  # where a state is, and when it has landed
        self._here: set[int] = set()  # states whose memory on the device is not freed yet
        self._arriving: dict[int, float] = {}  # when each state that is being fetched arrives

    def offload(self, index: int, to: str) -> None:
        """Begin to copy a state, when it may be in flight."""
        num_bytes = self._costs[index].state_bytes
        landing = sorted((at, key) for key, (_, at) in self._away.items() if at > self.now)
        in_flight = sum(self._costs[key].state_bytes for _, key in landing)
        for at, key in landing:
            if in_flight + num_bytes <= self._bound:
                break
            self._wait(at)
            in_flight -= self._costs[key].state_bytes
        self._here = {key for key in self._here if self._away[key][1] > self.now} | {index}
        self._away[index] = to, self._copy(index, to)

    def load(self, index: int) -> None:
        """Wait for a state, and begin to fetch those that were offloaded before it."""
        if index not in self._away:
            return
        to, landed = self._away[index]
        if index in self._here:
            at = self.now
            if landed <= self.now:
                self._here.remove(index)
        else:
            at = self._arriving.pop(index, None) or self._copy(index, to)
        in_flight = {*self._arriving, *self._here, *([index] if at > self.now else [])}
        room = self._bound - sum(self._costs[key].state_bytes for key in in_flight)
        for before in sorted((key for key in self._away if key < index), reverse=True):
            if before in self._arriving or before in self._here:
                continue
            room -= self._costs[before].state_bytes
            if room < 0:
                break
            self._arriving[before] = self._copy(before, self._away[before][0])
        self._wait(at)

    def drop(self, index: int) -> None:
        """Forget a state."""
        self._away.pop(index, None)
        self._here.discard(index)
        self._arriving.pop(index, None)

    def _copy(self, index: int, to: str) -> float:
        """Begin a copy; return when it ends."""
        seconds = self._costs[index].state_bytes / self._speeds[to]
        self._free[to] = max(self.now, self._free.get(to, 0.0)) + seconds
        return self._free[to]

    def _wait(self, until: float) -> None:
        self.waited += max(until - self.now, 0.0)
        self.now = max(until, self.now)
