"""Bytes as text: GB is 10⁹ bytes and GiB is 2³⁰, so a card of 24 GB and one of 24 GiB differ by 7 %."""

import re
from collections.abc import Iterable

from kvprobe.errors import UserError

MOST = 1 << 60
"""Bytes; no memory is larger."""

_UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}


def bytes_in(text: str | int, what: str) -> int:
    """A number of bytes, or a text such as `24GiB` or `24 GB`.

    Raises:
        UserError: it is neither, or not positive.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        count = text
    else:
        match = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,6})?)\s*([KMGT]?I?B)\s*", str(text).upper())
        if match is None:
            raise UserError(
                f"The {what} is {str(text)[:40]!r}; write bytes with their unit, as in '24GiB' (2³⁰) or '24GB' (10⁹)."
            )
        count = round(float(match[1]) * _UNITS[match[2]])
    if not 1 <= count <= MOST:
        raise UserError(f"The {what} is {str(text)[:40]}; it must be positive and at most {MOST:,} bytes.")
    return count


def shares_in(texts: Iterable[str]) -> dict[int | str, str]:
    """How much of each device may be filled, from texts such as `0=20GiB` and `cpu=8GiB`.

    Raises:
        UserError: one has no device or no size.
    """
    shares: dict[int | str, str] = {}
    for text in texts:
        device, equals, size = text.partition("=")
        if not (device and equals):
            raise UserError(f"max_memory has {text[:40]!r}; write a device and a size, such as 0=20GiB or cpu=8GiB.")
        shares[int(device) if device.isdecimal() else device] = size
    return shares


def both(count: int) -> str:
    """Bytes in decimal and in binary units, each with three to four digits: `16.38 GB (15.26 GiB)`."""
    for decimal, binary in (("TB", "TiB"), ("GB", "GiB"), ("MB", "MiB"), ("KB", "KiB")):
        if abs(count) >= _UNITS[decimal]:
            return f"{count / _UNITS[decimal]:.2f} {decimal} ({count / _UNITS[binary.upper()]:.2f} {binary})"
    return f"{count} B"


def short(count: int | float) -> str:
    """Bytes in decimal units."""
    for unit in ("TB", "GB", "MB", "KB"):
        if abs(count) >= _UNITS[unit]:
            return f"{count / _UNITS[unit]:.2f} {unit}"
    return f"{count:.0f} B"
