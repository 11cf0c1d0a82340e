"""Little text that stands for more YAML than memory holds, and what refuses it."""

BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
TEXTS = {
    "aliases": (BOMB, "expand to more than 1,000,000 characters"),
    "long texts": (
        f"a: &a {'x' * 10_000}\nb: [{', '.join(['*a'] * 200)}]\n",
        "expand to more than 1,000,000 characters",
    ),
    "itself": ("a: &a [*a]\n", "an anchor contains an alias of itself"),
    "depth": ("a: " + "[" * 20_000 + "]" * 20_000 + "\n", "nested too deeply"),
    "less depth": ("a: " + "[" * 100 + "]" * 100 + "\n", "nested too deeply, at most 50 levels"),
}
