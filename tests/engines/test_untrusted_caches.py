"""Whatever `open_cache` is given, it ends in a cache no larger than its file explains, or in one sentence."""

import json
import random
import struct
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvprobe as kv
from tests.engines.test_slots import Engine
from tests.experiments.test_untrusted_runs import refusal
from tests.random_caches import random_cache


def saved_slot(path: Path) -> None:
    with TemporaryDirectory() as folder, ExitStack() as stack:
        (path / "a.slot").write_bytes(Engine("llama", Path(folder), stack).saved("a").read_bytes())


WRITERS: dict[str, Callable[[Path], Any]] = {
    "kvprobe": lambda path: random_cache(0, some_masked=True).save(path / "a.safetensors"),
    "plain": lambda path: kv.save_plain(random_cache(0, batch=1), path / "a.json"),
    "slot": saved_slot,
}
HOSTILE = (-1, 0, 1, 2**31, 2**53 + 1, 10**400, 1e400, "", "x" * 5000, "a\nb", None, True, [], [[]], {}, {"a": {}})
"""What stands in place of a value of a header."""


def read(path: Path, times: int = 1) -> None:
    """Open and read all layers.

    Raises:
        AssertionError: it is refused in more than a sentence, or holds more than so many times its files.
    """
    size = sum(file.stat().st_size for file in path.parent.iterdir())
    held = slots = 0

    def whole() -> None:
        nonlocal held, slots
        stored = kv.open_cache(path)
        slots = stored.ledger.slots
        held = sum(part.nbytes for layer in stored.layers for part in layer.values())

    assert "\n" not in (refusal(whole) or "")
    assert max(held, slots) <= times * size


def damaged(content: bytes, rng: random.Random) -> bytes:
    """A few bytes changed, cut off, put in or taken out."""
    for _ in range(rng.randint(1, 3)):
        place = rng.randrange(len(content) + 1)
        piece = bytes(rng.choice((0, 255, rng.randrange(256))) for _ in range(rng.randint(1, 8)))
        end = place + rng.choice((0, len(piece), 8, len(content)))
        content = content[:place] + piece + content[end:]
    return content


def with_hostile_values(content: Any, rng: random.Random) -> Any:
    """JSON with a key renamed, or a value replaced, at any depth."""
    if isinstance(content, dict | list) and content and rng.random() < 0.8:
        key = rng.choice([*content]) if isinstance(content, dict) else rng.randrange(len(content))
        changed: Any = dict(content) if isinstance(content, dict) else list(content)
        if isinstance(changed, dict) and rng.random() < 0.2:
            changed[rng.choice(("K.1", "V.0", "tokens", "blocks", "keys.7", "a\nb"))] = changed.pop(key)
        else:
            changed[key] = with_hostile_values(content[key], rng)
        return changed
    return rng.choice((*HOSTILE, rng.randint(-9, 99), str(rng.randint(0, 9)), "F64", "I8", "BF16"))


def with_another_header(content: bytes, rng: random.Random) -> bytes:
    """A safetensors file, or JSON, whose header is well formed but says something else."""
    if content[:1] == b"{":
        return json.dumps(with_hostile_values(json.loads(content), rng)).encode()
    length = struct.unpack("<Q", content[:8])[0]
    header = json.dumps(with_hostile_values(json.loads(content[8 : 8 + length]), rng)).encode()
    return struct.pack("<Q", len(header)) + header + content[8 + length :]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("kind", WRITERS)
def test_damaged_and_hostile_files_are_read_or_refused_in_a_sentence(kind: str, tmp_path: Path):
    WRITERS[kind](tmp_path)
    whole = {path: path.read_bytes() for path in tmp_path.iterdir()}
    read(sorted(whole)[0])

    @settings(max_examples=150, deadline=None)
    @given(seed=st.integers(0, 2**32), header=st.booleans())
    def altered(seed: int, header: bool) -> None:
        rng = random.Random(seed)
        for path, content in whole.items():
            path.write_bytes(content)
        path = rng.choice(sorted(whole))
        path.write_bytes((with_another_header if header and kind != "slot" else damaged)(whole[path], rng))
        read(sorted(whole)[0])

    altered()
