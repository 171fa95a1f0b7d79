"""Models on a simulated accelerator, in every way; writes a table of what each found as JSON.

A cell is "same" if two steps leave what the plain run on the same device leaves, to the bit (what
inverts, or adds up in another order, to a tolerance), and the same random streams; else an error.
"""

from __future__ import annotations

import copy
import itertools
import json
import sys
import tempfile
import warnings
from functools import partial

import torch
from torch import nn

import recoup
from recoup.errors import RecoupError
from recoup.flows import Glow, fit
from recoup.invertible import Chain
from tests import simulated_device as simulated
from tests.oracle import loss_of_all, tensors
from tests.zoo import CHAINS, INVERTIBLE, MODULES, chain_of, invertible_chain_of

# -- ways of the zoo -------------------------------------------------------------------------------


class Called(nn.Module):
    """Modules in a row, called in some way."""

    def __init__(self, call, modules):
        super().__init__()
        self.call, self.stages = call, nn.Sequential(*modules)

    def forward(self, *args):
        return self.call(self.stages, *args)


def one_by_one(stages, x):
    for stage in stages:
        x = recoup.checkpoint(stage, x)
    return x


def recomputing(stages, x):
    with recoup.recomputing():
        return stages(x)


def offloading(stages, x, to="host"):
    with recoup.offloading(1, to, in_flight_bytes=200):
        return stages(x)


def recompute_(modules):
    return recoup.recompute_(nn.Sequential(*modules), *{type(each) for each in modules})


CALLS = {
    "checkpoint": recoup.checkpoint,
    "one by one": one_by_one,
    "recompute": lambda stages, x: recoup.recompute(stages)(x),
    "recomputing": recomputing,
    "offloading": offloading,
    "offloading to a folder": partial(offloading, to=tempfile.gettempdir()),
}
MEMORY = "inputs", "sqrt", "log", 2
WAYS = {name: partial(Called, call) for name, call in CALLS.items()} | {"recompute_": recompute_}
for each in MEMORY:
    WAYS[f"Sequential {each}"] = lambda modules, memory=each: recoup.Sequential(*modules, memory=memory)


# -- what a step leaves ----------------------------------------------------------------------------


def moved(modules):
    return [each.to("sim") for each in copy.deepcopy(modules)]


def steps(model, x):
    """What two steps leave, and the random streams after each."""
    found = []
    torch.manual_seed(3)
    for _ in range(2):
        output = model(x)
        loss_of_all(output).backward()
        found += [*tensors(output), x.grad, *(p.grad for p in model.parameters()), *model.buffers()]
        found += [torch.get_rng_state(), simulated.generator.get_state()]
        found = [torch.zeros(0) if each is None else each.detach().cpu().clone() for each in found]
    x.grad = None
    return found


def compared(found, want, rtol=0.0):
    for a, b in zip(found, want, strict=True):
        scale = rtol * (1.0 + b.abs().max()) if rtol and b.is_floating_point() and b.numel() else 0.0
        if not torch.equal(a, b) and not (a - b).abs().max() <= scale:
            return f"differs by {(a - b).abs().max()} of {b.abs().max()}"
    return "same"


def outcome(run):
    """What a run returns, or its error: by its name alone, if it is one of torch."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return run()
    except (RecoupError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    except Exception as error:  # noqa: BLE001
        return f"raw {type(error).__name__}: {error}"


def of_zoo():
    for name in [*CHAINS, *MODULES]:
        if name == "a hundred":
            continue
        modules, x = chain_of(name)
        x = x.detach().to("sim").requires_grad_(x.requires_grad)
        want = outcome(lambda: steps(nn.Sequential(*moved(modules)), x))
        if isinstance(want, str):
            yield "plain", name, want
            continue
        for way, make in WAYS.items():
            yield way, name, outcome(lambda: compared(steps(make(moved(modules)), x), want))


# -- what the zoo does not have --------------------------------------------------------------------


def made(*shape):
    return torch.randn(*shape, dtype=torch.float64).to("sim").requires_grad_()


def blocks(dropout=0.3):
    layers = nn.Linear(32, 64), nn.GELU(), nn.Dropout(dropout), nn.Linear(64, 32)
    return nn.Sequential(*layers).double()


def of_chains():
    for name in INVERTIBLE:
        modules, x = invertible_chain_of(name)
        x = x.detach().to("sim").requires_grad_(x.requires_grad)
        want = steps(Chain(*moved(modules)), x)
        for memory, rtol in {"constant": 1e-9, "sqrt": 0.0}.items():
            chain = Chain(*moved(modules), memory=memory)
            yield f"Chain {memory}", name, outcome(lambda: compared(steps(chain, x), want, rtol))


def of_flows():
    x = torch.randint(17, (4, 1, 8, 8), device="sim")
    for name, steps_of in {
        "log_prob": lambda flow: steps(Called(lambda _, x: flow.log_prob(x), [flow]), x),
        "sample": lambda flow: [flow.sample(2, seed=1).cpu()],
        "fit": lambda flow: [fit(flow, x, epochs=1, progress=False), *flow.cpu().parameters()][1:],
    }.items():
        found = []
        for memory in ("linear", "constant"):
            torch.manual_seed(0)
            flow = Glow((1, 8, 8), levels=17, width=8, num_steps=2, dropout=0.3, memory=memory)
            found.append(outcome(lambda flow=flow: steps_of(flow.to("sim"))))
        yield "flows", name, found[0] if isinstance(found[0], str) else (
            found[1] if isinstance(found[1], str) else compared(found[1], found[0], 1e-3))


def of_weights():
    """With the numbers that the CPU has; regions around them are in the zoo."""
    torch.manual_seed(0)
    for name, change in {
        "dropout": partial(recoup.weight_dropout, p=0.3),
        "noise": partial(recoup.weight_noise, std=0.1),
        "norm": recoup.weight_norm,
    }.items():
        for kind, module, x in [
            ("Linear", nn.Linear(32, 2048), torch.randn(4, 32)),
            ("Conv2d", nn.Conv2d(2, 3, 3), torch.randn(4, 2, 5, 5)),
            ("Embedding", nn.Embedding(9, 6), torch.tensor([1, 8, 1])),
        ]:
            def run(device):
                model = change(copy.deepcopy(module)).to(device)
                given = x.to(device).requires_grad_(x.is_floating_point())
                return steps(model, given)
            yield "weights", f"{name} of {kind}", outcome(lambda: compared(run("sim"), run("cpu"), 1e-6))


def of_tiles():
    fn, x = blocks().to("sim"), made(3, 8, 32)
    one_after_the_other = lambda fn, x: torch.cat([fn(each) for each in x.chunk(4, 1)], 1)  # noqa: E731
    want = steps(Called(one_after_the_other, [fn]), x)
    fn.zero_grad()
    tiled = lambda fn, x: recoup.tiled(fn, dim=1, tiles=4)(x)  # noqa: E731
    yield "tiled", "blocks", outcome(lambda: compared(steps(Called(tiled, [fn]), x), want, 1e-12))


def of_gradients():
    found = []
    for way in ("plain", "store"):
        torch.manual_seed(0)
        model, x = nn.Sequential(blocks(), blocks()).to("sim"), made(8, 32)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        store = recoup.GradStore(model.parameters())
        for _ in range(3):
            if way == "plain":
                model(x).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            else:
                with store.collecting():
                    model(x).square().sum().backward()
                recoup.step(optimizer, store)
        found.append([each.detach().cpu() for each in model.parameters()])
    yield "GradStore", "blocks", compared(*found)


def of_plans():
    loss = lambda y: y.sin().mul(1.5).sum()  # noqa: E731
    for name, options in {
        "least": {}, "tiles": {"tiles": True}, "host": {"offload_to": "host"},
        "folder": {"offload_to": tempfile.gettempdir()}, "replan": {"replan": True},
    }.items():
        def run(name=name, options=options):
            torch.manual_seed(0)
            modules, x = [blocks() for _ in range(6)], made(64, 32)
            want = steps(nn.Sequential(*moved(modules)), x)
            model = nn.Sequential(*moved(modules))
            plan = recoup.plan(model, x, loss=loss, budget=350_000, **options).apply()
            found = compared(steps(model, x), want)
            before, _ = simulated.module.allocated, simulated.module.reset_peak_memory_stats()
            loss(model(x)).backward()
            taken = simulated.module.peak - before
            return found if taken <= 350_000 else f"takes {taken}"
        yield "plans", name, outcome(run)


def main():
    library = simulated.set_up()
    found = {}
    parts = of_zoo, of_chains, of_flows, of_weights, of_tiles, of_gradients, of_plans
    for way, name, result in itertools.chain(*(part() for part in parts if len(sys.argv)<2 or part.__name__ in sys.argv)):
        found.setdefault(way, {})[name] = result
    del library
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    sys.exit(main())
