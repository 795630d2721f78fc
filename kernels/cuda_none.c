/* A build without nvcc or without CUDA's runtime: there are no kernels for a GPU. */
#include "kernels/kvt_kernels.h"

const struct kvt_kernels *kvt_kernels_cuda(void)
{
    return NULL;
}

int kvt_kernels_cuda_load(void)
{
    return -ENOTSUP;
}
