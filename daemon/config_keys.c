#include "daemon/config_keys.h"

#include "daemon/base/limits.h"

#define AT(member) offsetof(struct kvt_config, member)
#define MS KVT_NS_PER_MS
#define S KVT_NS_PER_S
#define H (3600 * KVT_NS_PER_S)
#define TIB (1024 * KVT_GIB)
#define EIB (1024 * 1024 * TIB)

/* clang-format off */
const struct kvt_config_key kvt_config_keys[] = {
    {"server.socket", KVT_CONFIG_TEXT, AT(server.socket), "/run/kvtierd/kvtierd.sock"},
    {"server.admin_socket", KVT_CONFIG_TEXT, AT(server.admin_socket), "/run/kvtierd/admin.sock"},
    {"server.socket_mode", KVT_CONFIG_MODE, AT(server.socket_mode), "0660", 0600, 0777},
    {"server.admin_socket_mode", KVT_CONFIG_MODE, AT(server.admin_socket_mode), "0600", 0600, 0777},
    {"server.threads", KVT_CONFIG_COUNT, AT(server.threads), "1", 1, 16},
    {"server.connections_max", KVT_CONFIG_COUNT, AT(server.connections_max), "256",
        1, KVT_CONNECTIONS_MAX},
    {"server.requests_max", KVT_CONFIG_COUNT, AT(server.requests_max), "256", 16, 16384},
    {"server.deadline_max", KVT_CONFIG_DURATION, AT(server.deadline_max_ns), "1min",
        100 * MS, 24 * H},
    {"server.reply", KVT_CONFIG_CHOICE, AT(server.reply), "inline", 0, 0, false,
        {"thread", "inline"}},

    {"index.memory", KVT_CONFIG_SIZE_OF_RAM, AT(index.memory_bytes), "128MiB", 8 * KVT_MIB,
        64 * KVT_GIB},

    {"tiers.l1.backend", KVT_CONFIG_CHOICE, AT(l1.backend), "none", 0, 0, false,
        {"none", "host", "cuda"}},
    {"tiers.l1.bytes", KVT_CONFIG_SHARE, AT(l1.size), "0B", KVT_MIB, 64 * TIB, true},
    {"tiers.l1.gpus", KVT_CONFIG_GPUS, AT(l1.gpus), "all"},
    {"tiers.l1.headroom", KVT_CONFIG_SIZE, AT(l1.headroom_bytes), "1GiB", KVT_MIB, TIB, true},
    {"tiers.l1.staging", KVT_CONFIG_SIZE, AT(l1.staging_bytes), "64MiB", 2 * KVT_MIB, 4 * KVT_GIB},
    {"tiers.l1.streams", KVT_CONFIG_COUNT, AT(l1.streams), "2", 1, 4},
    {"tiers.l1.inflight", KVT_CONFIG_SIZE, AT(l1.inflight_bytes), "256MiB", KVT_MIB, 64 * KVT_GIB},
    {"tiers.l1.crossover", KVT_CONFIG_SIZE, AT(l1.crossover_bytes), "256KiB",
        4 * KVT_KIB, KVT_GIB},
    {"tiers.l1.cpu_threads", KVT_CONFIG_COUNT, AT(l1.cpu_threads), "4", 0, 16},
    {"tiers.l1.retry_min", KVT_CONFIG_DURATION, AT(l1.retry_min_ns), "1s", 10 * MS, H},
    {"tiers.l1.retry_max", KVT_CONFIG_DURATION, AT(l1.retry_max_ns), "1min", 10 * MS, 24 * H},
    {"tiers.l1.export", KVT_CONFIG_BOOL, AT(l1.is_export), "false"},
    {"tiers.l2.bytes", KVT_CONFIG_SIZE_OF_RAM, AT(l2.bytes), "1GiB", 4 * KVT_MIB, 64 * TIB},
    {"tiers.l2.pages", KVT_CONFIG_CHOICE, AT(l2.pages), "auto", 0, 0, false,
        {"auto", "hugetlb", "thp", "anonymous", "plain"}},
    {"tiers.l2.lock", KVT_CONFIG_CHOICE, AT(l2.lock), "try", 0, 0, false, {"required", "try"}},
    {"tiers.l2.verify", KVT_CONFIG_CHOICE, AT(l2.verify), "adopted", 0, 0, false,
        {"always", "adopted", "off"}},
    {"tiers.l2.slab_unit", KVT_CONFIG_SIZE, AT(l2.slab_unit_bytes), "2MiB", 64 * KVT_KIB,
        KVT_HUGE_PAGE_BYTES},
    {"tiers.l3.path", KVT_CONFIG_PATHS, AT(l3.paths), ""},
    {"tiers.l3.bytes", KVT_CONFIG_SIZE_OF_DISK, AT(l3.bytes), "0B", 4 * KVT_MIB, 1024 * TIB, true},
    {"tiers.l3.index_dir", KVT_CONFIG_TEXT, AT(l3.index_dir), ""},
    {"tiers.l3.index_bytes", KVT_CONFIG_SIZE, AT(l3.index_bytes), "0B", 4 * KVT_MIB, TIB, true},
    {"tiers.l3.inflight", KVT_CONFIG_SIZE, AT(l3.inflight_bytes), "0B",
        64 * KVT_KIB, KVT_GIB, true},
    {"tiers.l3.stripe_blocks", KVT_CONFIG_COUNT, AT(l3.stripe_blocks), "16", 1, 1u << 20},
    {"tiers.l3.write", KVT_CONFIG_CHOICE, AT(l3.write), "back", 0, 0, false,
        {"back", "through", "selective"}},
    {"tiers.l3.write_budget", KVT_CONFIG_SIZE, AT(l3.write_budget_bytes_per_s), "0B",
        KVT_MIB, TIB, true},
    {"tiers.l3.selective_touches", KVT_CONFIG_COUNT, AT(l3.selective_touches), "2", 1,
        KVT_TOUCHES_MAX},
    {"tiers.l3.endurance_bytes", KVT_CONFIG_SIZE, AT(l3.endurance_bytes), "0B", KVT_GIB, EIB, true},
    {"tiers.l3.scrub_rate", KVT_CONFIG_SIZE, AT(l3.scrub_bytes_per_s), "0B", KVT_MIB, TIB, true},
    {"tiers.l3.load_wait", KVT_CONFIG_DURATION, AT(l3.load_wait_ns), "10s", MS, H, true},
    {"tiers.l3.lost_after", KVT_CONFIG_DURATION, AT(l3.lost_after_ns), "30s", 10 * MS, 24 * H},
    {"tiers.l3.retry_min", KVT_CONFIG_DURATION, AT(l3.retry_min_ns), "1s", 10 * MS, H},
    {"tiers.l3.retry_max", KVT_CONFIG_DURATION, AT(l3.retry_max_ns), "1min", 10 * MS, 24 * H},

    {"limits.lease_default", KVT_CONFIG_DURATION, AT(limits.lease_default_ns), "30s", MS, 24 * H},
    {"limits.lease_max", KVT_CONFIG_DURATION, AT(limits.lease_max_ns), "10min", MS, 24 * H},
    {"limits.ticket_default", KVT_CONFIG_DURATION, AT(limits.ticket_default_ns), "30s", MS, 24 * H},
    {"limits.ticket_max", KVT_CONFIG_DURATION, AT(limits.ticket_max_ns), "10min", MS, 24 * H},
    {"limits.leases_per_session", KVT_CONFIG_COUNT, AT(limits.leases_per_session), "1024",
        1, 1u << 20},
    {"limits.tickets_per_session", KVT_CONFIG_COUNT, AT(limits.tickets_per_session), "1024",
        1, 1u << 20},
    {"limits.leased_bytes_per_engine", KVT_CONFIG_SIZE_OF_RAM, AT(limits.leased_bytes_per_engine),
        "0B", KVT_MIB, 64 * TIB, true},
    {"limits.reserved_bytes_per_engine", KVT_CONFIG_SIZE_OF_RAM,
        AT(limits.reserved_bytes_per_engine), "0B", KVT_MIB, 64 * TIB, true},
    {"limits.held_bytes_per_engine", KVT_CONFIG_SIZE, AT(limits.held_bytes_per_engine), "0B",
        KVT_MIB, 64 * TIB, true},
    {"limits.namespaces", KVT_CONFIG_COUNT, AT(limits.namespaces), "64", 1, KVT_NAMESPACES_MAX},
    {"limits.roots", KVT_CONFIG_COUNT, AT(limits.roots), "65536", 1, 1u << 24},

    {"stop.deadline", KVT_CONFIG_DURATION, AT(stop.deadline_ns), "30s", 100 * MS, H},
    {"stop.drain", KVT_CONFIG_BOOL, AT(stop.is_drain), "true"},

    {"log.level", KVT_CONFIG_CHOICE, AT(log.level), "info", 0, 0, false,
        {"error", "warn", "info", "debug"}},
};
/* clang-format on */
const uint32_t kvt_config_keys_count = KVT_COUNT_OF(kvt_config_keys);

static_assert(KVT_LOG_LEVELS == 4 && KVT_LOG_DEBUG == 3, "log.level's choices are kvt_log_level");
