"""A canary: short scripts that a team runs in CI against its engine, whose answers a wrong cache would move."""

from kvprobe.detection.canary.endpoints import llama_server, openai_endpoint
from kvprobe.detection.canary.properties import ScriptSizes
from kvprobe.detection.canary.run import Canary, canary
from kvprobe.detection.canary.target import CanaryTarget, EngineAnswer

__all__ = ["Canary", "CanaryTarget", "EngineAnswer", "ScriptSizes", "canary", "llama_server", "openai_endpoint"]
