/* The source of the GPU's kernels on host threads, as tables like any other, for tests. */
#pragma once

#include "kernels/kvt_kernels.h"

enum kvt_shim_kind {
    KVT_SHIM_PLAIN = 0,   /* one host thread, the shape that a GPU would get */
    KVT_SHIM_FEW = 1,     /* one host thread, at most three blocks: every stride is walked */
    KVT_SHIM_THREADS = 2, /* neighbouring threads of the kernel on different host threads at the
                             same time: what two of them both touch is a race that TSan reports */
};
#define KVT_SHIM_KINDS 3

/* How often the kernels' source loaded and stored 1, 2, 4, 8 and 16 bytes of payloads, pools and
 * scales (jobs, pieces and ids are read as C reads them; a check is added, not stored). */
struct kvt_shim_traffic {
    uint64_t loads[5], stores[5];
};
/* By the calling thread since it last asked. */
void kvt_shim_traffic_take(struct kvt_shim_traffic *ret_traffic);

/* Never NULL. Calls are done when they return; any thread. */
const struct kvt_kernels *kvt_kernels_shim(enum kvt_shim_kind kind);
