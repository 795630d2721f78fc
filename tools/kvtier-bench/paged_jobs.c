/* Two SOCK_SEQPACKET pairs a rank: job numbers go over `work` and come back, orders to give up go
 * over `control`. A message is small and whole, the threads of a rank share the receiving end, and
 * the death of either side is its end of file. */
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tools/kvtier-bench/paged.h"

#define HEAD_BYTES 4096u

static uint64_t list_words(const struct kvt_model *model, uint32_t c)
{
    return 2 + model->components[c].engine_blocks_per_block;
}

struct paged_lists paged_job_lists(const struct paged_jobs *jobs, uint32_t job, uint32_t component)
{
    uint64_t *at = (uint64_t *)(void *)(jobs->lists + job * jobs->job_bytes);

    for (uint32_t c = 0; c < component; c++)
        at += jobs->room * list_words(jobs->model, c);
    return (struct paged_lists){at, at + jobs->room, at + 2 * jobs->room};
}

static int map_shared(struct paged_jobs *jobs)
{
    size_t jobs_bytes = kvt_round_up(PAGED_JOBS * sizeof(struct paged_job), HEAD_BYTES);
    void *shared;

    for (uint32_t c = 0; c < jobs->model->components_count; c++)
        jobs->job_bytes += jobs->room * list_words(jobs->model, c) * sizeof(uint64_t);
    jobs->shared_bytes = HEAD_BYTES + jobs_bytes + PAGED_JOBS * jobs->job_bytes;
    shared = mmap(NULL, jobs->shared_bytes, PROT_READ | PROT_WRITE,
                  MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (shared == MAP_FAILED)
        return kvt_trace(-errno);
    jobs->engine_id = shared;
    jobs->jobs = (struct paged_job *)(void *)(jobs->engine_id + HEAD_BYTES);
    jobs->lists = jobs->engine_id + HEAD_BYTES + jobs_bytes;
    if (getrandom(jobs->engine_id, KVT_ENGINE_ID_BYTES, 0) != (ssize_t)KVT_ENGINE_ID_BYTES)
        return kvt_trace(-EIO);
    return 0;
}

static void close_all(struct paged_jobs *jobs)
{
    for (uint32_t rank = 0; rank < KVT_RANKS_MAX; rank++) {
        if (jobs->ranks[rank].work >= 0)
            (void)close(jobs->ranks[rank].work);
        if (jobs->ranks[rank].control >= 0)
            (void)close(jobs->ranks[rank].control);
        jobs->ranks[rank].work = jobs->ranks[rank].control = -1;
    }
}

static int start_rank(struct paged_jobs *jobs, struct bench_engine *engine,
                      const struct kvt_kv_memory *memory, uint32_t rank)
{
    int work[2] = {-1, -1}, control[2] = {-1, -1};
    pid_t pid;

    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, work) < 0 ||
        socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, control) < 0)
        return kvt_trace(-errno);
    pid = fork();
    if (pid < 0)
        return kvt_trace(-errno);
    if (pid == 0) {
        struct paged_rank_seat seat = {jobs, memory, engine, rank, work[1], control[1]};

        (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
        (void)close(work[0]);
        (void)close(control[0]);
        close_all(jobs); /* of the ranks before: or their ends of file would never come */
        _exit(paged_rank_run(&seat));
    }
    (void)close(work[1]);
    (void)close(control[1]);
    jobs->ranks[rank] = (struct paged_rank){pid, work[0], control[0]};
    return 0;
}

int paged_jobs_init(struct paged_jobs *jobs, struct bench_engine *engine,
                    const struct kvt_kv_memory *memory, uint64_t room)
{
    int r;

    *jobs = (struct paged_jobs){.model = engine->model, .room = room};
    for (uint32_t rank = 0; rank < KVT_RANKS_MAX; rank++)
        jobs->ranks[rank].work = jobs->ranks[rank].control = -1;
    r = map_shared(jobs);
    for (uint32_t rank = 0; rank < engine->model->ranks && r == 0; rank++)
        r = start_rank(jobs, engine, memory, rank);
    return r;
}

void paged_jobs_deinit(struct paged_jobs *jobs)
{
    close_all(jobs);
    for (uint32_t rank = 0; jobs->model != NULL && rank < jobs->model->ranks; rank++)
        if (jobs->ranks[rank].pid > 0)
            (void)waitpid(jobs->ranks[rank].pid, NULL, 0);
    if (jobs->shared_bytes != 0 && jobs->engine_id != NULL)
        (void)munmap(jobs->engine_id, jobs->shared_bytes);
    *jobs = (struct paged_jobs){0};
}

/* A rank that is dead does not take it: the scheduler learns that by the end of file. */
void paged_job_send(const struct paged_jobs *jobs, uint32_t rank, uint32_t job)
{
    (void)send(jobs->ranks[rank].work, &job, sizeof(job), MSG_NOSIGNAL);
}

void paged_job_give_up(const struct paged_jobs *jobs, uint32_t job, uint32_t rank,
                       uint32_t after_us)
{
    struct paged_order order = {job, after_us, atomic_load(&jobs->jobs[job].op_id)};

    (void)send(jobs->ranks[rank].control, &order, sizeof(order), MSG_NOSIGNAL);
}

int paged_jobs_next(struct paged_jobs *jobs, int timeout_ms, uint32_t *ret_rank, uint32_t *ret_job)
{
    struct pollfd fds[KVT_RANKS_MAX];
    uint32_t count = jobs->model->ranks, job;

    for (uint32_t rank = 0; rank < count; rank++)
        fds[rank] = (struct pollfd){.fd = jobs->ranks[rank].work, .events = POLLIN};
    if (poll(fds, count, timeout_ms) <= 0)
        return 0;
    for (uint32_t rank = 0; rank < count; rank++) {
        if (fds[rank].revents == 0)
            continue;
        *ret_rank = rank;
        if (recv(jobs->ranks[rank].work, &job, sizeof(job), MSG_DONTWAIT) != sizeof(job)) {
            (void)close(jobs->ranks[rank].work); /* poll passes over it from now on */
            jobs->ranks[rank].work = -1;
            return -EPIPE;
        }
        *ret_job = job;
        return 1;
    }
    return 0;
}
