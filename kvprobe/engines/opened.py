"""Any cache in a file, whatever wrote it: the content says which format it is."""

from pathlib import Path

from kvprobe.arguments import checked_arguments
from kvprobe.cache.stored import StoredCache
from kvprobe.engines.files import open_file
from kvprobe.engines.llamacpp import open_slot
from kvprobe.engines.slot_file import is_slot
from kvprobe.files import expanded
from kvprobe.inference.model import Model


@checked_arguments
def open_cache(path: str | Path, model: Model | None = None) -> StoredCache:
    """The cache in a file, of which a layer is read when it is asked for.

    A file of kvprobe is read without a look at its digest, so that a damaged one can be held against a sound one.

    Args:
        path: a file that `KVCache.save` wrote, a saved slot of llama.cpp, or a plain dump: its JSON, tensors or
            folder.
        model: whose it is. A slot of llama.cpp needs it, or each layer is one wide head.

    Raises:
        UserError: the file is missing, truncated, or of another kind.
    """
    path = expanded(path)
    return open_slot(path, model) if path.is_file() and is_slot(path) else open_file(path)
