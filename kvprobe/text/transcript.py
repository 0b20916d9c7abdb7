"""Conversations with named segments, turned into tokens by the model's own chat template."""

from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Literal

from kvprobe.arguments import checked_arguments
from kvprobe.brief import Brief, Table, brief
from kvprobe.errors import UserError
from kvprobe.names import unknown
from kvprobe.text.chat_template import Piece, Tokenizer, lay_out, template_arguments
from kvprobe.text.messages import RESULTS, Message, message_of
from kvprobe.text.tokens import Tokens, common_length, refuse_reserved

RestartMode = Literal["gapped", "contiguous", "rendered"]
"""Where tokens after hidden text stand: where they would have stood, or closed up; or all as the template writes the
other messages."""


@contextmanager
def in_file(path: object) -> Generator[None]:
    """While this lasts, refusals name the file, if there is one, that the conversation is from."""
    try:
        yield
    except UserError as error:
        if not path or str(error).startswith("In "):
            raise
        sentence = str(error)
        raise UserError(f"In {path}, {sentence[0].lower()}{sentence[1:]}") from error


@checked_arguments
@dataclass(frozen=True, repr=False)
class Transcript(Brief):
    """A conversation whose messages belong to named segments.

    Attributes:
        messages: in order.
        hidden: segments that are left out of the tokens (see `without`).
        mode: where the tokens after a hidden segment stand: `gapped` keeps the positions that they would have
            had, `contiguous` closes the gap, `rendered` writes the others anew.
        arguments: of the chat template: `tools`, `enable_thinking` …
        source: the file that it was read from, if any.
    """

    messages: tuple[Message, ...]
    hidden: frozenset[str] = frozenset()
    mode: RestartMode = "gapped"
    arguments: Mapping[str, object] = field(default_factory=dict[str, object], hash=False)
    source: str = field(default="", compare=False)

    @classmethod
    def from_messages(
        cls, messages: Iterable[Mapping[str, object]], names: Sequence[str] | None = None, **arguments: object
    ) -> "Transcript":
        """A transcript of `{"role": …, "content": …}` messages.

        `content` is a text, or a list of texts and `{"text": …, "name": …}` parts. Other fields are what the chat
        template reads: `tool_calls`, `tool_call_id`, `reasoning_content` …. `names` gives the segment of each message;
        neighbours may share one. Without names each message is its own segment, `m0`, `m1` …, and the result of a tool
        is `tool2`, say, by its number.

        `arguments` are those of `apply_chat_template` that change the text: `tools`, `documents`, `enable_thinking` and
        other variables of the template, `continue_final_message`, `add_generation_prompt`, `chat_template`.

        Raises:
            UserError: there is no message; a message lacks role or text, has a role that is not one word, or holds what
                is not plain data; the names are not one text for each message, not contiguous, or reserved; or an
                argument chooses something else than the text.
        """
        messages = list(messages)
        if names is None:
            names = [
                f"{'tool' if dict(message).get('role') in RESULTS else 'm'}{index}"
                for index, message in enumerate(messages)
            ]
        if len(names) != len(messages):
            raise UserError(
                f"There are {len(messages)} messages but {len(names)} segment names; give one name for each message."
            )
        refuse_reserved(names)
        if not messages:
            raise UserError("A conversation has at least one message; give {'role': …, 'content': …}.")
        built = [
            message_of(index, message, name) for index, (message, name) in enumerate(zip(messages, names, strict=True))
        ]
        runs = [name for name, before in zip(names, [None, *names], strict=False) if name != before]
        if len(set(runs)) != len(runs):
            raise UserError(
                f"A segment name must not come back after another segment; they are {', '.join(map(repr, runs))}."
            )
        return cls(tuple(built), arguments=template_arguments(arguments))

    def _facts(self) -> Iterable[str]:
        yield f"{len(self.messages)} messages"
        yield f"segments={brief(self.segments)}"
        if self.hidden:
            yield f"without {', '.join(sorted(self.hidden))} ({self.mode})"
        if self.arguments:
            yield f"arguments={brief(self.arguments)}"

    def _table(self) -> Table:
        hidden = self.hidden
        rows = [
            (message.segment, message.role, message.said, "yes" if message.segment in hidden else "")
            for message in self.messages
        ]
        return ("segment", "role", "text", "hidden"), rows

    @cached_property
    def segments(self) -> tuple[str, ...]:
        """Segment names in order, hidden ones included."""
        return tuple(dict.fromkeys(message.segment for message in self.messages))

    def without(self, *segments: str, mode: RestartMode = "gapped") -> "Transcript":
        """The conversation as if these segments had never been said: prefill it to restart.

        `gapped` (the default) leaves the other tokens where they were, so that the cache differs from a masked
        one in provenance alone; `contiguous` closes the gap. Both keep the preamble and write nothing in place of what
        is hidden. `rendered` is what an engine reads that gets the other messages alone: without a system message, many
        templates write a default one.

        Raises:
            UserError: there is no such segment or restart mode.
        """
        for name in segments:
            if name not in self.segments:
                raise UserError(unknown("segment", name, self.segments))
        return replace(self, hidden=self.hidden | set(segments), mode=mode)

    def tokens(self, tokenizer: Tokenizer, generation_prompt: bool = False) -> Tokens:
        """The tokens of the conversation by the tokenizer's chat template.

        With nothing hidden, the ids are those of `apply_chat_template`. `generation_prompt` adds the header of
        the assistant's next message as a segment called `generation`.

        Raises:
            UserError: the tokenizer is slow, the template refuses or rewrites messages, or a message has a control
                token.
        """
        if self.hidden and self.mode == "rendered":
            return self._rendered_anew(tokenizer, generation_prompt)
        with in_file(self.source):
            laid_out = lay_out(self.messages, tokenizer, generation_prompt, self.arguments)
        pieces = laid_out.pieces
        ends = list(accumulate(len(piece.text) for piece in pieces))
        text = "".join(piece.text for piece in pieces)
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        origins: list[Piece] = []
        index = 0
        for _, end in encoded["offset_mapping"]:
            # A token belongs to the piece that holds its last character: " 4" at a border is part of "4".
            while end > ends[index]:
                index += 1
            origins.append(pieces[index])
        count = len(origins)
        whole = Tokens(
            tuple(encoded["input_ids"]),
            tuple(range(count)),
            tuple(piece.segment for piece in origins),
            tuple(piece.part for piece in origins),
            (False,) * count,
            tuple(piece.delimiter for piece in origins),
            dropped=laid_out.dropped,
        )
        return self._drop_hidden(whole) if self.hidden else whole

    def _rendered_anew(self, tokenizer: Tokenizer, generation_prompt: bool) -> Tokens:
        visible = tuple(message for message in self.messages if message.segment not in self.hidden)
        if not visible:
            raise UserError("All messages are hidden, so a template has nothing to render; keep one, or use 'gapped'.")
        tokens = Transcript(visible, arguments=self.arguments).tokens(tokenizer, generation_prompt)
        try:
            original = replace(self, hidden=frozenset[str]()).tokens(tokenizer, generation_prompt).ids
        except UserError:  # a template that takes these messages only without those that are hidden
            original = ()
        same = common_length(original, tokens.ids)
        return replace(tokens, recomputed=tuple(index >= same for index in range(len(tokens))))

    def _drop_hidden(self, whole: Tokens) -> Tokens:
        visible = [index for index, segment in enumerate(whole.segments) if segment not in self.hidden]
        first_hidden = next(index for index, segment in enumerate(whole.segments) if segment in self.hidden)
        return replace(
            whole.at(visible),
            positions=tuple(visible) if self.mode == "gapped" else tuple(range(len(visible))),
            recomputed=tuple(index > first_hidden for index in visible),
            end=len(whole) if self.mode == "gapped" else None,
        )
