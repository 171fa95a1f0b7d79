"""R4: weights outside of a forward of the tree: one step in a context, and no silence otherwise."""

from __future__ import annotations

import copy
import gc
import io
import threading
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grad_norm_, parameters_to_vector

import recoup
from recoup.errors import RecoupError
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


# -- one draw a step -------------------------------------------------------------------------------


def used(model, run):
    """The loss of `run`, what was drawn for it, and gradients by name."""
    model.zero_grad()
    with recorded() as made:
        loss = run()
    loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), made, grads


@pytest.mark.parametrize("apply", [recoup.weight_dropout, recoup.weight_noise])
def test_methods_are_noisy_and_have_one_draw(said, apply):
    """R4: reads in methods, parts that are called, and code of others: as in one forward."""
    model = apply(Tagger(), ALL)

    def by_hand():
        y = model.scaled(model.encode(ids()))
        return F.linear(y, model.embedding.weight).square().mean()

    runs = (lambda: model(ids()), lambda: model.training_step(ids()), by_hand)
    found = []
    for run in runs:
        with same_draw(seed=3):
            found.append(used(model, run))
    for loss, made, grads in found:
        assert len(made) == 3
        assert torch.equal(loss, found[0][0])
        assert grads.keys() == found[0][2].keys()
        for name, grad in grads.items():
            torch.testing.assert_close(grad, found[0][2][name], msg=name)
    for run in runs:  # the draw of each step is its own
        (a, made, _), (b, _, _) = used(model, run), used(model, run)
        assert len(made) == 3
        assert not torch.equal(a, b)
    assert applied(model)[0].step == 9
    assert not said


def test_a_draw_lasts_until_backward(said):
    model = recoup.weight_noise(Tagger(), ALL, std=lambda step: 1.0)
    a, b = model.encode(ids()), model.encode(ids())
    assert torch.equal(a, b)
    assert torch.equal(model(ids()), model.training_step(ids())), "a forward joins the step"
    assert applied(model)[0].step == 1
    (a + b).sum().backward()
    c = model.encode(ids())
    assert not torch.equal(a, c)
    assert applied(model)[0].step == 2
    del c  # and its graph
    assert not torch.equal(a, model.encode(ids()))
    assert applied(model)[0].step == 3
    assert not said


def test_a_read_after_a_forward_has_its_draw(said):
    layer = recoup.weight_dropout(nn.Linear(6, 6, bias=False))
    x = torch.eye(6)
    y = layer(x)
    assert torch.equal(y, F.linear(x, layer.weight))
    assert torch.equal(layer(x), y), "the step that the read began goes on"
    y.sum().backward()
    first, second = layer(x), layer(x)
    assert not torch.equal(first, second), "two forwards alone have a draw each"
    with pytest.raises(RecoupError, match="while 2 forwards with draws of their own wait"):
        F.linear(x, layer.weight)
    del first
    assert torch.equal(second, F.linear(x, layer.weight))
    assert not said


def test_a_read_after_a_step_that_is_marked(said):
    model = recoup.weight_dropout(Tagger(), ALL)
    with step(model):
        loss = model.encode(ids()).sum()
    with recorded() as made:
        loss = loss + (model.embedding.weight @ model.scale).sum()
    assert len(made) == 1, "the embedding has had its draw"
    loss.backward()
    assert not said


def test_gradients_of_reads_in_a_script():
    """Against autograd over the weights that were drawn."""
    layer = recoup.weight_dropout(nn.Linear(5, 5, bias=False).double(), p=0.3)
    raw = layer.get_parameter("weight")
    x = torch.randn(3, 5, dtype=torch.float64)
    with recorded() as made:
        loss = F.linear(x, layer.weight).sin().sum() + (layer(x) * 2).cos().sum()
        loss = loss + torch.einsum("ij,kj->ik", x, layer.weight).square().sum()
    assert len(made) == 1
    loss.backward()
    plain = raw.detach().clone().requires_grad_()
    y = F.linear(x, plain * mask(plain, made[0]))
    (y.sin().sum() + (y * 2).cos().sum() + y.square().sum()).backward()
    torch.testing.assert_close(raw.grad, plain.grad, rtol=1e-10, atol=1e-12)


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
    with same_draw(3):
        want = model(torch.ones(4))
    with same_draw(3), recorded() as made:
        assert torch.equal(model.scaled(torch.ones(4)), want)
    assert len(made) == 3
    assert not said


def test_a_weight_read_by_the_parent(said):
    """R4: applied to the embedding alone, whose parent reads its weight as that of a decoder."""
    model = Tagger()
    recoup.weight_dropout(model.embedding)
    _, made, _ = used(model, lambda: model(ids()))
    assert len(made) == 1, "the draw of the embedding's own forward"
    assert not said


def test_the_ways_out_of_a_weight_read_by_the_parent():
    """R4: in a step it is noisy, and raw where noise is off, or where it is a parameter."""
    noisy = recoup.weight_dropout(Tagger(), r"embedding\.weight", p=1.0)
    assert noisy(ids()) == 0
    alone = Tagger()
    recoup.weight_dropout(alone.embedding, p=1.0)
    x = torch.randn(2, 4)
    with step(alone):
        assert torch.count_nonzero(alone.tags(x)) == 0
    assert torch.count_nonzero(alone.tags(x)) == 0
    with disabled(alone):
        assert torch.count_nonzero(alone.tags(x)) > 0
    assert alone.embedding.get_parameter("weight") is alone.embedding._parameters["weight"]


def test_what_the_source_does_not_show(said):
    """R4: a script that passes the weight on gets the parameter, and is told so, once."""

    def takes(weight):
        return weight

    layer = recoup.weight_noise(nn.Linear(3, 3))
    assert takes(layer.weight) is layer._parameters["weight"]
    assert takes(layer.weight) is layer._parameters["weight"]
    assert len(said) == 1
    assert "`weight` of Linear was read by `test_what_the_source" in str(said[0].message)
    assert "recoup.weights.step(model)" in str(said[0].message)
    assert said[0].filename == __file__


def test_a_method_that_changes_a_weight_in_place(said):
    """R4: it would change a copy; within no_grad it changes the parameter."""

    def clamped(weight):
        with torch.no_grad():
            weight.clamp_(0.0, 0.1)

    class Clips(nn.Linear):
        def clip(self):
            clamped(self.weight)

        @torch.no_grad()
        def clip_without_graph(self):
            self.weight.clamp_(0.0, 0.1)

        def clip_by(self, change):
            change(self.weight)

        def clip_data(self):
            self.weight.data.clamp_(0.0, 0.1)

    layer = recoup.weight_noise(Clips(3, 3))
    with pytest.raises(RecoupError, match="`clamp_` would change that tensor alone"):
        layer.clip()
    with pytest.raises(RecoupError, match="`data` would change that tensor alone"):
        layer.clip_by(lambda weight: weight.data.clamp_(0.0, 0.1))
    with pytest.raises(RecoupError, match="`clamp_` would change that tensor alone"):
        layer.clip_by(lambda weight: weight.detach().clamp_(0.0, 0.1))
    layer.clip_data()
    assert layer._parameters["weight"].min() >= 0
    nn.init.constant_(layer.weight, -1.0)
    assert layer._parameters["weight"].max() < 0
    layer.clip_without_graph()
    assert layer._parameters["weight"].min() >= 0
    assert not said


def test_parts_in_a_list_have_one_step(said):
    """R4: parts of one step are one step of a schedule."""
    layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))  # has no forward of its own
    recoup.weight_noise(layers, r".*weight", std=lambda step: 0.1)
    for count in (1, 2, 3):
        y = layers[0](torch.randn(2, 4))
        for layer in layers[1:]:
            y = layer(y)
        assert applied(layers)[0].step == count
        y.sum().backward()
    assert not said


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
def test_a_norm_is_applied_wherever_the_weight_is_read(said, grad):
    """R4: the direction alone is no weight, in evaluation either."""
    model = Tagger()
    x = torch.randn(2, 4)
    want = model.scaled(x)
    recoup.weight_norm(model, "scale").eval()
    with torch.no_grad():
        model.scale_g.mul_(2)
    with torch.set_grad_enabled(grad):
        torch.testing.assert_close(model.scaled(x), 2 * want)
        torch.testing.assert_close(x @ model.scale, 2 * want)
    assert not said


def test_the_fast_path_of_an_encoder_layer(said):
    """R4: torch reads the weights of what is in the layer, and does not call it."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    x = torch.randn(1, 3, 8)
    with torch.no_grad():
        layer.linear1.weight.mul_(2)
        want = layer(x)
        layer.linear1.weight.div_(2)
        recoup.weight_norm(layer.linear1)
        layer.linear1.weight_g.mul_(2)
        torch.testing.assert_close(layer(x), want)
    assert not said


def test_names_of_methods_that_compute(said):
    """R4: a name that only looks like initialising changes nothing."""

    class Names(nn.Linear):
        def _shared_step(self, x):
            return F.linear(x, self.weight)

        def next_state(self, x):
            return x * self.weight

        def copy_logits(self, x):
            return x @ self.weight

    layer = recoup.weight_dropout(Names(3, 3), p=1.0)
    x = torch.ones(3, 3)
    for run in (layer._shared_step, layer.next_state, layer.copy_logits):
        assert torch.count_nonzero(run(x)) == 0
    assert not said


def test_results_that_hold_tensors_in_attributes():
    """R4: a distribution, as the encoder of a VAE returns."""

    class Encoder(nn.Linear):
        def forward(self, x):
            return torch.distributions.Normal(super().forward(x), 1.0)

    model = nn.ModuleList([Encoder(3, 3)])
    recoup.weight_dropout(model, r".*weight")
    x = torch.randn(2, 3)
    first = model[0](x)
    assert torch.equal(first.loc, model[0](x).loc)
    first.loc.sum().backward()
    assert not torch.equal(first.loc, model[0](x).loc)


def test_steps_of_threads_are_their_own():
    model = recoup.weight_dropout(Tagger(), ALL)
    a = model.encode(ids())
    other = threading.Thread(target=lambda: model.encode(ids()).sum().backward())
    other.start()
    other.join()
    assert torch.equal(a, model.encode(ids()))


def test_forwards_of_other_threads_are_not_joined():
    layer, outputs = recoup.weight_dropout(nn.Linear(4, 4)), []
    x = torch.randn(2, 4)
    other = threading.Thread(target=lambda: outputs.append(layer(x)))
    other.start()
    other.join()
    with recorded() as made:
        F.linear(x, layer.weight).sum().backward()
    assert len(made) == 1, "a draw of this thread"
    assert outputs[0].grad_fn is not None


def test_a_step_that_raises_leaves_nothing():
    """R4: its weights and its graph are freed with what its code computed, without a collector."""
    model = recoup.weight_dropout(Tagger(), ALL)
    seen = []

    def run():
        with step(model):
            weight = model.scale
            seen.append(weakref.ref(weight))
            seen.append(weakref.ref(model.encode(ids())))
            model.scaled(model.encode(ids()))
            raise RuntimeError("on purpose")

    gc.collect()
    gc.disable()
    try:
        with pytest.raises(RuntimeError, match="on purpose") as caught:
            run()
        del caught
        assert [each() for each in seen] == [None, None]
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_a_gradient_penalty_is_within_its_step():
    """R4: gradients with a graph of their own end no step."""
    model = recoup.weight_dropout(Tagger(), ALL)
    x = torch.randn(2, 4, requires_grad=True)
    with recorded() as made:
        y = model.scaled(x)
        (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        (gradient.square().sum() + model.scaled(x).sum()).backward()
    assert len(made) == 1


def test_what_wants_the_parameter_gets_it(said):
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
    assert torch.equal(model.get_parameter("scale"), torch.ones(4, 4))
    model.of_type(torch.randn(2))
    copy.deepcopy(model).load_state_dict(model.state_dict())
    torch.save(model.state_dict(), io.BytesIO())
    nn.init.normal_(model.embedding.weight)
    torch.optim.swa_utils.AveragedModel(model).update_parameters(model)
    with torch.no_grad():
        average = 0.9 * model.scale + 0.1 * model.scale
    torch.testing.assert_close(average, torch.ones(4, 4))
    model.tie()
    assert model.encoder.weight is model.scale
    assert model.scale is model._parameters["scale"]
    model.eval()
    model.scaled(model.encode(ids()))  # nothing is drawn in evaluation
    assert [str(each.message) for each in said] == []


def test_parts_that_have_a_backward_each(said):
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
        assert not torch.equal(teacher.encode(ids()), teacher.encode(ids())), "no graph, no step"
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
        factor = mask(model.get_parameter("scale"), made[0])
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
    weight = model.get_parameter("weight")
    weight = weight * mask(weight, made[0])
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


@pytest.mark.parametrize("is_marked", [False, True], ids=["unmarked", "step"])
def test_a_lightning_module(is_marked, said):
    """R4: a training step that calls its parts and reads their weights, four to an update."""
    lightning = pytest.importorskip("lightning", reason="needs lightning")
    taken = []

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = recoup.weight_noise(Tagger(), ALL, std=lambda step: 0.1)

        def loss(self, batch):
            h = self.net.scaled(self.net.encode(batch))
            return F.linear(h, self.net.embedding.weight).square().mean()

        def training_step(self, batch):
            if is_marked:
                with step(self), recorded() as made:
                    loss = self.loss(batch)
            else:
                with recorded() as made:
                    loss = self.loss(batch)
            taken.append(len(made))
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=0.1)

    module = Module()
    trainer = lightning.Trainer(
        max_epochs=1,
        accumulate_grad_batches=4,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, torch.utils.data.DataLoader([ids()[0]] * 8, batch_size=1))
    assert taken == [3] * 8, "one draw a weight and batch"
    assert trainer.global_step == 2
    assert applied(module)[0].step == 8
    assert not [each for each in said if "recoup" in str(each.message)]
