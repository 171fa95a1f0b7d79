"""The command line before torch is there: help, mistakes and missing modules."""

from __future__ import annotations

import collections.abc
import importlib
import inspect
import json
import subprocess
import sys
from importlib.metadata import version
from typing import get_args, get_origin, get_type_hints

import pytest

from recoup_cli import main
from recoup_cli.commands import _COMMANDS, FLOW, LANGUAGE_MODEL
from recoup_cli.fit_arguments import given_in, long_names
from recoup_cli.parser import Parser

MISTAKES = {
    "flow fitt": "argument COMMAND: invalid choice: 'fitt'",
    "flaw fit": "argument COMMAND: invalid choice: 'flaw'",
    "explian": "See `recoup --help`.",
    "--vresion": "no option `--vresion`. Did you mean `--version`? See `recoup --help`.",
    "flow --foo": "no option `--foo`. See `recoup flow --help`.",
    "flow fit --memroy sqrt": "no option `--memroy`. Did you mean `--memory`?",
    "flow fit --memroy=sqrt": "no option `--memroy=sqrt`. Did you mean `--memory`?",
    "flow fit --data.size 8 --epoch 3": "no option `--epoch`. Did you mean `--epochs`?",
    "flow fit --modle.width 8": "no option `--modle.width`. See `recoup flow fit --help`.",
    "flow fit sqrt": "no option `sqrt`",
    "flow fit --seed 1 sqrt": "no option `sqrt`. See `recoup flow fit --help`.",
    "flow fit --epochs many": "argument --epochs: many is not a whole number of at least 1",
    "flow fit --epochs -1": "argument --epochs: -1 is not a whole number of at least 1",
    "flow fit --epochs=0": "argument --epochs: 0 is not a whole number of at least 1",
    "flow fit --threads 0": "argument --threads: 0 is not",
    "flow fit --batch-size 0": "argument --batch-size: 0 is not",
    "flow fit --seed x": "argument --seed: invalid int value: 'x'. See `recoup flow fit --help`.",
    "flow fit --data nowhere": "`--data` is nowhere, which does not exist",
    "flow fit --data moon": "Did you mean `moons`?",
    "flow fit --config glow-digit": "Did you mean `glow-digits`?",
    "flow fit --resume nowhere.ckpt": "`--resume` is nowhere.ckpt, but there is no such file",
    "lm fit --config tyny": "Did you mean `tiny`?",
    "lm fit --weight-noise much": "argument --weight-noise: invalid float value: 'much'",
    "lm fit --resume a --finetune b": "argument --finetune: not allowed with argument --resume",
    "lm fit --epochs 0": "argument --epochs: 0 is not a whole number of at least 1",
    "flow evaluate": "the following arguments are required: --checkpoint",
    "flow evaluate --checkpoint": "argument --checkpoint: expected one argument",
    "flow demo --epohs 3": "no option `--epohs 3`. Did you mean `--epochs`?",
    "flow sample --num few": "argument --num: invalid int value: 'few'",
    "lm generate --checkpoint nowhere": "`--checkpoint` is nowhere, but there is no such file",
    "curve": "the following arguments are required: BUILD. See `recoup curve --help`.",
    "curve a:b --depths 4 x": "argument --depths: invalid int value: 'x'",
    "explain": "the following arguments are required: BUILD",
    "flow demo --epochs": "argument --epochs: expected one argument",
}
HELPS = ["", "--help", "--version", "flow", "lm", *(f"{name} --help" for name in _COMMANDS)]
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
    what_follows = {"curve": " BUILD", "explain": " BUILD"}
    what_follows |= dict.fromkeys(("", "flow", "lm"), " COMMAND")
    assert usage == f"usage: {f'recoup {name}'.strip()}{what_follows.get(name, '')} [options]"
    assert blank == ""
    assert what[0].isupper()
    assert what.endswith(".")


def test_a_wrong_command_names_those_that_there_are(capsys):
    assert main(["flow", "fitt"]) == 2
    choices = capsys.readouterr().err.partition("choose from ")[2].replace("'", "")
    assert choices == "fit, evaluate, sample, demo). See `recoup flow --help`.\n"


def test_help_names_all_commands(capsys):
    for group in ("", "flow", "lm"):
        assert main([*group.split(), "--help"]) == 0
        shown = capsys.readouterr().out
        assert main(group.split()) == 0
        assert capsys.readouterr().out == shown
        names = [name.rpartition(" ") for name in _COMMANDS]
        listed = [line.split()[0] for line in shown.splitlines() if line.startswith("    ")]
        assert listed == [last for first, _, last in names if first == group]


def test_help_says_what_is_needed_and_what_holds_if_an_option_is_left_out(capsys):
    assert main(["lm", "evaluate", "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "--checkpoint CKPT the .ckpt file of a trained model (needed)" in shown
    assert "how sharply it tells outputs apart (0.662)" in shown
    assert "None" not in shown


def atoms(hint):
    """The types that a hint is made of, with that of a sequence of them."""
    parts = {atom for part in get_args(hint) for atom in atoms(part)}
    return parts | {get_origin(hint) or hint}


FUNCTIONS = [name for name, command in _COMMANDS.items() if command.add_options is not None]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_options_are_the_arguments_of_the_function(name, capsys):
    module, _, function = _COMMANDS[name].target.partition(":")
    function = getattr(importlib.import_module(f"recoup.recipes.{module}"), function)
    parser = Parser(prog="recoup", about="x", usage="")
    _COMMANDS[name].add_options(parser)
    options = {action.dest: action for action in parser._actions if action.dest != "help"}
    parameters = inspect.signature(function).parameters
    assert set(options) == set(parameters)
    hints = get_type_hints(function)
    for option, action in options.items():
        assert (parameters[option].default is inspect.Parameter.empty) == action.required
        shown = parameters[option].default
        if not action.required and shown not in (None, "", False):
            shown = " ".join(map(str, shown)) if isinstance(shown, tuple) else shown
            assert action.help.endswith(f"({shown})")
        types = atoms(hints[option])
        kind = bool if action.nargs == 0 else action.type or str
        assert kind in types
        assert (action.nargs == "+") == (collections.abc.Sequence in types)


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
    assert wrong.stderr.startswith("recoup: error: argument COMMAND: invalid choice: 'explian'")


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


def test_sources_are_the_toy_densities():
    from recoup.recipes.flow.points import TOYS

    assert set(FLOW.sources) == set(TOYS)


def test_options_of_fit_become_settings_after_files():
    args = (
        "--model.width 8 --data=moons --epochs 3 --config glow-digits --model.exact true --seed 1"
    )
    long = long_names(args.split(), FLOW)
    assert long == [
        f"--config={FLOW.configs / 'glow-digits.yaml'}",
        *("--data.path=moons", "--trainer.max_epochs=3", "--seed_everything=1"),
        *("--model.width", "8", "--model.exact", "true"),
    ]
    assert given_in(long, "trainer.max_epochs")
    assert not given_in(long, "trainer.max")


def test_settings_are_left_to_lightning():
    args = ["--trainer", '{"devices": 1}', "--print_config=skip_null", "--seed_everything", "3"]
    assert long_names(args, FLOW) == args
    assert long_names(args, LANGUAGE_MODEL)[1:] == args
    assert long_names(["--epochs", "3", "--help-all"], FLOW) == ["--help"]


def test_a_configuration_is_a_file_or_settings_before_it_is_one_of_the_recipe(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "glow-digits").write_text("")
    for config in ("glow-digits", "model: {width: 8}", "a:\n  b: 3"):
        assert long_names(["--config", config], FLOW) == [f"--config={config}"]
    tiny = f"--config={LANGUAGE_MODEL.configs / 'tiny.yaml'}"
    assert long_names([], LANGUAGE_MODEL) == [tiny]
    assert long_names(["--config", "tiny", "--config=tiny"], LANGUAGE_MODEL) == [tiny, tiny]
    (tmp_path / "some.ckpt").write_text("")
    for option in ("--resume", "--finetune"):
        assert long_names([option, "some.ckpt"], LANGUAGE_MODEL) == [f"{option}=some.ckpt"]
