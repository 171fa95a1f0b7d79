"""What a user can mend is said in one line, with exit code 2, and nothing is written."""

from __future__ import annotations

from pathlib import Path

import pytest

SIZES = [
    *("--model.embed_size", "8", "--model.hidden_size", "16", "--data.bptt", "12"),
    *("--batch-size", "3", "--data.eval_batch_size", "2", "--threads", "1"),
]


@pytest.mark.sampled(9)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--memory", "cubic"], '`memory` is \'cubic\', but must be "linear", "sqrt"'),
        (["--memory", "1 KiB"], "`memory` is 1 KiB, but a step of 37 time steps takes at least"),
        (["--memroy", "sqrt"], "no option `--memroy`. Did you mean `--memory`?"),
        (["--epochs", "many"], "argument --epochs: many is not a whole number"),
        (["--model.num_layers", "0"], "`num_layers` is 0"),
        (["--model.input_dropout", "1"], "`input_dropout` is 1.0"),
        (["--model.weight_dropout", "2"], "`p` is 2"),
        (["--weight-noise", "-1"], "`weight_noise` is -1.0"),
        (["--model.weight_noise_start", "-1"], "`weight_noise_start` is -1"),
        (["--model.learning_rate", "-1"], "`learning_rate` is -1.0"),
        (["--model.clip", "nan"], '"model.clip": Expected a <class'),
        (["--threads", "0"], "argument --threads: 0 is not a whole number"),
        (["--batch-size", "0"], "argument --batch-size: 0 is not a whole number"),
        (["--batch-size", "700"], "has 778 tokens, too few for 700 columns of two"),
        (["--data.eval_batch_size", "50"], "has 97 tokens, too few for 50 columns of two"),
        (["--data.bptt", "0"], "`bptt` is 0"),
        (["--config", "nowhere.yaml"], "nowhere.yaml"),
        (["--resume", "nowhere.ckpt"], "`--resume` is nowhere.ckpt, but there is no such file"),
        (["--finetune", "nowhere.ckpt"], "`--finetune` is nowhere.ckpt, but there is no such file"),
        (["--trainer.devices", "0"], "Change the settings of the Trainer"),
        (["--trainer.gradient_clip_val", "1"], "Give that"),
        (["--trainer.accumulate_grad_batches", "2"], "each window is a step here"),
    ],
)
def test_options_of_fit(refusal, text, options, message):
    assert message in refusal("lm", "fit", "--data", text, *SIZES, *options)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("setting", "value", "allowed"),
    [
        ("model.optimizer", "asgd", "'sgd', 'adam'"),
        ("model.averaging", "often", "'triggered'"),
        ("model.dropout_kind", "odd", "'locked'"),
        ("data.tokens", "syllables", "'words'"),
    ],
)
def test_a_setting_of_another_value(refusal, text, setting, value, allowed):
    message = refusal("lm", "fit", "--data", text, *SIZES, f"--{setting}", value)
    assert f'"{setting}"' in message
    assert f"value: {value}" in message
    assert allowed in message


def test_data_that_is_not_there(refusal):
    assert "`--data` is nowhere, which does not exist" in refusal("lm", "fit", "--data", "nowhere")


def checkpoint_of(lm_run, text, *options):
    return str(lm_run("--data", text, "--epochs", "1", *options).cli.out / "checkpoints/last.ckpt")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("option", ["--resume", "--finetune"])
def test_a_checkpoint_of_another_text(lm_run, text, refusal, option):
    checkpoint = checkpoint_of(lm_run, text)
    Path("other.txt").write_text("some other words " * 60)
    message = refusal("lm", "fit", option, checkpoint, "--data", "other.txt", "--epochs", "3")
    assert "another architecture" in message or "other tokens" in message
    # As many tokens, and others.
    Path("like.txt").write_text(Path(text).read_text().replace("the", "one"))
    message = refusal("lm", "fit", option, checkpoint, "--data", "like.txt", "--epochs", "3")
    assert f"`{option}` is {checkpoint}, which was trained on a text with other tokens" in message


def test_a_checkpoint_of_another_architecture(lm_run, text, refusal):
    checkpoint = checkpoint_of(lm_run, text)
    message = refusal("lm", "fit", "--resume", checkpoint, "--model.hidden_size", "17")
    assert "hidden_size 16 instead of 17" in message


def test_a_run_that_has_all_its_epochs(lm_run, text, refusal):
    checkpoint = checkpoint_of(lm_run, text)
    message = refusal("lm", "fit", "--resume", checkpoint, "--epochs", "1")
    assert "has 1 epochs behind it" in message


def test_resume_and_finetune_together(lm_run, text, refusal):
    checkpoint = checkpoint_of(lm_run, text)
    message = refusal("lm", "fit", "--resume", checkpoint, "--finetune", checkpoint)
    assert "argument --finetune: not allowed with argument --resume" in message


def test_a_folder_with_a_run_in_it(lm_run, text, refusal):
    run = lm_run("--data", text, "--epochs", "1")
    message = refusal("lm", "fit", "--data", text, *SIZES, "--out", str(run.cli.out))
    assert "holds a run already" in message


def test_a_flow_is_no_language_model(checkpoint, text, refusal):
    message = refusal("lm", "fit", "--resume", checkpoint, "--data", text)
    assert f"`--resume` is {checkpoint}, which `recoup flow fit` wrote." in message
