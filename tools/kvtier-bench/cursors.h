/* Where the last turn of each conversation ended in the daemon's tree, so that the next one sends
 * its new tokens only. A small table that forgets; one thread. */
#pragma once

#include "daemon/base/api.h"
#include "tools/lib/workload.h"

struct bench_cursor {
    uint32_t session;
    uint64_t request_idx, tokens_count; /* 0 tokens: none */
    struct kvt_handle cursor;
};

struct bench_cursors {
    struct bench_cursor *slots;
    bool is_off;
};

KVT_MUST_USE int bench_cursors_init(struct bench_cursors *cursors, bool is_off);
void bench_cursors_deinit(struct bench_cursors *cursors);

/* The cursor of the conversation of request @idx, when its prompt goes on behind it and it lies
 * within @tokens_max: how many tokens are before and in it. Else 0 and no cursor. */
uint64_t bench_cursor_recall(const struct bench_cursors *cursors,
                             const struct kvt_workload *workload, uint64_t idx, uint64_t tokens_max,
                             struct kvt_handle *ret_cursor);
void bench_cursor_keep(struct bench_cursors *cursors, const struct kvt_workload *workload,
                       uint64_t idx, uint64_t tokens_count, struct kvt_handle cursor);
