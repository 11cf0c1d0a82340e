r"""Conversion of LaTeX, Markdown, typography and scripts to plain text: `\$1{,}234` and **$1,234** become
$1,234.

The time of every pattern is linear in the text: the checkers that use it run in the event loop.
"""

from __future__ import annotations

import re
import unicodedata

_SPACES_OF_WIDTH = (
    "\u00a0\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u205f\u3000"
)
_INVISIBLE = (
    "\u00ad\u200b\u200c\u200d\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2060"
    "\u2066\u2067\u2068\u2069\u20e3\ufe0f\ufeff"
)
_CHARACTERS: dict[int, str | int | None] = str.maketrans(
    {
        **dict.fromkeys("\u2212\u2013\u2010\u2011\uff0d\ufe63", "-"),  # minus, en dash, hyphens
        "\u2014": " - ",
        **dict.fromkeys(_SPACES_OF_WIDTH, " "),  # between thousands too
        **dict.fromkeys(_INVISIBLE, None),
        **dict.fromkeys("\u2018\u2019\u02bc\uff07", "'"),
        "\u066a": "%",
        "\u066b": ".",  # Arabic: decimal separator, thousands separator, comma
        "\u066c": ",",
        "\u060c": ", ",
        "\uff0c": ",",
        "\uff0e": ".",
        "\uff05": "%",
        "\uff04": "$",
        "\uff0b": "+",
        "\uff0f": "/",
        "\uff1a": ":",
        "\uff1d": "=",
        "\uff1c": "<",
        "\uff1e": ">",
        "\u2044": "/",
        "\u2215": "/",
        "÷": "/",
        **dict.fromkeys("≦⩽⪅≲", "≤"),
        **dict.fromkeys("≧⩾⪆≳", "≥"),
    }
)
_RAISED, _LOWERED = "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻", "₀₁₂₃₄₅₆₇₈₉"
_RAISED_TO, _LOWERED_TO = str.maketrans(_RAISED, "0123456789+-"), str.maketrans(_LOWERED, "0123456789")
_EXPONENT = re.compile(rf"[{_RAISED}]{{1,10}}")
_INDEX = re.compile(rf"[{_LOWERED}]{{1,10}}")
_NOT_ASCII = re.compile(r"[^\x00-\x7f]")
_SYMBOLS = {
    "times": "×", "cdot": "×", "ast": "×", "div": "/", "approx": "≈", "pi": "π", "sqrt": "√", "circ": "°",
    "degree": "°", "pm": "±",
    "mp": "±", "neq": "≠", "ne": "≠", "pounds": "£", "euro": "€", "to": " to ", "rightarrow": "→",
    "Rightarrow": "⇒", "implies": "⇒",
    "lt": "<", "gt": ">", "le": "≤", "leq": "≤", "leqslant": "≤", "ge": "≥", "geq": "≥", "geqslant": "≥",
    "ll": "<", "gg": ">", "in": "∈",
    "cup": "∪", "sim": "≈", "simeq": "≈", "lesssim": "≤", "gtrsim": "≥", "infty": "∞", "dollar": "$",
    "textdollar": "$", "mid": "|",
    "equiv": "≡", "lor": " or ", "vee": " or ", "Longrightarrow": "⇒", "longrightarrow": "→", "iff": "⇒",
}  # fmt: skip
_COMMAND = re.compile(r"\\([A-Za-z]{1,20})\*?")
_DROPPED = re.compile(
    r"(?:left|right|[bB]igg?[lrm]?|therefore|because|item|bullet|centering|hline|star|normalsize|displaystyle"
    r"|textstyle|(?:black)?square|q?quad|hfill|boldsymbol|rm|bf|sf|tt|it|large|Large|LARGE|huge|Huge|small)"
)
_WRAPPER = re.compile(
    r"\\(?:text(?:bf|it|rm|sf|tt|normal)?|math(?:rm|bf|it|sf|tt|bb|cal|normal)|operatorname|emph|[mh]box|bm"
    r"|boldsymbol|boxed|fbox|underline)\*?\s?\{([^{}]*)\}"
)
_OPEN_BOX = re.compile(r"\\?\b(?:boxed|fbox)\s?\{?")
_FUNCTION = re.compile(
    r"\\(?:log|ln|lg|exp|sin|cos|tan|cot|sec|csc|arc(?:sin|cos|tan)|sinh|cosh|tanh|[lr]floor|[lr]ceil|gcd|lcm|max"
    r"|min|det|d?t?binom|sum|prod|int|lim|overline|bar|hat|vec)(?![a-zA-Z])(?:_\{?\w{1,4}\}?)?\s?"
)
_ENVIRONMENT = re.compile(r"\\(?:begin|end|color|textcolor|colorbox|[hv]space\*?)\{[a-z0-9.*-]{1,20}\}")
_NUMERIC_FRACTION = re.compile(
    r"\\[dtc]?frac\s?(?:\{\s?(-?[0-9][0-9,.]{0,100})\s?\}\s?\{\s?([0-9][0-9,.]{0,100})\s?\}|([0-9])\s?([0-9])(?![0-9]))"
)
_GROUPED_COMMA = re.compile(
    r"(?<=[0-9])\{,\}(?=[0-9])|(?<=[0-9])\\!,(?=[0-9])|(?<=[0-9]),\\!(?=[0-9])|(?<=[0-9])\{,\}\\!(?=[0-9])"
)
_DECIMAL_COMMA = re.compile(r"(?<=[0-9])\{,\}(?=[0-9]{1,20}(?![0-9{,]))(?![0-9]{3}(?![0-9]))")
_NTH_ROOT = re.compile(r"\\sqrt\s?\[[^\[\]]{1,10}\]")
_SPACING = re.compile(r"\\[,;:> ]|~")
_GROUP = re.compile(r"(?<![\w^}])\{([^{}]*)\}")
_DEGREE = re.compile(r"\^\s?(?:\{\s?°\s?\}|°)")
_ITALIC = re.compile(r"(?<![\w*)])\*([^*\s][^*\n]{0,60})\*(?![\w*(])")
_STRUCK = re.compile(r"~~[^~\n]{1,200}~~|\\(?:cancel|[bx]cancel|sout|st)\{[^{}]{0,100}\}")
_HIDDEN = re.compile(
    r"<!--.{0,300}?-->|<(del|s|strike)>[^<>\n]{0,200}</\1>|\\[hv]?phantom\s?\{[^{}]{0,100}\}", re.DOTALL
)
_POWER = re.compile(r"(?<=[0-9])(?:\*\*| \*\* )(?=[0-9])")
_SPACES = re.compile(r"[ \t]{2,}")
_MARKS = re.compile(
    r"<<[^<>\n]{0,100}>>|(?<!\S)_(?=[0-9$])|(?<=[0-9])_(?![\w{])|(?<=[0-9])_(?:10|\{10\})(?![\w{])|\*\*|__|`"
    r"|(?m:^[ \t]{0,8}(?:>[ \t])*(?:#{1,6}[ \t]|[*+][ \t]))"
    r"|</?[A-Za-z][\w:-]{0,30}>|<\|[^|<>\n]{1,40}\|>"
)
_IN_ANGLES = re.compile(r"<\s?([$€£]?[-+]?[0-9][0-9,.]{0,40}%?)\s?>")


def plain(text: str) -> str:
    """Return `text` without LaTeX, Markdown, HTML and GSM8K's calculator marks (<<9*2=18>>).

    Digits become 0 to 9.

    Roots become √, functions ƒ. Struck-out Markdown is removed. LaTeX commands without a text form remain.
    """
    if _NOT_ASCII.search(text):
        text = _NOT_ASCII.sub(_in_ascii, _INDEX.sub(_index, _EXPONENT.sub(_power, text))).translate(
            _CHARACTERS
        )
    if "=" in text:
        text = text.replace(">=", "≥").replace("<=", "≤").replace("!=", "≠")
    text = _STRUCK.sub(" ", _HIDDEN.sub(" ", _POWER.sub("^", text.replace("+/-", "±"))))
    if "\\" in text or "{" in text:
        text = _without_latex(text)
    return _SPACES.sub(" ", _ITALIC.sub(r"\1", _IN_ANGLES.sub(r"\1", _MARKS.sub("", text))))


def _power(found: re.Match[str]) -> str:
    return "^" + found[0].translate(_RAISED_TO)


def _index(found: re.Match[str]) -> str:
    return "_" + found[0].translate(_LOWERED_TO)


def _in_ascii(found: re.Match[str]) -> str:
    """Return one character as ASCII if it is a digit or a fraction of any script."""
    character = found[0]
    if (digit := unicodedata.decimal(character, None)) is not None:
        return str(digit)
    if unicodedata.category(character) == "No" and "FRACTION" in unicodedata.name(character, ""):
        return " " + unicodedata.normalize("NFKC", character).replace("\u2044", "/")
    return character


def _without_latex(text: str) -> str:
    text = _GROUPED_COMMA.sub(",", _DECIMAL_COMMA.sub(".", text))
    text = _ENVIRONMENT.sub(" ", text.replace("\\\\", "\n"))
    text = _SPACING.sub(" ", text).replace("\\!", "")
    text = _NUMERIC_FRACTION.sub(lambda found: f" {found[1] or found[3]}/{found[2] or found[4]}", text)
    for _ in range(3):  # nested commands, from the inside out: \mathbf{\text{...}}
        text = _WRAPPER.sub(r"\1", text)
    text = _NTH_ROOT.sub("√", text)
    text = _COMMAND.sub(_symbol, _FUNCTION.sub("ƒ", _OPEN_BOX.sub(" ", text)))
    for escaped in ("\\$", "\\%", "\\#", "\\&", "\\_"):
        text = text.replace(escaped, escaped[1])
    for bracket in ("\\(", "\\)", "\\[", "\\]"):
        text = text.replace(bracket, " ")
    return _GROUP.sub(r"\1", _DEGREE.sub("°", text))


def _symbol(found: re.Match[str]) -> str:
    name = found[1]
    return _SYMBOLS.get(name, " " if _DROPPED.fullmatch(name) else found[0])
