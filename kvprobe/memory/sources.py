"""Where a config comes from: a config that ships with kvprobe, a folder, a JSON file, or the hub."""

import os
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path

from kvprobe.errors import UserError
from kvprobe.memory.config import Config, read_config
from kvprobe.models.catalogue import NAMED_MODELS
from kvprobe.names import unknown
from kvprobe.shipped import shipped


def shipped_configs() -> dict[str, Path]:
    """Configs that ship: of hub models by repository id, of named models (an adapter's is its base's), of own ones."""
    of_the_hub = {path.stem.replace("--", "/"): path for path in sorted((shipped("models") / "configs").glob("*.json"))}
    of_adapters = {name: of_the_hub[model.base] for name, model in NAMED_MODELS.items() if model.base}
    of_own = {path.parent.name: path for path in sorted(shipped("models").rglob("config.json"))}
    return of_the_hub | of_adapters | of_own


def config_of(source: str | os.PathLike[str] | Mapping[str, object]) -> Config:
    """The config of a model: its fields, a name that ships, a folder with a `config.json`, a JSON file, or a hub id.

    Raises:
        UserError: there is no such model, its config cannot be read, or the hub cannot be reached.
    """
    if isinstance(source, Mapping):
        return Config("The model", source)
    name = os.fspath(source)
    shipped_here = shipped_configs()
    if name in shipped_here:
        return read_config(shipped_here[name], name)
    path = _existing(name)
    if path is not None and path.is_dir():
        if not (path / "config.json").is_file():
            raise UserError(f"The folder {path} has no config.json; it is not a Hugging Face model.")
        return read_config(path / "config.json", path.name or str(path))
    if path is not None:
        if path.suffix != ".json":
            raise UserError(f"{path} is not a config; give a config.json, the folder that holds it, or a hub id.")
        return read_config(path, path.stem if path.stem != "config" else path.resolve().parent.name)
    if name.count("/") == 1 and not name.startswith((".", "/", "~")):
        return read_config(_from_hub(name), name)
    raise UserError(unknown("model, folder, config.json or hub id (owner/name)", name[:60], shipped_here))


def _existing(name: str) -> Path | None:
    """The file or folder of this name; None if there is none, or if the name cannot be a path."""
    try:
        path = Path(name).expanduser()
        return path if path.exists() else None
    except (OSError, ValueError, RuntimeError):
        return None


def _from_hub(repository: str) -> Path:
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(repository, "config.json"))
    except Exception as error:  # the hub client raises a dozen types; all mean that there is no file
        near = get_close_matches(repository, shipped_configs(), n=5, cutoff=0)
        raise UserError(
            f"The config of {repository!r} could not be fetched from the hub ({type(error).__name__}); check the id, "
            f"give a config.json, or choose one of {len(shipped_configs())} that ship, such as {', '.join(near)}."
        ) from error
