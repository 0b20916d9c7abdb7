"""Two lanes over one set of weights: plain (fused attention, fast) and hooked (TransformerLens, every hook point).

Both lanes take explicit positions and, when the cache was edited, attention masks made from its ledger. The gate first
proves that the model respects them.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import cached_property

from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import DynamicCache

from kvprobe.cache.ledger import Ledger
from kvprobe.errors import UserError
from kvprobe.models.attending import Attend, Attending
from kvprobe.models.gate import (
    FIRST_REACH,
    FIRST_ROWS,
    prove_hooked,
    prove_plain,
    prove_queries,
    prove_reach,
    prove_rows,
)
from kvprobe.models.gate_attention import prove_attention
from kvprobe.models.lens import Hooked
from kvprobe.models.ports import Ports, ports_of
from kvprobe.models.routers import Routers, routers_of
from kvprobe.models.unproved import Lane, UnprovedLanes
from kvprobe.models.writing import prove_writing


class Lanes(UnprovedLanes):
    """A model that can be run plain or hooked, each lane proved before it is first used."""

    _proved: Hooked | None = None
    _slots, _positions, _hooked_slots, _rows = FIRST_REACH, FIRST_REACH, FIRST_REACH, FIRST_ROWS
    _queries: int = FIRST_REACH
    _masked_queries: int = FIRST_REACH

    def proved_as(self, others: "Lanes") -> "Lanes":
        """These lanes. They are of the same modules as others, with other weights, so that what the gate proved of the
        plain lane of those holds here too."""
        names = ("masks_by_head", "attention_proved", "_slots", "_positions", "_rows", "_queries", "_masked_queries")
        vars(self).update({name: vars(others)[name] for name in names if name in vars(others)})
        return self

    @property
    def hooked(self) -> Hooked:
        """The hooked lane, built and proved equal to the plain one when first needed.

        Raises:
            UserError: TransformerLens does not support the model, or computes something else.
        """
        hooked = super().hooked
        if self._proved is not hooked:
            by_head, self._proved = self.masks_by_head, hooked  # first, because the proof reads in this lane
            try:
                prove_hooked(self, by_head, self._hooked_slots)
            except BaseException:  # an interrupted proof is none
                self._proved = None
                raise
        return hooked

    @cached_property
    def masks_by_head(self) -> bool:
        """Whether masks may differ between KV heads, as the gate finds on a few tokens; see `kvprobe.models.gate`.

        Raises:
            UserError: kvprobe cannot read the model.
        """
        return prove_plain(self)

    def forward(
        self,
        ids: Int[Tensor, "batch queries"],
        ledger: Ledger,
        past: DynamicCache,
        lane: Lane = "plain",
        logits_to_keep: int | Int[Tensor, "kept"] = 0,
        hidden: Bool[Tensor, "batch queries slots"] | None = None,
    ) -> Float[Tensor, "batch kept_queries vocab"]:
        """One forward pass over the last `queries` slots of `ledger`; their keys and values are added to `past`.

        Args:
            logits_to_keep: number of last queries whose logits are computed (0 for all), or their indices.
            hidden: see `kvprobe.models.masks.masks_of`.

        Raises:
            UserError: a position that the model has no embedding for, or a model that did not pass the gate.
        """
        rows, queries = ids.shape
        masked = queries > self._masked_queries and (hidden is not None or not ledger.untouched)
        self.prove(ledger.slots, int(ledger.positions.max()) + 1, lane, queries, rows, masked)
        if not self.masks_by_head and ledger.live.shape[2] > 1:
            raise UserError(
                f"The heads of {type(self.plain).__name__} cannot be masked apart from one another, and in this cache "
                "they keep different slots; use a policy that keeps the same slots in all heads."
            )
        return self.unproved(ids, ledger, past, lane, logits_to_keep, hidden=hidden)

    @contextmanager
    def attention_replaced_by(self, attend: Attend) -> Generator[None]:
        """While this lasts, `attend` is the attention of every layer of the plain lane; it must apply masks itself.

        Raises:
            UserError: the model does not take its attention from transformers' registry.
        """

        def attention(inputs: Attending, usual: Callable[[], Tensor]) -> Tensor:
            return attend(inputs).transpose(1, 2).contiguous()

        self.prove()
        _ = self.attention_proved
        with self._attention(attention):
            yield

    @contextmanager
    def observing_attention(self, observe: Callable[[Attending], None]) -> Generator[None]:
        """While this lasts, `observe` is called with what each layer of the plain lane attends with. No number changes.

        Raises:
            UserError: the model does not take its attention from transformers' registry.
        """
        self.prove()
        _ = self.attention_proved
        with self.observing_attention_unproved(lambda inputs, _: observe(inputs)):
            yield

    def prove(
        self,
        slots: int = 0,
        positions: int = 0,
        lane: Lane = "plain",
        queries: int = 0,
        rows: int = 0,
        masked: bool = False,
    ) -> None:
        """Run the gate now, for so many slots, positions, tokens read at once (under masks or not) and rows.

        Raises:
            UserError: see `masks_by_head`; or the model does something else at this length.
        """
        by_head = self.masks_by_head
        # A window binds by position, however few slots there are.
        slots = max(slots, min(positions, 2 * max(self.geometry.edges, default=0)))
        if slots > self._slots or positions > self._positions:
            slots, positions = _at_least(slots, self._slots), _at_least(positions, self._positions)
            prove_reach(self, slots, positions)
            if "attention_proved" in vars(self):
                prove_attention(self, slots)
            self._slots, self._positions = slots, positions
        if queries > (self._masked_queries if masked else self._queries):
            queries = _at_least(queries, self._queries, 2)  # the proof reads as many
            prove_queries(self, queries, masked)
            self._queries, self._masked_queries = queries, queries if masked else self._masked_queries
        if rows > self._rows:
            rows = _at_least(rows, self._rows)
            prove_rows(self, rows, by_head)
            self._rows = rows
        if lane == "hooked" and slots > self._hooked_slots:
            _ = self.hooked
            prove_hooked(self, by_head, self._slots)
            self._hooked_slots = self._slots

    @cached_property
    def attention_proved(self) -> bool:
        """True once the gate has proved that attention is a softmax over scaled scores; see `kvprobe.models.gate`.

        Raises:
            UserError: attention is something else (scores have a bias, say), or cannot be replaced.
        """
        prove_attention(self, self._slots)
        return True

    @cached_property
    def shows_attention(self) -> bool:
        """Whether the plain lane's attention can be observed."""
        try:
            return self.attention_proved
        except UserError:
            return False

    def output_weights(self, layer: int) -> Float[Tensor, "heads d_value d_model"]:
        """The output projection W_O of each head of a layer, once the gate has proved that it reads what heads give.

        Raises:
            UserError: a gate or norm stands between, or the projection has no known name.
        """
        _ = self.writing_proved
        return super().output_weights(layer)

    @cached_property
    def writing_proved(self) -> bool:
        """True once the gate has proved that heads write their values times W_O; raises as `output_weights` does."""
        self.prove()
        _ = self.attention_proved
        prove_writing(self)
        return True

    @cached_property
    def own_ports(self) -> Ports | None:
        """Where the plain model computes its residual stream; None where TransformerLens has a map of it.

        Raises:
            UserError: as `ports_of`.
        """
        try:
            _ = self.hooked
        except UserError:
            return ports_of(self)
        return None

    @cached_property
    def routers(self) -> Routers:
        """The routers of a mixture of experts, once the gate has passed and they are proved; see `routers_of`.

        Raises:
            UserError: the model has no experts, or routers that kvprobe cannot follow.
        """
        self.prove()
        return routers_of(self)


def _at_least(length: int, proved: int, growth: int = 4) -> int:
    """The next length to prove, so that a text that grows is proved a few times only."""
    while proved < length:
        proved *= growth
    return proved
