"""The comparison of replies: each arm is what the cache operations give by hand, and the page escapes what it shows."""

import html
import json
import sys
from pathlib import Path

import numpy as np
import pytest

import kvprobe as kv
from kvprobe.cli import app
from kvprobe.comparison import ARMS, Comparison
from kvprobe.inference.model import Model, load
from kvprobe.report.views.compare import comparison_page
from tests.models import llama, tiny_tokenizer
from tests.models.every import tiny
from tests.refusals import refused
from tests.text.templates import ANSWER_HEADER_ALWAYS, LAST_TURN

CHAT = [
    {"role": "system", "content": "You answer briefly."},
    {"role": "user", "content": "The code of the <b>door</b> is 4711."},
    {"role": "assistant", "content": "I have noted it."},
    {"role": "user", "content": "It rains today."},
    {"role": "assistant", "content": "Take an umbrella."},
]
ASK = "What is the code of the door?"
SHORT = [{"role": "user", "content": text} for text in ("so it is", "the mill has 4.", "and the inn")]


@pytest.fixture(scope="module")
def compared(smol: Model) -> Comparison:
    return kv.compare(smol, CHAT, ["m1"], ASK, max_new_tokens=8)


def test_each_arm_is_what_the_cache_operations_give_by_hand(smol: Model, compared: Comparison):
    chat = kv.Transcript.from_messages(CHAT)
    full = smol.prefill(chat)
    caches = {
        "full": full,
        "masked": full.mask("m1"),
        "re-indexed": full.evict("m1").reindex(),
        "restarted": smol.prefill(chat.without("m1", mode="contiguous")),
    }
    assert tuple(compared.replies) == tuple(caches) == tuple(ARMS)[:-1]
    reply = smol.generate(full, ask=ASK, max_new_tokens=8)
    for arm, cache in caches.items():
        arm_reply = compared.replies[arm]
        assert arm_reply.text == smol.generate(cache, ask=ASK, max_new_tokens=8).text
        assert (arm_reply.slots, arm_reply.nbytes) == (int(cache.ledger.live_somewhere.sum()), cache.nbytes)
        prompt = smol.prompts(cache, ASK)[0]
        scores = smol.extend(cache, prompt)[1][0, -1].log_softmax(-1)
        assert arm_reply.logprobs[0] == pytest.approx(float(scores[reply.tokens[0][0]]), abs=1e-4)
    assert compared.replies["full"].logprobs == pytest.approx(reply.logprobs[0], abs=1e-4)
    assert compared.replies["full"].kl == 0 < compared.replies["restarted"].kl
    assert compared.replies["masked"].nbytes > compared.replies["re-indexed"].nbytes


def test_a_restart_can_reuse_what_stands_before_the_hidden_message(smol: Model, compared: Comparison):
    tokens = kv.Transcript.from_messages(CHAT).tokens(smol.tokenizer)
    rendered = smol.tokenizer.apply_chat_template([CHAT[0], *CHAT[2:]], return_dict=False)
    assert compared.reused is not None
    assert compared.reused.lengths == (len(tokens), len(rendered))
    assert list(tokens.ids[: compared.reused.tokens]) == rendered[: compared.reused.tokens]
    assert f"can reuse {compared.reused.tokens} of the {len(tokens)} tokens in the cache" in str(compared)


def test_attention_is_that_of_the_question_and_the_reply_on_what_was_hidden(smol: Model, compared: Comparison):
    full = smol.prefill(CHAT)
    prompt, reply = smol.prompts(full, ASK)[0], smol.generate(full, ask=ASK, max_new_tokens=8).tokens[0]
    read = prompt + kv.Tokens.of(reply[:-1], "generated", prompt.following)
    mass = kv.attend(smol, read, full, queries=range(len(read))).mass("m1").mean(-1)
    np.testing.assert_allclose(compared.attention["dangling"], mass.flatten().numpy(), atol=1e-5)
    layer, head = divmod(int(mass.argmax()), mass.shape[1])
    assert f"{100 * mass.mean():.1f} %" in compared.reach
    assert f"L{layer}H{head}" in compared.reach


def test_the_page_and_the_text_hold_every_reply_and_escape_it(compared: Comparison):
    page, text = comparison_page(compared), str(compared)
    assert "<b>door</b>" not in page
    assert "&lt;b&gt;door&lt;/b&gt;" in page
    for arm, reply in compared.replies.items():
        assert arm in page
        assert reply.text in text
    assert list(compared.df()["arm"]) == list(ARMS)[:-1]


def test_the_command_prints_the_replies_and_writes_the_page(
    smol: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("kvprobe.inference.model.load", lambda *_, **__: smol)
    chat, page = tmp_path / "chat.json", tmp_path / "compare.html"
    chat.write_text(json.dumps(CHAT))
    arguments = ["compare", "--chat", str(chat), "--hide", "m1", "--ask", ASK, "--new", "4", "--out", str(page)]
    command, bound, _ = app.parse_args(arguments)
    command(*bound.args, **bound.kwargs)
    printed = capsys.readouterr().out
    assert all(f"\n{arm}" in printed for arm in [*ARMS][:-1])
    assert "<td><b>re-indexed</b></td>" in page.read_text()
    command, bound, _ = app.parse_args([*arguments, "--json"])
    command(*bound.args, **bound.kwargs)
    printed, said = capsys.readouterr()
    assert [reply["arm"] for reply in json.loads(printed)["replies"]] == [*ARMS][:-1]
    assert str(page) in said


def test_a_hidden_system_message_is_restarted_as_the_template_renders_it_and_slot_0_is_reported_apart(smol: Model):
    with pytest.warns(UserWarning, match="slot 0"):
        compared = kv.compare(smol, CHAT, ["m0"], ASK, max_new_tokens=2)
    assert tuple(compared.replies) == tuple(ARMS)
    restarted, rendered = (compared.replies[arm] for arm in ("restarted", "rendered"))
    assert rendered.slots == len(kv.Transcript.from_messages(CHAT[1:]).tokens(smol.tokenizer)) > restarted.slots
    assert "on slot 0, the sink, which is hidden too" in compared.reach
    share = 100 * (compared.attention["dangling"] - compared.attention["dangling_first"]).mean()
    assert f"{share:.1f} % of their attention on m0" in compared.reach


def test_a_comparison_is_shown_in_a_notebook_and_written_elsewhere(
    tiny_llama: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    said = [{"role": "user", "content": "</iframe><b>the mill"}, {"role": "assistant", "content": "so it is"}]
    compared = kv.compare(tiny_llama, said, policies=["TOVA(8)"], ask="so", max_new_tokens=2)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    compared.show()
    assert Path(capsys.readouterr().out.strip()).read_text() == comparison_page(compared)
    frame = kv.views.comparison(compared)._repr_html_()
    assert frame.count("</iframe>") == 1
    assert html.unescape(frame.partition('srcdoc="')[2].partition('"')[0]) == comparison_page(compared)


def test_a_model_whose_keys_cannot_be_rotated_has_no_re_indexed_arm(tiny_models: dict[str, Model]):
    model = next(model for model in tiny_models.values() if not model.lanes.can_reindex)
    compared = kv.compare(
        model,
        [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}],
        ["m0"],
        "so",
        max_new_tokens=2,
    )
    assert tuple(compared.replies) == ("full", "masked", "restarted")
    assert "cannot be rotated" in compared.left_out
    assert compared.left_out in str(compared)


@pytest.mark.parametrize("hidden", [[], ["m1"]])
def test_a_policy_is_an_arm_beside_the_others(tiny_llama: Model, tmp_path: Path, hidden: list[str]):
    policies = ["SnapKV(50%, window=2), H2O(0.3)", kv.policies.SinkWindow(2, 4)]
    names = ["SnapKV(50%, window=2)", "H2O(0.3)", "SinkWindow(sinks=2, window=4)"]
    compared = kv.compare(tiny_llama, CHAT, hidden, "so", policies=policies, max_new_tokens=2)
    assert [arm for arm in compared.replies if arm not in ARMS] == names
    assert ("masked" in compared.replies) == bool(hidden) == ("spend" in compared.reach)
    furthest = max((reply for arm, reply in compared.replies.items() if arm != "full"), key=lambda reply: reply.kl)
    if not hidden:
        said = f"Under {furthest.arm}, which is furthest from the full cache, the reply"
        assert compared.reach.startswith(said)
        assert compared.reach in comparison_page(compared)
        lost = compared.replies["full"].logprob - furthest.logprob
        assert f"{abs(lost):.2f} nats per token {'less' if lost >= 0 else 'more'} likely." in compared.reach
    scene = tiny_llama.watch(kv.Transcript.from_messages(CHAT), queries=2)
    for name in names:
        cache = tiny_llama.apply(policies[1] if name == names[2] else name, scene)
        assert compared.replies[name].nbytes == cache.footprint < compared.replies["full"].nbytes
        live = cache.ledger.live.expand(cache.n_layers, -1, cache.n_kv_heads, -1)
        assert compared.replies[name].slots == round(live.sum(-1).double().mean().item())
        assert compared.replies[name].slots < compared.replies["full"].slots
        assert compared.replies[name].text == tiny_llama.generate(cache, "so", max_new_tokens=2).text
        assert name in str(compared)
    assert "the policy has acted once" in comparison_page(compared)


def test_nothing_to_compare_and_nothing_that_stays_are_refused_by_the_names_of_the_flags(tiny_llama: Model):
    refused(lambda: kv.compare(tiny_llama, SHORT, ask="so"), "hide (--hide)", "policies (--policy)", "of m0, m1")
    everything = kv.Transcript.from_messages(SHORT).segments
    refused(lambda: kv.compare(tiny_llama, SHORT, everything, "so"), "hide (--hide)", "at least one stays")


def test_what_is_hidden_before_it_is_seen_is_the_restart_at_other_positions(tiny_llama: Model):
    compared = {
        when: kv.compare(tiny_llama, SHORT, hide="m0", ask="so", when=when, max_new_tokens=2)
        for when in ("after", "before")
    }
    after, before = (
        {arm: reply.logprob for arm, reply in compared[when].replies.items()} for when in ("after", "before")
    )
    assert after["full"] == pytest.approx(before["full"])
    assert after["restarted"] == pytest.approx(before["restarted"])
    assert before["masked"] == pytest.approx(
        before["restarted"], abs=1e-4
    )  # its positions are relative, and the gap is at the start
    assert abs(after["masked"] - after["restarted"]) > 1e-3
    assert "before anything later was read" in str(compared["before"])
    assert compared["after"].hidden == ("m0",)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    "template", [LAST_TURN, ANSWER_HEADER_ALWAYS], ids=["system in the last turn", "a last header"]
)
def test_a_conversation_that_is_written_otherwise_before_a_question_is_read_with_it(template: str):
    tokenizer = tiny_tokenizer(template, bos_token="<s>")
    model = llama(vocab_size=96, tokenizer=tokenizer)
    messages = [{"role": role, "content": "so it is"} for role in ("system", "user", "assistant")]
    chat = kv.Transcript.from_messages(messages, ["system", "T1", "reply"])
    asked = [*messages, {"role": "user", "content": "and then"}]
    whole = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
    assert list(model.prompts(chat, "and then")[0].ids) == whole
    compared = kv.compare(model, chat, "T1", "and then", max_new_tokens=2)
    full = kv.compare(
        model, kv.Transcript.from_messages(messages[1:], ["T1", "reply"]), "T1", "and then", max_new_tokens=2
    )
    reply = model.generate(chat, "and then", max_new_tokens=2)
    assert compared.replies["full"].text == reply.texts[0]
    assert compared.replies["full"].logprobs == pytest.approx(reply.logprobs[0], abs=1e-4)
    assert compared.replies["full"].logprobs != pytest.approx(full.replies["full"].logprobs, abs=1e-4)
    if template == LAST_TURN:
        refused(lambda: model.prefill(chat), "drops or reorders message 0", "to generate or compare")
        refused(lambda: kv.compare(model, chat, "system", "and then"), "writes 'system' into the user's next message")


def test_hiding_slot_0_before_anything_later_is_read_is_warned_of(tiny_llama: Model):
    with pytest.warns(UserWarning, match="slot 0, the attention sink") as caught:
        kv.compare(tiny_llama, SHORT, "m0", "and then", when="before", max_new_tokens=1)
    assert len(caught) == 1


def test_what_cannot_be_compared_is_refused(smol: Model):
    refused(lambda: kv.compare(smol, CHAT, [], ASK), "list of segments")
    refused(lambda: kv.compare(smol, CHAT, ["m1"]), "the user's next message")
    refused(lambda: kv.compare(smol, CHAT, ask=ASK, policies="TOVA(8)"), "give a list")
    refused(lambda: kv.compare(smol, CHAT, ask=ASK, policies=["TOVX(8)"]), "did you mean 'TOVA'")
    refused(lambda: kv.compare(smol, CHAT, "m1", ASK, when="never"), "no choice of when")  # pyright: ignore[reportArgumentType]
    refused(lambda: kv.compare(smol, CHAT, [f"m{number}" for number in range(5)], ASK), "at least one stays")
    refused(lambda: kv.compare(smol, CHAT, ["m9"], ASK), "m9")


@pytest.mark.parametrize("kind", ["qwen3_next", "glm_moe_dsa", "hrm_text"])
def test_models_of_every_memory_are_compared_and_say_where_attention_is_not_shown(kind: str):
    tokenizer = tiny_tokenizer()
    model = load(tiny(kind, vocab_size=len(tokenizer)), tokenizer=tokenizer)
    compared = kv.compare(model, CHAT, ["m1"], "so", max_new_tokens=2)
    assert {"full", "masked", "re-indexed", "restarted"} <= {*compared.replies}
    assert compared.attention.empty == (kind == "hrm_text")
    assert ("do not attend: 0, 1, 2." in compared.left_out) == (kind == "qwen3_next")
    assert kind != "qwen3_next" or {*compared.attention["layer"]} == {3}
    assert ("Attention is not shown" in compared.left_out) == compared.attention.empty
    assert ("likely." in compared.reach) == compared.attention.empty
    assert compared.reach in str(compared)
    assert compared.reach.partition(",")[0] in comparison_page(compared)
