"""Conversations of named segments, each an exchange between a user and an assistant."""

from collections.abc import Mapping, Sequence

from kvprobe.text.transcript import Transcript

Content = str | Sequence[str | Mapping[str, str]]
"""A text, or its pieces, of which some have names."""


def talk(*segments: tuple[str, *tuple[Content, ...]]) -> Transcript:
    """The name of each segment, what the user says in it and, if there is one, the reply; or `system` and its text."""
    messages: list[Mapping[str, object]] = []
    names: list[str] = []
    for name, *contents in segments:
        roles = ["system"] if name == "system" else ["user", "assistant"][: len(contents)]
        messages += [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]
        names += [name] * len(contents)
    return Transcript.from_messages(messages, names)


def filled(text: str, hole: str, value: str, name: str) -> list[str | Mapping[str, str]]:
    """A text whose hole, as `{code}`, is filled by a value, which is the part of this name."""
    before, after = text.split(f"{{{hole}}}")
    return [before, {"text": value, "name": name}, after]
