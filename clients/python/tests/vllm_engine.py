"""An engine around the scheduler half, for tests: vLLM's order of calls, its blocks, its workers.

Content is symbolic. An engine block holds a tag that says which tokens of which group it was
computed from, so a wrong byte anywhere shows as a wrong tag: before a request is computed on, every
block that its next token would read is compared with what it must hold; what a store reads is
compared with the tokens that the daemon was told. A block that a load or store of any rank uses is
`busy`, and giving it to somebody else fails the test.

What is like vLLM 0.32: one pool of blocks for all groups with reference counts and a null block;
waiting requests asked for every step until they have blocks; async loads outside of the batch;
preemption of the last running request; chunked prefill; out-of-window blocks given back; recurrent
states in "align" mode (a chunk ends at a block's end, the state there is offered for storing); a
prefix cache of its own. Workers report at different times.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import Any

import vllm_fakes as fakes
from kvtier.types import Kind
from kvtier.vllm.geometry import Geometry, GroupComponent
from kvtier.vllm.keys import salt_since
from kvtier.vllm.meta import KvtierMetadata, WorkerReport
from kvtier.vllm.scheduler import SchedulerSide
from vllm_daemon import FakeDaemon
from vllm_pool import Block, Pool, Tag
from vllm_workers import Workers


@dataclass(eq=False)
class Req:
    request: fakes.Request
    max_tokens: int
    tables: list[list[int]] = field(default_factory=list)
    is_remote: bool = False  # waits for an async load
    is_sync_loading: bool = False
    local: int = 0
    preempted: bool = False

    @property
    def id(self) -> str:
        return self.request.request_id


class FakeEngine:
    """Drive it with add(), abort(), step()."""

    def __init__(
        self,
        geometry: Geometry,
        side: SchedulerSide,
        daemon: FakeDaemon,
        rng: Random,
        *,
        chunk: int = 32,
        running_max: int = 4,
        has_own_cache: bool = True,
        lends_pool: bool = True,
    ) -> None:
        self.geometry, self.side, self.daemon, self.rng = geometry, side, daemon, rng
        self.pool = Pool(geometry.pool_blocks)
        self.workers = Workers(geometry, daemon, self.pool, rng)
        self.chunk, self.running_max, self.has_own_cache = chunk, running_max, has_own_cache
        self.waiting: deque[Req] = deque()
        self.running: list[Req] = []
        self.gone: dict[str, Req] = {}  # finished, their blocks kept for an async load
        self.recv_left: Counter[str] = Counter()
        self.recv_failed: set[str] = set()
        self.preempted: set[str] = set()
        self.seen: list[KvtierMetadata] = []
        self.loaded_tokens = 0
        self.computed_tokens = 0
        self.weights = 0  # changes with a reset; part of every tag
        if lends_pool:
            side.bind_gpu_block_pool(self.pool)

    # ---- tags ----------------------------------------------------------------------------------

    def tag(self, req: Req, group: int, end: int) -> Tag:
        request = req.request
        return (self.weights, group, request.cache_salt, tuple(request.all_token_ids[:end]))

    def component_of(self, group: int) -> GroupComponent:
        return next(c for c in self.geometry.components if group in c.groups)

    def groups(self) -> Iterable[tuple[int, GroupComponent]]:
        for group in range(self.geometry.group_count):
            yield group, self.component_of(group)

    def needed(self, component: GroupComponent, computed: int) -> list[tuple[int, int]]:
        """(block number, end of tokens) that a request with so many tokens must hold, whole
        blocks only."""
        size = component.group_block_tokens
        if computed == 0:
            return []
        if component.kind is Kind.STATE:
            return [(computed // size - 1, computed)] if computed % size == 0 else []
        low = computed - component.window_tokens if component.window_tokens else 0
        return [(i, (i + 1) * size) for i in range(computed // size) if (i + 1) * size > low]

    # ---- requests ------------------------------------------------------------------------------

    def add(self, req_id: str, tokens: list[int], max_tokens: int = 1, **more: Any) -> Req:
        req = Req(fakes.Request(req_id, list(tokens), **more), max_tokens)
        self.waiting.append(req)
        return req

    def abort(self, req_id: str) -> None:
        for req in [*self.waiting, *self.running]:
            if req.id == req_id:
                self.finish(req)
                return

    def finish(self, req: Req) -> None:
        if req in self.running:
            self.running.remove(req)
        else:
            self.waiting.remove(req)
        delayed, params = self.side.request_finished(req.request)
        assert (delayed, params) == (False, None)
        if req.is_remote:
            self.gone[req.id] = req
        else:
            self.free(req)

    def free(self, req: Req) -> None:
        for table in req.tables:
            self.pool.free_blocks(self.pool.blocks[b] for b in reversed(table))
        req.tables = []

    def preempt(self, req: Req) -> None:
        self.running.remove(req)
        self.free(req)
        req.request.num_computed_tokens = 0
        req.preempted = True
        self.waiting.appendleft(req)
        self.preempted.add(req.id)

    def new_weights(self) -> None:
        """What vLLM does for them: everything begins anew, and all caches are reset. It refuses
        while loads are under way."""
        if any(req.is_remote for req in self.waiting) or self.gone:
            return
        for req in reversed(list(self.running)):
            self.preempt(req)
        for req in self.waiting:
            self.free(req)  # had been loaded
            req.request.num_computed_tokens = 0
        for tag, block_id in self.pool.cached.items():
            assert self.pool.blocks[block_id].tag == tag
            self.pool.blocks[block_id].tag = None
        self.pool.cached.clear()
        self.weights += 1
        assert self.side.reset_cache() is True

    # ---- blocks --------------------------------------------------------------------------------

    def local_hit(self, req: Req) -> int:
        if not self.has_own_cache:
            return 0
        step = max(c.group_block_tokens for c in self.geometry.components)
        most = (req.request.num_tokens - 1) // step * step
        for end in range(most, 0, -step):
            if all(
                self.tag(req, g, e) in self.pool.cached
                for g, c in self.groups()
                for _, e in self.needed(c, end)
            ):
                return end
        return 0

    def allocate(self, req: Req, local: int, computed: int, end: int) -> bool:
        """Tables for tokens [0, end); [0, local) from the own cache if the request has none yet."""
        fresh = not req.tables
        tables = [list(table) for table in req.tables] or [
            [] for _ in range(self.geometry.group_count)
        ]
        hits: list[Block] = []
        missing: list[tuple[int, int]] = []
        for group, component in self.groups():
            size, table = component.group_block_tokens, tables[group]
            count = -(-end // size)
            table.extend([0] * (count - len(table)))
            keep = {i for i, _ in self.needed(component, local)} if fresh else set()
            for i in keep:
                block_id = self.pool.cached[self.tag(req, group, (i + 1) * size)]
                hits.append(self.pool.blocks[block_id])
                table[i] = block_id
            missing += [(group, i) for i in self._new_blocks(component, table, computed, end)]
        self.pool.touch(hits)
        new = self.pool.take(len(missing))
        if new is None:
            self.pool.free_blocks(hits)
            return False
        for (group, i), block in zip(missing, new, strict=True):
            tables[group][i] = block.block_id
        req.tables = tables
        return True

    def _new_blocks(
        self, component: GroupComponent, table: list[int], computed: int, end: int
    ) -> list[int]:
        size = component.group_block_tokens
        if component.kind is Kind.STATE:
            wanted = {computed // size - 1} if computed and computed % size == 0 else set()
            if end > computed:
                wanted.add((end - 1) // size)
            return [i for i in sorted(wanted) if table[i] == 0]
        low = computed - component.window_tokens if component.window_tokens else 0
        return [i for i in range(len(table)) if table[i] == 0 and (i + 1) * size > low]

    def slide(self, req: Req) -> None:
        """Give back what the next token does not read."""
        computed = req.request.num_computed_tokens
        for group, component in self.groups():
            size, table = component.group_block_tokens, req.tables[group]
            low = 0
            if component.kind is Kind.STATE:
                low = (computed - 1) // size
            elif component.window_tokens:
                low = max(0, computed - component.window_tokens) // size
            for i in range(min(low, len(table))):
                if table[i]:
                    self.pool.free_blocks([self.pool.blocks[table[i]]])
                    table[i] = 0

    def check_readable(self, req: Req) -> None:
        """What the next token reads is what it must be."""
        computed = req.request.num_computed_tokens
        for group, component in self.groups():
            for i, end in self.needed(component, computed):
                found = self.pool.memory[req.tables[group][i]]
                assert found == self.tag(req, group, end), (req.id, group, i, computed)

    # ---- a step --------------------------------------------------------------------------------

    def next_tokens(self, req: Req, computed: int) -> int:
        count = min(self.chunk, req.request.num_tokens - computed)
        for component in self.geometry.components:
            size = component.group_block_tokens
            if component.kind is Kind.STATE and (computed + count) % size:
                aligned = (computed + count) // size * size
                if aligned > computed:
                    count = aligned - computed
        return count

    def schedule_running(self, scheduled: dict[str, int]) -> None:
        for req in list(self.running):
            if req not in self.running:
                continue
            computed = req.request.num_computed_tokens
            count = self.next_tokens(req, computed)
            self.slide(req)
            while not self.allocate(req, 0, computed, computed + count):
                victim = self.running[-1]
                scheduled.pop(victim.id, None)
                self.preempt(victim)
                if victim is req:
                    break
            else:
                scheduled[req.id] = count

    def fits(self, req: Req) -> bool:
        """vLLM admits a load, which cannot be preempted, only if it and those before it can be
        computed to their end."""
        holding = [r for r in self.waiting if r.tables and r is not req]
        held = sum(bool(b) for r in holding for table in r.tables for b in table)
        left = sum(map(self.blocks_at_end, holding)) - held
        return self.blocks_at_end(req) + left <= len(self.pool.free)

    def blocks_at_end(self, req: Req) -> int:
        tokens = req.request.num_prompt_tokens + req.max_tokens
        return sum(-(-tokens // c.group_block_tokens) for _, c in self.groups())

    def schedule_waiting(self, scheduled: dict[str, int]) -> None:
        # Those that hold blocks come first: nobody waits for them in vain.
        for req in sorted(self.waiting, key=lambda r: not r.tables):
            if req.is_remote or len(self.running) >= self.running_max:
                continue
            request = req.request
            if request.num_computed_tokens == 0:
                local = self.local_hit(req)
                offered, is_async = self.side.get_num_new_matched_tokens(request, local)
                if offered is None:
                    assert not is_async
                    continue
                external = offered
                self.check_offer(req, local, external, is_async)
            else:
                local, external, is_async = 0, 0, False
            computed = max(local + external, request.num_computed_tokens)
            count = 0 if is_async else self.next_tokens(req, computed)
            if is_async and not self.fits(req):
                break
            if not self.allocate(req, local, computed, computed + count):
                break
            req.local = local
            self.side.update_state_after_alloc(
                request, SimpleNamespace(get_block_ids=lambda req=req: tuple(req.tables)), external
            )
            request.num_computed_tokens = computed
            if is_async:
                req.is_remote = True
                self.recv_left[req.id] = self.geometry.ranks
                continue
            req.is_sync_loading = external > 0
            self.waiting.remove(req)
            self.running.append(req)
            scheduled[req.id] = count

    def check_offer(self, req: Req, local: int, external: int, is_async: bool) -> None:
        """Nothing is offered that the daemon does not have."""
        assert external >= 0
        assert local + external < req.request.num_tokens
        assert not (external == 0 and is_async)
        if external:
            session = self.daemon.sessions[-1]
            salt = str(req.request.cache_salt or "").encode()
            root = repr((salt_since(self.side._link._reset_tag, salt), b"")).encode()
            path = self.daemon.path_of(session.spec, root, req.request.all_token_ids, {})
            blocks, rest = divmod(local + external, self.geometry.block_tokens)
            assert rest == 0
            assert self.daemon.accepts(session.spec, path, blocks)

    def step(self) -> KvtierMetadata:
        scheduled: dict[str, int] = {}
        self.schedule_running(scheduled)
        if not self.preempted:
            self.schedule_waiting(scheduled)
        by_id = {req.id: req for req in self.running}
        state = SimpleNamespace(
            get_block_ids=lambda req_id: tuple(by_id[req_id].tables),
            boundary_state_offloads={
                req_id: offers
                for req_id, count in scheduled.items()
                if (offers := self.states_after(by_id[req_id], count))
            },
        )
        meta = self.side.build_connector_meta(
            SimpleNamespace(
                num_scheduled_tokens=scheduled,
                preempted_req_ids=self.preempted,
                kv_connector_block_state=state,
            )
        )
        self.preempted = set()
        self.seen.append(meta)
        self.workers.begin_loads(meta)
        bad = self.poll(sync_only=True)
        self.compute(by_id, scheduled, bad)
        self.workers.begin_stores(meta)
        self.poll(sync_only=False)
        return meta

    def states_after(self, req: Req, count: int) -> list[tuple[int, int, int]]:
        end = req.request.num_computed_tokens + count
        return [
            (group, req.tables[group][end // c.group_block_tokens - 1], end)
            for group, c in self.groups()
            if c.kind is Kind.STATE and end % c.group_block_tokens == 0
        ]

    def compute(self, by_id: dict[str, Req], scheduled: dict[str, int], bad: set[str]) -> None:
        for req_id, count in scheduled.items():
            req = by_id[req_id]
            request = req.request
            if req_id in bad:  # vLLM goes back to what it had itself
                request.num_computed_tokens = req.local
                continue
            self.check_readable(req)
            start, end = request.num_computed_tokens, request.num_computed_tokens + count
            for group, component in self.groups():
                self.write(req, group, component, start, end)
            request.num_computed_tokens = end
            self.computed_tokens += count
            if end == request.num_tokens:
                if end - request.num_prompt_tokens + 1 >= req.max_tokens:
                    self.finish(req)
                else:
                    request.all_token_ids.append(self.rng.randrange(3))

    def write(self, req: Req, group: int, component: GroupComponent, start: int, end: int) -> None:
        size, table = component.group_block_tokens, req.tables[group]
        first = (end - 1) // size if component.kind is Kind.STATE else start // size
        for i in range(first, -(-end // size)):
            block_id = table[i]
            assert block_id != 0
            assert self.pool.busy[block_id] == 0, "written while a job uses it"
            assert self.pool.blocks[block_id].tag is None, "written while others share it"
            until = min(end, (i + 1) * size)
            self.pool.memory[block_id] = self.tag(req, group, until)
            if until == (i + 1) * size and self.has_own_cache:
                self.pool.remember(block_id, self.tag(req, group, until))

    # ---- workers -------------------------------------------------------------------------------

    def poll(self, sync_only: bool) -> set[str]:
        """End what is due, and tell the scheduler half. Returns requests whose load within the
        step failed."""
        ended = self.workers.end_due(sync_only)
        self.receive(ended.received, ended.reports)
        return ended.failed_in_step

    def receive(self, received: list[tuple[str, bool]], reports: WorkerReport) -> None:
        over = []
        for req_id, is_ok in received:
            self.recv_left[req_id] -= 1
            if not is_ok:
                self.recv_failed.add(req_id)
            if self.recv_left[req_id] == 0:
                over.append(req_id)
        failed = self.recv_failed & set(over)
        self.recv_failed -= failed
        self.side.update_connector_output(
            SimpleNamespace(
                failed_recving=failed,
                kv_connector_worker_meta=reports if reports.finished else None,
            )
        )
        for req_id in over:
            self.end_remote(req_id, req_id in failed)

    def end_remote(self, req_id: str, has_failed: bool) -> None:
        if req_id in self.gone:
            self.free(self.gone.pop(req_id))
            return
        req = next(r for r in self.waiting if r.id == req_id)
        req.is_remote = False
        if has_failed:
            self.free(req)
            req.request.num_computed_tokens = 0
            return
        self.check_readable(req)
        self.loaded_tokens += req.request.num_computed_tokens - req.local

    # ---- the end -------------------------------------------------------------------------------

    def drain(self, steps_max: int = 2000) -> None:
        """Until nothing is left to do; then nothing must be held."""
        for _ in range(steps_max):
            if not (self.waiting or self.running or self.gone or self.side.has_pending_push_work()):
                break
            self.step()
        assert not self.waiting
        assert not self.running
        assert not self.gone
        assert not self.side.has_pending_push_work()
        assert self.daemon.leases == {}
        assert self.daemon.tickets == {}
        assert len(self.pool.free) == len(self.pool.blocks) - 1
        assert not +self.pool.busy
