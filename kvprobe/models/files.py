"""Model folders are untrusted input: checked before transformers reads them, and while it builds the model."""

from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils.hooks import RemovableHandle

from kvprobe.checks import is_list, is_mapping
from kvprobe.errors import UserError
from kvprobe.files import read_json
from kvprobe.models.placing import require_package
from kvprobe.restoring import restoring

MAX_JSON_BYTES = 2**24
SPARE_NUMBERS, SPARE_TENSORS = 2**26, 1_000
"""What a model may hold beside its weights: tables of positions, causal masks, scalars of modules."""

_CHOOSES_CODE = ("configuration_files", "fusion_config", "transformers_weights")
"""Settings by which a config names other files or modules to load."""

_JSON_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)


def check_folder(folder: Path) -> Path:
    """The folder, unless it cannot be read as a model without running or unpickling anything of its own.

    Raises:
        UserError: it has no config, is an adapter, or holds damaged JSON; its config names code; or its weights are
            quantised by what is not installed, or not read.
    """
    if not (folder / "config.json").exists():
        raise UserError(f"The folder {folder} has no config.json; it is not a Hugging Face model.")
    for path in folder.iterdir():
        if not path.is_file() and not path.is_dir():
            raise UserError(f"{path} is neither a file nor a folder; remove it.")
    if (folder / "adapter_config.json").exists():
        raise UserError(f"{folder} holds an adapter (adapter_config.json) beside a model; give each a folder.")
    files = {
        name: read_json(folder / name, MAX_JSON_BYTES, "fetch it again")
        for name in _JSON_FILES
        if (folder / name).exists()
    }
    config = files["config.json"]
    for name in _CHOOSES_CODE:
        if name in config:
            raise UserError(f"{folder / 'config.json'} has {name!r}, which chooses what is loaded; remove it.")
    parts: list[dict[str, object]] = [config, *(value for value in config.values() if isinstance(value, dict))]
    for part in parts:
        if (packing := part.get("quantization_config")) is not None:
            require_package(_method(packing))
    given = files.get("generation_config.json", {}).get("eos_token_id")
    ends = given if is_list(given) else [] if given is None else [given]
    if not all(type(end) is int for end in ends):
        raise UserError(f"{folder / 'generation_config.json'} has eos_token_id={str(given)[:40]}; give whole numbers.")
    return folder


def quantised_by(folder: Path) -> str | None:
    """The method by which the weights in a folder are quantised; None where they are plain floats."""
    config = read_json(folder / "config.json", MAX_JSON_BYTES, "fetch it again")
    packing = config.get("quantization_config")
    return None if packing is None else _method(packing)


def _method(packing: object) -> str:
    """What quantised the weights, by the config."""
    fields: Mapping[Any, Any] = packing if is_mapping(packing) else {}
    in_bits = fields.get("load_in_4bit") or fields.get("load_in_8bit")
    return str(fields.get("quant_method") or ("bitsandbytes" if in_bits else "an unnamed method"))


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that transformers loads: `model.safetensors`, or else those of its index.

    Raises:
        UserError: there are none, or the index names something else than a safetensors file of this folder.
    """
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.is_file():
        return [whole]
    if not index.is_file():
        raise UserError(
            f"The folder {folder} has no model.safetensors (nor a model.safetensors.index.json); pickled weights are "
            "not read, convert them first."
        )
    weight_map = read_json(index, MAX_JSON_BYTES, "fetch it again").get("weight_map")
    named = list(weight_map.values()) if is_mapping(weight_map) else []
    if not named or not all(isinstance(name, str) for name in named):
        raise UserError(f"{index} has no weight_map from tensors to files; fetch it again.")
    names = sorted(set(map(str, named)))
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise UserError(
                f"{index} names {name[:80]!r}, which is not a safetensors file of its folder; fetch it again."
            )
        if not (folder / name).is_file():
            raise UserError(f"{index} names {name!r}, which is not in the folder; fetch it.")
    return [folder / name for name in names]


def weight_sizes(folder: Path) -> list[int]:
    """Number of elements of each tensor of the weights, from the headers of the files alone.

    Raises:
        UserError: see `weight_files`; or a file is truncated, or its header does not fit it.
    """
    sizes: list[int] = []
    for path in weight_files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                sizes += [torch.Size(file.get_slice(name).get_shape()).numel() for name in file.keys()]  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path} is truncated or not a safetensors file ({error}); fetch it again.") from error
    return sizes


@contextmanager
def bounded(sizes: list[int], packed: int = 1) -> Generator[None]:
    """While this lasts, a model that is built on the meta device may not become much larger than its weights.

    Otherwise a config could ask for any amount of memory.

    Args:
        packed: how many weights may share one number of the files.

    Raises:
        UserError: the model becomes much larger than its weights.
    """
    numbers, tensors = 2 * packed * sum(sizes) + SPARE_NUMBERS, 4 * len(sizes) + SPARE_TENSORS
    built, total = dict[int, Tensor](), [0]

    def count(module: nn.Module, name: str, tensor: Tensor | None) -> None:
        if tensor is None or tensor.device.type != "meta" or id(tensor) in built:  # tied weights are held once
            return
        built[id(tensor)] = tensor
        total[0] += tensor.numel()
        if total[0] > numbers or len(built) > tensors:
            raise UserError(
                f"the config describes a much larger model than the {len(sizes):,} tensors and {sum(sizes):,} numbers "
                "of the weights"
            )

    hooks: list[RemovableHandle] = []
    with restoring(lambda: [hook.remove() for hook in hooks]):
        hooks.append(register_module_parameter_registration_hook(count))
        hooks.append(register_module_buffer_registration_hook(count))
        yield


def refuse_not_finite(holder: str, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Refuse weights with NaN or infinity; the error names the first such tensor."""
    for name, tensor in tensors:
        if not tensor.is_floating_point():
            continue
        # A sum is several times as fast as a check of each number, which decides only where the sum overflows.
        if not bool(tensor.sum(dtype=torch.float32).isfinite()) and not bool(tensor.isfinite().all()):
            raise UserError(f"The tensor {name} of {holder} has NaN or infinity; fetch or train the weights again.")
