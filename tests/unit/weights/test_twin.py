"""The twin computes what the model would in evaluation, and has no parameters of its own."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import recoup
from recoup._core.storage_tracking import StorageTracker
from recoup.weights import applied, twin
from tests.oracle import loss_of_all, tensors
from tests.unit.weights.plain_run import raw_parameters

WEIGHTS = r"(.*\.)?(weight|in_proj_weight|weight_hh_l0(_reverse)?)"


def linear():
    return nn.Linear(6, 5), torch.randn(3, 6)


def batch_norm():
    layers = (nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout2d(), nn.Conv2d(4, 2, 1))
    return nn.Sequential(*layers), torch.randn(3, 2, 6, 6)


def lstm():
    return nn.LSTM(4, 5, num_layers=2, dropout=0.5), torch.randn(6, 2, 4)


def gru():
    return nn.GRU(4, 5, bidirectional=True), torch.randn(6, 2, 4)


class Tied(nn.Module):
    """AWD-LSTM in small: rows of the embedding are dropped, and not those of the decoder."""

    def __init__(self):
        super().__init__()
        self.embedding, self.layer = nn.Embedding(11, 8), nn.LSTM(8, 8)
        self.drop, self.decoder = nn.Dropout(0.4), nn.Linear(8, 11)
        self.decoder.weight = self.embedding.weight

    def forward(self, ids):
        return self.decoder(self.drop(self.layer(self.drop(self.embedding(ids)))[0]))


def tied():
    return Tied(), torch.randint(11, (5, 3))


def attention():
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.randn(3, 5, 8)


def gpt2():
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    config = transformers.GPT2Config(
        vocab_size=31, n_positions=16, n_embd=16, n_layer=2, n_head=2, use_cache=False
    )
    return transformers.GPT2LMHeadModel(config), torch.randint(31, (2, 7))


MODELS = [linear, batch_norm, lstm, gru, tied, attention, gpt2]


def dropped(model):
    if isinstance(model, Tied):
        recoup.weight_dropout(model.embedding, p=0.5, axes=(1,))
        return recoup.weight_dropout(model, "layer.weight_hh_l0", p=0.5)
    return recoup.weight_dropout(model, WEIGHTS, p=0.5)


def normed(model):
    names = [name for name, each in model.named_parameters() if each.dim() > 1 and "weight" in name]
    return recoup.weight_norm(dropped(model), names[-1])


class Scaled(nn.Module):
    """A function of a weight with a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.scale, self.drop = nn.Parameter(torch.tensor(0.5)), nn.Dropout()

    def forward(self, weight, draw):
        return self.drop(weight) * self.scale


def applied_to(model):
    return recoup.weights.apply(dropped(model), Scaled(), WEIGHTS, mode="always")


def noisy(model):
    return recoup.weight_noise(dropped(model), WEIGHTS, std=lambda step: 0.1 + step, mode="always")


WAYS = {
    "plain": lambda model: model,
    "dropout": dropped,
    "norm": normed,
    "function": applied_to,
    "noise in evaluation too": noisy,
}


def output_of(model, x, seed=3):
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(seed)
        found = model(x)
    return tensors(found if isinstance(found, (tuple, torch.Tensor)) else found.logits)


def modes_of(model):
    return [part.training for part in model.modules()]


def assert_twins(model, other, x):
    """`other` computes what `model` does in evaluation, bit by bit, over the same tensors."""
    got, modes = output_of(other, x), modes_of(model)
    model.eval()
    want = output_of(model, x)
    for part, mode in zip(model.modules(), modes, strict=True):
        part.training = mode
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)
    for named in (raw_parameters, lambda each: dict(each.named_buffers(remove_duplicate=False))):
        theirs = named(other)
        assert theirs.keys() == named(model).keys()
        assert all(value is theirs[name] for name, value in named(model).items())
    assert model.state_dict().keys() == other.state_dict().keys()


def step(model, x, optimizer):
    output = model(x)
    loss_of_all(output if isinstance(output, (tuple, torch.Tensor)) else output.logits).backward()
    optimizer.step()
    optimizer.zero_grad()


def built(make, way="dropout"):
    torch.manual_seed(0)
    model, x = make()
    return WAYS[way](model), x


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", MODELS)
def test_it_is_the_model_in_evaluation_after_every_step(make, way):
    model, x = built(make, way)
    model.train()
    other = twin(model)
    assert type(other).__name__ == type(model).__name__
    assert not any(modes_of(other))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = [output_of(other, x)[0]]
    for _ in range(2):
        step(model, x, optimizer)
        assert all(modes_of(model))
        assert_twins(model, other, x)
        seen.append(output_of(other, x)[0])
        assert not torch.equal(seen[-1], seen[-2])
    model.eval().train()
    assert not any(modes_of(other))
    assert all(entry.reparametrization.mode == "always" for entry in applied(other))
    assert any(entry.reparametrization.mode == "training" for entry in applied(model)) == (
        way != "plain"
    )


@pytest.mark.parametrize("make", MODELS)
def test_it_takes_no_memory(make):
    model, _ = built(make)
    with StorageTracker() as tracker:
        other = twin(model)
        # The handles of weights that a compiled graph would use, 8 bytes each.
        assert tracker.current_bytes <= 8 * len(applied(model))
    assert next(other.parameters()) is next(model.parameters())


def test_without_noise_it_has_the_classes_of_torch():
    model, _ = built(tied)
    assert [type(part) for part in twin(model).modules()] == [
        type(part) for part in Tied().modules()
    ]


def test_its_own_gradients_are_those_of_the_model():
    model, x = built(lstm)
    other = twin(model)
    loss_of_all(other(x)).backward()
    got = {name: each.grad for name, each in model.named_parameters()}
    model.zero_grad()
    loss_of_all(model.eval()(x)).backward()
    for name, each in model.named_parameters():
        assert torch.equal(got[name], each.grad)


# -- what replaces parameters ----------------------------------------------------------------------


def replaced(model):
    for part in model.modules():
        for key, value in list(part._parameters.items()):
            if value is not None:
                setattr(part, key, nn.Parameter(torch.randn_like(value)))


def assigned(model):
    state = {
        name: torch.rand_like(each) if each.is_floating_point() else each.clone()
        for name, each in model.state_dict().items()
    }
    model.load_state_dict(state, assign=True)


def emptied(model):
    model.to_empty(device="cpu")
    with torch.no_grad():
        for each in (*model.parameters(), *model.buffers()):
            each.copy_(torch.full_like(each, 0.1))


CHANGES = {
    "setattr": replaced,
    "assign": assigned,
    "to_empty": emptied,
    "to(dtype)": lambda model: model.to(torch.float64),
    "load": lambda model: model.load_state_dict(
        {name: each + 1 for name, each in model.state_dict().items()}
    ),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("side", ["model", "twin"])
@pytest.mark.parametrize("make", [batch_norm, lstm, gru, attention])
def test_it_follows_what_replaces_parameters(make, side, change):
    model, x = built(make)
    other = twin(model)
    before = output_of(other, x)
    CHANGES[change](model if side == "model" else other)
    assert_twins(model, other, x.to(next(model.parameters()).dtype))
    after = output_of(other, x.to(next(model.parameters()).dtype))
    assert not torch.equal(before[0], after[0])


def test_a_model_on_meta():
    with torch.device("meta"):
        model = dropped(nn.LSTM(4, 5))
    other = twin(model)
    model.to_empty(device="cpu")
    for each in model.parameters():
        nn.init.normal_(each)
    assert_twins(model, other, torch.randn(6, 2, 4))


# -- copies ----------------------------------------------------------------------------------------


def saved(pair):
    file = io.BytesIO()
    torch.save(pair, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "save": saved,
}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("way", ["dropout", "norm"])
@pytest.mark.parametrize("make", [batch_norm, gru, tied, attention])
def test_a_copy_of_both_is_another_pair(make, way, how):
    model, x = built(make, way)
    theirs, other = COPIES[how]((model, twin(model)))
    assert next(theirs.parameters()) is not next(model.parameters())
    step(theirs, x, torch.optim.SGD(theirs.parameters(), lr=0.1))
    replaced(theirs)
    assert_twins(theirs, other, x)


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_of_one_is_a_model_of_its_own(how):
    model, x = built(tied)
    other = twin(model)
    alone = COPIES[how](other)
    assert not {id(each) for each in alone.parameters()} & {id(each) for each in model.parameters()}
    assert alone.decoder.get_parameter("weight") is alone.embedding.get_parameter("weight")
    want = output_of(other, x)
    replaced(model)
    assert torch.equal(output_of(alone, x)[0], want[0])


def test_a_module_of_both():
    model, x = built(batch_norm)
    pair = nn.ModuleList([model, twin(model)])
    assert len(list(pair.parameters())) == len(list(model.parameters()))
    pair.double()
    assert_twins(*pair, x.double())


# -- reparametrizations that stay ------------------------------------------------------------------


def test_a_rate_of_the_model_is_that_of_its_twin():
    model = recoup.weight_noise(nn.Linear(6, 5), std=lambda step: float(step), mode="always")
    other, x = twin(model), torch.randn(3, 6)
    assert torch.equal(
        output_of(other, x)[0], F.linear(x, model.get_parameter("weight"), model.bias)
    )
    for _ in range(3):
        model(x)
    assert applied(other)[0].step == 3
    assert_twins(model, other, x)
    recoup.weights.update(model, std=0.5)
    assert_twins(model, other, x)
    assert repr(applied(other)) == repr(applied(model))


def test_one_draw_for_both():
    model = recoup.weight_noise(nn.Linear(6, 5), std=0.3, mode="always").eval()
    other, x = twin(model), torch.randn(3, 6)
    with recoup.weights.same_draw():
        assert torch.equal(model(x), other(x))
    assert not torch.equal(model(x), other(x))


def test_a_twin_of_a_twin():
    model, x = built(tied, "norm")
    assert_twins(model, twin(twin(model)), x)


def test_a_norm_that_is_removed_from_one():
    for first, second in ((0, 1), (1, 0)):
        model, x = built(linear, "norm")
        pair = (model, twin(model))
        want = output_of(pair[1], x)[0]
        recoup.weights.remove(pair[first])
        with pytest.raises(ValueError, match=r"no magnitude `weight_g` any more.*remove"):
            pair[second](x)
        recoup.weights.remove(pair[second])
        assert_twins(*pair, x)
        assert torch.allclose(output_of(model.eval(), x)[0], want)


# -- what is no registered parameter ---------------------------------------------------------------


class Hidden(nn.Module):
    """Has a module, a tensor and a function that torch does not know of."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.hidden = [{"layer": nn.Sequential(nn.Linear(4, 4))}]
        self.table, self.scales = torch.ones(4), [torch.ones(4)]
        self.call = self.layer.forward
        self.ways = [self.layer]

    def forward(self, x):
        x = self.ways[0](x) + self.call(x)
        return self.hidden[0]["layer"](x) * self.table * self.scales[0]


def test_what_is_not_registered_is_shared_too():
    torch.manual_seed(0)
    model, x = dropped(Hidden()), torch.randn(3, 4)
    other = twin(model)
    assert other.ways[0] is other.layer is not model.layer
    assert other.call.__self__ is other.layer
    hidden = model.hidden[0]["layer"][0]
    assert other.hidden[0]["layer"][0] is not hidden
    with torch.no_grad():
        hidden.get_parameter("weight").add_(1)
    hidden.bias = nn.Parameter(torch.ones(4))
    model.table.mul_(2)
    model.scales[0].mul_(3)
    assert_twins(model, other, x)


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")
@pytest.mark.parametrize(
    "make",
    [nn.utils.weight_norm, nn.utils.spectral_norm, nn.utils.parametrizations.weight_norm],
)
def test_parametrizations_of_torch(make):
    torch.manual_seed(0)
    model, x = nn.Sequential(make(nn.Linear(4, 4)), nn.Linear(4, 4)), torch.randn(3, 4)
    model(x)  # leaves a weight with a graph where a hook computes it
    other = twin(model)
    step(model, x, torch.optim.SGD(model.parameters(), lr=0.1))
    assert_twins(model, other, x)


def test_lazy_layers():
    model, x = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d()), torch.randn(3, 5)
    other = twin(model)
    model(x)
    assert_twins(model, other, x)


def test_a_planned_model():
    blocks = (nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(4))
    model, x = nn.Sequential(*blocks), torch.randn(64, 16)
    recoup.plan(model, x, budget="1 MiB").apply()
    other = twin(model)
    assert recoup.applied_plans(other) == []
    assert_twins(model, other, x)
    assert len(recoup.applied_plans(model)) == 1


# -- errors ----------------------------------------------------------------------------------------
