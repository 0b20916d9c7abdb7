"""Routing: which experts of a mixture compute which tokens, and what changes if they are others."""

from kvprobe.routing.measures import agreement, chance_overlap, load
from kvprobe.routing.mediation import Mediation, mediate, mediate_each
from kvprobe.routing.reading import Routed, Routing, read

__all__ = ["Mediation", "Routed", "Routing", "agreement", "chance_overlap", "load", "mediate", "mediate_each", "read"]
