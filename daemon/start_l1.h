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
    struct kvt_device_config config; /* as it was opened */
    struct kvt_device_report report; /* what was found; of backend none: nothing */
};

/* Before there is an L2: the nodes that its memory is to be near to, for the GPUs. 0: anywhere. */
uint32_t kvt_start_l1_numa_nodes(struct kvt_daemon *daemon, int ret_nodes[KVT_ZONES_MAX]);
int kvt_start_l1(void *ctx); /* steps: see daemon/base/steps.h */
void kvt_undo_l1(void *ctx);
/* What the engine tells of it in Stats. */
struct kvt_engine_l1 kvt_start_l1_stats(const struct kvt_daemon *daemon);
/* How the engine opens memory of engines on GPUs; until the tier is closed. */
struct kvt_engine_gpu_memory kvt_start_l1_gpu_memory(const struct kvt_daemon *daemon);
