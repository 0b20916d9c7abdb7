"""What kvprobe knows by name, kind by kind: in short, all of one kind, and as plain data."""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from itertools import groupby
from pathlib import Path
from textwrap import wrap
from typing import Any

from kvprobe.durations import Duration, durations
from kvprobe.errors import UserError
from kvprobe.experiments.settings import digest_of, from_mapping
from kvprobe.extensions import extensions, package
from kvprobe.files import read_yaml
from kvprobe.models.catalogue import NAMED_MODELS
from kvprobe.names import unknown
from kvprobe.presets import Preset, presets
from kvprobe.shipped import shipped
from kvprobe.studies import STUDIES

Entries = list[dict[str, Any]]
WIDTH, SCREEN = 100, 24
"""Characters of a line, and lines of a list, at most."""


@dataclass(frozen=True)
class NameKind:
    """One kind of what has names.

    Attributes:
        use: what the names are good for.
        entries: each with its `name`, in a mapping that JSON can hold.
        about: what a line describes it by.
    """

    use: str
    entries: Callable[[], Entries]
    about: Callable[[Mapping[str, Any]], str]


def _studies() -> Entries:
    added = ({"name": name, "question": f"(of {package(point)})"} for name, point in extensions("studies").items())
    return [*({"name": study.name, "question": study.question} for study in STUDIES.values()), *added]


def _presets() -> Entries:
    return [
        {
            "name": preset.name,
            "study": preset.study,
            "settings": dict(preset.settings),
            "took": (took := durations().get(digest_of_preset(preset))) and took.record(),
        }
        for preset in presets().values()
    ]


def _models() -> Entries:
    return [
        {"name": name, "title": model.title, "licence": model.licence, "megabytes": model.size}
        for name, model in NAMED_MODELS.items()
    ]


def _probes() -> Entries:
    cards = sorted(shipped("probes").glob("*/card.yaml"))
    return [{"name": card.parent.name, "reads": read_yaml(card)["training"]["what"]} for card in cards]


def _policies() -> Entries:
    from kvprobe.policies.written import kinds

    def settings(kind: Any) -> str:
        own = (field for field in fields(kind) if field.init and not field.kw_only)
        return ", ".join(field.name if field.default is MISSING else f"{field.name}={field.default}" for field in own)

    return [
        {"name": name, "settings": settings(kind), "about": _first_sentence(inspect.getdoc(kind) or "")}
        for name, kind in kinds().items()
    ]


def _faults() -> Entries:
    from kvprobe.faults.catalogue import CATALOGUE

    return [{"name": name, "holds": fault.content} for name, fault in CATALOGUE.items()]


def _zoo() -> Entries:
    from kvprobe.detection.reports import REPORTS

    return [{"name": name, **vars(report)} for name, report in REPORTS.items()]


def _tasks() -> Entries:
    from kvprobe.tasks.catalogue import shipped_tasks

    named = [(name, inspect.getdoc(type(task)) or "") for name, task in shipped_tasks().items()]
    files = ("FILE.jsonl", "Your own prompts and answers: see `kvprobe.tasks.jsonl`.")
    return [{"name": name, "about": _first_sentence(about)} for name, about in (*named, files)]


def _engines() -> Entries:
    from kvprobe.engines.formats import FORMATS, installed

    return [
        {"name": kind.name, **vars(kind), "packages": list(kind.packages), "installed": installed(kind.packages)}
        for kind in FORMATS
    ]


def _engine(kind: Mapping[str, Any]) -> str:
    here = f"; {kind['installed'] or 'not installed: ' + kind['install']}" if kind["packages"] else ""
    return f"{kind['content']}{here}; written by {kind['written_by']}"


def runs_in(root: Path) -> Entries:
    """The runs in a folder."""
    folders = sorted(path.parent for path in root.glob("*/config.yaml"))
    return [
        {
            "name": str(folder),
            "study": str(read_yaml(folder / "config.yaml").get("study")),
            "finished": (folder / "metrics.json").is_file(),
        }
        for folder in folders
    ]


def _took(preset: Mapping[str, Any]) -> str:
    took = Duration.from_record(preset["took"]) if preset["took"] else "not measured"
    settings = ", ".join(f"{key}={value}" for key, value in preset["settings"].items()) or "defaults"
    return f"{preset['study']}; {took}; {settings}"


KINDS = {
    "studies": NameKind("kvprobe run NAME", _studies, lambda study: study["question"]),
    "presets": NameKind("studies with settings: kvprobe run NAME", _presets, _took),
    "models": NameKind(
        "or any hub id, local folder or .gguf file",
        _models,
        lambda model: f"{model['title']}; {model['licence']}; {model['megabytes']} MB",
    ),
    "probes": NameKind("kvprobe scan, kv.Probe.load", _probes, lambda probe: probe["reads"]),
    "policies": NameKind(
        'as text: "SnapKV(50%)", "SinkWindow(4, 252) | Quantise(4)"',
        _policies,
        lambda policy: f"({policy['settings']}) {policy['about']}",
    ),
    "faults": NameKind("kvprobe run robustness --faults NAME", _faults, lambda fault: fault["holds"]),
    "zoo": NameKind(
        "real cache bugs: kvprobe.detection.zoo.plant(NAME, cache)",
        _zoo,
        lambda bug: f"{bug['kind']}{' (benign)' if bug['benign'] else ''}; {bug['address']}; {bug['happened']}",
    ),
    "engines": NameKind("formats of caches: kv.open_cache(FILE)", _engines, _engine),
    "tasks": NameKind("kvprobe run robustness --tasks NAME", _tasks, lambda task: task["about"]),
    "runs": NameKind(
        "kvprobe report NAME",
        lambda: runs_in(Path("runs")),
        lambda run: f"{run['study']}, {'finished' if run['finished'] else 'unfinished'}",
    ),
}
LIGHT = ("studies", "presets", "models", "probes", "runs")
"""Kinds that are listed without importing torch."""


def known(kinds: Sequence[str] = tuple(KINDS), word: str = "", root: Path = Path("runs")) -> dict[str, Entries]:
    """The names of these kinds that have a word in them, as plain data.

    Raises:
        UserError: there is no such kind; the near match is named.
    """
    for kind in kinds:
        if kind not in KINDS:
            raise UserError(unknown("kind of names", kind, KINDS))
    entries = {kind: runs_in(root) if kind == "runs" else KINDS[kind].entries() for kind in kinds}
    return {kind: [entry for entry in listed if word in entry["name"]] for kind, listed in entries.items()}


def digest_of_preset(preset: Preset) -> str:
    """Of all its settings, the study's defaults among them; by it `durations` know what was measured."""
    return digest_of(preset.study, from_mapping(STUDIES[preset.study].config, preset.settings))


def overview() -> Iterator[str]:
    """Every kind in two lines."""
    for kind in KINDS:
        yield f"{f'kvprobe ls {kind}':22}{KINDS[kind].use}"
        if kind in LIGHT and (names := [entry["name"] for entry in KINDS[kind].entries()]):
            yield _cut(f"{'':22}{len(names)}: {', '.join(names)}")
    yield "\nA second word chooses by name (kvprobe ls presets gemma); --json prints all that is known."


def _numbers_together(entries: Entries) -> Entries:
    """Entries whose names differ in numbers alone, as one."""
    together: Entries = []
    for _, alike in groupby(entries, lambda entry: re.sub(r"(?<=-)\d+(?=-|$)", "#", entry["name"])):
        first, *others = alike
        own = first["name"].split("-")
        names = [entry["name"].split("-") for entry in others]
        differ = [place for place, part in enumerate(own) if any(name[place] != part for name in names)]
        endings = ["-".join(name[place] for place in differ) for name in names]
        name = ", ".join([first["name"], *endings])
        several = f"{first['name']} and {len(others)} like it"
        together.append({**first, "name": name if len(name) <= len(several) else several})
    return together


def lines(kind: str, entries: Entries) -> Iterator[str]:
    """All of one kind, a line each; one alone is written out, and many presets stand by the beginning of their name."""
    if kind == "presets" and len(entries) > SCREEN:
        line = ""
        for first, those in groupby(sorted(entries, key=_beginning), _beginning):
            names = f"{first}: {' '.join(entry['name'].removeprefix(first) or first for entry in those)}"
            if line and len(f"{line} | {names}") > WIDTH:
                yield line
                line = ""
            *whole, line = wrap(
                f"{line} | {names}" if line else names, WIDTH, subsequent_indent="  ", break_on_hyphens=False
            )
            yield from whole
        yield line
        yield "\nkvprobe run FIRST-ENDING runs one; kvprobe ls presets FIRST: what each sets and how long it takes."
        return
    if kind == "models" and len(entries) > SCREEN:
        entries = _numbers_together(entries)
    width = max((len(entry["name"]) for entry in entries), default=0)
    for entry in entries:
        line = f"{entry['name']:{width}}  {KINDS[kind].about(entry)}"
        yield line if len(entries) == 1 else _cut(line)
    if not entries:
        yield f"There are no {kind} of such a name here."


def _beginning(preset: Mapping[str, Any]) -> str:
    """The study, or what a name has in its place."""
    name, study = preset["name"], preset["study"]
    return study if name.startswith(study) else name.partition("-")[0]


def _cut(line: str) -> str:
    return line if len(line) <= WIDTH else f"{line[: WIDTH - 1]}…"


def _first_sentence(text: str) -> str:
    return " ".join(text.split()).partition(". ")[0].rstrip(".") + "."
