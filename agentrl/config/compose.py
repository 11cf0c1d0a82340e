"""Build a checked Config from a YAML file and overrides.

Hydra composes; the schema adds defaults and validates. A file contains only what differs from the schema's
defaults. Its own `defaults` list works as in any Hydra program; the packaged configs come after the file's
folder on the search path. Nothing is written; the working directory and logging are not changed.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from warnings import catch_warnings, simplefilter

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.core.plugins import Plugins
from hydra.errors import HydraException, OverrideParseException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import RunMode
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from agentrl.config import packaged
from agentrl.config.error_messages import describe_invalid, describe_unknown
from agentrl.config.keys import unknown_keys, with_defaults
from agentrl.config.origins import Origins, SourceFile, WrittenOverride
from agentrl.config.schema import Config
from agentrl.config.section import Section
from agentrl.config.yaml_files import read_nodes
from agentrl.errors import ConfigError, concerning

HIDDEN = "<hidden>"
PLAIN_TEXT = re.compile(r"[A-Za-z_/][\w/. -]*", re.ASCII)
AT_HOME = re.compile(r"(?:(?<=[=\[,:])|(?<=[,:] ))~/")
INTERPOLATION = re.compile(r"(\\*)\$\{")
RESOLVER_ERROR = re.compile(r'^\w+ raised while resolving interpolation: "?(.*?)"?$')
SECRET_NAME = re.compile(
    r"(?:^|_)(?:api_?key|access_key|secret(?:_key)?|password|(?:auth|access|hf)_token)$", re.IGNORECASE
)

S = TypeVar("S", bound=Section)


def load_config(path: str, overrides: Sequence[str] = ()) -> Config:
    """Load a training config; see `load_section`."""
    return load_section(Config, path, overrides)


def load_section(schema: type[S], path: str, overrides: Sequence[str] = ()) -> S:
    """Compose the YAML file at `path` with `overrides`, and validate the result against `schema`.

    If there is no such file, `path` may name a packaged config, with or without suffix: `recipes/gsm8k_grpo`.
    Overrides follow Hydra's grammar; a plain `key=value` can also set a key that the file does not contain.
    Interpolations (`${trainer.seed}`, `${oc.env:HOME}`) can refer to the schema's defaults. Paths in values
    stay as written, relative to the working directory; any text that begins with `~/` is expanded to a path
    in the home folder.

    Raises:
        ConfigError: the file is missing or not YAML, a key is unknown, or a value is invalid; one line per
            problem.
    """
    file = _existing_file(path)
    values, origins = _compose(file, path, overrides)
    problems = [
        line
        for key, value in unknown_keys(schema, values)
        for line in describe_unknown(schema, key, value, origins)
    ]
    if problems:
        raise ConfigError("\n".join(problems))
    try:
        return schema.model_validate(_at_home(_resolve(with_defaults(schema, values), origins)))
    except ValidationError as error:
        raise ConfigError("\n".join(describe_invalid(error, origins))) from None


def _at_home(value: Any) -> Any:
    """Return a value in which every text that begins with `~/` has it replaced by the home folder."""
    if isinstance(value, Mapping):
        return {key: _at_home(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_at_home(item) for item in value]
    return os.path.expanduser(value) if isinstance(value, str) and value.startswith("~/") else value


def dump_config(config: Section) -> str:
    """Return the resolved config as YAML that loads into an equal config.

    Secrets in free-form mappings are hidden; they are recognised by the names of their keys.
    """
    return dump_values(config.model_dump(mode="json"))


def dump_values(values: Mapping[str, Any]) -> str:
    """Return part of a config as YAML that loads as the same values; see `dump_config`."""
    return yaml.dump(_writable(values), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=140)


class _Dumper(yaml.SafeDumper):
    """Quotes every text that a YAML reader might take for a number, or fold."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style=None if PLAIN_TEXT.fullmatch(text) else '"'
    )


_Dumper.add_representer(str, _represent_text)


def _writable(value: Any) -> Any:
    """Hide secrets, and escape interpolations.

    Each backslash before `${` must be doubled, because it is an escape too.
    """
    if isinstance(value, Mapping):
        return {
            k: HIDDEN if isinstance(v, str) and SECRET_NAME.search(str(k)) else _writable(v)
            for k, v in value.items()
        }
    if isinstance(value, list):
        return [_writable(item) for item in value]
    return INTERPOLATION.sub(lambda found: found[1] * 2 + "\\${", value) if isinstance(value, str) else value


# ------------------------------------------------------------------------------------------------------ files


def _existing_file(path: str) -> Path:
    file = Path(path).expanduser()
    packaged = _packaged(path if file.suffix == ".yaml" else f"{path}.yaml")
    if not file.exists() and not file.is_absolute() and packaged.is_file():
        return packaged.absolute()
    if file.is_dir():
        raise ConfigError(f"config {path!r} is a folder; give a YAML file in it{_nearest(file, file)}")
    if not file.is_file():
        raise ConfigError(f"config file {path!r} does not exist{_nearest(file, file.parent)}")
    if file.suffix != ".yaml":
        raise ConfigError(f"config file {path!r} must end in .yaml")
    return file.absolute()


def _nearest(file: Path, folder: Path) -> str:
    """Return the names of YAML files that may be meant, as the end of a message.

    Candidates are in `folder`, in the working directory, in its `configs` folder, and among the packaged
    recipes.
    """
    found: dict[str, str] = {}
    for place in (folder, Path(), Path("configs")):
        for candidate in sorted(place.glob("*.yaml")):
            found.setdefault(candidate.name, str(candidate))
    for recipe in sorted(_packaged("recipes").glob("*.yaml")):
        found.setdefault(recipe.name, f"recipes/{recipe.stem}")
    names = difflib.get_close_matches(file.name, found, n=3, cutoff=0.4) or list(found)[:5]
    return f"; nearest: {', '.join(found[name] for name in names)}" if names else ""


def _yaml_problem(error: yaml.YAMLError, label: str) -> ConfigError:
    if not isinstance(error, yaml.MarkedYAMLError):
        return ConfigError(f"{label}: invalid YAML: {error}".splitlines()[0])
    mark = error.problem_mark or error.context_mark
    name = label if mark is None or mark.name.startswith("<") else _short(Path(mark.name))
    line = "" if mark is None else f":{mark.line + 1}"
    return ConfigError(f"{name}{line}: invalid YAML: {error.problem or error.context}")


def _short(path: Path) -> str:
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


# ------------------------------------------------------------------------------------------------------ hydra


class PackagedConfigs(SearchPathPlugin):
    """Adds the packaged configs to the search path, after the folder of the user's file."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append(provider="agentrl", path=f"pkg://{packaged.PACKAGE}")


@contextmanager
def _hydra(folder: Path) -> Iterator[ConfigLoader]:
    """Open Hydra on `folder`; restore the process's own Hydra instance, if any, afterwards."""
    Plugins.instance().register(PackagedConfigs)
    outer = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(folder), job_name="agentrl", version_base="1.3"), catch_warnings():
            simplefilter("ignore", UserWarning)  # a list without _self_ composes as with it at the end
            yield GlobalHydra.instance().config_loader()
    finally:
        GlobalHydra.instance().hydra = outer


def _compose(file: Path, label: str, overrides: Sequence[str]) -> tuple[dict[str, Any], Origins]:
    """Return the values set by file and overrides, interpolations unresolved, and the origin of each key."""
    try:
        if not isinstance(SourceFile.read(file, label=label).root, yaml.MappingNode | None):
            raise ConfigError(
                f"{label}: a config must be a mapping of sections, such as `trainer:` with `  steps: 20` "
                "below it"
            )
        _check_picked(file, file.parent, set())
        parsed = [_parse_override(text) for text in overrides]
        with _hydra(file.parent) as loader:
            groups = loader.list_groups("")
            picked = _picked_groups(loader, file.stem)
            lines = [line for override in parsed for line in _forced(override, groups, picked)]
            composed = compose(config_name=file.stem, overrides=lines)
            defaults = loader.compute_defaults_list(file.stem, lines, RunMode.RUN).defaults
        values = OmegaConf.to_container(composed, resolve=False)
        assert isinstance(values, dict)
        return {str(k): v for k, v in values.items()}, _origins(file, label, defaults, parsed)
    except yaml.YAMLError as error:
        raise _yaml_problem(error, label) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{label}: invalid UTF-8: {error.reason} at byte {error.start}") from None
    except PermissionError as error:
        raise ConfigError(f"config file {label!r} cannot be read: {error.strerror}") from None
    # Hydra raises ValueError for a malformed defaults list
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise ConfigError(f"{label}: {_first_line(error)}") from None


def _check_picked(file: Path, folder: Path, seen: set[Path], *, has_places: bool = False) -> None:
    """Parse the files that the `defaults` list of `file` selects from `folder`, recursively.

    This must happen before Hydra expands them. has_places: the main file's section `hydra` may name further
    folders, so that names which are not found here are left to Hydra.

    Raises:
        yaml.YAMLError: a file is not YAML, or its aliases expand to too much text.
    """
    seen.add(file)
    root = read_nodes(file, names_file=len(seen) > 1)
    listed = dict(root.value) if isinstance(root, yaml.MappingNode) else {}
    has_places = has_places or any(name.value == "hydra" for name in listed)
    entries: list[yaml.Node] = next(
        (
            node.value
            for name, node in listed.items()
            if name.value == "defaults" and isinstance(node, yaml.SequenceNode)
        ),
        [],
    )
    for entry in entries:
        group, name = entry.value[0] if isinstance(entry, yaml.MappingNode) and entry.value else (None, entry)
        named = str(name.value).split("@")[0].removesuffix(".yaml")
        parts = [] if group is None else [str(group.value).split()[-1].split("@")[0].strip("/")]
        wanted = Path(*parts, f"{named.strip('/')}.yaml")
        for place in (folder, file.parent):
            if (place / wanted) not in seen and (place / wanted).is_file():
                _check_picked(place / wanted, folder, seen, has_places=has_places)
        if group is None and not has_places and isinstance(name, yaml.ScalarNode) and not _is_special(named):
            with concerning(f"{_short(file)}:{name.start_mark.line + 1}: defaults"):
                _require_listed(wanted, named, folder, file)


def _is_special(name: str) -> bool:
    """Return whether an entry of a `defaults` list names no file: the file itself, or an interpolation."""
    return name == "_self_" or "${" in name or name in ("", "null")


def _require_listed(wanted: Path, name: str, folder: Path, file: Path) -> None:
    """Raise ConfigError if an entry of the `defaults` list of `file` is a path, or no config.

    Hydra would take a path for a key, and names no alternatives. A file of a group may name others of it.
    """
    if ".." in wanted.parts:
        raise ConfigError(_is_a_path(name, folder))
    own = file.parent.relative_to(folder) if file.is_relative_to(folder) else Path()
    places = (folder, file.parent, _packaged("."), _packaged(str(own)))
    if any((place / wanted).is_file() for place in places):
        return
    if Path(name).is_absolute():
        raise ConfigError(_is_a_path(name, folder))
    beside = sorted({one.stem for one in file.parent.glob("*.yaml")} - {file.stem})
    known = [*beside, *(config.name for config in packaged.packaged_configs())]
    near = difflib.get_close_matches(name, known, n=3)
    found = f"; did you mean {', '.join(near)}?" if near else f"; there: {', '.join(beside) or 'none'}"
    raise ConfigError(f"there is no config {name!r} in {_short(folder)}, nor a packaged one{found}")


def _is_a_path(name: str, folder: Path) -> str:
    return (
        f"{name!r} is a path; an entry is the name of a config in {_short(folder)} or of a packaged one "
        "(agentrl config list), without .yaml"
    )


def _parse_override(text: str) -> Override:
    try:  # Hydra's grammar has no value that begins with `~`, so expand it first
        [override] = OverridesParser.create().parse_overrides(
            [AT_HOME.sub(lambda _: os.path.expanduser("~/"), text)]
        )
    except OverrideParseException as error:
        raise ConfigError(
            f"override {text!r} cannot be read: {_first_line(error)}; write key=value, lists as [a,b], "
            f"mappings as {{k:v}}"
        ) from None
    if override.is_sweep_override():
        raise ConfigError(
            f"override {text!r} has several values; write a list as key=[a,b], or quote text that contains a "
            "comma"
        )
    return override


def _picked_groups(loader: ConfigLoader, name: str) -> set[str]:
    """Return the groups from which the file's `defaults` list selects a file."""
    paths = (
        default.config_path or "" for default in loader.compute_defaults_list(name, [], RunMode.RUN).defaults
    )
    return {path.rpartition("/")[0] for path in paths}


def _forced(override: Override, groups: Sequence[str], picked: Collection[str]) -> list[str]:
    """Return Hydra's overrides for one override.

    Hydra would merge an empty mapping into the file's values. To make `key={}` empty the key, it is set to
    null first.
    """
    line = _force(override, groups, picked)
    is_emptied = line.startswith("++") and override.key_or_group not in groups and override.value() == {}
    return [f"++{override.key_or_group}=null", line] if is_emptied else [line]


def _force(override: Override, groups: Sequence[str], picked: Collection[str]) -> str:
    """Return the override in a form that Hydra accepts.

    Hydra refuses to set a key that no file contains. A plain override that selects no file therefore gets
    `++`. One that selects a file (`algorithm=dapo`) of a group from which the config selects none gets `+`.
    """
    text = override.input_line or ""
    key = override.key_or_group
    picks_file = (
        "/" in key
        or override.package is not None
        or (key in groups and not isinstance(override.value(), dict))
    )
    if override.type is not OverrideType.CHANGE or override.is_hydra_override() or picks_file:
        is_first = (
            key in groups
            and key not in picked
            and override.package is None
            and isinstance(override.value(), str)
        )
        return f"+{text}" if is_first and override.type is OverrideType.CHANGE else text
    return f"++{text}"


def _origins(file: Path, label: str, defaults: Sequence[Any], overrides: Sequence[Override]) -> Origins:
    files = []
    for default in defaults:
        name = f"{default.config_path}.yaml"
        package = tuple(default.package.split(".")) if default.package else ()
        path = next((p for p in (file.parent / name, _packaged(name)) if p is not None and p.is_file()), None)
        if path is not None and package[:1] != ("hydra",):
            files.append(
                SourceFile.read(path, label=label if path == file else _short(path), package=package)
            )
    written = tuple(
        WrittenOverride(o.input_line or "", tuple(o.key_or_group.split(".")), o.value())
        for o in overrides
        if o.type is not OverrideType.DEL
    )
    return Origins(label, tuple(files), written)


def _packaged(name: str) -> Path:
    return packaged.packaged_folder() / name


def _resolve(values: Mapping[str, Any], origins: Origins) -> Any:
    try:
        return OmegaConf.to_container(OmegaConf.create(dict(values)), resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        key = error.full_key or ""
        place = origins.find(tuple(key.split("."))) if key else origins.main
        reason = RESOLVER_ERROR.sub(r"\1", _first_line(error))
        raise ConfigError(f"{key}: {reason} ({place})") from None


def _first_line(error: Exception) -> str:
    """Return the main sentence of a Hydra or OmegaConf error, without advice about Hydra's command line."""
    cause = error.__cause__ if str(error).strip() == "" else error
    lines = str(cause).strip().splitlines()
    options = [line.strip() for line in lines if line.startswith("\t") and "provider=" not in line]
    return (
        lines[0].rstrip(".") + (f"; available: {', '.join(options)}" if options else "")
        if lines
        else type(error).__name__
    )
