"""kvprobe: a microscope for the KV cache of a language model.

    import kvprobe as kv
    model = kv.load("smollm2-135m")

Names are imported when first used, so that `import kvprobe` and `kvprobe --help` cost nothing.
`__init__.pyi` lists them.
"""

import re
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

_STUB = Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")
_LISTED = {name: home for home, name in re.findall(r"^from (\S+) import (\w+)", _STUB, re.MULTILINE)}
_MODULES = {name: f"{home}.{name}" for name, home in _LISTED.items() if home in ("kvprobe", "kvprobe.report")}
_HOMES = {name: home for name, home in _LISTED.items() if name not in _MODULES}

__all__ = sorted(_LISTED)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return version("kvprobe")
    if name in _MODULES:
        return import_module(_MODULES[name])
    if name not in _HOMES:
        from kvprobe.names import unknown

        raise AttributeError(unknown("name in kvprobe", name, __all__))
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
