"""What kvprobe knows by name: its studies, presets, models and published probes."""

from collections.abc import Iterator, Mapping
from typing import Any

from kvprobe.durations import Duration, durations
from kvprobe.experiments.settings import digest_of, from_mapping
from kvprobe.extensions import extensions, package
from kvprobe.files import read_yaml
from kvprobe.models.catalogue import NAMED_MODELS
from kvprobe.presets import Preset, presets
from kvprobe.shipped import shipped
from kvprobe.studies import STUDIES


def known() -> dict[str, list[dict[str, Any]]]:
    """All of it as plain data, by kind."""
    return {
        "studies": [
            *({"name": study.name, "question": study.question} for study in STUDIES.values()),
            *({"name": name, "question": f"(of {package(point)})"} for name, point in extensions("studies").items()),
        ],
        "presets": [
            {
                "name": preset.name,
                "study": preset.study,
                "settings": dict(preset.settings),
                "took": (took := durations().get(digest_of_preset(preset))) and took.record(),
            }
            for preset in presets().values()
        ],
        "models": [
            {"name": name, "title": model.title, "licence": model.licence, "megabytes": model.size}
            for name, model in NAMED_MODELS.items()
        ],
        "probes": [
            {"name": card.parent.name, "reads": read_yaml(card)["training"]["what"]}
            for card in sorted(shipped("probes").glob("*/card.yaml"))
        ],
    }


def digest_of_preset(preset: Preset) -> str:
    """Of all its settings, the study's defaults among them; by it `durations` know what was measured."""
    return digest_of(preset.study, from_mapping(STUDIES[preset.study].config, preset.settings))


def lines(entries: Mapping[str, list[dict[str, Any]]]) -> Iterator[str]:
    """The same for people."""
    yield "studies"
    yield from _columns({study["name"]: study["question"] for study in entries["studies"]})
    yield "\npresets (kvprobe run NAME)"
    yield from _columns({preset["name"]: _described(preset) for preset in entries["presets"]})
    yield "\nmodels (or any hub id, local folder or .gguf file)"
    yield from _columns(
        {model["name"]: f"{model['title']}; {model['licence']}; {model['megabytes']} MB" for model in entries["models"]}
    )
    yield "\npublished probes (kvprobe scan, kv.Probe.load)"
    yield from _columns({probe["name"]: probe["reads"] for probe in entries["probes"]})


def _columns(texts: Mapping[str, str]) -> Iterator[str]:
    """A line for each name, its text in a second column."""
    width = max(map(len, texts), default=0)
    return (f"  {name:{width}}  {text}" for name, text in texts.items())


def _described(preset: Mapping[str, Any]) -> str:
    took = Duration.from_record(preset["took"]) if preset["took"] else "not measured"
    settings = ", ".join(f"{key}={value}" for key, value in preset["settings"].items()) or "defaults"
    return f"{preset['study']}: {settings}; {took}"
