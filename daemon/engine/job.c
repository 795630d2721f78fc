/* Jobs of the store, from a pool. A job owns a copy of the engine block ids that its transfer
 * reads, because it may outlive its request: the request is answered at its deadline, the transfer
 * ends when it ends. Ids that do not fit in the job go into one of a few wide lists. */
#include <string.h>

#include "daemon/engine/internal.h"

static struct eng_wide *wide_take(struct kvt_engine *engine)
{
    struct eng_wide *wide;

    if (!kvt_list_is_empty(&engine->wide_free)) {
        wide = KVT_CONTAINER_OF(engine->wide_free.next, struct eng_wide, link);
        kvt_list_remove(&wide->link);
        return wide;
    }
    if (engine->wide_made == KVT_ENGINE_WIDE_MAX)
        return NULL;
    wide = &engine->wide_pool[engine->wide_made++];
    kvt_list_init(&wide->link);
    return wide;
}

static struct eng_job *job_take(struct kvt_engine *engine)
{
    struct eng_job *job;

    if (!kvt_list_is_empty(&engine->jobs_free)) {
        job = KVT_CONTAINER_OF(engine->jobs_free.next, struct eng_job, link);
        kvt_list_remove(&job->link);
        return job;
    }
    return engine->jobs_made < KVT_ENGINE_JOBS_MAX ? &engine->jobs_pool[engine->jobs_made++] : NULL;
}

static void job_give(struct kvt_engine *engine, struct eng_job *job)
{
    if (job->wide != NULL)
        kvt_list_push_back(&engine->wide_free, &job->wide->link);
    job->wide = NULL;
    engine->jobs_count--;
    kvt_list_push_front(&engine->jobs_free, &job->link);
}

static void job_done(struct kvt_job *done)
{
    struct eng_job *job = done->owner;
    struct kvt_engine *engine = job->engine;
    struct eng_run *run = job->run;
    struct eng_entry *entry =
        eng_entry_at(engine, job->ticket_idx, job->ticket_generation, job->entry);

    kvt_list_remove(&job->link);
    if (entry != NULL)
        eng_entry_done(engine, entry, job->job.rank, job->job.result == KVT_MOVE_DONE);
    if (run == NULL) {
        engine->background_count--;
        eng_count(engine, KVT_COUNTER_PREFETCHED, job->job.result == KVT_MOVE_DONE);
    } else {
        eng_run_job_done(engine, run, job);
    }
    job_give(engine, job);
}

struct eng_job *eng_job_new(struct kvt_engine *engine, struct eng_run *run, enum kvt_job_kind kind,
                            const uint64_t *ids, uint32_t ids_count)
{
    struct eng_wide *wide = NULL;
    struct eng_job *job;

    KVT_ASSERT(ids_count <= KVT_ENGINE_BLOCKS_PER_BLOCK_MAX);
    if (ids_count > KVT_ENGINE_JOB_BLOCKS) {
        wide = wide_take(engine);
        if (wide == NULL)
            return NULL;
    }
    job = job_take(engine);
    if (job == NULL) {
        if (wide != NULL)
            kvt_list_push_back(&engine->wide_free, &wide->link);
        return NULL;
    }
    *job = (struct eng_job){.run = run, .engine = engine, .wide = wide};
    job->job.kind = kind;
    job->job.done = job_done;
    job->job.owner = job;
    job->job.is_background = run == NULL;
    job->job.home = run != NULL ? run->session->group->home : NULL; /* the run outlives its jobs */
    job->job.view.engine_blocks = wide != NULL ? wide->blocks : job->blocks;
    if (ids_count > 0)
        memcpy(wide != NULL ? wide->blocks : job->blocks, ids, ids_count * sizeof(ids[0]));
    kvt_list_init(&job->link);
    engine->jobs_count++;
    return job;
}

void eng_job_submit(struct kvt_engine *engine, struct eng_job *job)
{
    struct eng_run *run = job->run;

    KVT_ASSERT(job->job.deadline_ns != 0);
    if (run != NULL) {
        kvt_list_push_back(&run->jobs, &job->link);
        run->jobs_count++;
    } else {
        kvt_list_push_back(&engine->background, &job->link);
        engine->background_count++;
    }
    engine->has_submitted = true;
    kvt_store_submit(engine->store, &job->job, engine->now_ns);
}

void eng_job_skip(struct kvt_engine *engine, struct eng_job *job)
{
    KVT_ASSERT(job->run != NULL);
    (void)engine;
    kvt_list_push_back(&job->run->jobs, &job->link);
    job->run->jobs_count++;
    job_done(&job->job);
}
