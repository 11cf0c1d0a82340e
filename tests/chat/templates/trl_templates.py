"""Every chat template of the `trl` package on the real Qwen vocabulary of the `dashscope` package, and
docs/templates.md's table of them.

Run as a program it writes the table: `make templates`.
"""

from __future__ import annotations

import base64
import importlib.metadata
import importlib.util
import re
import sys
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from agentrl.chat.chat import Chat, find_turn_ends
from agentrl.chat.formats import NO_FORMAT
from agentrl.chat.template import ChatTemplate
from agentrl.errors import ConfigError

DOCUMENT = Path(__file__).parents[3] / "docs" / "templates.md"
BEGIN, END = "<!-- verdicts: written by `make templates` -->\n", "<!-- end of verdicts -->\n"

NUM_CONVERSATIONS = 40

SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| "
    r"?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Qwen2 cuts text before merging."""

MARKUP = re.compile(
    r"<\|[^<>|\s]+\|>|<｜[^<>｜\s]+｜>|<[a-z_]+\|>|<\|[a-z_]+>|</?(?:think|tool_call|tool_response|start_of_turn|end_of_turn)>|\[/?[A-Z_]+\]|</s>|<end_of_utterance>"
)
"""What models that these templates belong to have as added tokens."""

NAMED = {"bos_token": "<|begin_of_sequence|>", "eos_token": "<|endoftext|>"}

ENDS = (
    *(
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<end_of_turn>",
        "<turn|>",
        "<|return|>",
        "<|call|>",
        "<｜end▁of▁sentence｜>",
        "</s>",
    ),
    *("<|END_OF_TURN_TOKEN|>", "<|endoftext|>", "<end_of_utterance>", "<|eot|>", "<|end|>"),
)
"""Tokens at which a server stops: `eos_token_id` of the models' generation configs."""


def package_file(package: str, path: str) -> Path:
    """Return a file of an installed package, without importing it (they are installed for these files
    alone).
    """
    spec = importlib.util.find_spec(package)
    assert spec is not None, f"{package} is not installed: make setup"
    assert spec.submodule_search_locations is not None, f"{package} is no package"
    return Path(spec.submodule_search_locations[0]) / path


@cache
def model_of_qwen() -> models.BPE:
    """Return Qwen's byte-level BPE: its file lists tokens by rank, and each is two of lower rank."""
    lines = package_file("dashscope", "resources/qwen.tiktoken").read_bytes().splitlines()
    ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines)}
    spell = _byte_letters()
    names = {token: "".join(spell[byte] for byte in token) for token in ranks}
    merges = [
        (max(ranks[left], ranks[right]), rank, names[left], names[right])
        for token, rank in ranks.items()
        for left, right in ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        if left in ranks and right in ranks
    ]
    merges.sort(key=lambda merge: (merge[1], merge[0]))
    vocabulary = {names[token]: rank for token, rank in ranks.items()}
    return models.BPE(vocab=vocabulary, merges=[(left, right) for _, _, left, right in merges])


def _byte_letters() -> list[str]:
    """Return the letter by which byte-level BPE writes each byte: printable Latin-1 as itself, the others
    from U+0100 on.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def tokenizer_for(source: str) -> Tokenizer:
    tokenizer = Tokenizer(model_of_qwen())
    split = pre_tokenizers.Split(Regex(SPLIT), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in NAMED.values()])
    markup = dict.fromkeys(MARKUP.findall(source))
    special = [token for token in markup if not re.fullmatch(r"</?(?:think|tool_call|tool_response)>", token)]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in markup if token not in special])
    return tokenizer


def sources() -> dict[str, str]:
    folder = package_file("trl", "chat_templates")
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.jinja"))}


def chat_for(source: str) -> Chat:
    """Raises ConfigError when the template cannot be used at all."""
    tokenizer = tokenizer_for(source)
    template = ChatTemplate({"default": source}, NAMED)
    names = [token for token in ENDS if token in source or token in NAMED.values()]
    if "<|observation|>" in source:  # these turns end where the next message begins
        names += ["<|user|>", "<|observation|>"]
    if "<|return|>" in names:  # in this format <|end|> ends a message, and a turn may have several
        names.remove("<|end|>")
    ends = [id for token in names if (id := tokenizer.token_to_id(token)) is not None]
    return Chat(
        tokenizer, template, eos_token_ids=find_turn_ends(tokenizer, template, ends), tool_format="auto"
    )


def verdicts() -> str:
    """Return the table of verdicts as Markdown."""
    names: dict[str, list[str]] = {}
    for name, source in sources().items():
        names.setdefault(_cells(source), []).append(name)
    rows = [f"| {', '.join(of_row)} | {cells} |\n" for cells, of_row in names.items()]
    version = importlib.metadata.version("trl")
    head = "| templates | tool format | with tools | without tools | why |\n|---|---|---|---|---|\n"
    return (
        f"Templates of trl {version}, {NUM_CONVERSATIONS} generated conversations "
        f"each.\n\n{head}{''.join(rows)}"
    )


def _cells(source: str) -> str:
    """Return the cells of a template's row behind its name."""
    try:
        chat = chat_for(source)
    except ConfigError as error:
        return f" | unusable | unusable | {_cell(str(error))}"
    report = chat.report_template(num=NUM_CONVERSATIONS, shrinks=False)
    if chat.tool_format == NO_FORMAT:
        with_tools, without = "not read" if chat.shows_unread_calls else "not shown", report.verdict
    else:
        with_tools, without = (
            report.verdict,
            chat.report_template((), num=NUM_CONVERSATIONS, shrinks=False).verdict,
        )
    reasons = [
        finding for kind in ("broken", "fork", "refused", "note") for finding, _ in report.of_kind(kind)
    ]
    places: dict[str, dict[str, None]] = {}
    for finding in reasons:
        if finding.where != "with tools":
            what = re.split("[!;]", finding.why.removeprefix("TemplateError: "))[0]
            places.setdefault(what, {})[finding.where] = None
    found: dict[tuple[str, ...], list[str]] = {}
    for what, wheres in places.items():
        found.setdefault(tuple(sorted(wheres)), []).append(what)
    why = "; ".join(f"{', '.join(wheres)}: {', '.join(whats)}" for wheres, whats in found.items())
    return f"{chat.tool_format} | {with_tools} | {without} | {_cell(why)}"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def written() -> str:
    """Return the document with the table as it should be."""
    before, _, rest = DOCUMENT.read_text(encoding="utf-8").partition(BEGIN)
    _, found, after = rest.partition(END)
    assert found, f"{DOCUMENT} has lost the marks around its table"
    return f"{before}{BEGIN}{verdicts()}{END}{after}"


if __name__ == "__main__":
    DOCUMENT.write_text(written(), encoding="utf-8")
    print(f"wrote {DOCUMENT}", file=sys.stderr)
