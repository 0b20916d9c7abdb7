"""Dangling: where attention goes when what it looked at is gone, and whether anything pointed there."""
