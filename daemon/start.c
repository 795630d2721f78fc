#include "daemon/start.h"

#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "daemon/base/alloc.h"
#include "daemon/base/guard.h"
#include "daemon/base/log.h"
#include "daemon/base/size.h"
#include "daemon/base/steps.h"
#include "tiers/host/host.h"

/* Transfers that L2 takes before it says "full": enough to keep it busy, little enough that a
 * deadline means something. */
#define HOST_INFLIGHT_MAX 1024u

/* Descriptors beside connections: sockets, rings, memfds, regions of sessions. */
#define SPARE_DESCRIPTORS 512u

#define SERVER_GRACE_NS_MAX (2 * KVT_NS_PER_S)

static int fail(struct kvt_daemon *daemon, enum kvt_exit how, int r)
{
    daemon->exit = how;
    return kvt_trace(r);
}

/* ---- limits, guard, live check -------------------------------------------------------------- */

/* Raises the soft limit to the hard one; returns what it is then. */
static uint64_t raise_limit(__rlimit_resource_t which)
{
    struct rlimit limit;

    if (getrlimit(which, &limit) != 0)
        return 0;
    if (limit.rlim_cur != limit.rlim_max) {
        struct rlimit raised = {.rlim_cur = limit.rlim_max, .rlim_max = limit.rlim_max};

        if (setrlimit(which, &raised) == 0)
            limit = raised;
    }
    return limit.rlim_cur == RLIM_INFINITY ? UINT64_MAX : limit.rlim_cur;
}

static int start_limits(void *ctx)
{
    struct kvt_daemon *daemon = ctx;
    const struct kvt_config *config = daemon->config;
    uint64_t files = raise_limit(RLIMIT_NOFILE), locked = raise_limit(RLIMIT_MEMLOCK);
    uint64_t wanted = (uint64_t)config->server.connections_max + SPARE_DESCRIPTORS;

    if (files < wanted)
        kvt_log_warn("limits: %llu open files are allowed, %llu may be wanted: raise LimitNOFILE",
                     (unsigned long long)files, (unsigned long long)wanted);
    if (locked < config->l2.bytes && geteuid() != 0) {
        char text[KVT_SIZE_TEXT_BYTES];

        kvt_size_format_short(locked, text);
        kvt_log_warn("limits: %s may be locked, less than L2: set LimitMEMLOCK=infinity", text);
    }
    return 0;
}

static int start_guard(void *ctx)
{
    struct kvt_daemon *daemon = ctx;
    int r = kvt_guard_install();

    if (r == 0)
        return 0;
    kvt_log_error("guard: the SIGBUS handler cannot be installed: %s", strerror(-r));
    return fail(daemon, KVT_EXIT_FAILURE, r);
}

static void refuse_second(struct kvt_daemon *daemon, const char *what, int pid)
{
    if (pid > 0)
        kvt_log_error("%s: another daemon is running there, pid %d", what, pid);
    else
        kvt_log_error("%s: another daemon is running there", what);
    daemon->exit = KVT_EXIT_RUNNING;
}

/* Asks before the pools are made whether somebody serves already: two pools at once could take the
 * machine's memory. The server's lock decides again, for two that start at the same time. */
static int start_live_check(void *ctx)
{
    struct kvt_daemon *daemon = ctx;
    const char *path = daemon->config->server.socket;
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    struct ucred peer = {.pid = 0};
    socklen_t peer_bytes = sizeof(peer);
    kvt_autoclose int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);

    KVT_ASSERT(strlen(path) < sizeof(address.sun_path));
    memcpy(address.sun_path, path, strlen(path) + 1);
    if (fd < 0 || connect(fd, (const struct sockaddr *)&address, sizeof(address)) != 0)
        return 0;
    (void)getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &peer_bytes);
    refuse_second(daemon, path, peer.pid);
    return kvt_trace(-EADDRINUSE);
}

/* ---- tiers ---------------------------------------------------------------------------------- */

static int start_doorbell(void *ctx)
{
    struct kvt_daemon *daemon = ctx;
    int r = kvt_doorbell_init(&daemon->doorbell);

    if (r == 0)
        return 0;
    kvt_log_error("engine: no eventfd: %s", strerror(-r));
    return fail(daemon, KVT_EXIT_FAILURE, r);
}

static void undo_doorbell(void *ctx)
{
    struct kvt_daemon *daemon = ctx;

    kvt_doorbell_deinit(&daemon->doorbell);
}

static int start_l2(void *ctx)
{
    static const enum kvt_host_pages pages[] = {
        [KVT_CONFIG_PAGES_AUTO] = KVT_HOST_PAGES_AUTO,
        [KVT_CONFIG_PAGES_HUGETLB] = KVT_HOST_PAGES_HUGETLB,
        [KVT_CONFIG_PAGES_THP] = KVT_HOST_PAGES_THP,
        [KVT_CONFIG_PAGES_ANONYMOUS] = KVT_HOST_PAGES_ANONYMOUS,
        [KVT_CONFIG_PAGES_PLAIN] = KVT_HOST_PAGES_PLAIN,
    };
    struct kvt_daemon *daemon = ctx;
    const struct kvt_config *config = daemon->config;
    struct kvt_host_config host = {
        .bytes = kvt_round_up(config->l2.bytes, KVT_HUGE_PAGE_BYTES),
        .pages = pages[config->l2.pages],
        .is_locked_required = config->l2.lock == KVT_CONFIG_LOCK_REQUIRED,
        .inflight_max = HOST_INFLIGHT_MAX,
        .doorbell = &daemon->doorbell,
    };
    char size[KVT_SIZE_TEXT_BYTES];
    int r;

    host.numa_nodes_count = kvt_device_numa_nodes(daemon->l1.found, host.numa_nodes);
    r = kvt_host_open(&daemon->tiers[KVT_TIER_HOST], &host);
    kvt_size_format_short(host.bytes, size);
    if (r == 0) {
        kvt_log_info("L2: %s, %s", size, daemon->tiers[KVT_TIER_HOST]->detail);
        return 0;
    }
    kvt_log_error("L2: %s cannot be had: %s%s", size, strerror(-r),
                  r == -ENOTSUP ? " (no transparent huge pages for that memory: see tiers.l2.pages)"
                  : host.is_locked_required
                      ? " (tiers.l2.lock is required: is LimitMEMLOCK=infinity set?)"
                  : config->l2.pages == KVT_CONFIG_PAGES_HUGETLB
                      ? " (tiers.l2.pages is hugetlb: is vm.nr_hugepages large enough?)"
                      : " (lower tiers.l2.bytes)");
    return fail(daemon, KVT_EXIT_FAILURE, r);
}

static void undo_l2(void *ctx)
{
    struct kvt_daemon *daemon = ctx;

    daemon->tiers[KVT_TIER_HOST] = kvt_tier_close(daemon->tiers[KVT_TIER_HOST]);
}

/* ---- engine --------------------------------------------------------------------------------- */

static void *engine_thread(void *ctx)
{
    kvt_engine_run(ctx);
    return NULL;
}

static struct kvt_store_config store_config(const struct kvt_daemon *daemon)
{
    static const enum kvt_write_policy writes[] = {
        [KVT_CONFIG_WRITE_BACK] = KVT_WRITE_BACK,
        [KVT_CONFIG_WRITE_THROUGH] = KVT_WRITE_THROUGH,
        [KVT_CONFIG_WRITE_SELECTIVE] = KVT_WRITE_SELECTIVE,
    };
    const struct kvt_config *config = daemon->config;
    struct kvt_store_config store = {
        .host_memory = kvt_host_memory(daemon->tiers[KVT_TIER_HOST]),
        .write_policy = writes[config->l3.write],
        .selective_touches = config->l3.selective_touches,
        .write_budget_bytes_per_s = config->l3.write_budget_bytes_per_s,
        .scrub_bytes_per_s = config->l3.scrub_bytes_per_s,
        .is_verify_l2_always = config->l2.verify == KVT_CONFIG_VERIFY_ALWAYS,
        .stamp_first = daemon->l3.stamp_first,
        .stamp_end = daemon->l3.stamp_end,
        .stripe_blocks = config->l3.stripe_blocks,
        .lost_after_ns = config->l3.lost_after_ns,
    };

    memcpy(store.store_id, daemon->l3.store_id, sizeof(store.store_id));
    memcpy(store.indexes, daemon->l3.indexes, sizeof(store.indexes));
    for (uint32_t i = 0; i < KVT_TIERS_COUNT; i++) {
        store.tiers[i] = daemon->tiers[i];
        /* L3's is a part of its format: where slots are follows from it. */
        store.slab_unit_bytes[i] =
            i == KVT_TIER_DISK ? KVT_HUGE_PAGE_BYTES : (uint32_t)config->l2.slab_unit_bytes;
    }
    /* What lies on L3 outlives the configuration, and a scan reckons with this one. */
    store.slab_unit_bytes[KVT_TIER_DISK] = KVT_SLAB_UNIT_L3_BYTES;
    return store;
}

static int start_engine(void *ctx)
{
    struct kvt_daemon *daemon = ctx;
    const struct kvt_config *config = daemon->config;
    struct kvt_engine_config engine = {
        .store = store_config(daemon),
        .index_memory_bytes = config->index.memory_bytes,
        .boot_id = daemon->boot_id,
        .version = daemon->version,
        .ops_max = config->server.requests_max,
        .lease_ns_default = config->limits.lease_default_ns,
        .lease_ns_max = config->limits.lease_max_ns,
        .ticket_ns_default = config->limits.ticket_default_ns,
        .ticket_ns_max = config->limits.ticket_max_ns,
        .leases_per_session_max = config->limits.leases_per_session,
        .tickets_per_session_max = config->limits.tickets_per_session,
        .leased_bytes_per_engine_max = config->limits.leased_bytes_per_engine,
        .reserved_bytes_per_engine_max = config->limits.reserved_bytes_per_engine,
        .held_bytes_per_engine_max = config->limits.held_bytes_per_engine,
        .namespaces_max = config->limits.namespaces,
        .roots_max = config->limits.roots,
        .namespaces = daemon->l3.namespaces,
        .namespaces_missing = daemon->l3.namespaces_missing,
        .l1 = kvt_start_l1_stats(daemon),
        .gpu_memory = kvt_start_l1_gpu_memory(daemon),
        .load_wait_ns = config->l3.load_wait_ns,
        .notify = kvt_server_notify,
        .doorbell = &daemon->doorbell,
    };
    int r;

    for (uint32_t i = 0; i < daemon->l3.devices_count; i++)
        engine.devices[i] = (struct kvt_engine_device){
            .path = daemon->l3.devices[i].path,
            .index_path = daemon->l3.devices[i].index_path,
            .state = daemon->l3.states[i],
            .endurance_bytes = config->l3.endurance_bytes,
        };
    if (getrandom(&engine.seed, sizeof(engine.seed), 0) != sizeof(engine.seed))
        return fail(daemon, KVT_EXIT_FAILURE, -EIO);
    r = kvt_engine_new(&daemon->engine, &engine);
    if (r < 0) {
        kvt_log_error("engine: %s%s", strerror(-r),
                      r == -EINVAL ? " (is index.memory too small for limits.roots and L2?)" : "");
        return fail(daemon, KVT_EXIT_FAILURE, r);
    }
    r = -pthread_create(&daemon->engine_thread, NULL, engine_thread, daemon->engine);
    if (r < 0) {
        kvt_log_error("engine: no thread: %s", strerror(-r));
        daemon->engine = kvt_engine_free(daemon->engine);
        return fail(daemon, KVT_EXIT_FAILURE, r);
    }
    (void)pthread_setname_np(daemon->engine_thread, "engine");
    kvt_engine_service(daemon->engine, &daemon->service);
    return 0;
}

static void undo_engine(void *ctx)
{
    struct kvt_daemon *daemon = ctx;
    uint64_t now_ns = kvt_clock_mono_ns();
    uint64_t drain_deadline_ns = now_ns;

    /* A tenth of the time is kept for what comes after draining. */
    if (daemon->config->stop.is_drain && daemon->stop_deadline_ns > now_ns)
        drain_deadline_ns = now_ns + (daemon->stop_deadline_ns - now_ns) / 10 * 9;
    kvt_engine_stop(daemon->engine, drain_deadline_ns);
    KVT_ASSERT(pthread_join(daemon->engine_thread, NULL) == 0);
    daemon->engine = kvt_engine_free(daemon->engine);
}

/* ---- server --------------------------------------------------------------------------------- */

static int start_server(void *ctx)
{
    struct kvt_daemon *daemon = ctx;
    const struct kvt_config *config = daemon->config;
    const struct kvt_server_config server = {
        .socket_path = config->server.socket,
        .admin_socket_path =
            config->server.admin_socket[0] == '\0' ? NULL : config->server.admin_socket,
        .socket_mode = config->server.socket_mode,
        .admin_socket_mode = config->server.admin_socket_mode,
        .threads = config->server.threads,
        .ops_max = config->server.requests_max,
        .connections_max = config->server.connections_max,
        .streams_max = KVT_STREAMS_PER_CONNECTION_MAX,
        .deadline_ns_max = config->server.deadline_max_ns,
        .is_reply_inline = config->server.reply == KVT_CONFIG_REPLY_INLINE,
        .boot_id = daemon->boot_id,
        .service = &daemon->service,
    };
    int pid = 0;
    int r = kvt_server_open(&daemon->server, &server, &pid);

    if (r == 0)
        return 0;
    if (r == KVT_SERVER_E_LIVE) {
        refuse_second(daemon, server.socket_path, pid);
        return kvt_trace(-EADDRINUSE);
    }
    kvt_log_error("server: %s (and what lies beside it) cannot be made: %s: the directory must "
                  "exist and be writable for uid %u",
                  server.socket_path, strerror(-r), (unsigned)geteuid());
    return fail(daemon, KVT_EXIT_FAILURE, r);
}

static void undo_server(void *ctx)
{
    struct kvt_daemon *daemon = ctx;
    uint64_t now_ns = kvt_clock_mono_ns();
    uint64_t left_ns = daemon->stop_deadline_ns > now_ns ? daemon->stop_deadline_ns - now_ns : 0;

    kvt_server_stop(daemon->server, KVT_MIN(left_ns / 4, SERVER_GRACE_NS_MAX));
    daemon->server = kvt_server_close(daemon->server);
}

/* ---- the table ------------------------------------------------------------------------------ */

static const struct kvt_step steps[] = {
    {"limits", start_limits, NULL},
    {"guard", start_guard, NULL},
    {"live check", start_live_check, NULL},
    {"doorbell", start_doorbell, undo_doorbell},
    {"GPUs", kvt_start_gpus, kvt_undo_gpus},
    {"L2", start_l2, undo_l2},
    {"L1", kvt_start_l1, kvt_undo_l1},
    {"L3", kvt_start_l3, kvt_undo_l3},
    {"index", kvt_start_index, kvt_undo_index},
    {"engine", start_engine, undo_engine},
    {"server", start_server, undo_server},
};

int kvt_daemon_start(struct kvt_daemon *ret_daemon, const struct kvt_config *config,
                     const char *version)
{
    *ret_daemon = (struct kvt_daemon){
        .config = config,
        .version = version,
        .exit = KVT_EXIT_FAILURE,
        .doorbell = KVT_DOORBELL_NULL,
    };
    if (getrandom(&ret_daemon->boot_id, sizeof(ret_daemon->boot_id), 0) !=
        sizeof(ret_daemon->boot_id))
        return kvt_trace(-EIO);
    return kvt_steps_start(steps, KVT_COUNT_OF(steps), ret_daemon);
}

void kvt_daemon_stop(struct kvt_daemon *daemon, uint64_t deadline_ns)
{
    daemon->stop_deadline_ns = deadline_ns;
    kvt_steps_stop(steps, KVT_COUNT_OF(steps), daemon);
}

void kvt_daemon_describe(const struct kvt_daemon *daemon, char *ret_text, size_t bytes)
{
    char sizes[KVT_TIERS_COUNT][KVT_SIZE_TEXT_BYTES];

    for (uint32_t i = 0; i < KVT_TIERS_COUNT; i++) {
        if (daemon->tiers[i] == NULL)
            (void)snprintf(sizes[i], sizeof(sizes[i]), "off");
        else
            kvt_size_format_short(daemon->tiers[i]->capacity_bytes, sizes[i]);
    }
    (void)snprintf(ret_text, bytes, "L1 %s, L2 %s, L3 %s, on %s", sizes[KVT_TIER_DEVICE],
                   sizes[KVT_TIER_HOST], sizes[KVT_TIER_DISK], daemon->config->server.socket);
}
