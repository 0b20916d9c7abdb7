"""Ways to forget, each from a conversation to the cache that stays of it."""

from collections.abc import Callable, Mapping
from functools import partial

from kvprobe.cache.cache import KVCache
from kvprobe.editing import zero
from kvprobe.errors import UserError
from kvprobe.forgetting.hidden_secret import HiddenSecret
from kvprobe.inference.model import Model
from kvprobe.names import unknown
from kvprobe.policies.policy import Policy
from kvprobe.policies.written import as_policy
from kvprobe.text.transcript import Transcript

Way = Callable[[Model, Transcript, tuple[str, ...]], KVCache]
"""From a conversation and the segments to forget to the cache that stays."""
NOTHING, RESTART = "nothing", "restart"


def _kept(act: Callable[[KVCache, tuple[str, ...]], KVCache]) -> Way:
    """Read everything, then act on the cache."""
    return lambda model, chat, hide: act(model.prefill(chat), hide)


def _restarted(model: Model, chat: Transcript, hide: tuple[str, ...], closed: bool) -> KVCache:
    return model.prefill(chat.without(*hide, mode="contiguous" if closed else "gapped"))


WAYS: Mapping[str, Way] = {
    NOTHING: _kept(lambda cache, hide: cache),
    "mask": _kept(lambda cache, hide: cache.mask(*hide)),
    "evict": _kept(lambda cache, hide: cache.evict(*hide)),
    "re-index": _kept(lambda cache, hide: cache.evict(*hide).reindex()),
    "zero values": _kept(lambda cache, hide: zero(cache, *hide)),
    "restart in place": partial(_restarted, closed=False),
    RESTART: partial(_restarted, closed=True),
}
"""By name: everything stays; slots are hidden; removed; removed and the gap closed; their V is zero; the rest is read
anew at its old positions; and at new ones."""


def way_of(way: str | Policy | Way) -> tuple[str, Way]:
    """A way to forget with its name: one of `WAYS`, a policy or its text, or a function of your own.

    Raises:
        UserError: there is no such way or policy.
    """
    if isinstance(way, str) and way in WAYS:
        return way, WAYS[way]
    if isinstance(way, str) and "(" not in way:
        raise UserError(unknown("way to forget", way, WAYS))
    if isinstance(way, str | Policy):
        policy = as_policy(way)
        return str(way), lambda model, chat, hide: model.prefill(chat, policy=policy)
    return getattr(way, "__name__", type(way).__name__), way


def forgotten(model: Model, way: Way, case: HiddenSecret, secret: str) -> KVCache:
    """The cache that stays of the conversation with this secret, its keys rotated to where they are seen.

    Raises:
        UserError: the way gives no cache of one row, or one that holds NaN, of which nothing could be said to differ.
    """
    cache = way(model, case.said(secret), case.hide)
    if not isinstance(cache, KVCache) or cache.batch != 1:
        raise UserError("A way to forget takes (model, chat, hide) and returns a KVCache of one row.")
    cache.refuse_nonfinite()
    return model.as_seen(cache)
