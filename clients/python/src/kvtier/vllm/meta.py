"""What the two roles of the connector tell each other: jobs down, reports up.

The scheduler object makes jobs and knows tokens, requests and tickets. The worker objects (one a
rank, in other processes) get `KvtierMetadata` with each step and know only engine blocks: they
begin the transfers and answer with a `WorkerReport` once the daemon touches the engine's blocks no
more. Every job that was sent is reported exactly once by every rank, whatever became of it; the
scheduler takes it for over when all ranks of the engine reported.

Plain data without types of vLLM (but for two empty base classes), so that it pickles small.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvtier.vllm._compat import KVConnectorMetadata, KVConnectorWorkerMetadata


@dataclass(slots=True)
class ComponentMoves:
    """Blocks of one component and where the engine has them.

    blocks: strictly rising numbers counted from the beginning of the prompt.
    engine_blocks: for each of them `engine_blocks_per_block` ids of the engine, as the component's
    geometry orders them; NO_BLOCK where a load must not write. A store has no NO_BLOCK.
    """

    component: int
    blocks: list[int]
    engine_blocks: list[int]


@dataclass(slots=True)
class LoadJob:
    """Bring blocks of a lease into the engine's blocks.

    lease: empty if the scheduler found that the load cannot be right; the worker then moves
    nothing and reports the job as failed. With a lease and no moves there is nothing to move, and
    the job is reported as done. is_sync: must be over before the forward pass of this step, and a
    failure is reported as engine block ids (those of `moves`); else the request waits outside of
    the batch, and a failure is reported as its id.
    """

    job_id: int
    req_id: str
    lease: bytes
    moves: list[ComponentMoves]
    timeout_s: float
    is_sync: bool


@dataclass(slots=True)
class StoreJob:
    """Give engine blocks, as they are after the forward pass of this step, to a ticket.

    The scheduler holds the blocks until every rank reported, so the copy may go on beside later
    steps. is_fenced: it could not hold them (a vLLM that does not lend its block pool), so the
    copy must be over before the step is.
    """

    job_id: int
    req_id: str
    ticket: bytes
    moves: list[ComponentMoves]
    timeout_s: float
    is_fenced: bool = False


@dataclass
class KvtierMetadata(KVConnectorMetadata):
    """One step's orders.

    cancels: load jobs whose request is gone; they still have to quiesce and to be reported.
    """

    loads: list[LoadJob] = field(default_factory=list)
    stores: list[StoreJob] = field(default_factory=list)
    cancels: list[int] = field(default_factory=list)

    def is_empty(self) -> bool:
        """There is nothing to do in this step."""
        return not (self.loads or self.stores or self.cancels)


@dataclass(slots=True)
class JobReport:
    """How a job ended, summed over the ranks that say so.

    ranks: how many. is_ok: every block of every rank is where it was to go. bytes: moved, all
    ranks together. results: how many blocks ended with which kvtier.MoveResult value.
    """

    ranks: int
    is_ok: bool
    bytes: int = 0
    results: dict[int, int] = field(default_factory=dict)

    def merged(self, other: JobReport) -> JobReport:
        """This report and that of further ranks."""
        results = dict(self.results)
        for value, blocks in other.results.items():
            results[value] = results.get(value, 0) + blocks
        return JobReport(
            ranks=self.ranks + other.ranks,
            is_ok=self.is_ok and other.is_ok,
            bytes=self.bytes + other.bytes,
            results=results,
        )


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """Jobs that ended since the last step: job id -> how. vLLM merges those of all ranks."""

    finished: dict[int, JobReport] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        """This and another rank's report as one; neither is changed."""
        if not isinstance(other, WorkerReport):
            raise TypeError(f"cannot merge a {type(other).__name__} into a WorkerReport")
        finished = dict(self.finished)
        for job_id, report in other.finished.items():
            mine = finished.get(job_id)
            finished[job_id] = report if mine is None else mine.merged(report)
        return WorkerReport(finished=finished)
