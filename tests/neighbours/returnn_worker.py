"""RETURNN: our blocks in its parametrizations of weights, and its own over our blocks.

Its own scopes leave saved-tensor hooks in force for a while, so this is a process of its own.
"""

from __future__ import annotations

from contextlib import nullcontext
from itertools import product
from unittest import mock

import pytest
import returnn.frontend as rf  # pyright: ignore[reportMissingImports]
import torch
from returnn.torch.frontend import TorchBackend  # pyright: ignore[reportMissingImports]
from returnn.torch.frontend.bridge import (  # pyright: ignore[reportMissingImports]
    rf_module_to_pt_module,
)

import recoup
from recoup._core.storage_tracking import StorageTracker
from recoup.regions.blocks import recomputing

STATE = torch.get_rng_state().numel()
SMALL = 64  # losses and seeds


class Noise:
    """As `rf.WeightNoise`, with our block in the place of RETURNN's scope; and with dropout."""

    def __init__(self, context):
        self.context = context

    def __call__(self, weight):
        with self.context():
            weight = rf.dropout(weight, 0.3, on_forward=True)
            return weight + rf.random_normal(weight.dims, stddev=0.1, like=weight)


class Returnn:
    def __init__(self, kind):
        time, inner = rf.Dim(5, name="time"), rf.Dim(64, name="in")
        outer, dims = rf.Dim(64, name="out"), [rf.Dim(8, name="batch"), time, inner]
        self.x = rf.Tensor("x", dims=dims, dtype="float32", feature_dim=inner)
        torch.manual_seed(1)
        self.layer = self.call = getattr(rf, kind)(inner, outer)
        self.names = ["weight"]
        if kind == "LSTM":
            self.names = ["ff_weight", "rec_weight"]
            state = self.layer.default_initial_state(batch_dims=dims[:1])
            self.call = lambda x: self.layer(x, state=state, spatial_dim=time)[0]

    def run(self):
        """Return the gradients, and the bytes that forward left."""
        torch.manual_seed(2)
        self.x.raw_tensor = torch.randn(8, 5, 64).requires_grad_()
        parameters = [value.raw_tensor for _, value in self.layer.named_parameters()]
        with StorageTracker() as tracker:
            loss = self.call(self.x).raw_tensor.square().sum()
        held = tracker.current_bytes
        torch.rand(3)
        return torch.autograd.grad(loss, parameters), held


def noisy_weights_hold_states_and_losses_alone(kind, is_ours):
    """By our block in a parametrization; or by one line in a setup, by those of RETURNN."""
    layer = Returnn(kind)
    (_, plain_held), found = layer.run(), []
    for context in (nullcontext, recomputing):
        scope = recomputing if context is recomputing else TorchBackend.gradient_checkpoint_scope
        with mock.patch.object(TorchBackend, "gradient_checkpoint_scope", staticmethod(scope)):
            for name in layer.names:
                if is_ours:
                    rf.register_parametrization(layer.layer, name, Noise(context))
                else:
                    rf.weight_noise(layer.layer, name, std=0.1)
            found.append(layer.run())
        for name in layer.names:
            rf.remove_parametrization(layer.layer, name)
    (want, kept_held), (found, held) = found
    assert all(map(torch.equal, found, want))
    assert not is_ours or kept_held >= plain_held + 64 * 64 * 4
    assert held <= min(kept_held, plain_held + len(layer.names) * STATE + SMALL)


if __name__ == "__main__":
    rf.select_backend_torch()
    rf.init_train_step_run_ctx(train_flag=True, step=0, epoch=1)
    for case in product(("Linear", "LSTM"), (True, False)):
        noisy_weights_hold_states_and_losses_alone(*case)
    module = rf_module_to_pt_module(rf.Linear(rf.Dim(4, name="in"), rf.Dim(3, name="out")))
    with pytest.raises(ValueError, match="read their own parameters"):
        recoup.weight_noise(module)
