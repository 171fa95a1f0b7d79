"""Models on a simulated accelerator, in every way.

A cell is "same" if two steps leave what they leave without recoup on the same device, with both
random streams; otherwise it is an error, "raw" if it is none of recoup's. All are as they are
expected to be, which is "same" unless another beginning stands beside.
"""

from __future__ import annotations

import copy
import itertools
import sys
import tempfile
import warnings
from collections import Counter
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn

import recoup
from recoup._core.drift_guard import DriftGuard
from recoup.errors import RecoupError
from recoup.flows import Glow
from recoup.invertible import Chain
from recoup.planning import priced_blocks
from tests import simulated_device as simulated
from tests.counted_times import times_of
from tests.invertible_zoo import INVERTIBLE, invertible_chain_of
from tests.oracle import loss_of_all
from tests.ways import CALLS, Called, a_step, assert_same, built, outcome
from tests.weight_zoo import OURS
from tests.zoo import CHAINS, MODULES, chain_of

BUDGET = 350_000  # everything kept takes 580,000 bytes
WAYS = *CALLS, "recompute_", "inputs", "sqrt", "log", "1 slot", "offloading to the host"
# Every so many-th model, each in every so many-th way.
STRIDES = (1, 1) if "all" in sys.argv else (2, 5)


def in_way(way, modules):
    def offloading(stages, x):
        with recoup.offloading(1, "host", in_flight_bytes=200):
            return stages(x)

    return Called(offloading, modules) if way == WAYS[-1] else built(way, modules)


def twice(model, x):
    """Code is looked at in its first step, and known in the second."""
    return [*a_step(model, x), *a_step(model, x)]


def left(model, x, device="sim", situation=twice):
    x = x.detach().to(device).requires_grad_(x.requires_grad)
    return [*outcome(model.to(device), x, situation), simulated.generator.get_state()]


def cell(run):
    """ "same" if a run returns nothing; else what it returns, or its error."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return run() or "same"
    except (RecoupError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    except Exception as error:  # noqa: BLE001
        return f"raw {type(error).__name__}: {error}"


def same(found, want, rtol=0.0):
    """A cell: whether what `found()` leaves is what `want` is."""
    return cell(lambda: assert_same(found(), want() if callable(want) else want, rtol))


def of_zoo():
    for place, name in enumerate(sorted({*CHAINS, *MODULES} - {"a hundred"})[:: STRIDES[0]]):
        modules, x = chain_of(name)
        try:
            want = left(built("plain", modules), x)
        except NotImplementedError:
            assert name in ("recurrent", "lstm", "gru")  # for which the device has no kernels
            continue
        for way in WAYS[place % STRIDES[1] :: STRIDES[1]]:
            yield way, name, same(lambda: left(in_way(way, modules), x), want)  # noqa: B023


def of_chains():
    for place, name in enumerate(INVERTIBLE):
        modules, x = invertible_chain_of(name)
        want = left(Chain(*copy.deepcopy(modules)), x)
        ways = ("constant", "constant", 1e-9), ("sqrt of invertible", "sqrt", 0.0)
        for way, memory, rtol in ways[place % STRIDES[0] :: STRIDES[0]]:
            model = Chain(*copy.deepcopy(modules), memory=memory)
            yield way, name, same(lambda: left(model, x), want, rtol)  # noqa: B023


def blocks(num=1, dropout=0.3):
    torch.manual_seed(0)
    layers = nn.Linear(32, 64), nn.GELU(), nn.Dropout(dropout), nn.Linear(64, 32)
    return [copy.deepcopy(nn.Sequential(*layers).double()) for _ in range(num)]


def rows(*shape):
    return torch.randn(*shape, dtype=torch.float64).requires_grad_()


def of_flows():
    images, found = torch.randint(17, (4, 1, 8, 8)), {}
    for memory in ("linear", "constant"):
        torch.manual_seed(0)
        made = Glow((1, 8, 8), levels=17, width=8, num_steps=2, dropout=0.3, memory=memory)
        flow = made.double().to("sim")
        torch.rand(len(memory), device="sim")  # which the generator makes up for
        sample = [flow.sample(2, generator=torch.Generator())]
        density = left(Called(lambda flow, x: flow[0].log_prob(x), [flow]), images)
        found[memory] = sample, density
    for place, rtol in enumerate((0.0, 1e-9)):
        yield "flows", place, same(lambda: found["constant"][place], found["linear"][place], rtol)  # noqa: B023


def of_weights():
    """To the bit what they are on a CPU."""
    changes = OURS["dropout"], OURS["noise"], OURS["norm"]
    modules = (
        (nn.Linear(32, 2048), torch.randn(4, 32)),
        (nn.Conv2d(2, 3, 3), torch.randn(4, 2, 5, 5)),
        (nn.Embedding(9, 6), torch.tensor([1, 8, 1])),
    )

    def values(change, module, x, device):
        model = change(copy.deepcopy(module))
        found = left(model, x, device, a_step)[:-2]  # without the streams, of which two differ
        return [each if each is None else each.cpu() for each in found]

    for change, given in itertools.product(changes, modules):
        on = partial(values, change, *given)
        yield "weights", f"{change} of {given[0]}", same(partial(on, "sim"), partial(on, "cpu"))


def of_settings():
    calls, x = itertools.count(1), rows(4, 4).to("sim")
    by_autocast = lambda x: (x.sin() * (1.0 + torch.is_autocast_enabled("sim"))).exp()  # noqa: E731
    by_count = lambda x: (x * next(calls)).sin().exp()  # noqa: E731

    def run(fn):
        with torch.autocast("sim", torch.bfloat16):
            y = recoup.checkpoint(fn, x)
        y.sum().backward()

    yield "settings", "autocast", cell(partial(run, by_autocast))
    found = cell(partial(run, by_count))
    yield "settings", "counter", found, "ReplayError: Running the checkpointed call"


def of_gradients():
    """Against the same step with `.grad`."""

    def step(collects, model, x):
        store = recoup.GradStore(model.parameters())
        with store.collecting() if collects else nullcontext():
            loss_of_all(model(x)).backward()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        recoup.step(optimizer, store) if collects else optimizer.step()
        return list(model.parameters())

    find = lambda how: left(nn.Sequential(*blocks(2)), x, "sim", partial(step, how))  # noqa: E731
    x = rows(8, 32)
    yield "gradients", "GradStore", same(lambda: find(True), lambda: find(False))


def of_plans():
    modules, x = blocks(6), rows(64, 32)
    loss = lambda y: y.sin().mul(1.5).sum()  # noqa: E731
    want = left(built("plain", modules), x)

    def run(**options):
        model, given = nn.Sequential(*copy.deepcopy(modules)).to("sim"), x.to("sim")
        plan = recoup.plan(model, given, loss=loss, budget=BUDGET, **options).apply()
        assert_same(left(model, x), want)
        found = recoup.measure(lambda: loss(model(given)).backward(), device="sim", repeats=0)
        return "" if found.peak_bytes <= plan.budget_bytes else f"takes {found.peak_bytes} bytes"

    folder = {"offload_to": tempfile.gettempdir(), "replan": True}
    for options in ({"tiles": True, "offload_to": "host"}, folder):
        yield "plans", str(options), cell(partial(run, **options))


def of_bytes():
    """The bytes that the allocator of the device counts, and what it says where it lacks some."""
    torch.manual_seed(0)
    model, x = nn.Sequential(*blocks(4)).to("sim"), rows(2**13 - 1, 32).to("sim")
    loss = lambda y: y.sin().sum()  # noqa: E731
    memory = simulated.module.memory

    def step():
        model.zero_grad()
        loss(model(x)).backward()

    step()
    memory.empty_cache()
    found = recoup.measure(step, device="sim", repeats=0)
    requested, allocated, reserved = found.peaks
    assert 0 < requested < allocated == found.peak_bytes < reserved, found
    assert f"(requested {recoup.memory.format_bytes(requested)}, reserved" in str(found)
    for device in ("sim", "cpu"):
        y = rows(9).to(device)
        assert recoup.measure(lambda: y * 2, repeats=0).device.startswith(device)  # noqa: B023
    budget = int(0.7 * allocated)
    plan = recoup.plan(model, x, loss=loss, budget=budget)
    requested, allocated, reserved = plan.rehearsed_peaks
    assert requested < allocated == plan.rehearsed_peak_bytes <= 0.95 * budget < reserved
    assert "reserved" in str(plan), plan
    assert "left for fragmentation: 0.05" in str(plan), plan
    assert "reserved" in str(recoup.timeline(model, x, plan=plan, loss=loss))
    with plan.applied():
        memory.empty_cache()
        memory.limit = memory.now["reserved"]
        while memory.allocate(2**21):
            pass  # what is left of segments
        memory.limit = float("inf")
        for block in [memory.allocate(2**20) for _ in range(100)]:
            memory.free(block)  # what is cached, and too small
        memory.limit = memory.now["reserved"]
        with pytest.warns(match=r"given cached memory back \(1 times\)"):
            step()
        memory.empty_cache()
        memory.limit = memory.now["reserved"]
        with pytest.raises(torch.OutOfMemoryError) as caught:
            step()
        assert "let a plan leave more `headroom`" in "".join(caught.value.__notes__)
    memory.limit = float("inf")
    yield "bytes", "all", "same"


def of_captured():
    modules, x = blocks(4), rows(64, 32).to("sim")
    plain = built("plain", modules).to("sim")
    kept = recoup.plan(plain, x, loss=loss_of_all, budget="1 GiB").apply()
    noisy = recoup.weight_noise(nn.Linear(32, 32).double().to("sim"), std=0.1)
    models = {way: in_way(way, modules).to("sim") for way in WAYS}
    models |= {"a plan that keeps everything": kept.model, "weights": noisy}
    models["plan"] = recoup.plan(copy.deepcopy(plain), x, budget=BUDGET).apply().model
    models["tiled"] = Called(lambda fn, x: recoup.tiled(fn, dim=0, tiles=4)(x), modules).to("sim")
    couplings, given = invertible_chain_of(next(iter(INVERTIBLE)))
    chain, given = Chain(*couplings, memory="constant").to("sim"), given.detach().to("sim")
    models["constant"] = Called(lambda chain, _: chain[0](given)[0], [chain])
    simulated.module.is_capturing = True
    for name, model in models.items():
        wanted = "RecoupError: A stream is being captured into a CUDA graph"
        wanted = "same" if "keeps everything" in name else wanted
        yield "captured", name, cell(lambda: model(x).sum().backward()), wanted  # noqa: B023
    simulated.module.is_capturing = False


def of_bare():
    """On a device that has no random state, counts no bytes and has no streams."""
    x, draws = rows(4, 32), "ReplayError: aten.native_dropout.default draws on"
    for way, dropout in (("without dropout", 0.0), ("with dropout", 0.3)):
        modules = blocks(6, dropout)
        want = left(built("plain", modules), x)
        for name in WAYS:
            found = same(lambda: left(in_way(name, modules), x), want)  # noqa: B023
            yield way, name, found, draws if dropout and "offloading" not in name else "same"
    model, y = nn.Sequential(*blocks()).to("sim"), x.to("sim")
    for ask in (lambda: recoup.measure(lambda: None, device="sim"), lambda: recoup.plan(model, y)):
        yield "bytes", "asked", cell(ask), "ValueError: The bytes on sim"


PARTS = (
    of_zoo, of_chains, of_flows, of_weights, of_settings, of_gradients, of_plans, of_bytes,
    of_captured,
)  # fmt: skip


def main():
    is_bare, is_whole = ("bare" in sys.argv), ("all" in sys.argv)
    if not is_whole:
        priced_blocks.times_of = times_of
    library = simulated.set_up(is_bare=is_bare)
    counts, wrong = Counter(), []
    with DriftGuard.strict():
        for part in (of_bare,) if is_bare else PARTS:
            num_before = counts.total()
            for way, name, result, *wanted in part():
                counts[way] += 1
                if not result.startswith(*(wanted or ["same"])):
                    wrong.append((way, name, result))
            assert counts.total() > num_before, part
    assert not wrong, wrong
    assert is_bare or min(counts[way] for way in WAYS) >= (50 if is_whole else 5)
    del library


if __name__ == "__main__":
    main()
