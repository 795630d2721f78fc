"""The scheduler half with nothing around it, for tests that make its calls one by one.

`Rig` is a scheduler half of one full group (blocks of 8 tokens, engine blocks of 4) and two ranks
unless a test says otherwise; `warm` lets another engine store a prompt first.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import vllm_fakes as fakes
from kvtier.types import Kind, MoveResult
from kvtier.vllm.meta import JobReport, KvtierMetadata, WorkerReport
from kvtier.vllm.options import Options
from kvtier.vllm.scheduler import SchedulerSide
from vllm_daemon import Clock, FakeClient, FakeDaemon, FakeSession
from vllm_pool import Pool, geometry_of

FULL = (Kind.FULL, 0, 1, 4)
WINDOW = (Kind.SLIDING_WINDOW, 9, 1, 4)
STATE = (Kind.STATE, 0, 1, 8)


class Rig:
    def __init__(
        self,
        components: list[Any] | None = None,
        *,
        ranks: int = 2,
        daemon: FakeDaemon | None = None,
        lends_pool: bool = True,
        pool_blocks: int = 200,
        has_drafts: bool = False,
        **options: Any,
    ) -> None:
        self.geometry = geometry_of(8, components or [FULL], ranks, pool_blocks)
        self.geometry = replace(self.geometry, has_drafts=has_drafts)
        self.daemon = daemon or FakeDaemon()
        self.clock = Clock()
        self.client = FakeClient(self.daemon)
        self.side = SchedulerSide(
            Options(**options), self.geometry, b"e" * 16, lambda: self.client, clock=self.clock
        )
        self.pool = Pool(pool_blocks)
        if lends_pool:
            self.side.bind_gpu_block_pool(self.pool)
        self.tables: dict[str, list[list[int]]] = {}

    @property
    def session(self) -> FakeSession:
        return self.client.sessions[-1]

    def request(self, tokens: int | list[int] = 40, req_id: str = "r", **more: Any) -> Any:
        ids = list(range(tokens)) if isinstance(tokens, int) else tokens
        return fakes.Request(req_id, ids, **more)

    def ask(self, request: Any, computed: int = 0) -> tuple[int | None, bool]:
        return self.side.get_num_new_matched_tokens(request, computed)

    def table(self, request: Any, tokens: int | None = None, null: int = 0) -> list[list[int]]:
        """Engine blocks for a request; the first `null` of windows are null."""
        count = -(-(tokens or request.num_tokens) // 4)
        made = []
        for component in self.geometry.components:
            for _ in component.groups:
                blocks = self.pool.take(count)
                assert blocks is not None
                row = [block.block_id for block in blocks]
                made.append([0] * null + row[null:] if component.window_tokens else row)
        self.tables[request.request_id] = made
        return made

    def allocated(self, request: Any, external: int, null: int = 0) -> None:
        tables = self.tables.get(request.request_id) or self.table(request, null=null)
        self.side.update_state_after_alloc(
            request, SimpleNamespace(get_block_ids=lambda: tuple(tables)), external
        )

    def build(
        self,
        scheduled: dict[str, int] | None = None,
        preempted: set[str] | None = None,
        states: dict[str, Any] | None = None,
    ) -> KvtierMetadata:
        return self.side.build_connector_meta(
            SimpleNamespace(
                num_scheduled_tokens=scheduled or {},
                preempted_req_ids=preempted,
                kv_connector_block_state=SimpleNamespace(
                    get_block_ids=lambda req_id: tuple(self.tables[req_id]),
                    boundary_state_offloads=states or {},
                ),
            )
        )

    def offered(self, request: Any, computed: int = 0) -> int:
        """A question that is answered now."""
        tokens, _ = self.ask(request, computed)
        assert tokens is not None
        return tokens

    def compute(self, request: Any, count: int, **more: Any) -> KvtierMetadata:
        """A step that computes `count` tokens of the request."""
        if request.request_id not in self.tables:
            self.ask(request, request.num_computed_tokens)
            self.allocated(request, 0)
        meta = self.build({request.request_id: count}, **more)
        request.num_computed_tokens += count
        return meta

    def report(
        self,
        job_id: int,
        ok: bool = True,
        ranks: int | None = None,
        failed: set[str] | None = None,
        results: tuple[MoveResult, ...] = (),
    ) -> None:
        """The workers say how a job ended: all blocks alike unless the test says otherwise."""
        how = results or (MoveResult.DONE if ok else MoveResult.ABORTED,)
        report = JobReport(ranks or self.geometry.ranks, ok, 0, dict.fromkeys(map(int, how), 1))
        reports = WorkerReport({job_id: report})
        self.side.update_connector_output(
            SimpleNamespace(failed_recving=failed, kv_connector_worker_meta=reports)
        )

    def store(self, meta: KvtierMetadata) -> None:
        """Workers do the step's stores."""
        for job in meta.stores:
            for move in job.moves:
                for block in move.blocks:
                    assert self.daemon.demote(job.ticket, move.component, block, ())
            self.report(job.job_id)

    def warm(self, tokens: int = 40, **more: Any) -> None:
        other = Rig.__new__(Rig)
        other.__dict__.update(self.__dict__, tables={})
        request = self.request(tokens, "warm", **more)
        other.store(other.compute(request, tokens))
        self.side.request_finished(request)
        self.daemon.calls.clear()

    def refs(self, request: Any) -> set[int]:
        return {
            self.pool.blocks[b].ref_cnt for row in self.tables[request.request_id] for b in row if b
        }

    def check_idle(self) -> None:
        assert self.daemon.leases == {}
        assert self.daemon.tickets == {}
        assert not self.side.has_pending_push_work()
