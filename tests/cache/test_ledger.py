import dataclasses

import torch
from hypothesis import given
from hypothesis import strategies as st

from kvprobe.cache.ledger import PADDING, Ledger
from tests.random_caches import NAMES, assert_same_ledger, ledgers, random_ledger
from tests.refusals import refused


@given(ledgers(), st.lists(st.sampled_from(NAMES), min_size=1))
def test_a_slot_is_in_the_segments_that_its_number_names(ledger: Ledger, names: list[str]):
    inside = ledger.in_segments(names)
    for row in range(ledger.batch):
        for slot in range(ledger.slots):
            number = int(ledger.segments[row, slot])
            assert inside[row, slot].item() == (number != PADDING and NAMES[number] in names)


def test_an_unknown_segment_is_refused_with_all_names_where_none_is_near():
    refused(
        lambda: random_ledger(0).in_segments(["x"]), "no segment called 'x'; known are 'system', 'T1', 'summary', 'T2'"
    )


def test_a_slot_is_live_somewhere_if_one_head_of_one_layer_sees_it():
    live = torch.zeros(2, 1, 2, 3, dtype=torch.bool)
    live[1, 0, 0, 2] = True
    row = random_ledger(0, batch=1, slots=3)
    assert dataclasses.replace(row, live=live).live_somewhere.tolist() == [[False, False, True]]


def test_a_ledger_is_untouched_only_if_all_is_live_and_in_place():
    assert random_ledger(0, layers=3, kv_heads=2).untouched
    assert not random_ledger(0, batch=1, gaps=True).untouched
    assert not random_ledger(0, some_masked=True).untouched
    hidden_in_one_head = random_ledger(0, layers=3, kv_heads=2)
    hidden_in_one_head.live[1, 0, 1, 3] = False
    assert not hidden_in_one_head.untouched


@given(ledgers(), st.permutations([*NAMES[:2], "generation", "generated"]))
def test_a_row_is_unfinished_if_its_last_token_belongs_to_an_answer(ledger: Ledger, names: list[str]):
    ledger = renamed(ledger, tuple(names))
    for row, segments in enumerate(ledger.segments.tolist()):
        read = [names[segment] for segment in segments if segment != PADDING]
        assert ledger.unfinished[row].item() == (bool(read) and read[-1] in ("generation", "generated"))


def test_an_empty_ledger_is_not_unfinished():
    none = torch.zeros(2, 0, dtype=torch.long)
    assert not renamed(random_ledger(0), ("generated", *NAMES[1:])).take(none, none.bool()).unfinished.any()


def test_a_ledger_is_uniform_only_without_a_layer_or_head_axis():
    assert random_ledger(0).uniform
    assert not random_ledger(0, layers=3).uniform
    assert not random_ledger(0, kv_heads=2).uniform


@given(ledgers(), st.data())
def test_taking_slots_gathers_row_by_row_and_blanks_the_padding(ledger: Ledger, data: st.DataObject):
    length = data.draw(st.integers(1, ledger.slots))
    index = st.lists(st.integers(0, ledger.slots - 1), min_size=length, max_size=length)
    blank = st.lists(st.booleans(), min_size=length, max_size=length)
    slots = torch.tensor([data.draw(index) for _ in range(ledger.batch)])
    padding = torch.tensor([data.draw(blank) for _ in range(ledger.batch)])
    taken = ledger.take(slots, padding)
    for row in range(ledger.batch):
        for place, (slot, gone) in enumerate(zip(slots[row].tolist(), padding[row].tolist(), strict=True)):
            assert taken.tokens[row, place] == (0 if gone else ledger.tokens[row, slot])
            assert taken.positions[row, place] == (0 if gone else ledger.positions[row, slot])
            assert taken.recomputed[row, place] == (not gone and ledger.recomputed[row, slot])
            assert taken.segments[row, place] == (PADDING if gone else ledger.segments[row, slot])
            expected = torch.zeros_like(ledger.live[:, row, :, slot]) if gone else ledger.live[:, row, :, slot]
            assert torch.equal(taken.live[:, row, :, place], expected)


@given(ledgers(), st.data())
def test_rows_are_those_asked_for(ledger: Ledger, data: st.DataObject):
    index = torch.tensor(data.draw(st.lists(st.integers(0, ledger.batch - 1), min_size=1, max_size=4)))
    chosen = ledger.rows(index)
    for place, row in enumerate(index.tolist()):
        for name in ("tokens", "positions", "segments", "recomputed"):
            assert torch.equal(getattr(chosen, name)[place], getattr(ledger, name)[row])
        assert torch.equal(chosen.live[:, place], ledger.live[:, row])


def renamed(ledger: Ledger, names: tuple[str, ...]) -> Ledger:
    return dataclasses.replace(ledger, names=names)


@given(
    seed=st.integers(0, 2**31),
    layers=st.tuples(st.sampled_from([1, 3]), st.sampled_from([1, 3])),
    heads=st.tuples(st.sampled_from([1, 2]), st.sampled_from([1, 2])),
    names=st.permutations(["T2", "answer", "system", "T3"]),
)
def test_appending_merges_names_and_widens_liveness(
    seed: int, layers: tuple[int, int], heads: tuple[int, int], names: list[str]
):
    first = random_ledger(seed, 2, 5, layers[0], heads[0], padded=True, some_masked=True)
    second = renamed(random_ledger(seed + 1, 2, 4, layers[1], heads[1], padded=True, some_masked=True), tuple(names))
    joined = first.append(second)

    def named(ledger: Ledger) -> list[list[str | None]]:
        return [[None if n == PADDING else ledger.names[n] for n in row] for row in ledger.segments.tolist()]

    assert named(joined) == [a + b for a, b in zip(named(first), named(second), strict=True)]
    assert len(set(joined.names)) == len(joined.names)
    assert joined.names[: len(NAMES)] == NAMES
    for layer in range(3):
        for head in range(2):
            for row in range(2):
                parts = [
                    part.live[layer % part.live.shape[0], row, head % part.live.shape[2]] for part in (first, second)
                ]
                live = joined.live[layer % joined.live.shape[0], row, head % joined.live.shape[2]]
                assert torch.equal(live, torch.cat(parts))
    assert torch.equal(joined.tokens, torch.cat([first.tokens, second.tokens], 1))
    assert torch.equal(joined.positions, torch.cat([first.positions, second.positions], 1))
    assert torch.equal(joined.recomputed, torch.cat([first.recomputed, second.recomputed], 1))


def test_appending_to_an_empty_ledger_changes_nothing_but_the_names():
    ledger = random_ledger(1, slots=6)
    none = torch.zeros(2, 0, dtype=torch.long)
    joined = ledger.take(none, none.bool()).append(ledger)
    assert_same_ledger(joined, ledger)
