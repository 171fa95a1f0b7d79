"""Training a flow that is given as an object; `recoup.flows.fit` calls this."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from os import PathLike
from typing import Any, cast

from torch import Tensor

from recoup.flows import Flow
from recoup.recipes.flow.data import Batch, SampleBatches
from recoup.recipes.flow.reading import Samples
from recoup.recipes.flow.steps import MONITOR, TRAINER, FlowSteps, measured_step
from recoup.recipes.given_run import check_given, fitted

__all__ = ["train_given"]


def train_given(
    flow: Flow,
    data: Batch,
    *,
    memory: Any,
    validation: float | Batch,
    test: float | Batch,
    epochs: int,
    patience: int,
    batch_size: int,
    seed: int,
    out: str | PathLike[str] | None,
    progress: bool,
    trainer: Mapping[str, Any] | None,
    **settings: Any,
) -> dict[str, Any]:
    """Train a flow, and return the results. `recoup.flows.fit` explains the arguments."""
    check_given(FlowSteps, train_given, seed=seed, trainer=trainer, settings=settings)
    if not isinstance(flow, Flow):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"`flow` is of type {type(flow).__name__}, but must be a Flow.")
    given = {"images": data, "validation": validation, "test": test}
    parts = {
        name: _checked(flow, name, part)
        for name, part in given.items()
        if name == "images" or not isinstance(part, Real)
    }
    samples = Samples(
        "`images`",
        flow.levels,
        parts["images"][0],
        validation=parts["validation"][0] if "validation" in parts else None,
        test=parts["test"][0] if "test" in parts else None,
        labels={_PARTS[name]: labels for name, (_, labels) in parts.items() if labels is not None},
    )
    batches = SampleBatches(
        samples,
        validation_fraction=_fraction("validation", validation),
        test_fraction=_fraction("test", test),
        batch_size=batch_size,
        seed=seed,
        conditional=flow.num_classes is not None,
    )
    if memory is not None:
        flow.memory = memory
    return fitted(
        FlowSteps(flow, seed=seed, **settings),
        batches,
        module=flow,
        monitor=MONITOR,
        step=measured_step,
        epochs=epochs,
        patience=patience,
        out=out,
        progress=progress,
        trainer={**TRAINER, **(trainer or {})},
        memory=getattr(flow.memory, "name", flow.memory),  # that of a schedule
    )


_PARTS = {"images": "train", "validation": "validation", "test": "test"}


def _fraction(name: str, part: float | Batch) -> float:
    """Return a fraction; that of the recipe for a part of its own, which is not cut off."""
    if not isinstance(part, Real):
        return 0.1
    fraction = float(cast("Any", part))
    if not 0 <= fraction < 1 or (name == "validation" and not fraction):  # a test is optional
        raise ValueError(
            f"`{name}` is {part}, but as a fraction of the samples must lie between 0 and 1. Try "
            "0.1, or give the samples themselves."
        )
    return fraction


def _checked(flow: Flow, name: str, batch: object) -> tuple[Tensor, Tensor | None]:
    """Return the samples and labels of a part; raise a ValueError if they do not fit the flow."""
    pair: list[Any] = list(batch) if isinstance(batch, tuple) else [batch]
    if len(pair) not in (1, 2) or not all(isinstance(each, Tensor) for each in pair):
        shown = ", ".join(type(each).__name__ for each in pair)
        needed = "a tensor" if name == "images" else "a fraction, a tensor"
        raise ValueError(
            f"`{name}` is of type {shown}, but must be {needed}, or a pair of samples and labels. "
            "torch.from_numpy makes a tensor of an array."
        )
    x: Tensor = pair[0]
    labels: Tensor | None = pair[1] if len(pair) > 1 else None
    if x.shape[1:] != flow.shape:
        raise ValueError(
            f"`{name}` has shape {tuple(x.shape)}, but the flow is for (N, "
            f"{', '.join(map(str, flow.shape))}). Resize it, or build the flow "
            "with another `shape`."
        )
    needs_labels = flow.num_classes is not None
    if needs_labels != (labels is not None):
        raise ValueError(
            f"`{name}` comes {'without' if needs_labels else 'with'} labels, but the flow has "
            f"`num_classes` {flow.num_classes}. Give "
            f"{'a pair of samples and labels' if needs_labels else 'the samples alone'}."
        )
    _check_values(flow, name, x)
    if labels is not None and labels.is_floating_point():
        raise ValueError(
            f"`{name}` has labels of type {labels.dtype}, but must have whole numbers below "
            f"{flow.num_classes}, such as labels.long()."
        )
    if labels is not None and labels.shape != x.shape[:1]:
        raise ValueError(
            f"`{name}` has {len(x)} samples and labels of shape {tuple(labels.shape)}, but each "
            f"sample needs one: ({len(x)},)."
        )
    x = x.detach().cpu()
    if flow.levels is None:
        x = x.to(next(flow.parameters()).dtype)
    return x, None if labels is None else labels.detach().cpu()


def _check_values(flow: Flow, name: str, x: Tensor) -> None:
    """Raise a ValueError if one of all values is none that the flow can be trained on."""
    if flow.levels is None:
        if not x.isfinite().all():
            raise ValueError(f"`{name}` has values that are not finite. Remove these samples.")
    elif x.numel() and not ((x >= 0) & (x < flow.levels) & (x == x.round())).all():
        raise ValueError(
            f"`{name}` has values from {x.min():g} to {x.max():g}, but must have whole grey levels "
            f"from 0 to {flow.levels - 1}, since the flow has `levels` {flow.levels}."
        )
