/* Which wait of the GPU's thread is dropped in this process; KVT_GPU_WAITS: none. In a build with
 * tiers/device/wait.c it does nothing. */
#pragma once

#include "tiers/device/gpu.h"

extern enum kvt_gpu_wait kvt_gpu_wait_dropped;
