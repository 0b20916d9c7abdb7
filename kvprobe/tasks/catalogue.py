"""Tasks by name: those that ship with kvprobe, and files of the user."""

from pathlib import Path

from kvprobe.errors import UserError
from kvprobe.names import unknown
from kvprobe.tasks.gsm8k import GSM8K
from kvprobe.tasks.jsonl import JSONLines
from kvprobe.tasks.needle import Needle
from kvprobe.tasks.recite import Recite
from kvprobe.tasks.retrieve import Retrieve
from kvprobe.tasks.task import Task


def shipped_tasks() -> dict[str, Task]:
    """The tasks that ship with kvprobe."""
    tasks: tuple[Task, ...] = (Recite(), Retrieve(), Needle(), GSM8K())
    return {task.name: task for task in tasks}


def find_task(name: str) -> Task:
    """The task of this name; `gsm8k:FILE.jsonl` reads GSM8K from a local file, and `FILE.jsonl` is a file of the user.

    Raises:
        UserError: there is no such task or file, or the file is malformed.
    """
    tasks = shipped_tasks()
    kind, _, file = name.partition(":")
    if name in tasks:
        return tasks[name]
    if kind == "gsm8k":
        return GSM8K(Path(file))
    if name.endswith(".jsonl"):
        return JSONLines(Path(name))
    raise UserError(unknown("task, .jsonl file of prompts and answers, or gsm8k:FILE.jsonl", name, tasks))
