"""Designs: what a probe is to recover, from which conversations, and what these have in common.

A claim about a probe depends on how its samples were made. Contexts are crossed with labels, so that no label belongs
to one conversation. Folds and intervals keep the samples of a context together. Labels are drawn at random, not
balanced within a context, because a balanced label can be inferred from the other labels of its context.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvprobe.arguments import check_fields
from kvprobe.brief import Brief
from kvprobe.errors import UserError
from kvprobe.text.chat_template import Tokenizer
from kvprobe.text.transcript import Transcript


@dataclass(frozen=True, repr=False)
class Target(Brief):
    """What is to be recovered.

    Attributes:
        name: of the whole: `code`, `topic`, `damaged` …
        classes: what each place can be.
        places: what is asked of each sample, if it is more than one thing (the five digits of a code).

    Raises:
        UserError: fewer than two classes, a class twice, or no place.
    """

    name: str
    classes: tuple[str, ...]
    places: tuple[str, ...] = ("",)

    def __post_init__(self) -> None:
        check_fields(self)
        if len(self.classes) < 2 or len(set(self.classes)) < len(self.classes):
            raise UserError(
                f"Target {self.name!r} has the classes {list(self.classes)}; a probe needs at least two, all of them "
                f"different."
            )
        if not self.places:
            raise UserError(f"Target {self.name!r} has no place; give it at least one.")

    @property
    def chance(self) -> float:
        """Accuracy of a blind guess."""
        return 1 / len(self.classes)


@dataclass(frozen=True, repr=False)
class Sample(Brief):
    """A conversation with what a probe is to recover from it.

    Attributes:
        transcript: the conversation.
        labels: class numbers, one per place of the target.
        context: name of what the sample shares with others; folds and intervals keep samples of one context together.
        slot: the one token that is read, as an index into the conversation's tokens; a whole segment by default.
    """

    transcript: Transcript
    labels: tuple[int, ...]
    context: str
    slot: int | None = None

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, repr=False)
class Design(Brief):
    """Samples and what is to be recovered from them.

    Raises:
        UserError: no samples, labels that are not the target's, or samples of slots beside samples of segments.
    """

    samples: tuple[Sample, ...]
    target: Target

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.samples:
            raise UserError("A design has no samples; give at least one.")
        places, classes = len(self.target.places), len(self.target.classes)
        for number, sample in enumerate(self.samples):
            if len(sample.labels) != places or not all(0 <= label < classes for label in sample.labels):
                raise UserError(
                    f"Sample {number} has the labels {sample.labels}; target {self.target.name!r} needs {places} "
                    f"in 0 to {classes - 1}."
                )
        if len({sample.slot is None for sample in self.samples}) == 2:
            raise UserError("Some samples name a slot and others do not; give every sample a slot, or none.")

    def _facts(self) -> Iterable[str]:
        contexts = len({sample.context for sample in self.samples})
        yield f"{len(self.samples)} samples in {contexts} contexts, target={self.target!r}"

    @classmethod
    def crossed(
        cls,
        contexts: Mapping[str, Callable[[str], Transcript]],
        texts: Sequence[Sequence[str]],
        labels: Callable[[str], tuple[int, ...]],
        target: Target,
    ) -> "Design":
        """Each context with each of its own texts.

        Args:
            contexts: by name, the conversation that holds a given text.
            texts: those of each context, in the order of `contexts`.
            labels: of a text.
        """
        return cls(
            tuple(
                Sample(make(text), labels(text), name)
                for (name, make), context_texts in zip(contexts.items(), texts, strict=True)
                for text in context_texts
            ),
            target,
        )

    @classmethod
    def labelled(
        cls,
        transcripts: Sequence[Transcript],
        labels: Sequence[Hashable],
        contexts: Sequence[str],
        name: str = "label",
    ) -> "Design":
        """A column of labels of any kind, one for each conversation.

        Args:
            contexts: name of each sample's surroundings (template, source), by which a probe must not recognise labels.

        Raises:
            UserError: as many of each are not given, or a label is NaN.
        """
        if not len(transcripts) == len(labels) == len(contexts):
            raise UserError(
                f"{len(transcripts)} conversations, {len(labels)} labels and {len(contexts)} contexts were given; "
                "give one label and one context for each conversation."
            )
        if missing := sum(label != label for label in labels):
            raise UserError(
                f"{missing} of {len(labels)} labels are NaN, which is no class; leave their conversations out."
            )
        classes = tuple(sorted(map(str, set(labels))))
        number = {name: index for index, name in enumerate(classes)}
        samples = zip(transcripts, labels, contexts, strict=True)
        return cls(
            tuple(Sample(text, (number[str(label)],), context) for text, label, context in samples),
            Target(name, classes),
        )

    @classmethod
    def token_identity(
        cls, transcripts: Mapping[str, Transcript], tokenizer: Tokenizer, at: str, most: int = 10
    ) -> "Design":
        """Which of its commonest tokens each slot of segment `at` holds.

        Slots of other tokens are left out, and all slots from a part `answer` on, which probes never read.

        Args:
            transcripts: by context.
            most: how many tokens to distinguish.
        """
        tokens = {name: transcript.tokens(tokenizer) for name, transcript in transcripts.items()}
        slots = [
            (name, slot)
            for name, row in tokens.items()
            for slot in range(row.span(at).start, row.span(at).stop)
            if "answer" not in row.parts[row.span(at).start : slot + 1]
        ]
        common = [token_id for token_id, _ in Counter(tokens[name].ids[slot] for name, slot in slots).most_common(most)]
        samples = tuple(
            Sample(transcripts[name], (common.index(tokens[name].ids[slot]),), name, slot)
            for name, slot in slots
            if tokens[name].ids[slot] in common
        )
        return cls(samples, Target("token", tuple(map(str, common))))
