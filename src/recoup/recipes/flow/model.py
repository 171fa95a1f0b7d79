"""The training of a flow that is built from settings."""

from __future__ import annotations

from typing import Literal

from recoup.recipes.flow.builders import FLOW_SETTINGS, FlowName, build_flow
from recoup.recipes.flow.steps import FlowSteps

__all__ = ["FlowTraining"]


class FlowTraining(FlowSteps):
    """Train a flow on pictures or points: the loss is bits per dimension, in a memory you choose.

    Logged for each epoch, for training (``train_``) and validation (``val_``), and for ``test_``:
    `bits_per_dim` and its two parts, `latent` and `log_det`, which add up to it; for points in the
    plane also `nats_per_point`, the mean of ``-log p(x)``.

    All randomness of a step (dequantization noise, dropout) follows from `seed`, the epoch and
    the number of the batch: a resumed run draws what the uninterrupted one would have drawn, and
    each epoch is validated with the same noise.

    A setting of the flow that is not given has the default of its builder; one that the flow does
    not have is an error.

    Args:
        shape: Shape ``(C, H, W)`` of a picture, or ``(2,)`` of points.
        levels: Number of grey levels; None for points.
        num_classes: Number of classes of the data, if the flow is conditional.
        flow: Which flow.
        conditional: Whether the density is that of a class: the data need labels.
        num_levels: Number of scales; H and W are halved at each.
        num_steps: Number of steps of the flow at each scale.
        num_couplings: Number of couplings, for nice.
        width: Channels inside the networks.
        depth: Depth of the networks, for all but glow.
        coupling: Kind of coupling, for glow.
        dropout: Probability of dropout inside the networks.
        num_components: Number of logistics that are mixed, for flowpp.
        alpha: Margin of the logit that comes first, for pictures and all but nice.
        variational: Whether the noise of dequantization is learned, for flowpp.
        coefficient: Bound on the Lipschitz constant of a block, for iresnet.
        log_det: How the log-determinant is computed, for iresnet.
        exact: Whether couplings are inverted to the bit, for nice.
        memory: What backward remembers: "linear", "sqrt", "log", "constant", a number of slots, or
            the most bytes that a step of the chain may take, as "1 GiB".
        optimizer: The optimizer.
        learning_rate: The learning rate after the warm-up.
        num_warmup_steps: Number of steps in which the learning rate rises from 0.
        num_decay_steps: Number of the step at which the learning rate, falling along a cosine, has
            reached 0; None to let it stay.
        seed: Seed of the draws of all steps.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        levels: int | None,
        num_classes: int | None = None,
        flow: FlowName = "glow",
        conditional: bool = False,
        num_levels: int | None = None,
        num_steps: int | None = None,
        num_couplings: int | None = None,
        width: int | None = None,
        depth: int | None = None,
        coupling: Literal["affine", "additive"] | None = None,
        dropout: float | None = None,
        num_components: int | None = None,
        alpha: float | None = None,
        variational: bool | None = None,
        coefficient: float | None = None,
        log_det: Literal["exact", "series", "unbiased"] | None = None,
        exact: bool | None = None,
        memory: int | str = "linear",
        optimizer: Literal["adam", "adamax"] = "adam",
        learning_rate: float = 1e-3,
        num_warmup_steps: int = 50,
        num_decay_steps: int | None = None,
        seed: int = 0,
    ) -> None:
        given = dict(locals())
        built = build_flow(
            flow,
            shape,
            levels=levels,
            num_classes=num_classes,
            memory=memory,
            settings={name: given[name] for name in FLOW_SETTINGS},
        )
        super().__init__(built, optimizer, learning_rate, num_warmup_steps, num_decay_steps, seed)
        self.save_hyperparameters()
