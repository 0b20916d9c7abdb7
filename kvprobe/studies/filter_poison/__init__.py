"""Which attention blocks, MLPs and heads pass damage on, and which keep it away?"""

from dataclasses import dataclass

from kvprobe.errors import UserError
from kvprobe.experiments.settings import Settings, ranged
from kvprobe.studies import STUDIES
from kvprobe.studies.settings import FACT_KINDS, FACTS_OF_A_KIND, FactKind

FALSE = "false"
"""The family in which nothing of the cache is broken, but what was said in it is not so."""


@dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """Settings of the filter-poison study.

    Attributes:
        kinds: of conversations, by the fact that is asked for.
        prompts: conversations of each kind.
        families: faults by the names of the robustness study, each with the percentage of slots that it strikes after a
            colon, as in zeros:30; and false, another fact in the place of the true one (in YAML with quotes).
        suffix: last tokens before the answer that are read after the damage, and over which KL is averaged.
        top: heads of each sort, found on one half of the conversations, that are restored together on the other.
        random: sets of heads of the same layers to compare them with.
        seed: of random draws, halves, and random heads.
    """

    kinds: tuple[FactKind, ...] = FACT_KINDS
    prompts: int = ranged(4, 1, FACTS_OF_A_KIND)
    families: tuple[str, ...] = (
        "gaussian:1",
        "zeros:30",
        "distractor:50",
        "permuted-keys:50",
        "shifted:100",
        FALSE,
    )
    suffix: int = ranged(6, 1, 16)
    top: int = ranged(10, 1)
    random: int = ranged(20, 2)

    def validate(self) -> None:
        rates = self.rates
        if len(rates) < len(self.families):
            raise UserError(
                f"Setting 'families' is {', '.join(self.families)}, which names a fault twice; name each once."
            )
        if len(rates) < 2:
            raise UserError(f"Setting 'families' is {self.families[0]!r}; expected two or more, which a verdict needs.")

    @property
    def rates(self) -> dict[str, float]:
        """The percentage of slots that each family strikes, by its name; 100 where the fact is another."""
        return dict(map(_family, self.families))


def _family(text: str) -> tuple[str, float]:
    """The name of a family, and the percentage of slots that it strikes."""
    if text == FALSE:
        return FALSE, 100.0
    name, _, rate = text.partition(":")
    try:
        percent = float(rate)
    except ValueError:
        percent = -1.0
    if not 0 < percent <= 100 or name == FALSE:
        raise UserError(
            f"Setting 'families' has {text!r}; expected false, or a fault and a percentage above 0, up to 100, as in "
            f"zeros:30."
        )
    return name, percent


run = STUDIES["filter_poison"].run
