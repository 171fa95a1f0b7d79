"""R4: weights outside of a forward of the tree: one step in a context, and no silence otherwise."""

from __future__ import annotations

import copy
import io
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grad_norm_, parameters_to_vector

import recoup
from recoup.weights import applied, disabled, same_draw, step
from tests.unit.weights.plain_run import mask, recorded


class Tagger(nn.Module):
    """A model with methods beside its forward."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(9, 4)
        self.encoder = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.randn(4, 4))

    def encode(self, ids):
        return self.encoder(self.embedding(ids)).tanh()

    def scaled(self, x):
        return x @ self.scale

    def tags(self, x):
        return F.linear(x, self.embedding.weight)

    def training_step(self, ids):
        return self.tags(self.scaled(self.encode(ids))).square().mean()

    def forward(self, ids):
        return self.training_step(ids)

    def penalty(self):
        return self.scale.square().sum() + self.embedding.weight.norm()

    def reset_parameters(self):
        nn.init.ones_(self.scale)

    def tie(self):
        self.encoder.weight = self.scale

    def configure_optimizers(self):
        return torch.optim.SGD([self.scale, self.embedding.weight], lr=0.1)

    def of_type(self, x):
        if isinstance(self.scale, torch.Tensor) and self.scale is not None:
            assert len(self.scale) == 4
        return x.to(self.scale.dtype).to(self.scale.device)


ALL = r".*weight|scale"


def ids():
    return torch.tensor([[1, 2, 3], [3, 4, 8]])


@pytest.fixture
def said():
    """The warnings of a test, all of them."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield found


# -- what is said ----------------------------------------------------------------------------------


def test_a_weight_read_by_a_method(said):
    """R4: read in `encode` or `training_step`, where no forward is in progress."""
    model = recoup.weight_noise(Tagger(), ALL)
    for _ in range(3):
        model.scaled(torch.randn(2, 4))
    assert len(said) == 1, "it is said once"
    text = str(said[0].message)
    assert "`scale` of Tagger was read by `Tagger.scaled`" in text
    assert "recoup.weights.step(model)" in text
    assert said[0].filename == __file__


def test_weights_in_a_list_read_by_a_method(said):
    """R4: also in a comprehension, from a list of parameters."""

    class Listed(nn.Module):
        def __init__(self):
            super().__init__()
            self.scales = nn.ParameterList(torch.ones(4) for _ in range(3))

        def scaled(self, x):
            return sum(x * self.scales[place] for place in range(3))

        def forward(self, x):
            return self.scaled(x)

    model = recoup.weight_noise(Listed(), r"scales\.\d")
    assert model.scales[1] is model.scales._parameters["1"]
    model(torch.ones(4))
    assert not said
    model.scaled(torch.ones(4))
    assert len(said) == 1


def test_a_weight_read_by_the_parent(said):
    """R4: applied to the embedding alone, whose parent reads its weight as that of a decoder."""
    model = Tagger()
    recoup.weight_noise(model.embedding)
    model(ids()).backward()
    assert ["was read by `Tagger.tags`" in str(each.message) for each in said] == [True]


def test_the_ways_out_of_a_weight_read_by_the_parent():
    """R4: what the warning names is silent, and noisy or raw as it says."""
    noisy = recoup.weight_dropout(Tagger(), r"embedding\.weight", p=1.0)
    assert noisy(ids()) == 0
    alone = Tagger()
    recoup.weight_dropout(alone.embedding, p=1.0)
    x = torch.randn(2, 4)
    with step(alone):
        assert torch.count_nonzero(alone.tags(x)) == 0
    with disabled(alone):
        assert torch.count_nonzero(alone.tags(x)) > 0
    assert alone.embedding.get_parameter("weight") is alone.embedding._parameters["weight"]


@pytest.mark.parametrize("apply", [recoup.weight_dropout, recoup.weight_noise])
def test_two_calls_of_a_tied_encoder(said, apply):
    """R4: they draw apart where no forward of the tree is around them."""
    model = apply(Tagger(), r".*weight")
    a = model.encode(ids())
    assert not said
    b = model.encode(ids())
    assert not torch.equal(a, b)
    assert len(said) == 1
    assert "Several modules of the tree" in str(said[0].message)
    assert said[0].filename == __file__
    for _ in range(3):
        model.encode(ids())
    assert len(said) == 1


def test_a_schedule_that_would_count_parts(said):
    """R4: parts of one step count as steps of their own."""
    model = recoup.weight_noise(Tagger(), r"e.*weight", std=lambda step: 0.1)
    model.encode(ids())
    assert ["counts as a step" in str(each.message) for each in said] == [True]
    layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))  # has no forward of its own
    recoup.weight_noise(layers, r".*weight", std=lambda step: 0.1)
    layers[1](layers[0](torch.randn(2, 4)))
    assert len(said) == 2


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
def test_a_norm_that_is_not_applied_in_evaluation(said, grad):
    """R4: the direction alone is no weight in evaluation either."""
    model = recoup.weight_norm(Tagger(), "scale").eval()
    with torch.set_grad_enabled(grad):
        model.scaled(torch.randn(2, 4))
    assert len(said) == 1


def test_the_fast_path_of_an_encoder_layer(said):
    """R4: torch reads the weights of what is in the layer, and does not call it."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    recoup.weight_norm(layer.linear1)
    with torch.no_grad():
        layer.eval()(torch.randn(1, 3, 8))
    assert any("TransformerEncoderLayer" in str(each.message) for each in said)


def test_what_wants_the_parameter_is_not_told(said):
    """R4: optimizers, sums of squares, initialisation, ties, types, copies, states, clipping."""
    model = recoup.weight_noise(Tagger(), ALL)
    optimizer = model.configure_optimizers()
    model(ids()).backward()
    (model.penalty() + model(ids())).backward()
    clip_grad_norm_(model.parameters(), 1.0)
    clip_grad_norm_([model.scale, model.embedding.weight], 1.0)
    optimizer.step()
    parameters_to_vector(model.parameters())
    model.reset_parameters()
    model.of_type(torch.randn(2))
    copy.deepcopy(model).load_state_dict(model.state_dict())
    torch.save(model.state_dict(), io.BytesIO())
    nn.init.normal_(model.embedding.weight)
    torch.optim.swa_utils.AveragedModel(model).update_parameters(model)
    model.tie()
    assert model.encoder.weight is model.scale is model._parameters["scale"]
    model.eval()
    model.scaled(model.encode(ids()))  # nothing is drawn in evaluation
    assert [str(each.message) for each in said] == []


def test_parts_that_have_a_backward_each_are_not_told(said):
    """R4: one part that is called once in a step, with a schedule, as in many training loops."""
    model = recoup.weight_noise(Tagger(), r".*weight", std=lambda step: 0.1)
    for _ in range(3):
        model.encoder(torch.randn(2, 4)).sum().backward()
        model.encoder(torch.randn(2, 4))  # and its graph is dropped
    assert applied(model)[0].step == 6
    with same_draw():
        model.encode(ids()) + model.encode(ids())
    assert applied(model)[0].step == 7
    teacher = copy.deepcopy(model)
    with torch.no_grad():
        teacher.encode(ids()), teacher.encode(ids())
    assert [str(each.message) for each in said] == []


class Trains:
    """What is not a model, and reads a weight in a method of its own."""

    def __init__(self, layer):
        self.layer = layer

    def reads_with_its_names(self):
        names = locals()
        (self.layer.weight if names else self).register_hook(lambda gradient: gradient)
        return list(names)

    def reads(self):
        loss = torch.ones(3)
        seen = weakref.ref(loss)
        # Nothing is asked of the weight at once, so that who reads it is looked at.
        (self.layer.weight if seen else loss).register_hook(lambda gradient: gradient)
        del loss
        return seen()


def test_a_read_keeps_no_variables_of_who_reads(said):
    reader = Trains(recoup.weight_noise(nn.Linear(3, 3)))
    assert reader.reads() is None
    assert "self" in reader.reads_with_its_names()
    assert not said


# -- one step --------------------------------------------------------------------------------------


def test_a_step_is_one_forward():
    """R4: one draw a weight, wherever it is read, and the gradients of the forward."""
    model = recoup.weight_noise(recoup.weight_dropout(Tagger(), ALL), ALL, std=0.1)
    found = []
    for run in (model, step(model)(model.training_step)):
        model.zero_grad()
        with same_draw(seed=3), recorded() as made:
            loss = run(ids())
        assert len(made) == 6
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    assert len(found[0]) == 5
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_two_calls_in_a_step_share_their_draw():
    """R4: and the next step has another; gradients are those of the weights that were used."""
    model = recoup.weight_dropout(Tagger(), "scale")
    x, seen = torch.randn(2, 4), []
    for _ in range(2):
        model.zero_grad()
        with step(model), recorded() as made:
            a, b = model.scaled(x), model.scaled(x)
        assert torch.equal(a, b)
        assert len(made) == 1
        (a + b).sum().backward()
        factor = mask(model.scale, made[0])
        want = 2 * x.sum(0)[:, None] * factor
        torch.testing.assert_close(model.scale.grad, want)
        seen.append(a)
    assert not torch.equal(*seen)


def test_steps_are_counted_once():
    """R4: three steps of five parts are steps 0, 1 and 2 of a schedule."""
    seen = []
    model = recoup.weight_noise(Tagger(), ALL, std=lambda number: seen.append(number) or 0.1)
    seen.clear()
    for _ in range(3):
        with step(model):
            loss = model.training_step(ids()) + model.training_step(ids())
        loss.backward()
    assert sorted(set(seen)) == [0, 1, 2]
    assert len(seen) == 9, "asked once for each weight and step"
    assert applied(model)[0].step == 3


def test_a_step_keeps_no_noisy_weight():
    """R4: as in a forward, nothing is kept for it but a seed."""

    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(64, 64))

        def used(self, x):
            return F.linear(x, self.weight)

        def forward(self, x):
            return self.used(x)

    model = recoup.weight_dropout(Wide())
    x = torch.randn(2, 64, requires_grad=True)

    def run():
        with step(model):
            return model.used(x).sum()

    assert recoup.measure(run).held_bytes < 64 * 64
    run().backward()
    with recorded() as made, step(model):
        y = model.used(x)
    weight = model.weight * mask(model.weight, made[0])
    assert torch.equal(y, F.linear(x, weight))
    (gradient,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(gradient, weight.sum(0).expand(2, -1))


def test_the_extent_of_a_step():
    """R4: of the outermost one, of a part for the whole, ended by an exception, without effect on
    evaluation or on a model to which nothing is applied."""
    model = recoup.weight_dropout(Tagger(), ALL)
    raw = model.scale
    with step(model):
        outer = model.scale
        with step(model):
            assert torch.equal(model.scale, outer)
        assert torch.equal(model.scale, outer)
    with step(model.encoder):  # a part of the tree that it was applied to
        assert torch.equal(model.encoder.weight, model.encoder.weight)
        assert torch.equal(model.scale, model.scale)
    with pytest.raises(RuntimeError, match="on purpose"), step(model):
        raise RuntimeError("on purpose")
    assert model.scale is raw
    with step(model.eval()), step(nn.Linear(2, 2)):
        assert model.scale is raw
    with pytest.raises(ValueError, match=r"`module` is int"), step(3):
        pass


def test_a_lightning_module():
    """R4: a training step that calls its parts and reads their weights."""
    lightning = pytest.importorskip("lightning", reason="needs lightning")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = recoup.weight_noise(Tagger(), ALL, std=lambda step: 0.1)

        def training_step(self, batch):
            with step(self):
                return self.net.tags(self.net.scaled(self.net.encode(batch))).mean()

    module = Module()
    for _ in range(2):
        module.training_step(ids()).backward()
    assert applied(module)[0].step == 2
    assert all(p.grad is not None for name, p in module.named_parameters() if "bias" not in name)
