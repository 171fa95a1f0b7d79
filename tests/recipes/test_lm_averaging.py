"""Averaging once validation no longer improves, and finetuning, against the paper's algorithm."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.callbacks import Callback

from recoup.recipes.checkpoints import Checkpoint
from recoup.recipes.cli import main
from recoup.recipes.language_model.averaging import TriggeredAveraging, is_triggered
from recoup.recipes.language_model.trained import load_model

# Worse every other epoch, so that the trigger is met early.
RESTLESS = ("--model.num_patient", "1", "--model.learning_rate", "60")


class Watched(Callback):
    """The parameters after each step, and those that were validated."""

    def __init__(self):
        self.steps, self.validated, self.num_steps, self.perplexities = [], [], [], []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.steps.append(parameters_of(pl_module))

    def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        if batch_idx == 0:
            self.validated.append(parameters_of(pl_module))
            self.num_steps.append(len(self.steps))

    def on_validation_end(self, trainer, pl_module):
        self.perplexities.append(float(trainer.callback_metrics["val_perplexity"]))


def parameters_of(module):
    return {name: each.detach().clone() for name, each in module.named_parameters()}


def mean(steps):
    return {name: torch.stack([step[name] for step in steps]).mean(dim=0) for name in steps[0]}


def assert_close(found, wanted):
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=name)


def averaging_of(run):
    callbacks = run.cli.trainer.callbacks
    return next(each for each in callbacks if isinstance(each, TriggeredAveraging))


def algorithm_1(losses, n):
    """Merity et al., algorithm 1: the number of the validation that triggers, or None."""
    logs = []
    for t, v in enumerate(losses):
        if t > n and v > min(logs[: t - n]):
            return t
        logs.append(v)
    return None


@given(st.lists(st.integers(0, 9).map(float), max_size=14), st.integers(0, 6))
def test_the_trigger_is_that_of_the_paper(losses, n):
    found = (t for t in range(len(losses)) if is_triggered(losses[: t + 1], n))
    assert next(found, None) == algorithm_1(losses, n)


def test_the_trigger_looks_at_what_came_before_the_last_ones_not_at_them():
    """gluon-nlp#1277: with the last n, as it was, this trace would trigger."""
    trace = [9.0, 8.0, 7.0, 6.0, 5.0, 4.0, 4.5]
    assert trace[-1] > min(trace[-4:-1])
    assert not is_triggered(trace, 3)
    assert is_triggered([*trace, 6.5], 3)


@pytest.mark.slow
@pytest.mark.parametrize("always", [False, True])
def test_what_is_validated_and_saved_is_the_mean_of_the_steps(lm_run, text, always):
    watched = Watched()
    options = ("--model.averaging", "always", "--epochs", "3") if always else ("--epochs", "8")
    run = lm_run("--data", text, *RESTLESS, *options, callbacks=[watched])
    perplexities = watched.perplexities
    triggered = algorithm_1(perplexities, 1)
    if always:
        start = 0
    else:
        assert triggered is not None
        assert triggered < 6
        start = watched.num_steps[triggered]
    for steps, validated in zip(watched.num_steps, watched.validated, strict=True):
        if steps <= start:
            assert_close(validated, watched.steps[steps - 1])
        else:
            assert_close(validated, mean(watched.steps[start:steps]))
    averages = mean(watched.steps[start:])
    checkpoint = run.checkpoint()
    assert_close(checkpoint["state_dict"], averages)
    assert_close(checkpoint["current_model_state"], watched.steps[-1])
    assert_close(parameters_of(run.cli.model), averages)
    last = Checkpoint(run.cli.out / "checkpoints" / "last.ckpt")
    assert_close(parameters_of(load_model(last)), averages)
    assert [row["averaged"] for row in run.metrics()] == [
        f"{max(0, steps - start):.6f}" for steps in watched.num_steps
    ]
    tied = load_model(last).network
    assert tied.decoder.weight is tied.embedding.weight


@pytest.mark.slow
def test_the_trigger_of_a_run_is_met_by_the_losses_that_were_logged(lm_run, text):
    watched = Watched()
    run = lm_run("--data", text, *RESTLESS, "--epochs", "8", callbacks=[watched])
    rows = [float(row["val_perplexity"]) for row in run.metrics()]
    assert rows == pytest.approx(watched.perplexities, abs=1e-6)
    assert averaging_of(run).losses == watched.perplexities
    triggered = algorithm_1(rows, 1)
    averaged = [float(row["averaged"]) for row in run.metrics()]
    assert averaged[: triggered + 1] == [0.0] * (triggered + 1)
    assert all(number > 0 for number in averaged[triggered + 1 :])


def test_there_is_no_average_in_memory_before_it_is_one(lm_run, text):
    run = lm_run("--data", text, "--epochs", "1")
    assert averaging_of(run)._average_model is None
    assert "current_model_state" not in run.checkpoint()


@pytest.mark.slow
def test_never_means_never(lm_run, text):
    run = lm_run("--data", text, *RESTLESS, "--epochs", "6", "--model.averaging", "never")
    assert "averaging_state" not in run.checkpoint()
    assert not any(isinstance(each, TriggeredAveraging) for each in run.cli.trainer.callbacks)


@pytest.mark.slow
def test_training_goes_on_as_without_averaging(lm_run, text):
    """Averages are looked at, never trained on: the losses are those of a run without them."""
    with_it, without = (
        lm_run("--data", text, *RESTLESS, "--epochs", "6", "--model.averaging", kind, "--out", kind)
        for kind in ("triggered", "never")
    )
    assert averaging_of(with_it).num_averaged > 0
    assert with_it.losses == without.losses


def test_torch_asgd_takes_the_same_steps_and_averages_all_but_the_first():
    torch.manual_seed(0)
    ours, theirs = (torch.nn.Parameter(torch.ones(5)) for _ in range(2))
    sgd = torch.optim.SGD([ours], lr=0.3, weight_decay=0.01)
    asgd = torch.optim.ASGD([theirs], lr=0.3, lambd=0.0, t0=0, weight_decay=0.01)
    steps = []
    for _ in range(7):
        gradient = torch.randn(5)
        for parameter, optimizer in ((ours, sgd), (theirs, asgd)):
            parameter.grad = gradient.clone()
            optimizer.step()
        steps.append(ours.detach().clone())
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(torch.stack(steps[1:]).mean(dim=0), asgd.state[theirs]["ax"])


# -- finetuning ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_finetuning_begins_with_the_average_and_averages_from_the_first_step(lm_run, text):
    first = lm_run("--data", text, *RESTLESS, "--epochs", "6", "--out", "first")
    best = first.cli.out / "checkpoints" / "best.ckpt"
    watched = Watched()
    second = lm_run(
        "--finetune", str(best), "--epochs", "2", "--out", "second", callbacks=[watched]
    )
    begun = torch.load(best, weights_only=True)["state_dict"]
    assert_close({name: begun[name] for name in second.start}, second.start)
    assert second.cli.model.hparams["averaging"] == "always"
    assert second.cli.model.hparams["num_patient"] == 1  # a setting of the first run
    assert_close(watched.validated[0], mean(watched.steps[: watched.num_steps[0]]))
    assert [row["epoch"] for row in second.metrics()] == ["0", "1"]
    assert (first.cli.out / "checkpoints" / "best.ckpt").exists()


@pytest.mark.slow
def test_finetuning_goes_to_a_folder_of_its_own_and_can_be_resumed(lm_run, text):
    first = lm_run("--data", text, "--epochs", "1")
    best = str(first.cli.out / "checkpoints" / "best.ckpt")
    assert main(["lm", "fit", "--finetune", best, "--epochs", "1"]) == 0
    assert (
        main(["lm", "fit", "--resume", "runs/lm/fit-2/checkpoints/last.ckpt", "--epochs", "2"]) == 0
    )
    whole = ["lm", "fit", "--finetune", best, "--epochs", "2", "--out", "whole"]
    assert main(whole) == 0
    ours, theirs = (
        torch.load(f"{out}/checkpoints/last.ckpt", weights_only=True)
        for out in ("runs/lm/fit-2", "whole")
    )
    for part in ("state_dict", "current_model_state"):
        assert all(torch.equal(ours[part][name], theirs[part][name]) for name in theirs[part])


@pytest.mark.slow
def test_finetuning_stops_when_validation_no_longer_improves(lm_run, text):
    first = lm_run("--data", text, "--epochs", "1", "--out", "first")
    best = str(first.cli.out / "checkpoints" / "best.ckpt")
    options = ("--model.num_patient", "0", "--model.learning_rate", "0.0")
    stuck = lm_run("--finetune", best, "--epochs", "9", *options, "--early_stopping.patience", "99")
    assert len(stuck.metrics()) == 9  # as good as before is not worse
    options = ("--model.num_patient", "0", "--model.learning_rate", "500", "--model.clip", "0")
    run = lm_run("--finetune", best, "--epochs", "30", *options, "--early_stopping.patience", "99")
    rows = [float(row["val_perplexity"]) for row in run.metrics()]
    assert len(rows) < 30
    assert algorithm_1(rows, 0) == len(rows) - 1


@pytest.mark.slow
def test_a_copy_of_the_averages_state_is_plain_values(lm_run, text):
    run = lm_run("--data", text, "--epochs", "2")
    state = averaging_of(run).state_dict()
    assert copy.deepcopy(state) == state
    assert all(math.isfinite(loss) for loss in state["losses"])
