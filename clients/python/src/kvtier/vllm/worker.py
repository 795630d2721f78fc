"""The worker half of the connector: begins jobs, and says exactly once how each of them ended.

A step of the engine calls, always in the thread of the step::

    begin(meta)            loads (before the forward pass if it needs them at once, else after)
    begin_stores(meta)     stores of what the forward pass that is now over has written
    poll()                 which loads are over, for vLLM
    take_report()          which jobs are over, for the scheduler half

Nothing waits, except for a load that the forward pass of this very step needs (`is_sync`),
and, for a millisecond, in steps that have no forward pass.
A job is reported when its transfer is finished, that is when nobody but the engine touches
its blocks, whatever deadline passed before; a job that could not begin is reported as failed
in the same step. There is no other state: a daemon that is away makes jobs fail, and when
the session is attached again they succeed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvtier import (
    AnyRegion,
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    KvtierError,
    Layout,
    ModelSpec,
    NotAttached,
    NotFound,
    ResourceExhausted,
    Role,
    Session,
    Unavailable,
    Unimplemented,
)
from kvtier.vllm.layout import KvLayout
from kvtier.vllm.link import wait_attached
from kvtier.vllm.memory import KvMemory
from kvtier.vllm.meta import JobReport, KvtierMetadata, LoadJob, StoreJob, WorkerReport
from kvtier.vllm.metrics import KvtierStats
from kvtier.vllm.transfer import EndedTransfer, Transfer, TransferResult, failed

logger = logging.getLogger(__name__)

START_WAIT_S = 2.0
SHUTDOWN_S = 5.0
SYNC_LOG_S = 10.0
IDLE_WAIT_S = 0.001
REFUSALS_MAX = 3


class Attacher(Protocol):
    """The part of `kvtier.Client` that is used here."""

    def attach(
        self,
        spec: ModelSpec,
        *,
        engine_id: bytes,
        role: Role,
        rank: int = -1,
        regions: Sequence[AnyRegion] = (),
        layouts: Sequence[Layout] = (),
        name: str = "",
    ) -> Session: ...

    def close(self) -> None: ...


class MemoryOpener(Protocol):
    """Makes the way to the engine's memory; again with `is_refused` when the daemon did not take
    the first one. None: there is no way, and it has been said why."""

    def __call__(self, layout: KvLayout, is_refused: bool) -> KvMemory | None: ...


@dataclass(slots=True)
class LoadResults:
    """What a poll found. `failed` is a part of `finished`: vLLM releases a request only if it is in
    both, in the same poll."""

    finished: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)


@dataclass(slots=True)
class _Running:
    job: LoadJob | StoreJob
    transfer: Transfer


class WorkerSide:
    """One rank's jobs. Inert (every job fails at once) until `register` succeeded."""

    def __init__(
        self,
        spec: ModelSpec,
        *,
        rank: int,
        engine_id: bytes,
        client: Attacher,
        stats: KvtierStats,
        name: str = "",
    ):
        self._spec = spec
        self._rank = rank
        self._engine_id = engine_id
        self._client = client
        self._stats = stats
        self._name = name
        self._layout: KvLayout | None = None
        self._open: MemoryOpener | None = None
        self._memory: KvMemory | None = None
        self._session: Session | None = None
        self._was_attached: bool | None = None
        self._refusals = 0  # attempts to attach, one after the other, that the daemon refused
        self._refusal: KvtierError | None = None
        self._is_hanging = False  # the daemon was late with one of those
        self._told = ""  # the last trouble with attaching that was logged
        self._running: dict[int, _Running] = {}
        self._reports: dict[int, JobReport] = {}
        self._bad_blocks: set[int] = set()

    # ---- start and end -----------------------------------------------------------------------

    def register(self, layout: KvLayout, open_memory: MemoryOpener) -> None:
        """Attach with the engine's KV memory, and wait a moment for a daemon that is there. One
        that is not is no error: the session attaches when it comes. Raises ValueError if the
        tensors are not what the spec says."""
        for i, component in enumerate(self._spec.components):
            found = layout.bytes_per_block(i)
            if found != component.bytes_per_block:
                raise ValueError(
                    f"component {i} ({component.name}): its tensors have {found} bytes a block, "
                    f"the engine's configuration says {component.bytes_per_block}"
                )
        self._layout, self._open = layout, open_memory
        self._memory = open_memory(layout, False)
        self._attach()
        if self._session is not None:
            wait_attached(self._session, START_WAIT_S)

    def _attach(self) -> None:
        if self._memory is None:
            return
        self._was_attached, self._told = None, ""
        self._forget_refusals()
        try:
            self._session = self._client.attach(
                self._spec,
                engine_id=self._engine_id,
                role=Role.WORKER,
                rank=self._rank,
                regions=self._memory.regions,
                layouts=self._memory.layouts,
                name=self._name,
            )
        except Unimplemented as error:  # this client has no such regions
            self._replace_memory(error)
            return
        logger.info("kvtier: rank %d moves blocks by %s", self._rank, self._memory.name)

    def shutdown(self, timeout_s: float = SHUTDOWN_S) -> None:
        """Give up what runs, wait so long until the daemon has left our memory, and detach."""
        until_s = time.monotonic() + timeout_s
        for running in self._running.values():
            running.transfer.cancel()
        for running in self._running.values():
            running.transfer.wait(max(0.0, until_s - time.monotonic()))
        left = [r for r in self._running.values() if not r.transfer.finished()]
        if left:
            logger.warning(
                "kvtier: rank %d ends with %d transfers that the daemon has not given up; it keeps "
                "its own mapping of the memory until it does",
                self._rank,
                len(left),
            )
        self._running.clear()
        if self._session is not None:
            self._session.close(timeout_s=max(0.1, until_s - time.monotonic()))
            self._session = None
        if self._memory is not None:
            self._memory.close(max(0.1, until_s - time.monotonic()))
            self._memory = None
        self._client.close()

    @property
    def is_attached(self) -> bool:
        """A job that begins now has a daemon."""
        return self._session is not None and self._session.attached

    # ---- a step ------------------------------------------------------------------------------

    def begin(self, meta: KvtierMetadata) -> None:
        """Begin the step's loads and give up what the scheduler half no longer wants. Returns when
        loads for this step's forward pass have arrived, or failed."""
        self._look_at_session()
        for job_id in meta.cancels:
            if (running := self._running.get(job_id)) is not None:
                running.transfer.cancel()
        for job in meta.loads:
            self._running[job.job_id] = _Running(job, self._start(job))
        for job in meta.loads:
            if job.is_sync:
                self._wait_finished(self._running[job.job_id])

    def begin_stores(self, meta: KvtierMetadata) -> None:
        """Begin the step's stores. The forward pass is over, or launched. Waits only for stores
        whose blocks the scheduler half could not hold: the next step may overwrite them."""
        for job in meta.stores:
            self._running[job.job_id] = _Running(job, self._start(job))
        for job in meta.stores:
            if job.is_fenced:
                self._wait_finished(self._running[job.job_id])

    def poll(self, *, is_idle: bool = False) -> LoadResults:
        """Take what is finished out of the running jobs. is_idle: the step had no forward pass: a
        moment's wait for a load delays nobody, and lets the threads that it needs run."""
        if is_idle:
            self._wait_moment()
        results = LoadResults()
        over = [(i, r) for i, r in self._running.items() if r.transfer.finished()]
        for job_id, running in over:
            del self._running[job_id]
            result = running.transfer.result()
            self._account(running.job, result)
            self._reports[job_id] = JobReport(
                ranks=1, is_ok=result.is_ok, bytes=result.bytes, results=result.results
            )
            job = running.job
            if isinstance(job, LoadJob) and job.is_sync:
                self._bad_blocks.update(result.bad_engine_blocks)
            elif isinstance(job, LoadJob):
                results.finished.add(job.req_id)
                if not result.is_ok:
                    results.failed.add(job.req_id)
        return results

    def take_bad_blocks(self) -> set[int]:
        """Engine blocks that sync loads did not fill, since the last call."""
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def take_report(self) -> WorkerReport | None:
        """All jobs that ended since the last call, or None."""
        if not self._reports:
            return None
        reports, self._reports = self._reports, {}
        return WorkerReport(finished=reports)

    # ---- inside ------------------------------------------------------------------------------

    def _start(self, job: LoadJob | StoreJob) -> Transfer:
        if isinstance(job, LoadJob) and not job.lease:
            return failed(job.moves, NotFound("the scheduler found nothing to load after all"))
        if not job.moves:
            return EndedTransfer(TransferResult(is_ok=True))
        memory, session = self._memory, self._session
        if memory is None or session is None:
            return failed(job.moves, NotAttached("the connector is inert"))
        if not session.attached:
            return failed(job.moves, session.last_error or NotAttached("the daemon is not there"))
        try:
            if isinstance(job, LoadJob):
                return memory.load(session, job)
            return memory.store(session, job)
        except Exception as error:  # a fault of ours must not end the engine
            logger.exception("kvtier: job for %s", job.req_id)
            return failed(job.moves, Internal(f"the job did not begin: {error}"))

    def _wait_moment(self) -> None:
        loads = [r.transfer for r in self._running.values() if isinstance(r.job, LoadJob)]
        if loads and not any(transfer.finished() for transfer in loads):
            loads[0].wait(IDLE_WAIT_S)

    def _wait_finished(self, running: _Running) -> None:
        """Until the daemon has left the blocks. The job's own timeout makes that soon; only a
        daemon that is stopped while it copies lets us wait on, because blocks that it may still
        write to, or read from, must not be used."""
        while not running.transfer.wait(running.job.timeout_s + SYNC_LOG_S):
            logger.warning(
                "kvtier: rank %d waits for the daemon (pid %s) to give up blocks of request %s",
                self._rank,
                self._session.daemon_pid if self._session else None,
                running.job.req_id,
            )

    def _account(self, job: LoadJob | StoreJob, result: TransferResult) -> None:
        if isinstance(job, LoadJob):
            self._stats.observe_load(result.seconds, result.bytes, result.is_ok)
        else:
            self._stats.observe_store(result.seconds, result.bytes, result.is_ok)
        if result.error is not None:
            logger.debug("kvtier: job %d of %s: %s", job.job_id, job.req_id, result.error)

    def _look_at_session(self) -> None:
        """Notice that the daemon came, went, or refused our kind of memory."""
        session = self._session
        if session is None:
            return
        error = session.last_error
        if self._is_memory_refused(session):
            self._session = None
            self._close_aside(session)
            self._replace_memory(error)
            return
        attached = session.attached
        if attached != self._was_attached:
            if attached:
                logger.info("kvtier: rank %d is attached (pid %s)", self._rank, session.daemon_pid)
            elif self._was_attached:
                logger.warning("kvtier: rank %d lost the daemon: %s", self._rank, error)
            self._told = "" if error is None else error.text
            self._was_attached = attached
            self._stats.set_attached("worker", attached, self._rank)
        if not attached and error is not None and not isinstance(error, NotAttached):
            self._tell_trouble(error)

    def _tell_trouble(self, error: KvtierError) -> None:
        """Why the session does not attach: once each reason."""
        if error.text != self._told:
            self._told = error.text
            logger.warning("kvtier: rank %d is not attached: %s", self._rank, error)

    def _replace_memory(self, error: KvtierError | None) -> None:
        logger.warning("kvtier: the daemon cannot map this memory: %s", error)
        if self._memory is not None:
            self._memory.close(0.0)
        self._memory = None
        if self._layout is not None and self._open is not None:
            self._memory = self._open(self._layout, True)
        self._attach()

    def _close_aside(self, session: Session) -> None:
        """Closing waits for the daemon: not in the engine's step."""
        threading.Thread(target=session.close, name="kvtier-close", daemon=True).start()

    def _is_memory_refused(self, session: Session) -> bool:
        """The daemon does not open this memory. One that never did says so once; one that did, and
        was started anew without L1 on that GPU, a few times: in the middle of a restart an attempt
        may be refused in passing. One whose driver hangs over it says nothing, a few times."""
        error = session.last_error
        if self._memory is None or self._memory.name != "cuda_ipc":
            return False
        is_refusal = isinstance(error, FailedPrecondition | InvalidArgument)
        if error is None or not (is_refusal or self._is_driver_stuck(error)):
            self._forget_refusals()
            return False
        if error is not self._refusal:
            self._refusals, self._refusal = self._refusals + 1, error
        return (is_refusal and session.generation == 0) or self._refusals >= REFUSALS_MAX

    def _is_driver_stuck(self, error: KvtierError) -> bool:
        """The daemon answers, but not an Attach with this memory; or it has given up on the GPU
        after that, or on opening more. A daemon that is stopped, or away, does not answer what
        goes before Attach either; a GPU that is out of service without that comes back."""
        if not error.is_of_attach:
            return False
        if isinstance(error, DeadlineExceeded):
            self._is_hanging = True
        return self._is_hanging and isinstance(
            error, DeadlineExceeded | Unavailable | ResourceExhausted
        )

    def _forget_refusals(self) -> None:
        self._refusals, self._refusal, self._is_hanging = 0, None, False
