"""Caches in files that can be read without their model: kvprobe's own, and plain dumps.

The connector of vLLM reads these. It runs in an environment of vLLM's, whose transformers is often older than the one
that kvprobe needs for models; so nothing here may import transformers.
"""

from functools import partial
from pathlib import Path

from kvprobe.cache.file import READ, opened, read_header, read_layer
from kvprobe.cache.stored import LazyLayers, StoredCache
from kvprobe.engines.plain import open_plain
from kvprobe.errors import UserError
from kvprobe.files import FileVersion, told


def open_file(path: Path) -> StoredCache:
    """The cache in a file of kvprobe, or in a plain dump: its JSON, tensors or folder.

    Raises:
        UserError: the file is missing, truncated, or of another kind.
    """
    with told(path):
        if path.is_dir():
            return open_plain(path)
        if not path.is_file():
            raise UserError(f"There is no file {path}; give one that holds a cache.")
        with path.open("rb") as file:
            beginning = file.read(9)
    if beginning.lstrip()[:1] == b"{":
        return open_plain(path)
    if beginning[8:] == b"{":
        with opened(path) as file:
            written_by_kvprobe = (file.metadata() or {}).get("format") in READ
        if written_by_kvprobe:
            version = FileVersion.of(path)
            count, ledger, made_by = read_header(path)
            layers = LazyLayers(count, partial(read_layer, path, ledger), version)
            return StoredCache(layers, ledger, "a cache of kvprobe", made_by)
        if path.with_suffix(".json").is_file():
            return open_plain(path.with_suffix(".json"))
    raise UserError(
        f"{path} is no cache that kvprobe reads; `kvprobe ls engines` lists the formats, of which any engine can write "
        "the plain one."
    )
