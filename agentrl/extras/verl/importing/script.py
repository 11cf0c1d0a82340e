"""Find the training that a shell script starts: its module and arguments."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from agentrl.errors import ConfigError
from agentrl.extras.verl.importing.shell import Shell, read_script
from agentrl.extras.verl.importing.shell_expansion import UNKNOWN, shown
from agentrl.extras.verl.importing.source import PLACEHOLDER

CONFIGS = (".yaml", ".yml", ".json")
STARTERS = re.compile(r"(python|pypy|torchrun|accelerate|deepspeed|torch\.distributed)")
_OVERRIDE = re.compile(
    r"(\+\+|\+|~)?(data|actor_rollout_ref|algorithm|trainer|critic|reward_model|reward|custom_reward_function|model|optim|engine|rollout)\."
)
_OPTIONS = {
    "--config-path": "path",
    "-cp": "path",
    "--config-name": "name",
    "-cn": "name",
    "--config-dir": "directory",
    "-cd": "directory",
}
_RANKS = {"--nproc_per_node": "trainer.n_gpus_per_node", "--nnodes": "trainer.nnodes"}
"""torchrun's options, and the corresponding keys of verl."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A command that starts a training, generation or evaluation of verl.

    Attributes:
        module: dotted name, or a path; "" if none is given.
        overrides: in Hydra's grammar.
        config_path, config_name: Hydra's options; None: not given.
        ranks: torchrun's ranks, as overrides of verl.
        folder: working directory of the command.
        file: the script; None: there is none.
        notes: what could not be read, in words.
    """

    module: str
    overrides: tuple[str, ...] = ()
    config_path: str | None = None
    config_name: str | None = None
    ranks: tuple[str, ...] = ()
    folder: Path = Path()
    file: Path | None = None
    notes: tuple[str, ...] = ()

    @property
    def is_supervised(self) -> bool:
        return "sft" in self.module.rpartition(".")[2].lower() or "sft_trainer" in self.module


def is_script(file: str) -> bool:
    """Return whether a file is a script, not a config. Scripts may have any suffix, or none."""
    return not file.endswith(CONFIGS)


def read_launch(file: str, arguments: Sequence[str]) -> Launch:
    """Return the first training that a script starts when called with `arguments`.

    Overrides among the arguments always apply, whether or not the script passes them on.

    Raises:
        ConfigError: the file does not exist or cannot be read, or starts no training.
    """
    path = Path(file).expanduser()
    if not path.is_file():
        raise ConfigError(f"script {file!r} does not exist")
    shell = Shell(list(arguments), path)
    try:
        shell.run(read_script(path))
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None
    except RecursionError:
        raise ConfigError(f"{file}: its commands are nested too deeply") from None
    launches = [launch for _, words in shell.started if (launch := launch_of(words)) is not None]
    if not launches:
        raise ConfigError(
            f"{file} contains no known training command, such as `python3 -m verl.trainer.main_ppo key=value "
            "...`"
        )
    first, *others = launches
    notes = [*first.notes, *shell.notes]
    if others:
        notes.append(f"{len(others)} more training commands were ignored; only the first was read")
    given = [word for word in arguments if "=" in word or word.startswith("~")]
    names = {word.partition("=")[0].lstrip("+~") for word in given}
    notes = [note for note in notes if note.partition("=")[0].lstrip("+") not in names]
    return Launch(
        first.module,
        (*first.overrides, *(word for word in given if word not in first.overrides)),
        first.config_path,
        first.config_name,
        first.ranks,
        shell.folder,
        path,
        tuple(dict.fromkeys(notes)),
    )


def launch_of(words: Sequence[str]) -> Launch | None:
    """Return the training that a command starts; None if it is another program."""
    found = next(_modules(words), None)
    if found is None:
        return None
    place, module = found
    options, overrides, notes = _arguments(words[place + 1 :])
    if not (any(_OVERRIDE.match(word) for word in overrides) or "name" in options):
        return None
    ranks = [
        f"{key}={value}"
        for option, key in _RANKS.items()
        if (value := _option(words[:place], option)) is not None and value.isdecimal()
    ]
    return Launch(
        module,
        tuple(overrides),
        options.get("path") or options.get("directory"),
        options.get("name"),
        tuple(ranks),
        notes=tuple(notes),
    )


def _modules(words: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Yield (index, name) of the modules after `-m`, and of the files, that an interpreter is told to run."""
    starter = next(
        (index for index, word in enumerate(words) if STARTERS.match(word.rpartition("/")[2])), None
    )
    if starter is None:
        return
    for index in range(starter + 1, len(words)):
        word = words[index]
        if words[index - 1] == "-m" and not word.startswith("torch.distributed"):
            yield index, word
        elif word.endswith(".py") and not word.startswith("-"):
            yield index, word.removesuffix(".py").removeprefix("./").replace("/", ".")


def _arguments(words: Sequence[str]) -> tuple[dict[str, str], list[str], list[str]]:
    """Separate Hydra's options from overrides; also return notes about overrides with unknown values."""
    options: dict[str, str] = {}
    overrides: list[str] = []
    notes: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, has_value, value = word.partition("=")
        if name in _OPTIONS:
            options[_OPTIONS[name]] = value if has_value else rest.pop(0) if rest else ""
        elif word.startswith("-") or not word.strip():
            continue
        elif UNKNOWN in word:
            why = ", ".join(dict.fromkeys(word.split(UNKNOWN)[1::2]))
            cause = (
                f"{why} is not set by the script"
                if why.startswith("$") and "(" not in why
                else f"only known when {why} runs"
            )
            notes.append(f"{shown(word)}: {cause}; give it as {name.lstrip('+')}=...")
        elif PLACEHOLDER.search(value) and value[:1] not in ("'", '"'):
            notes.append(f"{word}: a placeholder; give it as {name.lstrip('+')}=...")
        elif has_value or word.startswith("~"):
            overrides.append(_plain(word))
        else:
            notes.append(f"{word}: not an override")
    return options, overrides, notes


def _plain(word: str) -> str:
    """Return an override for Hydra. A value that only the shell's quotes held together is quoted."""
    name, _, value = word.partition("=")
    is_open = bool(re.search(r"[\s,]", value.strip())) and value.strip()[:1] not in ("[", "{", "'", '"')
    return (
        f"{name}='{value.strip()}'"
        if is_open and "'" not in value
        else f"{name}={value}"
        if "=" in word
        else word
    )


def _option(words: Sequence[str], name: str) -> str | None:
    for index, word in enumerate(words):
        spelled = word.replace("-", "_").replace("__", "--", 1)
        if spelled.partition("=")[0] == name:
            return word.partition("=")[2] if "=" in word else next(iter(words[index + 1 :]), None)
    return None
