r"""LaTeX, Markdown and typography as plain text, so that a number is written in one way: `\$1{,}234` and **$1,234** are $1,234.

Every pattern takes time linear in the text: the checkers that use it run in the event loop.
"""

from __future__ import annotations

import re

_CHARACTERS = str.maketrans(
    {
        **dict.fromkeys("\u2212\u2013\u2010\u2011\uff0d", "-"),  # minus, en dash, hyphens
        "\u2014": " - ",
        **dict.fromkeys("\u00a0\u2009\u202f\u2007\u2008\u2002\u2003", " "),  # spaces of fixed width, between thousands too
        **dict.fromkeys("\u200b\u2060\ufeff", None),
        **{chr(0xFF10 + digit): str(digit) for digit in range(10)},  # full-width digits
        "\uff0c": ",",
        "\uff1a": ":",
        "\uff1d": "=",
        "½": " 1/2",
        "¼": " 1/4",
        "¾": " 3/4",
        "⅓": " 1/3",
        "⅔": " 2/3",
        "⅕": " 1/5",
        "⅖": " 2/5",
        "⅗": " 3/5",
        "⅘": " 4/5",
        "⅛": " 1/8",
        "\u2044": "/",
        "÷": "/",
    }
)
_SYMBOLS = {
    "times": "×", "cdot": "×", "ast": "×", "div": "/", "approx": "≈", "pi": "π", "sqrt": "√", "circ": "°", "degree": "°", "pm": "±",
    "neq": "≠", "ne": "≠", "pounds": "£", "euro": "€", "to": " to ", "rightarrow": "→", "Rightarrow": "⇒", "implies": "⇒",
}  # fmt: skip
_COMMAND = re.compile(r"\\([A-Za-z]{1,20})\*?")
_DROPPED = re.compile(r"(?:left|right|[bB]igg?|displaystyle|(?:black)?square|q?quad|boldsymbol|rm|bf)")
_WRAPPER = re.compile(r"\\(?:text(?:bf|it|rm)?|math(?:rm|bf|it|sf|tt)|operatorname|[mh]box|bm|boxed|fbox|underline)\*?\s?\{([^{}]*)\}")
_OPEN_BOX = re.compile(r"\\?\b(?:boxed|fbox)\s?\{?")
_FUNCTION = re.compile(r"\\(?:log|ln|lg|exp|sin|cos|tan|cot|[lr]floor|[lr]ceil)(?![a-zA-Z])(?:_\{?\w{1,4}\}?)?\s?")
_ENVIRONMENT = re.compile(r"\\(?:begin|end|color|textcolor)\{[a-z*]{1,20}\}")
_NUMERIC_FRACTION = re.compile(
    r"\\[dtc]?frac\s?(?:\{\s?(-?[0-9][0-9,.]{0,100})\s?\}\s?\{\s?([0-9][0-9,.]{0,100})\s?\}|([0-9])\s?([0-9])(?![0-9]))"
)
_GROUPED_COMMA = re.compile(r"(?<=[0-9])\{,\}(?=[0-9])|(?<=[0-9])\\!,(?=[0-9])|(?<=[0-9]),\\!(?=[0-9])")
_SPACING = re.compile(r"\\[,;:> ]|~")
_GROUP = re.compile(r"(?<![\w^}])\{([^{}]*)\}")
_DEGREE = re.compile(r"\^\s?(?:\{\s?°\s?\}|°)")
_ITALIC = re.compile(r"(?<![\w*)])\*([^*\s][^*\n]{0,60})\*(?![\w*(])")
_SPACES = re.compile(r"[ \t]{2,}")
_MARKS = re.compile(
    r"<<[^<>\n]{0,100}>>|(?<!\S)_(?=[0-9$])|(?<=[0-9])_(?!\w)|\*\*|__|`|(?m:^[ \t]{0,8}(?:>[ \t]?)*(?:#{1,6}[ \t]|[*+][ \t]))"
)


def plain(text: str) -> str:
    """Return `text` without the marks of LaTeX, Markdown and GSM8K's calculator (<<9*2=18>>).

    Roots are √, functions ƒ; commands that stand for no text stay as they are.
    """
    text = text.translate(_CHARACTERS)
    if "\\" in text or "{" in text:
        text = _without_latex(text)
    return _SPACES.sub(" ", _ITALIC.sub(r"\1", _MARKS.sub("", text)))


def _without_latex(text: str) -> str:
    text = _GROUPED_COMMA.sub(",", text)
    text = _ENVIRONMENT.sub(" ", text.replace("\\\\", "\n"))
    text = _SPACING.sub(" ", text).replace("\\!", "")
    text = _NUMERIC_FRACTION.sub(lambda found: f" {found[1] or found[3]}/{found[2] or found[4]}", text)
    for _ in range(3):  # \mathbf{\text{...}}: from the inside outwards
        text = _WRAPPER.sub(r"\1", text)
    text = _COMMAND.sub(_symbol, _FUNCTION.sub("ƒ", _OPEN_BOX.sub(" ", text)))
    for escaped in ("\\$", "\\%", "\\#", "\\&", "\\_"):
        text = text.replace(escaped, escaped[1])
    for bracket in ("\\(", "\\)", "\\[", "\\]"):
        text = text.replace(bracket, " ")
    return _GROUP.sub(r"\1", _DEGREE.sub("°", text))


def _symbol(found: re.Match[str]) -> str:
    name = found[1]
    return _SYMBOLS.get(name, " " if _DROPPED.fullmatch(name) else found[0])
