"""A whole training of the language model beside the same training written out by hand.

The two differ by rounding alone, so in float64 by 1e-15 at first; steps of a rate of 20 or 30 on a
short text let any difference grow a hundredfold in twenty steps.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from language_model import main

from tests.awd_lstm_beside import Beside
from tests.awd_lstm_by_hand import numbers_of
from tests.examples.conftest import EXAMPLES, QUIET

LINES = [f"the {a} is {b} than the {c} ." for a in "abc" for b in "xyz" for c in "abcd"]
SMALL = [
    *("--model.embed_size=8", "--model.hidden_size=16", "--data.bptt=12", "--data.batch_size=3"),
    *("--data.eval_batch_size=2", "--data.tokens=whitespace"),
]


@pytest.fixture
def beside(tmp_path):
    """Train by the example and by hand; each of `changes` is a training by hand that differs."""

    def call(preset, *options, precision="64-true", changes=({},)):
        folder = tmp_path / "text"
        folder.mkdir()
        for name, lines in (("train", LINES * 2), ("valid", LINES[::3]), ("test", LINES[:9])):
            (folder / f"{name}.txt").write_text("\n".join(lines) + "\n")
        config = EXAMPLES / "configs" / "language_model" / f"{preset}.yaml"
        start = ("-c", str(config), f"--data.path={folder}", f"--trainer.precision={precision}")
        run = main([*start, *QUIET, *SMALL, *options], run=False)
        number = {token: n for n, token in enumerate(run.datamodule.vocabulary)}
        texts = [numbers_of(Path(folder, f"{part}.txt"), number) for part in ("train", "valid")]
        trainings = [Beside(*texts, (3, 2), **changed) for changed in changes]
        run.trainer.callbacks += trainings
        run.trainer.fit(run.model, run.datamodule)
        return trainings

    return call


@pytest.mark.parametrize(
    ("preset", "memory"),
    [
        ("tiny", "linear"),
        ("standard-lstm-200", "sqrt"),
        pytest.param("awd-lstm-wt2", "sqrt", marks=pytest.mark.slow),
    ],
)
def test_a_training_of_a_preset_is_the_one_by_hand(beside, preset, memory):
    (by_hand,) = beside(preset, "--trainer.max_epochs=1", f"--model.memory={memory}")
    assert len(by_hand.losses) > 15
    assert by_hand.loss_error < 1e-10
    assert by_hand.gradient_error < 1e-10
    assert by_hand.perplexity_error < 1e-10


@pytest.mark.slow
def test_the_average_is_the_one_by_hand(beside):
    (by_hand,) = beside(
        "tiny", "--trainer.max_epochs=6", "--model.num_patient=0", "--model.learning_rate=10"
    )
    num_steps = len(by_hand.losses) // 6
    assert by_hand.by_hand.num_averaged in range(num_steps, 6 * num_steps)
    assert by_hand.loss_error < 1e-10
    assert by_hand.perplexity_error < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize(
    "preset", ["tiny", pytest.param("standard-lstm-200", marks=pytest.mark.exhaustive)]
)
def test_hundreds_of_steps_in_float32(beside, preset):
    options = ("--trainer.max_epochs=15", "--model.learning_rate=2")
    (by_hand,) = beside(preset, *options, precision="32-true")
    assert len(by_hand.losses) > 280
    assert by_hand.loss_error < 1e-4
    assert by_hand.perplexity_error < 1e-4


def test_a_training_that_differs_in_anything_is_seen(beside):
    changes = (
        {},
        {"bptt": 13},
        {"learning_rate": 20.1},
        {"weight_decay": 0.0},
        {"clip": 0.26},
        {"activation_penalty": 1.9},
        {"temporal_penalty": 0.9},
        {"input_dropout": 0.41},
        {"hidden_dropout": 0.21},
        {"output_dropout": 0.41},
        {"embedding_dropout": 0.11},
        {"weight_dropout": 0.51},
    )
    same, *others = beside(
        "tiny", "--trainer.max_epochs=1", "--trainer.limit_train_batches=4", changes=changes
    )
    assert same.loss_error < 1e-10
    assert [each._changed for each in others if each.loss_error < 1e-6] == []
