"""A language model whose output layer and loss run in pieces, as other libraries do it.

The ways of benchmarks/tiles.py, and TRL's own kernel, which `make bench` installs alone. Each is
measured with the blocks as they are, and with each block a checkpoint, as users of these
libraries combine them.
"""

import contextlib
import importlib.util
import sys
import types
from collections.abc import Callable

import tiles
from plan_models import Case
from plan_rivals import Forward, NotForThisError, transformers
from torch import Tensor, nn

NUM_TILES = 16
TRL_WORDS = 2048  # of a tile; TRL has 32,768, which would be all words at once


def trl(head: nn.Module, hidden: Tensor, labels: Tensor) -> Tensor:
    """Return the loss by the kernel of TRL's trainers, which cuts the vocabulary.

    `trl.trainer.utils`, from which the kernel takes a context for the shards of DeepSpeed, asks
    for pandas and datasets: an empty context stands in for it.
    """
    from trl.kernels import ChunkedLogProbFunction

    stand_in = types.ModuleType("trl.trainer.utils")
    stand_in.maybe_gather_lm_head_ctx = lambda *_: contextlib.nullcontext()
    sys.modules.setdefault(stand_in.__name__, stand_in)
    rows, targets = hidden.flatten(0, 1), labels.flatten()
    mask = targets != -100
    found = ChunkedLogProbFunction.apply(
        rows, head.weight, head.bias, targets.clamp(min=0), 1.0, TRL_WORDS, None, 1.0, ()
    )
    return -found[0].masked_fill(~mask, 0).sum() / mask.sum()


def with_loss(way: tiles.Way, *, checkpoints: bool) -> Callable[[Case], Forward]:
    """Return a change to a model of transformers with labels: its head and loss by `way`."""

    def change(case: Case) -> Forward:
        if way is trl and importlib.util.find_spec("trl") is None:
            raise NotForThisError("It is not installed.")
        if checkpoints:
            transformers()(case)

        def forward() -> Tensor:
            kwargs = dict(case.kwargs)
            labels = kwargs.pop("labels")
            hidden = case.model.base_model(**kwargs).last_hidden_state
            return way(case.model.get_output_embeddings(), hidden[:, :-1], labels[:, 1:])

        return forward

    return change


WAYS: dict[str, tiles.Way] = {
    "TRL's loss": trl,
    "loss in checkpoints": tiles.chunked(NUM_TILES),
    "ALST's loss": tiles.fused_logits_loss(NUM_TILES),
    "Liger's loss": tiles.fused_linear_cross_entropy(NUM_TILES),
}
HEADS: dict[str, Callable[[Case], Forward]] = {
    name + ending: with_loss(way, checkpoints=bool(ending))
    for ending in ("", ", transformers")
    for name, way in WAYS.items()
}
