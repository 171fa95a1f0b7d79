"""The process that measures one point of a curve: what it answers to a request."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from recoup.memory import worker
from recoup.memory.points import Request

BUILDERS = Path(__file__).with_name("builders.py")


@pytest.fixture
def ask(monkeypatch, tmp_path):
    """Have this process answer a request, and put back what a worker changes in its own."""
    num_threads = torch.get_num_threads()
    monkeypatch.setattr(sys, "path", list(sys.path))

    def answer(build, depth=2, memory="linear", *, repeats=0):
        name = build if ":" in build else f"{BUILDERS}:{build}"
        request = Request(name, depth, memory, "cpu", repeats, 1)
        monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(asdict(request))))
        path = tmp_path / "answer.json"
        code = worker.main(str(path))
        return code, json.loads(path.read_text())

    yield answer
    torch.set_num_threads(num_threads)
    sys.modules.pop("__recoup_build__", None)


def test_what_is_measured(ask):
    code, units = ask("held_values", 3)
    assert (code, units["peak_bytes"], units["held_bytes"]) == (0, 3 * 256 * 1024, 0)
    assert units["seconds"] is units["cpu_seconds"] is None
    (_, shallow), (_, deep) = ask("chain", 2, repeats=2), ask("chain", 6, repeats=2)
    # Tanh keeps its output, which is the input that Linear keeps; the gradients are there already.
    assert deep["peak_bytes"] - shallow["peak_bytes"] == 4 * 1024 * 64 * 4
    assert deep["held_bytes"] == 0
    assert min(deep["seconds"], deep["cpu_seconds"]) > 0


def test_every_output_of_any_kind_takes_part(ask):
    assert ask("pair")[0] == 0
    module, inputs = worker.load_builder(f"{BUILDERS}:pair")(depth=1, memory="linear")
    worker._training_step(module, inputs)()
    # d/dw of sum(x * w) + sum(log w) at w = 1, x = 2, two rows.
    torch.testing.assert_close(module.weight.grad, torch.full((3,), 5.0))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        ("no_such_package.chain:build", "No module named 'no_such_package'. Run where"),
        ("torch.no_such_module:build", "No module named 'torch.no_such_module'. Run where"),
        ("nowhere/chain.py:build", "there is no file "),
        ("no_such_function", "there is no function no_such_function in "),
        ("number", "there is no function number in "),
        ("module_alone", "it returned Linear, but must return a training step"),
        ("frozen", "no output of its module requires a gradient."),
    ],
)
def test_a_wrong_builder(ask, build, message):
    code, answer = ask(build)
    assert code == 1
    assert answer["argument"].startswith(message)


def test_a_builder_that_fails(ask, capsys, tmp_path, monkeypatch):
    assert ask("raises", 7) == (1, {"error": "RuntimeError: no chain of 7 blocks"})
    assert ask("ends") == (1, {"error": "SystemExit: bad configuration"})
    assert "Traceback" in capsys.readouterr().err
    (tmp_path / "needs_more.py").write_text("import no_such_package\n")
    monkeypatch.syspath_prepend(tmp_path)
    error = "ModuleNotFoundError: No module named 'no_such_package'"
    assert ask("needs_more:build") == (1, {"error": error})
