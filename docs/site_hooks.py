"""What the site needs beside the pages in docs/: README as its home, figures and pages of other folders, and the API.

Links in the pages lead where they lead in the repository. A page of another folder, or a figure, is put into the site
under the path that it has there, so a link from docs/ to it loses the step out of docs/.
"""

import json
import os
import re
from pathlib import Path

import nbformat
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from nbconvert import MarkdownExporter

import kvprobe

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
SHIM = "https://unpkg.com/iframe-worker/shim"
RUNS = DOCS / "results" / "runs"
PUBLISHED = re.compile(r"runs/([\w.-]+)/config\.yaml")
LINK = re.compile(r"(?<=\]\()([^)\s#]+)(#[^)\s]*)?(?=\))")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add README, and whatever a page links to outside docs/."""
    ahead = [ROOT / "README.md", *DOCS.rglob("*.md")]
    while ahead:
        page = ahead.pop()
        for target in {page, *linked(page)}:
            uri = in_site(target)
            if files.get_file_from_path(uri) is None:
                shown = notebook(target, config) if target.suffix == ".ipynb" else []
                for file in shown or [File.generated(config, uri, abs_src_path=str(target))]:
                    files.append(file)
                ahead += [target] if target.suffix == ".md" else []
    for run in published():
        files.append(File.generated(config, f"results/runs/{run}/findings.js", content=findings(run)))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links in the repository into links in the site, and fill the API page."""
    if page.is_homepage:
        page.meta["hide"] = ["navigation"]
    source = DOCS / page.file.src_uri
    source = source if source.exists() else ROOT / page.file.src_uri

    def in_place(match: re.Match[str]) -> str:
        target = source.parent / match[1]
        if not target.is_file():
            return match[0]
        return os.path.relpath(in_site(target.resolve()), Path(page.file.src_uri).parent) + (match[2] or "")

    text = LINK.sub(in_place, markdown)
    if page.file.src_uri == "reference/api.md":
        return text + api()
    if page.file.src_uri == "results/explore.md":
        return f"{text}\n<div id='explore' data-runs='runs' data-names='{json.dumps(published())}'></div>\n"
    return text + explored(PUBLISHED.findall(markdown))


def on_post_page(output: str, *, page: Page, config: MkDocsConfig) -> str:
    """Search needs no network: the theme would fetch a script for it, in whose place site.js stands."""
    return output.replace(SHIM, os.path.relpath("site.js", Path(page.file.dest_uri).parent))


def on_post_template(output: str, **_: object) -> str:
    return output.replace(SHIM, "site.js")


def published() -> list[str]:
    """The runs whose findings lie beside the pages."""
    return sorted(path.parent.name for path in RUNS.glob("*/metrics.json"))


def findings(run: str) -> str:
    """A script that hands the findings of a run to explore.js."""
    kept = ("name", "keys", "mean", "low", "high", "clusters", "unit", "comparisons")
    every = json.loads((RUNS / run / "metrics.json").read_text(encoding="utf-8"))["findings"]
    short = [{name: finding[name] for name in kept} for finding in every]
    return f"kvprobeRun({json.dumps(run)}, {json.dumps(short, separators=(',', ':'))})\n"


def explored(runs: list[str]) -> str:
    """Where the runs of a page are explored."""
    links = [f'<a href="explore.html#run={run}">{run}</a>' for run in dict.fromkeys(runs)]
    return f"\n\nExplore: {', '.join(links)}.\n" if links else ""


def linked(page: Path) -> list[Path]:
    """The files that a page links to."""
    links = [match[1] for match in LINK.finditer(page.read_text(encoding="utf-8"))]
    return [(page.parent / link).resolve() for link in links if (page.parent / link).is_file()]


def in_site(file: Path) -> str:
    """The path of a file of the repository in the site's sources; a notebook is a page there."""
    path = file.relative_to(DOCS if file.is_relative_to(DOCS) else ROOT)
    return (path.with_suffix(".md") if path.suffix == ".ipynb" else path).as_posix()


def notebook(file: Path, config: MkDocsConfig) -> list[File]:
    """A notebook as a page with its stored outputs, and the pictures among them."""
    text, resources = MarkdownExporter().from_notebook_node(
        nbformat.read(file, as_version=4), {"unique_key": file.stem, "output_files_dir": "."}
    )
    pictures = {f"notebooks/{Path(name).name}": content for name, content in resources["outputs"].items()}
    return [
        File.generated(config, in_site(file), content=text),
        *(File.generated(config, name, content=content) for name, content in pictures.items()),
    ]


def api() -> str:
    """Every promised name with its docstring, from the lowest room up; then the promised modules."""
    rooms = re.findall(r"^\| `(\w+)/` \| (.*?) \|", (DOCS / "reference" / "rooms.md").read_text(), re.MULTILINE)
    purpose = {**dict(reversed(rooms)), "errors": "what is raised"}
    names: dict[str, list[str]] = {room: [] for room in purpose}
    for name, home in sorted(kvprobe._HOMES.items(), key=lambda entry: entry[0].lower()):
        names[home.split(".")[1]].append(defined(name, home))
    sections = [section(f"{room}: {purpose[room]}", listed) for room, listed in names.items() if listed]
    return "".join([*sections, section("Modules", sorted(kvprobe._MODULES.values()))])


def section(title: str, names: list[str]) -> str:
    """A heading with the docstrings of these names, for mkdocstrings."""
    return f"\n## {title}\n\n" + "\n\n".join(f"::: {name}" for name in names) + "\n"


def defined(name: str, home: str) -> str:
    """The full name of what a package exports; a module in it may have the same name."""
    beside = ROOT.joinpath(*home.split("."), f"{name}.py")
    return f"{home}.{name}.{name}" if beside.exists() else f"{home}.{name}"
