"""A dictionary: a sparse autoencoder of sae-lens at a place of a model, which writes activations as sums of latents."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvprobe.arguments import checked_arguments
from kvprobe.errors import UserError, warn
from kvprobe.files import expanded, filling
from kvprobe.fingerprint import differing, digest
from kvprobe.inference.capture import Captured
from kvprobe.inference.model import Model
from kvprobe.models.files import refuse_not_finite
from kvprobe.names import one_line, unknown
from kvprobe.saes.places import Place, joined
from kvprobe.saes.shards import FIRST
from kvprobe.shipped import shipped

if TYPE_CHECKING:
    from sae_lens import SAE
    from sae_lens.saes.sae import SAEConfig

WEIGHTS = "sae_weights.safetensors"
FINGERPRINT = "kvprobe_model"
"""The entry of a dictionary's metadata that holds the fingerprint of the weights it was trained on."""


@checked_arguments
@dataclass(frozen=True)
class Dictionary:
    """A sparse autoencoder at a place.

    Attributes:
        sae: the sae-lens object, of any architecture that encodes and decodes at one place.
        place: where it reads and writes.
        rotation: applied to activations about the decoder's bias before they are read, and undone afterwards, or None.
    """

    sae: "SAE[Any]"
    place: Place
    rotation: Float[Tensor, "dim dim"] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """What pickle writes: an SAE of sae-lens has functions of its own, which it could not."""
        sae = self.sae
        return _unpickled, (type(sae), sae.cfg, sae.state_dict(), sae.training, self.place, self.rotation)

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
        if latents.shape[-1] != self.width:
            raise UserError(f"The SAE has {self.width} latents; give as many for each token, not {latents.shape[-1]}.")
        with torch.no_grad():
            decoded = self.sae.decode(latents)
            if self.rotation is not None:
                decoded = (decoded - self.sae.b_dec) @ self.rotation.T + self.sae.b_dec
            return decoded

    def reconstruct(self, activations: Float[Tensor, "*rows dim"]) -> Float[Tensor, "*rows dim"]:
        """The reconstruction of activations from their latents, in their own dtype."""
        return self.decode(self.encode(activations)).to(activations.dtype)

    def rotated(self, seed: int) -> "Dictionary":
        """A control: the same dictionary rotated at random. It keeps shape, thresholds and inner geometry, and is
        aligned with nothing in the model."""
        drawn = torch.randn(self.dim, self.dim, generator=torch.Generator().manual_seed(seed))
        return replace(self, rotation=torch.linalg.qr(drawn).Q.to(self.sae.b_dec))

    def splicing(self) -> Callable[[Tensor], Tensor]:
        """For `kvprobe.inference.capture.editing`, while texts are read from their start: the reconstruction in place
        of every slot but the first, which dictionaries trained here have not seen."""

        def edit(tensor: Tensor) -> Tensor:
            flat = tensor.flatten(2)
            return torch.cat([flat[:, :FIRST], self.reconstruct(flat[:, FIRST:])], 1).view_as(tensor)

        return edit

    def save(self, folder: Path, *, half: bool = False) -> Path:
        """Write sae-lens' own files, which `sae_lens.SAE.load_from_disk` and `load` read.

        Args:
            half: write weights of 16 bits, which are read as 32 again.
        """
        with filling(folder) as made:
            # A training SAE has both; the first leaves out what only training needs.
            weights, _ = getattr(self.sae, "save_inference_model", self.sae.save_model)(str(made))
            if half:
                save_file({name: tensor.half() for name, tensor in load_file(weights).items()}, weights)
        return folder

    @classmethod
    def load(cls, source: "str | Path | SAE[Any]", model: Model, place: Place | None = None) -> "Dictionary":
        """A dictionary for a model: by the name of one that ships, from a folder that sae-lens wrote, or from an SAE.

        Args:
            place: where it belongs; by default what its own metadata say.

        Raises:
            UserError: it does not exist, it is damaged, the model has no such place, or it is of the wrong width.
        """
        sae = _from_disk(source) if isinstance(source, str | Path) else source
        refuse_not_finite("the SAE", sae.named_parameters())
        config = sae.cfg
        hook = config.metadata.hook_name
        if place is None and hook is None:
            raise UserError(
                "The SAE does not say which hook it was trained at; give `place`, such as Place('resid_post', 7)."
            )
        dictionary = cls(sae.to(model.lanes.device), Place.of_hook(hook) if place is None else place)
        dictionary._refuse_misplaced(model)
        _refuse_unsupported(config)
        trained_on = config.metadata[FINGERPRINT]
        if trained_on is not None and trained_on != model.fingerprint:
            warn(
                f"The SAE was trained on another model than {model.name}, or in another dtype (it differs in "
                f"{differing(trained_on, model.fingerprint)}), so its card does not describe how well it does here."
            )
        elif trained_on is None and not _same_name(named := str(config.metadata.model_name or ""), model):
            warn(
                f"The SAE's own metadata say that it was trained on {named!r}, and this model is {model.name}; on "
                "another model its latents mean something else."
            )
        return dictionary

    @classmethod
    def load_all(cls, sources: "Sequence[str | Path | SAE[Any]]", model: Model) -> "list[Dictionary]":
        """Several dictionaries for a model, no two of one place.

        Raises:
            UserError: as `load`, or two of them read the same place.
        """
        loaded = [cls.load(source, model) for source in sources]
        places = [dictionary.place for dictionary in loaded]
        for number, place in enumerate(places):
            if place in places[:number]:
                raise UserError(f"Two dictionaries read {place}; give one for each place.")
        return loaded

    def _refuse_misplaced(self, model: Model) -> None:
        """Refuse a dictionary whose place the model does not have, or has in another width."""
        shape = model.geometry
        if self.place.layer >= shape.n_layers:
            raise UserError(
                f"The SAE reads layer {self.place.layer}, but {model.name} has layers 0 to {shape.n_layers - 1}; give "
                "one that was trained on this model."
            )
        self._check(self.place.width(shape), f"{self.place} of {model.name}")

    def _check(self, width: int, what: str) -> None:
        if width != self.dim:
            raise UserError(
                f"The SAE reads {self.dim} numbers a token, but {what} {'have' if what == 'activations' else 'has'} "
                f"{width}; give one that was trained there."
            )


def _unpickled(
    kind: "type[SAE[Any]]",
    config: "SAEConfig",
    weights: Mapping[str, Tensor],
    trains: bool,
    place: Place,
    rotation: Tensor | None,
) -> Dictionary:
    """The inverse of `Dictionary.__reduce__`."""
    sae = kind(config).train(trains)
    sae.load_state_dict(weights, assign=True)
    return Dictionary(sae, place, rotation)


def _same_name(named: str, model: Model) -> bool:
    """Whether a name in an SAE's metadata may be this model's; also where there is none."""
    plain, *others = (
        re.sub(r"[^a-z0-9]", "", name.rpartition("/")[2].lower())
        for name in (named, model.name, str(getattr(model.lanes.plain.config, "name_or_path", "")))
    )
    return not plain or any(other and (plain in other or other in plain) for other in others)


def _refuse_unsupported(config: "SAEConfig") -> None:
    """Refuse an SAE of sae-lens that reads or writes in a way that kvprobe does not."""
    if "transcoder" in config.architecture() or config.metadata.hook_name_out is not None:
        raise UserError("This is a transcoder, which writes elsewhere than it reads; give an SAE.")
    if config.metadata.hook_head_index is not None or config.reshape_activations != "none":
        raise UserError("The SAE reads single heads, but kvprobe reads KV heads side by side; give one trained so.")
    if config.normalize_activations in ("layer_norm", "constant_norm_rescale"):
        raise UserError(
            f"The SAE rescales each activation ({config.normalize_activations}), so its decoding is not linear; give "
            "one trained without rescaling."
        )
    if config.normalize_activations == "expected_average_only_in":
        raise UserError(
            "The SAE expects activations scaled by a factor that its files do not hold; fold it into the weights first "
            "(fold_activation_norm_scaling_factor)."
        )


def slot_means(
    captured: Captured, slots: slice, **readers: Dictionary
) -> dict[str, Float[Tensor, "rows dim_or_width"]]:
    """Means over slots, in fp32: of the activations at a place (`raw`), and of the latents of some dictionaries.

    Args:
        captured: see `kvprobe.saes.places.asked_at`.
        readers: dictionaries of one place, such as one and what `Dictionary.rotated` makes of it.
    """
    place = next(iter(readers.values())).place
    activations = joined(captured[place.family, place.layer])[:, slots].float()
    latents = {name: dictionary.encode(activations).float().mean(1) for name, dictionary in readers.items()}
    return {"raw": activations.mean(1), **latents}


def shipped_dictionaries() -> dict[str, Path]:
    """The dictionaries that ship with kvprobe, by name."""
    return {path.parent.name: path.parent for path in sorted((shipped("models") / "features").glob("*/cfg.json"))}


def content_digest(source: str | Path) -> str:
    """A hash of the files of a dictionary on disk, by name or folder; that of no bytes where there is none."""
    folder = shipped_dictionaries().get(str(source)) or expanded(source)
    return digest([path.read_bytes() for path in sorted(folder.glob("*")) if path.name in ("cfg.json", WEIGHTS)], 16)


def _from_disk(source: str | Path) -> "SAE[Any]":
    from sae_lens import SAE  # takes seconds

    folder = shipped_dictionaries().get(str(source)) or expanded(source)
    if not (folder / "cfg.json").is_file():
        if isinstance(source, str) and not Path(source).is_dir():
            raise UserError(unknown("dictionary or sae-lens folder", source, shipped_dictionaries()))
        raise UserError(f"{folder} holds no SAE (it has no cfg.json); give a folder that sae-lens wrote.")
    try:
        return SAE.load_from_disk(folder, device="cpu")
    except (OSError, KeyError, TypeError, ValueError, RuntimeError, SafetensorError) as error:
        raise UserError(
            f"The SAE in {folder} cannot be loaded ({one_line(error)}); give files that sae-lens wrote."
        ) from error
