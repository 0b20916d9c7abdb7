"""Caches of inference engines, in and out: saved slots of llama.cpp, vLLM, and a plain layout for other engines."""
