"""What a fault context holds and refuses."""

from dataclasses import replace

from kvprobe.faults import FaultContext, Gaussian
from tests.faults import after, context_of, outlying, same_bits, square_cache
from tests.refusals import refused


def test_what_a_context_has_computed_is_not_shared_with_another():
    one, other = (context_of(outlying(20 + extra)) for extra in (0, 5))
    scaled = replace(other, cache=other.cache.with_parts({"K": tuple(2 * keys for keys in other.cache.keys)}))
    for how in ("layer", "head", "channel", "effect"):
        first = [after(Gaussian(how), context.cache, context=context)[0] for context in (one, other, scaled)]
        fresh = [after(Gaussian(how), context.cache, context=replace(context))[0] for context in (one, other, scaled)]
        assert all(map(same_bits, first, fresh))


def test_contexts_and_donors_of_several_rows_or_another_shape_are_refused():
    cache = square_cache(0)
    refused(lambda: FaultContext(cache.fork(2)), "one row, but this cache has 2; take one with KVCache.rows")
    refused(lambda: FaultContext(cache, {"d": cache.fork(2)}), "Donor 'd' has 2 rows")
    refused(lambda: FaultContext(cache, {"d": square_cache(0, n_layers=2)}), "2 layers of 2 KV heads of 8, the base 3")
