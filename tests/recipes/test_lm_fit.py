"""Training by the command line: it learns, goes on as if never stopped, and memories agree."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch.callbacks import Callback

from recoup.recipes.cli import main
from recoup.recipes.language_model.train import CONFIGS, prepare
from tests.recipes.test_flow_fit import same


@pytest.fixture(scope="module")
def linear(lm_run, text, tmp_path_factory):
    out = tmp_path_factory.mktemp("linear") / "run"
    return lm_run("--data", text, "--epochs", "4", "--out", str(out))


class Recorded(Callback):
    """What each step was taken with, and what it came to."""

    def __init__(self):
        self.lengths, self.rates, self.noises, self.parameters = [], [], [], []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.lengths.append(len(batch) - 1)
        self._handle = trainer.optimizers[0].register_step_pre_hook(self._note)
        self._network = pl_module.network

    def _note(self, optimizer, args, kwargs):
        self.rates.append(optimizer.param_groups[0]["lr"])
        self.noises.append(float(self._network._noise_std))

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self._handle.remove()
        self.parameters.append({n: p.detach().clone() for n, p in pl_module.named_parameters()})


def test_it_learns_and_every_parameter_is_trained(linear):
    rows = linear.metrics()
    assert [row["epoch"] for row in rows] == ["0", "1", "2", "3"]
    for part in ("train", "val"):
        perplexities = [float(row[f"{part}_perplexity"]) for row in rows]
        assert perplexities[-1] < 0.8 * perplexities[0]
    moved = dict(linear.cli.model.named_parameters())
    assert moved.keys() == linear.start.keys()
    for name, parameter in moved.items():
        assert not torch.equal(parameter, linear.start[name]), name
    assert linear.cli.trainer.global_step == len(linear.losses)


def perplexity_of(run, part, batch_size):
    """That of a part of the text as a single window, by plain torch."""
    network = run.cli.model.network.eval()
    ids = run.cli.datamodule.parts[part]
    columns = ids[: len(ids) // batch_size * batch_size].view(batch_size, -1).t()
    with torch.no_grad():
        logits = network(columns[:-1])[0].double()
    nll = torch.nn.functional.cross_entropy(logits.flatten(0, 1), columns[1:].flatten())
    return float(nll.exp())


def test_the_state_is_carried_through_validation(linear):
    last = float(linear.metrics()[-1]["val_perplexity"])
    assert last == pytest.approx(perplexity_of(linear, "validation", batch_size=2), rel=1e-5)


def test_the_state_is_carried_through_training(lm_run, text):
    """Nothing dropped and nothing learned: windows in a row are the whole text."""
    none = [f"--model.{name}_dropout=0" for name in ("input", "hidden", "output", "embedding")]
    options = ("--model.weight_dropout", "0", "--model.learning_rate", "0")
    run = lm_run("--data", text, "--epochs", "2", *none, *options)
    expected = perplexity_of(run, "train", batch_size=3)
    found = [float(row["train_perplexity"]) for row in run.metrics()]
    assert found == pytest.approx([expected, expected], rel=1e-5)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
@pytest.mark.parametrize("memory", ["linear", "sqrt"])
def test_perplexities_of_16_bit_models_are_sums_in_more(lm_run, text, precision, memory):
    options = ("--data", text, "--epochs", "1", "--model.learning_rate", "0", "--memory", memory)
    options += ("--data.batch_size", "30", "--data.bptt", "20", "--model.averaging", "never")
    exact = lm_run(*options, "--out", "exact")
    found = lm_run(*options, "--trainer.precision", precision)
    for name, value in exact.metrics()[0].items():
        if name.endswith("perplexity"):
            assert float(found.metrics()[0][name]) == pytest.approx(float(value), rel=1e-4)
    assert found.losses == pytest.approx(exact.losses, rel=1e-3)


@pytest.mark.filterwarnings("ignore:.ModelCheckpoint.monitor")
def test_a_checkpoint_from_within_an_epoch_is_not_gone_on_with(lm_run, text, refusal):
    stopped = lm_run("--data", text, "--trainer.max_steps", "7", "--model.averaging", "never")
    last = stopped.cli.out / "checkpoints" / "last.ckpt"
    message = refusal("lm", "fit", "--resume", last, "--trainer.max_steps=-1")
    assert "in the middle of an epoch" in message


@pytest.mark.slow
def test_validation_within_an_epoch_leaves_training_as_it_was(lm_run, text):
    often = ("--trainer.val_check_interval", "0.3", "--early_stopping.patience", "99")
    options = ("--data", text, "--epochs", "2", "--model.averaging", "never")
    assert lm_run(*options, *often, "--out", "often").losses == lm_run(*options).losses


def test_the_run_leaves_its_settings_and_two_checkpoints(linear):
    out = linear.cli.out
    written = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    assert written == {
        "checkpoints/best.ckpt",
        "checkpoints/last.ckpt",
        "config.yaml",
        "metrics.csv",
    }
    settings = yaml.safe_load((out / "config.yaml").read_text())
    assert settings["model"]["embed_size"] == 8
    assert not {"resume", "finetune"} & settings.keys()


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("memory", ["sqrt", "90 KiB"])
@pytest.mark.parametrize("kind", ["locked", "independent"])
def test_each_memory_goes_the_same_way(lm_run, text, memory, kind):
    options = ("--data", text, "--epochs", "2", "--trainer.precision", "64-true")
    options += ("--model.dropout_kind", kind, "--weight-noise", "0.05")
    linear = lm_run(*options, "--out", "linear")
    other = lm_run(*options, "--out", "other", "--memory", memory)
    assert other.cli.model.plan.segment_steps(12) in range(1, 12)
    assert other.losses == pytest.approx(linear.losses, rel=1e-9)
    for (name, ours), theirs in zip(
        other.cli.model.named_parameters(), linear.cli.model.parameters(), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-10, msg=name)


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--model.optimizer", "adam", "--model.learning_rate", "0.01"),
        ("--model.averaging", "always"),
        ("--model.num_patient", "0", "--model.learning_rate", "40"),
        ("--memory", "sqrt", "--weight-noise", "0.1", "--model.weight_noise_start", "70"),
    ],
    ids=["plain", "adam", "averaged", "triggered", "sqrt and noise"],
)
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(lm_run, text, options):
    whole = lm_run("--data", text, *options, "--epochs", "4", "--out", "whole")
    lm_run("--data", text, *options, "--epochs", "2", "--out", "halves")
    moved = Path("elsewhere.ckpt")
    Path("halves/checkpoints/last.ckpt").replace(moved)
    torch.rand(7)
    assert main(["lm", "fit", "--resume", str(moved), "--epochs", "4", "--out", "halves"]) == 0
    ours = torch.load("halves/checkpoints/last.ckpt", weights_only=True)
    theirs = whole.checkpoint()
    assert ours["global_step"] == theirs["global_step"] == len(whole.losses)
    assert ("averaging_state" in theirs) == (
        options[:1] in [("--model.averaging",), ("--model.num_patient",)]
    )
    for part in ("state_dict", "current_model_state", "averaging_state", "optimizer_states"):
        assert same(ours.get(part), theirs.get(part)), part
    rows = (Path("halves/metrics.csv").read_text(), Path("whole/metrics.csv").read_text())
    first, second = ([line.rpartition(",")[0] for line in text.splitlines()] for text in rows)
    assert first == second


def test_the_learning_rate_of_a_step_is_scaled_by_its_own_length(lm_run, text):
    record = Recorded()
    run = lm_run("--data", text, "--epochs", "1", callbacks=[record])
    assert len(set(record.lengths)) > 3
    assert record.rates == [5.0 * (length / 12) for length in record.lengths]
    assert run.cli.trainer.optimizers[0].param_groups[0]["lr"] == 5.0


def test_torch_asgd_steps_by_the_rate_of_the_step_before():
    """Why the recipe averages outside of the optimizer."""
    found = {}
    for kind in (torch.optim.ASGD, torch.optim.SGD):
        weight = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))
        options = {"lambd": 0.0, "t0": 0} if kind is torch.optim.ASGD else {}
        optimizer = kind([weight], lr=1.0, **options)
        steps = []
        for rate in (1.0, 10.0, 100.0):
            optimizer.param_groups[0]["lr"] = rate
            weight.grad = torch.ones_like(weight)
            before = weight.item()
            optimizer.step()
            steps.append(before - weight.item())
        found[kind] = steps
    assert found[torch.optim.ASGD] == pytest.approx([1.0, 1.0, 10.0])
    assert found[torch.optim.SGD] == pytest.approx([1.0, 10.0, 100.0])


def test_gradients_are_clipped_to_the_norm(lm_run, text):
    record = Recorded()
    options = ("--model.clip", "0.01", "--model.weight_decay", "0", "--data.jitter", "false")
    run = lm_run("--data", text, "--epochs", "1", *options, callbacks=[record])
    before = run.start
    for after in record.parameters[:5]:
        moves = [(after[name] - before[name]).flatten() for name in after]
        assert float(torch.cat(moves).detach().norm()) == pytest.approx(0.01 * 5.0, rel=1e-3)
        before = after


def test_noise_begins_at_its_step(lm_run, text):
    record = Recorded()
    options = ("--weight-noise", "0.5", "--model.weight_noise_start", "7")
    noisy = lm_run("--data", text, "--epochs", "1", *options, callbacks=[record])
    quiet = lm_run("--data", text, "--epochs", "1")
    assert record.noises == [0.0] * 7 + [0.5] * (len(record.noises) - 7)
    assert noisy.losses[:7] == quiet.losses[:7]
    assert noisy.losses[7] != quiet.losses[7]


def test_each_epoch_has_windows_of_its_own(lm_run, text):
    record = Recorded()
    run = lm_run("--data", text, "--epochs", "3", callbacks=[record])
    num_steps = run.cli.datamodule.num_train_steps
    starts = [0]
    for length in record.lengths:
        starts.append(starts[-1] + length)
    assert starts[-1] == 3 * num_steps
    epochs = [
        {at - n * num_steps for at in starts if n * num_steps <= at < (n + 1) * num_steps}
        for n in range(3)
    ]
    assert len(epochs[0] & epochs[1] & epochs[2]) < len(epochs[0]) / 2


def test_another_seed_is_another_run(lm_run, text, linear):
    other = lm_run("--data", text, "--epochs", "1", "--seed", "1")
    assert other.losses[1:4] != linear.losses[1:4]


# -- what the recipe comes with --------------------------------------------------------------------

PRESETS = {
    "awd-lstm-ptb": (400, 1150, 3, 20, 70),
    "awd-lstm-wt2": (400, 1150, 3, 80, 70),
    "awd-lstm-600": (200, 600, 3, 80, 70),
    "standard-lstm-200": (200, 200, 2, 20, 35),
    "standard-lstm-650": (650, 650, 2, 20, 35),
    "standard-lstm-1500": (1500, 1500, 2, 20, 35),
    "tiny": (128, 256, 2, 20, 35),
}


def test_no_preset_is_missing():
    assert {path.stem for path in CONFIGS.glob("*.yaml")} == PRESETS.keys()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", PRESETS)
def test_presets_can_be_prepared(name, text):
    run = prepare(["--config", name, "--data", text])
    settings, data = run.model.hparams, run.datamodule
    found = (*(settings[f"{each}_size"] for each in ("embed", "hidden")), settings["num_layers"])
    assert (*found, data.batch_size, data.bptt) == PRESETS[name]
    assert settings["bptt"] == data.bptt
    assert settings["vocab_size"] == data.vocab_size


def test_without_a_configuration_it_is_tiny():
    assert prepare([]).model.hparams["hidden_size"] == PRESETS["tiny"][1]


@pytest.mark.parametrize("name", ["awd-lstm-ptb", "awd-lstm-wt2"])
def test_the_published_settings(name, text):
    """As github.com/salesforce/awd-lstm-lm gives them, in its README and main.py."""
    run = prepare(["--config", name, "--data", text])
    settings = run.model.hparams
    hidden, inputs = {"awd-lstm-ptb": (0.25, 0.4), "awd-lstm-wt2": (0.2, 0.65)}[name]
    assert settings["hidden_dropout"] == hidden
    assert settings["input_dropout"] == inputs
    shared = {
        "output_dropout": 0.4,
        "embedding_dropout": 0.1,
        "weight_dropout": 0.5,
        "activation_penalty": 2.0,
        "temporal_penalty": 1.0,
        "learning_rate": 30.0,
        "weight_decay": 1.2e-6,
        "clip": 0.25,
        "num_patient": 5,
        "tie_weights": True,
        "optimizer": "sgd",
        "averaging": "triggered",
    }
    assert {name: settings[name] for name in shared} == shared
