/* L1's part of start and stop: its memory, what the log says of each GPU, and how much of it there
 * is. A GPU that is not there or cannot be used is no error: one line says why, and the daemon goes
 * on with the others, or with L2 and L3. Only a configuration that makes no sense, and a host
 * backend without its memory, end the start. Main thread only. */
#pragma once

#include "daemon/config.h"
#include "daemon/engine/engine.h"
#include "tiers/device/device.h"

struct kvt_daemon;

struct kvt_daemon_l1 {
    struct kvt_device_found *found;  /* from before L2 to L1; NULL: L1 looks itself */
    struct kvt_device_config config; /* as it was opened */
    struct kvt_device_report report; /* what was found; of backend none: nothing */
};

/* Steps, see daemon/base/steps.h. GPUs are looked for once: before L2 is made, which is to be near
 * to them (kvt_device_numa_nodes), and L1 takes over what was found. */
int kvt_start_gpus(void *ctx);
void kvt_undo_gpus(void *ctx);
int kvt_start_l1(void *ctx);
void kvt_undo_l1(void *ctx);
/* What the engine tells of it in Stats. */
struct kvt_engine_l1 kvt_start_l1_stats(const struct kvt_daemon *daemon);
/* How the engine opens memory of engines on GPUs; until the tier is closed. */
struct kvt_engine_gpu_memory kvt_start_l1_gpu_memory(const struct kvt_daemon *daemon);
