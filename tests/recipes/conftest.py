from __future__ import annotations

import csv

import pytest
import torch

from recoup.recipes.cli import main
from recoup.recipes.flow import train as flow
from recoup.recipes.language_model import train as language_model
from recoup.recipes.progress import LossRecord

# Small enough for a run of a second, with everything in it: two scales, dropout, a last batch that
# is smaller than the others.
TINY = [
    *("--model.num_steps", "1", "--model.width", "8", "--model.dropout", "0.2"),
    *("--model.num_warmup_steps", "5", "--model.learning_rate", "0.01", "--batch-size", "300"),
    *("--threads", "1"),
]


@pytest.fixture(autouse=True)
def own_folder(monkeypatch, tmp_path):
    """Each test runs in a folder of its own, and forgets the seed that Lightning notes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    monkeypatch.setenv("PL_SEED_WORKERS", "0")


# The same for a language model: some dropout of each kind, windows of several lengths.
TINY_LM = [
    *("--model.embed_size", "8", "--model.hidden_size", "16", "--model.num_layers", "2"),
    *("--data.bptt", "12", "--batch-size", "3", "--data.eval_batch_size", "2"),
    *("--model.input_dropout", "0.1", "--model.output_dropout", "0.1"),
    *("--model.weight_dropout", "0.3", "--model.activation_penalty", "0.1"),
    *("--model.learning_rate", "5", "--data.tokens", "words", "--threads", "1"),
]


class Run:
    """A finished run of ``recoup flow fit`` or ``recoup lm fit``, with the loss of each step."""

    prepare = staticmethod(flow.prepare)
    tiny = TINY

    def __init__(self, *args, callbacks=()):
        self.cli = self.prepare([*self.tiny, *args])
        self.start = {name: p.clone() for name, p in self.cli.model.named_parameters()}
        record = LossRecord()
        self.cli.fit(record, *callbacks)
        self.losses = record.losses

    def checkpoint(self):
        return torch.load(self.cli.out / "checkpoints" / "last.ckpt", weights_only=True)

    def metrics(self):
        with (self.cli.out / "metrics.csv").open(newline="") as file:
            return list(csv.DictReader(file))


class LanguageModelRun(Run):
    prepare = staticmethod(language_model.prepare)
    tiny = TINY_LM


@pytest.fixture(scope="session")
def run():
    return Run


@pytest.fixture(scope="session")
def lm_run():
    return LanguageModelRun


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """A text of 900 words that a small model can learn something of."""
    lines = [f"the {a} is {b} than the {c} ." for a in "abc" for b in "xyz" for c in "abcd"]
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n".join(lines * 3) + "\n")
    return str(path)


@pytest.fixture(scope="session")
def tiny():
    return TINY


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """The checkpoint of a run, for tests that only read it."""
    out = tmp_path_factory.mktemp("trained") / "run"
    Run("--epochs", "2", "--out", str(out))
    return out / "checkpoints" / "best.ckpt"


@pytest.fixture
def refusal(capsys, tmp_path):
    """Call the command, see that it refuses and writes nothing; gives back its one line."""

    def call(*args):
        before = sorted(tmp_path.rglob("*"))
        capsys.readouterr()
        assert main([str(arg) for arg in args]) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        assert printed.err.startswith("recoup: error: ")
        assert printed.err.count("\n") == 1, printed.err
        assert sorted(tmp_path.rglob("*")) == before
        return printed.err

    return call
