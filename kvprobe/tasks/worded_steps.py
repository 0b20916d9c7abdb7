"""How sums worked step by step are put to a model: in the words of the models `steps`, or in English."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from kvprobe.errors import UserError
from kvprobe.tasks.steps import (
    REGISTERS,
    SLIPPED,
    Draft,
    Operation,
    Problem,
    Slip,
    Step,
    read_steps,
    text_of,
    vocabulary,
)
from kvprobe.text.tokens import Tokens
from kvprobe.text.turns import Turns, as_long

ROLES = ("register", "before", "sign", "amount", "=", "after", "remark")
"""Of the words of a step."""
EARLIER, STEP, LATER_STEPS = "earlier", "step", "later"
"""Segments of an answer: the first steps, the one that may be wrong, and those that do not depend on it."""

Order = Literal["continue", "review"]
ORDERS: Mapping[Order, str] = {
    "continue": "Go on from there with the steps that are left, one line each.",
    "review": "Check these steps. Then write every step of the whole task again, without mistakes, one line each.",
}
_LINE = re.compile(r"([abc]): (\d) (plus|minus) (\d) is (\d)(?!\d)")


class Wording(Turns):
    """Sums in the words that a model knows."""

    def __init__(self, tokenizer: Any, name: str) -> None:
        super().__init__(tokenizer, name)
        self.words = set(tokenizer.get_vocab()) == set(vocabulary())

    # ---- texts

    def question(self, problem: Problem) -> str:
        return f"{problem.question} solve" if self.words else question_in_english(problem)

    def handed(self, problem: Problem, steps: Sequence[Step], order: Order) -> str:
        """What a user says who hands over the first steps."""
        if self.words:
            return f"{problem.question} {text_of(steps)} {order}"
        return f"{question_in_english(problem)}\n\nThe steps so far:\n{in_english(steps)}\n{ORDERS[order]}"

    def order(self, order: Order) -> str:
        """What a user says after an answer that was not finished."""
        return order if self.words else ORDERS[order]

    def erratum(self, step: Step) -> str:
        """What a user says who corrects a step."""
        if self.words:
            return f"note {step} continue"
        return f"One line is wrong; it should be: {in_english([step]).strip()} {ORDERS['continue']}"

    def steps(self, steps: Sequence[Step]) -> str:
        """Steps within an answer."""
        return f" {text_of(steps)}" if self.words else in_english(steps)

    def stated(self, steps: Sequence[Step]) -> str:
        """Steps up to the last value, on which no remark was given yet."""
        return self.steps(steps).removesuffix(" ok" if self.words else ".\n")

    def taken_back(self, steps: Sequence[Step]) -> str:
        """Steps, the last of them followed by "wait"."""
        return f"{self.stated(steps)} wait" if self.words else f"{in_english(steps)}Wait,"

    def read(self, text: str) -> tuple[Step, ...]:
        """The steps that an answer states."""
        if self.words:
            return read_steps(text)
        lines = (match.groups() for match in _LINE.finditer(text))
        return tuple(
            Step(Operation(register, "+" if sign == "plus" else "-", int(amount)), int(before), int(after))
            for register, before, sign, amount, after in lines
        )

    def place(self, number: int) -> str:
        """What a token of an answer is, by its number; the same in all problems."""
        return f"{number} {ROLES[number % len(ROLES)]}" if self.words else str(number)

    # ---- tokens

    def drafts(self, slip: Slip) -> Mapping[Draft, Tokens]:
        """The question and the first steps of each draft, in the segments `EARLIER` and `STEP`.

        Raises:
            UserError: they have different numbers of tokens, so that what follows stands at other positions.
        """
        drafts: dict[Draft, Tokens] = {}
        for name, (problem, steps) in slip.drafts.items():
            tokens = self.chat(self.question(problem))
            for segment, part in ((EARLIER, steps[:SLIPPED]), (STEP, steps[SLIPPED:])):
                tokens += self.after(tokens, segment, self.steps(part))
            drafts[name] = tokens
        return as_long(drafts)

    def suffix(self, slip: Slip, before: Tokens) -> tuple[Tokens, int, int]:
        """The later steps and the beginning of the last one, up to where it states the value that it starts from; and
        the tokens of the right value and the wrong one.

        Raises:
            UserError: the tokenizer has no single tokens for digits.
        """
        register = slip.problem.operations[-1].register
        text = self.steps(slip.later) + (f" {register}" if self.words else f"{register}:")
        right, wrong = (self.ids(f"{text} {value}") for value in (slip.right, slip.wrong))
        if len(right) != len(wrong) or right[:-1] != wrong[:-1]:
            raise UserError("This tokenizer does not give digits tokens of their own, which the problems need.")
        return Tokens.of(right[:-1], LATER_STEPS, before.following), right[-1], wrong[-1]


def question_in_english(problem: Problem) -> str:
    """What `Problem.question` says, for a language model."""
    starts = ", ".join(f"{register} is {value}" for register, value in zip(REGISTERS, problem.starts, strict=True))
    done = "; ".join(
        f"add {operation.amount} to {operation.register}"
        if operation.sign == "+"
        else f"take {operation.amount} from {operation.register}"
        for operation in problem.operations
    )
    return f'At first {starts}. Then {done}. Work out every step in order, one line each, like "x: 1 plus 2 is 3."'


def in_english(steps: Sequence[Step]) -> str:
    """Steps as lines of text, for a language model."""
    return "".join(
        f"{step.operation.register}: {step.before} {'plus' if step.operation.sign == '+' else 'minus'} "
        f"{step.operation.amount} is {step.after}.\n"
        for step in steps
    )
