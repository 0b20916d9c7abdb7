"""Recordings whose truth is known: sums of a few planted directions."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from kvprobe.saes import Place, Shards

DIM, PLANTED, ACTIVE, TEXT = 16, 24, 3, 50
PLACE = Place("resid_post", 1)


def planted(folder: Path, shards: int = 4, tokens: int = 2000, seed: int = 0) -> tuple[Shards, torch.Tensor]:
    """A recording of sums of `ACTIVE` of `PLANTED` unit directions with weights of 1 to 2, far from the origin; and the
    directions."""
    generator = torch.Generator().manual_seed(seed)
    directions = torch.nn.functional.normalize(torch.randn(PLANTED, DIM, generator=generator), dim=1)
    folder.mkdir(parents=True)
    files = []
    for number in range(shards):
        chosen = torch.rand(tokens, PLANTED, generator=generator).topk(ACTIVE, 1).indices
        weights = torch.zeros(tokens, PLANTED).scatter(1, chosen, 1 + torch.rand(tokens, ACTIVE, generator=generator))
        first = number * tokens // TEXT
        words = {
            "ids": torch.arange(tokens) + number * tokens,
            "text": torch.arange(first, first + tokens // TEXT).repeat_interleave(TEXT),
            "slot": torch.arange(TEXT).repeat(tokens // TEXT) + 1,
        }
        files.append(folder / f"{number:05d}.safetensors")
        save_file({**words, str(PLACE): 30 * (weights @ directions) + 100}, files[-1])
    about = {"model": "planted", "places": [str(PLACE)], "texts": "none", "shards": shards}
    (folder / "shards.json").write_text(json.dumps(about))
    return Shards.open(folder), directions
