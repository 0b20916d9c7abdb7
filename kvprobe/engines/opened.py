"""Any cache in a file, whatever wrote it: the content says which format it is."""

from functools import partial
from pathlib import Path

from kvprobe.arguments import checked_arguments
from kvprobe.cache.file import FORMAT, opened, read_header, read_layer
from kvprobe.cache.stored import LazyLayers, StoredCache
from kvprobe.engines.llamacpp import open_slot
from kvprobe.engines.plain import open_plain
from kvprobe.engines.slot_file import is_slot
from kvprobe.errors import UserError
from kvprobe.files import expanded, told
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
    with told(path):
        if path.is_dir():
            return open_plain(path)
        if not path.is_file():
            raise UserError(f"There is no file {path}; give one that holds a cache.")
        with path.open("rb") as file:
            beginning = file.read(9)
    if is_slot(path):
        return open_slot(path, model)
    if beginning.lstrip()[:1] == b"{":
        return open_plain(path)
    if beginning[8:] == b"{":
        with opened(path) as file:
            written_by_kvprobe = (file.metadata() or {}).get("format") == FORMAT
        if written_by_kvprobe:
            count, ledger, made_by = read_header(path)
            layers = LazyLayers(count, partial(read_layer, path, ledger))
            return StoredCache(layers, ledger, "a cache of kvprobe", made_by)
        if path.with_suffix(".json").is_file():
            return open_plain(path.with_suffix(".json"))
    raise UserError(
        f"{path} is no cache that kvprobe reads; `kvprobe engines` lists the formats, of which any engine can write "
        "the plain one."
    )
