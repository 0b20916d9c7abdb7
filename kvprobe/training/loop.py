"""Training as a recipe says, from seeded batches, so that an interrupted training goes on as if it had not been."""

import inspect
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from kvprobe.cache.device import pick_device
from kvprobe.errors import UserError
from kvprobe.files import filling, folder_claimed, read_json, refuse_damaged, replacing, write_whole
from kvprobe.fingerprint import digest
from kvprobe.progress import Bar
from kvprobe.training.schedule import Schedule

CHECKPOINT, RECORD, KEPT = "checkpoint.safetensors", "training.json", "checkpoints"
LIMIT = 2**24
"""Bytes of a record."""
FIELDS = {"name": str, "recipe": dict, "code": str, "losses": list, "accuracy": dict}
"""Of a record."""
MOMENTS = ("exp_avg", "exp_avg_sq")
"""What the optimiser knows of each weight."""


@runtime_checkable
class TrainingRecipe(Protocol):
    """What is trained, and on what. A dataclass, whose fields and module decide all numbers."""

    @property
    def name(self) -> str: ...

    @property
    def schedule(self) -> Schedule: ...

    def model(self) -> PreTrainedModel:
        """The model before training; its weights are drawn from torch's generator, which is seeded."""
        ...

    def tokenizer(self) -> PreTrainedTokenizerFast: ...

    def loss(self, model: PreTrainedModel, rng: np.random.Generator) -> Float[Tensor, ""]:
        """The loss of one batch, in nats per token that counts."""
        ...

    def accuracy(self, model: PreTrainedModel, rng: np.random.Generator) -> Mapping[str, float]:
        """Shares of right answers to examples that were not trained on, by kind."""
        ...


@runtime_checkable
class Writing(Protocol):
    """A recipe that says itself what of a model is written."""

    def write(self, model: PreTrainedModel, folder: Path) -> None:
        """Write what loads, by itself or on its base."""
        ...


def train(recipe: TrainingRecipe, folder: Path, device: str = "cpu") -> dict[str, Any]:
    """Train a model, and write its weights, config, tokenizer and `training.json` to `folder`; a folder that holds a
    part of the same training is gone on with, and one that holds all of it is left as it is.

    Examples and first weights are drawn on the CPU, and so are the same on every device; sums round otherwise on each.

    Returns the record: the recipe, the loss of each step, and the accuracy at each checkpoint. Where the schedule keeps
    weights, `checkpoints` has a folder for each checkpoint, named by its step, that loads like the model.

    Raises:
        UserError: the folder holds a training by another recipe.
    """
    with folder_claimed(folder):
        try:
            return _train(recipe, folder, device)
        except KeyboardInterrupt:
            kept = "the last checkpoint is kept" if (folder / CHECKPOINT).is_file() else "no checkpoint was reached"
            raise KeyboardInterrupt(f"{kept} in {folder}") from None


def _train(recipe: TrainingRecipe, folder: Path, device: str) -> dict[str, Any]:
    """`train`, in a folder of its own."""
    schedule = recipe.schedule
    # As a file gives them back. The module's code decides what its constants and functions draw.
    fields = json.loads(json.dumps(asdict(cast(Any, recipe))))
    code = digest([inspect.getsource(sys.modules[type(recipe).__module__]).encode()])
    record, tensors = _resumed(folder)
    if record and (record["name"], record["recipe"]) != (recipe.name, fields):
        raise UserError(f"{folder} holds a training by another recipe; give another folder, or delete it.")
    if (folder / RECORD).is_file():
        (folder / CHECKPOINT).unlink(missing_ok=True)
        return record
    if record and record["code"] != code:
        raise UserError(f"{folder} holds a part of a training by other code; give another folder, or delete it.")
    record = record or {"name": recipe.name, "recipe": fields, "code": code, "losses": [], "accuracy": {}}
    model, optimiser = _start(recipe, tensors, len(record["losses"]), device)
    if schedule.keeps and not record["accuracy"]:
        _measure(recipe, model, folder, record)
    with Bar(total=schedule.steps, initial=len(record["losses"]), desc=f"Training {recipe.name}", unit="step") as bar:
        while not _ended(schedule, record):
            step = len(record["losses"])
            for group in optimiser.param_groups:
                group["lr"] = schedule.learning_rate * schedule.rate(step)
            loss = recipe.loss(model.train(), np.random.default_rng([schedule.seed, step]))
            if not bool(loss.isfinite()):
                raise UserError(f"The loss of step {step} is {loss.item()}; train with a lower learning rate.")
            optimiser.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(_trained(model).values(), 1.0)
            optimiser.step()
            record["losses"].append(round(loss.item(), 6))
            bar.set_postfix(loss=f"{loss.item():.3f}")
            bar.update()
            if (done := step + 1) % schedule.checkpoint == 0 or done == schedule.steps:
                _measure(recipe, model, folder, record)
                _keep(model, optimiser, folder, record)
    _write(recipe, model, folder)
    write_whole(folder / RECORD, json.dumps(record))
    (folder / CHECKPOINT).unlink(missing_ok=True)
    return record


@torch.no_grad()
def accuracy(recipe: TrainingRecipe, model: PreTrainedModel) -> dict[str, float]:
    """What `Recipe.accuracy` gives of examples that no step draws."""
    rng = np.random.default_rng([recipe.schedule.seed, recipe.schedule.steps])
    return {kind: round(share, 6) for kind, share in recipe.accuracy(model.eval(), rng).items()}


def _ended(schedule: Schedule, record: Mapping[str, Any]) -> bool:
    """Whether all steps were taken, or the last checkpoint needs no more of them."""
    done = len(record["losses"])
    measured = record["accuracy"].get(str(done))
    return done >= schedule.steps or (measured is not None and schedule.ends(measured))


def _measure(recipe: TrainingRecipe, model: PreTrainedModel, folder: Path, record: Mapping[str, Any]) -> None:
    """Add the accuracy after the steps so far to the record, and keep the weights where the schedule asks for it."""
    done = len(record["losses"])
    record["accuracy"][str(done)] = accuracy(recipe, model)
    if recipe.schedule.keeps:
        _write(recipe, model, folder / KEPT / str(done))


def _write(recipe: TrainingRecipe, model: PreTrainedModel, folder: Path) -> None:
    """Write a folder that loads."""
    with filling(folder) as made:
        if isinstance(recipe, Writing):
            recipe.write(model, made)
            return
        recipe.tokenizer().save_pretrained(made)
        model.save_pretrained(made)


def _resumed(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The record of what was trained in a folder, and the tensors to go on from; empty where there is none."""
    path, tensors = folder / RECORD, {}
    if path.is_file():
        content = read_json(path, LIMIT, "delete the folder and train again")
    elif (path := folder / CHECKPOINT).is_file():
        refuse_damaged(path)
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            content = _parsed((file.metadata() or {}).get("record", ""))
    else:
        return {}, {}
    if not isinstance(content, dict) or {name: type(value) for name, value in content.items()} != FIELDS:
        raise UserError(f"{path} is not of a training; delete it and train again.")
    return content, tensors


def _parsed(text: str) -> object:
    """What a JSON text holds; None where it is none."""
    try:
        return json.loads(text)
    except ValueError:
        return None


def _start(
    recipe: TrainingRecipe, tensors: Mapping[str, Tensor], done: int, device: str
) -> tuple[PreTrainedModel, torch.optim.AdamW]:
    """The model and its optimiser after so many steps."""
    with torch.random.fork_rng():
        torch.manual_seed(recipe.schedule.seed)
        model = recipe.model()
    cast(torch.nn.Module, model).to(pick_device(device))
    rate = recipe.schedule.learning_rate
    optimiser = torch.optim.AdamW(_trained(model).values(), rate, (0.9, 0.98), weight_decay=0.01)
    if done:
        shapes = {f"weight.{name}": parameter.shape for name, parameter in _trained(model).items()}
        if {name: tensor.shape for name, tensor in tensors.items() if name.startswith("weight.")} != shapes:
            raise UserError(f"The {CHECKPOINT} is of a model of another shape; delete it and train again.")
        state: dict[int, dict[str, Tensor]] = {}
        for number, (name, parameter) in enumerate(_trained(model).items()):
            parameter.data.copy_(tensors[f"weight.{name}"])
            state[number] = {moment: tensors[f"{moment}.{name}"] for moment in MOMENTS}
            state[number]["step"] = torch.tensor(float(done))
        optimiser.load_state_dict({"state": state, "param_groups": optimiser.state_dict()["param_groups"]})
    return model, optimiser


def _trained(model: PreTrainedModel) -> dict[str, torch.nn.Parameter]:
    """The parameters that are trained, which are all but those of an adapter's base."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def _keep(model: PreTrainedModel, optimiser: torch.optim.AdamW, folder: Path, record: Mapping[str, Any]) -> None:
    """Write a checkpoint, one file, so that the record and the weights are of the same step."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in _trained(model).items():
        tensors[f"weight.{name}"] = parameter.detach().contiguous()
        tensors |= {f"{moment}.{name}": optimiser.state[parameter][moment].contiguous() for moment in MOMENTS}
    with replacing(folder / CHECKPOINT) as partial:
        save_file(tensors, partial, {"record": json.dumps(record)})


@dataclass(frozen=True)
class TrainingBatch:
    """Examples padded on the right.

    Attributes:
        counts: the tokens whose loss counts.
        present: those that are no padding.
        positions: of the tokens, where they are not 0, 1, ….
        visible: which tokens each token attends to, where it is not all before it.
    """

    ids: Int[Tensor, "batch tokens"]
    counts: Bool[Tensor, "batch tokens"]
    present: Bool[Tensor, "batch tokens"]
    positions: Int[Tensor, "batch tokens"] | None = None
    visible: Bool[Tensor, "#batch 1 tokens tokens"] | None = None

    @property
    def inputs(self) -> dict[str, Tensor]:
        """What the model is given: all but the last token."""
        inputs = {"input_ids": self.ids[:, :-1]}
        if self.positions is not None:
            inputs["position_ids"] = self.positions[:, :-1]
        if self.visible is not None:
            inputs["attention_mask"] = self.visible[:, :, :-1, :-1]
        return inputs

    def on(self, device: torch.device) -> "TrainingBatch":
        """The same on a device."""
        tensors = {name: tensor.to(device) for name, tensor in vars(self).items() if tensor is not None}
        return replace(self, **tensors)

    def likeliest(self, model: PreTrainedModel) -> Bool[Tensor, "batch next"]:
        """Whether each token but the first is the likeliest after those before it."""
        output: Any = model(**self.on(model.device).inputs, use_cache=False)
        return output.logits.argmax(-1).cpu() == self.ids[:, 1:]

    def right(self, model: PreTrainedModel) -> Bool[Tensor, "batch"]:
        """Whether all tokens of a row that count are the likeliest."""
        return (self.likeliest(model) | ~self.counts[:, 1:]).all(1)


def loss_of(model: PreTrainedModel, batches: Sequence[TrainingBatch]) -> Float[Tensor, ""]:
    """Cross-entropy of the tokens that count, in nats, their mean over all batches; and a router's own loss, which
    keeps experts in use."""
    routed = getattr(model.config, "router_aux_loss_coef", 0.0)
    losses, count = [], sum(int(batch.counts[:, 1:].sum()) for batch in batches)
    tokens = sum(int(batch.present[:, :-1].sum()) for batch in batches)
    for batch in (batch.on(model.device) for batch in batches):
        present = batch.present[:, :-1]
        # The mask keeps padding out of the experts' balance; what is before padding cannot see it anyway.
        asked: dict[str, Any] = {"output_router_logits": True, "attention_mask": present.long()} if routed else {}
        output: Any = model(**(asked | batch.inputs), use_cache=False)
        counts = batch.counts[:, 1:]
        logits, targets = output.logits[counts], batch.ids[:, 1:][counts]
        losses.append(torch.nn.functional.cross_entropy(logits, targets, reduction="sum") / count)
        if routed:
            losses.append(routed * output.aux_loss * int(present.sum()) / tokens)
    return torch.stack(losses).sum()
