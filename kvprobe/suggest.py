"""Error sentences for unknown names: what is wrong, what was expected, the near matches."""

from collections.abc import Iterable
from difflib import get_close_matches


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """One sentence for an unknown `name` of some `kind`, with near matches first and else all that is known."""
    known = list(known)
    near = get_close_matches(str(name), known, n=3, cutoff=0.6)
    if near:
        return f"There is no {kind} called {name!r}; did you mean {' or '.join(map(repr, near))}?"
    if not known:
        return f"There is no {kind} called {name!r}; there are none here."
    return f"There is no {kind} called {name!r}; known are {', '.join(map(repr, known))}."
