"""Ways to a right answer, and what each costs: mending in one conversation, in new ones, or building from a step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvprobe.studies.code_poisoning.answers import NOTHING, Answer, judged_all
from kvprobe.studies.code_poisoning.coder import Coder, CodeReply, Prompt
from kvprobe.studies.code_poisoning.drafts import reported, warned
from kvprobe.studies.code_poisoning.tasks import FORM, CodeTask, Function

ROUTES = ("single", "loop", "restarts", "steps")


@dataclass
class Journey:
    """One task on its way.

    Attributes:
        function: that is asked for now.
        helper: code that stands before it.
        asked: the message that asks for it.
        talk: of the conversation so far.
        read, generated: tokens, each counted once where the cache is kept.
        longest: slots of the longest conversation.
    """

    function: Function
    asked: str
    helper: str = ""
    talk: tuple[str, ...] = ()
    answer: Answer = NOTHING
    read: int = 0
    generated: int = 0
    longest: int = 0
    seconds: float = 0.0
    slot_bytes: int = 0
    kept: int = field(default=0, repr=False)

    def took(self, reply: CodeReply, answer: Answer) -> None:
        """An answer came."""
        slots = reply.read + reply.generated
        self.read += reply.read - self.kept
        self.generated += reply.generated
        self.longest, self.seconds = max(self.longest, slots), self.seconds + reply.seconds
        self.talk, self.answer, self.slot_bytes = (*self.talk, reply.text), answer, reply.slot_bytes
        self.kept = slots

    def say(self, text: str, *, anew: bool) -> None:
        """The next message, in the same conversation or a new one."""
        self.talk, self.kept = ((), 0) if anew else (self.talk, self.kept)
        self.talk = (*self.talk, text)

    def prompt(self, coder: Coder) -> Prompt:
        return coder.asked(self.function, *self.talk)


def travel(coder: Coder, journeys: Sequence[Journey], rounds: int, *, anew: bool) -> None:
    """Ask for each function, and up to `rounds` times again with what fails.

    Args:
        anew: whether each time in a new conversation.
    """
    for journey in journeys:
        journey.say(journey.asked, anew=True)
    under_way = list(journeys)
    for left in range(rounds, -1, -1):
        replies = coder.replies([journey.prompt(coder) for journey in under_way])
        asked = [(journey.function, reply.text) for journey, reply in zip(under_way, replies, strict=True)]
        answers = judged_all(asked, [journey.helper for journey in under_way])
        for journey, reply, answer in zip(under_way, replies, answers, strict=True):
            journey.took(reply, answer)
        under_way = [journey for journey in under_way if not journey.answer.right]
        if not (left and under_way):
            return
        for journey in under_way:
            journey.say(_again(journey, anew), anew=anew)


def _again(journey: Journey, anew: bool) -> str:
    report = reported(journey.function, journey.answer)
    if not anew:
        return f"{report} Fix the function. {FORM}"
    return journey.asked.replace(journey.function.question, warned(journey.function, journey.answer))


def single(coder: Coder, tasks: Sequence[CodeTask], rounds: int) -> list[Journey]:
    return _mended(coder, tasks, 0, anew=False)


def loop(coder: Coder, tasks: Sequence[CodeTask], rounds: int) -> list[Journey]:
    return _mended(coder, tasks, rounds, anew=False)


def restarts(coder: Coder, tasks: Sequence[CodeTask], rounds: int) -> list[Journey]:
    return _mended(coder, tasks, rounds, anew=True)


def steps(coder: Coder, tasks: Sequence[CodeTask], rounds: int) -> list[Journey]:
    """A first function is written and tested in a conversation of its own, and the whole with it in another."""
    journeys = [Journey(task.step, task.step.question) for task in tasks]
    travel(coder, journeys, rounds, anew=True)
    for task, journey in zip(tasks, journeys, strict=True):
        journey.helper = journey.answer.code
        given = f"You may use this function:\n```python\n{journey.helper}\n```\n\n" if journey.helper else ""
        journey.function, journey.asked = task.whole, given + task.whole.question
    travel(coder, journeys, rounds, anew=True)
    return journeys


def _mended(coder: Coder, tasks: Sequence[CodeTask], rounds: int, *, anew: bool) -> list[Journey]:
    journeys = [Journey(task.whole, task.whole.question) for task in tasks]
    travel(coder, journeys, rounds, anew=anew)
    return journeys


WAYS: dict[str, Callable[[Coder, Sequence[CodeTask], int], list[Journey]]] = dict(
    zip(ROUTES, (single, loop, restarts, steps), strict=True)
)
