/* In place of tiers/device/wait.c: one kind of wait is not waited for. CUDA is asked all the same,
 * so that time goes on as it does. */
#include "tests/device/wait_dropped.h"

enum kvt_gpu_wait kvt_gpu_wait_dropped = KVT_GPU_WAITS;

int kvt_gpu_is_over(const struct kvt_cuda_calls *calls, void *event, enum kvt_gpu_wait why)
{
    int error = calls->event_query(event);

    if (error == KVT_CUDA_NOT_READY)
        return why == kvt_gpu_wait_dropped ? 1 : 0;
    return error == KVT_CUDA_OK ? 1 : -error;
}

bool kvt_gpu_is_back(uint32_t pieces_out, enum kvt_gpu_wait why)
{
    return pieces_out == 0 || why == kvt_gpu_wait_dropped;
}
