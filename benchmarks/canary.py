"""A canary against llama.cpp, sound and with a fault planted through its slot file.

    python benchmarks/canary.py MODEL.gguf [none | zeroed-layer | foreign-block | swapped-blocks | shifted]

The slot file is edited between `save` and `restore`: one layer of 0, a block of 16 slots taken from the start of the
next 16, two blocks exchanged, or K and V moved on by one slot. Prints the report.
"""

import struct
import sys
from pathlib import Path

from kvprobe.detection.canary import canary, llama_server
from kvprobe.engines.server import LlamaServer, served
from kvprobe.report.views.canary import canary_lines

BLOCK = 16


def plant(path: Path, fault: str) -> None:
    """Write a fault into a saved slot, of which V is stored as K is (flash attention)."""
    content = bytearray(path.read_bytes())
    place = content.index(struct.pack("<I", 0x67677371)) + 20

    def number(kind: str = "I") -> int:
        nonlocal place
        (value,) = struct.unpack_from(f"<{kind}", content, place)
        place += struct.calcsize(f"<{kind}")
        return value

    place += 4 * number()
    number(), number()
    cells = number()
    for _ in range(cells):
        number()
        place += 4 * number()
    transposed, layers = number(), number()
    number(), number()
    if transposed:
        sys.exit("V is transposed; serve with flash attention.")
    for part in range(2 * layers):
        number("i")
        row = number("Q")
        rows = [bytes(content[place + row * cell : place + row * (cell + 1)]) for cell in range(cells)]
        content[place : place + row * cells] = b"".join(damaged(rows, fault, part % layers))
        place += row * cells
    if place != len(content):
        sys.exit(f"The slot file has {len(content)} bytes, of which {place} were understood.")
    path.write_bytes(content)


def damaged(rows: list[bytes], fault: str, layer: int) -> list[bytes]:
    first, second, rest = rows[:BLOCK], rows[BLOCK : 2 * BLOCK], rows[2 * BLOCK :]
    match fault:
        case "zeroed-layer":
            return [bytes(len(row)) for row in rows] if layer == 15 else rows
        case "foreign-block":
            return first + rest[:BLOCK] + rest
        case "swapped-blocks":
            return second + first + rest
        case "shifted":
            return rows[:1] + rows[:-1]
    return rows


class Planted(LlamaServer):
    """A server whose saved slots are damaged before they are restored."""

    fault = "none"

    def restore(self, slot: int, name: str) -> int:
        plant(self.path(name), self.fault)
        return super().restore(slot, name)


if __name__ == "__main__":
    with served(Path(sys.argv[1]), slots=4) as server:
        planted = Planted(server.url, folder=server.folder)
        Planted.fault = sys.argv[2] if len(sys.argv) > 2 else "none"
        print("\n".join(canary_lines(canary(llama_server(planted)))))
