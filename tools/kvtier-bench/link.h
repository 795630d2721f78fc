/* How a process of an engine is joined to the daemon: one connection, the model declared, and the
 * sessions that it attaches. One thread until it is joined; calls on the client: any. */
#pragma once

#include "proto/client/client.h"
#include "tools/kvtier-bench/bench.h"
#include "tools/kvtier-bench/gpu/gpu_pool.h"
#include "tools/lib/kv_memory.h"

struct bench_link {
    const struct kvt_bench_options *options;
    const struct kvt_model *model;
    const struct kvt_kv_memory *memory; /* what ranks declare */
    const struct kvt_gpu_pool *gpu;     /* NULL: the memory is memfds */
    struct kvt_client *client;
    struct kvt_handle ns;
    uint8_t fingerprint[KVT_FINGERPRINT_BYTES];
    /* Set when a call below fails: what an engine that gives up exits with, and says. */
    int exit_status;
    char why[256];
};

struct bench_seat { /* a session in the daemon */
    struct kvt_session *session;
    struct kvt_handle handle;
};

/* Connects and declares the model. -errno, or 0. */
KVT_MUST_USE int bench_link_open(struct bench_link *link);
/* A session of engine @engine_id; @rank KVT_RANK_NONE: its scheduler. -errno, or 0. */
KVT_MUST_USE int bench_link_attach(struct bench_link *link,
                                   const uint8_t engine_id[KVT_ENGINE_ID_BYTES], uint32_t rank,
                                   struct bench_seat *ret_seat);
void bench_link_close(struct bench_link *link); /* sessions were detached before */

struct kvt_text bench_text(const char *text);
