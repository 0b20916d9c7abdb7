"""Whatever interrupts a call, at whatever moment, the model is as it was: the next read gives the same numbers."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from transformer_lens.hook_points import HookPoint

import kvprobe
from kvprobe.inference.capture import editing, plain_ports
from kvprobe.inference.model import Model, load
from kvprobe.models import attending, hooks
from kvprobe.models.packed import packed
from kvprobe.patching import LogitDiff
from kvprobe.restoring import restoring
from kvprobe.threads import one_thread
from tests.models import tiny_tokenizer
from tests.refusals import refused


def gpt_neo() -> Model:
    """Its windows are tables of slots in the modules."""
    config = transformers.GPTNeoConfig(
        vocab_size=64, hidden_size=16, num_layers=2, num_heads=2, attention_types=[[["global", "local"], 1]],
        window_size=4, max_position_embeddings=64, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return load(transformers.GPTNeoForCausalLM(config), tokenizer=tiny_tokenizer())


def swept(reads: str, *parts: str) -> Callable[[Model], object]:
    def call(model: Model) -> object:
        base, donor = model.prefill("a b c"), model.prefill("a c b")
        how: Any = {"over": ("layer",), "parts": parts, "reads": reads, "progress": False}
        return kvprobe.patch_sweep(model, base, donor, "b", LogitDiff(3, 4), **how)

    return call


def edited(model: Model) -> object:
    port = plain_ports(model.lanes, {"resid_post": [1]})["resid_post", 1]
    assert port is not None
    with editing(model.lanes, [(port, lambda tensor: 2 * tensor)]):
        return model.prefill("a b c")


def nested(model: Model) -> object:
    with model.lanes.observing_attention(lambda _: None), model.lanes.observing_attention(lambda _: None):
        return model.prefill("a b c")


def with_packed_weights(model: Model) -> object:
    with packed(model.lanes.plain, 2):
        return model.prefill("a b c")


CALLS: dict[str, tuple[str, Callable[[Model], object]]] = {
    "reader patching": ("llama", swept("reader", "K")),
    "total patching": ("llama", swept("total", "resid_post")),
    "masks of each layer": ("gemma3", lambda model: model.extend(model.prefill("a b c d").evict(slots=[1]), "a b")),
    "tables of slots": ("gpt_neo", lambda model: model.extend(model.prefill("a b c d").evict(slots=[1]), "a b")),
    "nested": ("llama", nested),
    "edited activations": ("llama", edited),
    "packed weights": ("llama", with_packed_weights),
    "captured, plain": ("llama", lambda model: model.capture("a b", ["resid_post"])),
    "captured, hooked": ("llama", lambda model: model.capture("a b", ["k_pre"], lane="hooked")),
    "routers": ("mixtral", lambda model: model.lanes.routers),
}


EVENTS: dict[str, tuple[Any, str]] = {
    "attention chosen": (transformers.PreTrainedModel, "set_attn_implementation"),
    "hook added": (torch.nn.Module, "register_forward_pre_hook"),
    "other hook added": (torch.nn.Module, "register_forward_hook"),
    "point hooked": (HookPoint, "add_hook"),
    "weights packed": (torch.ops.mkldnn, "_reorder_linear_weight"),
    "forward": (torch.nn.Embedding, "forward"),
    "later in forward": (torch.nn.Module, "__call__"),
}


def pressing(
    event: str, number: int, call: Callable[[], object], monkeypatch: pytest.MonkeyPatch, after: bool = True
) -> bool:
    """Whether Ctrl-C was pressed in this call, at the end (or the beginning) of that occurrence of an event."""
    owner, name = EVENTS[event]
    real, seen = getattr(owner, name), [0]

    def pressed(*given: Any, **how: Any) -> Any:
        seen[0] += 1
        if seen[0] == number and not after:
            raise KeyboardInterrupt
        result = real(*given, **how)
        if seen[0] == number:
            raise KeyboardInterrupt
        return result

    with monkeypatch.context() as patched:
        patched.setattr(owner, name, pressed)
        try:
            call()
        except KeyboardInterrupt:
            return True
    return False


def state(model: Model) -> object:
    """All that calls change for a while, and what the next read gives."""
    plain = model.lanes.plain
    hooked = model.lanes._hooked
    modules = [*plain.modules(), *(hooked[1].bridge.modules() if hooked else ())]
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs")
    added = [len(getattr(module, kind)) for module in modules for kind in kinds]
    replaced = ["forward" in vars(module) for module in plain.modules()]
    tables = [tuple(bias.shape) for module in plain.modules() if (bias := getattr(module, "bias", None)) is not None]
    logits = model.extend(model.prefill("a b c"), "b")[1]
    return added, replaced, tables, attending.attention_name(plain), len(attending._replacements), logits.tolist()


@pytest.mark.parametrize("name", CALLS)
def test_what_interrupts_a_call_leaves_nothing_behind(
    name: str, tiny_models: dict[str, Model], monkeypatch: pytest.MonkeyPatch, unchecked: None
):
    of, call = CALLS[name]
    model = gpt_neo() if of == "gpt_neo" else tiny_models[of]
    call(model)  # the gates pass once
    before, count = state(model), 0
    for event in EVENTS:
        for number, after in ((1, False), (1, True), (3, True)):
            model.lanes.__dict__.pop("routers", None)
            if pressing(event, number, lambda: call(model), monkeypatch, after):
                assert state(model) == before, (event, number, after)
                count += 1
    assert count >= 6


def test_an_interruption_of_putting_back_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch):
    done: list[str] = []

    def undo() -> None:
        done.append("begun")
        if len(done) == 1:
            raise KeyboardInterrupt
        done.append("put back")

    with pytest.raises(KeyboardInterrupt), restoring(undo):
        pass
    assert done == ["begun", "begun", "put back"]


def test_two_threads_that_attend_differently_get_what_each_gets_alone(tiny_llama: Model):
    model = tiny_llama
    other = swept("total", "resid_post")
    alone, base = other(model), model.prefill("a b c")
    expected = model.extend(base, "b")[1]
    gone_wrong: list[object] = []

    def read() -> None:
        for _ in range(5):
            if not torch.equal(model.extend(base, "b")[1], expected):
                gone_wrong.append("read")

    thread = threading.Thread(target=read)
    thread.start()
    for _ in range(2):
        assert str(other(model)) == str(alone)
    thread.join()
    assert not gone_wrong


def test_a_model_that_another_thread_keeps_is_refused(tiny_llama: Model, monkeypatch: pytest.MonkeyPatch):
    model = tiny_llama
    model.prefill("a")
    monkeypatch.setattr(hooks, "PATIENCE", 0.01)
    with model.lanes.observing_attention(lambda _: None):
        thread = threading.Thread(target=lambda: refused(lambda: model.prefill("a"), "Another thread has used this"))
        thread.start()
        thread.join()
    model.prefill("a")


def test_threads_of_torch_are_put_back():
    before = torch.get_num_threads()
    with pytest.raises(KeyboardInterrupt), one_thread():
        raise KeyboardInterrupt
    assert torch.get_num_threads() == before
