"""Arguments of ``fit``: short names, configurations, and a check before Lightning is imported.

The check finds unknown options, and values of the wrong type for options of the recipes.
Lightning's command line then parses and checks the arguments.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from recoup_cli.mistakes import MistakeError, check_checkpoint, near
from recoup_cli.signatures import Option, package_folder, signature_of

__all__ = ["SHORT_NAMES", "Fit", "check_arguments", "check_epochs", "given_in", "long_names"]

# Short names are expanded before parsing: each setting has one name in configuration files, and
# all full names of Lightning's command line work.
SHORT_NAMES = {
    "--data": "--data.path",
    "--memory": "--model.memory",
    "--epochs": "--trainer.max_epochs",
    "--batch-size": "--data.batch_size",
    "--out": "--trainer.default_root_dir",
    "--seed": "--seed_everything",
    "--threads": "--num_threads",
}
_OF_THE_RUN = {
    *("--config", "--resume", "--finetune", "--num_threads", "--seed_everything"),
    *("--print_config", "--help", "--help-all", "-h"),
    *("--trainer", "--model", "--data", "--checkpoint", "--early_stopping"),
}
_BEGUN_FROM = ("--resume", "--finetune")
_WITHOUT_VALUE = {"--print_config", "--help", "--help-all", "-h"}
# File and class of each section of Lightning's options; unchecked if Lightning lacks the file.
_OF_LIGHTNING = {
    "trainer": ("trainer/trainer.py", "Trainer"),
    "checkpoint": ("callbacks/model_checkpoint.py", "ModelCheckpoint"),
    "early_stopping": ("callbacks/early_stopping.py", "EarlyStopping"),
}
_Sections = dict[str, dict[str, Option]]


@dataclass(frozen=True)
class Fit:
    """The command ``fit`` of a recipe.

    Attributes:
        folder: Folder of the recipe, in the package.
        model: Name of the class of the model, in ``model.py``.
        data: Name of the class of the data, in ``data.py``.
        help: Text of ``--help``, with ``{configs}`` for the configurations.
        sources: Values of ``--data`` that are not paths.
        short_names: Short names of settings.
        default_config: The configuration to use if the arguments name none.
    """

    folder: str
    model: str
    data: str
    help: str
    sources: tuple[str, ...] = ()
    short_names: Mapping[str, str] = field(default_factory=lambda: SHORT_NAMES)
    default_config: str | None = None

    @property
    def path(self) -> Path:
        """The folder of the recipe."""
        return (package_folder("recoup") or Path()) / self.folder

    @property
    def configs(self) -> Path:
        """The folder of the configurations that come with the recipe."""
        return self.path / "configs"


def long_names(args: Sequence[str], fit: Fit) -> list[str]:
    """Expand short names, and find configurations that come with the recipe.

    Raises:
        ValueError: When a configuration is neither a file nor part of the recipe.
    """
    long: list[str] = []
    for arg in args:
        name, equals, value = arg.partition("=")
        name = fit.short_names.get(name, name)
        long += [name, value] if equals else [name]
    begun = {"--config", *_BEGUN_FROM} & set(long)
    if fit.default_config is not None and not begun:
        long = ["--config", fit.default_config, *long]
    for index in range(1, len(long)):
        if long[index - 1] == "--config" and not Path(long[index]).exists():
            long[index] = _shipped(long[index], fit)
    return long


def _shipped(name: str, fit: Fit) -> str:
    path = fit.configs / f"{name}.yaml"
    if path.is_file():
        return str(path)
    if "\n" in name or ": " in name:
        return name  # the settings themselves, not a file
    names = sorted(path.stem for path in fit.configs.glob("*.yaml"))
    raise ValueError(
        f"`--config` is {name}, which is neither a file nor one of {', '.join(names)}."
        f"{near(name, names)} Give one of these."
    )


def check_arguments(args: Sequence[str], fit: Fit) -> None:
    """Raise if the arguments have mistakes that can be found without importing the recipe.

    Raises:
        MistakeError: When there is a mistake.
    """
    if "--help-all" in args:
        return
    try:
        given = dict(_pairs(long_names(args, fit), args, fit))
        _check_values(given, fit)
    except ValueError as error:
        raise MistakeError(str(error)) from None


def check_epochs(max_epochs: int | None, *, is_bounded: bool) -> None:
    """Raise a ValueError if the run would train nothing, or without an end."""
    if max_epochs is not None and max_epochs < 1 and not (max_epochs == -1 and is_bounded):
        raise ValueError(
            f"`--epochs` is {max_epochs}, but must be at least 1. Training ends earlier by "
            "`--early_stopping.patience` or `--trainer.max_time`."
        )


def _pairs(long: Sequence[str], args: Sequence[str], fit: Fit) -> Iterator[tuple[str, str | None]]:
    """Yield the options with their values; raise at an unknown option."""
    sections = _sections(fit)
    index = 0
    while index < len(long):
        option = long[index]
        has_value = option not in _WITHOUT_VALUE and index + 1 < len(long)
        value = long[index + 1] if has_value and not long[index + 1].startswith("--") else None
        if not _is_known(option, sections):
            unknown = option if value is None else f"{option} {value}"
            names = [*fit.short_names, *_OF_THE_RUN, *_full_names(sections)]
            raise MistakeError(
                f"there is no option `{unknown}`.{near(option, names)} See `--help` for those "
                "that there are."
            )
        section, _, name = option.removeprefix("--").partition(".")
        known = sections.get(section, {}).get(name)
        if value is not None and known is not None and section not in _OF_LIGHTNING:
            _check_type(known, value, option)
        yield option, value
        index += 1 if value is None else 2


def _sections(fit: Fit) -> _Sections:
    files = {
        "model": (fit.path / "model.py", fit.model),
        "data": (fit.path / "data.py", fit.data),
    }
    lightning = package_folder("lightning")
    if lightning is not None:
        for section, (file, kind) in _OF_LIGHTNING.items():
            files[section] = (lightning / "pytorch" / file, kind)
    return {
        section: {option.name: option for option in signature_of(file, kind)[1]}
        for section, (file, kind) in files.items()
        if file.is_file()
    }


def _full_names(sections: _Sections) -> list[str]:
    return [f"--{section}.{name}" for section, options in sections.items() for name in options]


def _is_known(option: str, sections: _Sections) -> bool:
    if option in _OF_THE_RUN:
        return True
    section, dot, rest = option.removeprefix("--").partition(".")
    if section.startswith("print_"):
        return True  # an option of the parser
    if not option.startswith("--") or not dot or f"--{section}" not in _OF_THE_RUN:
        return False
    return section not in sections or rest.partition(".")[0].rstrip("+") in sections[section]


def _check_type(option: Option, value: str, shown: str) -> None:
    """Raise if `value` is a word but no choice of the option; the parser checks numbers."""
    is_word = value.isalpha() and value.lower() not in ("inf", "infinity", "nan")
    if option.choices and not option.is_many and is_word:
        option.value(value, shown)


def _check_values(given: Mapping[str, str | None], fit: Fit) -> None:
    epochs = given.get("--trainer.max_epochs")
    if epochs is not None and _is_number(epochs):
        bounds = {"--trainer.max_steps", "--trainer.max_time", "--config"}
        check_epochs(int(epochs), is_bounded=bool(bounds & given.keys()))
    elif epochs is not None and epochs.isalpha() and epochs.lower() not in ("null", "none"):
        raise MistakeError(f"`--trainer.max_epochs` is {epochs}, but must be one of null, int.")
    threads = given.get("--num_threads")
    if threads is not None and _is_number(threads) and int(threads) < 1:
        raise ValueError(f"`--threads` is {threads}, but must be at least 1.")
    if all(given.get(option) for option in _BEGUN_FROM):
        raise ValueError("`--resume` and `--finetune` are both given. Give one of them.")
    data = given.get("--data.path")
    if data is not None and data not in (*fit.sources, "null") and not Path(data).exists():
        raise ValueError(
            f"`--data` is {data}, which does not exist.{near(data, fit.sources)} See `--help` for "
            "what it takes."
        )
    for option in _BEGUN_FROM:
        path = given.get(option)
        if path is not None:
            check_checkpoint(path, option)


def _is_number(text: str) -> bool:
    return text.removeprefix("-").isdecimal()


def given_in(args: Sequence[str], setting: str) -> bool:
    """Return whether arguments with long names give a setting, or a part of it."""
    names = [arg.partition("=")[0].rstrip("+") for arg in args]
    return any(name == f"--{setting}" or name.startswith(f"--{setting}.") for name in names)
