"""One parameter, several uses, each with its own policy: tied weights, and models that share them.

Training and evaluation models over the same parameters are what
https://github.com/dmlc/gluon-nlp/issues/1060 asks for.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import recoup
from recoup.weights import applied, enabled, remove, same_draw
from tests.unit.weights.plain_run import (
    PlainRun,
    mask,
    recorded,
    reparametrized,
)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """These layers are so small that threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


VOCABULARY, WIDTH = 12, 6


class LanguageModel(nn.Module):
    """AWD-LSTM in small: embedding, recurrent layers, decoder."""

    def __init__(self, *, tied=True):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.rnns = nn.ModuleList(nn.LSTM(WIDTH, WIDTH) for _ in range(2))
        self.decoder = nn.Linear(WIDTH, VOCABULARY)
        if tied:
            self.decoder.weight = self.embedding.weight

    def forward(self, ids):
        x = self.embedding(ids)
        for rnn in self.rnns:
            x, _ = rnn(x)
        return self.decoder(x)


def reparametrize(model):
    """The policies of AWD-LSTM: words of the embedding, entries of the recurrent weights."""
    recoup.weight_dropout(model, r"embedding\.weight", p=0.3, axes=(1,))
    return recoup.weight_dropout(model, r"rnns\.\d\.weight_hh_l0", p=0.5)


def share(source, target):
    """Give `target` the parameters of `source`, as a person would, with assignments."""
    for (_, a), (_, b) in zip(source.named_modules(), target.named_modules(), strict=True):
        for key in list(a._parameters):
            setattr(b, key, getattr(a, key))


def ids():
    return torch.randint(VOCABULARY, (5, 3))


def loss_of(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


# -- a training model and an evaluation model ------------------------------------------------------

ORDERS = {
    "apply, then share": ("apply", "share"),
    "share, then apply": ("share", "apply"),
    "share, apply, initialise": ("share", "apply", "initialise"),
    "apply, initialise, share": ("apply", "initialise", "share"),
    "initialise between": ("apply", "share", "initialise"),
    "load last": ("apply", "share", "load"),
    "load into the other": ("share", "apply", "load into the other"),
    "run, then share": ("apply", "run", "share"),
}


def pair(order, *, tied, both=False):
    """A training model and an evaluation model over the same parameters."""
    train, evaluate = LanguageModel(tied=tied), LanguageModel(tied=tied)
    for do in ORDERS[order]:
        if do == "apply":
            reparametrize(train)
            if both:
                reparametrize(evaluate)
        elif do == "share":
            share(train, evaluate)
        elif do == "initialise":
            for p in train.parameters():
                nn.init.uniform_(p, -0.4, 0.4)
        elif do == "run":
            train(ids())
            evaluate(ids())
        else:
            target = train if do == "load" else evaluate
            target.load_state_dict(LanguageModel(tied=tied).state_dict(), strict=True)
    return train, evaluate.eval()


def plain_with(model, *, tied):
    """A plain model with the numbers of `model`."""
    plain = LanguageModel(tied=tied)
    plain.load_state_dict({name: p.clone() for name, p in model.state_dict().items()})
    return plain


def test_policies_are_of_the_uses():
    """Two models that share, each with a policy of its own; removal from one leaves the other."""
    first, second = LanguageModel(), LanguageModel()
    share(first, second)
    recoup.weight_dropout(first, r"rnns\.0\.weight_hh_l0", p=1.0)
    recoup.weight_noise(second, r"rnns\.0\.weight_hh_l0", std=0.5)
    x = ids()
    with torch.no_grad():
        plain = plain_with(first, tied=True)(x)
        noisy = second(x)
        dropped = first(x)
        assert not torch.equal(noisy, plain)
        assert torch.equal(dropped, first(x))
        assert not torch.equal(dropped, plain)
        remove(first)
        assert torch.equal(first(x), plain)
        assert not torch.equal(second(x), second(x))


# -- tied weights ----------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.decoder = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.decoder.weight = self.embedding.weight

    def forward(self, x):
        return self.decoder(self.embedding(x).tanh())


def step_of(entry, made):
    return next(each for each in made if each.step is entry.reparametrization)


def compared(model, x):
    """Compare with the closed form, whose gradient is the sum of both uses."""
    raw = model.embedding.get_parameter("weight").detach().clone().requires_grad_()
    with recorded() as made:
        logits = model(x)
    uses = {"embedding": raw, "decoder": raw}
    for entry in applied(model):
        owner = entry.name.partition(".")[0]
        uses[owner] = reparametrized(uses[owner], step_of(entry, made))
    want = F.linear(F.embedding(x, uses["embedding"]).tanh(), uses["decoder"])
    assert torch.equal(logits, want)
    model.zero_grad()
    logits.sin().sum().backward()
    want.sin().sum().backward()
    torch.testing.assert_close(
        model.embedding.get_parameter("weight").grad, raw.grad, rtol=1e-5, atol=1e-6
    )
    assert (
        model.decoder.get_parameter("weight").grad is model.embedding.get_parameter("weight").grad
    )
    return made


def test_only_the_embedding():
    model = recoup.weight_dropout(Tied(), r"embedding\.weight", p=0.5)
    x = ids()
    made = compared(model, x)
    assert len(made) == 1
    # The decoder's own: it is the raw parameter, and takes part in the gradient of dropped entries.
    dropped = mask(model.embedding.get_parameter("weight"), made[0]) == 0
    assert torch.count_nonzero(model.embedding.get_parameter("weight").grad[dropped]) > 0


def test_only_rows_of_the_embedding():
    model = recoup.weight_dropout(Tied(), r"embedding\.weight", p=0.5, axes=(1,))
    assert len(compared(model, ids())) == 1


def test_only_the_decoder():
    model = recoup.weight_dropout(Tied(), r"decoder\.weight", p=0.5)
    assert len(compared(model, ids())) == 1


def test_both_with_their_own():
    model = recoup.weight_dropout(Tied(), r"embedding\.weight", p=0.2, axes=(1,))
    recoup.weight_dropout(model, r"decoder\.weight", p=0.7)
    made = compared(model, ids())
    assert [each.magnitude for each in made] == [0.2, 0.7]
    assert made[0].seed != made[1].seed


def test_both_by_one_call():
    """Each use has its own draw; the parameter is one."""
    model = recoup.weight_dropout(Tied(), r".*\.weight", p=0.5)
    assert [entry.name for entry in applied(model)] == ["embedding.weight", "decoder.weight"]
    made = compared(model, ids())
    assert len({each.seed for each in made}) == 2
    assert len(list(model.parameters())) == 1


def test_dropout_of_one_use_and_noise_of_the_other():
    model = recoup.weight_dropout(Tied(), r"embedding\.weight", p=0.5)
    recoup.weight_noise(model, r"decoder\.weight", std=0.1)
    assert len(compared(model, ids())) == 2


def test_noise_in_the_evaluation_of_one_use():
    model = recoup.weight_dropout(Tied(), r".*\.weight", p=1.0).eval()
    x = ids()
    with enabled(model.embedding):
        assert torch.count_nonzero(model(x)) == 0  # tanh(0)
    assert torch.count_nonzero(model(x)) > 0


@pytest.mark.parametrize("applied_first", [True, False])
def test_ties_last(applied_first):
    """Through application, steps, conversion, copies, loading and removal."""

    def apply(model):
        return recoup.weight_dropout(model, r"embedding\.weight", axes=(1,))

    def is_tied(model):
        return model.embedding.get_parameter("weight") is model.decoder.get_parameter("weight")

    model = LanguageModel(tied=False)
    if applied_first:
        apply(model)
    model.decoder.weight = model.embedding.get_parameter("weight")
    if not applied_first:
        apply(model)
    assert is_tied(model)
    assert len(list(model.parameters())) == 2 + 8
    x, y = ids(), ids()
    loss_of(model(x), y).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    for change in (
        lambda m: m,
        lambda m: m.double().float(),
        copy.deepcopy,
        lambda m: m.load_state_dict(LanguageModel().state_dict(), strict=True) and m,
        remove,
    ):
        model = change(model)
        assert is_tied(model)
        model(x)
    keys = LanguageModel().state_dict().keys()
    assert model.state_dict().keys() == keys


UNTIES = {
    "to_empty": lambda model: model.to_empty(device="cpu"),
    "assign": lambda model: model.load_state_dict(Tied().state_dict(), assign=True),
    "to meta": lambda model: model.to("meta"),
    "assign one": lambda model: model.load_state_dict(
        {"embedding.weight": torch.zeros(VOCABULARY, WIDTH)}, strict=False, assign=True
    ),
}


@pytest.mark.parametrize("way", UNTIES)
def test_what_torch_unties(way):
    """Noisy or not, torch makes a parameter of each name; tied again, each use has its policy."""
    ties = []
    for noisy in (False, True):
        with torch.device("meta" if way == "to_empty" else "cpu"):
            model = Tied()
        if noisy:
            recoup.weight_dropout(model, r"embedding\.weight", p=1.0)
        UNTIES[way](model)
        ties.append(
            model.decoder.get_parameter("weight") is model.embedding.get_parameter("weight")
        )
    assert ties == [False, False]
    model = model.to_empty(device="cpu")
    model.decoder.weight = model.embedding.get_parameter("weight")
    nn.init.ones_(model.embedding.get_parameter("weight"))
    assert torch.count_nonzero(model(ids())) == 0
    assert torch.count_nonzero(model.decoder(torch.ones(1, WIDTH))) == VOCABULARY
    assert len(list(model.parameters())) == 1


def test_a_copy_is_tied_to_itself():
    model = reparametrize(LanguageModel())
    model(ids())
    other = copy.deepcopy(model)
    assert other.embedding.get_parameter("weight") is other.decoder.get_parameter("weight")
    assert other.embedding.get_parameter("weight") is not model.embedding.get_parameter("weight")
    with same_draw(1):
        a = model(x := ids())
    with same_draw(1):
        b = other(x)
    assert torch.equal(a, b)


def test_one_weight_for_two_layers_of_a_kind():
    """Recurrent layers that share, and are one after the other."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.LSTM(4, 4), nn.LSTM(4, 4)
            share(self.first, self.second)

        def forward(self, x):
            return self.second(self.first(x)[0])[0]

    plain = Twice()
    run = PlainRun(plain, lambda m: recoup.weight_dropout(m, r"(first|second)\.weight_hh_l0"))
    made = run.compare(torch.randn(5, 2, 4))
    assert len(made) == 2
    assert len(list(run.module.parameters())) == 4


def test_one_module_under_two_roofs():
    """A layer in two trees has one policy; each tree says how long its draw lasts."""
    layer = nn.Linear(4, 4)
    first, second = nn.Sequential(layer, nn.Tanh(), layer), nn.Sequential(layer, nn.Tanh())
    recoup.weight_dropout(first, r"0\.weight")
    x = torch.randn(2, 4)
    with recorded() as made:
        first(x)
    assert len(made) == 1
    with recorded() as made:
        second(x)
        second(x)
    assert len(made) == 2
    with pytest.raises(ValueError, match="already"):
        recoup.weight_dropout(second, r"0\.weight")
    recoup.weight_noise(second, r"0\.weight", std=0.1)
    assert [entry.reparametrization.kind for entry in applied(first)] == [
        "weight_dropout",
        "weight_noise",
        "weight_dropout",
        "weight_noise",
    ][:2]
