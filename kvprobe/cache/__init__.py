"""The KV cache as tensors with a ledger of its slots: what is stored, at which positions, and who may attend to it."""
