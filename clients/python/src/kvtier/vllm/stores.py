"""Which of a step's blocks are stored: policy, room, and one Reserve a request.

After a step a request has new full blocks. They are offered to the daemon in one Reserve (a cursor
and only the new tokens), which says what it lacks; that alone travels, as one StoreJob.

What is not offered: tokens whose cache is not certain (drafts, placeholders, whatever a load of the
same step brings), sliding windows far from where another request may go on, recurrent states other
than those that vLLM offers, and what would keep more of the engine's block pool from being reused
than `store_blocks_max` allows. The last is offered again in later steps, as long as the request
lives; so is what the daemon could not be asked for, a second later, and what would have cost this
step more than one deadline of a Reserve and is offered in the next one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from kvtier.types import ReserveState
from kvtier.vllm import _compat, plan
from kvtier.vllm.geometry import Geometry
from kvtier.vllm.link import Link
from kvtier.vllm.meta import ComponentMoves, StoreJob
from kvtier.vllm.metrics import KvtierStats
from kvtier.vllm.options import Options
from kvtier.vllm.records import Job, Jobs, Tracked, as_tokens

logger = logging.getLogger(__name__)

RETRY_S = 1.0
FAILURES_MAX = 3  # of one request: then the rest of it is not stored again

States = Sequence[tuple[int, int, int]]


class Stores:
    """Belongs to the scheduler's thread."""

    def __init__(
        self,
        options: Options,
        geometry: Geometry,
        link: Link,
        jobs: Jobs,
        stats: KvtierStats,
        clock: Callable[[], float],
    ) -> None:
        self._options = options
        self._geometry = geometry
        self._link = link
        self._jobs = jobs
        self._stats = stats
        self._clock = clock

    def begin(self, scheduler_output: Any, tracked_by_id: dict[str, Tracked]) -> list[StoreJob]:
        """The stores of a step. What cannot be stored is counted, and no error."""
        tables = _compat.block_tables(scheduler_output)
        if self._options.store == "off" or tables is None:
            return []
        states, loading = tables.states(), self._jobs.loading()
        begun, until_s = [], self._clock() + self._options.lookup_timeout_s
        for req_id, scheduled in scheduler_output.num_scheduled_tokens.items():
            tracked = tracked_by_id.get(req_id)
            if tracked is None or tracked.keys is None or tracked.is_stale:
                continue
            end_block = self._complete_blocks(tracked.request, scheduled)
            offered = states.get(req_id, ())
            if end_block <= tracked.starts.least and not offered:
                continue
            if self._clock() >= until_s and not offered:  # states are offered once only
                continue
            try:
                job = self._begin(tracked, end_block, tables, offered, loading)
            except Exception:
                logger.exception("kvtier: store for %s", req_id)
                self._put_off(tracked, "error")
                continue
            if job is not None:
                begun.append(job)
        return begun

    def ended(self, job: Job, tracked: Tracked) -> None:
        """A store is over. What failed is offered again, a few times."""
        if job.is_ok:
            return
        tracked.store_failures += 1
        if tracked.store_failures <= FAILURES_MAX:
            tracked.starts.back_to(job.first_block)
            tracked.retry_at_s = self._clock() + RETRY_S

    def _complete_blocks(self, request: Any, scheduled: int) -> int:
        """Blocks whose tokens all have their cache after this step. Drafts of speculative decoding
        and placeholders of asynchronous scheduling are scheduled, but are no tokens yet."""
        tokens = min(request.num_computed_tokens + scheduled, request.num_tokens)
        if self._options.store == "prompt":
            tokens = min(tokens, request.num_prompt_tokens)
        return int(tokens) // self._geometry.block_tokens

    def _put_off(self, tracked: Tracked, reason: str) -> None:
        tracked.retry_at_s = self._clock() + RETRY_S
        self._stats.count_skipped(reason)

    def _begin(
        self,
        tracked: Tracked,
        end_block: int,
        tables: _compat.BlockTables,
        states: States,
        loading: frozenset[int],
    ) -> StoreJob | None:
        if self._clock() < tracked.retry_at_s:
            return None
        table = tables.of(tracked.request.request_id)
        if table is None or any(not loading.isdisjoint(ids) for ids in table):
            return None  # a load of this step may yet fail to bring what they were computed from
        if tracked.era != self._link.era:
            tracked.era, tracked.cursor, tracked.starts = self._link.era, None, plan.Starts()
        candidates = plan.store_candidates(
            self._geometry,
            table,
            tracked.starts,
            end_block,
            self._boundaries(tracked, end_block),
            states,
        )
        candidates, left_out = plan.trim(self._geometry, candidates, self._room())
        next_block = end_block if left_out is None else left_out
        if candidates:
            return self._reserve(tracked, candidates, next_block)
        if left_out is None:
            tracked.starts.advance(end_block)
        else:
            self._put_off(tracked, "blocks_limit")
        return None

    def _room(self) -> int:
        """How many engine blocks a store may hold now."""
        if self._jobs.pool is None:
            return plan.BLOCKS_MAX  # fenced: nothing is held beyond the step
        share = int(self._options.store_blocks_max * self._geometry.pool_blocks)
        return share - self._jobs.pinned_blocks

    def _boundaries(self, tracked: Tracked, end_block: int) -> set[int] | None:
        """Where windows are stored; None for everywhere. Where generated text will end is not known
        beforehand, and it comes slowly: there it is after each block."""
        if self._options.window_store == "all":
            return None
        size = self._geometry.block_tokens
        prompt = tracked.request.num_prompt_tokens
        wanted = plan.boundaries_of(self._geometry, prompt, tracked.branch_tokens)
        return wanted | set(range((prompt // size + 1) * size, end_block * size + 1, size))

    def _reserve(
        self, tracked: Tracked, candidates: list[ComponentMoves], next_block: int
    ) -> StoreJob | None:
        assert tracked.keys is not None
        request, size = tracked.request, self._geometry.block_tokens
        end = max(next_block, *(moves.blocks[-1] + 1 for moves in candidates)) * size
        cursor = tracked.cursor
        if cursor is not None and cursor.tokens > end:
            cursor = None
        reserved = self._link.reserve(
            tracked.keys,
            lambda start: as_tokens(request, start, end),
            plan.wants(candidates),
            cursor,
        )
        if reserved.reservation is None:
            self._put_off(tracked, reserved.reason)
            return None
        tracked.cursor = reserved.reservation.cursor
        tracked.starts.advance(next_block)
        states = reserved.reservation.states
        if any(ReserveState.NO_ROOM in answer for answer in states):
            self._stats.count_skipped("no_ticket")
        if reserved.grant is None:
            return None
        job_id = None
        try:
            missing = plan.missing(self._geometry, candidates, states)
            if missing:
                job_id = self._jobs.add_store(request.request_id, reserved.grant, missing)
        finally:
            if job_id is None:  # nobody would ever give the ticket back
                reserved.grant.release()
        if job_id is None:
            return None
        return StoreJob(
            job_id,
            request.request_id,
            reserved.grant.handle,
            missing,
            self._options.load_timeout_s,
            is_fenced=self._jobs.pool is None,
        )
