"""kvprobe: a microscope for the KV cache of a language model."""
