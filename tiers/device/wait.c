/* The only place that asks CUDA whether something is over, and whether hands are done. @why changes
 * nothing here: it names the use that depends on the answer, so that a test can drop the wait of
 * one use alone. */
#include "tiers/device/gpu.h"

int kvt_gpu_is_over(const struct kvt_cuda_calls *calls, void *event, enum kvt_gpu_wait why)
{
    int error;

    KVT_ASSERT((unsigned int)why < KVT_GPU_WAITS);
    error = calls->event_query(event);
    if (error == KVT_CUDA_OK)
        return 1;
    return error == KVT_CUDA_NOT_READY ? 0 : -error;
}

bool kvt_gpu_is_back(uint32_t pieces_out, enum kvt_gpu_wait why)
{
    KVT_ASSERT((unsigned int)why < KVT_GPU_WAITS);
    return pieces_out == 0;
}
