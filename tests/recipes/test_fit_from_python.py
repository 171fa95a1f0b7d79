"""Training from Python: the numbers of the commands, and a caller that is left as it was."""

from __future__ import annotations

import copy
import doctest
import json
import os
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from sklearn.datasets import load_digits

from recoup.errors import BudgetError
from recoup.flows import RealNVP
from recoup.flows import fit as fit_flow
from recoup.recipes import language_model
from recoup.recipes.cli import main
from recoup.recipes.flow.train import prepare as prepare_flow
from recoup.recipes.language_model.train import prepare as prepare_lm
from tests.recipes.conftest import TINY, TINY_LM
from tests.recipes.test_flow_fit import same

QUIET = {"progress": False, "trainer": {"accelerator": "cpu"}}
# What differs between two runs that compute the same.
OF_ITS_OWN = {"data", "seconds", "step"}


def points(num=400):
    drawn = torch.randn(num, 2, generator=torch.Generator().manual_seed(0))
    return drawn @ torch.tensor([[1.0, 0.9], [0.0, 0.3]])


def small_flow(**options):
    torch.manual_seed(0)
    return RealNVP((2,), levels=None, **{"num_steps": 2, "width": 8} | options)


def small_network(**options):
    torch.manual_seed(0)
    return language_model.LanguageModel(9, embed_size=8, hidden_size=16, num_layers=1, **options)


def fit_points(flow, data=None, **options):
    return fit_flow(flow, points() if data is None else data, **{"epochs": 1} | QUIET | options)


def fit_tokens(network, tokens=None, **options):
    tokens = torch.arange(3000) % 9 if tokens is None else tokens
    return language_model.fit(network, tokens, **{"epochs": 1} | QUIET | options)


def compared(ours, theirs):
    """Two results without what belongs to each run alone."""
    first, second = ({k: v for k, v in it.items() if k not in OF_ITS_OWN} for it in (ours, theirs))
    return first, {name: value for name, value in second.items() if name != "flow"}


def test_a_flow_is_trained_as_by_the_command():
    digits = torch.from_numpy(load_digits().images).to(torch.uint8)[:, None]
    command = [*TINY, "--epochs", "2", "--out", "theirs", "--trainer.accelerator", "cpu"]
    flow = copy.deepcopy(prepare_flow(command).model.flow)
    assert main(["flow", "fit", *command]) == 0
    torch.set_num_threads(1)
    fitted = fit_flow(
        flow,
        digits,
        epochs=2,
        batch_size=300,
        learning_rate=0.01,
        num_warmup_steps=5,
        out="ours",
        **QUIET,
    )
    theirs = torch.load("theirs/checkpoints/best.ckpt", weights_only=True)["state_dict"]
    assert same({f"flow.{name}": value for name, value in flow.state_dict().items()}, theirs)
    found = json.loads(Path("theirs/run.json").read_text())
    ours, theirs = compared(json.loads(Path("ours/run.json").read_text()), found)
    assert ours == theirs
    assert fitted.results["step"].keys() == found["step"].keys()
    assert fitted.bits_per_dim == found["test_bits_per_dim"]
    assert fitted.epochs == 2
    assert fitted.peak_bytes == found["step"]["peak_bytes"]


@pytest.mark.slow
def test_a_language_model_is_trained_as_by_the_command(text):
    command = [*TINY_LM, "--data", text, "--epochs", "2", "--trainer.accelerator", "cpu"]
    command += ["--out", "theirs", "--memory", "sqrt", "--early_stopping.patience", "20"]
    run = prepare_lm(command)
    network, parts = copy.deepcopy(run.model.network), run.datamodule.parts
    assert main(["lm", "fit", *command]) == 0
    torch.set_num_threads(1)
    fitted = language_model.fit(
        network,
        parts["train"],
        validation=parts["validation"],
        test=parts["test"],
        memory="sqrt",
        epochs=2,
        batch_size=3,
        eval_batch_size=2,
        bptt=12,
        learning_rate=5,
        activation_penalty=0.1,
        out="ours",
        **QUIET,
    )
    theirs = torch.load("theirs/checkpoints/best.ckpt", weights_only=True)["state_dict"]
    assert same({f"network.{name}": value for name, value in network.state_dict().items()}, theirs)
    found = json.loads(Path("theirs/run.json").read_text())
    ours, theirs = compared(json.loads(Path("ours/run.json").read_text()), found)
    assert ours == theirs
    assert fitted.perplexity == found["test_perplexity"] > 1
    assert fitted.peak_bytes == found["step"]["peak_bytes"] > 0


def test_a_text_is_split_from_its_end_as_a_file_is():
    tokens = torch.arange(1000) % 9
    data = language_model.fit(
        small_network(), tokens, epochs=1, batch_size=2, validation=0.2, test=0.3, **QUIET
    )
    whole = language_model.fit(
        small_network(),
        tokens[:500],
        epochs=1,
        batch_size=2,
        validation=tokens[500:700],
        test=tokens[700:],
        **QUIET,
    )
    assert data.perplexity == whole.perplexity
    assert data.validation_perplexity == whole.validation_perplexity


@pytest.mark.parametrize(
    ("fit", "make"), [(fit_points, small_flow), (fit_tokens, small_network)], ids=["flow", "lm"]
)
def test_the_caller_is_left_as_it_was(fit, make, tmp_path):
    model = make()
    handler, num_threads = signal.getsignal(signal.SIGINT), torch.get_num_threads()
    torch.manual_seed(7)
    before = torch.get_rng_state()
    fitted = fit(model)
    assert torch.equal(torch.get_rng_state(), before)
    assert signal.getsignal(signal.SIGINT) is handler
    assert torch.get_num_threads() == num_threads
    assert not model.training
    assert list(tmp_path.iterdir()) == []
    assert fitted.seconds > 0
    again = make()
    assert fit(again).results["num_steps"] == fitted.results["num_steps"]
    assert same(dict(again.state_dict()), dict(model.state_dict()))


def test_memory_is_set_and_stays():
    flow = small_flow()
    assert fit_points(flow, memory="constant").results["memory"] == "constant"
    assert flow.memory == "constant"
    assert fit_points(flow).results["memory"] == "constant"


def test_bytes_bound_a_step():
    # Adam makes whole steps of gradients that are little more than the rounding of inverses.
    linear, flow = (small_flow(num_steps=6, width=16).double() for _ in range(2))
    most = fit_points(linear, points().double(), batch_size=200).peak_bytes
    fitted = fit_points(flow, points().double(), batch_size=200, memory=f"{0.7 * most:.0f} B")
    assert fitted.peak_bytes < 0.8 * most
    for ours, theirs in zip(flow.parameters(), linear.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-8)
    with pytest.raises(BudgetError):
        fit_points(small_flow(), memory="1 KiB")


def test_labels_and_parts_of_their_own():
    flow, labels = small_flow(num_classes=3), torch.arange(90) % 3
    data = (points(90), labels)
    fitted = fit_points(flow, data, validation=data, test=data)
    assert fitted.bits_per_dim == pytest.approx(fitted.validation_bits_per_dim)
    assert flow.sample(3, labels=labels[:3]).shape == (3, 2)


def test_no_test_part():
    assert fit_points(small_flow(), test=0.0).bits_per_dim is None
    assert "not tested" in str(fit_points(small_flow(), test=0.0))
    assert fit_tokens(small_network(), test=0.001).perplexity is None


class _Interrupt(Callback):
    def on_train_batch_end(self, trainer, *args, **kwargs):
        if trainer.global_step == 2:
            os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupt_ends_it_after_a_step():
    flow = small_flow()
    start = copy.deepcopy(flow.state_dict())
    trainer = {"accelerator": "cpu", "callbacks": [_Interrupt()]}
    with pytest.raises(KeyboardInterrupt):
        fit_points(flow, epochs=99, batch_size=10, trainer=trainer)
    assert not flow.training
    assert not same(dict(flow.state_dict()), dict(start))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data": torch.zeros(9, 3)}, r"`images` has shape \(9, 3\), but the flow is for \(N, 2\)"),
        ({"data": (torch.zeros(9, 2), torch.zeros(9))}, "`images` comes with labels"),
        ({"data": points().index_fill(0, torch.tensor([7]), torch.nan)}, "`images` has values tha"),
        ({"data": points().numpy()}, "`images` is of type ndarray.* torch.from_numpy"),
        ({"validation": torch.zeros(9, 3)}, "`validation` has shape"),
        ({"validation": 0.0}, "`validation` is 0.0"),
        ({"epochs": 0}, "`epochs` is 0"),
        ({"trainer": {"max_epochs": 3}}, "`trainer` has `max_epochs`, which is the argument `epo"),
        ({"trainer": {"accelerator": "cpu", "devices": 2}}, "`trainer` asks for 2 processes"),
        ({"batch_size": 0}, "`batch_size` is 0"),
        ({"learning_rate": -1.0}, "`learning_rate` is -1.0"),
        ({"optimizer": "sgd"}, "`optimizer` is 'sgd', but must be one of"),
        ({"memory": "cubic"}, "`memory` is 'cubic'"),
        ({"out": "."}, "`out` is ., which is not empty"),
    ],
)
def test_a_mistake_with_a_flow_is_named(options, message):
    Path("something").touch()
    with pytest.raises(ValueError, match=message):
        fit_points(small_flow(), **options)


@pytest.mark.parametrize(
    ("fit", "make"), [(fit_points, small_flow), (fit_tokens, small_network)], ids=["flow", "lm"]
)
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"epochs": 1.5}, ValueError, "`epochs` is 1.5, but must be a whole number"),
        ({"patience": 2.5}, ValueError, "`patience` is 2.5, but must be a whole number"),
        ({"batch_size": 2.5}, ValueError, "`batch_size` is 2.5, but must be a whole number"),
        ({"learning_rate": "0.1"}, ValueError, "`learning_rate` is '0.1', but must be a number"),
        ({"seed": 1.5}, ValueError, "`seed` is 1.5, but must be a whole number"),
        ({"trainer": 3}, ValueError, "`trainer` is 3, but must be a dictionary"),
        ({"out": 3}, ValueError, "`out` is 3, but must be the path"),
        ({"optimiser": "adam"}, TypeError, "`optimiser`. Did you mean `optimizer`?"),
        ({"validation": "0.1"}, ValueError, "`validation` is of type str, but must be a fraction"),
        ({"epochs": None}, ValueError, "`epochs` is None, but must be a whole number"),
        ({"epoch": 3}, TypeError, "`epoch`. Did you mean `epochs`?"),
    ],
)
def test_a_value_of_another_type_is_named(fit, make, options, error, message):
    with pytest.raises(error, match=message):
        fit(make(), **options)


@pytest.mark.parametrize(
    ("fit", "make"), [(fit_points, small_flow), (fit_tokens, small_network)], ids=["flow", "lm"]
)
def test_a_frozen_model_is_named(fit, make):
    with pytest.raises(ValueError, match="requires a gradient, so there is nothing to train"):
        fit(make().requires_grad_(False))


class Folder:
    def __init__(self, name):
        self.name = name

    def __fspath__(self):
        return self.name


@pytest.mark.parametrize(
    ("fit", "make"), [(fit_points, small_flow), (fit_tokens, small_network)], ids=["flow", "lm"]
)
def test_numbers_of_numpy_and_paths_of_others(fit, make):
    fit(make(), validation=np.float32(0.1), out=Folder("run"))
    assert Path("run", "run.json").is_file()


def test_what_is_no_model_and_no_tensor_is_named():
    with pytest.raises(ValueError, match="`images` is of type float, but must be a tensor"):
        fit_points(small_flow(), 0.5)
    with pytest.raises(ValueError, match="`network` is of type Linear, but must be a LanguageMod"):
        fit_tokens(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="`flow` is of type Linear, but must be a Flow"):
        fit_points(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"`tokens` is of type ndarray, .* torch.as_tensor"):
        fit_tokens(small_network(), (torch.arange(3000) % 9).numpy())


class _Ending(Callback):
    def on_train_batch_end(self, *args, **kwargs):
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("fit", "make"), [(fit_points, small_flow), (fit_tokens, small_network)], ids=["flow", "lm"]
)
def test_an_interrupt_by_a_callback_is_one(fit, make):
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        fit(make(), trainer={"accelerator": "cpu", "callbacks": [_Ending()]})
    assert signal.getsignal(signal.SIGINT) is handler


class StoppedInValidation(Callback):
    def on_train_batch_end(self, trainer, module, *_):
        self.weights = [parameter.detach().clone() for parameter in module.parameters()]

    def on_validation_batch_end(self, trainer, *_):
        if not trainer.sanity_checking:
            signal.raise_signal(signal.SIGINT)


def test_an_interrupt_leaves_the_weights_of_the_step_not_their_average():
    network, stopped = small_network(), StoppedInValidation()
    with pytest.raises(KeyboardInterrupt):
        fit_tokens(network, averaging="always", trainer={"callbacks": [stopped]})
    for weight, wanted in zip(network.parameters(), stopped.weights, strict=True):
        assert torch.equal(weight, wanted)


@pytest.mark.parametrize("value", [17, -3, 3.5])
def test_each_value_must_be_a_grey_level(value):
    flow = RealNVP((1, 4, 4), levels=17, num_steps=1, width=8)
    pictures = torch.zeros(400, 1, 4, 4)
    pictures[300, 0, 1, 1] = value
    with pytest.raises(ValueError, match="whole grey levels from 0 to 16"):
        fit_points(flow, pictures, memory="sqrt")
    assert flow.memory != "sqrt"


def test_labels_are_whole_numbers():
    flow = RealNVP((1, 4, 4), levels=17, num_steps=1, width=8, num_classes=3)
    with pytest.raises(ValueError, match="must have whole numbers below 3"):
        fit_points(flow, (torch.zeros(40, 1, 4, 4), torch.rand(40)))


def test_types_of_points_and_of_the_flow_may_differ():
    flow = small_flow()
    fit_points(flow, points().double())
    fit_points(flow, trainer={"precision": "64-true"})
    assert next(flow.parameters()).dtype is torch.float32


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": torch.zeros(9)}, "`tokens` has shape .* but a text is numbers of tokens"),
        ({"tokens": torch.arange(99)}, "`tokens` holds 0 to 98, but the vocabulary .* 9 tokens"),
        ({"tokens": torch.arange(30) % 9}, "too few for"),
        ({"test": 1.0}, "`test` is 1.0"),
        ({"memory": "1 KiB"}, "`memory` is 1 KiB, but a step of"),
        ({"averaging": "often"}, "`averaging` is 'often', but must be one of"),
        ({"trainer": {"gradient_clip_val": 1.0}}, "`trainer.gradient_clip_val` is 1.0"),
    ],
)
def test_a_mistake_with_a_language_model_is_named(options, message):
    with pytest.raises(ValueError, match=message):
        fit_tokens(small_network(), **options)


@pytest.mark.parametrize(
    ("fit", "make"), [(fit_points, small_flow), (fit_tokens, small_network)], ids=["flow", "lm"]
)
def test_the_extra_is_named_where_it_is_missing(fit, make, monkeypatch):
    monkeypatch.setitem(sys.modules, "lightning", None)
    monkeypatch.setitem(sys.modules, "lightning.pytorch", None)
    for name in ("given_run", "flow.given", "language_model.given"):
        monkeypatch.delitem(sys.modules, f"recoup.recipes.{name}", raising=False)
    monkeypatch.delattr(language_model, "given", raising=False)
    with pytest.raises(ImportError, match=r'needs lightning.*pip install "recoup\[recipes\]"'):
        fit(make())


def test_the_example_of_a_language_model_runs():
    """Examples of recipes are not among those of `tests/api/test_doctests.py`."""
    done = doctest.testmod(language_model.fitting)
    assert (done.failed, done.attempted > 5) == (0, True)
