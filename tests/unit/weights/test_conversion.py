"""Files under the names of others, against the very modules of torch that wrote them.

The names and shapes of fastai (2.8.12 and 1.0.61), salesforce's awd-lstm-lm and MXNet (1.9.1 and
2.0.0b1) below were read off the real ones; the real ones run where they are installed.
"""

from __future__ import annotations

import copy
import io
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import recoup
from recoup.weights import apply, from_plain_names, to_plain_names

np = pytest.importorskip("numpy")


def identical(got, want):
    """Whether two files have the same names and, to the bit, the same values."""
    return got.keys() == want.keys() and all(
        a.dtype == want[name].dtype and torch.equal(a, want[name]) for name, a in got.items()
    )


def saved(module):
    """The state of a module, after it has been a file."""
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def moved(module):
    """The module with other values, so that no magnitude is the norm of its direction."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.rand_like(parameter) + 0.1)
    return module


def run(module, x):
    made = module(x)
    return made[0] if isinstance(made, tuple) else made


# -- both weight norms of torch --------------------------------------------------------------------


def lstm():
    return nn.LSTM(3, 4, num_layers=2, bidirectional=True)


def nested():
    return nn.Sequential(nn.Linear(3, 5), nn.Sequential(nn.Tanh(), nn.Linear(5, 2, bias=False)))


RECURRENT = ["weight_ih_l0", "weight_hh_l0", "weight_hh_l0_reverse", "weight_hh_l1"]
NORMED = {  # how to build, what has a norm, along which axis, the shape of the input
    "linear": (lambda: nn.Linear(3, 4), ["weight"], 0, (2, 3)),
    "linear-1": (lambda: nn.Linear(3, 4), ["weight"], 1, (2, 3)),
    "linear-none": (lambda: nn.Linear(3, 4), ["weight"], None, (2, 3)),
    "linear-one-row": (lambda: nn.Linear(3, 1), ["weight"], 0, (2, 3)),
    "linear-square": (lambda: nn.Linear(3, 3), ["weight"], 1, (2, 3)),
    "conv1d": (lambda: nn.Conv1d(3, 4, 2), ["weight"], 2, (2, 3, 5)),
    "conv2d-1": (lambda: nn.Conv2d(3, 4, 2), ["weight"], 1, (2, 3, 5, 5)),
    "transposed": (lambda: nn.ConvTranspose2d(3, 4, 2), ["weight"], 1, (2, 3, 5, 5)),
    "lstm": (lstm, RECURRENT, 0, (2, 5, 3)),
    "nested": (nested, ["0.weight", "1.1.weight"], 0, (2, 3)),
}


def with_norm(module, names, dim, norm):
    for name in names:
        owner, _, key = name.rpartition(".")
        norm(module.get_submodule(owner), key, dim)
    return module


@pytest.fixture(params=NORMED)
def normed(request):
    return NORMED[request.param]


NORMS = {
    "weight_norm": pytest.param(
        "weight_norm",
        nn.utils.weight_norm,
        marks=pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated"),
    ),
    "parametrizations": ("parametrizations", parametrizations.weight_norm),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("kind", "norm"), NORMS.values(), ids=NORMS.keys())
def test_a_weight_norm_of_torch_both_ways(normed, kind, norm, dtype):
    build, names, dim, shape = normed
    plain = build().to(dtype)
    theirs = moved(with_norm(copy.deepcopy(plain), names, dim, norm))
    file = saved(theirs)
    ours = recoup.weight_norm(copy.deepcopy(plain), list(names), dim)
    converted = to_plain_names(file)
    assert ours.load_state_dict(converted, strict=True)
    x = torch.randn(shape).to(dtype)
    want = run(theirs, x)
    assert torch.equal(run(ours, x), want)
    assert {t.data_ptr() for t in converted.values()} == {t.data_ptr() for t in file.values()}
    assert identical(to_plain_names(converted), converted)

    plain.load_state_dict(to_plain_names(file, fold=True), strict=True)
    assert torch.equal(run(plain, x), want)
    assert identical(to_plain_names(converted, fold=True), plain.state_dict())

    back = from_plain_names(saved(ours), to=kind)
    assert identical(back, file)
    again = with_norm(build().to(dtype), names, dim, norm)
    again.load_state_dict(back, strict=True)
    assert torch.equal(run(again, x), want)


def test_the_order_is_that_of_the_file():
    file = parametrizations.weight_norm(nn.Linear(3, 2)).state_dict()
    assert [*to_plain_names(file)] == ["bias", "weight_g", "weight"]
    assert [*from_plain_names(to_plain_names(file), "parametrizations")] == [*file]


@pytest.mark.parametrize(("kind", "norm"), NORMS.values(), ids=NORMS.keys())
def test_of_a_model_in_data_parallel(kind, norm):
    theirs = nn.DataParallel(with_norm(nested(), ["0.weight", "1.1.weight"], 0, norm))
    ours = nn.DataParallel(recoup.weight_norm(nested(), ["0.weight", "1.1.weight"]))
    ours.load_state_dict(to_plain_names(theirs.state_dict()), strict=True)
    assert identical(from_plain_names(ours.state_dict(), kind), theirs.state_dict())


def test_where_chooses():
    state = recoup.weight_norm(nested(), r".*weight").state_dict()
    some = from_plain_names(state, "weight_norm", r"1\..*")
    assert [*some] == ["0.weight", "0.bias", "0.weight_g", "1.1.weight_v", "1.1.weight_g"]


# -- torch.nn.utils.parametrize --------------------------------------------------------------------


class Tripled(nn.Module):
    def forward(self, weight):
        return weight * 3


class LoRA(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.a = nn.Parameter(torch.randn(2, weight.shape[1]))
        self.b = nn.Parameter(torch.randn(weight.shape[0], 2))

    def forward(self, weight, draw=None):
        return weight + self.b @ self.a


@pytest.mark.parametrize("key", ["weight_hh_l0", "weight_ih_l1_reverse"])
def test_an_original_both_ways(key):
    theirs, ours = lstm(), lstm()
    parametrize.register_parametrization(theirs, key, Tripled())
    apply(ours, lambda weight, draw: weight * 3, key, mode="always")
    ours.load_state_dict(to_plain_names(saved(theirs)), strict=True)
    x = torch.randn(2, 5, 3)
    assert torch.equal(run(ours, x), run(theirs, x))
    assert identical(
        from_plain_names(ours.state_dict(), "parametrizations", where=key), theirs.state_dict()
    )


def test_the_tensors_of_a_parametrization_are_those_of_the_function():
    theirs, ours = nested(), nested()
    for model, register in ((theirs, parametrize.register_parametrization), (ours, None)):
        for layer in (model[0], model[1][1]):
            lora = LoRA(layer.weight)
            if register is None:
                apply(layer, lora, mode="always")
            else:
                register(layer, "weight", Tripled())
                register(layer, "weight", lora)
    file = saved(theirs)
    assert "1.1.parametrizations.weight.1.b" in file
    with pytest.raises(ValueError, match=r"parametrization with the index 1.*functions"):
        to_plain_names(file)
    plain = to_plain_names(file, functions=[None, "LoRA"])
    ours.load_state_dict(plain, strict=True)
    back = from_plain_names(ours.state_dict(), "parametrizations", functions=[None, "LoRA"])
    assert identical(back, file)
    nested().load_state_dict(to_plain_names(file, functions=[None, None]), strict=True)


def test_a_norm_below_a_function():
    theirs = parametrizations.weight_norm(nn.Linear(3, 2))
    parametrize.register_parametrization(theirs, "weight", LoRA(theirs.weight))
    ours = recoup.weight_norm(nn.Linear(3, 2))
    apply(ours, LoRA(ours.weight), mode="always")
    ours.load_state_dict(to_plain_names(theirs.state_dict(), functions=[None, "LoRA"]))
    x = torch.randn(4, 3)
    assert torch.equal(ours(x), theirs(x))
    back = from_plain_names(ours.state_dict(), "parametrizations", functions=[None, "LoRA"])
    assert identical(back, theirs.state_dict())


def test_a_parametrization_with_parametrizations():
    theirs = nn.Linear(3, 2)
    lora = LoRA(theirs.weight)
    parametrize.register_parametrization(lora, "a", Tripled())
    parametrize.register_parametrization(theirs, "weight", lora)
    plain = to_plain_names(theirs.state_dict(), functions=["LoRA"])
    assert sorted(plain) == ["bias", "weight", "weight_lora.a", "weight_lora.b"]


def test_buffers_of_a_parametrization_may_be_left_out():
    theirs = parametrizations.spectral_norm(nn.Linear(3, 2))
    plain = to_plain_names(theirs.state_dict(), functions=[None])
    assert torch.equal(plain.pop("weight"), theirs.parametrizations.weight.original)
    assert [*plain] == ["bias"]


# -- fastai and salesforce -------------------------------------------------------------------------


class Wrapper(nn.Module):
    """A wrapper with the names of fastai's, of today or of its version 1, or of salesforce's."""

    def __init__(self, module, kind, keys=("weight_hh_l0",)):
        super().__init__()
        self.module = module
        for key in keys:
            raw = nn.Parameter(getattr(module, key).data)
            if kind != "fastai-1":
                del module._parameters[key]
            (module if kind == "salesforce" else self).register_parameter(f"{key}_raw", raw)


class Embedded(nn.Module):
    def __init__(self, embedding):
        super().__init__()
        self.emb = embedding


def awd_lstm(kind, wrapped=True, bidirectional=False):
    """A network with the names of fastai's AWD_LSTM(11, 6, 8, 2), or of salesforce's."""
    num_sides = 2 if bidirectional else 1
    sizes = [(6, 8 // num_sides), (8, 6 // num_sides)]
    rnns = [nn.LSTM(*each, bidirectional=bidirectional) for each in sizes]
    parts = {"encoder": nn.Embedding(11, 6)}
    if wrapped and kind != "salesforce":
        parts["encoder_dp"] = Embedded(parts["encoder"])
    parts["rnns"] = nn.ModuleList([Wrapper(rnn, kind) for rnn in rnns] if wrapped else rnns)
    network = nn.Module()
    for name, part in parts.items():
        network.add_module(name, part)
    return network


FASTAI = {  # of AWD_LSTM(11, 6, 8, 2).state_dict(), fastai 2.8.12
    "encoder.weight": (11, 6),
    "encoder_dp.emb.weight": (11, 6),
    "rnns.0.weight_hh_l0_raw": (32, 8),
    "rnns.0.module.weight_ih_l0": (32, 6),
    "rnns.0.module.bias_ih_l0": (32,),
    "rnns.0.module.bias_hh_l0": (32,),
    "rnns.1.weight_hh_l0_raw": (24, 6),
    "rnns.1.module.weight_ih_l0": (24, 8),
    "rnns.1.module.bias_ih_l0": (24,),
    "rnns.1.module.bias_hh_l0": (24,),
}


def test_the_stand_in_has_the_names_of_fastai():
    state = awd_lstm("fastai").state_dict()
    assert {name: tuple(tensor.shape) for name, tensor in state.items()} == FASTAI


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("kind", ["fastai", "salesforce"])
@pytest.mark.parametrize("wrap", [lambda m: m, nn.DataParallel, nn.Sequential])
def test_wrapped_recurrent_layers_both_ways(wrap, kind, bidirectional):
    theirs = wrap(awd_lstm(kind, bidirectional=bidirectional))
    ours = wrap(awd_lstm(kind, wrapped=False, bidirectional=bidirectional))
    recoup.weight_dropout(ours, r".*weight_hh_l0", p=0.5)
    file = saved(theirs)
    plain = to_plain_names(file)
    ours.load_state_dict(plain, strict=True)
    assert identical(to_plain_names(plain), plain)
    back = from_plain_names(ours.state_dict(), kind)
    assert identical(back, file)
    theirs.load_state_dict(back, strict=True)


@pytest.mark.parametrize("kind", ["fastai", "salesforce"])
@pytest.mark.parametrize("wrap", [lambda m: m, nn.DataParallel])
def test_a_lone_wrapper(wrap, kind):
    theirs, ours = wrap(Wrapper(nn.LSTM(3, 4), kind)), wrap(nn.LSTM(3, 4))
    ours.load_state_dict(to_plain_names(theirs.state_dict()), strict=True)
    assert identical(from_plain_names(ours.state_dict(), kind), theirs.state_dict())


def test_the_raw_weight_wins_over_its_dropped_copy():
    theirs = awd_lstm("fastai-1")
    file = saved(theirs)
    assert "rnns.0.module.weight_hh_l0" in file
    for name in file:
        if name.endswith("module.weight_hh_l0"):
            file[name] = nn.functional.dropout(file[name])
    for order in (file, dict(reversed(file.items()))):
        plain = to_plain_names(order)
        awd_lstm("", wrapped=False).load_state_dict(plain, strict=True)
        raw = theirs.rnns[1].weight_hh_l0_raw
        assert torch.equal(plain["rnns.1.weight_hh_l0"], raw)


def test_a_salesforce_wrapper_after_forward_has_a_copy_too():
    file = Wrapper(nn.LSTM(3, 4), "salesforce").state_dict()
    raw = file["module.weight_hh_l0_raw"]
    plain = to_plain_names({**file, "module.weight_hh_l0": raw * 2})
    assert plain["weight_hh_l0"] is raw
    assert sorted(plain) == sorted(nn.LSTM(3, 4).state_dict())


def test_several_weights_of_one_wrapper():
    keys = ["weight_hh_l0", "bias_ih_l0"]
    for kind in ("fastai", "salesforce"):
        theirs = Wrapper(nn.LSTM(3, 4), kind, keys)
        plain = to_plain_names(theirs.state_dict())
        nn.LSTM(3, 4).load_state_dict(plain, strict=True)
        assert identical(from_plain_names(plain, kind, "|".join(keys)), theirs.state_dict())


def test_a_second_embedding_with_other_values_is_a_conflict():
    file = saved(awd_lstm("fastai"))
    file["encoder_dp.emb.weight"] = file["encoder_dp.emb.weight"].clone()
    assert "encoder_dp.emb.weight" not in to_plain_names(file)
    file["encoder_dp.emb.weight"] += 1
    with pytest.raises(ValueError, match=r"`encoder.weight` and `encoder_dp.emb.weight` with diff"):
        to_plain_names(file)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("bidir", [False, True])
def test_the_real_fastai(bidir):
    models = pytest.importorskip("fastai.text.models.awdlstm", exc_type=ImportError)
    theirs = models.AWD_LSTM(11, 6, 8, 2, bidir=bidir).eval()
    theirs(torch.randint(11, (3, 5)))
    plain = awd_lstm("", wrapped=False, bidirectional=bidir)
    plain.load_state_dict(to_plain_names(theirs.state_dict()), strict=True)
    again = models.AWD_LSTM(11, 6, 8, 2, bidir=bidir).eval()
    again.load_state_dict(from_plain_names(plain.state_dict(), "fastai"), strict=True)
    x = torch.randint(11, (3, 5))
    theirs.reset()
    again.reset()
    assert torch.equal(again(x), theirs(x))


# -- gluon -----------------------------------------------------------------------------------------

# The outputs of MXNet 1.9.1 for the input (0.5, -1), with the parameters in the order of their
# names, and sin(0), sin(1), ... as their values.
RECORDED = [
    (
        nn.LSTM(1, 2, 2, bidirectional=True),
        [
            0.08646778017282486,
            -0.0017709778621792793,
            0.01710447296500206,
            -0.3918384909629822,
            0.06331027299165726,
            -0.009490600787103176,
            0.007837718352675438,
            -0.2279587984085083,
        ],
    ),
    (
        nn.GRU(1, 2, 2, bidirectional=True),
        [
            0.6758492588996887,
            0.5270524024963379,
            -0.4912700355052948,
            -0.44374802708625793,
            0.4037342965602875,
            0.79654860496521,
            -0.318218857049942,
            -0.6612992286682129,
        ],
    ),
    (
        nn.RNN(1, 2, 2),
        [-0.6915144920349121, -0.7551184296607971, -0.2169090211391449, -0.9989724159240723],
    ),
    (nn.LSTM(1, 2, proj_size=1), [0.4910852611064911, 0.3661007583141327]),
]


def sines(shapes):
    """Arrays of sin(0), sin(1), ... in the order of their names."""
    arrays, start = {}, 0
    for name, shape in sorted(shapes.items()):
        stop = start + math.prod(shape)
        arrays[name] = np.sin(np.arange(start, stop)).reshape(shape).astype("float32")
        start = stop
    return arrays


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize(("layer", "want"), RECORDED, ids=["lstm", "gru", "rnn", "projected"])
def test_recurrent_layers_of_mxnet(layer, want):
    spelled = from_plain_names(layer.state_dict(), "gluon")
    arrays = sines({name: array.shape for name, array in spelled.items()})
    plain = to_plain_names(arrays)
    assert [*plain] == [*to_plain_names(plain)]
    layer.load_state_dict(plain, strict=True)
    made = layer(torch.tensor([[[0.5]], [[-1.0]]]))[0].flatten()
    torch.testing.assert_close(made, torch.tensor(want), rtol=1e-5, atol=1e-6)
    back = from_plain_names(layer.state_dict(), "gluon")
    assert back.keys() == arrays.keys()
    assert all((back[name] == arrays[name]).all() for name in arrays)


def test_the_names_of_mxnet():
    """What 1.9.1 saves, 2.0 before its beta, and a cell."""
    both = from_plain_names(nn.LSTM(4, 3, 2, bidirectional=True).state_dict(), "gluon")
    assert [*both][:8] == [
        "_unfused.0.l_cell.i2h_weight",
        "_unfused.0.l_cell.h2h_weight",
        "_unfused.0.l_cell.i2h_bias",
        "_unfused.0.l_cell.h2h_bias",
        "_unfused.0.r_cell.i2h_weight",
        "_unfused.0.r_cell.h2h_weight",
        "_unfused.0.r_cell.i2h_bias",
        "_unfused.0.r_cell.h2h_bias",
    ]
    one = from_plain_names({"encoder.0.weight_hr_l0": torch.ones(2, 3)}, "gluon")
    assert [*one] == ["encoder.0._unfused.0.h2r_weight"]
    array = np.ones((12, 3), "float32")
    spelled = {
        "encoder.0.l0_h2h_weight": array,
        "encoder.0.r1_i2h_bias": array,
        "cell.i2h_weight": array,
    }
    assert [*to_plain_names(spelled)] == [
        "encoder.0.weight_hh_l0",
        "encoder.0.bias_ih_l1_reverse",
        "cell.weight_ih",
    ]
    cell = nn.LSTMCell(4, 3)
    cell.load_state_dict(to_plain_names(from_plain_names(cell.state_dict(), "gluon")))


def gluon_like():
    return nn.Sequential(
        nn.Embedding(5, 4),
        nn.LayerNorm(4),
        nn.Linear(4, 3),
        nn.BatchNorm1d(3),
        nn.PReLU(),
    )


def test_layers_of_gluon_both_ways():
    arrays = {  # from MXNet 2.0.0b1, but for the sizes
        "0.weight": np.random.rand(5, 4).astype("float32"),
        "1.gamma": np.random.rand(4).astype("float32"),
        "1.beta": np.random.rand(4).astype("float32"),
        "2.weight": np.random.rand(3, 4).astype("float32"),
        "2.bias": np.random.rand(3).astype("float32"),
        "3.gamma": np.random.rand(3).astype("float32"),
        "3.beta": np.random.rand(3).astype("float32"),
        "3.running_mean": np.random.rand(3).astype("float32"),
        "3.running_var": np.random.rand(3).astype("float32"),
        "4.alpha": np.random.rand(1).astype("float32"),
    }
    file = io.BytesIO()
    np.savez(file, **arrays)
    file.seek(0)
    model = gluon_like()
    model.load_state_dict(to_plain_names(np.load(file)), strict=True)
    assert torch.equal(model[3].weight, torch.from_numpy(arrays["3.gamma"]))
    back = from_plain_names(model.state_dict(), "gluon")
    assert [*back] == [*arrays]
    assert all(type(back[name]) is np.ndarray for name in arrays)
    assert all((back[name] == arrays[name]).all() for name in arrays)


def test_what_mxnet_loads_is_read_through_its_own_method():
    class NDArray:
        def __init__(self, value):
            self.value = value

        def asnumpy(self):
            return self.value

    array = np.arange(3.0)
    array.flags.writeable = False  # torch warns about sharing such memory
    plain = to_plain_names({"0.gamma": NDArray(array)})
    assert torch.equal(plain["0.weight"], torch.arange(3.0, dtype=torch.float64))


def test_arrays_share_memory():
    array = np.ones((3, 2), "float32")
    plain = to_plain_names({"0.weight": array})
    array[0, 0] = 7
    assert plain["0.weight"][0, 0] == 7
    back = from_plain_names(plain, "gluon")
    array[0, 1] = 8
    assert back["0.weight"][0, 1] == 8


@pytest.mark.filterwarnings("ignore")
def test_the_real_mxnet(tmp_path):
    mx = pytest.importorskip("mxnet", exc_type=ImportError)
    net = mx.gluon.nn.HybridSequential()
    net.add(mx.gluon.nn.Embedding(9, 4), mx.gluon.rnn.LSTM(3, 2, bidirectional=True, input_size=4))
    net.add(mx.gluon.nn.BatchNorm(axis=2, in_channels=6))
    net.initialize(mx.init.Normal(0.5))
    net.save_parameters(str(tmp_path / "old.params"))
    plain = to_plain_names(mx.nd.load(str(tmp_path / "old.params")))
    model = nn.ModuleList([nn.Embedding(9, 4), nn.LSTM(4, 3, 2, bidirectional=True)])
    model.append(nn.BatchNorm1d(6)).eval()
    model.load_state_dict(plain, strict=True)
    ids = np.arange(6).reshape(3, 2)
    made = model[1](model[0](torch.from_numpy(ids)))[0]
    made = model[2](made.transpose(1, 2)).transpose(1, 2)
    want = net(mx.nd.array(ids)).asnumpy()
    torch.testing.assert_close(made.detach(), torch.as_tensor(want), atol=1e-5, rtol=1e-5)
    back = from_plain_names(model.state_dict(), "gluon")
    mx.nd.save(str(tmp_path / "new.params"), {k: mx.nd.array(v) for k, v in back.items()})
    net.initialize(force_reinit=True)
    net.load_parameters(str(tmp_path / "new.params"))
    assert (net(mx.nd.array(ids)).asnumpy() == want).all()


# -- what merely looks alike -----------------------------------------------------------------------

ALIKE = {
    "recoup's own norm": recoup.weight_norm(nn.Linear(3, 2)).state_dict(),
    "the names of attention": {"bias_k": torch.ones(1, 1, 4), "bias_v": torch.ones(1, 1, 4)},
    "three projections": {f"weight_{key}": torch.ones(2, 2) for key in "qkv"},
    "a gate and a value": {"head_g": torch.ones(4), "head_v": torch.ones(4)},
    "other shapes": {"head_g": torch.ones(2, 1), "head_v": torch.ones(3, 4)},
    "no magnitude": {"head_g": torch.ones(3, 4), "head_v": torch.ones(3, 4)},
    "all three": {"a": torch.ones(3, 4), "a_g": torch.ones(3, 1), "a_v": torch.ones(3, 4)},
    "spectral norm": {f"weight_{key}": torch.ones(3) for key in ("orig", "u", "v")},
    "a raw weight": {"weight_raw": torch.ones(2, 2), "bias": torch.ones(2)},
    "a raw weight beside layers": {
        "weight_raw": torch.ones(2),
        "module.0.weight": torch.ones(2, 2),
    },
    "a raw weight in data parallel": {
        "module.weight_raw": torch.ones(2),
        "module.layer.weight": torch.ones(2, 2),
    },
    "a raw number beside a module": {
        "temperature_raw": torch.ones(()),
        "module.weight": torch.ones(2, 2),
    },
    "a child with such a name": {
        "xmodule.weight_raw": torch.ones(2),
        "xmodule.bias": torch.ones(2),
    },
    "gamma of a model in torch": {"0.gamma": torch.ones(3), "0.beta": torch.ones(3)},
    "a state that is no tensor": {"0._extra_state": {"step": 3}, "0.weight": torch.ones(3)},
    "nothing": {},
}


@pytest.mark.parametrize("state", ALIKE.values(), ids=ALIKE.keys())
def test_other_names_stay(state):
    assert [*to_plain_names(state).items()] == [*state.items()]


@pytest.mark.parametrize("kind", ["weight_norm", "parametrizations", "fastai", "salesforce"])
def test_a_plain_model_stays_on_the_way_back(kind):
    state = {**gluon_like().state_dict(), "encoder.weight": torch.ones(2, 2)}
    assert [*from_plain_names(state, kind).items()] == [*state.items()]


# -- errors ----------------------------------------------------------------------------------------

X = torch.ones(3, 2)
BAD = {
    "a path": ("model.params", r"`state_dict` is a str.*mxnet\.nd\.load"),
    "no names": ({3: X}, r"has the name 3"),
    "a checkpoint": ({"model": {"weight": X}}, r'is a dict.*state_dict\["model"\]'),
    "a number": ({"epoch": 3}, r'state_dict\["epoch"\]` is a int.*Leave it out'),
    "no magnitude": ({"a.weight_v": X, "a.bias": X}, r"`a.weight_v` without `a.weight_g`"),
    "no direction": ({"weight_g": X}, r"`weight_g` without `weight_v`"),
    "half a pair": ({"parametrizations.weight.original0": X}, r"original0`, but a weight norm"),
    "three originals": (
        {f"parametrizations.weight.original{i}": X for i in range(3)},
        r"original2`, but a weight norm",
    ),
    "another pair": (
        {f"parametrizations.weight.original{i}": X for i in range(2)},
        r"no magnitude of `parametrizations.weight.original1`",
    ),
    "two values": (
        {"weight": X, "parametrizations.weight.original": X + 1},
        r"`weight` and `parametrizations.weight.original` with different",
    ),
    "scopes": ({"arg:dense0_weight": np.ones(2)}, r"names a scope.*save_parameters"),
    "a scoped layer": ({"lstm0_l0_i2h_weight": np.ones(2)}, r"names a scope"),
    "a flat layer": ({"0.rnn_param": np.ones(2)}, r"`0.rnn_param`.*Split it"),
    "no numbers": ({"a": np.array(["a"])}, r'state_dict\["a"\]` is an array that torch does not'),
    "reversed": ({"a": np.ones(3)[::-1]}, r"does not take.*ascontiguousarray"),
}


@pytest.mark.parametrize(("state", "message"), BAD.values(), ids=BAD.keys())
def test_bad_files(state, message):
    with pytest.raises(ValueError, match=message):
        to_plain_names(state)


def test_bad_arguments():
    state = {"weight": X, "bias": X[0]}
    with pytest.raises(ValueError, match=r"`to` is 'fast'.*'fastai'"):
        from_plain_names(state, "fast")
    with pytest.raises(ValueError, match=r"`where` is 'wait'.*`weight`, `bias`"):
        from_plain_names(state, "parametrizations", "wait")
    for where in ("(", nn.Linear):
        with pytest.raises(ValueError, match=r"`where` is .*must be a regular expression"):
            from_plain_names(state, "weight_norm", where)
    with pytest.raises(ValueError, match=r"matches no tensor that can"):
        from_plain_names(state, "weight_norm", "weight")  # has no magnitude
    with pytest.raises(ValueError, match="`functions` is 'LoRA'"):
        to_plain_names(state, functions="LoRA")
    with pytest.raises(ValueError, match=r"`weight` is torch.bfloat16"):
        from_plain_names({"weight": X.bfloat16()}, "gluon")
    with pytest.raises(ValueError, match=r"`weight_v` and `weight` with different"):
        from_plain_names({"weight_v": X * 2, "weight": X, "weight_g": X[:, :1]}, "weight_norm")


def test_equal_values_under_two_names_are_no_conflict():
    state = {"weight": X, "parametrizations.weight.original": X.clone()}
    assert to_plain_names(state)["weight"] is X
    file = saved(awd_lstm("fastai"))  # of a training that diverged
    for name in file:
        file[name] = file[name].clone()
        file[name][0] = math.nan
    assert "encoder_dp.emb.weight" not in to_plain_names(file)


def test_on_the_meta_device():
    with torch.device("meta"):
        file = parametrizations.weight_norm(nn.Conv1d(3, 4, 2)).state_dict()
        fastai = awd_lstm("fastai").state_dict()
    plain = to_plain_names(file, fold=True)
    assert plain["weight"].is_meta
    assert plain["weight"].shape == (4, 3, 2)
    assert "encoder.weight" in to_plain_names(fastai)


# -- any model -------------------------------------------------------------------------------------

LEAVES = {
    "linear": nn.Linear(2, 3),
    "normed": recoup.weight_norm(nn.Conv1d(2, 3, 2)),
    "lstm": nn.LSTM(2, 3, bidirectional=True),
    "normed lstm": recoup.weight_norm(nn.LSTM(2, 3, 2), r"weight_hh_l\d"),
    "batch norm": nn.BatchNorm1d(3),
    "attention": nn.MultiheadAttention(4, 2, add_bias_kv=True),
}
PARTS = ["module", "rnns", "0", "1", "encoder", "raw", "layer_v", "weight"]
paths = st.lists(st.sampled_from(PARTS), max_size=3).map(".".join)


@settings(deadline=None, max_examples=200)
@given(
    leaves=st.dictionaries(paths, st.sampled_from([*LEAVES]), max_size=5),
    kind=st.sampled_from(["weight_norm", "parametrizations", "fastai", "salesforce", "gluon"]),
)
def test_round_trips(leaves, kind):
    plain = {}
    for path, leaf in leaves.items():
        if any(
            f"{other}.".startswith(f"{path}." if path else "") for other in leaves.keys() - {path}
        ):
            continue  # a layer has no children
        for name, tensor in LEAVES[leaf].state_dict().items():
            if kind != "gluon" or "batches" not in name:
                plain[f"{path}.{name}" if path else name] = tensor
    there = from_plain_names(plain, kind)
    assert identical(to_plain_names(there), plain)
    values = {id(tensor) for tensor in plain.values()}
    assert kind == "gluon" or all(id(tensor) in values for tensor in there.values())
