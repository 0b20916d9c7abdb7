"""The floors of the library: a module imports only from its own floor or from those below."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "kvprobe"
FLOORS = [
    {
        "suggest", "settings", "ledger", "cache", "cache_file", "positions", "transcript", "chat_file", "stats", "runs", "tasks", "narrative",
        "studyconfig", "fingerprint", "untrusted", "presets", "designs", "rotary", "footprint", "memory", "policies", "faults", "described", "published", "outcomes", "wording",
    },
    {"catalog", "model_files", "loading", "geometry", "gate", "lens", "lanes", "train_ordinal"},
    {"readable", "forward", "capture", "live", "generate", "batch", "sweep", "model"},
    {"probing", "erasing", "patching", "attention", "layers", "features", "doctor", "measured", "plots", "views"},
    {"studies"},
    {"cli", "report", "__init__"},
]  # fmt: skip
MODULES = sorted(PACKAGE.rglob("*.py"))


def floor_of(module: str) -> int:
    """The floor of a module given by its dotted name, `kvprobe` itself being the top."""
    parts = module.split(".")
    name = parts[1] if len(parts) > 1 else "__init__"
    found = [number for number, names in enumerate(FLOORS) if name in names]
    assert found, f"{module} is on no floor; say in this test where it belongs"
    return found[0]


def dotted(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> set[str]:
    """Every module that this file imports, anywhere in it, submodules taken as modules where they are files."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path} has a relative import"
            found.add(node.module)
            if node.module.startswith("kvprobe"):
                candidates = {f"{node.module}.{alias.name}" for alias in node.names}
                found |= {name for name in candidates if name in map(dotted, MODULES)}
    if path.parent == PACKAGE and path.name == "__init__.py":
        return found
    return found - {"kvprobe"}


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_no_module_climbs(path: Path):
    own = floor_of(dotted(path))
    climbing = {name for name in imports(path) if name.split(".")[0] == "kvprobe" and floor_of(name) > own}
    assert not climbing


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_only_lens_imports_transformer_lens(path: Path):
    foreign = {name.split(".")[0] for name in imports(path)}
    if dotted(path) != "kvprobe.lens":
        assert "transformer_lens" not in foreign
    if floor_of(dotted(path)) == 0:
        assert "transformers" not in foreign


def test_a_climbing_import_would_be_seen(tmp_path: Path):
    path = tmp_path / "module.py"
    path.write_text("def late():\n    from kvprobe.cli import main\n    return main\n")
    assert floor_of("kvprobe.cli") > floor_of("kvprobe.cache")
    assert "kvprobe.cli" in imports(path)
