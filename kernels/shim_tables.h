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

/* Never NULL. Calls are done when they return; any thread. */
const struct kvt_kernels *kvt_kernels_shim(enum kvt_shim_kind kind);
