/* The counterpart of wait_dropped.c for the build with the real wait.c. */
#include "tests/device/wait_dropped.h"

enum kvt_gpu_wait kvt_gpu_wait_dropped = KVT_GPU_WAITS;
