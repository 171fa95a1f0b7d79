"""Training a flow from Python: a plain loop, in the memory that is asked for."""

from __future__ import annotations

import copy
import math
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, cast

import torch
from torch import Tensor, nn

from recoup._arguments import check_flag, check_type, check_whole
from recoup._core.devices import generators_restored
from recoup.flows.flow import Flow
from recoup.flows.networks import check_labels
from recoup.invertible.contract import check_within
from recoup.invertible.preprocess import check_data
from recoup.memory import format_bytes, measure
from recoup.schedules.memory import Memory

Data = Tensor | tuple[Tensor, Tensor]

_MOST_GRADIENT = 10.0  # the norm to which gradients are clipped


@dataclass(frozen=True, slots=True)
class Fitted:
    """The result of training a flow.

    Attributes:
        bits_per_dim: Bits per dimension of the test part, with the weights that were best in
            validation; None if no sample was left to test.
        validation_bits_per_dim: The same of the validation part; infinite if it was finite in no
            epoch, so that the flow has the weights with which it began.
        epochs: Number of epochs that were trained.
        seconds: Seconds of training and validation.
        peak_bytes: Peak of a training step, beyond what was allocated before it.

    Example:
        >>> from recoup.flows import Fitted
        >>> print(Fitted(2.51, 2.5, 5, 12.3, 3 << 20))
        2.510 bits/dim in test, after 5 epochs in 12.3 s, a step in 3 MiB
    """

    bits_per_dim: float | None
    validation_bits_per_dim: float
    epochs: int
    seconds: float
    peak_bytes: int

    def __str__(self) -> str:
        bits = self.bits_per_dim
        tested = "not tested" if bits is None else f"{bits:.3f} bits/dim in test"
        peak = format_bytes(self.peak_bytes)
        return f"{tested}, after {self.epochs} epochs in {self.seconds:.1f} s, a step in {peak}"


def fit(
    flow: Flow,
    images: Data,
    *,
    memory: Memory | None = None,
    epochs: int = 30,
    batch_size: int = 64,
    learning_rate: float = 1e-3,
    validation: float | Data = 0.1,
    test: float | Data = 0.1,
    patience: int = 20,
    seed: int = 0,
    progress: bool = True,
) -> Fitted:
    """Train a flow on samples, by Adam on `Flow.bits_per_dim`.

    The flow is trained in place, on the device where it is, and left in evaluation mode with the
    weights that were best in validation, which are held in CPU memory meanwhile. What a step keeps,
    and what backward pays, is as `memory` says. All draws follow from `seed`, the same in every
    memory mode; the random stream of the caller goes on as if there had been no call.

    Args:
        flow: The flow.
        images: Samples ``(N, *shape)``, whole grey levels if the flow has `levels`; a pair of
            samples and labels ``(N,)`` for a conditional flow.
        memory: Memory mode to set, as for `Chain`: ``"constant"``, ``"1 GiB"``; as it is if None.
        epochs: The most epochs.
        batch_size: Number of samples in a batch.
        learning_rate: The learning rate after 50 steps, in which it rises.
        validation: Part of the samples that validates each epoch, above 0 and below 1; or samples
            of their own, in the form of `images`.
        test: Part of the samples kept for the end, 0 for none; or samples of their own.
        patience: Number of epochs without a better validation after which training ends.
        seed: Seed of the split, of the order of samples, and of all draws.
        progress: Whether to write a line for each epoch to stderr.

    Returns:
        Bits per dimension, epochs, seconds and peak bytes, printable.

    Raises:
        ValueError: When an argument does not fit; it is named.
        BudgetError: When no plan keeps to the bytes given as `memory`.

    Example:
        >>> import torch
        >>> from recoup.flows import RealNVP, fit
        >>> points = torch.randn(400, 2) @ torch.tensor([[1.0, 0.9], [0.0, 0.3]])
        >>> flow = RealNVP((2,), levels=None, num_steps=2, width=8)
        >>> fitted = fit(flow, points, memory="constant", epochs=2, progress=False)
        >>> fitted.epochs, flow.memory, flow.sample(3).shape
        (2, 'constant', torch.Size([3, 2]))
    """
    check_type(Flow, "a Flow", flow=flow)
    check_whole(epochs=epochs, batch_size=batch_size, patience=patience)
    check_whole(-(2**63), most=2**63 - 1, seed=seed)
    check_flag(progress=progress)
    check_within(0, math.inf, 1e-3, learning_rate=learning_rate)
    if torch.is_inference_mode_enabled():
        raise ValueError("`fit` trains, which it cannot in torch.inference_mode. Call it outside.")
    parts = _split(flow, images, validation, test, seed)
    parameters = [parameter for parameter in flow.parameters() if parameter.requires_grad]
    if not parameters:
        raise ValueError(
            "No parameter of `flow` requires a gradient, so there is nothing to train: call "
            "`requires_grad_(True)` on what is to be trained."
        )
    optimizer = torch.optim.Adam(parameters, lr=learning_rate)
    if memory is not None:
        flow.memory = memory
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / 50, total_iters=49)

    def backward(batch: Sequence[Tensor]) -> None:
        optimizer.zero_grad()
        with torch.enable_grad():
            flow.bits_per_dim(*_moved(flow, batch)).mean().backward()

    best, best_weights, num_worse, epoch = math.inf, _weights(flow), 0, 0
    start = time.perf_counter()
    with generators_restored():
        torch.manual_seed(seed)
        try:
            while epoch < epochs and num_worse < patience:
                epoch += 1
                flow.train()
                order = torch.randperm(len(parts["train"][0]))
                for rows in torch.split(order, batch_size):
                    backward([each[rows] for each in parts["train"]])
                    nn.utils.clip_grad_norm_(parameters, _MOST_GRADIENT)
                    optimizer.step()
                    warmup.step()
                bits = _bits(flow, parts["validation"], batch_size, seed)
                num_worse += 1
                if bits < best:
                    best, best_weights, num_worse = bits, _weights(flow), 0
                if progress:
                    print(f"epoch {epoch:>3}: {bits:.3f} bits/dim", file=sys.stderr)  # noqa: T201
            seconds = time.perf_counter() - start
            if not math.isfinite(best):
                warnings.warn(
                    f"No epoch of {epoch} had finite bits per dimension in validation, so `flow` "
                    "has the weights with which it began. Try a smaller `learning_rate`.",
                    stacklevel=2,
                )
            flow.load_state_dict(best_weights)
            tested = _bits(flow, parts["test"], batch_size, seed) if len(parts["test"][0]) else None
            flow.train()
            first = [each[:batch_size] for each in parts["train"]]
            device = parameters[0].device
            peak_bytes = measure(lambda: backward(first), device=device, repeats=0).peak_bytes
            flow.load_state_dict(best_weights)  # buffers that the step changed
        finally:
            optimizer.zero_grad()
            flow.eval()
    return Fitted(tested, best, epoch, seconds, peak_bytes)


def _weights(flow: Flow) -> dict[str, Any]:
    state: dict[str, Any] = flow.state_dict()  # whose extra states are of any kind
    return {
        name: value.detach().cpu().clone() if isinstance(value, Tensor) else copy.deepcopy(value)
        for name, value in state.items()
    }


def _moved(flow: Flow, batch: Sequence[Tensor]) -> list[Tensor]:
    like = flow.base.like
    x, *labels = batch
    # Grey levels keep their type: a half would round them.
    x = x.to(like) if flow.levels is None else x.to(like.device)
    return [x, *(each.to(like.device) for each in labels)]


@torch.no_grad()
def _bits(flow: Flow, part: list[Tensor], batch_size: int, seed: int) -> float:
    """Return the mean bits per dimension of a part, with the same noise each time."""
    flow.eval()
    with generators_restored():
        torch.manual_seed(seed)
        batches = zip(*(torch.split(each, batch_size) for each in part), strict=True)
        bits = torch.cat([flow.bits_per_dim(*_moved(flow, batch)) for batch in batches])
    return float(bits.double().mean())


def _split(
    flow: Flow, images: Data, validation: float | Data, test: float | Data, seed: int
) -> dict[str, list[Tensor]]:
    """Return the samples of each part, and their labels; parts that are fractions are drawn."""
    train = _checked(flow, "images", images)
    num_samples = len(train[0])
    order = torch.randperm(num_samples, generator=torch.Generator().manual_seed(seed))
    parts: dict[str, list[Tensor]] = {}
    for name, part in {"test": test, "validation": validation}.items():
        if not isinstance(part, Real):
            parts[name] = _checked(flow, name, cast("Data", part))
            continue
        fraction = cast("float", part)
        if name == "validation" or fraction != 0:
            check_within(0, 1, 0.1, **{name: fraction})
        count = max(round(fraction * num_samples), 1 if name == "validation" else 0)
        parts[name] = [each[order[:count]] for each in train]
        order = order[count:]
    if not len(order):
        raise ValueError(
            f"`images` has {num_samples} samples, and none are left to train on. Give more, or "
            "smaller fractions as `validation` and `test`."
        )
    return {**parts, "train": [each[order] for each in train]}


def _checked(flow: Flow, name: str, data: object) -> list[Tensor]:
    """Return samples, and labels if there are classes, or raise if they do not fit the flow."""
    pair = list(cast("tuple[object, ...]", data)) if isinstance(data, tuple) else [data]
    tensors = [each.detach() for each in pair if isinstance(each, Tensor)]
    is_conditional = flow.num_classes is not None
    fits = len(tensors) == len(pair) == 1 + is_conditional
    if not fits or tensors[0].shape[1:] != flow.shape or not len(tensors[0]):
        got = [f"{type(each).__name__} {tuple(getattr(each, 'shape', ()))}" for each in pair]
        needed = "a pair of samples and labels" if is_conditional else "a tensor"
        raise ValueError(
            f"`{name}` is {', '.join(got)}, but must be {needed} for a flow of {flow.num_classes} "
            f"classes and shape (N, {', '.join(map(str, flow.shape))}). torch.from_numpy makes a "
            "tensor of an array."
        )
    x, *labels = tensors
    if not x.isfinite().all():
        raise ValueError(f"`{name}` has values that are not finite. Remove these samples.")
    if flow.levels is not None:
        check_data(x, flow.levels, name)
    for each in labels:
        check_labels(each, flow.num_classes or 0, len(x), f"{name}[1]")
    return [x, *labels]
