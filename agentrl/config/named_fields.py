"""Types of config fields that name what packages register as entry points."""

from __future__ import annotations

from dataclasses import dataclass

from agentrl.registered import names_of_ours, registered


@dataclass(frozen=True, slots=True)
class NameIn:
    """A validator: the field is a name that a package registers in `group`, or one of `also`.

    kind: what the names stand for, for messages: `policy loss`.
    takes_places: the user's own may be named by its place, as `file.py:NAME`.
    """

    kind: str
    group: str
    also: tuple[str, ...] = ()
    takes_places: bool = False

    def __call__(self, name: str) -> str:
        known = [*self.also, *sorted(registered(self.group))]
        if name in known or (self.takes_places and ":" in name):
            return name
        own = ", or your own as file.py:NAME" if self.takes_places else ""
        raise ValueError(f"unknown {self.kind} {name!r}; use one of {', '.join(known)}{own}")

    @property
    def words(self) -> str:
        """The names of this package, for the reference of the config."""
        ours = " ".join(f"`{name}`" for name in (*self.also, *names_of_ours(self.group)))
        own = ", your own as `file.py:NAME`," if self.takes_places else ""
        return f"{ours}{own} or an entry point of {self.group}"
