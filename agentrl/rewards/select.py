"""Selection of rewards: a task's own one, by data source or the user's function, and the configured terms."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, ClassVar, TypeVar

import trio

from agentrl.config.reward import REWARD_PRESETS, RewardConfig
from agentrl.errors import AgentRLError, ConfigError, DataError, PluginError, concerning
from agentrl.plugins import Attempted, Plugins, Reward, RewardResult
from agentrl.plugins.rewards import AnyReward, RunsIn, Scope
from agentrl.plugins.sources import Reference, function_reference, import_source
from agentrl.rewards.calls import Term
from agentrl.rewards.custom import load_function
from agentrl.rewards.recipes import Recipe, recipe_of_class
from agentrl.types import Task

R = TypeVar("R", bound=AnyReward)

RESERVED = frozenset({"tool", "interaction", "agent"})
"""Names of rewards that are given during an attempt (`reward/tool`, ...)."""


class RewardTable:
    """Selects the rewards of a task.

    Each reward is created once; those in threads must allow concurrent calls.
    """

    def __init__(self, config: RewardConfig, plugins: Plugins) -> None:
        """Load the custom function and every reward that the config names.

        Presets load when a task needs them.

        Raises:
            PluginError: a reward or the function is unknown, or its file fails to import.
            ConfigError: a reward rejects its config, or a term has an invalid name.
        """
        self._config = config
        self._plugins = plugins
        functions = {
            function.attribute
            for name in _named(config)
            if (function := function_reference(name)) is not None
        }
        for name in {*config.reward_config} - functions:
            with concerning(f"reward.reward_config.{name}"):
                own = plugins.rewards.own_name(name)
                if own != name:
                    raise PluginError(
                        f"settings must be under the reward's own name: write reward.reward_config.{own}"
                    )
        self._custom = self._custom_term() if config.custom_function.path else None
        self._by_reward: dict[str, Term] = {}
        self._names: dict[str, str | None] = {}  # data source -> its reward
        self._beside: dict[str, list[Term]] = {}  # data source -> the terms that apply to it
        for source, name in sorted(config.sources.items() - REWARD_PRESETS.items()):
            with concerning(f"reward.sources.{source}"):
                if function_reference(name) is None:
                    plugins.rewards.resolve(name)
                if self._custom is None:
                    self._own_term(name)
        self._terms = []
        for name in config.terms:
            with concerning(f"reward.terms.{name}"):
                self._terms.append(self._named_term(name))

    def own(self, task: Task) -> Term:
        """Return the task's own reward.

        Raises:
            DataError: there is no reward for its data source.
        """
        if self._custom is not None:
            return self._custom
        if task.data_source not in self._names:
            self._names[task.data_source] = reward_of(task.data_source, self._config.sources)
        name = self._names[task.data_source]
        if name is None:
            raise DataError(
                f"task {task.task_id}: no reward for data_source {task.data_source!r}; known: "
                f"{', '.join(sorted(self._config.sources))} (add it to reward.sources, or set "
                "reward.custom_function.path)"
            )
        return self._own_term(name)

    def terms(self, task: Task, *scopes: Scope) -> list[Term]:
        """Return all rewards of the task, its own first.

        With `scopes`, only those with one of these scopes.
        """
        if task.data_source not in self._beside:
            self._beside[task.data_source] = [
                term
                for term in self._terms
                if not term.sources or any(fnmatchcase(task.data_source, source) for source in term.sources)
            ]
        every = [self.own(task), *self._beside[task.data_source]]
        return [term for term in every if term.scope in scopes] if scopes else every

    def may_score(self, scope: Scope) -> bool:
        """Return whether any configured reward has this scope.

        Presets do not count: they score single attempts.
        """
        return any(term.scope == scope for term in self._configured)

    @property
    def reads_solution_str(self) -> bool:
        """Whether a reward of the config reads decoded responses."""
        return self._config.solution_str == "decoded" and any(
            term.reward.reads_solution_str for term in self._configured
        )

    @property
    def _configured(self) -> list[Term]:
        """The terms that the config names; presets load when a task needs them."""
        own = [self._custom] if self._custom is not None else list(self._by_reward.values())
        return [*own, *self._terms]

    def find(self, kind: type[R]) -> list[R]:
        """Return the configured rewards of class `kind`."""
        return [term.reward for term in self._configured if isinstance(term.reward, kind)]

    def check_services(self) -> None:
        """Raise ConfigError if nobody listens at the URL of a configured reward, such as a judge."""
        for term in self._configured:
            if (check := getattr(term.reward, "check_service", None)) is not None:
                trio.run(check)

    def check(self, task: Task) -> None:
        """Raise DataError if the task cannot be scored (unknown source, no ground truth).

        Call before rollouts.
        """
        own = self.own(task)
        for term in self.terms(task):
            if term is not own and term.name == own.name:
                raise ConfigError(
                    f"reward.terms.{term.name}: the data source {task.data_source!r} already has this "
                    "reward; rename the term"
                )
            try:
                term.reward.check(task)
            except AgentRLError:
                raise
            except Exception as error:  # boundary: the user's code failed on this task
                raise DataError(
                    f"reward {term.name!r} raised in `check`: {type(error).__name__}: {error}"
                ) from error

    def _custom_term(self) -> Term:
        custom = self._config.custom_function
        assert custom.path is not None
        arguments = (custom.path, custom.name, custom.kwargs, custom.scope, custom.runs_in)
        with concerning("reward.custom_function.path"):
            import_source(custom.path)
        with concerning("reward.custom_function.name"):
            Reference(custom.path, custom.name).load()
        with concerning("reward.custom_function"):
            reward = load_function(*arguments)
        recipe = Recipe("agentrl.rewards.custom", load_function.__name__, arguments)
        return Term(reward.name, reward, self._config.weight, self._config.timeout_s, recipe)

    def _own_term(self, name: str) -> Term:
        if name not in self._by_reward:
            function = function_reference(name)
            shown = function.attribute if function is not None else self._plugins.rewards.own_name(name)
            self._by_reward[name] = self._term(
                shown, name, {}, weight=self._config.weight, timeout_s=self._config.timeout_s
            )
        return self._by_reward[name]

    def _named_term(self, name: str) -> Term:
        if name in RESERVED or "/" in name:
            raise ConfigError(
                f"a term's name must not contain `/` or be one of {', '.join(sorted(RESERVED))}"
            )
        config = self._config.terms[name]
        return self._term(
            name,
            config.reward or name,
            config.config,
            weight=config.weight,
            timeout_s=config.timeout_s or self._config.timeout_s,
            sources=config.sources,
        )

    def _term(self, shown: str, name: str, config: Mapping[str, Any], **fields: Any) -> Term:
        if (function := function_reference(name)) is not None:
            kwargs = {**self._config.reward_config.get(function.attribute, {}), **config}
            scorer = load_function(function.source, function.attribute, kwargs, "trajectory", "thread")
            return Term(shown, scorer, recipe=None, **fields)
        cls = self._plugins.rewards.get(name)
        merged = {**self._config.reward_config.get(self._plugins.rewards.own_name(name), {}), **config}
        reward = self._plugins.rewards.make(name, merged)
        if reward.has_own_deadlines:
            fields["timeout_s"] = math.inf
        return Term(
            shown,
            reward,
            recipe=recipe_of_class(cls, merged) if reward.runs_in == "process" else None,
            **fields,
        )


def _named(config: RewardConfig) -> list[str]:
    return [*config.sources.values(), *(term.reward for term in config.terms.values() if term.reward)]


def reward_of(data_source: str, sources: Mapping[str, str]) -> str | None:
    """Return the reward of a data source: by its exact name, else by the longest matching pattern with
    `*`.
    """
    if data_source in sources:
        return sources[data_source]
    matching = [pattern for pattern in sources if "*" in pattern and fnmatchcase(data_source, pattern)]
    return sources[max(matching, key=len)] if matching else None


class Unscored(Reward):
    """A reward that is always 0 and is never used."""

    name: ClassVar[str] = "unscored"
    runs_in: RunsIn = "inline"

    def score(self, attempt: Attempted) -> RewardResult:
        return RewardResult(0.0)


def without_rewards(plugins: Plugins, data_sources: Iterable[str]) -> RewardConfig:
    """Return a reward config with which rows of these sources are played but not scored."""
    plugins.rewards.add(Unscored)
    return RewardConfig(sources=dict.fromkeys(data_sources, Unscored.name))
