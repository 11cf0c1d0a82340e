"""Read a raw dataset row as a Task, in the schema of verl's datasets (column names are configurable).

    data_source   str                      selects the reward
    prompt        [{role, content}, ...]   the conversation so far
    images        [{bytes} or {path}, ...] optional: the images at the `<image>` in the prompt, in order
    ability       str                      a label; optional
    reward_model  {style, ground_truth}    optional: the reward decides whether it needs a ground truth
    extra_info    {tools_kwargs: {name: {create_kwargs: {...}}}, interaction_kwargs: {name, ...},
                  environment_kwargs: {name, ...}, chat_template_kwargs: {name: value}, index, split, ...};
                  interaction_kwargs without a name are ignored, unless interactions are configured
    agent_name    str                      optional: see `AgentChoice`

Every error names the file, the row (counted from 0) and the field.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from agentrl.config.data import DataConfig
from agentrl.data.row_images import NO_IMAGES, RowImages
from agentrl.data.row_place import RowPlace
from agentrl.errors import PluginError
from agentrl.images.files import ImageFolder
from agentrl.types import IMAGE_MARK, ImageRef, JsonObject, Message, Role, Task, ToolCall

Row = Mapping[str, Any]
REFUSED_COLUMNS = ("videos", "audios")
ROLES: tuple[str, ...] = get_args(Role)


@dataclass(frozen=True, slots=True)
class AgentChoice:
    """Chooses the agent of a row.

    It is the agent that the row names; else `interaction_agent` if the row has interaction_kwargs; else
    `tool_agent` if it has tools_kwargs or environment_kwargs; else `default`.

    Attributes:
        resolve: maps a name or alias to a registered name; raises PluginError for an unknown one.
        has_partners: interactions are configured, so interaction_kwargs without a name are an error.
            Otherwise they are ignored: rows of verl's tool examples have them without using them.
        environment: of rows whose environment_kwargs name none; None: they have none.
    """

    resolve: Callable[[str], str]
    default: str
    has_partners: bool = False
    environment: str | None = None

    def environment_kwargs(self, of_row: JsonObject | None) -> JsonObject | None:
        """Return the row's environment_kwargs with the name of the configured environment if they have none;
        None if the row has no environment.
        """
        if self.environment is None:
            return of_row or None
        return {"name": self.environment, **(of_row or {})}

    def choose(self, named: str, *, has_interaction: bool, has_tools: bool) -> str:
        implied = "interaction_agent" if has_interaction else "tool_agent" if has_tools else self.default
        return self.resolve(named or implied)


def read_row(
    row: Row, place: RowPlace, config: DataConfig, agents: AgentChoice, folder: ImageFolder | None = None
) -> Task:
    """Return the row's Task. `folder` checks and stores its images; None: rows with images are refused.

    Raises:
        DataError: the row is malformed, or contains video or sound.
        PluginError: the row names an unknown agent.
    """
    for column in REFUSED_COLUMNS:
        if row.get(column):
            raise place.error(column, "video and sound are not supported; remove such rows")
    images = RowImages(
        row.get(config.images.key), place, config.images.key, folder, max_images=config.images.max_images
    )
    messages = read_messages(row.get(config.prompt_key), place, config.prompt_key, images)
    reward_model = _object(row.get(config.reward_model_key), place, config.reward_model_key)
    extra_info = without_nulls(_object(row.get(config.extra_info_key), place, config.extra_info_key))
    tools_kwargs = _tools_kwargs(extra_info, place, config.extra_info_key)
    interaction_kwargs = _interaction_kwargs(
        extra_info, place, config.extra_info_key, must_be_named=agents.has_partners
    )
    environment_kwargs = _object(
        extra_info.get("environment_kwargs"), place, f"{config.extra_info_key}.environment_kwargs"
    )
    _object(extra_info.get("chat_template_kwargs"), place, f"{config.extra_info_key}.chat_template_kwargs")
    named = _text(row.get(config.agent_name_key), place, config.agent_name_key)
    try:
        agent_name = agents.choose(
            named,
            has_interaction=interaction_kwargs is not None,
            has_tools=bool(tools_kwargs or environment_kwargs),
        )
    except PluginError as error:
        raise PluginError(f"{place}: field {config.agent_name_key!r}: {error}") from error
    return Task(
        task_id=place.task_id,
        data_source=_required_text(row.get(config.data_source_key), place, config.data_source_key),
        messages=messages,
        agent_name=agent_name,
        ground_truth=reward_model.get("ground_truth"),
        ability=_text(row.get(config.ability_key), place, config.ability_key),
        extra_info=extra_info,
        tools_kwargs=tools_kwargs,
        interaction_kwargs=interaction_kwargs,
        environment_kwargs=agents.environment_kwargs(environment_kwargs),
    )


def without_nulls(value: Any) -> Any:
    """Return `value` without the null entries of its objects, at any depth.

    A Parquet column has a single struct type: a key of any row is null in all other rows. Without this
    filter, a tool would be started with arguments that its row never named.
    """
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


# ----------------------------------------------------------------------------------------------------- kwargs


def _tools_kwargs(extra_info: JsonObject, place: RowPlace, parent: str) -> Mapping[str, JsonObject]:
    tools = _object(extra_info.get("tools_kwargs"), place, f"{parent}.tools_kwargs")
    for name, kwargs in tools.items():
        field = f"{parent}.tools_kwargs.{name}"
        _object(_object(kwargs, place, field).get("create_kwargs"), place, f"{field}.create_kwargs")
    return tools


def _interaction_kwargs(
    extra_info: JsonObject, place: RowPlace, parent: str, *, must_be_named: bool
) -> JsonObject | None:
    kwargs = _object(extra_info.get("interaction_kwargs"), place, f"{parent}.interaction_kwargs")
    if not kwargs or not ("name" in kwargs or must_be_named):
        return None
    if not isinstance(kwargs.get("name"), str) or not kwargs["name"]:
        problem = (
            f"must name the interaction that answers, is {_short(kwargs.get('name'))}; the row has "
            f"{', '.join(sorted(kwargs))}"
        )
        raise place.error(f"{parent}.interaction_kwargs.name", problem)
    return kwargs


# --------------------------------------------------------------------------------------------------- messages


def read_messages(
    value: Any, place: RowPlace, field: str, images: RowImages = NO_IMAGES
) -> tuple[Message, ...]:
    """Return the chat messages of a field, at least one. Their images come from `images` and from content
    parts.

    Raises:
        DataError: the field is not a list of {role, content, tool_calls, ...}, or contains video or images
            that cannot be taken.
    """
    if not isinstance(value, list):
        raise place.error(field, f"must be a list of {{role, content}}, is {_short(value)}")
    if not value:
        raise place.error(field, "must contain at least one message, is empty")
    messages = tuple(_message(item, place, f"{field}[{index}]", images) for index, item in enumerate(value))
    images.check_all_taken(field)
    return messages


def _message(value: Any, place: RowPlace, field: str, images: RowImages) -> Message:
    if not isinstance(value, Mapping):
        raise place.error(field, f"must be an object {{role, content}}, is {_short(value)}")
    role = value.get("role")
    if role not in ROLES:
        raise place.error(f"{field}.role", f"must be one of {', '.join(ROLES)}, is {_short(role)}")
    calls = value.get("tool_calls") or []
    if not isinstance(calls, list):
        raise place.error(f"{field}.tool_calls", f"must be a list of calls, is {_short(calls)}")
    content, shown = _content(
        value.get("content"), place, f"{field}.content", images, may_be_absent=bool(calls)
    )
    if shown and role == "assistant":
        raise place.error(f"{field}.content", "an assistant message contains an image; policies write text")
    return Message(
        role=role,
        content=content,
        tool_calls=tuple(
            _tool_call(call, index, place, f"{field}.tool_calls[{index}]") for index, call in enumerate(calls)
        ),
        tool_call_id=_text(value.get("tool_call_id"), place, f"{field}.tool_call_id") or None,
        name=_text(value.get("name"), place, f"{field}.name") or None,
        reasoning=_text(
            value.get("reasoning_content") or value.get("reasoning"), place, f"{field}.reasoning_content"
        ),
        images=shown,
    )


def _content(
    value: Any, place: RowPlace, field: str, images: RowImages, *, may_be_absent: bool
) -> tuple[str, tuple[ImageRef, ...]]:
    """Return the text of a message, and the images at its marks."""
    if isinstance(value, str):
        return value, images.at_marks(value, field)
    if value is None and may_be_absent:
        return "", ()
    if not isinstance(value, list):
        raise place.error(field, f"must be a string, is {_short(value)}")
    texts: list[str] = []
    shown: list[ImageRef] = []
    for index, part in enumerate(value):
        text, found = _part(part, place, f"{field}[{index}]", images)
        texts.append(text)
        shown += found
    content = "".join(texts)
    if shown and content.count(IMAGE_MARK) != len(shown):
        raise place.error(
            field, f"contains images, and a text part with {IMAGE_MARK}, which stands for an image; change it"
        )
    return content, tuple(shown)


def _part(part: Any, place: RowPlace, field: str, images: RowImages) -> tuple[str, tuple[ImageRef, ...]]:
    """Return the text of a content part, or the mark of its image, and its images."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in ("image", "image_url"):
        return IMAGE_MARK, (images.of_part(part, field),)
    if kind == "text" and isinstance(part.get("text"), str):
        return part["text"], images.at_marks(part["text"], field)
    is_other = kind in ("video", "video_url", "audio", "input_audio")
    problem = "video and sound are not supported" if is_other else "must be a text or image part"
    raise place.error(field, f"{problem}, is {_short(part)}")


def _tool_call(value: Any, index: int, place: RowPlace, field: str) -> ToolCall:
    function = value.get("function", value) if isinstance(value, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise place.error(field, f"must be {{id, function: {{name, arguments}}}}, is {_short(value)}")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except json.JSONDecodeError as error:
            raise place.error(f"{field}.arguments", f"is not valid JSON: {error}") from error
    return ToolCall(
        id=_text(value.get("id"), place, f"{field}.id") or f"call_{index}",
        name=function["name"],
        arguments=without_nulls(_object(arguments, place, f"{field}.arguments")),
    )


# ----------------------------------------------------------------------------------------------------- values


def _object(value: Any, place: RowPlace, field: str) -> JsonObject:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise place.error(field, f"must be an object, is {_short(value)}")
    return value


def _text(value: Any, place: RowPlace, field: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise place.error(field, f"must be a string, is {_short(value)}")
    return value


def _required_text(value: Any, place: RowPlace, field: str) -> str:
    text = _text(value, place, field)
    if not text:
        raise place.error(field, f"must be a non-empty string, is {'missing' if value is None else 'empty'}")
    return text


def _short(value: Any) -> str:
    if value is None:
        return "missing"
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
