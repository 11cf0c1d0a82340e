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

Objects and the prompt may be JSON text; `agentrl.data.row_values` says how values are read. Every error names
the file, the row (counted from 0) and the field.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from agentrl.config.data import DataConfig
from agentrl.data.image_files import ImageFolder
from agentrl.data.row_images import NO_IMAGES, RowImages
from agentrl.data.row_place import RowPlace
from agentrl.data.row_values import decoded, read_object, shortened, structure
from agentrl.errors import PluginError
from agentrl.types import IMAGE_MARK, ImageRef, JsonObject, Message, Role, Task, ToolCall

Row = Mapping[str, Any]
REFUSED_COLUMNS = ("videos", "audios")
ROLES: tuple[str, ...] = get_args(Role)
KWARGS = ("tools_kwargs", "interaction_kwargs", "environment_kwargs", "chat_template_kwargs")
"""Objects of `extra_info` that the program itself reads."""
OTHER_SPELLINGS = {"function_call": "tool_calls", "thinking": "reasoning_content"}
"""Keys of messages that change what a policy sees, under the names that are read."""


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
    for name in REFUSED_COLUMNS:
        if row.get(name):
            raise place.error(name, "video and sound are not supported; remove such rows")
    images = RowImages(
        row.get(config.images.key), place, config.images.key, folder, max_images=config.images.max_images
    )
    messages = read_messages(
        column(row, config.prompt_key, place, "data.prompt_key"), place, config.prompt_key, images
    )
    reward_model = read_object(row.get(config.reward_model_key), place, config.reward_model_key)
    extra_info = _extra_info(row.get(config.extra_info_key), place, config.extra_info_key)
    tools_kwargs = extra_info.get("tools_kwargs") or {}
    interaction_kwargs = _interaction_kwargs(
        extra_info, place, config.extra_info_key, must_be_named=agents.has_partners
    )
    environment_kwargs = _named(extra_info.get("environment_kwargs"))
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
        data_source=_required_text(
            column(row, config.data_source_key, place, "data.data_source_key"), place, config.data_source_key
        ),
        messages=messages,
        agent_name=agent_name,
        ground_truth=reward_model.get("ground_truth"),
        ability=_text(row.get(config.ability_key), place, config.ability_key),
        extra_info=extra_info,
        tools_kwargs=tools_kwargs,
        interaction_kwargs=interaction_kwargs,
        environment_kwargs=agents.environment_kwargs(environment_kwargs),
    )


def column(row: Row, key: str, place: RowPlace, setting: str) -> Any:
    """Return a column, or with `column.field` a field of a column of objects.

    `setting`: the config key that names the column.

    Raises:
        DataError: there is none; the message lists the columns of the row.
    """
    if (value := optional_column(row, key, place)) is None and key not in row:
        raise place.error(key, f"is missing; the row has {', '.join(row)}; name its column in {setting}")
    return value


def optional_column(row: Row, key: str, place: RowPlace) -> Any:
    """Do the same; None if there is no such column."""
    if key in row:
        return row[key]
    first, _, rest = key.partition(".")
    return optional_column(read_object(row.get(first), place, first), rest, place) if rest else None


# ----------------------------------------------------------------------------------------------------- kwargs


def _extra_info(value: Any, place: RowPlace, field: str) -> JsonObject:
    """Return `extra_info` with the KWARGS as objects, each of which may be JSON text."""
    extra_info = read_object(value, place, field)
    own = {
        name: read_object(extra_info[name], place, f"{field}.{name}")
        for name in KWARGS
        if extra_info.get(name) is not None
    }
    if "tools_kwargs" in own:
        own["tools_kwargs"] = _tools_kwargs(own["tools_kwargs"], place, f"{field}.tools_kwargs")
    return {**extra_info, **own}


def _tools_kwargs(tools: JsonObject, place: RowPlace, parent: str) -> Mapping[str, JsonObject]:
    """Return the arguments of each tool. A tool with null is not of this row."""
    found: dict[str, JsonObject] = {}
    for name, kwargs in tools.items():
        if kwargs is None:
            continue
        own = dict(read_object(kwargs, place, f"{parent}.{name}"))
        if "create_kwargs" in own:
            own["create_kwargs"] = read_object(own["create_kwargs"], place, f"{parent}.{name}.create_kwargs")
        found[name] = own
    return found


def _interaction_kwargs(
    extra_info: JsonObject, place: RowPlace, parent: str, *, must_be_named: bool
) -> JsonObject | None:
    kwargs = _named(extra_info.get("interaction_kwargs"))
    if not kwargs or not ("name" in kwargs or must_be_named):
        return None
    if not isinstance(kwargs.get("name"), str) or not kwargs["name"]:
        problem = (
            f"must name the interaction that answers, is {shortened(kwargs.get('name'))}; the row has "
            f"{', '.join(sorted(kwargs))}"
        )
        raise place.error(f"{parent}.interaction_kwargs.name", problem)
    return kwargs


def _named(kwargs: JsonObject | None) -> JsonObject:
    """Return the arguments without a `name` that is null: it names nothing."""
    return {key: value for key, value in (kwargs or {}).items() if key != "name" or value is not None}


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
    found = read_list(value, place, field)
    messages = tuple(_message(item, place, f"{field}[{index}]", images) for index, item in enumerate(found))
    images.check_all_taken(field)
    return messages


def messages_or_text(value: Any) -> Any:
    """Return the messages that a text is the JSON of; any other value as it is, which may be plain text."""
    found = structure(value)
    is_list = isinstance(found, list) and bool(found)
    return found if is_list and all(isinstance(m, Mapping) and "role" in m for m in found) else value


def read_list(value: Any, place: RowPlace, field: str) -> list[Mapping[str, Any]]:
    """Return the messages of a field as the row has them: a list of objects, or one as JSON text.

    Raises:
        DataError: it is something else, or empty.
    """
    found = decoded(value, place, field)
    if not isinstance(found, list):
        raise place.error(field, f"must be a list of {{role, content}}, is {shortened(value)}")
    if not found:
        raise place.error(field, "must contain at least one message, is empty")
    for index, item in enumerate(found):
        if not isinstance(item, Mapping):
            problem = f"must be an object {{role, content}}, is {shortened(item)}"
            raise place.error(f"{field}[{index}]", problem)
    return found


def _message(value: Mapping[str, Any], place: RowPlace, field: str, images: RowImages) -> Message:
    for other, read in OTHER_SPELLINGS.items():
        if value.get(other):
            raise place.error(f"{field}.{other}", f"is not read; write {read}")
    role = value.get("role")
    if role not in ROLES:
        raise place.error(f"{field}.role", f"must be one of {', '.join(ROLES)}, is {shortened(role)}")
    calls = value.get("tool_calls") or []
    if not isinstance(calls, list):
        raise place.error(f"{field}.tool_calls", f"must be a list of calls, is {shortened(calls)}")
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
        raise place.error(field, f"must be a string, is {shortened(value)}")
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
    raise place.error(field, f"{problem}, is {shortened(part)}")


def _tool_call(value: Any, index: int, place: RowPlace, field: str) -> ToolCall:
    function = value.get("function", value) if isinstance(value, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise place.error(field, f"must be {{id, function: {{name, arguments}}}}, is {shortened(value)}")
    return ToolCall(
        id=_text(value.get("id"), place, f"{field}.id") or f"call_{index}",
        name=function["name"],
        arguments=read_object(function.get("arguments"), place, f"{field}.arguments"),
    )


# ----------------------------------------------------------------------------------------------------- values


def _text(value: Any, place: RowPlace, field: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise place.error(field, f"must be a string, is {shortened(value)}")
    return value


def _required_text(value: Any, place: RowPlace, field: str) -> str:
    text = _text(value, place, field)
    if not text:
        raise place.error(field, f"must be a non-empty string, is {'missing' if value is None else 'empty'}")
    return text
