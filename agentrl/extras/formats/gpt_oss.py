"""gpt-oss (harmony): messages on channels,
`<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...`.

analysis: thoughts. commentary: calls (`to=functions.name`), or text that announces them. final: text.
"""

from __future__ import annotations

import re

from agentrl.chat.formats.json_calls import call_with, is_portable, read_json, skip_space, write_json
from agentrl.chat.parsing import ParsedPiece, SampledText, ToolFormat, beginnings
from agentrl.types import Message, ToolCall

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
FRAME = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)
FUNCTIONS = "functions."

_TO = r"to=(?P<{}>[^\s<]{{1,128}}+)\s*+"
_HEADER = re.compile(
    rf"\s*+(?:<\|start\|>(?:assistant)?\s*+)?(?:{_TO.format('early')})?"
    rf"(?:<\|channel\|>\s*+(?P<channel>\w++)\s*+(?:{_TO.format('late')})?)?(?:<\|constrain\|>\s*+)?[\w/.+-]*+\s*+<\|message\|>"
)
_HEADER_END = re.compile(r"<\|(?:message|end|call|return)\|>|<\|start\|>")
_MESSAGE_END = re.compile(r"<\|(?:end|call|return|start|channel)\|>")
_MARK = re.compile("|".join(map(re.escape, FRAME)))


class GptOss(ToolFormat):
    """The model stops at `<|call|>`, so this mark is missing from the text of a turn that the model ended."""

    name = "gpt_oss"
    sign = re.compile(r"<\|channel\|>(?:.|\n)*<\|call\|>")
    closing = CALL

    def __init__(self) -> None:
        super().__init__()
        self.marks = FRAME
        # the template writes the recipient before the channel, the model after it
        self.opening = re.compile(rf" ?to=[^\s<]{{1,128}}+(?={re.escape(CHANNEL)})|{_MARK.pattern}")
        self.partial = beginnings(
            FRAME, rf" ?t(?:o(?:=[^\s<]{{0,128}}+(?:{beginnings((CHANNEL,)).pattern})?)?)?| "
        )
        self.thought_end = re.compile(f"(?={_MESSAGE_END.pattern})")
        self.partial_thought_end = beginnings((END, CALL, RETURN, START, CHANNEL))

    def read(self, source: SampledText, start: int) -> ParsedPiece | None:
        mark = _MARK.match(source.text, start)
        if mark is not None and mark[0] not in (START, CHANNEL):
            return ParsedPiece(mark.end())
        first = mark.end() if mark is not None else source.text.index(CHANNEL, start) + len(CHANNEL)
        if source.search(_HEADER_END, first) is None and source.unfinished is None:
            return None
        header = _HEADER.match(source.text, start)
        if header is None:
            return ParsedPiece(first)
        recipient = header["late"] or header["early"]
        if recipient is not None:
            return self._read_call(source, recipient.removeprefix(FUNCTIONS), header.end())
        return ParsedPiece(header.end(), begins="reasoning" if header["channel"] == "analysis" else "text")

    def read_without_tools(self, source: SampledText, start: int) -> ParsedPiece | None:
        piece = self.read(source, start)
        is_call = piece is not None and piece.calls
        return super().read_without_tools(source, start) if is_call else piece  # its frame is no text

    def _read_call(self, source: SampledText, name: str, start: int) -> ParsedPiece | None:
        name = name if is_portable(name) else ""
        read = read_json(source, skip_space(source.text, start))
        if read is None:
            return None
        end = source.search(_MESSAGE_END, start if read.error else read.end)
        if end is None and source.unfinished is None:
            return None
        is_cut = end is None and source.unfinished == self.unfinished(is_truncated=True)
        stop = len(source.text) if end is None else end.start()
        if is_cut or read.error is not None:
            return ParsedPiece(stop, (ToolCall("", name, None, source.unfinished if is_cut else read.error),))
        if source.text[read.end : stop].strip():
            return ParsedPiece(
                stop, (ToolCall("", name, None, f"there is text between the JSON and {CALL}"),)
            )
        return ParsedPiece(stop, (call_with(name, read.value),))

    def write(self, message: Message) -> str:
        parts = [f"{CHANNEL}analysis{MESSAGE}{message.reasoning}{END}"] if message.reasoning else []
        if not message.tool_calls:
            parts.append(f"{CHANNEL}final{MESSAGE}{message.content}")
        elif message.content:
            parts.append(f"{CHANNEL}commentary{MESSAGE}{message.content}{END}")
        parts += [
            f"{CHANNEL}commentary to={FUNCTIONS}{call.name} "
            f"{CONSTRAIN}json{MESSAGE}{write_json(call.arguments)}{CALL}"
            for call in message.tool_calls
        ]
        return f"{START}assistant".join(parts).removesuffix(CALL)
