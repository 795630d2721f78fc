/* One slot a conversation, found by its number; the later one displaces. */
#include "tools/kvtier-bench/cursors.h"

#include "daemon/base/alloc.h"

#define CURSORS 1024u

int bench_cursors_init(struct bench_cursors *cursors, bool is_off)
{
    cursors->is_off = is_off;
    cursors->slots = kvt_alloc_zeroed(CURSORS, sizeof(*cursors->slots));
    return cursors->slots == NULL ? kvt_trace(-ENOMEM) : 0;
}

void bench_cursors_deinit(struct bench_cursors *cursors)
{
    kvt_free(cursors->slots);
    cursors->slots = NULL;
}

static struct bench_cursor *slot_of(const struct bench_cursors *cursors, uint32_t session)
{
    return cursors->is_off || session == KVT_SESSION_NONE ? NULL
                                                          : &cursors->slots[session % CURSORS];
}

uint64_t bench_cursor_recall(const struct bench_cursors *cursors,
                             const struct kvt_workload *workload, uint64_t idx, uint64_t tokens_max,
                             struct kvt_handle *ret_cursor)
{
    uint32_t session = workload->requests[idx].session;
    const struct bench_cursor *known = slot_of(cursors, session);

    *ret_cursor = KVT_HANDLE_NONE;
    if (known == NULL || known->tokens_count == 0 || known->session != session ||
        known->tokens_count > tokens_max ||
        known->tokens_count > kvt_workload_common_tokens(workload, known->request_idx, idx))
        return 0;
    *ret_cursor = known->cursor;
    return known->tokens_count;
}

void bench_cursor_keep(struct bench_cursors *cursors, const struct kvt_workload *workload,
                       uint64_t idx, uint64_t tokens_count, struct kvt_handle cursor)
{
    uint32_t session = workload->requests[idx].session;
    struct bench_cursor *slot = slot_of(cursors, session);

    if (slot != NULL)
        *slot = (struct bench_cursor){session, idx, tokens_count, cursor};
}
