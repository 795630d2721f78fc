/* The doctor: facts of this machine against what the daemon needs.
 *
 *   gather (doctor_facts.c: reads /proc, /sys, unit files, below a root that tests replace)
 *     -> struct kvt_ctl_facts, struct kvt_ctl_pools
 *     -> checks (doctor_checks.c, doctor_places.c) -> struct kvt_ctl_report -> view
 *
 * Checks of memory and limits are pure functions of facts and pools. When a daemon runs, the limits
 * are those of its process; without one, those of this process and of the unit file. One thread. */
#pragma once

#include "tools/kvtier-ctl/ctl.h"

enum kvt_ctl_level { KVT_CTL_LEVEL_OK, KVT_CTL_LEVEL_WARN, KVT_CTL_LEVEL_BAD };

struct kvt_ctl_finding {
    enum kvt_ctl_level level;
    const char *what; /* static: "huge pages" */
    char text[320];   /* the state, with numbers */
    char remedy[512]; /* "" when there is nothing to do */
};

#define KVT_CTL_FINDINGS_MAX 256u /* 16 devices and 32 GPUs have several each */
struct kvt_ctl_report {
    uint32_t count;
    struct kvt_ctl_finding findings[KVT_CTL_FINDINGS_MAX];
};

/* Appends a finding; text is printf-like, the remedy is added by kvt_ctl_remedy_add. */
void kvt_ctl_found(struct kvt_ctl_report *report, enum kvt_ctl_level level, const char *what,
                   const char *format, ...) KVT_PRINTF(4, 5);
/* Sets the remedy of the newest finding. */
void kvt_ctl_found_remedy(struct kvt_ctl_report *report, const char *format, ...) KVT_PRINTF(2, 3);
enum kvt_ctl_level kvt_ctl_report_worst(const struct kvt_ctl_report *report);

#define KVT_CTL_UNKNOWN UINT64_MAX /* a number that could not be read */
#define KVT_CTL_UNLIMITED (UINT64_MAX - 1)

#define KVT_CTL_GPU_NODES_MAX 34u
struct kvt_ctl_gpu_facts {
    bool has_driver;         /* NVIDIA's kernel module is loaded */
    char driver_version[32]; /* "580.65.06"; "" unknown */
    uint32_t gpus_count;
    uint32_t nodes_count;
    struct kvt_ctl_gpu_node { /* that the daemon has to open */
        char path[32];
        int error; /* 0: it may; ENOENT, EACCES */
        unsigned mode;
    } nodes[KVT_CTL_GPU_NODES_MAX];
};

struct kvt_ctl_facts {
    uint64_t memory_bytes, hugepages_total, hugepages_free, hugepage_bytes;
    char thp_enabled[24], shmem_enabled[24]; /* the chosen word; "" unknown */
    uint64_t daemon_pid;                     /* 0: no daemon runs */
    uint64_t memlock_bytes, nofile;          /* of the daemon, else of this process */
    bool is_memlock_exempt;                  /* CAP_IPC_LOCK */
    char unit_path[256];                     /* the unit file, "" none */
    char unit_memlock[64];                   /* its LimitMEMLOCK=, "" not set */
    char unit_private_devices[16];           /* its PrivateDevices=, "" not set */
    uint64_t io_uring_disabled;              /* the sysctl; KVT_CTL_UNKNOWN: this kernel has none */
    int io_uring_error;                      /* errno of io_uring_setup in this process; 0: works */
    uint64_t cgroup_limit_bytes;             /* of the daemon's cgroup and those above it */
    char cgroup_path[256];                   /* the one with the lowest limit */
    uint32_t cgroup_version;                 /* 0: none */
    struct kvt_ctl_gpu_facts gpu;
};

/* Reads everything below @sysroot ("" in earnest). @pid 0: of this process. */
void kvt_ctl_facts_gather(struct kvt_ctl_facts *ret_facts, const char *sysroot, uint64_t pid);

/* The part of it that is about GPUs. */
void kvt_ctl_gpu_facts_gather(struct kvt_ctl_gpu_facts *ret_facts, const char *sysroot,
                              uint64_t pid);

#define KVT_CTL_YAML_BYTES 4352u /* the longest key or value: 16 paths of 256 bytes */

/* What the daemon has or will take; from the configuration or from Stats. */
struct kvt_ctl_pools {
    const char *source; /* static: "configuration", "running daemon"; NULL: unknown */
    /* L1 as far as it is memory of the machine: with cuda only its pinned staging is, of each GPU
     * (of a running daemon: of all of them). */
    uint64_t l1_bytes, l2_bytes, l3_bytes, index_bytes;
    uint64_t l1_milli_pct; /* of the machine's memory, in thousandths of a percent */
    uint64_t gpu_staging_bytes;
    bool is_cuda;
    bool has_gpus, is_export;          /* tiers.l1.gpus is not all, tiers.l1.export is set */
    char l3_paths[KVT_CTL_YAML_BYTES]; /* as tiers.l3.path; "" unknown or off */
    char l3_index_dir[KVT_CTL_YAML_BYTES];
    char l2_detail[288]; /* of a running daemon: which pages it got */
};

/* From a configuration ("-": standard input), as written or as kvtierd --print-config shows it:
 * KVT_CTL_OK, or KVT_CTL_USAGE with the reason on @err. */
KVT_MUST_USE int kvt_ctl_pools_load(struct kvt_ctl_pools *ret_pools, const char *path, FILE *err);
/* One "a.b.c: value" of a block of nested YAML maps after the other; false at the end. Lists, flow
 * style and multi-line values are passed over. @ret_key and @ret_value of KVT_CTL_YAML_BYTES. */
#define KVT_CTL_YAML_DEPTH 8u
struct kvt_ctl_yaml {
    const char *at; /* terminated text */
    uint32_t depth;
    uint32_t indent[KVT_CTL_YAML_DEPTH];
    uint32_t key_bytes[KVT_CTL_YAML_DEPTH]; /* of the joined key up to each level */
    char key[KVT_CTL_YAML_BYTES];
};
bool kvt_ctl_yaml_next(struct kvt_ctl_yaml *yaml, char ret_value[KVT_CTL_YAML_BYTES]);
void kvt_ctl_pools_from_stats(struct kvt_ctl_pools *ret_pools, const struct kvt_ans_stats *stats);
void kvt_ctl_check_hugepages(struct kvt_ctl_report *report, const struct kvt_ctl_facts *facts,
                             const struct kvt_ctl_pools *pools);
void kvt_ctl_check_memlock(struct kvt_ctl_report *report, const struct kvt_ctl_facts *facts,
                           const struct kvt_ctl_pools *pools);
void kvt_ctl_check_io_uring(struct kvt_ctl_report *report, const struct kvt_ctl_facts *facts);
void kvt_ctl_check_memory(struct kvt_ctl_report *report, const struct kvt_ctl_facts *facts,
                          const struct kvt_ctl_pools *pools);
void kvt_ctl_check_nofile(struct kvt_ctl_report *report, const struct kvt_ctl_facts *facts);
/* Where L3's files lie, or are to lie. */
void kvt_ctl_check_l3(struct kvt_ctl_report *report, const struct kvt_ctl_pools *pools);
/* The socket, and who listens: *ret_pid 0 when nobody does. */
void kvt_ctl_check_socket(struct kvt_ctl_report *report, const char *what, const char *path,
                          uint64_t *ret_pid);
/* A running daemon's own view. */
void kvt_ctl_check_stats(struct kvt_ctl_report *report, const struct kvt_ans_stats *stats);
/* Drivers and device nodes; nothing where no GPU is there and none is wanted. */
void kvt_ctl_check_gpu_machine(struct kvt_ctl_report *report, const struct kvt_ctl_facts *facts,
                               const struct kvt_ctl_pools *pools);
/* A running daemon's GPUs. */
void kvt_ctl_check_gpus(struct kvt_ctl_report *report, const struct kvt_ans_stats *stats);
/* Its devices of L3 and their indexes. */
void kvt_ctl_check_devices(struct kvt_ctl_report *report, const struct kvt_ans_stats *stats);
