"""From a name to weights: every source becomes a local folder of safetensors, which is loaded in one way."""

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from logging import ERROR, getLogger
from pathlib import Path
from typing import Any, cast, get_args

import huggingface_hub
import psutil
import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

from kvprobe.cache.device import pick_device
from kvprobe.errors import UserError, warn
from kvprobe.files import expanded, read_json
from kvprobe.models.adapters import add_changes, base_of, changes_of, is_adapter, read_settings, sharing
from kvprobe.models.catalogue import (
    NAMED_MODELS,
    Dtype,
    cache_folder,
    check_source,
    file_digest,
    gguf_of,
    scratch_folder,
)
from kvprobe.models.files import (
    MAX_JSON_BYTES,
    bounded,
    check_folder,
    quantised_by,
    refuse_not_finite,
    weight_sizes,
)
from kvprobe.models.placing import Placing
from kvprobe.names import one_line, unknown
from kvprobe.shipped import shipped
from kvprobe.weights import device_of, state

# Any, because the annotations of these libraries are incomplete.
_HUB: Any = huggingface_hub
_TRANSFORMERS: Any = transformers

_OWN: Any = {"local_files_only": True, "trust_remote_code": False}
"""No code from a folder runs, not even after a question on the terminal."""

CONVERTED = Path("models-2")
"""Where models made from GGUF files lie in the cache folder; the number rises when they are made otherwise."""

_MOST_PACKED = 8
"""Weights that share one number in a quantised file."""
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
        from kvprobe.models.gguf_header import parts_of

        parts = parts_of(path)
        digests = "".join(file_digest(part) for part in parts)
        return _stored(f"gguf-{hashlib.sha256(digests.encode()).hexdigest()[:16]}", lambda _: parts)
    return _from_hub(str(source))


Check = Callable[[Path, torch.device, torch.dtype, Placing], Placing]
"""Refuses a model in a folder that would not fit, or says how much of it lies in memory."""


def opened(
    source: Any, device: str | torch.device, dtype: str | torch.dtype, placing: Placing, check: Check | None = None
) -> tuple[PreTrainedModel, Any, str]:
    """A model from a name, a hub id, a folder or a `.gguf` file, or one that is loaded; its tokenizer, if it has one;
    and what it is called.

    Raises:
        UserError: see `kvprobe.load`.
    """
    if isinstance(inner := getattr(source, "_module", None), PreTrainedModel):  # nnsight, by what it has
        if device_of(inner).type == "meta":
            raise UserError("nnsight has not loaded the weights of this model yet; make it with dispatch=True.")
        plain, _, name = opened(inner, device, dtype, placing)
        return plain, getattr(source, "tokenizer", None), name
    if isinstance(source, nn.Module):
        base = base_of(source)
        if not isinstance(base, PreTrainedModel):
            raise UserError(f"The model is a {type(base).__name__}; give a causal language model of transformers.")
        refuse_not_finite(type(base).__name__, state(base))
        return base.eval(), None, type(base).__name__
    if not isinstance(source, str | os.PathLike):
        raise UserError(
            f"The model is a {type(source).__name__} ({str(source)[:40]!r}); give a name, a folder, or a model of "
            "transformers."
        )
    placing.check(device)
    where, name = pick_device(device), os.fspath(cast("str | os.PathLike[str]", source))
    folder, numbers = resolve_folder(name), pick_dtype(dtype, where)
    if check is not None:
        placing = check(folder, where, numbers, placing)
    plain, tokenizer = load_folder(folder, where, numbers, placing)
    refuse_not_finite(name, state(plain))
    return plain, tokenizer, placing.called(name)


def load_folder(
    folder: Path, device: torch.device, dtype: torch.dtype, placing: Placing | None = None
) -> tuple[PreTrainedModel, Any]:
    """The model and tokenizer in a local folder (the tokenizer is None where there is none).

    Args:
        placing: several devices or the disk, or other numbers.

    Raises:
        UserError: a file is damaged, config and weights do not agree, or the weights do not fit into free memory.
    """
    if is_adapter(folder):
        model, tokenizer = load_folder(base_folder(folder), device, dtype, placing)
        add_changes(model, changes_of(model, folder))
        with _agreeing(folder):
            return model, _tokenizer(folder) or tokenizer
    placing, sizes = placing or Placing(), weight_sizes(folder)
    packed = 1 if (method := quantised_by(folder)) is None else _MOST_PACKED
    if method is not None and placing.quantization is not None:
        raise UserError(f"The weights in {folder} are quantised already, by {method}; leave out quantization.")
    with _agreeing(folder), bounded(sizes, packed):
        config = _TRANSFORMERS.AutoConfig.from_pretrained(folder, **_OWN)
        # A config could name any kernel on the hub; without a name the library chooses sdpa.
        config._attn_implementation = config._experts_implementation = None
        model, problems = _TRANSFORMERS.AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            use_safetensors=True,
            output_loading_info=True,
            **placing.arguments(dtype),
            **_OWN,
        )
        tokenizer = _tokenizer(folder)
    if problems["missing_keys"]:
        missing = ", ".join(sorted(problems["missing_keys"])[:3])
        raise UserError(
            f"The weights in {folder} lack {len(problems['missing_keys'])} tensors ({missing} …); fetch them again."
        )
    if unused := _unused_layers(model, problems["unexpected_keys"]):
        raise UserError(
            f"The config in {folder} leaves out layers that the weights have ({unused[0]} …); fetch both again."
        )
    return (model if placing.mapped else model.to(device)).eval(), tokenizer


def adapted(plain: PreTrainedModel, adapter: str | os.PathLike[str]) -> PreTrainedModel:
    """A model with a LoRA adapter added, which shares all tensors that the adapter leaves alone.

    Args:
        adapter: a name that `kvprobe ls` shows, a local folder, or a hub id.

    Raises:
        UserError: there is no adapter, it is of another kind, or of another model.
    """
    folder = resolve_folder(adapter)
    if not is_adapter(folder):
        raise UserError(f"{os.fspath(adapter)!r} is a whole model, not an adapter; load it by itself.")
    changes = changes_of(plain, folder)
    twin = sharing(plain)
    add_changes(twin, changes)
    refuse_not_finite(os.fspath(adapter), ((name, one) for name, one in twin.named_parameters() if not one.is_meta))
    return twin


@contextmanager
def _agreeing(folder: Path) -> Generator[None]:
    """While this lasts, whatever is raised is an error of a folder whose files do not agree; transformers is quiet."""
    try:
        with _quiet():
            yield
    except (MemoryError, KeyboardInterrupt, SystemExit):
        raise
    # On a damaged folder libraries raise a dozen kinds of errors, and a panic in Rust is not an Exception.
    except BaseException as error:
        raise UserError(
            f"{folder} cannot be loaded: its config, weights and tokenizer do not agree ({one_line(error, 300)})."
        ) from error


def _tokenizer(folder: Path) -> Any:
    """The tokenizer in a folder; None if there is none."""
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
        return None
    path = folder / "tokenizer_config.json"
    says = read_json(path, MAX_JSON_BYTES, "fetch it again").get("tokenizer_class") if path.is_file() else None
    # For a known architecture transformers takes its usual rules, even where a folder has others that are to be kept.
    kind = _TRANSFORMERS.PreTrainedTokenizerFast if says == "TokenizersBackend" else _TRANSFORMERS.AutoTokenizer
    tokenizer = kind.from_pretrained(folder, **_OWN)
    tokenizer("a")  # some settings of a tokenizer are only checked when it is used
    return tokenizer


def base_folder(folder: Path) -> Path:
    """The folder of the model that the adapter in a folder was trained for.

    Raises:
        UserError: it is not on this machine, or the adapter is of a kind that cannot be added.
    """
    base = str(read_settings(folder).get("base_model_name_or_path"))
    for path in (expanded(base), folder / base):
        if base and (path.is_dir() or path.suffix == ".gguf"):
            return check_folder(path) if path.is_dir() else resolve_folder(path)
    if base in NAMED_MODELS:
        return _named(base)
    try:
        return check_folder(Path(_HUB.snapshot_download(base, allow_patterns=_WANTED, local_files_only=True)))
    except Exception as error:  # as in `_from_hub`
        raise UserError(
            f"{folder} holds an adapter of {base[:100]!r}, which is not on this machine; download that model, and name "
            "its folder as base_model_name_or_path in adapter_config.json, or give kv.load a PeftModel."
        ) from error


def _unused_layers(model: PreTrainedModel, unexpected: Iterable[str]) -> list[str]:
    """The unexpected weights whose names are like those of the model's own layers."""

    def of_first_layer(name: str) -> str:
        return re.sub(r"\.\d+\.", ".0.", name)

    known = {of_first_layer(name) for name in model.state_dict()}
    has_layers = any(".0." in name for name in known)
    return sorted(name for name in unexpected if of_first_layer(name) in known or not has_layers)


def pick_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    """The torch dtype of this name; `auto` is float32 on the CPU, bfloat16 elsewhere. Warns of slow ones."""
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if isinstance(dtype, str) and dtype not in get_args(Dtype):
        raise UserError(unknown("dtype", dtype, get_args(Dtype)))
    chosen = dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype)
    if device.type == "cpu" and chosen.itemsize == 2 and torch.backends.cpu.get_cpu_capability() == "AVX2":
        warn(
            f"This CPU has no AVX-512, without which torch is slow in {chosen}: prompts and batches take several times "
            "as long as in float32. Use dtype='float32' if memory allows."
        )
    return chosen


def _named(name: str) -> Path:
    if NAMED_MODELS[name].folder:
        return _checked(shipped("models") / NAMED_MODELS[name].folder)
    return _stored(name, lambda scratch: [gguf_of(name, scratch)])


def _stored(name: str, gguf: Callable[[Path], list[Path]]) -> Path:
    """The folder `name` in the cache folder, made from the GGUF files that `gguf` returns if it is not there yet.

    It is made under another name and renamed when complete, so that an interruption leaves no partial folder, and the
    first of two processes wins.
    """
    folder = cache_folder() / CONVERTED / name
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


def _dequantise(parts: list[Path], folder: Path) -> Path:
    """Write the weights and tokenizer of a GGUF file, or of all parts of a split one, to `folder` as safetensors."""
    from kvprobe.models.gguf_header import read_header
    from kvprobe.models.gguf_model import write_folder

    header = read_header(parts)
    _check_bytes(parts[0].name, header.numbers * torch.float32.itemsize, torch.device("cpu"), torch.float32)
    with _quiet():
        write_folder(header, folder)
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
    """A folder of a model or of an adapter; raises as `check_folder`."""
    return folder if is_adapter(folder) else check_folder(folder)


def free_bytes(
    device: torch.device, groups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")
) -> int:
    """Free bytes of memory on a device; where the process is held to a limit, what is left of it.

    Args:
        groups: where control groups are mounted.
        own: the file that names those of this process.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return int(min([psutil.virtual_memory().available, *_left(groups, own)]))


_LIMITS = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""Of control groups of the second version and of the first, by the folder of all groups: the files that hold the limit
and what is used, and how the table memory.stat calls what of that are files which make room."""


def _left(groups: Path, own: Path) -> Iterator[int]:
    """Bytes left of each limit that a process is held to: of its control group and of those around it."""
    try:
        lines = [line.split(":", 2) for line in own.read_text().splitlines()]
    except OSError:  # no Linux
        return
    for version, (limit, used, field) in _LIMITS.items():
        root = groups / version
        path = next((path for _, controllers, path in lines if version in controllers.split(",")), "")
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            if not folder.is_relative_to(root):
                break
            with suppress(OSError, ValueError):  # a group that is not seen here, or no limit, which is the word max
                bound, now = (int((folder / name).read_text()) for name in (limit, used))
                counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                yield max(0, bound - now + int(counts.get(field, 0)))


def _check_bytes(name: str, needed: int, device: torch.device, dtype: torch.dtype) -> None:
    free = free_bytes(device)
    if needed > free:
        raise UserError(
            f"The weights of {name} need {needed / 2**30:.1f} GiB as {str(dtype).removeprefix('torch.')}, but "
            f"{free / 2**30:.1f} GiB are free on {device}; use a smaller dtype, a smaller model or another device."
        )


@contextmanager
def _quiet() -> Generator[None]:
    """While this lasts, transformers and accelerate log errors only and show no progress bars."""
    from transformers.utils import logging

    verbosity, placing = logging.get_verbosity(), getLogger("accelerate")
    level = placing.level
    logging.set_verbosity_error()
    placing.setLevel(ERROR)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        placing.setLevel(level)
        logging.enable_progress_bar()
