/* The configuration: one struct of plain values, filled from defaults, then a YAML file, then
 * `--set key=value`. One table (config_keys.c) says for each key its kind, default and bounds; the
 * parser, the printer and the documentation's test all read that table.
 *
 * Strict: an unknown key, a key given twice, a number without unit are errors that name file, line
 * and what would be right. Every problem is reported, not only the first. Nothing is read again
 * after start. Init-only: main thread; afterwards the struct is read-only. */
#pragma once

#include "daemon/base/def.h"
#include "daemon/base/limits.h"
#include "daemon/base/log.h"

#define KVT_CONFIG_TEXT_BYTES 256u
#define KVT_CONFIG_PATHS_BYTES (KVT_ZONES_MAX * KVT_CONFIG_TEXT_BYTES) /* "/a/l3, /b/l3" */
#define KVT_CONFIG_FILE_BYTES_MAX (1u << 20)
#define KVT_CONFIG_MILLI_PCT_ALL 100000u

enum kvt_config_reply { KVT_CONFIG_REPLY_THREAD, KVT_CONFIG_REPLY_INLINE };
enum kvt_config_l1 { KVT_CONFIG_L1_NONE, KVT_CONFIG_L1_HOST, KVT_CONFIG_L1_CUDA };
struct kvt_config_share { /* a size, or a part of something that is not known yet */
    uint64_t bytes;
    uint64_t milli_pct; /* thousandths of a percent, when bytes is 0; both 0: nothing */
};
enum kvt_config_pages { /* as enum kvt_host_pages */
                        KVT_CONFIG_PAGES_AUTO,
                        KVT_CONFIG_PAGES_HUGETLB,
                        KVT_CONFIG_PAGES_THP,
                        KVT_CONFIG_PAGES_ANONYMOUS,
                        KVT_CONFIG_PAGES_PLAIN
};
enum kvt_config_lock { KVT_CONFIG_LOCK_REQUIRED, KVT_CONFIG_LOCK_TRY };
enum kvt_config_verify {
    KVT_CONFIG_VERIFY_ALWAYS,
    KVT_CONFIG_VERIFY_ADOPTED,
    KVT_CONFIG_VERIFY_OFF
};
enum kvt_config_write {
    KVT_CONFIG_WRITE_BACK,
    KVT_CONFIG_WRITE_THROUGH,
    KVT_CONFIG_WRITE_SELECTIVE
};

/* Choices are uint32_t so that one table can fill them. */
struct kvt_config {
    struct {
        char socket[KVT_CONFIG_TEXT_BYTES], admin_socket[KVT_CONFIG_TEXT_BYTES];
        uint32_t socket_mode, admin_socket_mode;
        uint32_t threads, connections_max, requests_max;
        uint64_t deadline_max_ns;
        uint32_t reply;
    } server;
    struct {
        uint64_t memory_bytes;
    } index;
    struct {
        uint32_t backend;
        struct kvt_config_share size; /* host: of RAM. cuda: of each GPU's memory */
        /* cuda alone */
        char gpus[KVT_CONFIG_TEXT_BYTES]; /* "all", or indices and UUIDs */
        uint64_t headroom_bytes, staging_bytes;
        uint32_t streams, cpu_threads;
        uint64_t inflight_bytes, crossover_bytes;
        uint64_t retry_min_ns, retry_max_ns;
        bool is_export;
    } l1;
    struct {
        uint64_t bytes;
        uint32_t pages, lock, verify;
        uint64_t slab_unit_bytes;
    } l2;
    struct {
        char paths[KVT_CONFIG_PATHS_BYTES]; /* kvt_config_devices takes it apart */
        uint64_t bytes;                     /* of each device, its index counted */
        char index_dir[KVT_CONFIG_TEXT_BYTES];
        uint64_t index_bytes;
        uint64_t inflight_bytes;
        uint32_t stripe_blocks;
        uint32_t write;
        uint64_t write_budget_bytes_per_s;
        uint32_t selective_touches;
        uint64_t endurance_bytes; /* of each device; 0: not known */
        uint64_t scrub_bytes_per_s;
        uint64_t load_wait_ns;
        uint64_t lost_after_ns;
        uint64_t retry_min_ns, retry_max_ns;
        /* Options of one start, not keys: --rebuild-l3, --format. */
        bool is_rebuild_wanted, is_format_wanted;
    } l3;
    struct {
        uint64_t lease_default_ns, lease_max_ns, ticket_default_ns, ticket_max_ns;
        uint32_t leases_per_session, tickets_per_session;
        uint64_t leased_bytes_per_engine, reserved_bytes_per_engine, held_bytes_per_engine;
        uint32_t namespaces, roots;
    } limits;
    struct {
        uint64_t deadline_ns;
        bool is_drain;
    } stop;
    struct {
        uint32_t level;
    } log;
};

/* Called once a problem, with one line without an end of line: "kvtierd.yaml:12: tiers.l2.bytes:
 * "4G" has no unit or an unknown one (units: B, KiB, MiB, GiB, TiB)". */
struct kvt_config_report {
    void (*problem)(void *ctx, const char *line);
    void *ctx;
};

/* Defaults. */
void kvt_config_init(struct kvt_config *ret_config);
/* 0; -EINVAL and every problem was reported; or -errno of reading (reported too). */
KVT_MUST_USE int kvt_config_load(struct kvt_config *config, const char *path,
                                 const struct kvt_config_report *report);
/* @assignment is "tiers.l2.bytes=4GiB". 0, or -EINVAL (reported). */
KVT_MUST_USE int kvt_config_set(struct kvt_config *config, const char *assignment,
                                const struct kvt_config_report *report);

/* One device of L3: where its data and its index lie, and how large each is. */
struct kvt_config_device {
    char path[KVT_CONFIG_TEXT_BYTES];
    char index_path[2 * KVT_CONFIG_TEXT_BYTES + 8]; /* "" for a raw device without index_dir */
    bool is_raw;                                    /* below /dev, by its name */
    uint64_t data_bytes, index_bytes; /* tiers.l3.bytes in all, whole KVT_DIO_ALIGN_BYTES each;
                                         data_bytes 0: the index leaves nothing */
};
/* The devices in the order of tiers.l3.path; returns how many, 0 when L3 is off. */
uint32_t kvt_config_devices(const struct kvt_config *config,
                            struct kvt_config_device ret_devices[KVT_ZONES_MAX]);

#define KVT_CONFIG_LINE_BYTES 256u /* of one line for people */
/* Whether keys are set that are for GPUs alone while tiers.l1.backend is not cuda: allowed, so that
 * an operator can switch L1 off by one key, and worth a line. */
bool kvt_config_idle_keys(const struct kvt_config *config, char ret_line[KVT_CONFIG_LINE_BYTES]);

/* Memory that the machine or the cgroup allows; 0 when unknown. */
uint64_t kvt_config_ram_bytes(void);
/* @share as bytes, where its percentage is one of @whole_bytes. */
uint64_t kvt_config_share_bytes(const struct kvt_config_share *share, uint64_t whole_bytes);
/* How many GPUs tiers.l1.gpus names; 0: all. */
uint32_t kvt_config_gpus_count(const struct kvt_config *config);

/* Where one file of L3 lies, or is to lie. */
struct kvt_config_place {
    bool is_known;              /* false: nothing could be found out */
    bool is_raw;                /* a block device, whatever its name says */
    uint64_t file_system, file; /* files with both the same are one; file 0: not there yet */
    uint64_t free_bytes;        /* of the file system; of a block device: its size */
    uint64_t own_bytes;         /* what the file that is there takes of it */
};

/* What the machine has; read once, passed in, so that the checks are a pure function. */
struct kvt_config_facts {
    uint64_t memory_bytes;           /* of the machine, or the cgroup's limit where it is lower */
    uint64_t memory_available_bytes; /* what can be had now without swapping */
    uint32_t gpus_count;             /* that the NVIDIA driver knows; 0: no driver, too */
    const char *memory_bound; /* which of them bounds: "MemAvailable", "the cgroup's limit" */
    struct kvt_config_place data[KVT_ZONES_MAX], index[KVT_ZONES_MAX]; /* a device of L3 each */
};
void kvt_config_facts_read(const struct kvt_config *config, struct kvt_config_facts *ret_facts);
/* Relations between values, and with the machine. 0, or -EINVAL (each one reported). */
KVT_MUST_USE int kvt_config_check(const struct kvt_config *config,
                                  const struct kvt_config_facts *facts,
                                  const struct kvt_config_report *report);

/* All keys with their values as YAML that load gives back. */
void kvt_config_print(const struct kvt_config *config, int fd);
/* The same keys with kind, default and bounds, one a line, for documentation. */
void kvt_config_print_keys(int fd);
