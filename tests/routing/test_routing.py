"""Routing against transformers' own record of it, against routers set by hand, and exchanged between runs."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor
from torch.nn import Module

import kvprobe as kv
from kvprobe import routing
from kvprobe.cache.cache import KVCache
from kvprobe.inference.model import Model
from kvprobe.routing import Routing, agreement, chance_overlap, load, mediate, read
from kvprobe.text.tokens import Tokens
from tests import models
from tests.models import every
from tests.refusals import refused

IDS = [7, 3, 11, 5, 42, 3, 9, 30, 18, 2, 51, 6]
OTHERS = [8, 3, 12, 5, 42, 33, 9, 31, 18, 2, 50, 6]


@cache
def mixture(name: str) -> Model:
    return models.MIXTURES[name]()


@pytest.fixture(params=list(models.MIXTURES))
def model(request: pytest.FixtureRequest) -> Model:
    return mixture(request.param)


def said(ids: list[int], start: int = 0) -> Tokens:
    return Tokens.of(ids, "T1", start)


def caches(model: Model) -> tuple[KVCache, KVCache]:
    return model.prefill(said(IDS)), model.prefill(said(OTHERS))


SUFFIX = [4, 17, 29, 8]


# ---- what routers say


def test_routing_is_what_transformers_records(model: Model) -> None:
    output = model.lanes.plain(input_ids=torch.tensor([IDS]), output_router_logits=True, use_cache=False)
    recorded = read(model, said(IDS)).routing
    logits = torch.stack(list(output.router_logits))
    assert torch.allclose(recorded.logits[:, 0], logits, atol=1e-5)
    assert torch.equal(
        recorded.chosen[:, 0].sort(-1).values, logits.topk(recorded.chosen.shape[-1]).indices.sort(-1).values
    )


def set_by_hand(*biases: float) -> Model:
    """A model whose routers say the same of every token."""
    model = models.gpt_oss()
    with torch.no_grad():
        for block in model.lanes.blocks:
            block.mlp.router.weight.zero_()
            block.mlp.router.bias.copy_(torch.tensor(biases))
    return model


def test_a_router_set_by_hand_is_read_as_it_was_set() -> None:
    model = set_by_hand(0.0, 2.0, 1.0, -1.0)
    recorded = read(model, said(IDS)).routing
    assert recorded.df()["experts"].unique().tolist() == [(1, 2)]
    assert torch.allclose(recorded.weights, torch.tensor([2.0, 1.0]).softmax(0))
    assert torch.allclose(recorded.probabilities, torch.tensor([0.0, 2.0, 1.0, -1.0]).softmax(0))
    shares = load(recorded)
    assert shares.groupby("expert")["share"].unique().map(list).tolist() == [[0.0], [1.0], [1.0], [0.0]]
    assert shares["cv"].unique() == pytest.approx([1.0])  # half of the experts compute everything


def test_rows_of_unequal_length_are_routed_as_each_alone(model: Model) -> None:
    together = read(model, [said(IDS), said(IDS[:5])]).routing
    alone = read(model, said(IDS[:5])).routing
    assert torch.allclose(together.logits[:, 1:, :5], alone.logits, atol=1e-5)
    assert together.present.sum(1).tolist() == [12, 5]
    assert len(together.df()) == len(together.layers) * 17


def test_tokens_after_a_cache_are_routed_as_in_one_pass(model: Model) -> None:
    whole = read(model, said(IDS + SUFFIX)).routing
    rest = read(model, said(SUFFIX, len(IDS)), model.prefill(said(IDS))).routing
    assert torch.allclose(whole.logits[:, :, len(IDS) :], rest.logits, atol=1e-5)
    assert rest.positions.tolist() == [list(range(12, 16))]


def test_a_dense_layer_has_no_router() -> None:
    assert read(mixture("qwen3_moe"), said(IDS)).routing.layers == (1, 2)


# ---- routing exchanged


def test_a_read_routed_as_itself_changes_nothing(model: Model) -> None:
    free = read(model, said(IDS), logits=len(IDS))
    held = read(model, said(IDS), routing=free.routing, logits=len(IDS))
    assert torch.allclose(held.logits, free.logits, atol=1e-6)


def test_a_read_routed_as_a_model_with_other_routers_is_that_model() -> None:
    """Two models that differ in what their routers always say: routed as the other, each computes what that does."""
    model, other = set_by_hand(0.0, 2.0, 1.0, -1.0), set_by_hand(3.0, -1.0, 0.0, 1.0)
    free = read(other, said(IDS), logits=len(IDS))
    of_model = replace(free.routing, made_by=model.lanes.maker)
    held = read(model, said(IDS), routing=of_model, logits=len(IDS))
    assert torch.allclose(held.logits, free.logits, atol=1e-6)
    assert float((held.logits - read(model, said(IDS), logits=len(IDS)).logits).abs().max()) > 1e-3
    # What its routers said is recorded, though the experts followed the other's.
    assert held.routing.df()["experts"].unique().tolist() == [(1, 2)]


def test_layers_limit_where_another_routing_holds() -> None:
    model = mixture("mixtral")
    clean, damaged = caches(model)
    other = read(model, said(SUFFIX, len(IDS)), damaged).routing
    free = read(model, said(SUFFIX, len(IDS)), clean)
    last = read(model, said(SUFFIX, len(IDS)), clean, routing=other, layers=[2])
    assert torch.equal(last.routing.logits, free.routing.logits)  # nothing before the last router has changed
    assert not torch.equal(last.logits, free.logits)
    none = read(model, said(SUFFIX, len(IDS)), clean, routing=other, layers=[])
    assert torch.equal(none.logits, free.logits)


def test_no_router_is_held_after_a_read() -> None:
    model = mixture("mixtral")
    before = read(model, said(OTHERS)).logits
    with pytest.raises(kv.UserError):
        read(model, said(OTHERS), routing=read(model, said(IDS)).routing)
    assert torch.equal(read(model, said(OTHERS)).logits, before)


# ---- mediation


def test_nothing_is_mediated_where_nothing_is_damaged(model: Model) -> None:
    clean, _ = caches(model)
    mediation = mediate(model, clean, clean, model_suffix(clean), kept=3)
    assert mediation.damage == pytest.approx(0, abs=1e-6)
    assert mediation.undone != mediation.undone  # NaN: no share of nothing


def test_mediation_is_of_the_four_reads(model: Model) -> None:
    clean, damaged = caches(model)
    suffix = model_suffix(clean)
    mediation = mediate(model, clean, damaged, suffix, kept=4)
    runs = [read(model, suffix, start, logits=4) for start in (clean, damaged)]
    other_way = read(model, suffix, damaged, routing=runs[0].routing, logits=4)
    assert mediation.damage == pytest.approx(kl(runs[0].logits, runs[1].logits), abs=1e-6)
    assert mediation.left == pytest.approx(kl(runs[0].logits, other_way.logits), abs=1e-6)
    assert mediation.undone == pytest.approx(1 - mediation.left / mediation.damage)
    assert torch.equal(mediation.restored, other_way.logits[0])
    misled = read(model, suffix, clean, routing=runs[1].routing, logits=4)
    assert mediation.caused == pytest.approx(kl(runs[0].logits, misled.logits), abs=1e-6)
    assert mediation.done == pytest.approx(mediation.caused / mediation.damage)


def test_damage_that_only_the_routers_see_goes_through_them_whole() -> None:
    """Attention writes one number of the stream, which the routers read, and experts and the output hardly do."""
    small = 1e-4
    model = models.mixtral(num_hidden_layers=1)
    plain = model.lanes.plain
    block = plain.model.layers[0]
    with torch.no_grad():
        plain.model.embed_tokens.weight[:, 0] = 0
        block.self_attn.o_proj.weight[1:] = 0
        block.self_attn.o_proj.weight[0] *= small
        block.mlp.gate.weight[:, 0] = torch.randn(4, generator=torch.Generator().manual_seed(3)) / small * 10
    clean, damaged = caches(model)
    mediation = mediate(model, clean, damaged, model_suffix(clean), kept=4)
    assert mediation.damage > 1e-4
    assert (mediation.undone, mediation.done) == pytest.approx((1, 1), abs=1e-2)
    none = mediate(model, clean, damaged, model_suffix(clean), kept=4, layers=[])
    assert (none.undone, none.done) == pytest.approx((0, 0), abs=1e-5)


def model_suffix(cache: KVCache) -> Tokens:
    return said(SUFFIX, int(cache.ledger.following[0]))


def kl(clean: Tensor, other: Tensor) -> float:
    clean, other = clean[0].log_softmax(-1), other[0].log_softmax(-1)
    return float((clean.exp() * (clean - other)).sum(-1).mean())


# ---- measures


@pytest.mark.parametrize(("experts", "chosen", "expected"), [(64, 8, 0.0705), (128, 8, 0.0343), (8, 2, 0.179)])
def test_chance_overlap_is_that_of_random_choices(experts: int, chosen: int, expected: float) -> None:
    assert chance_overlap(experts, chosen) == pytest.approx(expected, abs=5e-4)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.rand(2, 20_000, experts, generator=generator).topk(chosen).indices
    one, other = (torch.zeros(20_000, experts).scatter(1, indices, 1) for indices in drawn)
    shared = (one * other).sum(1)
    assert chance_overlap(experts, chosen) == pytest.approx(float((shared / (2 * chosen - shared)).mean()), abs=4e-3)


def test_agreement_by_hand() -> None:
    model = mixture("mixtral")
    one, other = (read(model, said(ids)).routing for ids in (IDS, IDS))
    table = agreement(one, other)
    assert table["overlap"].unique().tolist() == [1.0]
    assert float(table["jsd"].max()) == pytest.approx(0, abs=1e-6)
    logits = torch.full_like(one.logits, -1e4)
    certain = [
        Routing(**{**vars(one), "logits": logits.index_fill(-1, torch.tensor([expert]), 0.0)}) for expert in (0, 1)
    ]
    apart = agreement(*certain)
    assert apart["jsd"].tolist() == pytest.approx([1.0] * len(apart))  # a bit: which of the two runs it was
    assert apart["entropy"].tolist() == pytest.approx([0.0] * len(apart))
    shifted = Routing(**{**vars(other), "chosen": one.chosen.flip(-1)})
    assert agreement(one, shifted)["overlap"].unique().tolist() == [1.0]  # the order of the chosen does not matter


# ---- refusals


def test_refusals() -> None:
    dense, moe = models.any_model(), mixture("mixtral")
    recorded = read(moe, said(IDS)).routing
    refused(lambda: read(dense, said(IDS)), "has no experts that kvprobe can find")
    refused(lambda: read(moe, said(OTHERS), routing=recorded), "of other tokens or of another model")
    refused(lambda: read(mixture("olmoe"), said(IDS), routing=recorded), "of other tokens or of another model")
    refused(lambda: read(moe, said(IDS), routing=recorded, layers=[7]), "the layers that have one are 0, 1, 2")
    refused(lambda: read(moe, said(IDS), layers=[0]), "give `routing` too")
    refused(lambda: agreement(recorded, read(moe, said(OTHERS)).routing), "other tokens, positions or models")
    refused(lambda: chance_overlap(2, 3), "cannot go to 3 of 2 experts")


def test_routers_that_return_something_else_are_refused() -> None:
    refused(lambda: read(kv.load(every.tiny("glm4_moe")), said(IDS)), "cannot follow")


def test_routers_that_experts_do_not_follow_are_refused_though_those_of_other_layers_are() -> None:
    """The experts of one layer go elsewhere, or weigh themselves."""

    def fixed(module: Module, args: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        states, chosen, weights = args
        return states, torch.zeros_like(chosen), weights

    def even(module: Module, args: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        states, chosen, weights = args
        return states, chosen, torch.full_like(weights, 0.5)

    for disobey in (fixed, even):
        model = models.mixtral()
        model.lanes.blocks[1].mlp.experts.register_forward_pre_hook(disobey)
        refused(lambda model=model: read(model, said(IDS)), "do not follow its routers")


def test_routings_of_two_models_are_not_compared() -> None:
    kept = [models.mixtral(seed) for seed in (0, 1)]
    one, other = (read(model, said(IDS)).routing for model in kept)
    refused(lambda: agreement(one, other), "with one model")
    padded = read(mixture("mixtral"), [said([7, 3]), said([7, 3, 0])]).routing
    refused(lambda: read(mixture("mixtral"), [said([7, 3, 0]), said([7, 3, 0])], routing=padded), "of other tokens")


@pytest.mark.usefixtures("unchecked")
def test_a_single_layer_is_no_list_of_layers() -> None:
    recorded = read(mixture("mixtral"), said(IDS)).routing
    refused(lambda: read(mixture("mixtral"), said(IDS), routing=recorded, layers=1), "give a list of whole numbers")  # type: ignore[arg-type]


def test_results_show_themselves() -> None:
    model = models.mixtral(tokenizer=models.tiny_tokenizer())
    clean = model.prefill("the answer is 12")
    recorded = read(model, "the answer is 7", clean)
    assert "3 layers of 4 experts, 2 for each token" in repr(recorded.routing)
    assert recorded.routing.df()["text"].iloc[0] == "the"
    assert "damage=" in repr(mediate(model, clean, model.prefill("the answer is 13"), " or 7"))
    assert routing.__doc__
