"""The verdict on a template: exact, forks or broken, with the smallest conversation that shows it."""

import random
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from agentrl.chat.chat import Chat
from agentrl.chat.check import TemplateReport
from agentrl.chat.probes import PROBE_TOOLS, ProbeScope, generate
from agentrl.chat.replay import replay_steps
from agentrl.chat.shrink import shrink
from agentrl.chat.tiny import TEMPLATE_FILE, build_tiny_tokenizer
from agentrl.errors import ConfigError
from agentrl.types import Message
from parts.chats import template_chat

TEMPLATES = Path(__file__).parents[1] / "chat" / "templates"
EXAMPLES = 120 * max(1, settings().max_examples // 100)


def source_of(name: str) -> str:
    return (TEMPLATE_FILE if name == "tiny" else TEMPLATES / f"{name}.jinja").read_text()


@cache
def chat_with(source: str, *, end: str = "<|im_end|>", **options) -> Chat:
    tokenizer = build_tiny_tokenizer()
    further = [
        text
        for text in ("<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "</s>", "[INST]", "[/INST]")
        if text in source
    ]
    tokenizer.add_special_tokens([*further, *({end} - set(further))])
    tokenizer.add_tokens([AddedToken("<think>", special=False), AddedToken("</think>", special=False)])
    named = {"bos_token": "<|endoftext|>", "eos_token": end}
    return template_chat(tokenizer, source, end=end, named=named, **options)


STYLES = {
    "tiny": chat_with(source_of("tiny")),
    "blocks": chat_with(source_of("blocks")),
    "thinking": chat_with(source_of("thinking")),
    "headers": chat_with(source_of("headers"), end="<|eot_id|>", tool_format="llama3_json"),
    "brackets": chat_with(source_of("brackets"), end="</s>", tool_format="mistral"),
}


def sentences(report: TemplateReport, kind: str) -> set[str]:
    return {finding.sentence for finding, _ in report.of_kind(kind)}


# --------------------------------------------------------------------------------------------------- verdicts


@pytest.mark.parametrize("name", ["tiny", "blocks"])
def test_templates_that_only_append_are_exact(name):
    report = STYLES[name].report_template(PROBE_TOOLS, num=150)
    assert (report.verdict, report.findings, report.summary) == ("exact", (), None)


def test_a_template_that_strips_thinking_forks_and_says_where():
    report = STYLES["thinking"].report_template(PROBE_TOOLS, num=150)
    assert report.verdict == "forks"
    assert "when a user speaks again: drops thinking" in sentences(report, "fork")
    assert "model.chat_template" in report.summary
    assert "\n" not in report.summary
    silent = STYLES["thinking"].report_template((), has_user_turns=False, num=100)
    assert silent.verdict == "exact"


@pytest.mark.parametrize("name", ["headers", "brackets"])
def test_text_that_is_not_shown_beside_calls_forks(name):
    report = STYLES[name].report_template(PROBE_TOOLS, num=150)
    assert report.verdict == "forks"
    assert sentences(report, "fork") <= {
        "when tools answer: leaves out what the assistant said",
        "when a user speaks again: leaves out what the assistant said",
    }
    assert STYLES[name].report_template((), num=100).verdict == "exact"


def test_messages_that_are_refused_are_counted_and_no_fault():
    report = STYLES["brackets"].report_template((), num=100)
    assert 0 < report.num_refused < report.num
    assert any("roles must alternate" in sentence for sentence in sentences(report, "refused"))


CHATML = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.role != 'HIDDEN' %}{{ m.content }}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
EMPTY_RESULTS = source_of("tiny").replace(
    "'<tool_response>' + message.content + '</tool_response>'", "'<tool_response></tool_response>'"
)
NO_PROMPT = CHATML.replace("assistant\n{% endif %}", "model\n{% endif %}")
ODD_CALLS = source_of("tiny").replace(
    "'arguments': call.function.arguments", "'arguments': call.function.arguments | length"
)


@pytest.mark.parametrize(
    ("source", "tools", "what"),
    [
        (CHATML.replace("HIDDEN", "user"), (), "at the prompt: leaves out what a user says"),
        (EMPTY_RESULTS, PROBE_TOOLS, "when tools answer: leaves out what tools say"),
        (
            NO_PROMPT,
            (),
            "always: the chat template's assistant turn does not begin with its generation prompt",
        ),
        (ODD_CALLS, PROBE_TOOLS, "at a turn: its calls are not read back"),
        ("{{ raise_exception('never') }}", (), "roles: TemplateError: never"),
    ],
)
def test_broken_templates_are_named_and_stop_a_run(source, tools, what):
    chat = chat_with(source)
    report = chat.report_template(tools, num=60)
    assert report.verdict == "broken"
    assert what in sentences(report, "broken") | sentences(report, "refused")
    if "raise_exception" not in source:
        with pytest.raises(
            ConfigError, match=r"the chat template does not only append: .*set model\.chat_template"
        ):
            chat.check_template(tools)


def test_calls_read_by_another_format_stop_a_run():
    with pytest.raises(ConfigError, match="its calls are not read back"):
        chat_with(source_of("blocks"), tool_format="mistral").check_template(PROBE_TOOLS)


def test_a_template_that_shows_no_tools_gets_a_note():
    report = chat_with(
        source_of("tiny").replace("{%- for tool in tools %}", "{%- for tool in [] %}")
    ).report_template(PROBE_TOOLS, num=50)
    assert (report.verdict, sentences(report, "note")) == (
        "exact",
        {"at the prompt: leaves out the tools; name them in the system message"},
    )


UNKNOWN_CALLS = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}: {{ c.function.arguments | tojson }}</call>{% endfor %}
{{- '<|im_end|>' }}
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""  # noqa: E501


def test_calls_that_no_format_reads_are_named_and_the_template_is_judged_without_tools():
    chat = chat_with(UNKNOWN_CALLS, tool_format="auto")
    cure = (
        "tool calls cannot be read: the chat template uses no known format; set model.tool_format "
        "(docs/templates.md) or model.chat_template=hermes or qwen2_5 or qwen3_training or smollm2, or "
        "use react_agent"
    )
    report = chat.report_template(num=60)
    assert (chat.shows_unread_calls, report.verdict, sentences(report, "note")) == (
        True,
        "exact",
        {f"with tools: {cure}"},
    )
    assert not any(message.tool_calls for finding, _ in report.findings for message in finding.messages)
    assert report.summary is None
    assert chat.check_template(()).findings == ()
    with pytest.raises(
        ConfigError, match=r"tool calls cannot be read: .* set model\.tool_format .* or use react_agent"
    ):
        chat.check_template(PROBE_TOOLS)


def test_a_template_without_tools_is_judged_without_them_and_says_so():
    silent = chat_with(CHATML, tool_format="auto")
    cure = "set model.chat_template=hermes or qwen2_5 or qwen3_training or smollm2, or use react_agent"
    report = silent.report_template(num=20)
    assert (silent.shows_unread_calls, report.verdict, report.summary) == (False, "exact", None)
    assert sentences(report, "note") == {f"with tools: the chat template shows no tools; {cure}"}
    assert silent.report_template((), num=20).findings == (), "nobody asked for tools"
    forced = chat_with(CHATML, tool_format="hermes")
    for tools in (None, PROBE_TOOLS):
        with pytest.raises(ConfigError) as caught:
            forced.report_template(tools, num=20)
        assert str(caught.value) == (
            f"the chat template shows no tools, so model.tool_format=hermes reads nothing; {cure}"
        )
    assert forced.report_template((), num=20).findings == ()
    deaf = chat_with(source_of("tiny"), tool_format="none")
    with pytest.raises(ConfigError, match=r"format=none reads no tool calls; set model.tool_format=hermes$"):
        deaf.check_template(PROBE_TOOLS)


def test_tools_that_a_template_leaves_out_must_be_named_in_the_prompt():
    source = source_of("tiny").replace("{%- for tool in tools %}", "{%- for tool in [] %}")
    chat, [tool, other] = chat_with(source), PROBE_TOOLS
    named = [Message("system", "You may call look_up."), Message("user", "a")]
    chat.check_tools([tool], named)
    chat.check_tools([], [])
    with pytest.raises(
        ConfigError, match=r"shows calls, but no tools: name now in the system message, or set model\.chat_"
    ):
        chat.check_tools([tool, other], named)
    chat_with(source_of("tiny")).check_tools([tool, other], [])


def test_the_counterexample_is_small_and_shows_the_first_token():
    report = STYLES["thinking"].report_template((), num=60)
    finding = next(finding for finding, _ in report.of_kind("fork") if finding.why == "drops thinking")
    assert finding.messages == (
        Message("user", ""),
        Message("assistant", "", reasoning="t"),
        Message("user", ""),
    )
    assert finding.lines()[:3] == ["user: ''", "assistant: thinks 't', ''", "user: ''"]
    assert "first difference at token 8" in finding.detail
    assert "'<think>'" in finding.detail.splitlines()[2]


def test_equal_seeds_give_equal_reports():
    one, other, third = (
        STYLES["thinking"].report_template(PROBE_TOOLS, num=40, seed=seed) for seed in (1, 1, 2)
    )
    assert one == other
    assert [count for _, count in one.findings] != [count for _, count in third.findings]


# ------------------------------------------------------------------------------------------------------- laws


@pytest.mark.parametrize("name", STYLES)
@settings(max_examples=EXAMPLES)
@given(seed=st.integers(0, 2**32))
def test_prefix_and_mask_hold_for_any_generated_conversation(name, seed):
    """Sampled tokens stand where they were sampled, all others are the template's; a fork begins with the
    whole render.
    """
    chat = STYLES[name]
    renderer = chat._renderer
    control = (*renderer.codec.special_tokens, "</think>", "<tool_call>")
    scope = ProbeScope(
        PROBE_TOOLS,
        thinks=name == "thinking",
        has_user_turns=name != "brackets",
        has_system=name != "brackets",
        control=control,
    )
    messages = generate(random.Random(seed), scope)
    row, said = [], []
    for step in replay_steps(renderer, messages, scope.tools):
        row = step.ids if step.edit is not None else row + step.ids
        assert step.conversation.token_ids == row
        if step.is_turn:
            said.append(chat.decode(step.ids[:-1]))
            continue
        shown = [renderer.shown(message) for message in step.conversation.messages]
        whole = renderer.codec.encode_rendered(
            renderer.template.render(shown, scope.tools, add_generation_prompt=True)
        )
        assert row == whole
        assert step.edit is None or name not in ("tiny", "blocks")
    turns = [message for message in messages if message.role == "assistant"]
    assert len(said) == len(turns)
    for text, message in zip(said, turns, strict=True):
        assert message.content.strip() in text or (message.tool_calls and name in ("headers", "brackets"))
        assert all(call.name in text for call in message.tool_calls)


@given(st.integers(0, 2**32), st.sampled_from(["now", "look_up"]))
def test_shrinking_keeps_what_it_is_asked_to_keep_and_no_more(seed, name):
    scope = ProbeScope(PROBE_TOOLS, thinks=True, has_user_turns=True, has_system=True, control=())
    messages = generate(random.Random(seed), scope)

    def calls(candidate) -> bool:
        return any(call.name == name for message in candidate for call in message.tool_calls)

    if calls(messages):
        small = shrink(messages, calls)
        assert calls(small)
        assert [message.role for message in small if message.role != "tool"] == ["user", "assistant"]
        assert sum(len(message.tool_calls) for message in small) == 1
        assert sum(len(message.content) + len(message.reasoning) for message in small) == 0
