"""Translate a config of verl, with an account of every key: mapped, dropped (and why), or meaningless."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Annotated, Any

from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from agentrl.config.error_messages import RIGHT, describe_invalid
from agentrl.config.keys import iter_keys, iter_sections, with_defaults
from agentrl.config.origins import Origins
from agentrl.config.schema import Config
from agentrl.config.section import Section
from agentrl.errors import ConfigError
from agentrl.extras.supervised.config import SFTConfig
from agentrl.extras.verl.importing import rules_agent, rules_algorithm, rules_data, rules_model, rules_sft
from agentrl.extras.verl.importing.findings import Dropped, NotTaken, Rule, Setting
from agentrl.extras.verl.importing.obstacles import Obstacle, find_all
from agentrl.extras.verl.importing.source import DEFAULTS, WrittenConfig
from agentrl.extras.verl.importing.values import NOT_TAKEN, VALUES
from agentrl.extras.verl.keys import KEPT, is_foreign, reason_in, reason_without, targets
from agentrl.extras.verl.renamed import RENAMED, RENAMED_IN_SFT

RULES: tuple[Rule, ...] = (*rules_data.RULES, *rules_algorithm.RULES, *rules_agent.RULES, *rules_model.RULES)
ALONE_BY_DEFAULT = (
    *("data.max_prompt_length", "data.max_response_length", "trainer.total_epochs"),
    *("actor_rollout_ref.rollout.n", "actor_rollout_ref.model.enable_gradient_checkpointing"),
)
"""Keys that are translated individually, and whose defaults differ between verl and this project."""


@dataclass(frozen=True)
class Target:
    """One of our schemas, and the rules for translating to it.

    Attributes:
        renamed: as RENAMED, for keys that are translated individually.
        meaningless: why a key of verl has no counterpart, by prefix.
        by_default: keys that are translated individually and have another default in verl.
    """

    schema: type[Section]
    rules: tuple[Rule, ...]
    renamed: Mapping[str, str]
    meaningless: Mapping[str, str]
    by_default: tuple[str, ...]

    @cached_property
    def keys(self) -> Mapping[str, FieldInfo]:
        return {".".join(key): field for key, field in iter_keys(self.schema)}

    @cached_property
    def sections(self) -> Set[str]:
        return {".".join(key) for key, _ in iter_sections(self.schema)}

    def reason_without(self, key: str) -> str | None:
        return reason_in(key, self.meaningless) or reason_without(key)


POLICY = Target(Config, RULES, RENAMED, {}, ALONE_BY_DEFAULT)
IMITATION = Target(SFTConfig, rules_sft.RULES, {**RENAMED, **RENAMED_IN_SFT}, rules_sft.MEANINGLESS, ())


@dataclass(frozen=True)
class Translation:
    """The result of a translation.

    Attributes:
        values: our config as a tree: all keys that were set, and others that differ from our defaults.
        mapped: translated settings, including verl's defaults that differ from ours.
        dropped: keys with a counterpart whose value was not translated.
        meaningless: keys of verl without a counterpart.
        unknown: keys that are neither verl's nor ours.
        obstacles: what would not run unchanged.
    """

    target: Target
    values: Mapping[str, Any]
    mapped: tuple[Setting, ...]
    dropped: tuple[Dropped, ...]
    meaningless: tuple[Dropped, ...]
    unknown: tuple[str, ...]
    obstacles: tuple[Obstacle, ...]

    @property
    def decisive(self) -> tuple[Dropped, ...]:
        """The dropped keys without which the run would train something else."""
        return tuple(finding for finding in self.dropped if finding.is_decisive)


def translate(source: WrittenConfig) -> Translation:
    """Translate every key of `source`, and check the result against the schema.

    Raises:
        ConfigError: the combination of values is invalid, one line per problem; or `source` is not a config
            of a trainer of verl.
    """
    target = IMITATION if source.is_supervised else POLICY
    _refuse_foreign(source, target)
    mapped: dict[str, Setting] = {}
    dropped: list[Dropped] = []
    meaningless: list[Dropped] = []
    unknown: list[str] = []
    for finding in _findings(source, target):
        if isinstance(finding, Setting):
            dropped += _take(finding, mapped, source, target)
        else:
            dropped.append(finding)
    done = {key for setting in mapped.values() for key in setting.old} | {finding.old for finding in dropped}
    for key in source.written:
        if key in done:
            continue
        reason = target.reason_without(key)
        if key.endswith("_target_"):
            meaningless.append(Dropped(key, "settings have classes of their own"))
        elif reason is None or is_foreign(key, source.written[key]):
            unknown.append(key)
        else:
            meaningless.append(Dropped(key, reason))
    kept = {key: setting for key, setting in mapped.items() if not _is_default(setting, source, target)}
    values = _tree(kept, target)
    _check(values, target)
    return Translation(
        target=target,
        values=values,
        mapped=tuple(kept.values()),
        dropped=tuple(dropped),
        meaningless=tuple(meaningless),
        unknown=tuple(unknown),
        obstacles=tuple(find_all(source)),
    )


def _refuse_foreign(source: WrittenConfig, target: Target) -> None:
    """Refuse a file most of whose keys are not verl's: a config of another program, or of this one."""
    own = [key for key in source.written if key in POLICY.keys or key in IMITATION.keys]
    verls = {*KEPT, *RENAMED, *RENAMED_IN_SFT, *DEFAULTS}
    known = [key for key in source.written if key in verls or target.reason_without(key) is not None]
    strange = len(source.written) - len(known)
    if source.written and strange > len(known) and len(own) >= strange:
        raise ConfigError(f"{own[0]} is a key of agentrl: this is not a config of verl and needs no import")
    if (
        source.written
        and (not known or strange > len(known))
        and not any(key.startswith("actor_rollout_ref.") for key in known)
    ):
        names = ", ".join(list(source.written)[:3])
        raise ConfigError(
            f"this is not a config of a verl trainer: {strange} of its {len(source.written)} keys are "
            f"unknown ({names})"
        )


def _findings(source: WrittenConfig, target: Target) -> Iterator[Setting | Dropped]:
    """Yield the findings of the rules, then individual keys, then verl's defaults that differ from ours."""
    read: set[str] = set()  # keys of verl that a rule has read, for any setting
    decided: set[str] = set()  # our keys that are set, and verl's keys that are dropped
    for rule in target.rules:
        for finding in rule(source):
            read |= set(finding.old) if isinstance(finding, Setting) else {finding.old}
            decided.add(finding.key if isinstance(finding, Setting) else finding.old)
            yield finding
    for key, value in source.written.items():
        if (key not in read or not _is_decided(key, decided, target)) and (
            alone := _alone(key, value, target)
        ) is not None:
            yield alone
    for key in target.by_default:
        if not source.has(key):
            yield Setting(_target(key, target), source.get(key), (key,))


def _is_decided(key: str, decided: Set[str], of: Target) -> bool:
    """Return whether a rule has dropped a key of verl, or has set its counterpart or a part of it."""
    target = _target(key, of)
    return (
        key in decided or not target or any(one == target or one.startswith(f"{target}.") for one in decided)
    )


def _alone(key: str, value: Any, of: Target) -> Setting | Dropped | None:
    """Translate a key that no rule has read; None if it has no counterpart."""
    target = _target(key, of)
    if key in NOT_TAKEN:
        return Dropped(key, NOT_TAKEN[key])
    if not target:
        return None
    if value is None:
        return Dropped(key, f"null; the default of {target} applies")
    try:
        return Setting(
            target,
            VALUES.get(key, lambda same: same)(value),
            (key,),
            of.renamed.get(key, "").partition("; ")[2],
        )
    except NotTaken as why:
        return Dropped(key, str(why), why.is_decisive)
    except (TypeError, ValueError):
        return Dropped(key, f"{_short(value)} has a type that verl does not accept")


def _target(key: str, of: Target) -> str:
    """Return our key for a key of verl that is translated individually; "" if there is none."""
    if key in of.keys:
        return key
    ours = targets(of.renamed[key], {*of.keys, *of.sections}) if key in of.renamed else []
    return ours[0] if len(ours) == 1 else ""


def _take(
    setting: Setting, mapped: dict[str, Setting], source: WrittenConfig, target: Target
) -> list[Dropped]:
    """Add a setting, unless another setting has its key or the schema refuses its value.

    Returns the dropped keys.
    """
    written = [key for key in setting.old if key in source.written]
    other = mapped.get(setting.key)
    said = {key for one in mapped.values() for key in one.old}
    if other is not None and other.value != setting.value:
        by = " and ".join(other.old) or "the rest"
        return [
            Dropped(key, f"{setting.key} is {_short(other.value)} by {by}")
            for key in written
            if key not in said
        ]
    if other is not None:
        mapped[setting.key] = Setting(
            other.key,
            other.value,
            tuple(dict.fromkeys((*other.old, *setting.old))),
            other.note or setting.note,
        )
        return []
    if (problem := _refused(setting, target)) is not None:
        why = f"{setting.key} {problem}"
        return [Dropped(key, why, is_decisive=True) for key in written if key not in said]
    mapped[setting.key] = setting
    return []


@cache
def _adapter(schema: type[Section], key: str) -> TypeAdapter[Any]:
    field = (POLICY if schema is POLICY.schema else IMITATION).keys[key]
    kind: Any = Annotated[field.annotation, field]
    return TypeAdapter(kind)


def _refused(setting: Setting, target: Target) -> str | None:
    """Return why the schema refuses a value for its key; None if it is valid."""
    if setting.key not in target.keys:
        return None  # an entry of a mapping, or a section: checked with the whole config
    try:
        _adapter(target.schema, setting.key).validate_python(setting.value)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        right = RIGHT.get(problem["type"])
        wanted = f"must be {right(problem.get('ctx', {}))}" if right is not None else str(problem["msg"])
        return f"{wanted}, is {_short(setting.value)}"
    return None


def _is_default(setting: Setting, source: WrittenConfig, target: Target) -> bool:
    """Return whether a setting was not written in the source and equals our default."""
    field = target.keys.get(setting.key)
    is_written = any(key in source.written for key in setting.old)
    return not is_written and field is not None and field.get_default() == setting.value


def _tree(settings: Mapping[str, Setting], target: Target) -> dict[str, Any]:
    """Nest the settings, with sections in the order of the schema."""
    tree: dict[str, Any] = {}
    sections = list(target.schema.model_fields)
    for key in sorted(settings, key=lambda key: sections.index(key.partition(".")[0])):
        *parents, name = key.split(".")
        inner = tree
        for parent in parents:
            inner = inner.setdefault(parent, {})
        if isinstance(inner.get(name), dict) and isinstance(settings[key].value, dict):
            inner[name] |= settings[key].value
        else:
            inner[name] = settings[key].value
    return tree


def _check(values: Mapping[str, Any], target: Target) -> None:
    try:
        target.schema.model_validate(with_defaults(target.schema, values))
    except ValidationError as error:
        lines = describe_invalid(error, Origins("the translated config", (), ()))
        raise ConfigError("\n".join(lines)) from None


def _short(value: Any) -> str:
    text = "null" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
