/* A service without an engine, for tests of proto/: one thread that owns ops as the engine does.
 *
 * It answers each op with random but valid values (api_walk.h) made from a seed that both sides can
 * know, or does what a test's `handle` says. It can hold ops until told or cancelled. Counters may
 * be read any time. */
#pragma once

#include <pthread.h>
#include <stdatomic.h>

#include "daemon/base/api.h"
#include "daemon/base/doorbell.h"
#include "daemon/base/ring.h"
#include "proto/server/server.h"

#define FAKE_HELD_MAX 4096u

struct fake_service;
/* True: @op was answered or kept (with fake_hold); false: do the usual. Service thread. */
typedef bool (*fake_handle_fn)(struct fake_service *fake, struct kvt_op *op);

struct fake_service {
    struct kvt_service table;       /* for the server */
    _Atomic(fake_handle_fn) handle; /* may be set while it serves */
    void *ctx;
    atomic_ullong answer_seed;
    atomic_uint answer_size;
    atomic_bool is_full;    /* submit answers FULL (never to DETACH) */
    atomic_bool is_holding; /* keep everything but DETACH and HEALTH */
    atomic_bool is_unhealthy;
    atomic_bool refuses_attach;
    atomic_bool is_inline; /* answer in submit, on the server's thread */

    atomic_uint submitted[KVT_OP_KINDS];
    atomic_uint cancels, regions_open, regions_closed, running;
    _Atomic(struct kvt_session_sink *) last_sink;
    /* the thread's */
    struct kvt_ring ring;
    struct kvt_doorbell bell;
    pthread_t thread;
    atomic_bool is_stopping;
    struct kvt_op *held[FAKE_HELD_MAX];
    atomic_uint held_count;
    atomic_bool wants_release;
    atomic_uint session_ids;
};

void fake_start(struct fake_service *fake);
void fake_stop(struct fake_service *fake); /* after the server's stop */
void fake_hold(struct fake_service *fake, struct kvt_op *op);
/* Lets go of everything held (answered as usual); any thread. */
void fake_release(struct fake_service *fake);
/* The usual answer of @op, from the seed. */
void fake_answer(struct fake_service *fake, struct kvt_op *op);

/* A server on a scratch directory with this service behind it. */
struct fake_server {
    struct fake_service service;
    struct kvt_server *server;
    char dir[64], path[96], admin_path[96];
};
/* @config's paths and service are filled in here; other zero fields get test defaults. */
void fake_server_start(struct fake_server *fake, struct kvt_server_config config);
void fake_server_stop(struct fake_server *fake, uint64_t grace_ns);

/* An op of a client, with an arena. */
void fake_op_init(struct kvt_op *op, struct kvt_arena *arena, enum kvt_op_kind kind);
/* Waits until *@value is at least @least, 10 s at most; false: it did not. */
bool fake_wait(atomic_uint *value, unsigned least);
