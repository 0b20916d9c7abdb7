"""A sparse autoencoder of sae-lens at a place of a model: what it makes of activations, and whether it fits the model."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvprobe.errors import UserError
from kvprobe.fingerprint import differing, digest
from kvprobe.inference.model import Model
from kvprobe.models.files import refuse_not_finite
from kvprobe.names import unknown
from kvprobe.saes.places import Place
from kvprobe.saes.shards import FIRST
from kvprobe.shipped import shipped

WEIGHTS = "sae_weights.safetensors"
FINGERPRINT = "kvprobe_model"
"""Under this name the metadata of a dictionary trained here tell the weights that it was trained on."""


@dataclass(frozen=True)
class Dictionary:
    """A dictionary at a place.

    Attributes:
        sae: the sae-lens object, of any architecture that encodes and decodes at one place.
        place: where it reads and writes.
        rotation: how activations are turned about the decoder's bias before they are read, and back after; None for not at all.
    """

    sae: Any
    place: Place
    rotation: Float[Tensor, "dim dim"] | None = None

    @property
    def width(self) -> int:
        """How many latents there are."""
        return self.sae.cfg.d_sae

    @property
    def dim(self) -> int:
        """How many numbers it reads."""
        return self.sae.cfg.d_in

    @property
    def directions(self) -> Float[Tensor, "width dim"]:
        """What a latent adds to the reconstruction for each unit of its activation."""
        one = torch.eye(self.width).to(self.sae.W_dec)
        return self.decode(one) - self.decode(torch.zeros_like(one[:1]))

    def encode(self, activations: Float[Tensor, "*rows dim"]) -> Float[Tensor, "*rows width"]:
        """The latents of each activation.

        Raises:
            UserError: the activations are of another width.
        """
        self._check(activations.shape[-1], "activations")
        with torch.no_grad():
            read = activations.to(self.sae.W_dec)
            if self.rotation is not None:
                read = (read - self.sae.b_dec) @ self.rotation + self.sae.b_dec
            return self.sae.encode(read)

    def decode(self, latents: Float[Tensor, "*rows width"]) -> Float[Tensor, "*rows dim"]:
        """The reconstruction from latents, in the dtype of the dictionary."""
        with torch.no_grad():
            found = self.sae.decode(latents)
            if self.rotation is not None:
                found = (found - self.sae.b_dec) @ self.rotation.T + self.sae.b_dec
            return found

    def reconstruct(self, activations: Float[Tensor, "*rows dim"]) -> Float[Tensor, "*rows dim"]:
        """What is left of activations that pass through the dictionary, in their own dtype."""
        return self.decode(self.encode(activations)).to(activations.dtype)

    def rotated(self, seed: int) -> "Dictionary":
        """A control: the same dictionary turned at random, so that it has its shape, thresholds and inner geometry, and is aligned with
        nothing in the model."""
        drawn = torch.randn(self.dim, self.dim, generator=torch.Generator().manual_seed(seed))
        return replace(self, rotation=torch.linalg.qr(drawn).Q.to(self.sae.b_dec))

    def splicing(self) -> Callable[[Tensor], Tensor]:
        """For `kvprobe.inference.capture.editing`, while texts are read from their start: the reconstruction in place of every slot but the
        first, which no dictionary trained here has seen."""

        def edit(tensor: Tensor) -> Tensor:
            flat = tensor.flatten(2)
            return torch.cat([flat[:, :FIRST], self.reconstruct(flat[:, FIRST:])], 1).view_as(tensor)

        return edit

    def save(self, folder: Path, *, half: bool = False) -> Path:
        """Write sae-lens' own files, which `sae_lens.SAE.load_from_disk` and `load` read.

        Args:
            half: write weights of 16 bits, which are read as 32 again.
        """
        keeps = hasattr(self.sae, "save_inference_model")
        weights, _ = (self.sae.save_inference_model if keeps else self.sae.save_model)(str(folder))
        if half:
            save_file({name: tensor.half() for name, tensor in load_file(weights).items()}, weights)
        return folder

    @classmethod
    def load(cls, source: "str | Path | Any", model: Model, place: Place | None = None) -> "Dictionary":
        """A dictionary for a model: one that ships with kvprobe, by name; a folder that sae-lens wrote; or a sae-lens SAE in hand.

        Args:
            place: where it belongs; by default what its own metadata say.

        Raises:
            UserError: there is none, it is damaged, it belongs nowhere in this model, or it is of the wrong width.
        """
        sae = _from_disk(source) if isinstance(source, str | Path) else source
        refuse_not_finite("the SAE", sae.named_parameters())
        config = sae.cfg
        hook = config.metadata.hook_name
        if place is None and hook is None:
            raise UserError(
                "The SAE does not say which hook it was trained at; give `place`, such as Place('resid_post', 7)."
            )
        found = cls(sae.to(model.lanes.device), Place.of_hook(hook) if place is None else place)
        shape = model.geometry
        if found.place.layer >= shape.n_layers:
            raise UserError(
                f"The SAE reads layer {found.place.layer}, but {model.name} has layers 0 to {shape.n_layers - 1}; give one that was "
                f"trained on this model."
            )
        found._check(found.place.width(shape), f"{found.place} of {model.name}")
        if "transcoder" in config.architecture() or config.metadata.hook_name_out is not None:
            raise UserError("This is a transcoder, which writes elsewhere than it reads; give an SAE.")
        if config.metadata.hook_head_index is not None or config.reshape_activations != "none":
            raise UserError("The SAE reads single heads; kvprobe reads KV heads side by side, so give one trained so.")
        if config.normalize_activations in ("layer_norm", "constant_norm_rescale"):
            raise UserError(
                f"The SAE rescales each activation ({config.normalize_activations}), so its decoding is not linear; give one trained without."
            )
        if config.normalize_activations == "expected_average_only_in":
            raise UserError(
                "The SAE expects activations scaled by a factor that its files do not hold; fold it into the weights first "
                "(fold_activation_norm_scaling_factor)."
            )
        trained_on = config.metadata[FINGERPRINT]
        if trained_on is not None and trained_on != model.fingerprint:
            warnings.warn(
                f"The SAE was trained on another model than {model.name}, or in another dtype (it differs in "
                f"{differing(trained_on, model.fingerprint)}), so what it makes of this one is not what its card says.",
                stacklevel=2,
            )
        return found

    def _check(self, width: int, what: str) -> None:
        if width != self.dim:
            raise UserError(
                f"The SAE reads {self.dim} numbers a token, but {what} {'have' if what == 'activations' else 'has'} {width}; give one "
                f"that was trained there."
            )


def shipped_dictionaries() -> dict[str, Path]:
    """The dictionaries that ship with kvprobe, by name."""
    return {path.parent.name: path.parent for path in sorted((shipped("models") / "features").glob("*/cfg.json"))}


def content_digest(source: str | Path) -> str:
    """A hash of the files of a dictionary on disk, by name or folder; what is no dictionary has that of nothing."""
    folder = shipped_dictionaries().get(str(source)) or Path(source)
    return digest([path.read_bytes() for path in sorted(folder.glob("*")) if path.name in ("cfg.json", WEIGHTS)], 16)


def _from_disk(source: str | Path) -> Any:
    from sae_lens import SAE  # takes seconds

    folder = shipped_dictionaries().get(str(source)) or Path(source)
    if not (folder / "cfg.json").is_file():
        if isinstance(source, str) and not Path(source).is_dir():
            raise UserError(
                unknown("dictionary", source, shipped_dictionaries()) + " A folder that sae-lens wrote will do as well."
            )
        raise UserError(f"{folder} holds no SAE (it has no cfg.json); give a folder that sae-lens wrote.")
    try:
        return SAE.load_from_disk(folder, device="cpu")
    except (OSError, KeyError, TypeError, ValueError, RuntimeError, SafetensorError) as error:
        raise UserError(f"The SAE in {folder} cannot be loaded ({' '.join(str(error).split())[:200]}).") from error
