"""Adapters of PEFT: those around a loaded model, and LoRA in a folder, which is added to the weights of its base.

Added, an adapter is part of the weights: both lanes compute with it, and a model's fingerprint holds it. Beside weights
that are quantised or on disk it stays by itself, and what it computes is added to what they do.
"""

import copy
import math
import re
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from kvprobe.errors import UserError
from kvprobe.files import read_json
from kvprobe.models.files import MAX_JSON_BYTES
from kvprobe.weights import device_of, hooks_of

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

_USED = {"peft_type", "base_model_name_or_path", "r", "lora_alpha", "use_rslora", "bias", "init_lora_weights"}
_IRRELEVANT = {
    "auto_mapping", "corda_config", "ensure_weight_tying", "eva_config", "exclude_modules", "fan_in_fan_out",
    "inference_mode", "layers_pattern", "layers_to_transform", "loftq_config", "lora_dropout", "lora_ga_config",
    "megatron_core", "peft_version", "qalora_group_size", "rank_pattern", "revision", "target_modules", "task_type",
}  # fmt: skip
"""Settings for training, or of what the tensors show: where they belong, and their ranks."""

_SOMEWHERE = ("alora_invocation_tokens", "n_tasks", "xlora_depth")
"""Settings of adapters that depend on what the PeftModel hands in at each call."""

_TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter and no model."""
    return (folder / CONFIG).is_file() and not (folder / "config.json").exists()


def read_settings(folder: Path) -> dict[str, Any]:
    """The settings of a LoRA adapter that can be added to weights.

    Raises:
        UserError: it is of another kind, or has what kvprobe cannot follow.
    """
    settings = read_json(folder / CONFIG, MAX_JSON_BYTES, "fetch it again")
    usual = {"peft_type": "LORA", "bias": "none", "init_lora_weights": True}
    wrong = [key for key, value in settings.items() if value and key not in _USED | _IRRELEVANT]
    wrong += [key for key, value in usual.items() if settings.get(key, value) not in (value, None, False, "gaussian")]
    if not all(type(settings.get(key)) in (int, float) for key in ("r", "lora_alpha")):
        wrong.append("r and lora_alpha")
    if wrong:
        raise UserError(
            f"The adapter in {folder} has {wrong[0]}={str(settings.get(wrong[0]))[:60]!r}, which kvprobe cannot read; "
            "load it with peft, and give kv.load the PeftModel, or the folder of merge_and_unload()."
        )
    return settings


def sharing(plain: PreTrainedModel) -> PreTrainedModel:
    """A model of the same tensors, of which some can be put in other places without changing the first."""
    shared: list[Any] = [*plain.parameters(), *plain.buffers()]
    for module in plain.modules():  # of accelerate, which reads weights from disk or moves them between devices
        for hook in hooks_of(module):
            shared += [getattr(hook, name, None) for name in ("weights_map", "tied_params_map")]
    return copy.deepcopy(plain, {id(one): one for one in shared if one is not None})


class LowRank(nn.Module):
    """What a LoRA adapter adds to a linear layer: the product of two matrices.

    Attributes:
        down: the first, `[rank, inner]`.
        up: the second, `[outer, rank]`, with the adapter's scale.
    """

    def __init__(self, down: Float[Tensor, "rank inner"], up: Float[Tensor, "outer rank"]) -> None:
        super().__init__()
        self.down, self.up = (nn.Parameter(matrix, requires_grad=False) for matrix in (down, up))

    def forward(self, x: Float[Tensor, "*rows inner"]) -> Float[Tensor, "*rows outer"]:
        return nn.functional.linear(nn.functional.linear(x, self.down), self.up)


Changes = dict[str, LowRank]
"""What is added to what each linear layer computes, by its name."""


def changes_of(plain: PreTrainedModel, folder: Path) -> Changes:
    """What the adapter in a folder adds to a model's weights.

    Raises:
        UserError: it cannot be added, its tensors are damaged, or they do not belong to this model.
    """
    settings = read_settings(folder)
    pairs: dict[str, dict[str, Tensor]] = {}
    try:
        with safe_open(folder / WEIGHTS, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                if (named := _TENSOR.fullmatch(name)) is None:
                    raise UserError(
                        f"The adapter in {folder} has the tensor {name[:80]!r}, which kvprobe cannot add to a weight; "
                        "load it with peft, and give kv.load the PeftModel."
                    )
                pairs.setdefault(named[1], {})[named[2]] = file.get_tensor(name).float()
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{folder / WEIGHTS} is not there or no safetensors file ({error}); fetch it again, since pickled adapters "
            "are not read."
        ) from error
    anything: Any = plain
    modules: dict[str, nn.Module] = dict(anything.named_modules())
    embedded = plain.get_input_embeddings().weight
    changes: Changes = {}
    for name, pair in pairs.items():
        module: Any = modules.get(name)
        if not (isinstance(module, Conv1D) or hasattr(module, "in_features")) or pair.keys() != {"A", "B"}:
            raise UserError(
                f"The adapter in {folder} does not fit {name[:80]} of {type(plain).__name__}; give its base."
            )
        if getattr(module, "weight", None) is embedded:
            raise UserError(f"The adapter in {folder} changes {name}, whose weight is that of the embeddings too.")
        rank = pair["A"].shape[0]
        scale = settings["lora_alpha"] / (math.sqrt(rank) if settings.get("use_rslora") else rank)
        if pair["B"].shape[1:] != (rank,):
            raise UserError(f"The two matrices of {name[:80]} in {folder} do not fit; fetch them again.")
        shape = module.weight.T.shape if isinstance(module, Conv1D) else (module.out_features, module.in_features)
        if (pair["B"].shape[0], *pair["A"].shape[1:]) != tuple(shape):
            raise UserError(f"The adapter in {folder} is of another shape than {name[:80]}; give its base.")
        changes[name] = LowRank(pair["A"], scale * pair["B"])
    return changes


def add_changes(plain: PreTrainedModel, changes: Changes) -> None:
    """Put weights with these changes added in the place of a model's own, which stay as they are. Where they are no
    floats in memory, the changes stand beside them."""
    dtype = next(plain.parameters()).dtype
    for name, change in changes.items():
        module: Any = plain.get_submodule(name)
        weight = getattr(module, "weight", None)
        if type(weight) is nn.Parameter and not weight.is_meta and weight.is_floating_point():
            product = change.up @ change.down
            added = weight.detach() + (product.T if isinstance(module, Conv1D) else product).to(weight)
            module.weight = nn.Parameter(added, weight.requires_grad)
            continue
        beside = f"adapter_{sum(isinstance(part, LowRank) for part in module.children())}"
        held: Any = module
        module.add_module(beside, change.to(device=device_of(held), dtype=dtype))
        module.register_forward_hook(partial(_added, beside))


def _added(beside: str, module: nn.Module, args: tuple[Tensor], output: Tensor) -> Tensor:
    """What a linear layer computes, and what an adapter beside it does."""
    return output + module.get_submodule(beside)(args[0])


def base_of(source: nn.Module) -> nn.Module:
    """The model within a PeftModel, whose modules hold the adapter; other modules as they are.

    Raises:
        UserError: the PeftModel does more than the model within it.
    """
    for settings in dict(getattr(source, "peft_config", None) or {}).values():
        for name in _SOMEWHERE:
            if getattr(settings, name, None):
                raise UserError(
                    f"This {type(source).__name__} has an adapter with {name}={getattr(settings, name)!r}, which acts "
                    "on some tokens or texts only, as PEFT says at each call; kvprobe reads adapters that act on all."
                )
    inside: Any = getattr(source, "get_base_model", None)
    if inside is None:
        return source
    base: Any = inside()
    ids = torch.arange(3, device=device_of(base))[None]
    source.eval()
    with torch.no_grad():
        whole, alone = (model(input_ids=ids, use_cache=False).logits for model in (source, base))
    if not isinstance(base, PreTrainedModel) or not torch.equal(whole, alone):
        raise UserError(
            f"This {type(source).__name__} computes something else than the model in it, as with virtual tokens; "
            "kvprobe reads adapters that lie in a model's modules, such as LoRA."
        )
    return base
