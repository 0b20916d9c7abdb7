"""One word, one meaning; and what serves one study alone stands in that study's folder."""

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@cache
def parsed() -> dict[Path, ast.Module]:
    return {
        path: ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted((ROOT / "kvprobe").rglob("*.py*"))
        if path.suffix in (".py", ".pyi")
    }


def dotted(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def classes(trees: dict[Path, ast.Module]) -> dict[str, set[str]]:
    """The modules of each name of a class."""
    homes: dict[str, set[str]] = defaultdict(set)
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                homes[node.name].add(dotted(path))
    return homes


def importers(trees: dict[Path, ast.Module]) -> dict[str, set[str]]:
    """The modules that import each module, or something from it."""
    names = {dotted(path) for path in trees}
    users: dict[str, set[str]] = defaultdict(set)
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                for name in (node.module, *(f"{node.module}.{alias.name}" for alias in node.names)):
                    if name in names:
                        users[name].add(dotted(path))
    return users


def serving_one_study(users: dict[str, set[str]]) -> set[str]:
    """Modules outside the studies that one study alone imports, by itself or through others of them."""
    studies: dict[str, set[str]] = {}

    def served(module: str, on_the_way: frozenset[str] = frozenset()) -> set[str]:
        if match := re.match(r"kvprobe\.studies\.(\w+)\.", module):
            return {match[1]}
        if module == "kvprobe":
            return {"everyone"}
        if module not in studies and module not in on_the_way:
            path = on_the_way | {module}
            studies[module] = set().union(*(served(user, path) for user in users.get(module, ()))) or {"everyone"}
        return studies.get(module, set())

    outside = {module for module in users if not module.startswith("kvprobe.studies") and module != "kvprobe"}
    return {module for module in outside if len(studies_of := served(module)) == 1 and "everyone" not in studies_of}


def test_the_name_of_a_class_stands_in_one_module():
    twice = {name: homes for name, homes in classes(parsed()).items() if len(homes) > 1 and name != "Config"}
    assert not twice, twice


def test_what_serves_one_study_alone_is_in_its_folder_unless_a_page_offers_it():
    pages = [*ROOT.glob("docs/*/*.md"), *ROOT.glob("notebooks/*.py"), *ROOT.glob("figures/*.py")]
    offered = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    private = {module for module in serving_one_study(importers(parsed())) if module not in offered}
    assert not private, private


def test_modules_of_one_study_are_found_through_others():
    users = {"kvprobe.a.one": {"kvprobe.studies.x.collect"}, "kvprobe.a.two": {"kvprobe.a.one"}}
    assert serving_one_study(users) == {"kvprobe.a.one", "kvprobe.a.two"}
    users["kvprobe.a.one"] = {"kvprobe.studies.x.collect", "kvprobe.studies.y.collect"}
    assert not serving_one_study(users | {"kvprobe.a.three": {"kvprobe.cli.entry"}})
