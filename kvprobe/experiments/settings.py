"""One dataclass is the Python API, the YAML schema and the command-line flags of a study."""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from kvprobe.checks import require
from kvprobe.errors import UserError
from kvprobe.files import expanded
from kvprobe.models.catalogue import Dtype, Quantization, Spread
from kvprobe.names import unknown
from kvprobe.plain_data import Limits, filled
from kvprobe.units import shares_in

LIMITS = Limits(text=4096, entries=1000)
"""Of one setting: characters of a text, and values of a list."""
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]{0,99}")
PLACED = ("device_map", "max_memory", "offload_folder", "quantization", "chunk")
"""Settings of how the model is loaded and reads. They are written down where they say something, so that the many runs
of which they say nothing keep their digest."""
LAST = ("seed", "device", "dtype", *PLACED)
"""Settings of every study that come after the study's own where settings are listed."""


def ranged(default: Any, low: int, high: int | None = None) -> Any:
    """The default of a setting, and the range of its value or of each of its values."""
    return field(default=default, metadata={"range": (low, high)})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What every study can be asked for; the config of a study adds its own settings.

    Every value is checked against its type, wherever it comes from. A tuple holds one or more different values, and
    numbers in it are sorted, smallest first.

    Attributes:
        model: a name from `kvprobe ls`, a hub id, a local folder or a .gguf file.
        seed: of random draws.
        device: auto, cpu, cuda, cuda:1 …
        dtype: auto is float32 on the CPU, bfloat16 elsewhere.
        device_map: auto fills the GPUs, then memory, then the disk; in place of a device.
        max_memory: how much of each the weights may fill, as 0=20GiB and cpu=8GiB.
        offload_folder: for weights on disk that the model's files have in another form.
        quantization: what weights are rounded to as they are loaded.
        chunk: tokens of a prompt that are read at once; all by default.

    Raises:
        UserError: a value has the wrong type, is out of range, or does not fit the others.
    """

    model: str = "smollm2-135m"
    seed: int = ranged(0, 0)
    device: str = "auto"
    dtype: Dtype = "auto"
    device_map: Spread | None = None
    max_memory: tuple[str, ...] = ()
    offload_folder: str | None = None
    quantization: Quantization | None = None
    chunk: int | None = ranged(None, 1)

    def __post_init__(self) -> None:
        for name, kind in types_of(type(self)).items():
            object.__setattr__(self, name, _typed(type(self), name, kind, getattr(self, name)))
        for setting in (setting for setting in fields(self) if "range" in setting.metadata):
            value = getattr(self, setting.name)
            for number in value if isinstance(value, tuple) else () if value is None else (value,):
                require(setting.name, number, *setting.metadata["range"])
        if any(getattr(self, name) for name in PLACED):
            from kvprobe.models.placing import Placing  # here, since it needs torch, and the command line reads this

            loading = self.loading
            Placing(**{setting.name: loading[setting.name] for setting in fields(Placing)}).check_together(self.device)
        self.validate()

    @property
    def loading(self) -> dict[str, Any]:
        """The arguments of `kvprobe.load` for the model, and for what is loaded beside it."""
        shares = shares_in(self.max_memory) or None
        return {name: getattr(self, name) for name in ("device", "dtype", *PLACED)} | {"max_memory": shares}

    @property
    def beside(self) -> tuple[str, ...]:
        """Models that are read beside `model`; a study that reads any has its own."""
        return ()

    @property
    def and_more(self) -> str:
        """How many these are, as titles go on after the name of `model`; empty without any."""
        return f" and {len(self.beside)} more" if self.beside else ""

    def validate(self) -> None:
        """Refuse values that do not fit each other; a study's config has its own rules here."""


Config = TypeVar("Config", bound=Settings)


@cache
def types_of(kind: type[Settings]) -> dict[str, Any]:
    """The type of each setting, as they are listed: the model, the study's own, then those of `LAST`."""
    hints = get_type_hints(kind)
    names = sorted((setting.name for setting in fields(kind)), key=LAST.__contains__)
    return {name: hints[name] for name in names}


def from_mapping(kind: type[Config], settings: Mapping[str, Any]) -> Config:
    """A config from plain settings, as YAML gives them.

    Raises:
        UserError: an unknown setting (the near match is named), or a value that the config refuses.
    """
    types = types_of(kind)
    for name in settings:
        if name not in types:
            raise UserError(unknown("setting", name, types))
    return kind(**{name: _typed(kind, name, types[name], value) for name, value in settings.items()})


def as_mapping(config: Settings) -> dict[str, Any]:
    """The settings as YAML and JSON hold them, with lists for tuples; `from_mapping` reads them back."""
    values = {name: getattr(config, name) for name in types_of(type(config))}
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in values.items()
        if value or name not in PLACED
    }


def digest_of(study: str, config: Settings) -> str:
    """Eight hexadecimal digits that tell these settings of a study from others."""
    return digest_of_settings(study, as_mapping(config))


def digest_of_settings(study: str, settings: Mapping[str, Any]) -> str:
    """The same of settings as YAML holds them."""
    settings = {"study": study, "settings": settings}
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:8]


def folder_of(study: str, config: Settings, root: Path, name: str | None) -> Path:
    """The folder of a run; its default name is made from the settings.

    Raises:
        UserError: the name cannot be that of a folder.
    """
    if name is not None and not _NAME.fullmatch(name):
        raise UserError(
            f"{name!r} cannot be the name of a run; use at most 100 letters, digits, dots, dashes and underscores, "
            f"and choose the folder with --out."
        )
    return root / (name or f"{study}-{digest_of(study, config)}")


def folder_with_run(path: str | os.PathLike[str]) -> Path:
    """The folder of an existing run.

    Raises:
        UserError: there is no run at `path`.
    """
    folder = expanded(path)
    if not (folder / "config.yaml").is_file():
        raise UserError(f"{folder} is not a run directory (it has no config.yaml); see `kvprobe run`.")
    return folder


def _typed(owner: type[Settings], name: str, kind: Any, value: Any) -> Any:
    """A setting's value in its type; a list may be empty where it is by default."""
    if value in ([], ()) and getattr(owner, name, None) == ():
        return ()
    if get_origin(kind) is not tuple:
        return filled(kind, value, f"Setting {name!r}", LIMITS)
    if not isinstance(value, list | tuple):
        raise UserError(
            f"Setting {name!r} is {str(value)[:60]!r}, a {type(value).__name__}; expected a list: (a, b) in Python, "
            f"[a, b] in YAML, --{name.replace('_', '-')} a b on the command line."
        )
    if not 0 < len(value) <= LIMITS.entries:
        raise UserError(f"Setting {name!r} has {len(value):,} values; expected 1 to {LIMITS.entries:,}.")
    values = tuple(filled(get_args(kind)[0], entry, f"A value of setting {name!r}", LIMITS) for entry in value)
    if len(set(values)) < len(values):
        raise UserError(f"Setting {name!r} is {', '.join(map(str, values))}; expected different values.")
    return tuple(sorted(values)) if get_args(kind)[0] in (int, float) else values
