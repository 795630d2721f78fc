/* The daemon's parts and the order in which they start and stop.
 *
 *   limits, guard, live check, GPUs, L2, L1, L3, index, engine, server  start, left to right
 *   server, engine (drains), index, L3, L1, L2, GPUs                    stop, right to left
 *
 * The server goes first: it stops accepting, lets requests end and hands every op back; the engine
 * must still run for that. The engine goes next: it writes back what L3 should have, waits for
 * transfers, and its thread ends. Only then may tiers be closed: nothing touches their memory.
 *
 * Main thread only. */
#pragma once

#include <pthread.h>

#include "daemon/base/doorbell.h"
#include "daemon/config.h"
#include "daemon/engine/engine.h"
#include "daemon/start_l1.h"
#include "daemon/start_l3.h"
#include "proto/server/server.h"
#include "tiers/tier.h"

enum kvt_exit { /* of the process */
                KVT_EXIT_OK = 0,
                KVT_EXIT_FAILURE = 1,
                KVT_EXIT_CONFIG = 2,  /* the configuration is wrong: starting again will not help */
                KVT_EXIT_RUNNING = 3, /* another daemon has the socket or the L3 file */
};

struct kvt_daemon {
    const struct kvt_config *config;
    const char *version;
    uint64_t boot_id;
    uint64_t stop_deadline_ns; /* CLOCK_MONOTONIC, set when stop begins; 0: no time to drain */
    enum kvt_exit exit;        /* what a failed step wants the process to say */
    struct kvt_doorbell doorbell;
    struct kvt_tier *tiers[KVT_TIERS_COUNT];
    struct kvt_daemon_l1 l1;
    struct kvt_daemon_l3 l3;
    struct kvt_engine *engine;
    pthread_t engine_thread;
    struct kvt_service service;
    struct kvt_server *server;
};

/* 0 and the daemon serves, or -errno: why was logged, daemon->exit says how to leave, and nothing
 * is left running. */
KVT_MUST_USE int kvt_daemon_start(struct kvt_daemon *ret_daemon, const struct kvt_config *config,
                                  const char *version);
/* Until @deadline_ns (CLOCK_MONOTONIC) what is dirty goes to L3, when stop.drain says so. */
void kvt_daemon_stop(struct kvt_daemon *daemon, uint64_t deadline_ns);
/* One line about the pools and sockets. */
void kvt_daemon_describe(const struct kvt_daemon *daemon, char *ret_text, size_t bytes);
