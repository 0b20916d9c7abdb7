"""Ways to a right answer, and what each costs: mending in one conversation, in new ones, or building from a step."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from kvprobe.studies.code_poisoning.answers import NOTHING, Answer, judged_all
from kvprobe.studies.code_poisoning.coder import Coder, CodeReply
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
        anew: whether what fails is reported in a new conversation.
        talk: of the conversation so far.
        read, generated: tokens, each counted once where the cache is kept.
        longest: slots of the longest conversation.
    """

    function: Function
    asked: str
    anew: bool = False
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


def routes(coder: Coder, tasks: Sequence[CodeTask], rounds: int) -> dict[str, list[Journey]]:
    """Each task by each route; what several begin with is answered once.

    `single`: one answer. `loop`: what fails is reported up to `rounds` times in the same conversation. `restarts`: in
    a new one each time. `steps`: a first function is written so, and then the whole with it given.
    """
    first = [Journey(task.whole, task.whole.question) for task in tasks]
    built = [Journey(task.step, task.step.question, anew=True) for task in tasks]
    ask(coder, [*first, *built])
    loops, restarts = ([replace(journey, anew=anew) for journey in first] for anew in (False, True))
    mend(coder, [*loops, *restarts, *built], rounds)
    for task, journey in zip(tasks, built, strict=True):
        journey.helper = journey.answer.code
        given = f"You may use this function:\n```python\n{journey.helper}\n```\n\n" if journey.helper else ""
        journey.function, journey.asked = task.whole, given + task.whole.question
    ask(coder, built)
    mend(coder, built, rounds)
    return dict(zip(ROUTES, (first, loops, restarts, built), strict=True))


def ask(coder: Coder, journeys: Sequence[Journey]) -> None:
    """Ask for each function in a new conversation."""
    for journey in journeys:
        journey.say(journey.asked, anew=True)
    _answered(coder, journeys)


def mend(coder: Coder, journeys: Sequence[Journey], rounds: int) -> None:
    """Report what fails, up to so many times."""
    for _ in range(rounds):
        wrong = [journey for journey in journeys if not journey.answer.right]
        for journey in wrong:
            if journey.anew:
                warning = warned(journey.function, journey.answer)
                journey.say(journey.asked.replace(journey.function.question, warning), anew=True)
            else:
                report = reported(journey.function, journey.answer)
                journey.say(f"{report} Fix the function. {FORM}", anew=False)
        _answered(coder, wrong)


def _answered(coder: Coder, journeys: Sequence[Journey]) -> None:
    replies = coder.replies([coder.asked(journey.function, *journey.talk) for journey in journeys])
    asked = [(journey.function, reply.text) for journey, reply in zip(journeys, replies, strict=True)]
    answers = judged_all(asked, [journey.helper for journey in journeys])
    for journey, reply, answer in zip(journeys, replies, answers, strict=True):
        journey.took(reply, answer)
