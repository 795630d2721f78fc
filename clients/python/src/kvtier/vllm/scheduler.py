"""The scheduler half of the connector: what to load, what to store, and what is still held.

vLLM calls this object in the thread that runs its scheduler, in this order for each step:

    get_num_new_matched_tokens   a waiting request: how much can be loaded?   Lookup, lease
    update_state_after_alloc     it has got blocks now                        LoadJob
    build_connector_meta         end of schedule(): this step's orders        Reserve, StoreJobs
    update_connector_output      after the workers: which jobs are over       gives back
    request_finished             at any time between

What is held, and what ends it, exactly once each:

    lease of a waiting request   nothing to load, too old, another daemon, finished, reset
    lease of a load              every rank reported the job
    ticket of a store            every rank reported the job
    engine blocks of a store     every rank reported the job

A store reads blocks beside later steps. They are kept from being reused by a reference in vLLM's
block pool, so preemption, a sliding window and the end of the request need no fence. The request
itself is never held back, and nothing of vLLM waits for the daemon.

Nothing here raises into vLLM: what goes wrong is logged and is a miss. A load that was promised and
turns out impossible is still a job, one that fails: vLLM waits for it and computes the request.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

from kvtier.types import Kind, LookupResult
from kvtier.vllm import _compat, plan
from kvtier.vllm.breaker import Breaker
from kvtier.vllm.geometry import Geometry
from kvtier.vllm.keys import LoraNames, RequestKeys, request_keys
from kvtier.vllm.link import Attacher, Grant, Link, Looked
from kvtier.vllm.meta import ComponentMoves, KvtierMetadata, LoadJob, WorkerReport
from kvtier.vllm.metrics import KvtierStats
from kvtier.vllm.options import Options
from kvtier.vllm.records import Held, Job, Jobs, Tracked, as_tokens
from kvtier.vllm.stores import Stores

logger = logging.getLogger(__name__)

MISS_LIVES_S = 0.5  # a waiting request whose answer was a miss is not asked for again before
LEASE_MARGIN = 0.5  # of a lease's lifetime: an older one is not promised on
TOKENS_MAX = 1 << 20  # of one lookup; what is beyond is computed
STEP_DEADLINES = 2.0  # of lookups: what they may cost a step; further ones are made in later steps


class SchedulerSide:
    """One engine's scheduler half. Everything belongs to the scheduler's thread."""

    def __init__(
        self,
        options: Options,
        geometry: Geometry,
        engine_id: bytes,
        client_factory: Callable[[], Attacher],
        stats: KvtierStats | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options = options
        self._geometry = geometry
        self._clock = clock
        self.stats = KvtierStats() if stats is None else stats
        self._link = Link(options, geometry.model_spec(), engine_id, client_factory(), clock)
        self._jobs = Jobs(geometry.ranks)
        self._stores = Stores(options, geometry, self._link, self._jobs, self.stats, clock)
        self._loads_breaker = Breaker()  # workers that cannot load: no use in promising
        self._loras = LoraNames()
        self._told: set[str] = set()  # why requests are not cached
        self._tracked: dict[str, Tracked] = {}
        self._meta = KvtierMetadata()
        self._lookups_s = 0.0  # spent in this step
        # How a load that failed can be told: as a request's id, or within the step and with one
        # cache group as engine block ids. With neither nothing may be promised, nor if the end of a
        # load is never told.
        has_one_group = geometry.group_count == 1
        self._is_sync = has_one_group and (options.load == "sync" or not _compat.HAS_FAILED_RECVING)
        self._can_load = _compat.HAS_WORKER_METADATA and (
            has_one_group or _compat.HAS_FAILED_RECVING
        )
        self._has_only_full = all(c.kind is Kind.FULL for c in geometry.components)

    def wait_attached(self, timeout_s: float) -> None:
        """At the engine's start; see link.wait_attached."""
        self._link.wait_attached(timeout_s)

    # ---- before a request is scheduled -----------------------------------------------------------

    def bind_gpu_block_pool(self, pool: Any) -> None:
        """vLLM lends its block pool, to hold the blocks that stores read."""
        self._jobs.pool = pool

    def get_num_new_matched_tokens(
        self, request: Any, num_computed: int
    ) -> tuple[int | None, bool]:
        """How many tokens after `num_computed` can be loaded, and whether the request has to wait
        for them outside of the batch. None: ask again in a later step, lookups have cost this one
        enough. May be called any number of times for a waiting request."""
        try:
            tokens = self._promise(request, num_computed)
        except Exception:
            logger.exception("kvtier: lookup for %s", request.request_id)
            tracked = self._tracked.get(request.request_id)
            if tracked is not None:
                tracked.drop_held()
            self.stats.observe_lookup(0.0, 0, 0, "error")
            return 0, False
        return tokens, bool(tokens) and not self._is_sync

    def _promise(self, request: Any, num_computed: int) -> int | None:
        tracked = self._track(request)
        tracked.is_stale = False
        size = self._geometry.block_tokens
        limit = min(request.num_tokens - 1, TOKENS_MAX)
        if (
            not self._can_load
            or tracked.keys is None
            or tracked.has_failed
            or tracked.load_job_id is not None
            or getattr(request, "skip_reading_prefix_cache", False)
            or limit // size * size <= num_computed
        ):
            tracked.drop_held()
            return 0
        held = self._fresh_answer(tracked, num_computed)
        if held is None:
            if self._lookups_s >= STEP_DEADLINES * self._options.lookup_timeout_s:
                return None
            held = self._ask(tracked, num_computed, limit)
        held.computed = num_computed
        if held.boundary <= num_computed:
            held.release()
            return 0
        return held.boundary - num_computed

    def _track(self, request: Any) -> Tracked:
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            try:
                keys = request_keys(request, self._geometry.block_tokens, self._loras)
            except OSError as error:
                if str(error) not in self._told:
                    self._told.add(str(error))
                    logger.warning("kvtier: %s is not cached: %s", request.request_id, error)
                keys = None
            tracked = Tracked(request, keys)
            self._tracked[request.request_id] = tracked
        return tracked

    def _fresh_answer(self, tracked: Tracked, num_computed: int) -> Held | None:
        """The answer that is held, if it still answers this question."""
        held = tracked.held
        if held is None:
            return None
        is_fresh = (
            held.era == self._link.era
            and held.num_tokens == tracked.request.num_tokens
            and self._clock() - held.asked_s < held.lives_s
            and (held.grant is not None or held.boundary <= num_computed)
        )
        return held if is_fresh else None

    def _ask(self, tracked: Tracked, num_computed: int, limit: int) -> Held:
        """A Lookup. Its answer is held, a miss too."""
        tracked.drop_held()
        now_s, era = self._clock(), self._link.era
        held = Held(era, now_s, MISS_LIVES_S, tracked.request.num_tokens, 0, None)
        tracked.held = held
        if not self._loads_breaker.allows(now_s):
            self.stats.observe_lookup(0.0, 0, limit - num_computed, "breaker_open")
            return held
        assert tracked.keys is not None
        tokens = as_tokens(tracked.request, 0, min(tracked.request.num_tokens, TOKENS_MAX))
        extra_keys = tracked.keys.extra(0, len(tokens) // self._geometry.block_tokens)
        looked = self._look_up(tracked.keys, tokens, extra_keys, limit)
        self._lookups_s += self._clock() - now_s
        if looked.result is not None:
            self._take_answer(tracked, held, looked.result, looked.grant, limit)
        found = max(0, held.boundary - num_computed)
        self.stats.observe_lookup(looked.seconds, found, limit - num_computed, looked.outcome)
        return held

    def _look_up(
        self, keys: RequestKeys, tokens: Any, extra_keys: Sequence[tuple[int, bytes]], limit: int
    ) -> Looked:
        looked = self._link.lookup(keys, tokens, extra_keys, limit)
        if not self._geometry.has_drafts or looked.result is None or looked.grant is None:
            return looked
        if looked.result.path_tokens > looked.result.boundary_tokens:
            return looked
        # The draft cache of the last token was computed from the token after it, which nobody has
        # compared. Go back to a boundary after which the tokens are known to be the same.
        looked.grant.release()
        return self._link.lookup(keys, tokens, extra_keys, looked.result.boundary_tokens - 1)

    def _take_answer(
        self, tracked: Tracked, held: Held, result: LookupResult, grant: Grant | None, limit: int
    ) -> None:
        size = self._geometry.block_tokens
        held.grant = grant
        if grant is not None:
            held.lives_s = LEASE_MARGIN * grant.lifetime_s
            if result.boundary_tokens % size or result.boundary_tokens > limit:
                held.release()
                raise ValueError(f"offered {result.boundary_tokens} of at most {limit} tokens")
            held.boundary = result.boundary_tokens
        # What the daemon has needs no Reserve, and the next one goes on where this answer ends.
        alone = [
            match.alone_tokens
            for match, component in zip(result.components, self._geometry.components, strict=True)
            if component.kind is Kind.FULL
        ]
        tracked.era = held.era
        tracked.starts = plan.Starts(full=min(alone, default=0) // size)
        tracked.cursor = result.cursor
        tracked.branch_tokens = result.branch_tokens

    # ---- a request has got its blocks ------------------------------------------------------------

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external: int) -> None:
        """The request has blocks now; `num_external` tokens after its own hit are to be loaded."""
        tracked = self._track(request)
        if num_external <= 0:
            tracked.drop_held()
            return
        tables = blocks.get_block_ids()
        computed = 0 if tracked.held is None else tracked.held.computed
        try:
            moves = self._load_moves(tracked.held, tables, num_external)
        except Exception:
            logger.exception("kvtier: load for %s", request.request_id)
            moves = None
        if moves is None or tracked.held is None:
            logger.warning("kvtier: the blocks of %s are not as promised", request.request_id)
            tracked.drop_held()
            moves = plan.given_up(self._geometry, tables, computed)
            self._add_load(tracked, None, moves)
            return
        grant, tracked.held = tracked.held.grant, None
        self._add_load(tracked, grant, moves)

    def _load_moves(
        self, held: Held | None, tables: plan.Tables, num_external: int
    ) -> list[ComponentMoves] | None:
        """None if it is not what was promised."""
        if held is None or held.grant is None:
            return None
        boundary = held.computed + num_external
        if boundary > held.boundary:
            return None
        if boundary < held.boundary and not self._has_only_full:
            return None  # windows and states are there for held.boundary alone
        return plan.load_moves(self._geometry, tables, held.computed, boundary)

    def _add_load(self, tracked: Tracked, grant: Grant | None, moves: list[ComponentMoves]) -> None:
        """grant None: the load is given up, and the workers report it as failed."""
        req_id = tracked.request.request_id
        tracked.load_job_id = self._jobs.add_load(req_id, grant, moves, self._is_sync)
        self._meta.loads.append(
            LoadJob(
                tracked.load_job_id,
                req_id,
                b"" if grant is None else grant.handle,
                moves,
                self._options.load_timeout_s,
                self._is_sync,
            )
        )

    # ---- the step's orders, and what came of them ------------------------------------------------

    def build_connector_meta(self, scheduler_output: Any) -> KvtierMetadata:
        """The orders of this step, once for each."""
        for req_id in _compat.preempted_req_ids(scheduler_output):
            tracked = self._tracked.get(req_id)
            # With an answer or a load it was asked for anew since, and its record is of now.
            if tracked is not None and tracked.held is None and tracked.load_job_id is None:
                tracked.starts = plan.Starts()
        self._meta.stores.extend(self._stores.begin(scheduler_output, self._tracked))
        self._lookups_s = 0.0
        self.stats.set_inflight(self._jobs.loads, len(self._jobs) - self._jobs.loads)
        self.stats.set_attached("scheduler", self._link.is_attached)
        self.stats.set_breaker_open(self._link.breaker.is_open)
        meta, self._meta = self._meta, KvtierMetadata()
        return meta

    def update_connector_output(self, connector_output: Any) -> None:
        """What the workers say of earlier orders."""
        for req_id in getattr(connector_output, "failed_recving", None) or ():
            tracked = self._tracked.get(req_id)
            if tracked is not None:
                tracked.has_failed = True
        report = getattr(connector_output, "kv_connector_worker_meta", None)
        if isinstance(report, WorkerReport):
            for job in self._jobs.report(report):
                self._ended(job)

    def _ended(self, job: Job) -> None:
        tracked = self._tracked.get(job.req_id)
        if not job.is_load:
            if tracked is not None:
                self._stores.ended(job, tracked)
            return
        if tracked is not None and tracked.load_job_id == job.job_id:
            tracked.load_job_id = None
            if not job.is_ok:
                tracked.has_failed = True
                tracked.starts = plan.Starts()
        if job.grant is None or tracked is None:
            return  # given up, or cancelled: that says nothing of the workers
        if job.is_answered:  # a block that was evicted or failed its check is an answer, too
            self._loads_breaker.succeeded()
        else:
            self._loads_breaker.failed(self._clock())

    # ---- ends ------------------------------------------------------------------------------------

    def request_finished(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        """The request is over, however. Its blocks may go at once: those that a store reads have
        references of their own, and those of a load vLLM keeps until the load is reported."""
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is not None:
            tracked.drop_held()
            if tracked.load_job_id is not None:
                self._meta.cancels.append(tracked.load_job_id)
        return False, None

    def has_pending_push_work(self) -> bool:
        """The engine must go on with its steps, if empty ones, to hear of jobs that end."""
        return len(self._jobs) > 0

    def reset_cache(self) -> bool:
        """Nothing stored before is used by this engine any more: it is called when weights change.

        The engine goes on under roots with a random tag, alone under them: no other engine is known
        to have the same weights now. A restarted engine has its weights from the files again and
        is back under the old ones. Not a namespace for each reset: the daemon has few of them, and
        those of before would not make way as long as anything is stored in them. Needs no answer of
        the daemon. Requests that are being computed have cache of before; nothing of theirs is
        stored until they begin anew.
        """
        for tracked in self._tracked.values():
            tracked.drop_held()
            tracked.cursor, tracked.is_stale, tracked.branch_tokens = None, True, 0
        self._link.reset(secrets.token_hex(8).encode())
        return True

    def shutdown(self) -> None:
        """The engine ends: everything is given back."""
        for tracked in self._tracked.values():
            tracked.drop_held()
        self._jobs.release_grants()
        self._link.close()
