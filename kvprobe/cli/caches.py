"""Commands on caches of engines."""


def engines() -> None:
    """List the formats of caches that are read, and the engines installed here."""
    from kvprobe.engines.formats import described

    print("\n".join(described()))
