"""The GGUF files that llama.cpp is given: the model's own, and one with the same weights in float32."""

from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gguf

from kvprobe.engines.server import require_xllamacpp
from kvprobe.errors import UserError
from kvprobe.files import expanded
from kvprobe.models.catalogue import NAMED_MODELS, file_digest, gguf_of
from kvprobe.models.gguf_header import parts_of, read_header
from kvprobe.studies.engines import Config

_GGUF: Any = gguf  # its annotations are incomplete


def inputs(config: Config) -> dict[str, str]:
    """The version of xllamacpp, and a digest of the file that the settings name.

    Raises:
        UserError: there is no such file, or the model has none; or xllamacpp is not installed.
    """
    require_xllamacpp()
    known = {"xllamacpp": version("xllamacpp")}
    if named := config.gguf or (config.model if config.model.endswith(".gguf") else ""):
        return known | {"gguf": "".join(map(file_digest, parts_of(expanded(named))))}
    if config.model not in NAMED_MODELS or not NAMED_MODELS[config.model].wheels:
        others = ", ".join(name for name, model in NAMED_MODELS.items() if model.wheels)
        raise UserError(
            f"{config.model} has no GGUF file that kvprobe knows; give it as gguf (--gguf), or one of {others}."
        )
    return known


def files(config: Config, folder: Path) -> Mapping[bool, Path]:
    """The model's file; and, under True, one with its weights in float32, if an engine needs it."""
    named = config.gguf or (config.model if config.model.endswith(".gguf") else "")
    own = expanded(named) if named else gguf_of(config.model, folder)
    return {False: own} | ({True: in_float32(own, folder / "exact.gguf")} if "exact" in config.engines else {})


def in_float32(path: Path, target: Path) -> Path:
    """Write a GGUF file again, its weights as they are once they are dequantised."""
    header = read_header(parts_of(path))
    reader = _GGUF.GGUFReader(path)
    writer = _GGUF.GGUFWriter(target, header.metadata["general.architecture"])
    for name, field in reader.fields.items():
        if not name.startswith(("GGUF.", "general.architecture", "general.file_type", "split.")):
            kind, *_, inner = [*field.types, field.types[-1]]
            writer.add_key_value(name, field.contents(), kind, inner if kind == gguf.GGUFValueType.ARRAY else None)
    for name in header.tensors:
        writer.add_tensor(name, header.floats(name).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target
