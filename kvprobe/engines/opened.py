"""Any cache in a file, whatever wrote it: the content says which format it is.

Without a model nothing here needs transformers.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from kvprobe.arguments import checked_arguments
from kvprobe.cache.stored import StoredCache
from kvprobe.engines.files import open_file
from kvprobe.engines.slot import read_slot, stored
from kvprobe.engines.slot_file import is_slot
from kvprobe.files import expanded

if TYPE_CHECKING:
    from kvprobe.inference.model import Model


@checked_arguments
def open_cache(path: str | Path, model: "Model | None" = None) -> StoredCache:
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
    if not path.is_file() or not is_slot(path):
        return open_file(path)
    if model is None:
        return stored(read_slot(path))
    from kvprobe.engines.llamacpp import open_slot

    return open_slot(path, model)
