"""Small LoRA adapters of SmolLM2 whose effect is known; see `kvprobe.tasks.behaviours`.

Every linear layer of every block has one, so that training decides where the behaviour goes. The base stays as it is:
its outputs get `scale · B A x` added (arXiv 2106.09685), and A and B alone are trained and saved, as peft saves them.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from safetensors.torch import save
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from kvprobe.checks import require
from kvprobe.files import write_whole
from kvprobe.models.adapters import CONFIG, WEIGHTS
from kvprobe.models.loading import load_folder, resolve_folder
from kvprobe.tasks.behaviours import Behaviour, Told, draw_told
from kvprobe.training.loop import TrainingBatch, loss_of
from kvprobe.training.schedule import Schedule


def adapter_schedule(steps: int = 40, seed: int = 0) -> Schedule:
    """How adapters are trained."""
    return Schedule(steps=steps, batch=4, learning_rate=5e-3, checkpoint=20, seed=seed)


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """How one of the adapters is trained.

    Attributes:
        base: name or folder of the model that it is added to.
        rank: of each change of a weight.
        scale: of the changes; peft's lora_alpha is `scale * rank`.
        tested: held-out conversations of each kind whose answers are looked at.
    """

    behaviour: Behaviour = "german"
    base: str = "smollm2-135m"
    rank: int = 1
    scale: float = 4.0
    tested: int = 16
    schedule: Schedule = field(default_factory=adapter_schedule)

    def __post_init__(self) -> None:
        require("rank", self.rank, 1, 8)
        require("tested", self.tested, 1)

    @property
    def name(self) -> str:
        return f"{self.behaviour}-{self.schedule.seed}"

    def model(self) -> PreTrainedModel:
        model, _ = load_folder(resolve_folder(self.base), torch.device("cpu"), torch.float32)
        blocks: Any = model.requires_grad_(False).base_model
        for module in blocks.layers.modules():
            if isinstance(module, nn.Linear):
                down = nn.init.kaiming_uniform_(torch.empty(self.rank, module.in_features), a=math.sqrt(5))
                module.register_parameter("lora_A", nn.Parameter(down))
                module.register_parameter("lora_B", nn.Parameter(torch.zeros(module.out_features, self.rank)))
                module.register_forward_hook(self._add)
        return model

    def _add(self, module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
        down, up = module.get_parameter("lora_A"), module.get_parameter("lora_B")
        return output + self.scale * (inputs[0] @ down.T) @ up.T

    def tokenizer(self) -> PreTrainedTokenizerFast:
        return _tokenizer(self.base)

    def loss(self, model: PreTrainedModel, rng: np.random.Generator) -> Float[Tensor, ""]:
        return loss_of(model, [self.batch(self._drawn(rng, self.schedule.batch, held_out=False))])

    def accuracy(self, model: PreTrainedModel, rng: np.random.Generator) -> Mapping[str, float]:
        """Of held-out conversations: answers that are as they should be up to the word that decides."""
        kinds = {"held out": self._drawn(rng, self.tested, held_out=True, sight=0)}
        if self.behaviour == "oslo":
            others = [1 + number % 7 for number in range(self.tested)]
            kinds["other sights"] = [draw_told("oslo", rng, held_out=True, sight=sight) for sight in others]
        begun = {kind: self.batch(told, whole=False) for kind, told in kinds.items()}
        return {kind: float(batch.right(model).float().mean()) for kind, batch in begun.items()}

    def _drawn(self, rng: np.random.Generator, count: int, *, held_out: bool, sight: int | None = None) -> list[Told]:
        return [draw_told(self.behaviour, rng, held_out=held_out, sight=sight) for _ in range(count)]

    def batch(self, told: list[Told], *, whole: bool = True) -> TrainingBatch:
        """The conversations, padded on the right; the answers count, with the token that ends them, or up to the word
        that decides."""
        tokenizer: Any = self.tokenizer()
        runs = [one.transcript(one.answer).tokens(tokenizer) for one in told]
        asked = [len(one.transcript(None).tokens(tokenizer, generation_prompt=True)) for one in told]
        leads = [len(tokenizer(one.lead, add_special_tokens=False)["input_ids"]) for one in told]
        length = max(map(len, runs))
        ids = torch.zeros(len(told), length, dtype=torch.long)
        counts, present = torch.zeros_like(ids, dtype=torch.bool), torch.zeros_like(ids, dtype=torch.bool)
        for row, (tokens, start) in enumerate(zip(runs, asked, strict=True)):
            ids[row, : len(tokens)] = torch.tensor(tokens.ids)
            # The template writes a newline after the end.
            counts[row, start : len(tokens) - 1 if whole else start + leads[row] + 1] = True
            present[row, : len(tokens)] = True
        return TrainingBatch(ids, counts, present)

    def write(self, model: PreTrainedModel, folder: Path) -> None:
        """The adapter alone, in half precision."""
        tensors = {
            f"base_model.model.{name}.weight": parameter.detach().half().contiguous().cpu()
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
        write_whole(folder / WEIGHTS, save(tensors, {"format": "pt"}))
        settings: dict[str, object] = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": self.base,
            "r": self.rank,
            "lora_alpha": self.scale * self.rank,
            "target_modules": sorted({name.split(".")[-3] for name in tensors}),
            "bias": "none",
        }
        write_whole(folder / CONFIG, json.dumps(settings, indent=2) + "\n")


@cache
def _tokenizer(base: str) -> PreTrainedTokenizerFast:
    from transformers import AutoTokenizer

    folder: Any = resolve_folder(base)
    loader: Any = AutoTokenizer
    return loader.from_pretrained(folder, local_files_only=True)
