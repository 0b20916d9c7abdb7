"""The command line as a person meets it, in a process of its own."""

import functools
import json
import os
import re
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import pytest

from kvprobe.cli import app, entry, main, runs
from kvprobe.cli.flags import whole
from kvprobe.cli.instruments import prefix
from kvprobe.cli.runs import list_names
from kvprobe.errors import KvprobeWarning
from kvprobe.inference.model import Model
from kvprobe.listing import KINDS, overview
from kvprobe.studies.bands import Config
from tests.commands import kvprobe, python
from tests.models import any_model
from tests.refusals import refused


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["run", "--help"],
        ["run", "leakage", "--help"],
        ["attend", "--help"],
        ["scan", "--help"],
        ["publish", "--help"],
        ["train", "memento", "--help"],
        ["ls"],
        ["doctor", "smollm2-135"],
        ["report", "absent"],
        ["run", "leakage", "--model", "smollm2-135"],
        ["run", "leakage", "--dtype", "float23"],
    ],
)
def test_help_lists_and_mistakes_import_nothing_heavy(arguments: list[str]):
    check = (
        "import sys\n"
        "from kvprobe.cli import main\n"
        "try:\n"
        f"    sys.argv = ['kvprobe', *{arguments!r}]\n"
        "    main()\n"
        "except SystemExit:\n"
        "    pass\n"
        "heavy = {'torch', 'transformers', 'transformer_lens', 'sae_lens', 'pandas', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = python(check)
    assert done.returncode == 0, done.stderr


def test_a_dry_run_says_what_it_would_do_and_does_nothing(tmp_path: Path):
    said = kvprobe("run", "leakage-quick", "--dry-run", "--out", str(tmp_path / "runs"), "--seed", "3").stdout
    assert "leakage would run with these settings:" in said
    assert "  seed: 3" in said
    assert "  samples: 192" in said
    assert not list(tmp_path.iterdir())
    assert kvprobe("run", "leakage-quick", "--dry-run", "--samples", "0").returncode == 2


def test_the_shell_completes_commands_and_presets(tmp_path: Path):
    """As a user of bash: installed once, then asked by the Tab key."""
    place = {**os.environ, "HOME": str(tmp_path), "SHELL": "/bin/bash"}
    command = [sys.executable, "-c", "from kvprobe.cli import main; main()", "--install-completion"]
    done = subprocess.run(command, env=place, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (script,) = [path for path in tmp_path.rglob("*") if path.is_file() and path.name == "kvprobe"]
    asked = f"source {script}; COMP_WORDS=(kvprobe run leakage-qui); COMP_CWORD=2; _kvprobe; echo ${{COMPREPLY[@]}}"
    replied = subprocess.run(["bash", "-c", asked], env=place, capture_output=True, text=True, check=False)
    assert replied.stdout.split() == ["leakage-quick"], replied.stderr


SCREEN = (25, 100)
"""Lines and columns."""


@pytest.mark.parametrize(
    "arguments",
    [["ls"], ["--help"], ["run"], ["run", "--help"], ["ls", "models"], ["ls", "policies"], ["ls", "presets"]],
)
def test_an_overview_fits_a_screen(arguments: list[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", str(SCREEN[1]))
    shown = kvprobe(*arguments).stdout.splitlines()
    assert 4 < len(shown) <= SCREEN[0]
    assert max(map(len, shown)) <= SCREEN[1]


def test_ls_shows_every_kind_and_the_names_of_one_as_programs_get_them(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.yaml").write_text("study: leakage\n")
    assert [line.split()[2] for line in overview() if line.startswith("kvprobe ls")] == list(KINDS)
    list_names(json=True, out=tmp_path)
    named = json.loads(capsys.readouterr().out)
    assert set(named) == set(KINDS)
    assert named["runs"] == [{"name": str(tmp_path / "mine"), "study": "leakage", "finished": False}]
    for kind, entries in named.items():
        list_names(kind, out=tmp_path)
        shown = capsys.readouterr().out.splitlines()
        names = [entry["name"] for entry in entries]
        if kind == "models":  # those that differ in numbers alone share a line
            stems = [[part for part in name.split("-") if not part.isdigit()] for name in names]
            names = [name for place, name in enumerate(names) if stems.index(stems[place]) == place]
            assert {line.split("  ")[0] for line in shown} >= {"memento-0, 1, 2", "lossy-8-3-retained-0 and 4 like it"}
        if kind != "presets":
            assert [line.split()[0].rstrip(",") for line in shown] == names != []
        list_names(kind, entries[-1]["name"], json=True, out=tmp_path)
        assert entries[-1] in json.loads(capsys.readouterr().out)[kind]
    list_names("presets", out=tmp_path)
    shown = [of_study for line in capsys.readouterr().out.splitlines() for of_study in line.split(" | ")]
    assert "bitflips: -quick -smollm2" in shown
    assert "use: -quick use" in shown
    list_names("presets", "leakage-quick")
    assert "leakage-quick  leakage; " in capsys.readouterr().out
    list_names("models", "no such")
    assert "no models of such a name" in capsys.readouterr().out
    refused(lambda: list_names("preset"), "did you mean 'presets'")


def test_flags_show_the_presets_own_defaults():
    assert "[default: 1]" in kvprobe("run", "leakage-one-template", "--help").stdout.replace("\n", " ")


@pytest.mark.parametrize(
    ("arguments", "near"),
    [
        (["run", "leakge"], "leakage"),
        (["run", "leakage", "--sampels", "100"], "--samples"),
        (["run", "leakage", "--model", "smollm2-135"], "smollm2-135m"),
        (["run", "leakage", "--dtype", "float23"], "float32"),
        (["run", "leakage", "--samples", "7"], "expected 96"),
        (["run", "bands", "--timing", "frsh"], "fresh"),
        (["run", "bands", "--parts", "q"], "kv"),
        (["run", "bands", "--rates", "1,2"], "--rates"),
        (["run", "bands", "--gpus", "1"], "add --executor ray"),
        (["run", "bands", "--rates", "1", "200"], "expected percents"),
        (["run", "bands", "--rates"], "'rates'"),
        (["run", "policies", "--budgets", "20", "50.5"], "--budgets"),
        (["run", "policies", "--policies", "SnapKV(50%)"], "give both"),
        (["run", "policies", "--tasks", "retrieve", "--policies", "SnapKW(50%)"], "did you mean 'SnapKV'"),
        (["ls", "preset"], "presets"),
        (["doctor", "--adapter", "smollm2-135"], "smollm2-135m"),
        (["run", "absent.yaml"], "no file"),
        (["report", "absent"], "not a run directory"),
        (["view", "absent"], "not a run directory"),
        (["train", "memento", "--content", "sums"], "sum"),
        (["train", "memento", "--provenance", "recomputed", "--keep", "1"], "leave it 0"),
        (["attend"], "--text or --chat"),
        (["attend", "--chat", "absent.json"], "no file"),
    ],
)
def test_a_mistake_is_answered_with_the_near_match(arguments: list[str], near: str):
    done = kvprobe(*arguments)
    assert done.returncode == 2
    assert near in done.stderr
    assert done.stderr.startswith("kvprobe: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("command", ["app", "attend", "budget", "canary", "certify", "compare", "diff", "train recall"])
def test_a_whole_number_is_not_rounded(command: str):
    named = functools.reduce(lambda commands, name: commands[name], command.split(), app)
    flags = {flag.name: flag for flag in named.assemble_argument_collection() if flag.hint in (int, int | None)}
    assert flags
    for name, flag in flags.items():
        assert flag.parameter.converter is whole, name


def test_a_yaml_file_gives_its_settings_as_defaults(tmp_path: Path):
    path = tmp_path / "mine.yaml"
    path.write_text("study: leakage\nsettings: {contexts: 12, samples: 120}\n")
    assert "[default: 12]" in kvprobe("run", str(path), "--help").stdout.replace("\n", " ")
    path.write_text("study: leakage\nsettings: {contxts: 12}\n")
    assert "contexts" in kvprobe("run", str(path)).stderr


def test_flags_take_several_values_and_show_their_defaults_so():
    shown = " ".join(kvprobe("run", "bands-qwen2.5-7b", "--help").stdout.replace("│", " ").split())
    assert "[default: 1.0 2.0 4.0]" in shown
    assert "[default: quarters halves]" in shown
    runs.add_run_commands(["run", "bands"])
    arguments = ["run", "bands", "--rates", "4", "0.5", "--parts", "k", "v", "--no-follow"]
    _, bound, _ = app.parse_args(arguments, exit_on_error=False, print_error=False)
    config = bound.kwargs["config"]
    given = ((0.5, 4.0), ("k", "v"), False, Config().samples)
    assert (config.rates, config.parts, config.follow, config.samples) == given


def test_a_defect_of_kvprobe_names_the_file_that_holds_the_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def broken() -> None:
        raise RuntimeError("the wheel came off")

    monkeypatch.setattr(entry, "app", lambda *_, **__: broken())
    monkeypatch.setattr(sys, "argv", ["kvprobe", "ls"])
    with pytest.raises(SystemExit) as exited:
        main()
    said = capsys.readouterr().err
    assert exited.value.code == 70
    assert "defect of kvprobe" in said
    assert "the wheel came off" in said
    assert "Traceback" not in said
    (file,) = (Path(word.rstrip(",;")) for word in said.split() if word.startswith(tempfile.gettempdir()))
    assert file.read_text().startswith("Traceback")
    file.unlink()


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("no room"),
        type("OutOfMemoryError", (RuntimeError,), {})("no room"),
        RuntimeError("no room:\nDefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_too_little_memory_is_not_called_a_defect(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def full() -> None:
        raise error

    monkeypatch.setattr(entry, "app", lambda *_, **__: full())
    monkeypatch.setattr(sys, "argv", ["kvprobe", "ls"])
    with pytest.raises(SystemExit) as exited:
        main()
    assert exited.value.code == 2
    assert "too little memory (no room" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "said"), [(KvprobeWarning, "kvprobe: mind the gap\n"), (UserWarning, "as Python does\n")]
)
def test_a_warning_of_kvprobe_is_a_sentence_too(
    kind: type[Warning], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def warned(*_: object, **__: object) -> None:
        warnings.warn("mind the gap", kind, stacklevel=2)

    monkeypatch.setattr(entry, "app", warned)
    monkeypatch.setattr(sys, "argv", ["kvprobe", "ls"])
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda *_: print("as Python does", file=sys.stderr)
        main()
    assert capsys.readouterr().err == said


def test_debug_shows_the_traceback_of_a_defect_and_changes_no_other_answer():
    raising = (
        "import sys; from kvprobe.cli import entry; entry.app = lambda *_, **__: 1 / 0; "
        "sys.argv = ['kvprobe', 'ls', '--debug']; entry.main()"
    )
    done = python(raising)
    assert done.returncode == 70
    assert "Traceback" in done.stderr
    assert "ZeroDivisionError" in done.stderr
    done = kvprobe("--debug", "run", "leakge")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_attend_writes_a_page_of_a_chat_before_and_after_its_mask(
    tmp_path: Path, tiny_llama: Model, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("kvprobe.inference.model.load", lambda *_, **__: tiny_llama)
    chat, page = tmp_path / "chat.json", tmp_path / "page.html"
    chat.write_text('[{"role": "user", "content": "The code is 48213."}, {"role": "user", "content": "Which?"}]')
    arguments = ["attend", "--chat", str(chat), "--hide", "m0", "--last", "2", "--out", str(page)]
    command, bound, _ = app.parse_args(arguments)
    command(*bound.args, **bound.kwargs)
    assert page.read_text().count('data-component="AttentionView"') == 1


TO_PAGES = {
    "audit": ["cache"],
    "diff": ["cache", "reference"],
    "canary": ["--url", "http://127.0.0.1:9"],
    "compare": ["--chat", "chat", "--ask", "so"],
    "attend": ["--text", "so"],
    "scan": ["--chat", "chat", "--hide", "m0"],
    "certify": ["--chat", "chat", "--hide", "m0", "--secret", "7", "--by", "mask"],
    "budget": [],
}
"""Commands that write a page or figure once all else is done, and what else they need."""


def test_a_page_that_cannot_be_written_is_refused_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    for command, needed in TO_PAGES.items():
        flag, places = "--out", {"absent/page.html": "no folder absent", "folder.png": "a folder is there"}
        if command == "budget":
            flag, places = "--figure", {"file/figure": "file cannot be used", "folder.png": "a folder is there"}
        for place, said in (places | {"/proc/figure": "/proc"}).items():
            refused(lambda given=[command, *needed, flag, place]: app(given, exit_on_error=False), said)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder.png"]
    pages = {
        name
        for name in app
        if name.isalpha() and app[name].default_command
        for flag in app[name].assemble_argument_collection()
        if re.match("(The|Also write a) page|Also draw", str(flag.parameter.help))
    }
    assert pages == {*TO_PAGES}


@pytest.mark.parametrize("arguments", [["doctor"], ["attend", "--text", "the user"]])
def test_an_adapter_is_handed_to_the_model(arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    loaded: list[object] = []

    def load(*_: object, adapter: object, **__: object) -> Model:
        loaded.append(adapter)
        raise KeyboardInterrupt

    monkeypatch.setattr("kvprobe.inference.model.load", load)
    command, bound, _ = app.parse_args([*arguments, "--adapter", str(tmp_path)])
    with pytest.raises(KeyboardInterrupt):
        command(*bound.args, **bound.kwargs)
    assert loaded == [str(tmp_path)]


def test_prefix_says_what_a_cache_keeps_of_one_of_several_conversations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    said = [{"role": "user", "content": "the user"}, {"role": "assistant", "content": "asks 1"}]
    paths = [tmp_path / name for name in ("first.jsonl", "second.jsonl")]
    for path, text in zip(paths, ("asks 1", "asks 2"), strict=True):
        rows = [{"messages": said[:1]}, {"messages": [said[0], {**said[1], "content": text}]}]
        path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    monkeypatch.setattr("kvprobe.inference.model.load", lambda *_, **__: any_model())
    prefix(*paths, conversation="1")
    assert "the text of message 1 was changed." in capsys.readouterr().out
    refused(lambda: prefix(*paths), "choose one")


def test_the_number_of_threads_is_the_users(tmp_path: Path):
    check = (
        "import sys\n"
        "import torch\n"
        "from kvprobe.cli import main\n"
        "torch.set_num_threads(7)\n"
        "for arguments in (['doctor', '.'], ['attend', '.', '--text', 'hello'], ['run', 'leakage', '--model', '.']):\n"
        "    sys.argv = ['kvprobe', *arguments]\n"
        "    try:\n"
        "        main()\n"
        "    except SystemExit:\n"
        "        print(torch.get_num_threads())\n"
    )
    done = python(f"import os\nos.chdir({str(tmp_path)!r})\n" + check)
    assert done.stdout.split() == ["7", "7", "7"]
    assert done.stderr.count("no config.json") == 3, "a model is looked for after all imports"
