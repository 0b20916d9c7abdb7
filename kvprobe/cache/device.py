"""Devices by their names."""

import torch

from kvprobe.errors import UserError


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
