"""What Lightning offers beside plain epochs: it is right with language models, or it is refused."""

from __future__ import annotations

import copy
import csv
import gc
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from recoup.recipes.cli import main
from recoup.recipes.language_model.averaging import TriggeredAveraging
from recoup.recipes.language_model.network import LanguageModel
from recoup.recipes.language_model.steps import Perplexity
from recoup.recipes.progress import LossRecord
from tests.recipes.conftest import TINY_LM
from tests.recipes.test_flow_fit import same
from tests.recipes.test_lm_averaging import RESTLESS, parameters_of


class StoppedError(Exception):
    pass


class Stopping(Callback):
    """Ends a run by an error at one of its steps."""

    def __init__(self, step, error):
        self.step, self.error = step, error

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == self.step:
            raise self.error


def saved(path):
    return torch.load(path, weights_only=True)


def assert_same_run(ours, theirs):
    for part in ("state_dict", "current_model_state", "averaging_state", "optimizer_states"):
        assert same(ours.get(part), theirs.get(part)), part


def rows_of(out):
    with Path(out, "metrics.csv").open(newline="") as file:
        return [{**row, "seconds": None} for row in csv.DictReader(file)]


# -- how often, and how long -----------------------------------------------------------------------


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ("--trainer.val_check_interval", "0.5"),
        ("--trainer.check_val_every_n_epoch", "2"),
        ("--trainer.limit_train_batches", "9"),
        ("--trainer.num_sanity_val_steps", "2"),
    ],
    ids=lambda options: options[0].rpartition(".")[2],
)
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(lm_run, text, options):
    settings = ("--data", text, *RESTLESS, *options, "--early_stopping.patience", "99")
    whole = lm_run(*settings, "--epochs", "4", "--out", "whole")
    lm_run(*settings, "--epochs", "2", "--out", "halves")
    last = "halves/checkpoints/last.ckpt"
    assert main(["lm", "fit", "--resume", last, "--epochs", "4"]) == 0
    assert_same_run(saved(last), whole.checkpoint())
    assert rows_of("halves") == rows_of("whole")


@pytest.mark.slow
def test_a_run_that_was_broken_off_goes_on_from_the_epoch_before(lm_run, text):
    options = ("--data", text, *RESTLESS)
    whole = lm_run(*options, "--epochs", "5", "--out", "whole")
    stopping = Stopping(85, KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        lm_run(*options, "--epochs", "5", "--out", "cut", callbacks=[stopping])
    assert main(["lm", "fit", "--resume", "cut/checkpoints/last.ckpt"]) == 0
    assert_same_run(saved("cut/checkpoints/last.ckpt"), whole.checkpoint())


# red: the checkpoint of the part of an epoch replaces the one that can be gone on with
@pytest.mark.slow
def test_a_run_that_ran_out_of_steps_goes_on_from_the_epoch_before(lm_run, text):
    options = ("--data", text, "--epochs", "4")
    whole = lm_run(*options, "--out", "whole")
    lm_run(*options, "--out", "cut", "--trainer.max_steps", "60")
    resume = ["--resume", "cut/checkpoints/last.ckpt", "--trainer.max_steps", "-1"]
    assert main(["lm", "fit", *resume]) == 0
    assert_same_run(saved("cut/checkpoints/last.ckpt"), whole.checkpoint())


# red: an epoch without a validation has the number of the one before (the case of
# check_val_every_n_epoch above is red for the same reason)
@pytest.mark.slow
def test_an_epoch_without_validation_has_no_number_of_one(lm_run, text, capsys):
    run = lm_run("--data", text, "--epochs", "4", "--trainer.check_val_every_n_epoch", "2")
    assert [bool(row["val_perplexity"]) for row in run.metrics()] == [False, True] * 2
    assert [line.split(":")[0].strip() for line in capsys.readouterr().err.splitlines()[:2]] == [
        "epoch   2",
        "epoch   4",
    ]


@pytest.mark.slow
def test_each_validation_of_an_epoch_counts_for_the_trigger(lm_run, text):
    often = ("--trainer.val_check_interval", "0.5", "--early_stopping.patience", "99")
    run = lm_run("--data", text, *RESTLESS, "--epochs", "4", *often)
    (averaging,) = (
        each for each in run.cli.trainer.callbacks if isinstance(each, TriggeredAveraging)
    )
    assert len(averaging.losses) == 8


# -- where a run is --------------------------------------------------------------------------------


# red: the checkpoints go to where the run was
@pytest.mark.slow
def test_a_folder_that_was_moved_is_gone_on_with_where_it_is(lm_run, text):
    first = lm_run("--data", text, "--epochs", "1", "--out", "here")
    shutil.move("here", "there")
    resume = ["--resume", "there/checkpoints/last.ckpt", "--epochs", "2"]
    run = lm_run.prepare([*resume, "--checkpoint.mode", "min", "--model.clip", "1e-9"])
    run.fit()
    assert saved("there/checkpoints/last.ckpt")["epoch"] == 1
    assert not Path("here").exists()
    assert run.best is not None
    assert run.best[1] <= first.cli.best[1]


# red: the checkpoints of the first run are replaced
def test_a_run_that_goes_on_elsewhere_leaves_the_first_as_it_was(lm_run, text):
    lm_run("--data", text, "--epochs", "1", "--out", "first")
    resume = ["--resume", "first/checkpoints/last.ckpt", "--epochs", "2", "--out", "second"]
    assert main(["lm", "fit", *resume]) == 0
    assert saved("first/checkpoints/last.ckpt")["epoch"] == 0
    assert saved("second/checkpoints/last.ckpt")["epoch"] == 1


def test_a_folder_of_checkpoints_that_was_asked_for_is_kept(lm_run, text, refusal):
    lm_run("--data", text, "--epochs", "1", "--out", "run", "--checkpoint.dirpath", "kept")
    resume = ["lm", "fit", "--resume", "kept/last.ckpt", "--epochs", "2"]
    assert "did not save in its own folder" in refusal(*resume)
    assert main([*resume, "--out", "run"]) == 0
    assert saved("kept/last.ckpt")["epoch"] == 1
    assert len(rows_of("run")) == 2


# -- what is refused -------------------------------------------------------------------------------


# red: the first three are passed over in silence, the last is a traceback
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("learning_rate", "0.001"),
        ("averaging", "never"),
        ("averaging", "always"),
        ("optimizer", "adam"),
    ],
)
def test_a_resumed_run_keeps_what_its_optimizer_was_made_with(lm_run, text, refusal, name, value):
    lm_run("--data", text, "--epochs", "1", "--out", "run")
    resume = ("--resume", "run/checkpoints/last.ckpt", "--epochs", "2")
    message = refusal("lm", "fit", *resume, f"--model.{name}", value)
    assert f"`--model.{name}` is {value}" in message
    assert "`--finetune`" in message


# red: they run, with other numbers than they say
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("reload_dataloaders_every_n_epochs", "0", "each epoch has windows of its own"),
        ("precision", "16-true", "too small without a scale"),
        ("precision", "bf16-true", "stands still"),
    ],
)
def test_settings_of_the_trainer_that_would_be_wrong(refusal, text, name, value, message):
    options = ("--data", text, *TINY_LM, "--epochs", "1")
    found = refusal("lm", "fit", *options, f"--trainer.{name}", value)
    assert f"`--trainer.{name}` is {value}" in found
    assert message in found


def test_an_average_in_16_bits_stands_still():
    """Why bf16-true does not go with averaging."""
    model = torch.nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    average = torch.optim.swa_utils.AveragedModel(model)
    for step in range(2000):
        model.weight.data.fill_(float(step >= 1000))
        average.update_parameters(model)
    assert abs(average.module.weight.item() - 0.5) > 0.1


# -- numbers ---------------------------------------------------------------------------------------


# red: windows that are not numbers are left out
@pytest.mark.filterwarnings("ignore:Encountered .nan.")
def test_a_window_that_is_not_a_number_is_seen():
    metric = Perplexity()
    metric.add(torch.tensor(20.0), 10)
    metric.add(torch.tensor(torch.nan), 10)
    assert not metric.compute().isfinite()


class Batches(Callback):
    """The windows of all steps."""

    def __init__(self):
        self.windows = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.windows.append((trainer.current_epoch, batch))


@pytest.mark.slow
@pytest.mark.parametrize("memory", ["linear", "sqrt"])
def test_a_run_takes_the_steps_of_a_plain_loop(lm_run, text, memory):
    """With all but dropout: penalties, clipping, decay, a rate for each length, carried states."""
    none = [f"--model.{name}_dropout=0" for name in ("input", "hidden", "output", "embedding")]
    options = (*none, "--model.weight_dropout", "0", "--model.weight_decay", "0.001")
    options += ("--model.temporal_penalty", "0.7", "--trainer.precision", "64-true")
    batches = Batches()
    run = lm_run("--data", text, "--epochs", "2", *options, "--memory", memory, callbacks=[batches])

    start = {name.removeprefix("network."): value for name, value in run.start.items()}
    weight = start["embedding.weight"].detach().double().requires_grad_()
    bias = start["decoder.bias"].detach().double().requires_grad_()
    layers = [torch.nn.LSTM(8, 16).double(), torch.nn.LSTM(16, 8).double()]
    for number, layer in enumerate(layers):
        layer.load_state_dict({n: start[f"layers.{number}.{n}"] for n in layer.state_dict()})
    parameters = [weight, bias, *(p for layer in layers for p in layer.parameters())]
    losses, states, last = [], [None, None], None
    for epoch, window in batches.windows:
        states = [None, None] if epoch != last else states
        last, x = epoch, weight[window[:-1]]
        for number, layer in enumerate(layers):
            x, state = layer(x, states[number])
            states[number] = tuple(part.detach() for part in state)
        logits = torch.einsum("tnc,vc->tnv", x, weight) + bias
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), window[1:].flatten())
        loss = loss + 0.1 * x.square().mean() + 0.7 * (x[1:] - x[:-1]).square().mean()
        gradients = torch.autograd.grad(loss, parameters)
        norm = torch.cat([each.flatten() for each in gradients]).norm()
        rate = 5.0 * (len(window) - 1) / 12
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                scaled = gradient * min(1.0, 0.25 / float(norm))
                parameter -= rate * (scaled + 0.001 * parameter)
        losses.append(float(loss.detach()))
    assert len({len(window) for _, window in batches.windows}) > 3
    assert run.losses == pytest.approx(losses, rel=1e-4)
    torch.testing.assert_close(run.cli.model.network.embedding.weight, weight, rtol=1e-3, atol=1e-4)


# -- what stays behind -----------------------------------------------------------------------------


@pytest.mark.parametrize("memory", ["linear", "sqrt"])
def test_a_step_that_fails_leaves_nothing_behind(lm_run, text, memory):
    class Failing(Callback):
        def on_train_start(self, trainer, pl_module):
            self.optimizer = trainer.optimizers[0]
            self.handle = self.optimizer.register_step_pre_hook(self._fail)
            self.model = pl_module
            self.parameters = parameters_of(pl_module)

        def _fail(self, optimizer, args, kwargs):
            assert optimizer.param_groups[0]["lr"] != 5.0
            raise StoppedError

    failing = Failing()
    options = ("--memory", memory, "--data.bptt", "20")
    with pytest.raises(StoppedError):
        lm_run("--data", text, "--epochs", "1", *options, callbacks=[failing])
    assert failing.optimizer.param_groups[0]["lr"] == 5.0
    for name, parameter in failing.model.named_parameters():
        assert parameter.grad is None, name
        assert not parameter._backward_hooks, name
        assert not parameter._post_accumulate_grad_hooks, name
        assert torch.equal(parameter, failing.parameters[name]), name


@pytest.mark.slow
def test_neither_graphs_nor_tensors_pile_up_from_step_to_step(lm_run, text):
    class Counted(Callback):
        def __init__(self):
            self.numbers = []

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            assert not any(part.requires_grad for s in pl_module._states["train"] for part in s)
            if trainer.global_step % 10 == 0:
                gc.collect()
                tensors = [each for each in gc.get_objects() if type(each) is torch.Tensor]
                self.numbers.append(len(tensors))

    counted = Counted()
    options = ("--model.averaging", "always", "--memory", "sqrt", "--weight-noise", "0.1")
    lm_run("--data", text, "--epochs", "3", *options, callbacks=[counted])
    assert len(counted.numbers) >= 6
    # From the first validation on, which leaves a state.
    assert max(counted.numbers[2:]) <= counted.numbers[2] + 2, counted.numbers


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_has_noise_of_its_own(copied):
    sizes = {"embed_size": 4, "hidden_size": 6, "num_layers": 2}
    network = LanguageModel(20, **sizes, weight_noise=0.5)
    network(torch.zeros(3, 2, dtype=torch.int64))[0].sum().backward()
    other = copied(network)
    assert other.decoder.weight is other.embedding.get_parameter("weight")
    other.set_weight_noise(True)
    ids = torch.zeros(3, 2, dtype=torch.int64)

    def outputs(each):
        with torch.no_grad():
            torch.manual_seed(0)
            return each(ids)[0]

    assert not torch.equal(outputs(network), outputs(other))
    network.set_weight_noise(True)
    assert torch.equal(outputs(network), outputs(other))


def test_the_twin_sees_the_average_while_it_is_validated(lm_run, text):
    class Twin(Callback):
        found = ()

        def on_train_start(self, trainer, pl_module):
            self.twin = pl_module.network.evaluation_twin()

        def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx):
            ours = [parameter.detach().clone() for parameter in pl_module.network.parameters()]
            self.found += (same(ours, [each.detach() for each in self.twin.parameters()]),)

    twin = Twin()
    lm_run("--data", text, "--epochs", "2", "--model.averaging", "always", callbacks=[twin])
    assert twin.found
    assert all(twin.found)


@pytest.mark.slow
def test_noise_goes_on_in_a_resumed_run(lm_run, text):
    noise = ("--weight-noise", "0.3", "--model.weight_noise_start", "30")
    lm_run("--data", text, "--epochs", "2", *noise, "--out", "run")
    run = lm_run.prepare(["--resume", "run/checkpoints/last.ckpt", "--epochs", "3"])
    assert float(run.model.network._noise_std) == 0.0
    run.fit(LossRecord())
    assert float(run.model.network._noise_std) == pytest.approx(0.3)
