"""Training a dictionary on recorded activations with sae-lens, without an account, a hub or a remote log.

Activations are centred and scaled to unit variance, so that one learning rate fits K, V and residual streams of any
size. At the end both are folded into the weights, so that a saved dictionary reads activations as the model computes
them.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from kvprobe.arguments import check_fields, checked_arguments
from kvprobe.errors import UserError
from kvprobe.inference.model import Model
from kvprobe.progress import Bar
from kvprobe.saes.dictionary import FINGERPRINT, Dictionary
from kvprobe.saes.places import Place
from kvprobe.saes.shards import Shards

if TYPE_CHECKING:
    from sae_lens import JumpReLUTrainingSAE, TopKTrainingSAE
    from sae_lens.config import SAETrainerConfig
    from sae_lens.saes.sae import SAEMetadata

Kind = Literal["topk", "jumprelu"]


@dataclass(frozen=True)
class Recipe:
    """How a dictionary is trained.

    Attributes:
        kind: `topk` (Gao et al. 2024, arXiv 2406.04093) or `jumprelu` (Rajamanoharan et al. 2024, arXiv 2407.14435).
        width: number of latents.
        active: active latents of a token: the most (`topk`), or the average that the penalty aims at (`jumprelu`).
        tokens: to train on; recorded tokens are repeated as often as needed.
        batch: tokens of a step.
        learning_rate: its highest value; it rises over the first twentieth of the steps and falls to 0 over the last
            third.
        seed: of weights and batches.
    """

    kind: Kind = "topk"
    width: int = 1024
    active: int = 32
    tokens: int = 500_000
    batch: int = 512
    learning_rate: float = 2e-3
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self)
        if not 1 <= self.active <= self.width:
            raise UserError(f"`active` must lie in 1 to {self.width}, the number of latents; got {self.active}.")
        if not 1 <= self.batch <= self.tokens or self.learning_rate <= 0:
            raise UserError(
                f"Training needs a batch of 1 to {self.tokens} tokens and a learning rate above 0; got a batch of "
                f"{self.batch} and a rate of {self.learning_rate}."
            )


@checked_arguments
def train(shards: Shards, place: Place, recipe: Recipe, model_name: str) -> Dictionary:
    """A dictionary trained on what was recorded at a place.

    Args:
        model_name: for the metadata, beside the fingerprint of the weights.

    Raises:
        UserError: the place was not recorded, or its activations do not vary.
    """
    from sae_lens import SAETrainer

    mean, spread = shards.mean_and_spread(place)
    if spread == 0:
        raise UserError(f"The activations at {place} do not vary, so there is nothing to learn; record other texts.")
    steps = recipe.tokens // recipe.batch
    with torch.random.fork_rng():
        torch.manual_seed(recipe.seed)
        sae = _new(recipe, len(mean), steps, _metadata(shards, place, recipe, model_name))
    batches = shards.batches(place, recipe.batch, np.random.default_rng(recipe.seed))
    trainer = SAETrainer(_config(recipe, steps), sae, ((batch - mean) / spread for batch in batches))
    with Bar(total=steps * recipe.batch, desc=f"Training a dictionary of {place}", unit="token") as bar:
        for step in range(steps):
            # One step of sae-lens' `fit`, with a bar that counts tokens and without its log.
            trainer.maybe_reset_sparsity()
            output = trainer.step(next(trainer.data_provider))
            trainer.n_training_steps += 1
            bar.update(recipe.batch)
            if step % 50 == 0:
                # Activations have unit variance here, so the squared error per number is the unexplained share.
                bar.set_postfix(unexplained=f"{output.losses['mse_loss'].item() / len(mean):.3f}", refresh=False)
    trainer.set_final_sae_metadata()
    sae.fold_activation_norm_scaling_factor(1 / spread)
    sae.b_dec.data += mean
    return Dictionary(sae.eval(), place)


def trained_in(folder: Path, shards: Shards, place: Place, recipe: Recipe, model: Model) -> Dictionary:
    """The dictionary in a folder, trained and saved there first where there is none; see `train`."""
    if not folder.is_dir():
        partial = folder.with_name(f"{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        train(shards, place, recipe, model.name).save(partial).replace(folder)
    # As it was saved, so that it is the same at any time: saving rounds TopK dictionaries in the last digit.
    return Dictionary.load(folder, model)


def _config(recipe: Recipe, steps: int) -> "SAETrainerConfig":
    """The settings of sae-lens' trainer."""
    from sae_lens.config import LoggingConfig, SAETrainerConfig

    return SAETrainerConfig(
        total_training_samples=steps * recipe.batch,
        train_batch_size_samples=recipe.batch,
        lr=recipe.learning_rate,
        lr_end=recipe.learning_rate,
        lr_warm_up_steps=steps // 20,
        lr_decay_steps=steps // 3,
        # A latent that was not active for a tenth of the steps gets the auxiliary loss, which makes it active again.
        dead_feature_window=max(1, steps // 10),
        feature_sampling_window=max(1, steps // 2),
        logger=LoggingConfig(log_to_wandb=False),
    )


def _new(recipe: Recipe, dim: int, steps: int, metadata: "SAEMetadata") -> "TopKTrainingSAE | JumpReLUTrainingSAE":
    """A training SAE of sae-lens with fresh weights."""
    from sae_lens import JumpReLUTrainingSAE, JumpReLUTrainingSAEConfig, TopKTrainingSAE, TopKTrainingSAEConfig

    if recipe.kind == "topk":
        return TopKTrainingSAE(TopKTrainingSAEConfig(dim, recipe.width, k=recipe.active, metadata=metadata))
    return JumpReLUTrainingSAE(
        JumpReLUTrainingSAEConfig(
            dim,
            recipe.width,
            # The penalty of Gemma Scope 2, which aims at a number of active latents.
            jumprelu_sparsity_loss_mode="quadratic",
            target_l0=float(recipe.active),
            l0_coefficient=1.0,
            l0_warm_up_steps=steps // 4,
            metadata=metadata,
        )
    )


def _metadata(shards: Shards, place: Place, recipe: Recipe, model_name: str) -> "SAEMetadata":
    from sae_lens.saes.sae import SAEMetadata

    return SAEMetadata(
        model_name=model_name,
        hook_name=place.hook,
        kvprobe_heads="joined",
        kvprobe_tokens=recipe.tokens,
        kvprobe_recorded=shards.tokens,
        kvprobe_seed=recipe.seed,
        **{FINGERPRINT: shards.model},
    )
