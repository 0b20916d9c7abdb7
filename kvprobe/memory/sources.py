"""Where a config comes from: a name, a folder, a JSON file, the shelf of published configs that ships, or the hub."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvprobe.errors import UserError
from kvprobe.memory.config import Config, read_config
from kvprobe.names import unknown
from kvprobe.shipped import shipped


def shelf() -> dict[str, Path]:
    """Configs that ship with kvprobe: published ones by the id of their repository, and those of models that ship."""
    published = {path.stem.replace("--", "/"): path for path in sorted((shipped("models") / "configs").glob("*.json"))}
    return published | {path.parent.name: path for path in sorted(shipped("models").glob("*/config.json"))}


def config_of(source: str | os.PathLike[str] | Mapping[str, Any]) -> Config:
    """The config of a model: fields, a folder with a `config.json`, a JSON file, an id on the shelf or on the hub.

    Raises:
        UserError: there is no such model, or its config cannot be read.
        UserError: the hub cannot be reached.
    """
    if isinstance(source, Mapping):
        return Config("The model", source)
    name = os.fspath(source)
    if name in shelf():
        return read_config(shelf()[name], name)
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
    raise UserError(
        f"{unknown('model', name[:60], shelf())} A folder, a config.json or a hub id (owner/name) will do as well."
    )


def _existing(name: str) -> Path | None:
    """The file or folder of this name; None where there is none, or where there cannot be one."""
    try:
        path = Path(name).expanduser()
        return path if path.exists() else None
    except (OSError, ValueError, RuntimeError):
        return None


def _from_hub(repository: str) -> Path:
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(repository, "config.json"))
    except Exception as error:  # the hub client raises a dozen kinds; all mean that there is no file
        raise UserError(
            f"Could not get the config of {repository!r} from the hub ({type(error).__name__}); check the id, or give a "
            f"config.json from elsewhere. Without the hub there are {', '.join(shelf())}."
        ) from error
