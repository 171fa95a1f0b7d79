"""Random draws that a second run repeats: recoup's from seeds, others from generator states.

NOTE [ A seed is the random state ]

Rule 1. A draw by recoup takes one seed from the default generator and is made from that seed. A
        region records the seed (8 bytes), and its second run gets the same seed.
Rule 2. A call that may draw leaves the default generators unchanged if it did not draw, and one
        seed further if it did; so the stream does not depend on how much the call drew.
Rule 3. Any other draw is a foreign one. A region with one keeps the generator states from its
        start; any other region keeps none.
Rule 4. A first run inside a second run takes its seeds from the region that runs again, not from
        the generator, and records them.
Rule 5. After a second run the default generators are restored to their states before it.
Rule 6. A decision that is made outside of a region and may differ later (which draw a weight has
        depends on the forward around it) is recorded in order among the seeds.
Rule 7. The default generators are those of all threads. Where another thread has drawn while a
        region with foreign draws ran, a second run does not leave them where the first one did;
        that is an error, since the numbers of one of them would be wrong.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch

from recoup._core.devices import (
    States,
    accelerator,
    generator_states,
    generators_restored,
    hash_of,
    refuse_capture,
    same_states,
    seed_generators,
    set_generator_states,
    with_seed,
)
from recoup._core.saved_tensors import frame_in_force, is_in_backward
from recoup._core.settings import replaced
from recoup._core.tensors import is_without_values
from recoup.errors import RecoupError, ReplayError

T = TypeVar("T")
_64_BITS = 2**64 - 1


class _Local(threading.local):
    regions: tuple[Draws, ...] = ()  # the draws of the regions around this code
    num_replayed = 0  # of these, those that run again now
    num_seeds = 0  # that this thread has taken from the default generator


draws_here = _Local()


def hash_seed(*numbers: int) -> int:
    """Return a seed of 64 bits made of `numbers`, by a step of SplitMix64 for each of them."""
    seed = 0
    for number in numbers:
        seed = (seed + number + 0x9E3779B97F4A7C15) & _64_BITS
        seed = ((seed ^ (seed >> 30)) * 0xBF58476D1CE4E5B9) & _64_BITS
        seed = ((seed ^ (seed >> 27)) * 0x94D049BB133111EB) & _64_BITS
        seed ^= seed >> 31
    return seed


def draw_seed() -> int:
    """Draw a seed of 8 bytes from the default CPU generator; a replay returns the same seed."""
    if not draws_here.regions:
        return _fresh_seed()

    def make(recorded: Any) -> tuple[int, int]:
        seed = _fresh_seed()
        seed = recorded if isinstance(recorded, int) else seed
        return seed, seed

    return _recorded(make)


def _fresh_seed() -> int:
    if accelerator() is not None:
        refuse_capture()
    draws_here.num_seeds += 1
    seed = torch.randint(2**63 - 1, (), dtype=torch.int64, device="cpu")
    try:
        return int(seed.item())
    except RuntimeError as error:
        if is_without_values():
            return 0
        raise RecoupError(
            '`randomness` of vmap is "different", but one call has one draw, which is the same for '
            'all samples. Use randomness="same", or recoup.weights.same_draw around vmap.'
        ) from error


def skip(num_seeds: int) -> None:
    """Advance the stream by `num_seeds` seeds, so that later foreign draws are repeated."""
    for _ in range(num_seeds):
        _fresh_seed()


class Draws:
    """The draws of a region: its seeds in order, and its first generator states if needed."""

    start: States | None = None  # in which the first run began, if a later run needs them
    _expected: States = ()  # the generator states, if no foreign draw was made since
    _end = 0  # a hash of the states after a first run with foreign draws
    _is_replaying = False
    _cursor = 0
    has_foreign = False  # whether a foreign draw has moved a default generator (See Rule 3)

    def __init__(self) -> None:
        self._entries: list[Any] = []  # seeds, seeded calls, and the decisions of Rule 6

    @contextmanager
    def recording(self) -> Generator[None]:
        """A context for the first run of a region, which records seeds and notes foreign draws."""
        around = draws_here.regions
        draws_here.regions = (*around, self)
        self.start = self._expected = generator_states()
        try:
            yield
        finally:
            draws_here.regions = around
            states = generator_states()
            if self.has_foreign or not same_states(self._expected, states):
                self.has_foreign = True
                self._end = hash_of(states)
            else:
                self.start = None
            self._expected = ()

    @contextmanager
    def replaying(self, *, is_alone: bool = False) -> Generator[None]:
        """A context for a later run of a region: it repeats draws and restores the generators.

        If `is_alone`, no region around records what is drawn.
        """
        start, before = self.start, None
        if start is not None or self.has_foreign or any(map(_moves_generator, self._entries)):
            before = generator_states()
        outer = (self._is_replaying, self._cursor)
        self._is_replaying, self._cursor = True, 0
        around = draws_here.regions
        draws_here.regions = (self,) if is_alone else (*around, self)
        draws_here.num_replayed += 1
        try:
            if start is not None:
                set_generator_states(start)
            yield
        finally:
            draws_here.num_replayed -= 1
            draws_here.regions = around
            self._is_replaying, self._cursor = outer
            if before is not None:
                set_generator_states(before)  # See Rule 5

    @property
    def has_drawn_all(self) -> bool:
        """Whether a later run has left the generators where the first one did (See Rule 7)."""
        return not self.has_foreign or hash_of(generator_states()) == self._end

    def _next(self) -> Any:
        entry = self._entries[self._cursor] if self._cursor < len(self._entries) else None
        self._cursor += 1
        return entry


def _moves_generator(entry: Any) -> bool:
    """Whether repeating an entry of a region moves a default generator."""
    if isinstance(entry, SeededCall):
        return entry.draws
    return not isinstance(entry, Counted) or entry.num_seeds > 0


def _recorded(make: Callable[[Any], tuple[Any, T]]) -> T:
    """Return a result of `make`, of which the regions around record an entry.

    It returns both, and is given the entry of the first run if a region around runs again.
    """
    around = draws_here.regions
    num_outer = len(around)
    while num_outer and not around[num_outer - 1]._is_replaying:
        num_outer -= 1
    writers = around[num_outer:]
    if writers:
        states = generator_states()
        for draws in writers:
            if not same_states(draws._expected, states):
                draws.has_foreign = True  # See Rule 3
    entry, result = make(around[num_outer - 1]._next() if num_outer else None)  # See Rule 4
    if writers:
        states = generator_states()
        for draws in writers:
            draws._expected = states
            draws._entries.append(entry)
    return result


def num_repeated() -> int:
    """Return the number of regions around this code that may run again, or run again now."""
    return len(draws_here.regions)


def is_run_again() -> bool:
    """Whether this runs inside a region, of ours or of torch's checkpoint, or inside a backward."""
    return num_repeated() > 0 or frame_in_force() is not None or is_in_backward()


# Returns something true inside a region that may run again, or runs again now.
is_repeated: Callable[[], object] = partial(getattr, draws_here, "regions")


class Counted(NamedTuple):
    """A decision, and how many seeds it took from the stream (See Rule 6)."""

    value: Any
    num_seeds: int


def counted(decide: Callable[[], Any]) -> Counted:
    """Return the result of `decide`, and how many seeds it drew."""
    before = draws_here.num_seeds
    value = decide()
    return Counted(value, draws_here.num_seeds - before)


def remembered(decide: Callable[[], T]) -> T:
    """Return the result of `decide`; a region that runs again gets that of its first run."""
    if not draws_here.regions:
        return decide()

    def make(recorded: Any) -> tuple[Counted, T]:
        if recorded is None:
            with replaced(draws_here, "regions", ()):
                made = counted(decide)
            return made, made.value
        if not isinstance(recorded, Counted):
            raise ReplayError(
                "A region draws random numbers in another order when it runs again: its first run "
                "drew a seed where this one reads a noisy weight. A region must do the same when "
                "it runs again: look for outside state that it reads."
            )
        skip(recorded.num_seeds)
        return recorded, recorded.value

    return _recorded(make)


class SeededCall:
    """A call whose default-generator draws come from one seed, so it can be repeated in any order.

    Seeds drawn within belong to the call, and not to the regions around it.
    """

    def __init__(self) -> None:
        self._seed: int | None = None
        self._within: Draws | None = None  # the seeds that are drawn in the call, if any
        self.is_known = False  # whether it has run, or is known to draw nothing
        self.is_plain = False  # whether it is known to draw nothing

    @property
    def draws(self) -> bool:
        """Whether the call drew in its first run."""
        return self._seed is not None

    def draws_nothing(self) -> None:
        """Declare that the call draws nothing: its first run need not be watched."""
        self.is_known = self.is_plain = True

    def run(self, call: Callable[[], T]) -> T:
        """Run `call`, or repeat it (See Rules 1 and 2)."""
        if self.is_known:
            return self._repeat(call)

        def make(recorded: Any) -> tuple[SeededCall, T]:
            if isinstance(recorded, SeededCall):
                skip(int(recorded.draws))
                self._seed, self._within = recorded._seed, recorded._within
                result = self._repeat(call)
            else:
                result = self._run_first(call)
            self.is_known = True
            return self, result

        return _recorded(make)

    def _run_first(self, call: Callable[[], T]) -> T:
        within = Draws()
        with generators_restored() as generators:
            before = generators.states
            seed = _fresh_seed()
            generators.states = generator_states()
            seed_generators(seed)
            start = generator_states()
            with replaced(draws_here, "regions", (within,)):
                result = call()
            if same_states(start, generator_states()):
                generators.states = before  # See Rule 2
            else:
                self._seed = seed
        self._within = within if within._entries else None
        return result

    def _repeat(self, call: Callable[[], T]) -> T:
        if self._within is not None:
            with self._within.replaying(is_alone=True):
                return self._seeded(call)
        return self._seeded(call)

    def _seeded(self, call: Callable[[], T]) -> T:
        return call() if self._seed is None else with_seed(call, self._seed)
