"""From a name to weights: every source becomes a local folder of safetensors, which is loaded in one way."""

import hashlib
import os
import re
import shutil
import warnings
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

import huggingface_hub
import numpy as np
import psutil
import torch
import transformers
from transformers import PreTrainedModel

from kvprobe.errors import UserError
from kvprobe.files import expanded
from kvprobe.models.catalogue import NAMED_MODELS, Dtype, cache_folder, check_source, gguf_of, scratch_folder
from kvprobe.models.files import bounded, check_folder, weight_sizes
from kvprobe.names import one_line, unknown
from kvprobe.shipped import shipped

# Any, because the annotations of these libraries are incomplete.
_HUB: Any = huggingface_hub
_TRANSFORMERS: Any = transformers

_WANTED = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"]


def resolve_folder(source: str | os.PathLike[str]) -> Path:
    """The local folder with the safetensors weights of a named model, folder, `.gguf` file or hub id.

    Raises:
        UserError: the name is unknown, the folder is not a model, or a download failed.
    """
    check_source(source)
    if isinstance(source, str) and source in NAMED_MODELS:
        return _named(source)
    path = expanded(source)
    if path.is_dir():
        return _checked(path)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise UserError(f"There is no GGUF file at {path}; check the path.")
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        return _stored(f"gguf-{digest[:16]}", lambda _: path)
    return _from_hub(str(source))


def load_folder(folder: Path, device: torch.device, dtype: torch.dtype) -> tuple[PreTrainedModel, Any]:
    """The model and tokenizer in a local folder (the tokenizer is None where there is none).

    Raises:
        UserError: a file is damaged, config and weights do not agree, or the weights do not fit into free memory.
    """
    sizes = weight_sizes(folder)
    _check_bytes(folder.name, sum(sizes) * dtype.itemsize, device, dtype)
    # No code from the folder runs, not even after a question on the terminal.
    settings: Any = {"local_files_only": True, "trust_remote_code": False}
    has_tokenizer = any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model"))
    try:
        with _quiet(), bounded(sizes):
            config = _TRANSFORMERS.AutoConfig.from_pretrained(folder, **settings)
            # A config could name any kernel on the hub; without a name the library chooses sdpa.
            config._attn_implementation = config._experts_implementation = None
            model, problems = _TRANSFORMERS.AutoModelForCausalLM.from_pretrained(
                folder, config=config, dtype=dtype, use_safetensors=True, output_loading_info=True, **settings
            )
            tokenizer = _TRANSFORMERS.AutoTokenizer.from_pretrained(folder, **settings) if has_tokenizer else None
            if tokenizer is not None:
                tokenizer("a")  # some settings of a tokenizer are only checked when it is used
    except (MemoryError, KeyboardInterrupt, SystemExit):
        raise
    # On a damaged folder libraries raise a dozen kinds of errors, and a panic in Rust is not an Exception.
    except BaseException as error:
        raise UserError(
            f"{folder} cannot be loaded: its config, weights and tokenizer do not agree ({one_line(error, 300)})."
        ) from error
    if problems["missing_keys"]:
        missing = ", ".join(sorted(problems["missing_keys"])[:3])
        raise UserError(
            f"The weights in {folder} lack {len(problems['missing_keys'])} tensors ({missing} …); fetch them again."
        )
    if unused := _unused_layers(model, problems["unexpected_keys"]):
        raise UserError(
            f"The config in {folder} leaves out layers that the weights have ({unused[0]} …); fetch both again."
        )
    return model.to(device).eval(), tokenizer


def _unused_layers(model: PreTrainedModel, unexpected: Iterable[str]) -> list[str]:
    """The unexpected weights whose names are like those of the model's own layers."""

    def of_first_layer(name: str) -> str:
        return re.sub(r"\.\d+\.", ".0.", name)

    known = {of_first_layer(name) for name in model.state_dict()}
    has_layers = any(".0." in name for name in known)
    return sorted(name for name in unexpected if of_first_layer(name) in known or not has_layers)


def pick_device(device: str | torch.device) -> torch.device:
    """The torch device of this name; `auto` is the first GPU that torch sees, else the CPU."""
    if str(device) != "auto":
        try:
            chosen = torch.device(device)
        except RuntimeError as error:
            raise UserError(f"There is no device {str(device)!r}; use 'auto', 'cpu' or 'cuda'.") from error
        if chosen.type == "cuda" and not torch.cuda.is_available():
            raise UserError(f"There is no device {str(device)!r}, because torch sees no CUDA GPU; use 'cpu'.")
        return chosen
    if torch.cuda.is_available():
        return torch.device("cuda", 0)
    return torch.device("mps") if torch.backends.mps.is_available() else torch.device("cpu")


def pick_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    """The torch dtype of this name; `auto` is float32 on the CPU, bfloat16 elsewhere. Warns of slow ones."""
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if isinstance(dtype, str) and dtype not in get_args(Dtype):
        raise UserError(unknown("dtype", dtype, get_args(Dtype)))
    chosen = dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype)
    if device.type == "cpu" and chosen.itemsize == 2 and torch.backends.cpu.get_cpu_capability() == "AVX2":
        warnings.warn(
            f"This CPU has no AVX-512, without which torch is slow in {chosen}: prompts and batches take several times "
            "as long as in float32. Use dtype='float32' if memory allows.",
            stacklevel=4,
        )
    return chosen


def _named(name: str) -> Path:
    if NAMED_MODELS[name].folder:
        return _checked(shipped("models") / NAMED_MODELS[name].folder)
    return _stored(name, lambda scratch: gguf_of(name, scratch))


def _stored(name: str, gguf: Callable[[Path], Path]) -> Path:
    """The folder `name` in the cache folder, made from the GGUF file that `gguf` returns if it is not there yet.

    It is made under another name and renamed when complete, so that an interruption leaves no partial folder, and the
    first of two processes wins.
    """
    folder = cache_folder() / "models" / name
    if (folder / "model.safetensors").is_file():
        return folder
    with scratch_folder() as scratch:
        made = _dequantise(gguf(Path(scratch)), Path(scratch) / "model")
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            made.rename(folder)
        except OSError:
            if not (folder / "model.safetensors").is_file():
                shutil.rmtree(folder, ignore_errors=True)
                made.rename(folder)
    return folder


def _dequantise(gguf: Path, folder: Path) -> Path:
    """Write the weights and tokenizer of a GGUF file to `folder` as float32 safetensors."""
    from gguf import GGUFReader

    class MappedReader(GGUFReader):
        """Reads from a plain view of the mapped file: slices of a `memmap` take more than twice as long, and the
        vocabulary needs millions of them."""

        def _get(self, *where: Any, **how: Any) -> Any:
            self.data = np.asarray(self.data)
            return super()._get(*where, **how)

    try:
        reader = MappedReader(gguf)
        weights = sum(int(tensor.n_elements) for tensor in reader.tensors)
    except Exception as error:
        raise UserError(f"{gguf.name} is not a GGUF file ({one_line(error)}); fetch it again.") from error
    _check_bytes(gguf.name, weights * torch.float32.itemsize, torch.device("cpu"), torch.float32)
    try:
        with _quiet(bars=True), _read_once(gguf, reader):
            model = _TRANSFORMERS.AutoModelForCausalLM.from_pretrained(
                gguf.parent, gguf_file=gguf.name, dtype=torch.float32, local_files_only=True
            )
            tokenizer = _TRANSFORMERS.AutoTokenizer.from_pretrained(
                gguf.parent, gguf_file=gguf.name, local_files_only=True
            )
    except Exception as error:
        raise UserError(
            f"{gguf.name} is not a GGUF file that transformers can read ({one_line(error)}); give a folder instead."
        ) from error
    # The weights are plain floats now, but the model would still be saved as a quantised one.
    model.hf_quantizer = None
    delattr(model.config, "quantization_config")
    # One file, whose presence means that the weights are complete.
    model.save_pretrained(folder, max_shard_size="1TB")
    tokenizer.save_pretrained(folder)
    return folder


def _from_hub(repository: str) -> Path:
    try:
        folder: str = _HUB.snapshot_download(repository, allow_patterns=_WANTED)
    except Exception as error:  # the hub client raises a dozen kinds of errors, all for a folder that it could not get
        raise UserError(
            f"Could not get {repository!r} from the hub ({type(error).__name__}); check the id, or download the "
            f"repository's safetensors, config.json and tokenizer files elsewhere and give their folder instead."
        ) from error
    return _checked(Path(folder))


def _checked(folder: Path) -> Path:
    check_folder(folder)
    return folder


def free_bytes(device: torch.device) -> int:
    """Free bytes of memory on a device."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available


def _check_bytes(name: str, needed: int, device: torch.device, dtype: torch.dtype) -> None:
    free = free_bytes(device)
    if needed > free:
        raise UserError(
            f"The weights of {name} need {needed / 2**30:.1f} GiB as {str(dtype).removeprefix('torch.')}, but "
            f"{free / 2**30:.1f} GiB are free on {device}; use a smaller dtype, a smaller model or another device."
        )


@contextmanager
def _read_once(gguf: Path, reader: object) -> Generator[None]:
    """While this lasts, this file is not read again: transformers would read it for the config, the weights and the
    tokenizer, ten seconds each for the 262,144 tokens of Gemma."""
    library: Any = import_module("gguf")
    whole = library.GGUFReader

    def read(path: str | os.PathLike[str], *given: object) -> object:
        return reader if Path(path) == gguf else whole(path, *given)

    library.GGUFReader = read
    try:
        yield
    finally:
        library.GGUFReader = whole


@contextmanager
def _quiet(bars: bool = False) -> Generator[None]:
    """While this lasts, transformers logs errors only, and shows no progress bars unless `bars`."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    if not bars:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        logging.enable_progress_bar()
