"""Two processes that share a batch train as one that has all of it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

# Without dropout, whose masks are of each process its own.
PLAIN = [
    *("--model.embed_size", "8", "--model.hidden_size", "16", "--model.num_layers", "2"),
    *("--model.input_dropout", "0", "--model.hidden_dropout", "0", "--model.output_dropout", "0"),
    *("--model.embedding_dropout", "0", "--model.weight_dropout", "0", "--threads", "1"),
    *("--data.bptt", "12", "--data.eval_batch_size", "2", "--trainer.accelerator", "cpu"),
]


def fitted(text, out, *options):
    """Run the command in a process of its own, which starts others; return what it wrote."""
    code = "import sys; from recoup.recipes.cli import main; sys.exit(main())"
    path = out / "fit.py"
    path.parent.mkdir(parents=True)
    path.write_text(code)
    command = [sys.executable, str(path), "lm", "fit", "--data", text, "--epochs", "2", *PLAIN]
    subprocess.run(
        [*command, "--out", str(out / "run"), *options],
        check=True,
        capture_output=True,
        timeout=180,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
    )
    return torch.load(out / "run" / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]


@pytest.mark.slow
@pytest.mark.parametrize("memory", [pytest.param("linear", marks=pytest.mark.exhaustive), "sqrt"])
def test_two_processes_train_as_one(text, tmp_path, memory):
    one = fitted(text, tmp_path / "one", "--batch-size", "6")
    pair = ("--trainer.devices", "2", "--trainer.strategy", "ddp", "--batch-size", "3")
    two = fitted(text, tmp_path / "two", *pair, "--memory", memory)
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-4, atol=1e-5, msg=name)
