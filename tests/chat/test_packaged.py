"""The packaged templates: own writing that renders what the originals render, chosen by name."""

import importlib.util
import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from agentrl.chat.assistant_style import AssistantStyle
from agentrl.chat.chat import Chat
from agentrl.chat.packaged import FOLDER, PACKAGED, find_template
from agentrl.chat.probes import PROBE_TOOLS, ProbeScope, generate
from agentrl.chat.template import ChatTemplate, TemplateMessage, TemplateRefusal
from agentrl.chat.tiny import write_tiny_tokenizer
from agentrl.cluster.user_files import check_files, user_files
from agentrl.config.model import ModelConfig
from agentrl.config.schema import Config
from agentrl.errors import ConfigError
from agentrl.learner.weights import copy_tokenizer
from agentrl.types import Message

NAMED = {"bos_token": "<|begin_of_text|>", "eos_token": "<|endoftext|>"}
ORIGINALS = {
    "hermes": "qwen3_instruct_2507",
    "qwen2_5": "qwen2_5",
    "qwen3_training": "qwen3_training",
    "llama3_1": "llama3_1",
}
"""Packaged template -> template of trl that renders the same text."""
VERDICTS = {name: "forks" if name == "llama3_1" else "exact" for name in PACKAGED}


def load(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


trl_templates = load(Path(__file__).parent / "templates" / "trl_templates.py")


def own(name: str) -> ChatTemplate:
    return ChatTemplate({"default": find_template(name).read_text()}, NAMED)


def shown(message: Message, style: AssistantStyle) -> TemplateMessage:
    if message.role == "assistant":
        calls = [(call.name, call.id, call.arguments) for call in message.tool_calls]
        return style.message(message.content, thought=message.reasoning or None, calls=calls)
    answers = {"tool_call_id": message.tool_call_id, "name": message.name} if message.role == "tool" else {}
    return {"role": message.role, "content": message.content, **answers}


def rendered(template: ChatTemplate, messages, tools, prompts: bool) -> str | None:
    try:
        return template.render(messages, tools, add_generation_prompt=prompts)
    except TemplateRefusal:
        return None


@pytest.mark.parametrize(("name", "original"), ORIGINALS.items())
def test_it_renders_what_the_original_renders(name, original):
    mine = own(name)
    theirs = ChatTemplate({"default": trl_templates.sources()[original]}, NAMED)
    rng, num_rendered = random.Random(0), 0
    for number in range(200):
        tools = PROBE_TOOLS if number % 2 else ()
        scope = ProbeScope(tools, thinks=True, has_user_turns=True, has_system=True, control=("</think>",))
        conversation = generate(rng, scope)
        for template in (mine, theirs):
            messages = [shown(message, AssistantStyle.of(template)) for message in conversation]
            for prompts in (True, False):
                text = rendered(theirs, messages, tools, prompts)
                assert rendered(mine, messages, tools, prompts) == text
                num_rendered += text is not None
    assert num_rendered > 400


def test_the_short_template_of_smollm2():
    messages = [
        {"role": "user", "content": "2*3?"},
        AssistantStyle.of(own("smollm2")).message("", calls=[("now", "call00000", {"x": 1})]),
        {"role": "tool", "content": "6", "name": "now", "tool_call_id": "call00000"},
    ]
    talk = (
        '<|im_start|>user\n2*3?<|im_end|>\n<|im_start|>assistant\n<tool_call>{"name": "now", "arguments": '
        '{"x": 1}}</tool_call><|im_end|>\n<|im_start|>tool\n6<|im_end|>\n<|im_start|>assistant\n'
    )
    tools = "Tools: look_up(words, count, options, places, exact) now()<|im_end|>\n"
    template = own("smollm2")
    assert template.render(messages, add_generation_prompt=True) == talk
    assert (
        template.render(messages, PROBE_TOOLS, add_generation_prompt=True)
        == f"<|im_start|>system\n{tools}{talk}"
    )
    system = [{"role": "system", "content": "Be brief."}, *messages]
    assert (
        template.render(system, PROBE_TOOLS, add_generation_prompt=True)
        == f"<|im_start|>system\nBe brief.\n{tools}{talk}"
    )
    assert (
        template.render(system, add_generation_prompt=True)
        == f"<|im_start|>system\nBe brief.<|im_end|>\n{talk}"
    )


@pytest.mark.parametrize("name", PACKAGED)
def test_its_verdict_with_tools(name):
    chat = trl_templates.chat_for(find_template(name).read_text())
    assert chat.tools_problem is None
    chat.check_tools(PROBE_TOOLS, [])
    for tools in (PROBE_TOOLS, ()):
        report = chat.report_template(tools, num=30, shrinks=False)
        assert report.verdict == (VERDICTS[name] if tools else "exact"), report.lines()
    assert not report.of_kind("note")


def test_a_name_is_found_before_a_file_and_a_path_still_works(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("hermes", "own", "own.jinja"):
        Path(name).write_text("mine")
    assert find_template("hermes") == FOLDER / "hermes.jinja"
    assert [find_template(path).read_text() for path in ("./hermes", "own", "own.jinja")] == ["mine"] * 3


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        ("hermez", "no packaged template has the name 'hermez'; did you mean 'hermes'? packaged: hermes, "
        "llama3_1, qwen2_5, qwen3_training, smollm2; or name a Jinja file"),
        ("gemma", "no packaged template has the name 'gemma'; packaged: hermes, "),
        ("hermes.jinja", "file 'hermes.jinja' does not exist"),
        ("a/hermes", "file 'a/hermes' does not exist (nor does its folder 'a')"),
    ],
)  # fmt: skip
def test_what_does_not_exist_is_answered_with_what_does(chosen, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_tiny_tokenizer(Path("model"))
    config = Config(model=ModelConfig(path="model", chat_template=chosen))
    for use in (lambda: check_files(config.models, config.agent), lambda: Chat.of(config.model)):
        with pytest.raises(ConfigError) as caught:
            use()
        assert str(caught.value).startswith(f"model.chat_template: {words}")


def test_a_template_whose_tokens_the_tokenizer_lacks_is_refused(tmp_path):
    write_tiny_tokenizer(tmp_path)
    with pytest.raises(ConfigError) as caught:
        Chat.load(str(tmp_path), template_file="llama3_1")
    assert str(caught.value) == (
        "model.chat_template=llama3_1 writes <|start_header_id|>, <|end_header_id|>, <|eot_id|>, which are "
        f"no tokens of the tokenizer in {str(tmp_path)!r}; packaged templates that fit: hermes, qwen2_5, "
        "smollm2"
    )
    file = tmp_path / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.add_special_tokens(["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"])
    tokenizer.save(str(file))
    chat = Chat.load(str(tmp_path), template_file="llama3_1")
    assert (chat.tool_format, chat.decode(chat.eos_token_ids[:1])) == ("llama3_json", "<|eot_id|>")


def test_it_is_not_shipped_to_workers_and_is_copied_into_checkpoints(tmp_path):
    model = ModelConfig(path=str(tmp_path), chat_template="hermes")
    assert user_files(Config(model=model)) == []
    assert user_files(Config(model=model.model_copy(update={"chat_template": "own.jinja"}))) == ["own.jinja"]
    copy = tmp_path / "copy"
    copy.mkdir()
    copy_tokenizer(model, copy)
    assert (copy / "chat_template.jinja").read_text() == (FOLDER / "hermes.jinja").read_text()
