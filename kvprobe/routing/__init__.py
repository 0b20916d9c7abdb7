"""Routing: which experts of a mixture compute which tokens, and what changes if they are others."""

from kvprobe.routing.measures import agreement, chance_overlap, load
from kvprobe.routing.mediation import Mediation, mediate
from kvprobe.routing.reading import Routed, Routing, read

__all__ = ["Mediation", "Routed", "Routing", "agreement", "chance_overlap", "load", "mediate", "read"]
