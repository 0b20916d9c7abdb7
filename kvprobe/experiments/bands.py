"""The layers of a model in bands, each under a name that tables and figures show."""

from kvprobe.faults.scope import bands

EVERY_LAYER = "all"


def named_bands(layers: int, count: int) -> dict[str, tuple[int, ...]]:
    """All layers in bands of nearly equal size (as many as layers at most), and all of them together."""
    pieces = [tuple(band) for band in bands(layers, min(count, layers))]
    named = {str(piece[0]) if len(piece) == 1 else f"{piece[0]}–{piece[-1]}": piece for piece in pieces}
    return named | {EVERY_LAYER: tuple(range(layers))}
