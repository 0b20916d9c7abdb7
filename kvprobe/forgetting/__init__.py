"""What a way to forget leaves: what of a removed text can still be read, recovered and used, and where it is."""

from kvprobe.forgetting.certificate import Certificate, certify
from kvprobe.forgetting.hidden_secret import HiddenSecret
from kvprobe.forgetting.ways import WAYS, way_of

__all__ = ["WAYS", "Certificate", "HiddenSecret", "certify", "way_of"]
