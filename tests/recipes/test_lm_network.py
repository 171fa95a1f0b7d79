"""The network and its training through time, against an LSTM that is written out by hand."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import recoup
from recoup.recipes.language_model import network as network_file
from recoup.recipes.language_model.network import LanguageModel, Masks
from recoup.recipes.language_model.segments import Penalties, Window, window_backward
from tests.unit.weights.plain_run import recorded, reparametrized

VOCAB, BATCH, STEPS = 23, 3, 12
PENALTIES = Penalties(activation=2.0, temporal=1.0)
SIZES = {"embed_size": 5, "hidden_size": 7, "num_layers": 3}


def built(**options):
    torch.manual_seed(1)
    return LanguageModel(VOCAB, **SIZES | options).double()


def a_window(network, steps=STEPS):
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(VOCAB, (steps + 1, BATCH), generator=generator)
    state = tuple(
        tuple(torch.randn(part.shape, generator=generator, dtype=part.dtype) for part in layer)
        for layer in network.zero_state(BATCH)
    )
    return Window(ids, state)


def trained(network, window, *, segment_steps=None, penalties=PENALTIES, seed=3):
    """What the recipe makes of a window: loss and gradients, and what it drew on the way."""
    torch.manual_seed(seed)
    masks = network.new_masks(window.num_steps, BATCH)
    store = recoup.GradStore(network.parameters())
    with recorded() as drawn:
        found = window_backward(
            network,
            window,
            store,
            penalties=penalties,
            segment_steps=segment_steps,
            masks=masks,
        )
    parameters = dict(network.named_parameters())
    gradients = {name: store[each].clone() for name, each in parameters.items() if each in store}
    return SimpleNamespace(
        loss=found.loss,
        nll=found.nll,
        state=found.state,
        gradients=gradients,
        masks=masks,
        drawn=drawn,
        stream=torch.rand(3),
    )


def by_hand(network, window, masks, drawn, penalties=PENALTIES):
    """The same, written out: cells unrolled over time, the weights that were drawn, the formulas.

    Nothing of the recipe is called; the masks are looked up.
    """
    raw = {name: each.detach().clone().requires_grad_() for name, each in named(network)}
    used = dict(raw)
    for each in recoup.weights.applied(network):
        draw = next(one for one in drawn if one.step is each.reparametrization)
        used[each.name] = reparametrized(used[each.name], draw)

    def dropped(x, place, step):
        mask = masks._masks.get(place)
        if mask is None:
            return x
        keep = mask[step if len(mask) > 1 else 0]
        return torch.where(keep, x / (1 - masks._probabilities[place]), 0.0)

    states = [(h[0], c[0]) for h, c in window.state]
    nlls, outputs, raws = [], [], []
    for step in range(window.num_steps):
        x = dropped(used["embedding.weight"][window.ids[step]], "input", step)
        for n in range(len(network.layers)):
            h, c = states[n]
            weights = [used[f"layers.{n}.{kind}_l0"] for kind in ("weight_ih", "weight_hh")]
            biases = [used[f"layers.{n}.{kind}_l0"] for kind in ("bias_ih", "bias_hh")]
            gates = x @ weights[0].T + biases[0] + h @ weights[1].T + biases[1]
            i, f, g, o = gates.chunk(4, dim=1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            states[n] = h, c
            x = dropped(h, f"output {n + 1}", step)
        raws.append(h)
        outputs.append(x)
        decoder = raw.get("decoder.weight", raw["embedding.weight"])
        logits = x @ decoder.T + raw["decoder.bias"]
        nlls.append(F.cross_entropy(logits, window.ids[step + 1], reduction="none"))
    loss = torch.stack(nlls).mean()
    loss = loss + penalties.activation * torch.stack(outputs).square().mean()
    if len(raws) > 1:
        following = torch.stack(raws[1:]) - torch.stack(raws[:-1])
        loss = loss + penalties.temporal * following.square().mean()
    loss.backward()
    return SimpleNamespace(
        loss=loss.detach(),
        nll=torch.stack(nlls).sum().detach(),
        state=[(h.detach()[None], c.detach()[None]) for h, c in states],
        gradients={name: each.grad for name, each in raw.items()},
    )


def named(network):
    return network.named_parameters()


def assert_same(found, wanted):
    close = {"rtol": 1e-10, "atol": 1e-13}
    torch.testing.assert_close(found.loss, wanted.loss, **close)
    torch.testing.assert_close(found.nll, wanted.nll, **close)
    for ours, theirs in zip(found.state, wanted.state, strict=True):
        torch.testing.assert_close(ours[0], theirs[0], **close)
        torch.testing.assert_close(ours[1], theirs[1], **close)
    assert found.gradients.keys() == wanted.gradients.keys()
    for name, gradient in found.gradients.items():
        assert gradient.abs().max() > 0, name
        torch.testing.assert_close(gradient, wanted.gradients[name], **close, msg=name)


def check_by_hand(network, **options):
    window = a_window(network)
    found = trained(network, window, **options)
    assert_same(found, by_hand(network, window, found.masks, found.drawn))
    return found


@pytest.mark.sampled(8)
@pytest.mark.parametrize("kind", ["locked", "independent"])
@pytest.mark.parametrize("segment_steps", [None, 1, 5, 12])
@pytest.mark.parametrize("tied", [True, False])
def test_loss_and_gradients_are_those_by_hand(kind, segment_steps, tied):
    network = built(dropout_kind=kind, tie_weights=tied)
    check_by_hand(network, segment_steps=segment_steps)


@pytest.mark.parametrize("segment_steps", [None, 5])
def test_with_noise_on_the_weights(segment_steps):
    network = built(weight_noise=0.1)
    quiet = check_by_hand(network, segment_steps=segment_steps)
    network.set_weight_noise(True)
    assert not torch.equal(check_by_hand(network, segment_steps=segment_steps).loss, quiet.loss)
    network.set_weight_noise(False)
    assert torch.equal(check_by_hand(network, segment_steps=segment_steps).loss, quiet.loss)


def detached(module, pattern, p):
    """What a port of AWD-LSTM did: the dropped weight is a new parameter, made in each forward.

    With `p` of 0 it is the same network, but for its gradients.
    """
    raw = module._parameters[pattern]
    forward = module.forward

    def with_dropped(*args):
        module._flat_weights[1] = nn.Parameter(F.dropout(raw, p, module.training))
        try:
            return forward(*args)
        finally:
            module._flat_weights[1] = raw

    module.forward = with_dropped
    return module


def test_a_recurrent_weight_that_is_detached_is_found(monkeypatch):
    ours = recoup.weight_dropout

    def port(module, pattern="weight", *, p, axes=()):
        if isinstance(module, nn.LSTM):
            return detached(module, pattern, p=0.0)
        return ours(module, pattern, p=p, axes=axes)

    fake = SimpleNamespace(**{name: getattr(recoup, name) for name in recoup.__all__})
    fake.weight_dropout = port
    monkeypatch.setattr(network_file, "recoup", fake)
    with pytest.raises(AssertionError, match=r"layers\.0\.weight_hh_l0"):
        check_by_hand(built())


@pytest.mark.parametrize("kind", ["locked", "independent"])
@pytest.mark.parametrize("segment_steps", [1, 4, 11])
def test_segments_change_neither_draws_nor_gradients(kind, segment_steps):
    network = built(dropout_kind=kind, weight_noise=0.1)
    network.set_weight_noise(True)
    window = a_window(network)
    whole, cut = (trained(network, window, segment_steps=n) for n in (None, segment_steps))
    assert_same(cut, whole)
    assert torch.equal(cut.stream, whole.stream)


def test_windows_in_a_row_are_one_text():
    """The state is carried: without dropout, windows cost what the whole text costs."""
    network = built().eval()
    window = a_window(network, steps=10)
    with torch.no_grad():
        whole, last = network(window.ids[:-1], window.state)
        state, parts = window.state, []
        for piece in window.ids[:-1].split(3):
            logits, state = network(piece, state)
            parts.append(logits)
    torch.testing.assert_close(torch.cat(parts), whole)
    torch.testing.assert_close(state, last)


def test_one_step_windows_have_no_difference_to_penalise():
    network = built()
    window = a_window(network, steps=1)
    found = trained(network, window)
    assert_same(found, by_hand(network, window, found.masks, found.drawn))


@pytest.mark.parametrize("kind", ["locked", "independent"])
def test_masks_drop_as_often_as_they_say_and_keep_the_mean(kind):
    p, size = 0.3, 400
    torch.manual_seed(0)
    masks = Masks.drawn(kind, {"here": p}, {"here": size}, num_steps=6, batch_size=50)
    x = masks.drop(torch.ones(6, 50, size), "here")
    assert x.unique().tolist() == pytest.approx([0.0, 1 / 0.7])
    assert float((x == 0).double().mean()) == pytest.approx(p, abs=0.01)
    assert torch.equal(x[0], x[5]) == (kind == "locked")
    assert not torch.equal(x[0, 0], x[0, 1])
    assert torch.equal(masks.between(2, 5).drop(torch.ones(3, 50, size), "here"), x[2:5])
    assert masks.drop(torch.ones(6, 50, 9), "elsewhere").eq(1).all()


def test_a_word_that_is_dropped_is_dropped_wherever_it_occurs():
    network = built(embedding_dropout=0.5, input_dropout=0.0)
    ids = torch.arange(VOCAB).repeat(2)[:, None]
    torch.manual_seed(4)
    rows = network.embedding(ids)[:, 0]
    assert torch.equal(rows[:VOCAB], rows[VOCAB:])
    is_dropped = rows[:VOCAB].eq(0).all(dim=1)
    assert 0 < int(is_dropped.sum()) < VOCAB
    expected = network.decoder.weight / 0.5
    assert torch.equal(rows[:VOCAB][~is_dropped], expected[~is_dropped])


def test_nothing_is_dropped_in_evaluation():
    network = built(weight_noise=0.5)
    network.set_weight_noise(True)
    plain = built(
        input_dropout=0.0,
        hidden_dropout=0.0,
        output_dropout=0.0,
        embedding_dropout=0.0,
        weight_dropout=0.0,
    )
    plain.load_state_dict(network.state_dict(), strict=True)
    ids = a_window(network).ids
    assert torch.equal(network.eval()(ids)[0], plain(ids)[0])
    assert not torch.equal(network.train()(ids)[0], network(ids)[0])


# -- the twin --------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
def test_the_twin_has_the_same_parameters_and_the_numbers_of_evaluation(tied):
    network = built(tie_weights=tied, weight_noise=0.1)
    network.set_weight_noise(True)
    twin = network.evaluation_twin()
    assert dict(twin.named_parameters()) == dict(network.named_parameters())
    assert all(a is b for a, b in zip(twin.parameters(), network.parameters(), strict=True))
    assert (twin.decoder.weight is twin.embedding.weight) == tied
    assert recoup.weights.applied(twin) == []
    assert len(recoup.weights.applied(network)) > 0
    optimizer = torch.optim.SGD(network.parameters(), lr=0.5)
    window = a_window(network)
    seen = []
    for step in range(3):
        for mode in (True, False):  # without dropout in either mode
            outputs = twin.train(mode)(window.ids)[0]
            assert torch.equal(outputs, network.eval()(window.ids)[0])
        seen.append(outputs)
        network.train()
        store = recoup.GradStore(network.parameters())
        masks = network.new_masks(window.num_steps, BATCH)
        window_backward(network, window, store, masks=masks)
        store.step(optimizer)
        assert network.training
        assert not torch.equal(seen[-1], twin(window.ids)[0]), step


def test_the_twin_is_trained_by_its_own_gradients_too():
    network = built()
    twin = network.evaluation_twin()
    twin(a_window(network).ids)[0].sum().backward()
    assert all(each.grad is not None for each in network.parameters())


def test_the_twin_follows_a_load_and_a_move():
    network, other = built(), built()
    torch.nn.init.normal_(other.embedding.weight)
    twin = network.evaluation_twin()
    ids = a_window(network).ids
    network.load_state_dict(other.state_dict())
    assert torch.equal(twin(ids)[0], other.eval()(ids)[0])
    network.float()
    assert twin(ids)[0].dtype == torch.float32


def test_a_copy_of_network_and_twin_is_another_pair():
    pair = nn.ModuleList([built()])
    pair.append(pair[0].evaluation_twin())
    other = copy.deepcopy(pair)
    assert other[0].embedding.get_parameter("weight") is other[1].embedding.weight
    assert other[1].embedding.weight is not pair[0].embedding.get_parameter("weight")


# -- bad arguments ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"embed_size": 0}, "`embed_size` is 0"),
        ({"num_layers": 0}, "`num_layers` is 0"),
        ({"input_dropout": 1.0}, "`input_dropout` is 1.0"),
        ({"output_dropout": -0.1}, "`output_dropout` is -0.1"),
        ({"hidden_dropout": float("nan")}, "`hidden_dropout` is nan"),
        ({"weight_dropout": 1.5}, "`p` is 1.5"),
        ({"weight_noise": -1.0}, "`weight_noise` is -1.0"),
        ({"dropout_kind": "variational"}, "`dropout_kind` is 'variational'"),
    ],
)
def test_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        built(**options)
