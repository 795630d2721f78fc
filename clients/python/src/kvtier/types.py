"""Plain data that goes into and comes out of calls: the API of docs/api.md in Python's terms.

Units are in the names: tokens, blocks, bytes, seconds (`_s`), microseconds (`_us`). Blocks are
counted from the root of a prompt, engine blocks are the engine's own numbers. Everything here is
immutable; what holds only numbers, text and bytes can be pickled.
"""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, IntFlag

import numpy as np
import numpy.typing as npt

from kvtier._proto.kvtier_pb2 import StatsAnswer
from kvtier.errors import KvtierError

#: In `Moves.engine_blocks` of a promote: this engine block is not written.
NO_BLOCK = 2**64 - 1

#: Counters and gauges as the daemon gives them: message StatsAnswer of kvtier.proto.
Stats = StatsAnswer

API_VERSION = 1
HANDLE_BYTES = 24
ENGINE_ID_BYTES = 16


class Kind(IntEnum):
    """What a component holds of a block."""

    FULL = 1
    SLIDING_WINDOW = 2
    STATE = 3


class Role(IntEnum):
    """Who a session is: a worker moves bytes, a scheduler knows tokens."""

    WORKER = 0
    SCHEDULER = 1


class Tier(IntFlag):
    """Tiers as bits, for `lookup(tiers=...)`."""

    L1 = 1
    L2 = 2
    L3 = 4


class Policy(IntEnum):
    """What a promote waits for."""

    WAIT_COMPLETE = 0
    BEST_EFFORT = 1
    TIMEOUT = 2


class MoveResult(IntEnum):
    """What happened to one block; `Outcome.results` has one byte a block."""

    DONE = 0
    MISS = 1
    LATE = 2
    PRESENT = 3
    PENDING = 4
    NO_ROOM = 5
    CLIENT_GONE = 6
    ABORTED = 7


class ReserveState(IntEnum):
    """How a block stands; `Reservation.states` has one byte a block."""

    MISSING = 0
    PENDING = 1
    PRESENT = 2
    NO_ROOM = 3


class Why(IntEnum):
    """What kept a component from going on."""

    NONE = 0
    NEVER_STORED = 1
    EVICTED = 2
    OTHER_TIER = 3
    PENDING = 4
    CHECK_FAILED = 5
    INDEX_FULL = 6
    OTHER_EPOCH = 7


class QuantKind(IntEnum):
    """Codes of one byte that stand for elements of two."""

    FP8_E4M3 = 1
    INT8 = 2


class Element(IntEnum):
    """What an engine's elements are."""

    FP16 = 1
    BF16 = 2


class PlaneOrder(IntEnum):
    """Of a plane's elements: [token][head][dim] or [head][token][dim]."""

    TOKENS_FIRST = 1
    HEADS_FIRST = 2


@dataclass(frozen=True)
class Quantisation:
    """How the daemon stores a component in about half the bytes: docs/api.md, Quantisation.

    A plane is plane_tokens x heads x head_dim elements that lie contiguous in the engine's memory
    (K or V of one layer of one engine block); each head of it has one scale. heads are those of one
    rank. ValueError for numbers that the daemon would refuse.
    """

    kind: QuantKind
    element: Element
    order: PlaneOrder
    plane_tokens: int
    heads: int
    head_dim: int

    def __post_init__(self) -> None:
        for name, kind in (("kind", QuantKind), ("element", Element), ("order", PlaneOrder)):
            object.__setattr__(self, name, kind(getattr(self, name)))
        for name in ("plane_tokens", "heads", "head_dim"):
            if not 1 <= getattr(self, name) <= 65536:
                raise ValueError(f"quantisation: {name}={getattr(self, name)} is not in 1 .. 65536")
        if self.plane_bytes > 2**30:
            raise ValueError(f"quantisation: a plane of {self.plane_bytes} bytes is over 1 GiB")

    @property
    def plane_bytes(self) -> int:
        """Of a plane as the engine has it."""
        return self.plane_tokens * self.heads * self.head_dim * 2

    def stored_bytes(self, raw_bytes: int) -> int:
        """What the daemon stores of so many bytes of whole planes: codes, and float32 scales, each
        up to a multiple of 16. ValueError if they are not whole planes."""
        planes, rest = divmod(raw_bytes, self.plane_bytes)
        if rest or not planes:
            raise ValueError(
                f"quantisation: {raw_bytes} bytes are not whole planes of {self.plane_bytes}"
            )
        return -(-raw_bytes // 2 // 16) * 16 + -(-planes * self.heads * 4 // 16) * 16


@dataclass(frozen=True)
class Component:
    """One kind of per-block payload of a model.

    bytes_per_block is of one rank's shard as the engine has it, 1 .. 1 GiB. window_tokens is for
    SLIDING_WINDOW only: how many previous tokens the next token attends to. is_replicated: every
    rank holds the same bytes, one shard serves all. quantisation: how the daemon stores it; None:
    as it is. ValueError for one that the daemon would refuse.
    """

    kind: Kind
    bytes_per_block: int
    window_tokens: int = 0
    is_replicated: bool = False
    name: str = ""
    quantisation: Quantisation | None = None

    def __post_init__(self) -> None:
        if self.quantisation is None:
            return
        if self.kind is Kind.STATE:
            raise ValueError("quantisation: recurrent states are not quantised")
        if self.stored_bytes >= self.bytes_per_block:
            raise ValueError(
                f"quantisation: {self.bytes_per_block} bytes a block would become "
                f"{self.stored_bytes}: leave them as they are"
            )

    @property
    def stored_bytes(self) -> int:
        """What a tier of the daemon holds of bytes_per_block."""
        if self.quantisation is None:
            return self.bytes_per_block
        return self.quantisation.stored_bytes(self.bytes_per_block)


@dataclass(frozen=True)
class ModelSpec:
    """Everything that could change the bytes of a block: equal specs share a namespace.

    tags are "key=value" texts for what has no field of its own; they are sorted, and a duplicate
    is dropped, so their order does not matter.
    """

    block_tokens: int
    ranks: int
    components: tuple[Component, ...]
    model: str
    revision: str = ""
    dtype: str = ""
    layout: str = ""
    tags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "components", tuple(self.components))
        # The daemon wants them rising by bytes.
        tags = sorted({tag.encode() for tag in self.tags})
        object.__setattr__(self, "tags", tuple(tag.decode() for tag in tags))
        for component in self.components:
            quantisation = component.quantisation
            if quantisation is not None and self.block_tokens % quantisation.plane_tokens:
                raise ValueError(
                    f"quantisation: planes of {quantisation.plane_tokens} tokens do not divide "
                    f"blocks of {self.block_tokens}"
                )


@dataclass(frozen=True)
class Namespace:
    """What the daemon calls a model spec. The handle lives until the daemon ends; the fingerprint
    (32 bytes) is the same for ever."""

    handle: bytes
    fingerprint: bytes
    epoch: int
    was_known: bool


@dataclass(frozen=True)
class Piece:
    """A part of an engine block in a region: block b has `bytes` bytes at
    offset_bytes + b * stride_bytes of region number region_idx."""

    region_idx: int
    bytes: int
    offset_bytes: int
    stride_bytes: int


@dataclass(frozen=True)
class Layout:
    """How the blocks of a component lie in the regions: the payload of a block is piece 0 of each
    of its engine blocks in order, then piece 1 of each, and so on."""

    component: int
    engine_blocks_per_block: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class BlockRange:
    """Blocks [first, end) of a component, counted from the root."""

    component: int
    first: int
    end: int


@dataclass(frozen=True)
class Moves:
    """Blocks of one component and the engine blocks that hold them.

    blocks: strictly rising numbers counted from the root, or a range. engine_blocks: of each block
    its engine_blocks_per_block numbers in order, so len(blocks) * engine_blocks_per_block of them;
    none for sessions with an inline region.
    """

    component: int
    blocks: Sequence[int] | range
    engine_blocks: npt.NDArray[np.uint64] | Sequence[int] = ()


@dataclass(frozen=True)
class Cursor:
    """Where a prompt's tokens ended in the tree: with it, a call sends only those that follow.

    tokens: how many lie before it. generation: of the session that got it; a later one refuses it.
    """

    handle: bytes
    tokens: int
    generation: int


@dataclass(frozen=True)
class Lease:
    """The right to read what a lookup matched; the handle alone is enough for another process of
    the same engine. Ends after lifetime_s without use."""

    handle: bytes
    lifetime_s: float
    generation: int


@dataclass(frozen=True)
class Ticket:
    """The right to store what a reserve found missing; as a Lease otherwise."""

    handle: bytes
    lifetime_s: float
    generation: int


@dataclass(frozen=True)
class ComponentMatch:
    """How a component stands for a prompt.

    alone_tokens: how far it alone would go. needed_blocks: what the boundary needs of it, and in
    blocks_at / tokens_at where those are (L1, L2, L3). why and why_block_idx: what kept it from
    going on, if the lookup asked why.
    """

    alone_tokens: int
    needed_blocks: int
    blocks_at: tuple[int, int, int]
    tokens_at: tuple[int, int, int]
    why: Why
    why_block_idx: int


@dataclass(frozen=True)
class LookupResult:
    """The answer of a lookup.

    boundary_tokens: where the engine may resume, the greatest boundary that every component
    accepts; 0 is a miss. path_tokens: how far the tokens are known, resident or not.
    branch_tokens: how far the full component could go on. estimate_us: time of a promote of all.
    All count from the beginning of the prompt, with and without a cursor.

    is_lease_limited: more is there, but its lease would pass what the engine may lease beside what
    it leases now (`limits.leased_bytes_per_engine`); boundary_tokens is the greatest whose lease
    fits, 0 where none would if it leased nothing (else, if none fits now, the lookup raises
    ResourceExhausted). Never true of a lookup without a lease, or of a daemon that is older.
    """

    boundary_tokens: int
    path_tokens: int
    branch_tokens: int
    epoch: int
    components: tuple[ComponentMatch, ...]
    cursor: Cursor | None
    lease: Lease | None
    estimate_us: int
    is_lease_limited: bool = False


@dataclass(frozen=True)
class Reservation:
    """The answer of a reserve: one ReserveState byte a block for each range that was wanted, and a
    ticket when anything is missing."""

    ticket: Ticket | None
    states: tuple[bytes, ...]
    cursor: Cursor | None
    epoch: int


@dataclass(frozen=True)
class Arena:
    """L1 on one GPU, as a process of an engine imports it: docs/api.md, Reading L1 in place.

    zone: its number, of one daemon. handle: 64 bytes for cuIpcOpenMemHandle, of all of its `bytes`.
    device_uuid: 16 bytes. incarnation: another one means that the GPU was lost in between, and that
    earlier imports are of nothing any more.
    """

    zone: int
    handle: builtins.bytes
    device_uuid: builtins.bytes
    bytes: int
    incarnation: int


@dataclass(frozen=True)
class InPlace:
    """Where the blocks of one Moves lie: for each of its blocks, in order, the arena's zone and the
    offset of the first byte of the session's rank's shard. Both are 0 where the block's result is
    not DONE."""

    zones: tuple[int, ...]
    offsets_bytes: tuple[int, ...]


@dataclass(frozen=True)
class Outcome:
    """How a promote or demote ended.

    results: for each Moves one MoveResult byte a block, empty when the daemon gave no answer
    (then error says why). moved_blocks_from: blocks that a promote took from L1, L2, L3. in_place
    and arenas: of a promote with in_place, where each Moves lies, and the arenas, each once.
    """

    results: tuple[bytes, ...]
    moved_bytes: int
    moved_blocks_from: tuple[int, int, int]
    error: KvtierError | None
    seconds: float
    inline_data: bytes = b""
    is_durable: bool = False
    is_demote: bool = False
    in_place: tuple[InPlace, ...] = ()
    arenas: tuple[Arena, ...] = ()

    @property
    def all_done(self) -> bool:
        """Every block is where it was to go (for a demote: stored now, or before)."""
        good = {MoveResult.DONE, MoveResult.PRESENT} if self.is_demote else {MoveResult.DONE}
        return self.error is None and all(set(row) <= good for row in self.results)
