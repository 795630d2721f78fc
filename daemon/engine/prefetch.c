/* Raising blocks to L2 in the background: what a lookup asked for ahead of its promote, and what a
 * best-effort promote found only in L3. Wishes wait in a small ring and are worked off in slices;
 * a wish whose path has died or whose session has ended is forgotten, one that finds the ring full
 * is dropped and counted. The store's budget of bytes in flight keeps room for those who cannot
 * wait. */
#include "daemon/engine/internal.h"

#define PREFETCH_DEADLINE_NS (30 * KVT_NS_PER_S)
#define PREFETCH_CELLS 64u

void eng_prefetch_add(struct kvt_engine *engine, const struct eng_session *session,
                      struct kvt_radix_block end, uint32_t component, uint64_t first_idx,
                      uint64_t end_idx)
{
    uint32_t last_at =
        (engine->prefetch_head + engine->prefetch_count - 1) % KVT_ENGINE_PREFETCH_MAX;
    struct eng_prefetch *last = &engine->prefetch[last_at];

    if (engine->is_stopping || end.generation == 0 || first_idx >= end_idx)
        return;
    if (engine->prefetch_count > 0 && last->end.idx == end.idx &&
        last->end.generation == end.generation && last->component == component &&
        last->session_idx == session->idx && last->session_generation == session->generation &&
        last->end_idx == first_idx) {
        last->end_idx = end_idx;
        return;
    }
    if (engine->prefetch_count == KVT_ENGINE_PREFETCH_MAX) {
        eng_count(engine, KVT_COUNTER_PREFETCH_DROPPED, 1);
        return;
    }
    engine->prefetch[(last_at + 1) % KVT_ENGINE_PREFETCH_MAX] = (struct eng_prefetch){
        .end = end,
        .component = component,
        .session_idx = session->idx,
        .session_generation = session->generation,
        .first_idx = first_idx,
        .end_idx = end_idx,
    };
    engine->prefetch_count++;
}

static void pop(struct kvt_engine *engine)
{
    engine->prefetch_head = (engine->prefetch_head + 1) % KVT_ENGINE_PREFETCH_MAX;
    engine->prefetch_count--;
}

/* false: no job is free. */
static bool raise_cell(struct kvt_engine *engine, struct kvt_cell cell)
{
    struct eng_job *job;

    if (kvt_store_ready_mask(engine->store, cell) != 1u << KVT_TIER_DISK)
        return true;
    job = eng_job_new(engine, NULL, KVT_JOB_RAISE, NULL, 0);
    if (job == NULL)
        return false;
    job->job.cell = cell;
    job->job.tier = KVT_TIER_HOST;
    job->job.deadline_ns = kvt_time_add(engine->now_ns, PREFETCH_DEADLINE_NS);
    eng_job_submit(engine, job);
    return true;
}

bool eng_prefetch_slice(struct kvt_engine *engine)
{
    struct kvt_radix_cell cells[PREFETCH_CELLS];
    struct eng_prefetch *wish = &engine->prefetch[engine->prefetch_head];
    uint32_t count;

    if (engine->prefetch_count == 0 || engine->background_count >= KVT_ENGINE_PREFETCH_JOBS_MAX)
        return false;
    if (eng_session_at(engine, wish->session_idx, wish->session_generation) == NULL) {
        pop(engine); /* whoever wished it is gone */
        return engine->prefetch_count > 0;
    }
    count = (uint32_t)KVT_MIN(wish->end_idx - wish->first_idx, (uint64_t)PREFETCH_CELLS);
    if (kvt_radix_depth_blocks(engine->radix, wish->end) < wish->end_idx ||
        kvt_radix_path(engine->radix, wish->end, wish->component, wish->first_idx, count, cells) !=
            0) {
        pop(engine);
        return engine->prefetch_count > 0;
    }
    for (uint32_t i = 0; i < count; i++) {
        if (cells[i].handle != KVT_RADIX_HANDLE_NONE &&
            !raise_cell(engine, kvt_store_cell_of(engine->store, cells[i].handle)))
            return false;
        wish->first_idx++;
    }
    if (wish->first_idx == wish->end_idx)
        pop(engine);
    return engine->prefetch_count > 0;
}

void eng_prefetch_cancel(struct kvt_engine *engine)
{
    struct kvt_list todo;

    engine->prefetch_count = 0;
    kvt_list_init(&todo);
    while (!kvt_list_is_empty(&engine->background)) {
        struct kvt_list *link = engine->background.next;

        kvt_list_remove(link);
        kvt_list_push_back(&todo, link);
    }
    while (!kvt_list_is_empty(&todo)) {
        struct eng_job *job = KVT_CONTAINER_OF(todo.next, struct eng_job, link);

        kvt_list_remove(&job->link);
        kvt_list_push_back(&engine->background, &job->link);
        kvt_store_cancel(engine->store, &job->job);
    }
}
