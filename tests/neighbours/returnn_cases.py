"""RETURNN: our blocks in its parametrizations of weights, and its own over our blocks.

Its own scopes leave saved-tensor hooks in force for a while, so `test_returnn.py` runs these in a
process of their own.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

import recoup
from recoup._core.storage_tracking import StorageTracker
from recoup.regions.blocks import recomputing

STATE = torch.get_rng_state().numel()
SMALL = 64  # losses and seeds


# It asks torch for things by names of old, and leaves files open when it is imported first.
pytestmark = [
    pytest.mark.filterwarnings(f"ignore::{name}")
    for name in ("DeprecationWarning", "ResourceWarning", "pytest.PytestUnraisableExceptionWarning")
]


@pytest.fixture
def rf():
    import returnn.frontend as module  # pyright: ignore[reportMissingImports]

    module.select_backend_torch()
    module.init_train_step_run_ctx(train_flag=True, step=0, epoch=1)
    return module


class Noise:
    """As `rf.WeightNoise`, with our block in the place of RETURNN's scope; and with dropout."""

    def __init__(self, rf, context=recomputing):
        self.rf, self.context = rf, context

    def __call__(self, weight):
        with self.context():
            weight = self.rf.dropout(weight, 0.3, on_forward=True)
            return weight + self.rf.random_normal(weight.dims, stddev=0.1, like=weight)


class Returnn:
    """A layer of RETURNN with its input, and steps of it."""

    def __init__(self, rf, kind):
        time, inner = rf.Dim(5, name="time"), rf.Dim(64, name="in")
        outer, dims = rf.Dim(64, name="out"), [rf.Dim(8, name="batch"), time, inner]
        self.x = rf.Tensor("x", dims=dims, dtype="float32", feature_dim=inner)
        torch.manual_seed(1)
        if kind == "Linear":
            self.names, self.layer = ("weight",), rf.Linear(inner, outer)
            self.call = self.layer
        else:
            self.names, self.layer = ("ff_weight", "rec_weight"), rf.LSTM(inner, outer)
            state = self.layer.default_initial_state(batch_dims=dims[:1])
            self.call = lambda x: self.layer(x, state=state, spatial_dim=time)[0]

    def run(self):
        """Return the gradients, and the bytes that forward left."""
        torch.manual_seed(2)
        self.x.raw_tensor = torch.randn(8, 5, 64).requires_grad_()
        parameters = {name: value.raw_tensor for name, value in self.layer.named_parameters()}
        with StorageTracker() as tracker:
            loss = self.call(self.x).raw_tensor.square().sum()
        held = tracker.current_bytes
        torch.rand(3)
        return torch.autograd.grad(loss, list(parameters.values())), held


@pytest.mark.parametrize("whose", ["ours", "theirs"])
@pytest.mark.parametrize("kind", ["Linear", "LSTM"])
def test_noisy_weights_hold_states_and_losses_alone(rf, kind, whose, monkeypatch):
    """By our block in a parametrization; or by one line in a setup, by those of RETURNN."""
    from returnn.torch.frontend import TorchBackend

    layer = Returnn(rf, kind)
    (_, plain_held), found = layer.run(), []
    for context in (nullcontext, recomputing):
        if whose == "theirs" and context is recomputing:
            monkeypatch.setattr(TorchBackend, "gradient_checkpoint_scope", staticmethod(context))
        for name in layer.names:
            if whose == "ours":
                rf.register_parametrization(layer.layer, name, Noise(rf, context))
            else:
                rf.weight_noise(layer.layer, name, std=0.1)
        found.append(layer.run())
        for name in layer.names:
            rf.remove_parametrization(layer.layer, name)
    (want, kept_held), (found, held) = found
    assert all(map(torch.equal, found, want))
    assert whose == "theirs" or kept_held >= plain_held + 64 * 64 * 4
    assert held <= min(kept_held, plain_held + len(layer.names) * STATE + SMALL)


def test_the_module_of_a_model_is_refused(rf):
    from returnn.torch.frontend.bridge import rf_module_to_pt_module

    module = rf_module_to_pt_module(rf.Linear(rf.Dim(4, name="in"), rf.Dim(3, name="out")))
    with pytest.raises(ValueError, match="read their own parameters"):
        recoup.weight_noise(module)
