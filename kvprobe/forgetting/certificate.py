"""The certificate: what a way to forget leaves of a removed text, under one test for all ways.

The conversation is read with many secrets in the place of its own, and forgets each in the same way. Whatever still
depends on the secret was left. Four questions are asked of it, each beside a restart, which never read the secret, and
beside the conversation with everything in view.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np
from scipy.stats import binom

from kvprobe.arguments import AtLeastZero, Within, checked_arguments
from kvprobe.brief import Brief, Table
from kvprobe.cache.cache import KVCache
from kvprobe.errors import UserError
from kvprobe.forgetting.hidden_secret import FEWEST_SECRETS, HiddenSecret
from kvprobe.forgetting.readers import (
    RIDGE,
    SHOWN_READERS,
    SecretReader,
    SecretReading,
    known_readings,
    readings_from_others,
    refuse_unreadable,
)
from kvprobe.forgetting.search import Search, search
from kvprobe.forgetting.secret_places import TO_LEARN_FROM
from kvprobe.forgetting.trace import REPEATED, SecretTrace, Slots, in_layers, stored, trace_of
from kvprobe.forgetting.use import Use, uses
from kvprobe.forgetting.ways import NOTHING, WAYS, Way, forgotten, way_of
from kvprobe.inference.model import Model
from kvprobe.policies.policy import Policy
from kvprobe.progress import Bar
from kvprobe.wording import percent, plain

POWER = 0.9
"""Share of the digits that a reader must find with everything in view before what it does not find counts."""
UNLIKELY = 0.05
"""Probability below which blind guesses would have found as many."""
SMALL = 0.05
"""Share of the effect with everything in view below which a use is called none."""
SAYS = 0.5
"""Share of the secrets that the model must say with everything in view before what it does not say counts."""


@dataclass(frozen=True)
class Verdict:
    """The answer to one question.

    Attributes:
        words: the answer, in three words.
        left: whether something is left: None where that is not decided.
        sentence: what was found, with its interval.
    """

    question: str
    words: str
    left: bool | None
    sentence: str


@dataclass(frozen=True, repr=False)
class Certificate(Brief):
    """What a way to forget leaves of a secret. The secret itself is not in it.

    Attributes:
        way: by its name.
        hidden: the segments that were forgotten.
        secrets: how many were tried in the place of the secret, its own among them.
        stored: slots that still hold something that depends on the secret where later tokens do not see it.
        trace: where caches of different secrets differ.
        known: what each reader makes of it that has learned from other secrets of this conversation.
        from_others: what each makes of it that has learned from other conversations; empty where they were not asked.
        search: whether trying finds the secret.
        use: how much the secret decides the answer, and how much with everything in view; None without a question.
    """

    model: str
    way: str
    hidden: tuple[str, ...]
    secrets: int
    stored: int
    trace: SecretTrace
    known: tuple[SecretReading, ...] = field(repr=False)
    from_others: tuple[SecretReading, ...] = field(repr=False)
    search: Search | None = field(repr=False)
    use: Use | None = field(repr=False)
    use_in_view: Use | None = field(repr=False)

    @property
    def clean(self) -> bool:
        """Whether nothing that stays depends on the secret, so that no reader whatever can find it there."""
        return self.trace.empty

    @property
    def forgotten(self) -> bool:
        """Whether nothing is left, in memory that later tokens do not see either."""
        return self.clean and not self.stored

    @property
    def bits(self) -> float:
        """Bits of each digit (or word, or which secret it is) that the best reader reads which reads more than chance:
        the number for a report; 0 where none does."""
        return max(0.0, best.bits.mean) if (best := self._best) and best.above_chance else 0.0

    @property
    def _best(self) -> SecretReading | None:
        """Who reads most of those that read more than chance, or of all where none does."""
        asked = (*self.known, *self.from_others)
        return max(asked, key=lambda one: (one.above_chance, one.bits.mean), default=None)

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        """The answers."""
        return (
            self._where(),
            self._read("Can one who knows the conversation read it?", self.known, TO_LEARN_FROM),
            self._read("Can one read it who has never seen the conversation?", self.from_others, "Give conversations."),
            self._recovered(),
            self._used(),
        )

    def _where(self) -> Verdict:
        question = "Does anything that stays depend on the secret?"
        if self.clean:
            most = "" if self.trace.exact else " by more than the same cache computed again"
            words = f"No number of any layer that later tokens see differs between {self.secrets} secrets{most}."
            if self.stored:
                return Verdict(question, "hidden, not removed", True, f"{words} {self.stored} hidden slots still do.")
            return Verdict(question, "nothing is left", False, words)
        found = self.trace.places
        slots = " Which slots stay depends on it." if self.trace.slots_differ else ""
        if not found:
            return Verdict(question, "traces are left", True, slots.strip())
        layer, part, head, position = found[0]
        at = "" if position < 0 else f", position {position}"
        sentence = (
            f"{_counted(len(found), 'place')} in {in_layers(self.trace.touched)}, "
            f"{_counted(len({place[:3:2] for place in found}), 'head')}; most in {part} of layer {layer}, "
            f"head {head}{at}: {self.trace.most:.2g} of its size.{slots}"
        )
        return Verdict(question, "traces are left", True, sentence)

    def _read(self, question: str, readings: tuple[SecretReading, ...], wanted: str) -> Verdict:
        if self.clean:
            return Verdict(question, "nothing to read", False, "No reader can: nothing differs.")
        if not readings:
            return Verdict(question, "was not asked", None, wanted)
        read = (f"{SHOWN_READERS[one.reader]} {percent(one.digits)}, {one.bits.mean:.2f} bits each" for one in readings)
        chance = max(one.chance for one in readings)
        said = f"Of the {readings[0].noun}s (chance {chance:.0%}): {'; '.join(read)}.".replace("-", "−")
        if any(one.above_chance for one in readings):
            return Verdict(question, "can be read", True, said)
        if all(one.control is not None and one.control.mean < POWER for one in readings):
            return Verdict(question, "is not decided", None, f"{said} So this says little.")
        return Verdict(question, "was not read", None, f"{said} Other readers may read more.")

    def _recovered(self) -> Verdict:
        question = "Can it be found by trying?"
        if self.clean:
            return Verdict(question, "cannot be found", False, "All secrets leave the same cache.")
        if self.search is None:
            return Verdict(question, "was not asked", None, "No search was made.")
        shown = (
            f"{self.search.found.mean:.0%} of {self.search.found.clusters} secrets, with {self.search.tries:.0f} tries "
            f"each (as many guesses find {self.search.blind:.1%}); the two nearest caches are "
            f"{self.trace.nearest:.1e} of their size apart."
        )
        found, trials = round(self.search.found.mean * self.search.found.clusters), self.search.found.clusters
        if float(binom.sf(found - 1, trials, self.search.blind)) < UNLIKELY:
            return Verdict(question, "can be found", True, shown)
        return Verdict(question, "is not decided" if found else "was not found", None, shown)

    def _used(self) -> Verdict:
        question = "Does the model use it?"
        if self.clean:
            return Verdict(question, "cannot be used", False, "The model goes on in the same way whatever it was.")
        if self.use is None or self.use_in_view is None:
            return Verdict(question, "was not asked", None, "Give ask, the user's next message.")
        effect, full = self.use.effect, self.use_in_view.effect
        says, would_say = self.use.said, self.use_in_view.said
        answers = would_say.mean >= SAYS
        shown = (
            f"Exchanging the cache for that of another secret takes {plain(effect)} nats from the secret as the "
            f"answer, of {plain(full)} with everything in view. "
        ).replace("-", "−")
        shown += (
            f"The model says it in {percent(says)} of {effect.clusters} replies, with everything in view in "
            f"{percent(would_say)}."
            if answers
            else f"With everything in view, too, the model says it in {percent(would_say)} of {effect.clusters} "
            "replies alone, so that it says nothing of it here decides nothing; give another question (--ask) or how "
            "the answer begins (--lead)."
        )
        if answers and full.above() and effect.has_interval and max(-effect.low, effect.high) < SMALL * full.low:
            return Verdict(question, "hardly any use", False, shown)
        if effect.differs():
            return Verdict(question, "it is used", True, shown)
        return Verdict(question, "is not decided", None, shown)

    @property
    def answer(self) -> str:
        """In a sentence."""
        if self.forgotten:
            return f"Nothing is left: no number that later tokens see differs between {self.secrets} secrets."
        if self.clean:
            return f"Nothing is left that later tokens see, but {self.stored} hidden slots still hold the secret."
        said = dict.fromkeys(one.words for one in self.verdicts[1:] if one.left is not None)
        found = f": {'; '.join(said)}" if said else ""
        read = f" Readers read {self.bits:.2f} bits a {best.noun}, of {best.held:.2f}." if (best := self._best) else ""
        return f"Something is left{found}.{read}"

    @property
    def unseen(self) -> tuple[str, ...]:
        """What the certificate cannot rule out, a sentence each."""
        sentences = [
            "Other words than the secret: only what differs between the secrets that were tried is looked at.",
            "The texts that stay: if the secret can be guessed from them, it is still there.",
        ]
        if self.stored:
            sentences.append(
                f"Reading memory: {self.stored} slots are hidden from the model alone and still hold the secret; "
                "evict them."
            )
        if not self.clean:
            sentences += self._unread()
            sentences.append("Other questions to the model than the one that was asked.")
        sentences.append("Copies elsewhere: logs, other caches, a prefix shared with other requests.")
        return tuple(sentences)

    def _unread(self) -> Iterator[str]:
        """Readers that were not tried."""
        readings = (*self.known, *self.from_others)
        tried = " and ".join(dict.fromkeys(SHOWN_READERS[one.reader] for one in readings))
        yield f"Other readers than those that were tried ({tried})." if tried else "Readers: none was tried."
        if readings and all(one.reader == RIDGE for one in readings):
            yield "A secret that no single number shows but several together; give a stronger reader (--reader)."
        if nets := list(dict.fromkeys(one.place for one in self.known if one.reader != RIDGE)):
            yield f"Slots that the stronger reader was not given: it read {nets[0]}."

    @property
    def readings(self) -> Table | None:
        """What each reader made of it, and of what holds nothing; None where none was asked."""
        rows = [
            (
                SHOWN_READERS[one.reader],
                knows,
                one.place,
                *("–" if of is None else percent(of).replace("-", "−") for of in one.shares.values()),
                plain(one.bits).replace("-", "−"),
            )
            for knows, readings in (("this conversation", self.known), ("others", self.from_others))
            for one in readings
        ]
        return ((*_COLUMNS,), rows) if rows else None

    def as_mapping(self) -> dict[str, object]:
        """For JSON."""
        return {
            "model": self.model,
            "way": self.way,
            "hidden": list(self.hidden),
            "secrets": self.secrets,
            "stored": self.stored,
            "bits_per_digit": self.bits,
            "clean": self.clean,
            "forgotten": self.forgotten,
            "readers": [
                {"knows": knows, **one.record()}
                for knows, readings in (("this conversation", self.known), ("other conversations", self.from_others))
                for one in readings
            ],
            "verdicts": [vars(verdict) for verdict in self.verdicts],
            "places": len(self.trace.places),
            "layers": list(self.trace.touched),
            "heads": sorted({place[:3:2] for place in self.trace.places}),
            "unseen": list(self.unseen),
        }

    def __str__(self) -> str:
        answers = (f"  {one.question} {one.words.capitalize()}. {one.sentence}" for one in self.verdicts)
        title = f"{self.way} of {', '.join(self.hidden)}, {self.model}"
        names, rows = self.readings or ((), [])
        beside = [f"  {'; '.join(f'{name} {text}' for name, text in zip(names, row, strict=True))}" for row in rows]
        readers = ["Readers:", *beside] if rows else []
        unseen = ("What this cannot rule out:", *(f"  {sentence}" for sentence in self.unseen))
        return "\n".join([title, self.answer, *answers, *readers, *unseen])

    def _facts(self) -> Iterator[str]:
        yield f"{self.way} of {', '.join(self.hidden)}"
        yield self.model
        yield from dict.fromkeys(one.words for one in self.verdicts)

    def _table(self) -> Table:
        return ("question", "answer", "found"), [(one.question, one.words, one.sentence) for one in self.verdicts]


@checked_arguments
def certify(
    model: Model,
    case: HiddenSecret,
    way: str | Policy | Way,
    cache: KVCache | None = None,
    *,
    ask: str = "",
    lead: str = "",
    others: Sequence[str] = (),
    secrets: Annotated[int, Within(FEWEST_SECRETS)] = 96,
    asked: Annotated[int, Within(FEWEST_SECRETS)] = 16,
    searched: AtLeastZero = 4,
    conversations: AtLeastZero = 0,
    reader: SecretReader = RIDGE,
    seed: AtLeastZero = 0,
) -> Certificate:
    """What is left of a secret in the cache that stays after a conversation forgot it.

    Args:
        way: how it is forgotten: one of `kvprobe.forgetting.WAYS`, a policy or its text, or a function of (model, chat,
            hide) that returns the cache. It is carried out once for every secret.
        cache: that you hold; it must be what the way makes of this conversation.
        ask: the user's next message, which asks for the secret.
        lead: how the answer begins, before the secret; by default the model begins it itself.
        others: secrets that could have been said in its place; by default its digits are drawn anew.
        secrets: how many are tried.
        asked: with how many the model is asked.
        searched: how many are searched for by trying.
        conversations: how many other conversations probes learn from that do not know this one; 0 leaves them out. They
            need 1,500 (several minutes) before they read most of what is in full view.
        reader: that reads beside the ridge, which is on one part of one layer: a ridge on one `slot`, one `hidden`
            layer, `attention` over slots and layers, or a `transformer` over them (minutes; it needs 200 secrets before
            it reads what two slots say only together).

    Raises:
        UserError: the cache is not what the way makes of the conversation, too few secrets take as many tokens, a
            reader that cannot learn from them, or what the way refuses.
    """
    name, act = way_of(way)
    rng = np.random.default_rng(seed)
    tried = case.secrets(model.tokenizer, secrets, rng, others)
    refuse_unreadable(case, tried, reader, conversations)
    own, *again = (forgotten(model, act, case, case.secret) for _ in range(REPEATED))
    if cache is not None:
        _refuse_another(model, cache, own, again, name)
    rest = Bar(tried[1:], desc=f"Forgetting: {name}", unit="secret")
    caches = [own, *(forgotten(model, act, case, secret) for secret in rest)]
    slots = Slots.of(caches)
    trace = trace_of(model, caches, again, slots)
    known = foreign = ()
    found = use = in_view = None
    readers = tuple(dict.fromkeys((RIDGE, reader)))
    if not trace.empty:
        known = known_readings(model, caches, slots, trace, tried, readers, rng)
        if conversations:
            foreign = readings_from_others(model, act, case, caches, tried, conversations, readers, rng)
        if searched:
            found = search(model, act, case, caches, tried, searched, rng)
        if ask:
            full = [forgotten(model, WAYS[NOTHING], case, secret) for secret in tried[:asked]]
            use, in_view = uses(model, caches[:asked], full, tried[:asked], ask, lead)
    return Certificate(
        model.name, name, case.hide, len(tried), stored(caches), trace, known, foreign, found, use, in_view
    )


def _refuse_another(model: Model, cache: KVCache, made: KVCache, again: Sequence[KVCache], way: str) -> None:
    """Refuse a cache that is not what the way makes, to the bit or to what making it again differs by; in slots that
    later tokens do not see, to the bit."""
    if cache.batch != 1 or cache.n_layers != made.n_layers:
        raise UserError(
            f"The cache is no cache of one row of {model.name}; give one that it made of this conversation."
        )
    seen_now = model.as_seen(cache)
    others = cache.slots != made.slots or stored([made, seen_now])
    if others or not trace_of(model, [made, seen_now], again, Slots.of([made, seen_now])).empty:
        raise UserError(
            f"The cache is not what {way!r} makes of this conversation, so a certificate of the way would say nothing "
            "of it; give the way in which it was made."
        )


_COLUMNS = (
    "reader",
    "knows",
    "reads",
    "right",
    "all of them",
    "after a restart",
    "dealt out at random",
    "with everything in view",
    "bits each",
)


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' * (count != 1)}"
