"""Row dropout of embeddings, applied to the rows that were looked up and not to a copy of all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from recoup._core.saved_tensors import is_transformed
from recoup.weights.forwards import Forward, frames

__all__ = ["forward_by_rows"]


def forward_by_rows(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a forward of an embedding that drops rows of its output where only rows are dropped.

    A custom forward may do more with the weight; it reads a weight whose rows are dropped.
    """
    if forward is not nn.Embedding.forward:
        return forward

    def run(self: nn.Embedding, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        around = frames()
        top = around[-1] if around else None
        if not isinstance(top, Forward) or top.owner is not self or is_transformed():
            return forward(self, input, *args, **kwargs)  # not in progress: it reads the parameter
        place = self.__dict__["_recoup_attached"].places.get("weight")
        if place is None:
            return forward(self, input, *args, **kwargs)
        drawn = place.drawn(self, self._parameters["weight"])
        if len(drawn) != 1 or not drawn[0].step.drops_rows:
            return forward(self, input, *args, **kwargs)
        top.reads_raw = True
        try:
            rows = forward(self, input, *args, **kwargs)
        finally:
            top.reads_raw = False
        return drawn[0].step.apply_to_rows(rows, input, self.num_embeddings, drawn[0])

    return run
