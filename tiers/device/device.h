/* L1: arenas in device memory, payload alone. The backend is chosen at start:
 *
 *   host   ordinary memory, one thread: for nodes without a GPU and for tests
 *   cuda   each configured GPU is a zone with a thread of its own (gpu.h); offsets run through all
 *
 * A GPU that is not there, or that cannot be used, is no error of cuda: the report says why, and
 * the daemon goes on without it. A GPU whose context is lost goes out of service; the control
 * thread of the set resets it and takes it back.
 *
 * open, close: init-only (main thread). region and export functions: any thread but the engine's
 * and the tiers' (they block in the driver). info, counters: any thread. */
#pragma once

#include "tiers/device/cuda_calls.h"
#include "tiers/tier.h"

struct kvt_device_found; /* the GPUs that there are */

struct kvt_device_config {
    const char *backend;  /* "host" or "cuda" */
    uint64_t bytes;       /* host: of the arena. cuda: of each GPU; 0 with `pct` */
    uint32_t pct;         /* cuda: instead of bytes, of each GPU's memory: 1 .. 95 */
    uint8_t *host_memory; /* L2, for copies to and from it */
    uint64_t host_memory_bytes;
    uint32_t inflight_max;
    struct kvt_doorbell *doorbell;
    /* cuda only. */
    const char *gpus; /* "all", or "0, 2", or "GPU-1b2c..., 3": indices and UUIDs (a prefix of at
                         least 8 digits will do), in the order of the zones */
    uint64_t headroom_bytes; /* stay free on each GPU beside the arena */
    uint64_t staging_bytes;
    uint64_t inflight_bytes_max;
    uint32_t streams;
    uint32_t crossover_bytes;
    uint32_t cpu_threads;                /* of each GPU, that work on bytes: 0 .. 16 */
    uint64_t retry_min_ns, retry_max_ns; /* between attempts to take a lost GPU back */
    bool is_export_allowed;              /* kvt_device_export */
    const char *sysfs;                   /* NULL: "/sys"; tests have another */
    const char *mps_pipes;               /* NULL: "/tmp/nvidia-mps"; tests have another */
    /* How long close waits for a call of the driver that hangs before it leaves that thread, and
     * all that it may touch, behind; 0: 10 s. */
    uint64_t hang_ns;
    /* A GPU on which copies are queued and none ends for so long is lost: it hangs, and says
     * nothing; 0: 30 s. */
    uint64_t stuck_ns;
    /* Of kvt_device_find with this configuration, until open returns; NULL: open looks itself. */
    const struct kvt_device_found *found;
};
#define KVT_DEVICE_LINE_BYTES 256u /* of one line for people */
#define KVT_DEVICE_GPUS_MAX 64u    /* of a machine that are looked at; KVT_ZONES_MAX can be used */

/* "GPU-1b2c3d4e-....", as nvidia-smi -L has it. Indices are CUDA's, which CUDA_VISIBLE_DEVICES and
 * CUDA_DEVICE_ORDER change: whoever names a GPU to people gives both. */
#define KVT_GPU_UUID_TEXT_BYTES 41u
void kvt_gpu_uuid_text(const uint8_t uuid[KVT_CUDA_UUID_BYTES],
                       char ret_text[KVT_GPU_UUID_TEXT_BYTES]);

enum kvt_gpu_state {
    KVT_GPU_OK = 0,
    KVT_GPU_LOST = 1,    /* out of service: its context was lost; it is tried again */
    KVT_GPU_REFUSED = 2, /* not used since the start: `why` says why */
};

struct kvt_device_gpu { /* for people, statistics and kvtier-ctl devices; fixed but for state, why
                         */
    struct kvt_cuda_info info;
    int index;     /* CUDA's; -1: no GPU has the UUID that the configuration names */
    int numa_node; /* -1: not known */
    enum kvt_gpu_state state;
    bool is_left_out; /* refused, for KVT_ZONES_MAX others are used */
    char why[160];    /* "" when it is in service */
    uint64_t arena_bytes, staging_bytes;
    bool is_host_pinned; /* now: its copy engine reaches L2; else copies go through staging */
    bool is_exported;    /* now: engines may read the arena in place */
    uint64_t lost_ns;    /* CLOCK_MONOTONIC when it was lost; 0 */
    const struct kvt_gpu_counters *counters;       /* NULL: refused */
    const struct kvt_tier_counters *tier_counters; /* NULL: refused */
};

#define KVT_DEVICE_PIN_WHY_BYTES 160u

struct kvt_device_report {                  /* what open found */
    bool has_cuda;                          /* of this build */
    int driver_version, runtime_version;    /* 13000 is 13.0; 0: none */
    uint32_t gpus_count;                    /* found and configured, used or refused */
    uint32_t left_out_count;                /* of those */
    bool is_host_pinned;                    /* then; kvt_device_host_pin is what holds now */
    char pin_why[KVT_DEVICE_PIN_WHY_BYTES]; /* why L2 is not pinned */
    char why[KVT_DEVICE_LINE_BYTES]; /* no GPU is used at all: the one line that says why and what
                                        to do; else "" */
    /* When nothing was opened: each GPU that was found or named, and why it is not used. Else
     * kvt_device_gpu has them behind those that are. */
    uint32_t refused_count;
    struct kvt_device_gpu refused[KVT_DEVICE_GPUS_MAX];
};

#define KVT_DEVICE_E_NONE 1 /* cuda: no GPU can be used: report->why. Nothing was opened */
/* 0; KVT_DEVICE_E_NONE; -EINVAL: the configuration makes no sense (report->why), -ENOMEM.
 * *ret_report is set in every case. */
KVT_MUST_USE int kvt_device_open(struct kvt_tier **ret_tier, const struct kvt_device_config *config,
                                 struct kvt_device_report *ret_report);

/* Looks for the GPUs of @config, once for all that want to know of them before L1 is opened. Makes
 * no context on a GPU. *ret_found is NULL for another backend than cuda. 0, or -ENOMEM; that no GPU
 * can be used is what open says. */
KVT_MUST_USE int kvt_device_find(struct kvt_device_found **ret_found,
                                 const struct kvt_device_config *config);
struct kvt_device_found *kvt_device_found_free(struct kvt_device_found *found); /* NULL-proof */
/* Nodes of host memory that GPUs are near to, each once, in the order of the GPUs, for the placing
 * of L2 before it is made; 0: not known, or a machine of one node. */
uint32_t kvt_device_numa_nodes(const struct kvt_device_found *found, int ret_nodes[KVT_ZONES_MAX]);

/* The GPU of zone @idx (0 .. zones - 1), then those that were refused. False: no more. Of a tier of
 * another backend, or NULL: false. */
bool kvt_device_gpu(const struct kvt_tier *tier, uint32_t idx, struct kvt_device_gpu *ret_gpu);

struct kvt_device_host_pin {
    bool is_pinned;                     /* every GPU in service reaches L2 by its copy engine */
    char why[KVT_DEVICE_PIN_WHY_BYTES]; /* why not; "" */
};
/* As it is now: L2 is pinned in the context of one GPU, and may be lost with it, or not be pinned
 * again. False: @tier is of another backend, or NULL. Any thread. */
bool kvt_device_host_pin(const struct kvt_tier *tier, struct kvt_device_host_pin *ret_pin);

/* ---- memory of engines ------------------------------------------------------------------------
 */

struct kvt_device_memory { /* what a client says of it */
    uint8_t handle[KVT_CUDA_IPC_HANDLE_BYTES];
    uint8_t uuid[KVT_CUDA_UUID_BYTES];
    uint64_t offset_bytes, bytes;
};
enum {                            /* of kvt_device_region_open; text for the client in ret_why */
       KVT_REGION_E_NO_GPU = 16,  /* no such GPU here, or not configured, or no cuda backend */
       KVT_REGION_E_LOST = 17,    /* the GPU is out of service: try again later */
       KVT_REGION_E_HANDLE = 18,  /* CUDA does not open that handle */
       KVT_REGION_E_OUTSIDE = 19, /* offset + bytes is not inside the allocation */
       KVT_REGION_E_MANY = 20,    /* too many handles are open on the GPU: try again later */
};
#define KVT_DEVICE_WHY_BYTES 200u
/* Opens the memory on its GPU and fills a region of it. @tier: NULL is a daemon without L1. */
KVT_MUST_USE int kvt_device_region_open(struct kvt_tier *tier,
                                        const struct kvt_device_memory *memory,
                                        struct kvt_region *ret_region,
                                        char ret_why[KVT_DEVICE_WHY_BYTES]);
/* No transfer uses it any more. Of an incarnation that is gone: nothing. */
void kvt_device_region_close(struct kvt_tier *tier, struct kvt_region *region);

/* ---- reading L1 in place ----------------------------------------------------------------------
 */

struct kvt_device_export { /* one arena */
    uint8_t handle[KVT_CUDA_IPC_HANDLE_BYTES];
    uint8_t uuid[KVT_CUDA_UUID_BYTES];
    uint64_t bytes;
    uint32_t incarnation;
};
/* The arena of zone @zone. False: exports are not allowed, the zone is out of service, or the
 * backend has none. Does not block: the handle is made when the arena is. Any thread. */
bool kvt_device_export(const struct kvt_tier *tier, uint32_t zone,
                       struct kvt_device_export *ret_export);
