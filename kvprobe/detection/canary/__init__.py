"""A canary: short scripts that a team runs in CI against its engine, whose answers a wrong cache would move."""

from kvprobe.detection.canary.dumps import DumpsCanary, canary_of_dumps
from kvprobe.detection.canary.endpoints import llama_server, openai_endpoint, vllm_endpoint
from kvprobe.detection.canary.findings import Canary
from kvprobe.detection.canary.properties import ScriptSizes
from kvprobe.detection.canary.run import canary
from kvprobe.detection.canary.target import CanaryTarget, EngineAnswer

__all__ = [
    "Canary",
    "CanaryTarget",
    "DumpsCanary",
    "EngineAnswer",
    "ScriptSizes",
    "canary",
    "canary_of_dumps",
    "llama_server",
    "openai_endpoint",
    "vllm_endpoint",
]
