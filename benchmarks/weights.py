"""Weight dropout and weight noise, by everything that has them: bytes held and time of a step.

With RECOUP_QUICK=1 the layers are small.
"""

import contextlib
import copy
import json
import os
import statistics
import subprocess
import sys
import warnings
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from timing import in_turn
from torch import nn
from torch.func import functional_call
from torch.nn.utils import parametrize

import recoup
from recoup.weights import draws

P = 0.5
STD = 0.01
QUICK = bool(os.environ.get("RECOUP_QUICK"))
WIDE, HIDDEN = (64, 20) if QUICK else (4096, 1150)
LINEAR, LSTM = f"Linear {WIDE}x{WIDE}", f"LSTM 400, {HIDDEN}"


def _layers(device: str) -> dict:
    """Return the layer, the name of its noisy weight, and the inputs."""
    torch.manual_seed(0)
    token = torch.randint(8192, (16, 35), device=device)

    def given(*shape):
        return torch.randn(*shape, device=device, requires_grad=True)

    layers = {
        LINEAR: (nn.Linear(WIDE, WIDE), "weight", (given(64, WIDE),)),
        "Conv1d 1024x1024x5": (nn.Conv1d(1024, 1024, 5), "weight", (given(4, 1024, 16),)),
        "Embedding 8192x1024": (nn.Embedding(8192, 1024), "weight", (token,)),
        LSTM: (nn.LSTM(400, HIDDEN), "weight_hh_l0", (given(35, 20, 400),)),
        "MultiheadAttention 1024": (
            nn.MultiheadAttention(1024, 8),
            "in_proj_weight",
            tuple(given(32, 4, 1024) for _ in range(3)),
        ),
    }
    return {title: (layer.to(device), *rest) for title, (layer, *rest) in layers.items()}


# -- contestants: from a layer and the name of its weight to a module with weight dropout ----------


class ByHand(nn.Module):
    """A layer written by hand: `F.dropout` (or noise) on the weight, for the call."""

    def __init__(self, layer, name, noise):
        super().__init__()
        self.layer, self.name, self.noise = layer, name, noise

    def forward(self, *x):
        weight = getattr(self.layer, self.name)
        return functional_call(self.layer, {self.name: self.noise(weight)}, x)


class Assigned(nn.Module):
    """As in fastai: a raw parameter beside the layer, whose attribute is set before each call."""

    def __init__(self, layer, name, noise):
        super().__init__()
        self.layer, self.name, self.noise = layer, name, noise
        self.raw = nn.Parameter(getattr(layer, name).detach())
        del layer._parameters[name]

    def forward(self, *x):
        setattr(self.layer, self.name, self.noise(self.raw))
        if isinstance(self.layer, nn.RNNBase):
            names = self.layer._flat_weights_names
            self.layer._flat_weights = [getattr(self.layer, name) for name in names]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return self.layer(*x)


class _Parametrization(nn.Module):
    def __init__(self, noise):
        super().__init__()
        self.noise = noise

    def forward(self, weight):
        return self.noise(weight)


def parametrized(layer, name, noise):
    parametrize.register_parametrization(layer, name, _Parametrization(noise), unsafe=True)
    return layer


def returnn_scope(layer, name, noise):
    from returnn.torch.util.gradient_checkpoint import gradient_checkpoint_scope

    def in_scope(weight):
        with gradient_checkpoint_scope():
            return noise(weight)

    return ByHand(layer, name, in_scope)


def torchnlp(layer, name, noise):
    from torchnlp.nn import WeightDrop

    if noise is not dropped:
        raise TypeError("it has dropout only")
    module = WeightDrop(layer, [name], dropout=P)
    module.layer = layer  # it does not register what it wraps
    return module


def ours(layer, name, noise):
    if noise is dropped:
        return recoup.weight_dropout(layer, name, p=P)
    return recoup.weight_noise(layer, name, std=STD)


def plain(layer, name, noise):
    del name, noise
    return layer


def dropped(weight):
    return F.dropout(weight, P)


def noisy(weight):
    return weight + STD * torch.randn_like(weight)


CONTESTANTS = {
    "plain": plain,
    "by hand": ByHand,
    "torch parametrize": parametrized,
    "fastai-style": Assigned,
    "torchnlp": torchnlp,
    "recoup": ours,
}
# It leaves saved-tensor hooks in force, and breaks in a thread: it gets a process of its own.
ALONE = {"plain": plain, "RETURNN scope": returnn_scope}


# -- bytes -----------------------------------------------------------------------------------------


def memory(contestants: dict, device: str) -> list[dict]:
    """Return the bytes that the graph holds after forward, beyond those of the plain layer."""
    rows = []
    for title, (layer, name, inputs) in _layers(device).items():
        for dtype in ("float32", "bfloat16 autocast"):
            baseline = _held(layer, inputs, dtype, device)
            row = {"layer": title, "dtype": dtype, "plain_bytes": baseline}
            row["weight_bytes"] = getattr(layer, name).nbytes
            for contestant, make in contestants.items():
                if contestant == "plain":
                    continue
                try:
                    module = make(copy.deepcopy(layer), name, dropped)
                    row[contestant] = _held(module, inputs, dtype, device) - baseline
                except Exception as error:  # noqa: BLE001 - a rival may fail in any way
                    row[contestant] = type(error).__name__
            rows.append(row)
    return rows


def _held(module, inputs, dtype: str, device: str) -> int:
    def step():
        is_autocast = dtype != "float32"
        with torch.autocast(device, dtype=torch.bfloat16, enabled=is_autocast):
            output = module(*inputs)
        return output[0] if isinstance(output, tuple) else output

    num_bytes = step().untyped_storage().nbytes()  # the output itself is left out
    return recoup.measure(step, device=device, repeats=0).held_bytes - num_bytes


# -- time ------------------------------------------------------------------------------------------


def seconds(contestants: dict, device: str) -> list[dict]:
    """Measure the wall time of forward and backward on all cores."""
    rows = []
    for title, kind, noise in (
        (LINEAR, "dropout", dropped),
        (LINEAR, "noise", noisy),
        (LSTM, "dropout", dropped),
    ):
        layer, name, inputs = _layers(device)[title]

        def build(make, layer=layer, name=name, noise=noise):
            return make(copy.deepcopy(layer), name, noise)

        steps = _steps(contestants, build, inputs)
        weight = getattr(layer, name).detach()
        steps["one mask"] = lambda weight=weight: draws.dropped(weight, 1, P)
        rows += [
            {"layer": title, "kind": kind, "name": contestant, "seconds": taken}
            for contestant, taken in _medians(
                steps, rounds=2 if QUICK else 9, device=device
            ).items()
        ]
    return rows


def overhead(contestants: dict, device: str) -> list[dict]:
    """Measure the overhead of one 64x64 weight in a stack of layers, on one thread."""
    num_threads, num_layers = torch.get_num_threads(), 20
    torch.set_num_threads(1)
    rows = []
    x = torch.randn(8, 64, device=device, requires_grad=True)
    for kind, noise in (("dropout", dropped), ("noise", noisy)):

        def stack(make, noise=noise):
            layers = [nn.Linear(64, 64, device=device) for _ in range(num_layers)]
            return nn.Sequential(*(make(layer, "weight", noise) for layer in layers))

        times = _medians(_steps(contestants, stack, (x,)), rounds=2 if QUICK else 60, device=device)
        rows += [
            {
                "kind": kind,
                "name": contestant,
                "microseconds_beyond": 1e6 * (taken - times["plain"]) / num_layers,
            }
            for contestant, taken in times.items()
        ]
    torch.set_num_threads(num_threads)
    return rows


def _steps(contestants: dict, build, inputs) -> dict:
    steps = {}
    for contestant, make in contestants.items():
        # A rival that cannot do it is left out; that it cannot is a row of `memory`.
        with contextlib.suppress(Exception):
            step = _step(build(make), inputs)
            step()
            steps[contestant] = step
    return steps


def _step(module, inputs):
    parameters = list(module.parameters())

    def step():
        output = module(*inputs)
        output = output[0] if isinstance(output, tuple) else output
        output.sum().backward()
        for tensor in (*parameters, *inputs):
            tensor.grad = None

    return step


def _medians(steps: dict, rounds: int, device: str) -> dict:
    return {name: statistics.median(t) for name, t in in_turn(steps, rounds, device).items()}


# -- all of it -------------------------------------------------------------------------------------


def suite(device: str) -> Iterator[tuple[str, list[dict] | dict | str]]:
    """Yield the tables, and at last what is measured in a process of its own as `alone`."""
    yield "memory", memory(CONTESTANTS, device)
    yield "seconds", seconds(CONTESTANTS, device)
    yield "overhead", overhead(CONTESTANTS, device)
    run = [sys.executable, __file__, device, str(torch.get_num_threads())]
    alone = subprocess.run(run, capture_output=True, text=True, check=False)
    yield "alone", json.loads(alone.stdout) if alone.returncode == 0 else alone.stderr[-300:]


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[2]))
    tables = (memory, seconds, overhead)
    print(json.dumps({table.__name__: table(ALONE, sys.argv[1]) for table in tables}))
