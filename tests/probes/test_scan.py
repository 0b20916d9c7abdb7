"""The scan: what comes from the hidden messages and what does not, and when it may be called a leak."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from kvprobe.cli import app
from kvprobe.inference.model import Model
from kvprobe.probes import card as probe_card
from kvprobe.probes.card import ProbeInput
from kvprobe.probes.scan import FAR, LEAK, NONE, OTHERWISE, UNPROVEN, VERDICTS, scan
from kvprobe.report.views.scan import save_scan, scan_lines
from kvprobe.text.transcript import Transcript
from tests.browser import browse, driven, needs_browser
from tests.models import llama, tiny_tokenizer
from tests.probes.made_probes import made_probe
from tests.refusals import refused

VALUES = ProbeInput("v", 2, None, "mean")
MESSAGES = [
    {"role": "system", "content": "be kind."},
    {"role": "user", "content": "the shed has 28."},
    {"role": "assistant", "content": "a shed it is"},
    {"role": "user", "content": "and the mill?"},
    {"role": "assistant", "content": "the mill is old"},
]
CHAT = Transcript.from_messages(MESSAGES)


def test_each_segment_is_read_from_the_users_cache_and_from_its_restart(tiny_llama: Model):
    probe = made_probe(tiny_llama, VALUES)
    table = scan(tiny_llama, CHAT, ["m1"], [probe]).df()
    assert list(table["segment"]) == ["m2", "m2", "m3+m4", "m3+m4"]
    assert list(table["masked"]) == [False] * 2 + [True] * 2
    assert list(table["place"]) == ["first", "second"] * 2

    chat = Transcript.from_messages(MESSAGES, ["m0", "m1", "m2", "m3+m4", "m3+m4"])
    tokens = chat.tokens(tiny_llama.tokenizer)
    cut = tokens.span("m2").stop
    masked, _ = tiny_llama.extend(tiny_llama.prefill(tokens[:cut]).mask("m1"), tokens[cut:])
    fresh = tiny_llama.prefill(chat.without("m1"))
    for segment, rows in table.groupby("segment"):
        seen, floor = (probe.read(tiny_llama, cache, str(segment))[0] for cache in (masked, fresh))
        for place, row in enumerate(rows.to_dict("records")):
            best = int(seen[place].argmax())
            assert row["reads"] == probe.target.classes[best]
            assert row["probability"] == pytest.approx(float(seen[place, best]), abs=1e-4)
            assert row["restart_probability"] == pytest.approx(float(floor[place, best]), abs=1e-4)
            assert row["base_rate"] == pytest.approx(float(probe.base_rates[place, best]))


def test_slots_that_hidden_messages_cannot_reach_show_no_leak_even_by_a_confident_probe(tiny_llama: Model):
    # Masked, m1 reaches later messages through m2 alone, at layer 2 at the earliest.
    probes = [
        made_probe(tiny_llama, ProbeInput("v", layer, None, "mean"), name=f"at-{layer}", scale=9) for layer in (0, 1, 2)
    ]
    table = scan(tiny_llama, CHAT, ["m1"], probes).df()
    blind = table[table["masked"] & table["probe"].isin(["at-0", "at-1"])]
    assert set(blind["verdict"]) == {NONE}
    assert float(blind["bits"].abs().max()) < 1e-3
    assert float(blind["probability"].max()) > 0.9
    assert float(table[table["masked"] & (table["probe"] == "at-2")]["bits"].abs().max()) > 0.01


def test_slots_that_hidden_messages_cannot_reach_differ_by_zero_from_the_restart(tiny_llama: Model):
    probes = [
        made_probe(tiny_llama, ProbeInput("v", layer, None, "mean", True), name=f"at-{layer}") for layer in (1, 2)
    ]
    table = scan(tiny_llama, CHAT, ["m1"], probes).df()
    masked = table[table["masked"]].set_index(["probe", "place"])["bits"]
    assert not masked["at-1"].any()
    assert masked["at-2"].all()


@pytest.mark.parametrize(
    ("promise", "verdict"),
    [
        ({}, LEAK),
        ({"gain": 1e9}, NONE),
        ({"far": 0.1}, FAR),
        ({"arm": "hidden"}, OTHERWISE),
        ({"leak": 0.0}, UNPROVEN),
        ({"gain": None, "power": None}, UNPROVEN),
        ({"gain": None, "power": 0.0}, NONE),
    ],
)
def test_a_difference_is_a_leak_only_by_a_proven_probe_near_its_training(
    tiny_llama: Model, promise: dict[str, Any], verdict: str
):
    scanned = scan(tiny_llama, CHAT, ["m1"], [made_probe(tiny_llama, VALUES, scale=10, **promise)])
    after = scanned.df()[scanned.df()["masked"]].set_index("place")
    assert after.loc["first", "bits"] > 1
    assert after.loc["first", "verdict"] == verdict
    assert after.loc["second", "bits"] < 0.1
    assert after.loc["second", "verdict"] == (NONE if verdict == LEAK else verdict)
    judged = verdict in (LEAK, NONE)
    assert scanned.answer.startswith(
        "Of 2 readings by" if verdict == LEAK else "No leak" if judged else "Nothing can be said"
    )


def test_slots_that_saw_the_hidden_text_are_judged_by_probes_of_such_slots(tiny_llama: Model):
    probes = [made_probe(tiny_llama, VALUES, arm=arm, name=arm, gain=1e9) for arm in ("direct", "retained")]
    table = scan(tiny_llama, CHAT, ["m1"], probes).df()
    judged = table[table["verdict"] == NONE]
    assert set(zip(judged["masked"], judged["probe"], strict=True)) == {(False, "direct"), (True, "retained")}


def test_messages_are_hidden_after_their_answer_or_after_until(tiny_llama: Model):
    probe = made_probe(tiny_llama, VALUES)

    def masked(mask: list[str], **settings: Any) -> str:
        table = scan(tiny_llama, CHAT, mask, [probe], **settings).df()
        return " ".join(dict.fromkeys(table[table["masked"]]["segment"]))

    assert masked(["m1"]) == "m3+m4"
    assert masked(["m0", "m2"]) == ""
    assert masked(["m0"], until="m0") == "m1+m2 m3+m4"
    assert masked(["m0"], until="m1") == "m2 m3+m4"
    assert masked(["m0", "m1"], until="m3") == "m4"


def test_segments_that_are_exchanges_are_read_as_they_are(tiny_llama: Model):
    chat = Transcript.from_messages(MESSAGES, ["system", "T1", "T1", "T2", "T2"])
    scanned = scan(tiny_llama, chat, ["system"], [made_probe(tiny_llama, VALUES)])
    assert scanned.chat == chat
    assert list(dict.fromkeys(scanned.df()["segment"])) == ["T1", "T2"]


def test_what_cannot_be_scanned_is_refused(tiny_llama: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    probe = made_probe(tiny_llama, VALUES)
    monkeypatch.setattr(probe_card, "shipped", lambda _: tmp_path)
    other = llama(seed=1, tokenizer=tiny_tokenizer())
    for match, attempt in {
        "Nothing is masked": lambda: scan(tiny_llama, CHAT, [], [probe]),
        "known are 'm0'|did you mean": lambda: scan(tiny_llama, CHAT, ["m9"], [probe]),
        "Nothing comes after 'm4'": lambda: scan(tiny_llama, CHAT, ["m1", "m4"], [probe]),
        "'m0' comes before 'm1'": lambda: scan(tiny_llama, CHAT, ["m1"], [probe], until="m0"),
        "no probes to scan with": lambda: scan(tiny_llama, CHAT, ["m1"], []),
        "Two of the probes": lambda: scan(tiny_llama, CHAT, ["m1"], [probe, probe]),
        "differs from it in weights": lambda: scan(other, CHAT, ["m1"], [probe]),
        "No published probe reads": lambda: scan(tiny_llama, CHAT, ["m1"]),
    }.items():
        refused(attempt, re.compile(match))
    made_probe(other, VALUES).save(tmp_path / "tiny-digit")
    refused(lambda: scan(tiny_llama, CHAT, ["m1"]), "those that ship with kvprobe read LlamaForCausalLM")
    made_probe(tiny_llama, VALUES, name="mine").save(tmp_path / "mine")
    made_probe(tiny_llama, VALUES, name="inside", arm="hidden").save(tmp_path / "inside")
    assert list(scan(tiny_llama, CHAT, ["m1"]).cards) == ["mine"]


EVIL = '</s></dd><script>document.title = "evil"</script> & <b>'


@needs_browser
def test_the_page_shows_the_hidden_text_and_runs_none_of_it(tiny_llama: Model, tmp_path: Path):
    messages = [*MESSAGES[:1], {"role": "user", "content": EVIL}, *MESSAGES[2:]]
    scanned = scan(tiny_llama, Transcript.from_messages(messages), ["m1"], [made_probe(tiny_llama, VALUES, scale=10)])
    page = save_scan(scanned, tmp_path / "scanned.html")
    dom = browse(page, tmp_path / "profile", "--dump-dom").stdout
    assert "<title>What can still be read of m1</title>" in dom
    assert "<s>&lt;/s&gt;&lt;/dd&gt;&lt;script&gt;" in dom
    assert dom.count('class="bars"') == len(scanned.df())
    assert "map-cells" in dom


WIDTHS = """
addEventListener("DOMContentLoaded", () => {
  const said = [400, 1280].map((width) => {
    document.body.style.width = `${width}px`;
    const cut = (cell) => cell.getBoundingClientRect().right > cell.closest(".scroll").getBoundingClientRect().right;
    const verdicts = [...document.querySelectorAll("td.verdict")];
    return [verdicts.map((cell) => cell.textContent), verdicts.filter(cut).length, document.body.scrollWidth];
  });
  document.body.replaceChildren(JSON.stringify(said));
});
"""


@needs_browser
def test_verdicts_are_in_view_on_a_telephone_and_a_desk_and_every_column_is_explained(
    tiny_llama: Model, tmp_path: Path
):
    scanned = scan(
        tiny_llama, CHAT, ["m1"], [made_probe(tiny_llama, VALUES, scale=10, name="a-rather-long-name-of-it")]
    )
    page = save_scan(scanned, tmp_path / "scanned.html").read_text()
    verdicts = scanned.df()["verdict"].tolist()
    assert [said[:2] for said in driven(page, WIDTHS, tmp_path)] == [[verdicts, 0], [verdicts, 0]]
    columns = re.findall(r'<th scope="col">([^<]+)</th>', page.split("What the probes promise")[0])
    explained = re.findall(r"<dt>([^<]+)</dt><dd>", page)
    assert set(columns) - {"verdict", "restart reads"} <= set(explained)
    assert {*VERDICTS, *columns} - {"verdict", "restart reads"} == set(explained)


def test_the_lines_of_a_scan_name_every_reading_and_its_verdict(tiny_llama: Model):
    scanned = scan(tiny_llama, CHAT, ["m1"], [made_probe(tiny_llama, VALUES)])
    lines = scan_lines(scanned)
    assert len([line for line in lines if line.startswith("  tiny-digit, ")]) == 4
    assert lines[-1] == scanned.answer
    assert any("60.0 % (50.0 to 70.0)" in line for line in lines)


def test_the_command_scans_a_chat_with_probes_from_a_folder(
    tiny_llama: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("kvprobe.inference.model.load", lambda *_, **__: tiny_llama)
    chat, page = tmp_path / "chat.json", tmp_path / "page.html"
    chat.write_text(json.dumps(MESSAGES))
    folder = made_probe(tiny_llama, VALUES).save(tmp_path / "tiny-digit")
    threads = torch.get_num_threads()
    arguments = ["scan", "--chat", str(chat), "--hide", "m0", "m1", "--probes", str(folder), "--out", str(page)]
    command, bound, _ = app.parse_args(arguments)
    command(*bound.args, **bound.kwargs)
    torch.set_num_threads(threads)
    assert "m3+m4, read after the mask" in capsys.readouterr().out
    assert page.read_text().count('class="bars"') == 4
