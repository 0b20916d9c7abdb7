"""Runs under names read on where their own caches end."""

import torch

from kvprobe.inference.model import Model
from kvprobe.studies.idle_rebuild.named_rows import NamedRows, read_on
from kvprobe.text.tokens import Tokens


def test_every_run_reads_on_where_its_own_cache_ends(tiny_llama: Model):
    long, short = (tiny_llama.prefill(Tokens.of(list(range(2, stop)))) for stop in (12, 7))
    both = NamedRows(("long",), long).joined("again", long)
    runs, scores = read_on(tiny_llama, [both, NamedRows(("short",), short)], Tokens.of([5, 9]), logits=2)
    for name, start in {"long": long, "again": long, "short": short}.items():
        cache, expected = tiny_llama.extend(start, Tokens.of([5, 9], "prompt", int(start.ledger.following)), logits=2)
        torch.testing.assert_close(scores[name], expected[0])
        (rows,) = (rows for rows in runs if name in rows.names)
        alone = rows.only(name)
        assert alone.names == (name,)
        torch.testing.assert_close(alone.cache.keys[-1], cache.keys[-1])
