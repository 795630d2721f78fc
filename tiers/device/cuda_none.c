/* The CUDA backend in a build without CUDA. */
#include "tiers/device/cuda_calls.h"

const struct kvt_cuda_calls *kvt_cuda_calls(void)
{
    return NULL;
}
