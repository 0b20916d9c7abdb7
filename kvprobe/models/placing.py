"""Where the weights of a model lie (several devices, disk), and in which numbers they are kept, as in transformers."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any, get_args

import torch
import transformers

from kvprobe.checks import is_mapping
from kvprobe.errors import UserError
from kvprobe.models.catalogue import Quantization
from kvprobe.names import unknown
from kvprobe.units import bytes_in

_PACKAGES = {"quanto": "optimum-quanto", "bitsandbytes": "bitsandbytes", "gptq": "gptqmodel", "awq": "gptqmodel"}
"""What reads the weights of each method."""
_MODULES = {"quanto": "optimum.quanto"}
_EXTRAS = {"quanto": "quanto"}
_TRANSFORMERS: Any = transformers


@dataclass(frozen=True)
class Placing:
    """Where weights lie, and in which numbers they are kept; see `kvprobe.load`."""

    device_map: str | Mapping[str, Any] | None = None
    max_memory: Mapping[Any, int | str] | None = None
    offload_folder: str | os.PathLike[str] | None = None
    quantization: Quantization | None = None

    def __post_init__(self) -> None:
        if self.quantization not in (None, *get_args(Quantization)):
            raise UserError(unknown("quantization", str(self.quantization), get_args(Quantization)))

    @property
    def mapped(self) -> bool:
        """Whether the model may be spread over devices."""
        return self.device_map is not None or self.max_memory is not None

    @property
    def method(self) -> str | None:
        """What rounds the weights."""
        return self.quantization and ("bitsandbytes" if self.quantization.startswith("bnb") else "quanto")

    def called(self, source: str) -> str:
        """What a model is called that is loaded so."""
        return source + self._rounded

    def source_of(self, name: str) -> str:
        """By what the model was loaded that is called so."""
        return name.removesuffix(self._rounded)

    @property
    def _rounded(self) -> str:
        return f" in {self.quantization}" if self.quantization else ""

    def check_together(self, device: str | torch.device) -> None:
        """Refuse what cannot be had together, on any machine.

        Raises:
            UserError: a device beside a map of devices, a folder without such a map, a size without a unit, or quanto
                beside the disk.
        """
        if self.mapped and str(device) != "auto":
            raise UserError("device and device_map both say where the model is; give one of them.")
        if self.offload_folder is not None and not self.mapped:
            raise UserError("offload_folder is for weights that device_map puts on disk; give device_map='auto' too.")
        for size in (self.max_memory or {}).values():
            bytes_in(size, "max_memory")
        if self.method == "quanto" and self.mapped:
            raise UserError(
                "Weights that quanto rounds as they are loaded stay where they are loaded; leave out device_map and "
                "max_memory, or leave out quantization."
            )

    def check(self, device: str | torch.device) -> None:
        """Refuse what cannot be had together, or not here.

        Raises:
            UserError: see `check_together`; or a package or a GPU that is needed is not there.
        """
        self.check_together(device)
        if self.method is not None:
            require_package(self.method)
        if self.method == "bitsandbytes" and not torch.cuda.is_available():
            raise UserError("Weights of bitsandbytes need a GPU; use quantization='int8' or 'int4' on a CPU.")

    def arguments(self, dtype: torch.dtype) -> dict[str, Any]:
        """What `from_pretrained` takes for it."""
        given: dict[str, Any] = {}
        if self.mapped:
            given["device_map"] = self.device_map or "auto"
            shares = self.max_memory and {
                device: bytes_in(size, "max_memory") for device, size in self.max_memory.items()
            }
            given["max_memory"] = shares or None
            given["offload_folder"] = self.offload_folder
        match self.quantization:
            case "int8" | "int4":
                given["quantization_config"] = _TRANSFORMERS.QuantoConfig(weights=self.quantization)
            case "bnb-int8":
                given["quantization_config"] = _TRANSFORMERS.BitsAndBytesConfig(load_in_8bit=True)
            case "bnb-nf4":
                given["quantization_config"] = _TRANSFORMERS.BitsAndBytesConfig(
                    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype
                )
            case None:
                pass
        return given


def require_package(method: str) -> None:
    """Refuse a method of quantisation whose package is not installed; quanto's is made to need no compiler.

    Raises:
        UserError: it is not, or kvprobe does not read weights of this method.
    """
    if method not in _PACKAGES:
        raise UserError(
            f"The weights are quantised by {method[:40]!r}; kvprobe reads {', '.join(_PACKAGES)}, and plain floats."
        )
    package = _PACKAGES[method]
    try:
        found = find_spec(_MODULES.get(method, package)) is not None
    except ModuleNotFoundError:  # of the package around it
        found = False
    if not found:
        extra = f"kvprobe[{_EXTRAS[method]}]" if method in _EXTRAS else package
        raise UserError(f"Weights of {method} need {package}, which is not installed; `pip install '{extra}'`.")
    if method == "quanto":
        use_quanto_uncompiled()


def use_quanto_uncompiled() -> None:
    """From now on quanto unpacks numbers of 2 and 4 bits on a CPU in Python. Its C++ calls the same operations, but
    takes a compiler, and a minute at first use."""

    def unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
        return torch.cat([packed >> shift & (1 << bits) - 1 for shift in range(0, 8, bits)])

    extension: Any = import_module("optimum.quanto.library.extensions.cpp").ext
    extension._lib = SimpleNamespace(unpack=unpack)


def numbers_of(config: Any) -> str | None:
    """How the weights of a model are kept, where they are quantised, such as "int8 by quanto"; else None."""
    settings = getattr(config, "quantization_config", None)
    if settings is None:
        return None
    fields: Any = settings if is_mapping(settings) else settings.to_dict()
    bits = next((bits for bits in (4, 8) if fields.get(f"load_in_{bits}bit")), fields.get("bits"))
    method = getattr(fields.get("quant_method"), "value", fields.get("quant_method"))
    return f"{fields.get('weights') or f'{bits}-bit'} by {method}"
