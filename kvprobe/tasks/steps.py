"""Sums worked step by step: three registers, a list of operations, and an answer that states each result.

    user:       a 3 b 7 c 1 : a + 4 b - 9 a + 5 solve
    assistant:  a 3 + 4 = 7 ok b 7 - 9 = 8 ok a 7 + 5 = 2 ok

All values are digits, modulo 10. A step states the register's value before the operation and after it. So an error is
either made at a step, which does not follow from what was stated before, or handed on by it, if it follows from a wrong
value. A remark ends each step: `ok`, or `wait`, which takes back the last steps, so that they are stated again:

    assistant:  a 3 + 4 = 6 wait a 3 + 4 = 7 ok

A user may also hand over a draft, which is the first steps, and ask to `continue` or to `review` it; or write an
erratum: `note`, a step, `continue`. An answer that goes on from a wrong draft begins with `wait`.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from kvprobe.errors import UserError

REGISTERS = ("a", "b", "c")
COMMANDS = ("solve", "continue", "review", "note")
REMARKS = ("ok", "wait")
BASE = 10
"""Values are the digits below it."""
LONGEST = 8
"""Operations of a problem that the models `steps` were trained on."""

Sign = Literal["+", "-"]

_STEP = re.compile(r"(?:\s*(?:ok|wait)\b)*\s*([abc]) (\d) ([+-]) (\d) = (\d)(?!\S)")


@dataclass(frozen=True)
class Operation:
    """Add a digit to a register, or take it away."""

    register: str
    sign: Sign
    amount: int

    def __str__(self) -> str:
        return f"{self.register} {self.sign} {self.amount}"

    def of(self, value: int) -> int:
        """The register's value after it."""
        return (value + (self.amount if self.sign == "+" else -self.amount)) % BASE


@dataclass(frozen=True)
class Step:
    """What a text states of one operation: the register's value before it and after it."""

    operation: Operation
    before: int
    after: int

    def __str__(self) -> str:
        done = self.operation
        return f"{done.register} {self.before} {done.sign} {done.amount} = {self.after}"

    @property
    def adds_up(self) -> bool:
        """Whether the value after follows from the one before."""
        return self.after == self.operation.of(self.before)

    @property
    def within(self) -> bool:
        """Whether the result does not pass 9 or 0."""
        return 0 <= self.before + self.operation.amount * (1 if self.operation.sign == "+" else -1) < BASE


@dataclass(frozen=True)
class Problem:
    """What the user asks.

    Attributes:
        starts: the value of each register before the first operation.
    """

    starts: tuple[int, ...]
    operations: tuple[Operation, ...]

    def __post_init__(self) -> None:
        if len(self.starts) != len(REGISTERS) or not all(0 <= value < BASE for value in self.starts):
            raise UserError(f"A problem starts from {len(REGISTERS)} digits, one for each register; got {self.starts}.")
        for operation in self.operations:
            known = operation.register in REGISTERS and operation.sign in "+-" and 0 <= operation.amount < BASE
            if not known:
                raise UserError(f"{operation} is no operation; write a register of {REGISTERS}, + or -, and a digit.")
        if not self.operations:
            raise UserError("A problem has no operation; give at least one.")

    @property
    def question(self) -> str:
        """The registers and the operations, without a command."""
        starts = " ".join(f"{register} {value}" for register, value in zip(REGISTERS, self.starts, strict=True))
        return f"{starts} : {' '.join(map(str, self.operations))}"

    def steps(self, wrong: Mapping[int, int] | None = None) -> tuple[Step, ...]:
        """Every step as a text states it that works on from its own values.

        Args:
            wrong: what it states instead at some steps, by number from 0.

        Raises:
            UserError: there is no such step, or the value is no digit.
        """
        for number, value in (wrong or {}).items():
            if not 0 <= number < len(self.operations) or not 0 <= value < BASE:
                raise UserError(
                    f"Step {number} cannot state {value}; there are steps 0 to {len(self.operations) - 1} and digits."
                )
        values: dict[str, int] = dict(zip(REGISTERS, self.starts, strict=True))
        steps: list[Step] = []
        for number, operation in enumerate(self.operations):
            before = values[operation.register]
            after = values[operation.register] = (wrong or {}).get(number, operation.of(before))
            steps.append(Step(operation, before, after))
        return tuple(steps)


def text_of(steps: Iterable[Step]) -> str:
    """Steps as text, each with the remark `ok`."""
    return " ".join(f"{step} ok" for step in steps)


def read_steps(text: str) -> tuple[Step, ...]:
    """The steps that a text states, up to the first other words; remarks between them are passed over."""
    steps: list[Step] = []
    end = 0
    while match := _STEP.match(text, end):
        register, before, sign, amount, after = match.groups()
        operation = Operation(register, "+" if sign == "+" else "-", int(amount))
        steps.append(Step(operation, int(before), int(after)))
        end = match.end()
    return tuple(steps)


def draw_problem(count: int, rng: np.random.Generator) -> Problem:
    """A random problem of so many operations."""
    starts, amounts = rng.integers(BASE, size=len(REGISTERS)), rng.integers(BASE, size=count)
    registers, added = rng.integers(len(REGISTERS), size=count), rng.random(count) < 0.5
    operations = (
        Operation(REGISTERS[register], "+" if plus else "-", amount)
        for register, plus, amount in zip(registers.tolist(), added.tolist(), amounts.tolist(), strict=True)
    )
    return Problem(tuple(starts.tolist()), tuple(operations))


def draw_wrong(value: int, rng: np.random.Generator) -> int:
    """Another digit."""
    return int((value + rng.integers(1, BASE)) % BASE)


def vocabulary() -> tuple[str, ...]:
    """Every word of every conversation, after the control tokens; a word's id is its index here."""
    roles = ("<user>", "<assistant>", "<end>")
    return ("<unk>", "<bos>", *roles, *REGISTERS, "+", "-", "=", ":", *map(str, range(BASE)), *COMMANDS, *REMARKS)


# ---- a slip early on


@dataclass(frozen=True)
class Slip:
    """An answer whose third step states a wrong value. Steps on other registers follow, which are the same whether it
    slipped or not, and then a step that starts from the value.

    Attributes:
        wrong: the value that the third step states instead.
        harmless: the problem with another third operation, after which that value is right.
    """

    problem: Problem
    wrong: int
    harmless: Problem

    @property
    def right(self) -> int:
        return self.problem.steps()[SLIPPED].after

    def stating(self, wrong: int) -> "Slip":
        """The same problem with another wrong value; the harmless change adds or takes away what leads to it."""
        step = self.problem.steps()[SLIPPED]
        amount = wrong - step.before
        other = replace(step.operation, sign="+" if amount >= 0 else "-", amount=abs(amount))
        operations = (*self.problem.operations[:SLIPPED], other, *self.problem.operations[SLIPPED + 1 :])
        return Slip(self.problem, wrong, replace(self.problem, operations=operations))

    @property
    def drafts(self) -> "dict[Draft, tuple[Problem, tuple[Step, ...]]]":
        """The question and the first three steps: as they should be, with the slip, and where the value is right."""
        slipped = self.problem.steps({SLIPPED: self.wrong})
        return {
            "sound": (self.problem, self.problem.steps()[: SLIPPED + 1]),
            "slip": (self.problem, slipped[: SLIPPED + 1]),
            "harmless": (self.harmless, self.harmless.steps()[: SLIPPED + 1]),
        }

    @property
    def later(self) -> tuple[Step, ...]:
        """The steps on other registers."""
        return self.problem.steps()[SLIPPED + 1 : -1]


Draft = Literal["sound", "slip", "harmless"]
SLIPPED = 2
"""The number of the step with the wrong value, from 0."""
LATER = 3


def draw_slip(rng: np.random.Generator, wraps: bool = True) -> Slip:
    """A random one.

    Args:
        wraps: whether values may pass 9 or 0.
    """
    while True:
        slipped, *others = rng.permutation(REGISTERS).tolist()
        before = rng.choice(REGISTERS, SLIPPED).tolist()
        registers = [*before, slipped, *rng.choice(others, LATER).tolist(), slipped]
        problem = on_registers(registers, draw_problem(len(registers), rng))
        steps = problem.steps()
        operation, start = problem.operations[SLIPPED], steps[SLIPPED].before
        amount = int(rng.integers(1, BASE))
        other = replace(operation, amount=amount)
        operations = (*problem.operations[:SLIPPED], other, *problem.operations[SLIPPED + 1 :])
        harmless = Problem(problem.starts, operations)
        within = all(step.within for step in (*steps, *harmless.steps()))
        if operation.amount not in (0, amount) and (wraps or within):
            return Slip(problem, other.of(start), harmless)


def on_registers(registers: Sequence[str], problem: Problem) -> Problem:
    """The problem with its operations on these registers."""
    operations = zip(registers, problem.operations, strict=True)
    return replace(problem, operations=tuple(replace(done, register=register) for register, done in operations))
