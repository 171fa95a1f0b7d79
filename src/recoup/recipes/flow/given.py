"""Training a flow that is given as an object; `recoup.flows.fit` calls this."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from recoup.flows import Flow
from recoup.recipes.flow.data import Batch, SampleBatches
from recoup.recipes.flow.reading import Samples
from recoup.recipes.flow.steps import MONITOR, TRAINER, FlowSteps, measured_step
from recoup.recipes.given_run import fitted

__all__ = ["train_given"]

_FRACTION = 0.1


def train_given(
    flow: Flow,
    data: Batch,
    *,
    validation: float | Batch,
    test: float | Batch,
    epochs: int,
    patience: int,
    batch_size: int,
    seed: int,
    out: str | Path | None,
    progress: bool,
    trainer: Mapping[str, Any] | None,
    **settings: Any,
) -> dict[str, Any]:
    """Train a flow, and return the results. `recoup.flows.fit` explains the arguments."""
    parts = {"images": data, "validation": validation, "test": test}
    given = {name: part for name, part in parts.items() if not isinstance(part, (int, float))}
    pairs = {name: _checked(flow, name, cast("Batch", part)) for name, part in given.items()}
    fractions = {
        f"{name}_fraction": _FRACTION if name in given else float(cast("float", parts[name]))
        for name in ("validation", "test")
    }
    samples = Samples(
        "`images`",
        flow.levels,
        **{_PARTS[name]: rows for name, (rows, _) in pairs.items()},  # pyright: ignore[reportArgumentType]
        labels={_PARTS[name]: labels for name, (_, labels) in pairs.items() if labels is not None},
    )
    batches = SampleBatches(
        samples,
        **fractions,
        batch_size=batch_size,
        seed=seed,
        conditional=flow.num_classes is not None,
    )
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
        memory=flow.memory,
    )


_PARTS = {"images": "train", "validation": "validation", "test": "test"}


def _checked(flow: Flow, name: str, batch: Batch) -> tuple[Tensor, Tensor | None]:
    """Return the samples and labels of a part; raise a ValueError if they do not fit the flow."""
    x, labels = (batch, None) if isinstance(batch, Tensor) else batch
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
    if labels is not None and labels.shape != x.shape[:1]:
        raise ValueError(
            f"`{name}` has {len(x)} samples and labels of shape {tuple(labels.shape)}, but each "
            f"sample needs one: ({len(x)},)."
        )
    return x.detach().cpu(), None if labels is None else labels.detach().cpu()
