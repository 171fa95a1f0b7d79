"""The overhead of a region beyond the computation that it repeats."""

import time
from collections.abc import Iterator

import torch
from torch.utils.checkpoint import checkpoint

import recoup


def body(x):
    return x.sin().exp().cos()


def _microseconds(fn, calls: int = 1000, rounds: int = 15) -> float:
    best = float("inf")
    for _ in range(rounds):
        start = time.process_time()
        for _ in range(calls):
            fn()
        best = min(best, (time.process_time() - start) / calls)
    return 1e6 * best


def overhead() -> list[dict]:
    """Measure forward and backward of three small operations on one thread, best of 15 rounds."""
    x = torch.randn(4, 4, requires_grad=True)
    plain = _microseconds(lambda: body(x).sum().backward())
    again = _microseconds(lambda: body(x))
    regions = {
        "recoup.checkpoint": lambda: recoup.checkpoint(body, x),
        "torch checkpoint": lambda: checkpoint(body, x, use_reentrant=False),
        "torch checkpoint, no RNG": lambda: checkpoint(
            body, x, use_reentrant=False, preserve_rng_state=False
        ),
    }
    rows = [{"name": "plain", "microseconds": plain}, {"name": "second run", "microseconds": again}]
    for name, region in regions.items():
        total = _microseconds(lambda region=region: region().sum().backward())
        rows.append(
            {"name": name, "microseconds": total, "microseconds_beyond": total - plain - again}
        )
    return rows


def suite(device: str) -> Iterator[tuple[str, list[dict]]]:
    """Yield the table, of a processor whatever the device is."""
    del device
    yield "overhead", overhead()
