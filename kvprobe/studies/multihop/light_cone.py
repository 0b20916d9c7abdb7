"""The light cone of a text: from which layer on the slots of later segments can vary with it."""

from collections.abc import Mapping, Sequence


def lowest_layers(segment: str, views: Mapping[str, Sequence[str]]) -> dict[str, int | None]:
    """For each later segment, the first layer at which its K and V can vary with what `segment` holds; None where they
    cannot at any layer.

    The segment's own K and V vary from layer 0 on, as its tokens do. A slot that attends to slots which vary from layer
    l on does so itself in the residual stream after layer l, and so in K and V from layer l + 1 on.

    Args:
        views: by segment, in the order in which they are read, the earlier ones that it attends to.
    """
    first: dict[str, int | None] = {segment: 0}
    for name, seen in views.items():
        reached = [layer for other in seen if (layer := first.get(other)) is not None]
        first[name] = 1 + min(reached) if reached else None
    return {name: first[name] for name in views}
