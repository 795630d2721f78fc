/* The kernels on a GPU: bodies.h joined to CUDA's names, and the launches behind the table. Kernels
 * take their batch by value; jobs and what they point to have to stay readable until the launch is
 * over in its stream. No launch waits, allocates or changes what a caller's context is set to.
 *
 * Compiled with -fmad=false and IEEE division: codes are the CPU's to the bit. No C++ runtime: no
 * exceptions, no RTTI, no static constructors but the registration that nvcc emits, which calls
 * only CUDA's runtime. The runtime looks for a driver when it is first called, not before. */
#include "kernels/dialect_cuda.h"

#include <cuda_runtime.h>

#include "kernels/args.h"
#include "kernels/bodies.h"
#include "kernels/kvt_kernels.h"
#include "kernels/shape.h"

/* Registers are bounded to 64, so that four blocks of 256 threads share an SM: with 64 bytes a
 * thread that is 64 KiB of loads in flight, more than an SM's share of the bandwidth times the
 * latency of memory (docs/kernels.md has the sums). */
#define COPY_BLOCKS_PER_SM 4

static __device__ __forceinline__ kvt_at here()
{
    kvt_at at;

    at.thread = threadIdx.x;
    at.threads = blockDim.x;
    at.block_x = blockIdx.x;
    at.blocks_x = gridDim.x;
    at.block_y = blockIdx.y;
    at.blocks_y = gridDim.y;
    return at;
}

template <int is_gather>
__global__ void __launch_bounds__(KVT_SHAPE_THREADS, COPY_BLOCKS_PER_SM)
    copy_kernel(const kvt_copy_batch batch, const kvt_shape shape)
{
    const kvt_at at = here();

    kvt_copy_body(&at, &batch, &shape, is_gather);
}

__global__ void __launch_bounds__(KVT_SHAPE_THREADS, COPY_BLOCKS_PER_SM)
    check_kernel(const kvt_check_batch batch)
{
    const kvt_at at = here();

    kvt_check_body(&at, &batch);
}

__global__ void __launch_bounds__(KVT_SHAPE_THREADS, COPY_BLOCKS_PER_SM)
    relayout_kernel(const kvt_relayout change, const kvt_shape shape)
{
    const kvt_at at = here();

    kvt_relayout_body(&at, &change, &shape);
}

/* The greatest of all threads' values, for all of them. Blocks are of whole warps. */
static __device__ __forceinline__ uint32_t block_max(uint32_t value)
{
    __shared__ uint32_t warps[KVT_SHAPE_THREADS / KVT_WARP_THREADS];
    const uint32_t warps_count = blockDim.x / KVT_WARP_THREADS;

    value = __reduce_max_sync(KVT_WARP_ALL, value);
    if (threadIdx.x % KVT_WARP_THREADS == 0)
        warps[threadIdx.x / KVT_WARP_THREADS] = value;
    __syncthreads();
    for (uint32_t i = 0; i < warps_count; i++)
        value = warps[i] > value ? warps[i] : value;
    __syncthreads(); /* before the next head writes */
    return value;
}

/* The kinds are constants in each of the four, so that no thread chooses per element. */
template <int is_bf16, int is_int8>
__global__ void __launch_bounds__(KVT_SHAPE_THREADS) quantise_kernel(const kvt_quant_batch batch)
{
    const kvt_quant_job *jobs = reinterpret_cast<const kvt_quant_job *>(batch.jobs);
    const kvt_at at = here();
    kvt_head head;

    for (uint32_t j = at.block_y; j < batch.jobs_count; j += at.blocks_y) {
        const uint32_t heads_count = (jobs[j].end_plane - jobs[j].first_plane) * batch.spec.heads;

        kvt_quant_gaps(&at, &batch.spec, &jobs[j]);
        for (uint32_t n = at.block_x; n < heads_count; n += at.blocks_x) {
            kvt_head_of(&batch.spec, &jobs[j], n, &head);
            head.is_bf16 = is_bf16;
            head.is_int8 = is_int8;
            const uint32_t most = block_max(kvt_head_magnitude(&at, &head));
            kvt_head_encode(&at, &head, kvt_quant_scale(most, is_bf16, is_int8));
        }
    }
}

template <int is_bf16, int is_int8>
__global__ void __launch_bounds__(KVT_SHAPE_THREADS) dequantise_kernel(const kvt_quant_batch batch)
{
    const kvt_at at = here();

    kvt_dequantise_body(&at, &batch, is_bf16, is_int8);
}

/* ---- launches -------------------------------------------------------------------------------- */

static int launch(const void *kernel, const kvt_shape *shape, void *stream, void **args)
{
    const dim3 blocks(shape->blocks_x, shape->blocks_y), threads(shape->threads);

    const cudaError_t error =
        cudaLaunchKernel(kernel, blocks, threads, args, 0, static_cast<cudaStream_t>(stream));

    if (error != cudaSuccess)
        (void)cudaGetLastError(); /* the caller knows now; nobody is to find it later */
    return static_cast<int>(error);
}

static int launch_copy(const void *kernel, void *stream, const kvt_copy_batch *batch)
{
    const int r = kvt_args_copy(batch);

    if (r != 0 || batch->jobs_count == 0)
        return r;
    kvt_shape shape = kvt_shape_copy(batch, KVT_SHAPE_BLOCKS_MAX);
    void *args[] = {const_cast<kvt_copy_batch *>(batch), &shape};
    return launch(kernel, &shape, stream, args);
}

static int cuda_gather(void *stream, const kvt_copy_batch *batch)
{
    return launch_copy(reinterpret_cast<const void *>(&copy_kernel<1>), stream, batch);
}

static int cuda_scatter(void *stream, const kvt_copy_batch *batch)
{
    return launch_copy(reinterpret_cast<const void *>(&copy_kernel<0>), stream, batch);
}

static int cuda_check(void *stream, const kvt_check_batch *batch)
{
    const int r = kvt_args_check(batch);

    if (r != 0 || batch->jobs_count == 0 || batch->bytes_max == 0)
        return r;
    const kvt_shape shape = kvt_shape_check(batch, KVT_SHAPE_BLOCKS_MAX);
    void *args[] = {const_cast<kvt_check_batch *>(batch)};
    return launch(reinterpret_cast<const void *>(&check_kernel), &shape, stream, args);
}

/* FP16 to FP8, BF16 to FP8, FP16 to INT8, BF16 to INT8. */
static const void *const quantise_kernels[4] = {
    reinterpret_cast<const void *>(&quantise_kernel<0, 0>),
    reinterpret_cast<const void *>(&quantise_kernel<1, 0>),
    reinterpret_cast<const void *>(&quantise_kernel<0, 1>),
    reinterpret_cast<const void *>(&quantise_kernel<1, 1>)};
static const void *const dequantise_kernels[4] = {
    reinterpret_cast<const void *>(&dequantise_kernel<0, 0>),
    reinterpret_cast<const void *>(&dequantise_kernel<1, 0>),
    reinterpret_cast<const void *>(&dequantise_kernel<0, 1>),
    reinterpret_cast<const void *>(&dequantise_kernel<1, 1>)};

static int launch_quant(const void *const kernels[4], void *stream, const kvt_quant_batch *batch)
{
    const int r = kvt_args_quant(batch);

    if (r != 0 || batch->jobs_count == 0)
        return r;
    const kvt_shape shape = kvt_shape_quant(batch, KVT_SHAPE_BLOCKS_MAX);
    const int kind = (batch->spec.elem == KVT_ELEM_BF16) + 2 * (batch->spec.kind == KVT_QUANT_INT8);
    void *args[] = {const_cast<kvt_quant_batch *>(batch)};
    return launch(kernels[kind], &shape, stream, args);
}

static int cuda_quantise(void *stream, const kvt_quant_batch *batch)
{
    return launch_quant(quantise_kernels, stream, batch);
}

static int cuda_dequantise(void *stream, const kvt_quant_batch *batch)
{
    return launch_quant(dequantise_kernels, stream, batch);
}

static int cuda_relayout(void *stream, const kvt_relayout *change)
{
    const int r = kvt_args_relayout(change);

    if (r != 0)
        return r;
    kvt_shape shape = kvt_shape_relayout(change, KVT_SHAPE_BLOCKS_MAX);
    void *args[] = {const_cast<kvt_relayout *>(change), &shape};
    return launch(reinterpret_cast<const void *>(&relayout_kernel), &shape, stream, args);
}

static const kvt_kernels cuda_kernels = {
    "cuda",        cuda_gather,     cuda_scatter,  cuda_check,
    cuda_quantise, cuda_dequantise, cuda_relayout,
};

extern "C" const kvt_kernels *kvt_kernels_cuda(void)
{
    return &cuda_kernels;
}

static int load(const void *kernel)
{
    cudaFuncAttributes attributes;
    const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);

    if (error != cudaSuccess)
        (void)cudaGetLastError();
    return static_cast<int>(error);
}

extern "C" int kvt_kernels_cuda_load(void)
{
    const void *const kernels[] = {reinterpret_cast<const void *>(&copy_kernel<0>),
                                   reinterpret_cast<const void *>(&copy_kernel<1>),
                                   reinterpret_cast<const void *>(&check_kernel),
                                   reinterpret_cast<const void *>(&relayout_kernel)};
    int r = 0;

    for (const void *kernel : kernels)
        r = r != 0 ? r : load(kernel);
    for (int kind = 0; kind < 4; kind++) {
        r = r != 0 ? r : load(quantise_kernels[kind]);
        r = r != 0 ? r : load(dequantise_kernels[kind]);
    }
    return r;
}
