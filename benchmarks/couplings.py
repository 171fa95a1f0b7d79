"""Additive couplings over small conv nets, in every library that trains them in constant memory."""

import copy
import statistics
import warnings
from collections.abc import Iterator

import torch
from rivals import installed
from timing import clock_of, in_turn, ratio
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import recoup
from recoup.invertible import AdditiveCoupling, Chain

SHAPE = (8, 16, 32, 32)


def network(dropout: float) -> nn.Sequential:
    channels = SHAPE[1] // 2
    layers = [nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU()]
    if dropout:
        layers.append(nn.Dropout(dropout))
    return nn.Sequential(*layers, nn.Conv2d(channels, channels, 3, padding=1))


def networks(depth: int, dropout: float) -> list[tuple[nn.Module, nn.Module]]:
    torch.manual_seed(0)
    return [(network(dropout), network(dropout)) for _ in range(depth)]


class Plain(nn.Module):
    """The coupling of all these libraries, written without any of them."""

    def __init__(self, f: nn.Module, g: nn.Module) -> None:
        super().__init__()
        self.f = f
        self.g = g

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x1, x2 = x.chunk(2, dim=1)
        y1 = x1 + self.f(x2)
        return torch.cat((y1, x2 + self.g(y1)), dim=1)


class Checkpointed(nn.Sequential):
    def forward(self, x):
        for module in self:
            x = checkpoint(module, x, use_reentrant=False)
        return x


class CheckpointedInSegments(nn.Sequential):
    def forward(self, x):
        segments = max(1, round(len(self) ** 0.5))
        return checkpoint_sequential(self, segments, x, use_reentrant=False)


def plain(pairs):
    return nn.Sequential(*[Plain(f, g) for f, g in pairs])


def torch_checkpoint(pairs):
    return Checkpointed(*[Plain(f, g) for f, g in pairs])


def torch_checkpoint_sequential(pairs):
    return CheckpointedInSegments(*[Plain(f, g) for f, g in pairs])


class _First(nn.Module):
    """A chain that returns its value without the log-determinant."""

    def __init__(self, chain: nn.Module) -> None:
        super().__init__()
        self.chain = chain

    def forward(self, x):
        return self.chain(x)[0]


def ours(memory):
    def build(pairs):
        blocks = [AdditiveCoupling(f, g, condition="second") for f, g in pairs]
        return _First(Chain(*blocks, memory=memory))

    return build


def memcnn(pairs):
    import memcnn as library

    blocks = [
        library.InvertibleModuleWrapper(library.AdditiveCoupling(f, g), keep_input=False)
        for f, g in pairs
    ]
    # It empties the storage of its input, so that the caller's has to be copied.
    return nn.Sequential(_Copy(), *blocks)


class _Copy(nn.Module):
    def forward(self, x):
        return x.clone()


def revtorch(pairs):
    import revtorch as library

    # Without the seeds, whose fixing reseeds the global generator, dropout would be wrong.
    seeds = any(isinstance(module, nn.Dropout) for f, _ in pairs for module in f.modules())
    return library.ReversibleSequence(
        nn.ModuleList(
            [
                library.ReversibleBlock(f, g, split_along_dim=1, fix_random_seed=seeds)
                for f, g in pairs
            ]
        )
    )


def revlib(pairs):
    import revlib as library

    return library.ReversibleSequential(*[net for pair in pairs for net in pair], split_dim=1)


BUILDERS = {
    "plain": plain,
    "recoup linear": ours("linear"),
    "recoup sqrt": ours("sqrt"),
    "recoup log": ours("log"),
    "recoup constant": ours("constant"),
    "torch checkpoint, each block": torch_checkpoint,
    "torch checkpoint_sequential, sqrt": torch_checkpoint_sequential,
    "memcnn": memcnn,
    "revtorch": revtorch,
    "revlib": revlib,
}


def step_of(name: str, depth: int, dropout: float, device: str):
    """Return one training step, with gradients allocated and everything warm."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the peers use deprecated names of torch
        model = BUILDERS[name](copy.deepcopy(networks(depth, dropout))).to(device)
    torch.manual_seed(1)
    x = torch.randn(SHAPE, device=device, requires_grad=True)

    def step() -> None:
        model(x).square().mean().backward()

    step()
    for tensor in (x, *model.parameters()):
        tensor.grad.zero_()
    return step


def peak_and_held(step, device: str) -> tuple[int, int]:
    """Return the bytes above the start while `step` runs and after it, by the allocator's events.

    Not by following storages, which does not see memcnn empty them.
    """
    if device != "cpu":
        found = recoup.measure(step, device=device, repeats=0)
        return found.peak_bytes, found.held_bytes
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    now = peak = 0
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak, now


def memory(device: str) -> list[dict]:
    rows = []
    for dropout in (0.0, 0.1):
        for name in installed(BUILDERS):
            if dropout and name == "memcnn":
                continue  # its gradients are wrong with dropout, in silence
            peaks, held = {}, {}
            for depth in (8, 16, 64):
                step = step_of(name, depth, dropout, device)
                peaks[depth], held[depth] = peak_and_held(step, device)
            rows.append(
                {
                    "name": name,
                    "dropout": dropout,
                    "peak_bytes": peaks,
                    "held_bytes": held,
                    "peak_64_over_8": peaks[64] / peaks[8],
                }
            )
    return rows


def seconds(device: str, depth: int = 16, rounds: int = 40) -> list[dict]:
    """Measure processor time on one thread, with all libraries in every round."""
    steps = {name: step_of(name, depth, 0.0, device) for name in installed(BUILDERS)}
    times = in_turn(steps, rounds, device, clock_of(device))
    reference = times["plain"]
    return [
        {
            "name": name,
            "depth": depth,
            "rounds": rounds,
            "min_seconds": min(values),
            "median_seconds": statistics.median(values),
            "min_over_plain": min(values) / min(reference),
            "median_over_plain": ratio(values, reference),
        }
        for name, values in times.items()
    ]


def suite(device: str) -> Iterator[tuple[str, list[dict]]]:
    """Yield the tables; clocks first, since small allocations take longer after a profiler ran."""
    yield "seconds", seconds(device)
    yield "memory", memory(device)
