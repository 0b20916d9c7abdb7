"""A published probe: weights in safetensors and a card, in a folder of its own, with which anyone can read a cache."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvprobe.arguments import checked_arguments
from kvprobe.brief import Brief, Table, brief
from kvprobe.cache.cache import KVCache
from kvprobe.cache.visibility import refuse_dropped
from kvprobe.errors import UserError
from kvprobe.files import expanded, filling, write_whole
from kvprobe.fingerprint import differing
from kvprobe.inference.capture import Captured
from kvprobe.inference.model import Model
from kvprobe.names import unknown
from kvprobe.probes.card import CARD, Card, Measure, ProbeInput, Training, published_probes
from kvprobe.probes.fitted import FittedProbe, distance, fitted_probe
from kvprobe.probes.page import card_page
from kvprobe.probes.weights import read_weights, write_weights
from kvprobe.probing.differences import difference
from kvprobe.probing.linear import LinearProbes
from kvprobe.tasks.designs import Target

SURE, FEWEST = 0.9, 10
"""The share of readings that must be right for them to be called leaks, and the least number of readings that can show
it."""


@checked_arguments
@dataclass(frozen=True, repr=False)
class Probe(Brief):
    """A linear probe of one site of one model.

    Attributes:
        card: what it reads, of which model, where and how well.
        linear: softmax of its scores is the probability of each class; the intercept is the log of the base rates.
        deviation: of each feature over the training samples; infinite where it is constant.
    """

    card: Card
    linear: LinearProbes
    deviation: Float[Tensor, "dim"]

    def _facts(self) -> Iterable[str]:
        yield f"{self.name!r} reads {brief(self.target.name)} at {self.card.training.segment}"
        yield f"site={self.site}, model={self.card.model!r}"

    def _table(self) -> Table:
        columns = ("measure", "split", "mean", "low", "high")
        return columns, ([getattr(measure, column) for column in columns] for measure in self.card.measures)

    @property
    def name(self) -> str:
        return self.card.name

    @property
    def target(self) -> Target:
        return self.card.target

    @property
    def site(self) -> ProbeInput:
        return self.card.site

    @property
    def base_rates(self) -> Float[Tensor, "places classes"]:
        """Its probabilities where features carry no information: the class frequencies of its training samples."""
        return self.linear.intercept[0].unflatten(0, (-1, self.linear.classes)).softmax(-1)

    @classmethod
    def fit(
        cls,
        model: Model,
        features: Float[Tensor, "samples dim"],
        labels: Int[Tensor, "places samples"],
        contexts: Int[np.ndarray, "samples"],
        target: Target,
        site: ProbeInput,
        training: Training,
        measures: Sequence[Measure],
        *,
        restart: Float[Tensor, "samples dim"] | None = None,
        name: str | None = None,
        folds: int = 5,
        seed: int = 0,
    ) -> "Probe":
        """A probe trained on all samples (see `fitted_probe`), with the numbers that were measured for its site.

        Args:
            features: what the site shows for each sample.
            contexts: number of the context of each sample.
            training: samples, contexts, penalty and the like are filled in.
            measures: see `Measure`; at least the accuracy under all three splits.
            restart: what the site shows for each sample when it is computed again without the hidden text. A probe of
                differences needs it, and without it no reading of any probe may be called a leak.
            name: made from model, target and segment by default.
            folds: of whole contexts, which determine penalty, temperature and thresholds.
            seed: of the folds.

        Raises:
            UserError: see `fitted_probe` and `Card`.
        """
        if site.less_restart:
            if restart is None:
                raise UserError("A probe of differences from the restart needs the restart's features; give them, too.")
            features, restart = difference(features, restart), torch.zeros_like(features)
        rng = np.random.default_rng([seed, 7])
        fitted = fitted_probe(
            features,
            labels,
            contexts,
            len(target.classes),
            restart=restart,
            through_origin=site.less_restart,
            folds=folds,
            rng=rng,
        )
        gain, power = _gain(fitted)
        typical, far = fitted.distances.double().quantile(torch.tensor([0.5, 0.99], dtype=torch.float64)).tolist()
        trained = replace(
            training,
            samples=len(features),
            contexts=len(np.unique(contexts)),
            penalty=fitted.penalty,
            temperature=tuple(fitted.temperature.tolist()),
            typical=typical,
            far=far,
            gain=gain,
            power=power,
        )
        kind = "-less-restart" if site.less_restart else ""
        usual = f"{Path(model.name).name}-{target.name}-{training.segment}{kind}".lower()
        card = Card(
            name=name or re.sub(r"[^a-z0-9.]+", "-", usual).strip("-.")[:80],
            target=target,
            model=Path(model.name).name,
            weights=model.fingerprint,
            rounded=model.lanes.rounded_fingerprint,
            dtype=model.dtype,
            site=site,
            training=trained,
            measures=tuple(measures),
        )
        return cls(card, fitted.probes, fitted.deviation)

    @classmethod
    def load(cls, source: str | Path) -> "Probe":
        """A probe that ships with kvprobe, by name, or one from a folder.

        Raises:
            UserError: there is no such probe, or its files are incomplete, too large, or do not match each other.
        """
        catalogue, folder = published_probes(), expanded(source)
        if str(source) in catalogue:
            folder = catalogue[str(source)]
        elif not (folder / CARD).is_file():
            raise UserError(unknown(f"published probe or folder with a {CARD}", str(source), catalogue))
        card = Card.read(folder)
        return cls(card, *read_weights(folder, card))

    def save(self, folder: str | Path) -> Path:
        """Write weights, card, and the card in words (README.md) into a folder, which is created."""
        folder = expanded(folder)
        with filling(folder) as made:
            write_weights(self.linear, self.deviation, made, self.card).write(made)
            write_whole(made / "README.md", card_page(self.card))
        return folder

    def probabilities(self, features: Float[Tensor, "*rows dim"]) -> Float[Tensor, "*rows places classes"]:
        """Calibrated probability of each class, from what the probe's site shows.

        Raises:
            UserError: features of another width, or not finite.
        """
        flat = self._checked(features).reshape(-1, features.shape[-1])
        scores = self.linear.scores(flat[None])[0].transpose(0, 1)
        return scores.softmax(-1).unflatten(0, features.shape[:-1]) if features.dim() > 1 else scores[0].softmax(-1)

    def distance(self, features: Float[Tensor, "*rows dim"]) -> Float[Tensor, "*rows"]:
        """How far features lie from those that the probe was trained on, in standard deviations of each feature (root
        mean square). `card.training.typical` and `.far` give the distances of held-out conversations."""
        return distance(self._checked(features), self.linear.mean[0], self.deviation)

    def read(
        self,
        model: Model,
        source: KVCache | Captured,
        segment: str | None = None,
        *,
        restart: KVCache | Captured | None = None,
    ) -> Float[Tensor, "rows places classes"]:
        """Probability of each class, from the slots of a segment of a cache, or from all slots that were captured.

        Args:
            restart: the same slots computed without the hidden text, for a probe of differences.

        Raises:
            UserError: the model has other weights; a cache came without a segment, or for a probe of a family that no
                cache holds; a row of the cache has no such segment; or a probe of differences has no restart.
        """
        self.check(model)
        fresh = None if restart is None else self.site_shows(restart, segment)
        return self.probabilities(self.features(self.site_shows(source, segment), fresh))

    def features(
        self, shown: Float[Tensor, "*rows dim"], restart: Float[Tensor, "*rows dim"] | None = None
    ) -> Float[Tensor, "*rows dim"]:
        """The probe's input: what its site shows, or the difference of this from the restart."""
        if not self.site.less_restart:
            return shown
        if restart is None:
            raise UserError(f"{self.name} reads differences from the restart; give the restart's slots, too.")
        return difference(shown, restart)

    def site_shows(self, source: KVCache | Captured, segment: str | None = None) -> Float[Tensor, "rows dim"]:
        """One vector per row: of all slots of a segment of a cache, or of all that were captured; see `read`.

        Probes were not trained on segments that go on to state the answer: capture the slots before it.
        """
        if isinstance(source, Captured):
            if segment is not None:
                raise UserError(
                    "Captured slots are read as they are, so a segment cannot be given here; capture with "
                    f"segments=[{segment!r}]."
                )
            return self.read_out(source[self.site.family, self.site.layer], source.present)
        if self.site.family not in ("k", "v"):
            raise UserError(f"{self.name} reads {self.site.family!r}, which no cache holds; give it captured slots.")
        if segment is None:
            raise UserError("A cache has many segments; name the segment to read.")
        held = source.keys if self.site.family == "k" else source.values
        slots = source.ledger.in_segments([segment])
        if not bool(slots.any(1).all()):
            raise UserError(
                f"Segment {segment!r} has no slots in some row of the cache: it was evicted or never read; name "
                "another segment."
            )
        live = source.ledger.live
        here = live[self.site.layer if len(live) > 1 else 0].any(1)
        refuse_dropped(f"The probe {self.name}", source.ledger, slots & ~here)
        return self.read_out(held[self.site.layer], slots)

    def read_out(self, slots: Tensor, present: Tensor | None = None) -> Float[Tensor, "rows dim"]:
        """One vector per row.

        Args:
            slots: `[rows, kv_heads, slots, d_head]` or `[rows, slots, d_model]`, of the probe's family and layer.
            present: `[rows, slots]`, the slots to be read; all by default.
        """
        vectors = slots.float()
        if vectors.dim() == 4:
            head = self.site.head
            heads = vectors if head is None else vectors[:, head : head + 1]
            vectors = heads.transpose(1, 2).flatten(2)
        rows, count, _ = vectors.shape
        present = torch.ones(rows, count, dtype=torch.bool) if present is None else present
        present = present.to(vectors.device)
        if self.site.read == "last":
            last = count - 1 - present.flip(1).int().argmax(1)
            return vectors[torch.arange(rows, device=vectors.device), last]
        return torch.where(present[..., None], vectors, 0.0).sum(1) / present.sum(1, keepdim=True)

    def check(self, model: Model) -> None:
        """Refuse a model that this probe cannot read.

        Raises:
            UserError: its weights (in any dtype), config or tokenizer are others, or it has no such site.
        """
        if not self.fits(model):
            fingerprints = (model.fingerprint, self.card.weights)
            if model.dtype != self.card.dtype:
                fingerprints = (model.lanes.rounded_fingerprint, self.card.rounded)
            raise UserError(
                f"{self.name} reads {self.card.model}, and {model.name} differs from it in {differing(*fingerprints)}, "
                "so its directions mean nothing there; train a probe of that model instead."
            )
        shape, site = model.geometry, self.site
        heads = shape.n_kv_heads if site.head is None else 1
        per_head = site.family in ("k_pre", "k", "v")
        dim = heads * shape.d_head if per_head else shape.d_model
        head_exists = site.head is None or (per_head and 0 <= site.head < shape.n_kv_heads)
        if not 0 <= site.layer < shape.n_layers or not head_exists or dim != len(self.deviation):
            raise UserError(
                f"{self.name} reads {len(self.deviation)} numbers at {site.family!r}, layer {site.layer}, head "
                f"{site.head}, which {model.name} does not have; the card was altered, publish the probe again."
            )

    def fits(self, model: Model) -> bool:
        """Whether this is the model that the probe was trained on; in another dtype, up to the rounding of its
        weights."""
        if model.fingerprint == self.card.weights:
            return True
        return model.dtype != self.card.dtype and model.lanes.rounded_fingerprint == self.card.rounded

    def _checked(self, features: Float[Tensor, "*rows dim"]) -> Float[Tensor, "*rows dim"]:
        if features.shape[-1] != len(self.deviation):
            raise UserError(
                f"{self.name} reads vectors of {len(self.deviation)} numbers; these have {features.shape[-1]}, so give "
                "what its site shows."
            )
        if not bool(features.isfinite().all()):
            raise UserError("Features hold NaN or infinity; a probe needs finite numbers.")
        return features.float().to(self.deviation.device)


def _gain(fitted: FittedProbe) -> tuple[float | None, float | None]:
    """The least gain over the restart above which a share `SURE` of the held-out readings is right, and the share of
    all readings that gain as much; no gain and a share of zero where too few readings do."""
    if fitted.gains is None:
        return None, None
    gains, order = fitted.gains.flatten().double().cpu().sort(descending=True)
    right = fitted.right.flatten().cpu()[order].double().cumsum(0)
    count = torch.arange(1, len(gains) + 1)
    ends = torch.cat([gains[1:] < gains[:-1], torch.tensor([True])])  # of those that gain the same
    sure = torch.nonzero((right / count >= SURE) & (count >= FEWEST) & (gains > 0) & ends)
    if not len(sure):
        return None, 0.0
    last = int(sure[-1])
    return float(gains[last]), (last + 1) / len(gains)
