"""What the scheduler half remembers: of each request, and of each job until every rank reported it.

Nothing here decides anything; `Jobs` keeps the books of what is held for a job (a lease or ticket,
references of engine blocks) and gives it back exactly once.
"""

from __future__ import annotations

import itertools
import logging
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.types import Cursor, MoveResult
from kvtier.vllm.keys import RequestKeys
from kvtier.vllm.link import Grant
from kvtier.vllm.meta import ComponentMoves, WorkerReport
from kvtier.vllm.plan import Starts

logger = logging.getLogger(__name__)

_ANSWERS = frozenset({MoveResult.DONE, MoveResult.MISS})


@dataclass(slots=True)
class Held:
    """The last answer to a request that still waits for its blocks.

    boundary: 0 for a miss. grant: the lease, as long as there is something to load. computed: what
    vLLM said it has itself when it was promised the rest. num_tokens: of the request, then.
    """

    era: tuple[int, int]
    asked_s: float
    lives_s: float
    num_tokens: int
    boundary: int
    grant: Grant | None
    computed: int = 0

    def release(self) -> None:
        """Give the lease back, if it still is here."""
        if self.grant is not None:
            self.grant.release()
            self.grant = None


@dataclass(slots=True)
class Tracked:
    """A request between its first lookup and its end.

    keys: None for one that is not cached. has_failed: a load failed, it is never promised anything
    again. is_stale: its cache is of before a reset and must not be stored. era: of what follows it,
    which is how far it was stored.
    """

    request: Any
    keys: RequestKeys | None
    held: Held | None = None
    load_job_id: int | None = None
    has_failed: bool = False
    is_stale: bool = False
    era: tuple[int, int] = (0, 0)
    starts: Starts = field(default_factory=Starts)
    cursor: Cursor | None = None
    branch_tokens: int = 0
    retry_at_s: float = 0.0
    store_failures: int = 0

    def drop_held(self) -> None:
        """Forget the answer, and give its lease back."""
        if self.held is not None:
            self.held.release()
            self.held = None


@dataclass(slots=True)
class Job:
    """A load or store that not every rank has reported yet.

    grant: None for a load that was given up before it began. is_answered: every block is known to
    have been there or not, on every rank. first_block: of a store. loading: engine blocks that a
    load within the step writes.
    """

    job_id: int
    req_id: str
    is_load: bool
    grant: Grant | None
    ranks_left: int
    is_ok: bool = True
    is_answered: bool = True
    pinned: tuple[int, ...] = ()
    first_block: int = 0
    loading: frozenset[int] = frozenset()


class Jobs:
    """All jobs under way."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._jobs: dict[int, Job] = {}
        self._ids = itertools.count(1)
        self.pool: Any = None  # vLLM's block pool, if it lends it
        self.pinned_blocks = 0

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def loads(self) -> int:
        """How many of them are loads."""
        return sum(job.is_load for job in self._jobs.values())

    def loading(self) -> frozenset[int]:
        """Engine blocks that loads of the current step may still write, or fail to write."""
        return frozenset().union(*(job.loading for job in self._jobs.values()))

    def add_load(
        self, req_id: str, grant: Grant | None, moves: Iterable[ComponentMoves], is_sync: bool
    ) -> int:
        """Returns the job's id."""
        job = Job(next(self._ids), req_id, True, grant, self._ranks)
        if is_sync:
            job.loading = frozenset(b for move in moves for b in move.engine_blocks)
        self._jobs[job.job_id] = job
        return job.job_id

    def add_store(self, req_id: str, grant: Grant, moves: list[ComponentMoves]) -> int:
        """Holds the engine blocks of `moves`, if vLLM lends its pool. Returns the job's id."""
        job = Job(next(self._ids), req_id, False, grant, self._ranks)
        job.first_block = min(move.blocks[0] for move in moves)
        if self.pool is not None:
            job.pinned = tuple(dict.fromkeys(b for move in moves for b in move.engine_blocks))
            self.pool.touch([self.pool.blocks[b] for b in job.pinned])
            self.pinned_blocks += len(job.pinned)
        self._jobs[job.job_id] = job
        return job.job_id

    def report(self, report: WorkerReport) -> list[Job]:
        """Take in what some ranks say. Returns the jobs that are over with it; what was held for
        them is given back."""
        over = []
        for job_id, ended in report.finished.items():
            job = self._jobs.get(job_id)
            if job is None:
                logger.error("kvtier: a worker reports job %d, which is over or unknown", job_id)
                continue
            job.is_ok = job.is_ok and ended.is_ok
            job.is_answered = job.is_answered and set(ended.results) <= _ANSWERS
            job.ranks_left -= ended.ranks
            if job.ranks_left <= 0:
                del self._jobs[job_id]
                self._give_back(job)
                over.append(job)
        return over

    def _give_back(self, job: Job) -> None:
        if job.grant is not None:
            job.grant.release()
        if job.pinned:
            self.pinned_blocks -= len(job.pinned)
            # The first of the list is the first to be reused: the prompt's end before its head.
            self.pool.free_blocks([self.pool.blocks[b] for b in reversed(job.pinned)])

    def release_grants(self) -> None:
        """The engine ends: leases and tickets go back, whatever still runs."""
        for job in self._jobs.values():
            if job.grant is not None:
                job.grant.release()


def as_tokens(request: Any, start: int, end: int) -> npt.NDArray[np.uint32]:
    """The request's tokens [start, end) as the daemon takes them. OverflowError if one is negative:
    then it is a placeholder, and the request must not be cached."""
    return np.frombuffer(array("I", request.all_token_ids[start:end]), dtype=np.uint32)
