"""What a run leaves for comparison with others, ``run.json``: the same names in both recipes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from recoup.recipes.cli import main
from tests.recipes.conftest import TINY, TINY_LM

ON_CPU = ("--trainer.accelerator", "cpu")


def finished(recipe, *options):
    assert main([recipe, "fit", *options, *ON_CPU, "--epochs", "1", "--out", recipe]) == 0
    return json.loads(Path(recipe, "run.json").read_text())


def test_both_recipes_write_the_same_names(text):
    flow, lm = finished("flow", *TINY), finished("lm", *TINY_LM, "--data", text)
    scores = {"bits_per_dim": flow, "perplexity": lm}
    named = [
        {name.replace(score, "score") for name in found} - {"flow", "test_latent", "test_log_det"}
        for score, found in scores.items()
    ]
    assert named[0] == named[1] >= {"test_score", "best_validation_score", "step", "memory"}
    assert flow["step"].keys() == lm["step"].keys()
    assert lm["num_epochs"] == 1
    assert lm["step"]["peak_bytes"] > 0


def test_the_language_model_is_tested_as_it_is_evaluated(text, capsys):
    found = finished("lm", *TINY_LM, "--data", text)
    assert f"test: perplexity {found['test_perplexity']:.2f}; results: lm/run.json" in (
        capsys.readouterr().out
    )
    checkpoint = ("--checkpoint", "lm/checkpoints/best.ckpt", "--batch-size", "2")
    assert main(["lm", "evaluate", *checkpoint]) == 0
    assert f"{found['test_perplexity']:.3f}" in capsys.readouterr().out


@pytest.mark.sampled(1)
@pytest.mark.parametrize("memory", ["linear", "sqrt", "1 MiB"])
def test_the_step_of_a_language_model_is_measured_in_its_memory(text, memory):
    sizes = (*TINY_LM, "--data.bptt", "40", "--data.jitter", "false")
    found = finished("lm", *sizes, "--data", text, "--memory", memory)
    assert found["memory"] == memory
    most = {"linear": 2**30, "sqrt": 500_000, "1 MiB": 2**20}[memory]
    assert found["step"]["peak_bytes"] <= most


def test_a_test_part_that_is_too_short_is_left_out(text):
    found = finished("lm", *TINY_LM, "--data", text, "--data.test_fraction", "0.003")
    assert "test_perplexity" not in found


@pytest.mark.slow
def test_bytes_bound_the_chain_of_a_flow():
    deeper = (*TINY, "--model.num_steps", "3")
    linear = finished("flow", *deeper)
    Path("flow").rename("linear")
    most = linear["step"]["peak_bytes"]
    found = finished("flow", *deeper, "--memory", f"{0.6 * most:.0f} B")
    assert found["step"]["peak_bytes"] < 0.7 * most
    assert found["test_bits_per_dim"] == pytest.approx(linear["test_bits_per_dim"], abs=1e-3)


def test_bytes_that_no_plan_keeps_to_are_one_line(capsys):
    assert main(["flow", "fit", *TINY, *ON_CPU, "--memory", "1 KiB", "--out", "mine"]) == 2
    error = capsys.readouterr().err
    assert error.count("recoup: error: ") == 1
    assert "`--memory` is 1 KiB" in error
    assert not list(Path().rglob("*.*"))
    assert torch.is_grad_enabled()
