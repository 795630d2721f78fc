/* The CUDA kernels as a build with nvcc has them. Without a driver or a GPU: the table is there, it
 * refuses what makes no sense, a launch gives CUDA's error number, and the process is fine. With
 * one: a gather through mapped pinned memory gives the reference's bytes and check (tools/gpu-check
 * does the rest). */
#include <cuda_runtime_api.h>
#include <stdio.h>
#include <string.h>

#include "tests/common/check.h"
#include "tests/kernels/naive.h"

#define BLOCK_BYTES 4096u

struct scene { /* in memory that GPU and CPU both read */
    uint8_t pool[4 * BLOCK_BYTES], payload[2 * BLOCK_BYTES];
    struct kvt_copy_piece piece;
    struct kvt_copy_job job;
    uint64_t ids[2], check;
};

static struct kvt_copy_batch scene_make(struct scene *scene)
{
    uint64_t state = 1;
    struct kvt_copy_batch batch = {.jobs = (uintptr_t)&scene->job, .jobs_count = 1};

    memset(scene, 0, sizeof(*scene));
    naive_fill(&state, scene->pool, sizeof(scene->pool));
    scene->ids[0] = 3;
    scene->ids[1] = 1;
    scene->piece = (struct kvt_copy_piece){
        .base = (uintptr_t)scene->pool, .stride_bytes = BLOCK_BYTES, .bytes = BLOCK_BYTES};
    scene->job = (struct kvt_copy_job){.payload = (uintptr_t)scene->payload,
                                       .pieces = (uintptr_t)&scene->piece,
                                       .blocks = (uintptr_t)scene->ids,
                                       .check = (uintptr_t)&scene->check,
                                       .pieces_count = 1,
                                       .blocks_count = 2};
    naive_batch_hold(&batch, &scene->job);
    return batch;
}

static void try_without_gpu(const struct kvt_kernels *kernels)
{
    struct scene scene;
    struct kvt_copy_batch batch = scene_make(&scene);
    int r = kernels->gather(NULL, &batch);

    printf("no GPU here: a launch says %d, %s\n", r, cudaGetErrorString((cudaError_t)r));
    CHECK(r > 0);
    CHECK(kvt_kernels_cuda_load() == r);
}

static void try_with_gpu(const struct kvt_kernels *kernels)
{
    struct kvt_copy_batch batch;
    struct scene *scene;
    cudaStream_t stream;

    CHECK(cudaHostAlloc((void **)&scene, sizeof(*scene), cudaHostAllocMapped) == cudaSuccess);
    CHECK(cudaStreamCreate(&stream) == cudaSuccess);
    CHECK(kvt_kernels_cuda_load() == 0);
    batch = scene_make(scene);
    CHECK(kernels->gather(stream, &batch) == 0);
    CHECK(cudaStreamSynchronize(stream) == cudaSuccess);
    CHECK(memcmp(scene->payload, scene->pool + 3ull * BLOCK_BYTES, BLOCK_BYTES) == 0);
    CHECK(memcmp(scene->payload + BLOCK_BYTES, scene->pool + BLOCK_BYTES, BLOCK_BYTES) == 0);
    CHECK(scene->check == naive_check(scene->payload, sizeof(scene->payload)));
    CHECK(cudaStreamDestroy(stream) == cudaSuccess);
    CHECK(cudaFreeHost(scene) == cudaSuccess);
    printf("a GPU gathered %zu bytes\n", sizeof(scene->payload));
}

int main(void)
{
    const struct kvt_kernels *kernels = kvt_kernels_cuda();
    struct kvt_copy_batch nothing = {0}, nonsense = {.jobs_count = 1};
    int count = 0;

    CHECK(kernels != NULL && strcmp(kernels->name, "cuda") == 0);
    CHECK(kernels->gather(NULL, &nothing) == 0);
    CHECK(kernels->gather(NULL, &nonsense) == -EINVAL);
    CHECK(kernels->scatter(NULL, &nonsense) == -EINVAL);
    CHECK(kernels->relayout(NULL, &(struct kvt_relayout){0}) == -EINVAL);
    CHECK(kernels->quantise(NULL, &(struct kvt_quant_batch){0}) == -EINVAL);
    CHECK(kernels->check(NULL, &(struct kvt_check_batch){.jobs_count = 1, .bytes_max = 1}) ==
          -EINVAL);
    if (cudaGetDeviceCount(&count) == cudaSuccess && count > 0) {
        try_with_gpu(kernels);
        return 0;
    }
    try_without_gpu(kernels);
    return 0;
}
