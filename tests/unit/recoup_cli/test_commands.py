"""The command line before torch is there: help, mistakes and missing modules."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from importlib.metadata import version
from typing import get_args, get_type_hints

import pytest

from recoup_cli import main
from recoup_cli.commands import _COMMANDS, FLOW, LANGUAGE_MODEL
from recoup_cli.signatures import signature_of

MISTAKES = {
    "flow fitt": "Did you mean `flow fit`?",
    "flaw fit": "there is no command `flaw fit`. Did you mean `flow fit`?",
    "explian": "Did you mean `explain`?",
    "flow fit --memroy sqrt": "no option `--memroy sqrt`. Did you mean `--memory`?",
    "flow fit --data.batch_sise=3": "Did you mean `--data.batch_size`?",
    "flow fit --trainer.max_epoch 3": "Did you mean `--trainer.max_epochs`?",
    "flow fit sqrt": "no option `sqrt`",
    "flow fit --model.coupling odd": "is odd, but must be one of null, 'affine', 'additive'",
    "flow fit --epochs many": "`--trainer.max_epochs` is many, but must be one of null, int",
    "flow fit --epochs -1": "`--epochs` is -1, but must be at least 1",
    "flow fit --epochs=0": "`--epochs` is 0, but must be at least 1",
    "flow fit --threads 0": "`--threads` is 0",
    "flow fit --data nowhere": "`--data` is nowhere, which does not exist",
    "flow fit --data moon": "Did you mean `moons`?",
    "flow fit --config glow-digit": "Did you mean `glow-digits`?",
    "flow fit --resume nowhere.ckpt": "`--resume` is nowhere.ckpt, but there is no such file",
    "lm fit --config tyny": "Did you mean `tiny`?",
    "lm fit --weight-noise much": "`--model.weight_noise` is much, but must be float",
    "lm fit --resume a --finetune b": "are both given",
    "lm fit --epochs 0": "`--epochs` is 0, but must be at least 1",
    "flow evaluate": "`--checkpoint` is needed",
    "flow sample --nmu 3": "no option `--nmu 3`. Did you mean `--num`?",
    "flow sample --num few": "`--num` is few, but must be one of null, int",
    "lm generate --checkpoint nowhere": "`--checkpoint` is nowhere, but there is no such file",
    "curve": "`build` is needed",
    "curve a:b --depths 4 x": "`--depths` is x, but must be int",
    "explain": "`build` is needed",
    "flow demo --epochs": "argument --epochs: expected one argument",
}
HELPS = ["", "--help", "--version", "flow", *(f"{name} --help" for name in _COMMANDS)]
HEAVY = {"torch", "recoup", "lightning", "jsonargparse", "matplotlib", "numpy", "sklearn", "yaml"}


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_is_one_line(line, capsys):
    assert main(line.split()) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("recoup: error: ")
    assert printed.err.count("\n") == 1
    assert MISTAKES[line] in printed.err


@pytest.mark.parametrize("name", ["", *_COMMANDS])
def test_help_begins_with_how_to_call_it_and_what_it_does(name, capsys):
    assert main([*name.split(), "--help"]) == 0
    usage, blank, what, *_ = capsys.readouterr().out.splitlines()
    build = " BUILD" if name in ("curve", "explain") else ""
    assert usage == f"usage: recoup {name or 'COMMAND'}{build} [options]"
    assert blank == ""
    assert what[0].isupper()
    assert "." in what


def test_help_says_what_is_needed_and_what_holds_if_an_option_is_left_out(capsys):
    assert main(["lm", "evaluate", "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "--checkpoint CKPT The .ckpt file of a trained model (needed)." in shown
    assert "0.662 if left out." in shown
    assert "None" not in shown


def test_the_version_is_that_of_the_package(capsys):
    import recoup

    assert main(["--version"]) == 0
    python = ".".join(map(str, sys.version_info[:3]))
    expected = f"recoup {recoup.__version__} (Python {python}, torch {version('torch')})\n"
    assert capsys.readouterr().out == expected


def test_python_m_recoup_is_the_command():
    def run(*args):
        command = [sys.executable, "-m", "recoup", *args]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    assert run("--version").stdout.startswith("recoup ")
    wrong = run("explian")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr.startswith("recoup: error: there is no command `explian`.")


def run(code, *args):
    done = subprocess.run(
        [sys.executable, "-c", code, *args], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def test_n16_mistakes_and_help_import_nothing_that_is_large():
    lines = [*MISTAKES, *HELPS]
    code = (
        "import json, sys\nfrom recoup_cli import main\n"
        "codes = [main(line.split()) for line in json.loads(sys.argv[1])]\n"
        "print(json.dumps([codes, sorted({name.partition('.')[0] for name in sys.modules})]))"
    )
    codes, modules = run(code, json.dumps(lines))
    assert codes == [2] * len(MISTAKES) + [0] * len(HELPS)
    assert HEAVY & set(modules) == set()


# What all commands are called with when their extras are missing; nothing is measured or trained.
CALLS = [
    "flow fit",
    "flow evaluate --checkpoint {file}",
    "flow sample --checkpoint {file}",
    "flow demo",
    "lm fit",
    "lm evaluate --checkpoint {file}",
    "lm generate --checkpoint {file}",
]
BLOCKER = """
import json, sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

BLOCKED = set(json.loads(sys.argv[2]))
sys.meta_path.insert(0, Blocker())
from recoup_cli import main
import contextlib, io
found = []
for line in json.loads(sys.argv[1]):
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        code = main(line.split())
    found.append([code, said.getvalue()])
print(json.dumps(found))
"""


@pytest.mark.slow
def test_n13_without_the_extras_each_command_says_what_to_install(tmp_path):
    calls = [line.format(file=__file__) for line in CALLS]
    extras = ["lightning", "jsonargparse", "matplotlib", "PIL", "rich", "sklearn", "torchmetrics"]
    for code, said in run(BLOCKER, json.dumps(calls), json.dumps(extras)):
        assert code == 2
        assert said.count("\n") == 1
        assert 'by `pip install "recoup[recipes]"`.' in said


@pytest.mark.slow
def test_n13_curve_and_explain_need_torch_alone(tmp_path):
    path = tmp_path / "some.py"
    path.write_text(
        "import torch\n"
        "def build(): return torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(4)]), "
        "torch.ones(2, 4)\n"
    )
    extras = ["lightning", "jsonargparse", "matplotlib", "PIL", "rich", "sklearn", "yaml"]
    calls = [f"explain {path}:build --budget 1MiB --figure {tmp_path / 'plan.png'}"]
    ((code, said),) = run(BLOCKER, json.dumps(calls), json.dumps(extras))
    assert code == 2
    assert said.count("\n") == 1
    assert "pip install" in said


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_explain_says_what_it_compiles(tmp_path, capsys):
    path = tmp_path / "some.py"
    path.write_text(
        "import torch\n"
        "def build(): return torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(4)]), "
        "torch.ones(2, 4)\n"
    )
    assert main(["explain", f"{path}:build", "--budget", "1MiB", "--compile"]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("Plan for Sequential")
    assert "Linear: compiled 0.5 in " in printed.err


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("raise KeyError('oops')", "raised KeyError: 'oops'"),
        ("raise ValueError('two\\nlines')", "raised ValueError: two lines"),
        ("return torch.nn.Linear(3, 3), torch.ones(2, 2)", "RuntimeError"),
    ],
)
def test_n13_a_builder_that_raises_is_one_line(tmp_path, capsys, body, message):
    path = tmp_path / "some.py"
    path.write_text(f"import torch\ndef build():\n    {body}\n")
    assert main(["explain", f"{path}:build", "--budget", "1MiB", "--blocks", ".*"]) in (1, 2)
    printed = capsys.readouterr().err
    assert printed.startswith("recoup: error: ")
    assert printed.count("\n") == 1
    assert message in printed or "blocks" in printed


@pytest.mark.parametrize("device", ["abacus", "cuda:99"])
def test_n13_a_device_that_is_not_there_is_one_line(tmp_path, capsys, device):
    path = tmp_path / "some.py"
    path.write_text("import torch\ndef build(): return torch.nn.Linear(3, 3), torch.ones(2, 3)\n")
    assert main(["explain", f"{path}:build", "--budget", "1MiB", "--device", device]) == 2
    assert f"`--device` is {device}, which torch cannot use" in capsys.readouterr().err


def atoms(hint):
    """The types and values that a hint is made of."""
    if hint is type(None):
        return {None}
    if isinstance(hint, type) or not get_args(hint):
        return {hint}
    return {atom for part in get_args(hint) for atom in atoms(part)}


def test_options_that_are_read_from_the_source_are_those_of_python():
    from recoup.recipes.flow.data import Images
    from recoup.recipes.flow.model import FlowTraining
    from recoup.recipes.language_model.data import Texts
    from recoup.recipes.language_model.model import LanguageModelTraining

    kinds = (
        (FLOW, "model.py", FlowTraining),
        (FLOW, "data.py", Images),
        (LANGUAGE_MODEL, "model.py", LanguageModelTraining),
        (LANGUAGE_MODEL, "data.py", Texts),
    )
    for fit, file, kind in kinds:
        _, options = signature_of(fit.path / file, kind.__name__)
        parameters = inspect.signature(kind).parameters
        assert [option.name for option in options] == list(parameters)
        hints = get_type_hints(kind.__init__)
        for option in options:
            default = parameters[option.name].default
            assert option.default == (None if default is inspect.Parameter.empty else default)
            if option.choices and not option.is_many:
                assert set(option.choices) == atoms(hints[option.name])
            assert option.help


def test_sources_are_the_toy_densities():
    from recoup.recipes.flow.points import TOYS

    assert set(FLOW.sources) == set(TOYS)
