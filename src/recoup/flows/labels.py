"""Class labels as the context of a conditional flow: one-hot rows."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["one_hot"]


def one_hot(
    labels: Tensor | None, num_classes: int | None, num_samples: int, like: Tensor
) -> Tensor | None:
    """Return the context of a flow for `labels`: ``(N, num_classes)``, or None without classes.

    Args:
        labels: Whole numbers ``(N,)``, 0 to ``num_classes - 1``.
        num_classes: Number of classes of the flow; None for a flow without classes.
        num_samples: N.
        like: A tensor of the type and on the device of the flow.

    Raises:
        ValueError: When labels are missing, unexpected, of another shape or type, or out of range.
    """
    if num_classes is None:
        if labels is not None:
            raise ValueError(
                "`labels` are given, but this flow is not conditional. Leave them out, or build "
                "the flow with `num_classes`."
            )
        return None
    if labels is None:
        raise ValueError(
            f"`labels` are missing: this flow has {num_classes} classes. Give whole numbers of "
            f"shape ({num_samples},), 0 to {num_classes - 1}."
        )
    if not isinstance(labels, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"`labels` is a {type(labels).__name__}, but must be a tensor.")
    if labels.shape != (num_samples,):
        raise ValueError(
            f"`labels` has shape {tuple(labels.shape)}, but must be ({num_samples},): one label a "
            f"sample."
        )
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise ValueError(f"`labels` is of type {labels.dtype}, but must be of whole numbers.")
    labels = labels.to(like.device, torch.long)
    # On CUDA this synchronises; without it a wrong label would be a fatal device error.
    if num_samples and not 0 <= int(labels.min()) <= int(labels.max()) < num_classes:
        raise ValueError(
            f"`labels` holds {int(labels.min())} to {int(labels.max())}, but this flow has "
            f"{num_classes} classes: 0 to {num_classes - 1}. Count them from 0, or build the flow "
            f"with a larger `num_classes`."
        )
    return functional.one_hot(labels, num_classes).to(like.dtype)
