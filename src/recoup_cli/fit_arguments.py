"""Arguments of ``fit``: options for every day, which become settings of Lightning's command line.

Its settings, such as ``--trainer.max_epochs``, are hundreds, and it must import their classes to
know them, which takes seconds. So options are checked here, and settings are left to it.
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recoup_cli.mistakes import check_checkpoint, near
from recoup_cli.parser import Parser, positive_int

__all__ = ["FLOW", "LANGUAGE_MODEL", "Fit", "check_epochs", "given_in", "long_names"]

# How settings of Lightning's command line begin: with these, and a dot if they have parts.
_SECTIONS = {
    *("trainer", "model", "data", "checkpoint", "early_stopping"),
    *("seed_everything", "num_threads", "print_config"),
}


@dataclass(frozen=True)
class Fit:
    """The command ``fit`` of a recipe.

    Attributes:
        name: Name of the recipe on the command line.
        folder: Folder of the recipe, in ``recoup.recipes``.
        help: What the command does.
        data: What ``--data`` takes.
        memory: What ``--memory`` takes.
        batch_size: What ``--batch-size`` counts.
        settings: Lines about settings of the recipe for ``--help``.
        sources: Values of ``--data`` that are not paths.
        options: Options of this recipe alone: names, and arguments of `add_argument`.
        default_configs: The configurations to use if the arguments name none.
    """

    name: str
    folder: str
    help: str
    data: str
    memory: str
    batch_size: str
    settings: str
    sources: tuple[str, ...] = ()
    options: Mapping[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    default_configs: tuple[str, ...] = ()

    @property
    def configs(self) -> Path:
        """The folder of the configurations that come with the recipe."""
        return Path(__file__).parents[1] / "recoup" / "recipes" / self.folder / "configs"

    @property
    def config_names(self) -> list[str]:
        """The names of the configurations that come with the recipe."""
        return sorted(path.stem for path in self.configs.glob("*.yaml"))


FLOW = Fit(
    "flow",
    "flow",
    "train a flow on pictures, points, or the built-in digits",
    data="a folder of pictures, an .npz of pictures or points, a .csv of points, moons, rings or "
    "checkerboard; the built-in digits if left out",
    memory="what backward remembers: linear, sqrt, log, constant, a number of slots, or a number "
    'of bytes as "500 MiB"',
    batch_size="pictures in a batch (64)",
    settings="""\
  --model.flow NAME  glow, nice, realnvp, flowpp or iresnet (glow)
  --model.conditional true
                     learn the density given the label, for data with labels
  --data.size N      crop and resize the pictures to N x N
  --data.levels N    number of grey levels to train on (those of the pictures)
  --model.num_levels, --model.num_steps, --model.width, --model.depth, --model.dropout
                     the flow: scales, steps at each, channels in its networks, ...
  --model.learning_rate, --model.optimizer, --early_stopping.patience, ...""",
    sources=("moons", "rings", "checkerboard"),
)
LANGUAGE_MODEL = Fit(
    "lm",
    "language_model",
    "train an AWD-LSTM on your text, or on Python's documentation",
    data="a text file, or a folder with train.txt, valid.txt and test.txt; the documentation of "
    "Python if left out",
    memory='what backward remembers: linear, sqrt, or a number of bytes as "500 MiB"',
    batch_size="columns of text that are read side by side",
    settings="""\
  --data.tokens KIND words, whitespace (for texts that are tokenized) or characters
  --data.min_count, --data.max_vocab_size, --data.bptt, --data.eval_batch_size, ...
  --model.embed_size, --model.hidden_size, --model.num_layers, --model.weight_dropout, ...
  --model.learning_rate, --model.clip, --model.averaging, --early_stopping.patience, ...""",
    options={
        "--weight-noise": {
            "dest": "model.weight_noise",
            "type": float,
            "metavar": "STD",
            "help": "variational noise on weights, from --model.weight_noise_start on",
        }
    },
    default_configs=("tiny",),
)


def long_names(args: Sequence[str], fit: Fit) -> list[str]:
    """Return the arguments for Lightning's command line: its names, and paths of configurations.

    Files come first, so that options go before what is in them.

    Raises:
        MistakeError: When an option is unknown, or its value is wrong.
        ValueError: When there is no such configuration, checkpoint or data.
    """
    parser = _parser(fit)
    known, rest = parser.parse_known_args(args)
    given = vars(known)
    del given["parser"]
    if given.pop("help_all", False):
        return ["--help"]
    unknown = [arg for arg in rest[:1] if not arg.startswith("-")]
    unknown += [arg for arg in rest if arg.startswith("--") and _section(arg) not in _SECTIONS]
    if unknown:
        parser.refuse(unknown[:1])
    for option in ("resume", "finetune"):
        if option in given:
            check_checkpoint(given[option], f"--{option}")
    _check_data(given.get("data.path", "null"), fit)
    begun = {"config", "resume", "finetune"} & given.keys()
    configs = given.pop("config", [] if begun else fit.default_configs)
    files = [f"--config={_file(config, fit)}" for config in configs]
    return [*files, *(f"--{name}={value}" for name, value in given.items()), *rest]


def given_in(args: Sequence[str], setting: str) -> bool:
    """Return whether arguments with long names give a setting, or a part of it."""
    names = [arg.partition("=")[0].rstrip("+") for arg in args]
    return any(name == f"--{setting}" or name.startswith(f"--{setting}.") for name in names)


def check_epochs(max_epochs: int | None, *, is_bounded: bool) -> None:
    """Raise a ValueError if the run would train nothing, or without an end."""
    if max_epochs is not None and max_epochs < 1 and not (max_epochs == -1 and is_bounded):
        raise ValueError(
            f"`--epochs` is {max_epochs}, but must be at least 1. Training ends earlier by "
            "`--early_stopping.patience` or `--trainer.max_time`."
        )


def _section(arg: str) -> str:
    return arg.removeprefix("--").partition("=")[0].partition(".")[0]


def _check_data(data: str, fit: Fit) -> None:
    if not data:
        raise ValueError("`--data` is empty. See `--help` for what it takes.")
    if data not in (*fit.sources, "null") and not Path(data).exists():
        raise ValueError(
            f"`--data` is {data}, which does not exist.{near(data, fit.sources)} See `--help` for "
            "what it takes."
        )


def _file(config: str, fit: Fit) -> str:
    """Return the path of a configuration, or the settings themselves."""
    if "\n" in config or ": " in config or Path(config).exists():
        return config
    if config in fit.config_names:
        return str(fit.configs / f"{config}.yaml")
    raise ValueError(
        f"`--config` is {config}, which is neither a file nor one of "
        f"{', '.join(fit.config_names)}.{near(config, fit.config_names)} Give one of these."
    )


def _parser(fit: Fit) -> Parser:
    """Return the parser of ``fit``; the `dest` of an option is the setting that it stands for."""
    parser = Parser(
        prog=f"recoup {fit.name} fit",
        about=fit.help,
        usage="[options]",
        epilog=_epilog(fit),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    number: Any = {"type": positive_int, "metavar": "N"}
    out = f"folder of the run (runs/{fit.name}/fit-1, or the next number)"
    seed = "seed of weights, order, noise and dropout (0)"
    resume = "go on from a checkpoint, with its settings, in its folder"
    finetune = "begin a new run with the weights of a checkpoint, and its settings"
    config = "settings from a file, or of the recipe, as below"
    add = parser.add_argument
    add("--data", dest="data.path", metavar="PATH", help=fit.data)
    add("--memory", dest="model.memory", metavar="MODE", help=fit.memory)
    add("--epochs", dest="trainer.max_epochs", help="number of epochs", **number)
    add("--batch-size", dest="data.batch_size", help=fit.batch_size, **number)
    for name, settings in fit.options.items():
        add(name, **settings)
    add("--out", dest="trainer.default_root_dir", metavar="DIR", help=out)
    add("--seed", dest="seed_everything", type=int, metavar="N", help=seed)
    add("--threads", dest="num_threads", help="threads on CPU", **number)
    begun = parser.add_mutually_exclusive_group()
    begun.add_argument("--resume", metavar="CKPT", help=resume)
    begun.add_argument("--finetune", metavar="CKPT", help=finetune)
    add("--config", action="append", metavar="FILE", help=config)
    add("--help-all", action="store_const", const=True, help="explain all settings")
    return parser


def _epilog(fit: Fit) -> str:
    listed = textwrap.fill(", ".join(fit.config_names), 76, break_on_hyphens=False)
    return f"""\
configurations of the recipe, for --config:
{textwrap.indent(listed, "  ")}

settings, of which these are some:
{fit.settings}
  --trainer.accelerator, --trainer.devices, --trainer.precision, ...
                     any setting of Lightning's Trainer
  --print_config     print all settings, as a file for --config"""
