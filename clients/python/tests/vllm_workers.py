"""The workers of an engine, for tests: they move symbolic content and report at different times.

Rank 0 moves for all; the others only take their time. What a load writes and a store reads is
checked here: no block that others share is written, and what is stored is as long as it should be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from random import Random

from kvtier.types import NO_BLOCK, Kind, MoveResult
from kvtier.vllm.geometry import Geometry
from kvtier.vllm.meta import JobReport, KvtierMetadata, LoadJob, StoreJob, WorkerReport
from vllm_daemon import FakeDaemon
from vllm_pool import Pool, Tag


@dataclass(eq=False)
class Job:
    """One rank's part of a job."""

    job: LoadJob | StoreJob
    ends_in: int
    blocks: list[int]
    is_cancelled: bool = False


@dataclass
class Ended:
    """What ended by now: reports for the scheduler half, loads within the step that failed, and
    (request, whether it went well) of loads between steps, once a rank."""

    reports: WorkerReport = field(default_factory=WorkerReport)
    failed_in_step: set[str] = field(default_factory=set)
    received: list[tuple[str, bool]] = field(default_factory=list)


class Workers:
    """All ranks of one engine."""

    def __init__(self, geometry: Geometry, daemon: FakeDaemon, pool: Pool, rng: Random) -> None:
        self.geometry, self.daemon, self.pool, self.rng = geometry, daemon, pool, rng
        self.ranks: list[dict[int, Job]] = [{} for _ in range(geometry.ranks)]
        self.failure_rate = 0.0
        self.job_steps: Callable[[], int] = lambda: self.rng.randrange(4)

    def begin_loads(self, meta: KvtierMetadata) -> None:
        for load in meta.loads:
            self._begin(load, load.is_sync or not load.lease)
        for job_id in meta.cancels:
            for rank in self.ranks:
                if job_id in rank:
                    rank[job_id].is_cancelled = True

    def begin_stores(self, meta: KvtierMetadata) -> None:
        for store in meta.stores:
            self._begin(store, store.is_fenced)

    def _begin(self, job: LoadJob | StoreJob, is_now: bool) -> None:
        blocks = [b for move in job.moves for b in move.engine_blocks if b != NO_BLOCK]
        if isinstance(job, LoadJob) and not job.lease:
            blocks = []
        for move in job.moves:
            per_block = self.geometry.components[move.component].engine_blocks_per_block
            assert (isinstance(job, LoadJob) and not job.lease) or (
                len(move.engine_blocks) == len(move.blocks) * per_block
            )
            assert 0 not in move.engine_blocks
        for rank in self.ranks:
            rank[job.job_id] = Job(job, 0 if is_now else self.job_steps(), blocks)
            self.pool.busy.update(blocks)

    def end_due(self, sync_only: bool) -> Ended:
        """End what is due."""
        ended = Ended()
        for number, rank in enumerate(self.ranks):
            for running in list(rank.values()):
                job = running.job
                is_sync = isinstance(job, LoadJob) and job.is_sync
                if sync_only and not is_sync:
                    continue
                if running.ends_in > 0:
                    running.ends_in -= 1
                    continue
                del rank[job.job_id]
                self.pool.busy.subtract(running.blocks)
                self.end(ended, job, self.move(running) if number == 0 else not self.fails())
        return ended

    def fails(self) -> bool:
        return self.rng.random() < self.failure_rate

    def end(self, ended: Ended, job: LoadJob | StoreJob, is_ok: bool) -> None:
        how = MoveResult.DONE if is_ok else self.rng.choice([MoveResult.MISS, MoveResult.ABORTED])
        report = WorkerReport({job.job_id: JobReport(1, is_ok, 0, {int(how): 1})})
        ended.reports = ended.reports.aggregate(report)
        if isinstance(job, LoadJob) and not job.is_sync:
            ended.received.append((job.req_id, is_ok))
        elif isinstance(job, LoadJob) and not is_ok:
            ended.failed_in_step.add(job.req_id)

    def move(self, running: Job) -> bool:
        job = running.job
        if running.is_cancelled or self.fails():
            return False
        if isinstance(job, StoreJob):
            return all(self.store_one(job, *one) for one in self.each(job))
        return bool(job.lease) and all(self.load_one(job, *one) for one in self.each(job))

    def each(self, job: LoadJob | StoreJob) -> Iterable[tuple[int, int, list[int]]]:
        for move in job.moves:
            per_block = self.geometry.components[move.component].engine_blocks_per_block
            for at, block in enumerate(move.blocks):
                yield move.component, block, move.engine_blocks[at * per_block :][:per_block]

    def load_one(self, job: LoadJob, component: int, block: int, ids: list[int]) -> bool:
        payload = self.daemon.promote(job.lease, component, block)
        if payload is None:
            return False
        for block_id, tag in zip(ids, payload, strict=True):
            if block_id != NO_BLOCK:
                assert self.pool.blocks[block_id].ref_cnt == 1, "a load writes a shared block"
                self.pool.memory[block_id] = tag
        return True

    def store_one(self, job: StoreJob, component: int, block: int, ids: list[int]) -> bool:
        payload = tuple(self.pool.memory[block_id] for block_id in ids)
        self.check_stored(component, block, payload)
        return self.daemon.demote(job.ticket, component, block, payload)

    def check_stored(self, component: int, block: int, payload: tuple[Tag, ...]) -> None:
        """Each part holds the end of the tokens that it should; whose tokens, `load_one` sees."""
        spec = self.geometry.components[component]
        per_group, size = spec.engine_blocks_per_group, spec.group_block_tokens
        end = (block + 1) * self.geometry.block_tokens
        for at, tag in enumerate(payload):
            part_end = (
                end if spec.kind is Kind.STATE else (end - (per_group - 1 - at % per_group) * size)
            )
            if spec.window_tokens and part_end <= end - spec.window_tokens:
                continue
            assert tag[1] == spec.groups[at // per_group]
            assert len(tag[3]) == part_end, (component, block, at)
