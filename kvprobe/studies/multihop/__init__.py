"""Multihop: how far a hidden turn reaches when every turn is summarised and masked in its turn."""
