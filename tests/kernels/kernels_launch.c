/* What the table of a build with nvcc asks CUDA's runtime for, with the runtime's calls replaced by
 * ours: so it needs no GPU and no driver. For each function and kind: the kernel, by the name under
 * which nvcc registered it for the GPU; the grid that shape.c made; the batch and the shape as
 * they are; the caller's stream; no dynamic shared memory. And that an error is told once and
 * nobody finds it later, and that loading asks for every kernel there is. */
#include <cuda_runtime_api.h>
#include <string.h>

#include "kernels/shape.h"
#include "tests/common/cmocka.h"
#include "tests/kernels/naive.h"

#define KERNELS 12u

/* ---- the runtime -------------------------------------------------------------------------------
 */

static struct {
    const void *stub; /* what the runtime's calls are given */
    const char *name; /* of the GPU's function, as C++ mangles it */
} registered[KERNELS + 1];
static uint32_t registered_count;

static struct {
    const char *name;
    dim3 blocks, threads;
    size_t shared_bytes;
    void *stream;
    unsigned char batch[sizeof(struct kvt_quant_batch) + 64], shape[sizeof(struct kvt_shape)];
    uint32_t count;
} launched;
static size_t batch_bytes;
static bool has_shape;
static cudaError_t answer;
static uint32_t errors_taken, loads, load_fails_at;
static uint32_t loads_of[KERNELS];

/* The names are the linker's. NOLINTBEGIN */
void __real___cudaRegisterFunction(void **handle, const char *stub, char *function,
                                   const char *name, int limit, uint3 *thread, uint3 *block,
                                   dim3 *block_dim, dim3 *grid_dim, int *warp_size);
void __wrap___cudaRegisterFunction(void **handle, const char *stub, char *function,
                                   const char *name, int limit, uint3 *thread, uint3 *block,
                                   dim3 *block_dim, dim3 *grid_dim, int *warp_size);
cudaError_t __wrap_cudaLaunchKernel(const void *stub, dim3 blocks, dim3 threads, void **args,
                                    size_t shared_bytes, cudaStream_t stream);
cudaError_t __wrap_cudaGetLastError(void);
cudaError_t __wrap_cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *stub);

/* Before main. */
void __wrap___cudaRegisterFunction(void **handle, const char *stub, char *function,
                                   const char *name, int limit, uint3 *thread, uint3 *block,
                                   dim3 *block_dim, dim3 *grid_dim, int *warp_size)
{
    if (registered_count < KVT_COUNT_OF(registered)) {
        registered[registered_count].stub = stub;
        registered[registered_count++].name = name;
    }
    __real___cudaRegisterFunction(handle, stub, function, name, limit, thread, block, block_dim,
                                  grid_dim, warp_size);
}

static uint32_t idx_of(const void *stub)
{
    for (uint32_t i = 0; i < registered_count; i++) {
        if (registered[i].stub == stub)
            return i;
    }
    fail_msg("a kernel that nobody registered");
    return 0;
}

cudaError_t __wrap_cudaLaunchKernel(const void *stub, dim3 blocks, dim3 threads, void **args,
                                    size_t shared_bytes, cudaStream_t stream)
{
    launched.name = registered[idx_of(stub)].name;
    launched.blocks = blocks;
    launched.threads = threads;
    launched.shared_bytes = shared_bytes;
    launched.stream = stream;
    memcpy(launched.batch, args[0], batch_bytes);
    if (has_shape)
        memcpy(launched.shape, args[1], sizeof(struct kvt_shape));
    launched.count++;
    return answer;
}

cudaError_t __wrap_cudaGetLastError(void)
{
    errors_taken++;
    return answer;
}

cudaError_t __wrap_cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *stub)
{
    (void)attributes;
    loads_of[idx_of(stub)]++;
    return ++loads == load_fails_at ? cudaErrorNoKernelImageForDevice : cudaSuccess;
}
/* NOLINTEND */

/* ---- launches ----------------------------------------------------------------------------------
 */

static void *const stream = (void *)0x5eed;

static void expect(size_t batch_size, bool is_with_shape)
{
    memset(&launched, 0, sizeof(launched));
    batch_bytes = batch_size;
    has_shape = is_with_shape;
    errors_taken = 0;
}

static void assert_launched(int r, const char *name, const void *batch,
                            const struct kvt_shape *shape)
{
    assert_int_equal(r, answer);
    assert_int_equal(errors_taken, answer != cudaSuccess);
    assert_int_equal(launched.count, 1);
    if (strncmp(launched.name, name, strlen(name)) != 0)
        fail_msg("%s was launched instead of %s", launched.name, name);
    assert_ptr_equal(launched.stream, stream);
    assert_int_equal(launched.shared_bytes, 0);
    assert_memory_equal(launched.batch, batch, batch_bytes);
    assert_int_equal(launched.blocks.x, shape->blocks_x);
    assert_int_equal(launched.blocks.y, shape->blocks_y);
    assert_int_equal(launched.blocks.z, 1);
    assert_int_equal(launched.threads.x, shape->threads);
    assert_int_equal(launched.threads.y, 1);
    assert_int_equal(launched.threads.z, 1);
    if (has_shape)
        assert_memory_equal(launched.shape, shape, sizeof(*shape));
}

static void try_copies(const struct kvt_kernels *kernels)
{
    const struct kvt_copy_batch batch = {.jobs = 4096,
                                         .jobs_count = 3,
                                         .pieces_max = 5,
                                         .blocks_max = 7,
                                         .piece_bytes_max = 4096 + 16};
    const struct kvt_check_batch check = {.jobs = 4096, .jobs_count = 2, .bytes_max = 1000000};
    struct kvt_shape shape = kvt_shape_copy(&batch, KVT_SHAPE_BLOCKS_MAX);

    expect(sizeof(batch), true);
    assert_launched(kernels->gather(stream, &batch), "_Z11copy_kernelILi1EE", &batch, &shape);
    expect(sizeof(batch), true);
    assert_launched(kernels->scatter(stream, &batch), "_Z11copy_kernelILi0EE", &batch, &shape);
    shape = kvt_shape_check(&check, KVT_SHAPE_BLOCKS_MAX);
    expect(sizeof(check), false);
    assert_launched(kernels->check(stream, &check), "_Z12check_kernel", &check, &shape);
}

static void try_relayout(const struct kvt_kernels *kernels)
{
    const struct kvt_relayout change = {.src = 1 << 20,
                                        .dst = 2 << 20,
                                        .from = KVT_LAYOUT_LAYER_FIRST,
                                        .to = KVT_LAYOUT_PAGE_HEAD,
                                        .layers = 2,
                                        .pages = 3,
                                        .tokens = 5,
                                        .heads = 4,
                                        .head_bytes = 256};
    struct kvt_shape shape = kvt_shape_relayout(&change, KVT_SHAPE_BLOCKS_MAX);

    expect(sizeof(change), true);
    assert_launched(kernels->relayout(stream, &change), "_Z15relayout_kernel", &change, &shape);
}

/* The names have is_bf16 and is_int8 as the source's templates do. */
static void try_quant(const struct kvt_kernels *kernels)
{
    static const char *const names[2][2][2] = {
        {{"_Z15quantise_kernelILi0ELi0EE", "_Z15quantise_kernelILi0ELi1EE"},
         {"_Z15quantise_kernelILi1ELi0EE", "_Z15quantise_kernelILi1ELi1EE"}},
        {{"_Z17dequantise_kernelILi0ELi0EE", "_Z17dequantise_kernelILi0ELi1EE"},
         {"_Z17dequantise_kernelILi1ELi0EE", "_Z17dequantise_kernelILi1ELi1EE"}},
    };

    for (uint32_t i = 0; i < 8; i++) {
        const uint32_t is_back = i / 4, is_bf16 = i / 2 % 2, is_int8 = i % 2;
        const struct kvt_quant_batch batch = {
            .spec = {.kind = is_int8 ? KVT_QUANT_INT8 : KVT_QUANT_FP8_E4M3,
                     .elem = is_bf16 ? KVT_ELEM_BF16 : KVT_ELEM_FP16,
                     .order = KVT_ORDER_TOKENS_FIRST,
                     .plane_tokens = 16,
                     .heads = 8,
                     .head_dim = 64},
            .jobs = 4096,
            .jobs_count = 3,
            .planes_max = 6};
        struct kvt_shape shape = kvt_shape_quant(&batch, KVT_SHAPE_BLOCKS_MAX);
        int r;

        expect(sizeof(batch), false);
        r = is_back ? kernels->dequantise(stream, &batch) : kernels->quantise(stream, &batch);
        assert_launched(r, names[is_back][is_bf16][is_int8], &batch, &shape);
    }
}

static void test_launches(void **state)
{
    (void)state;
    for (uint32_t i = 0; i < 2; i++) {
        answer = i == 0 ? cudaSuccess : cudaErrorECCUncorrectable;
        try_copies(kvt_kernels_cuda());
        try_relayout(kvt_kernels_cuda());
        try_quant(kvt_kernels_cuda());
    }
}

/* No work, and work that makes no sense: the runtime does not hear of either. */
static void test_not_launched(void **state)
{
    const struct kvt_kernels *kernels = kvt_kernels_cuda();
    const struct kvt_check_batch no_bytes = {.jobs = 4096, .jobs_count = 1};
    const struct kvt_copy_batch nothing = {0}, nonsense = {.jobs_count = 1};

    (void)state;
    expect(0, false);
    assert_int_equal(kernels->gather(stream, &nothing), 0);
    assert_int_equal(kernels->scatter(stream, &nothing), 0);
    assert_int_equal(kernels->check(stream, &no_bytes), 0);
    assert_int_equal(kernels->gather(stream, &nonsense), -EINVAL);
    assert_int_equal(kernels->scatter(stream, &nonsense), -EINVAL);
    assert_int_equal(kernels->relayout(stream, &(struct kvt_relayout){0}), -EINVAL);
    assert_int_equal(kernels->quantise(stream, &(struct kvt_quant_batch){0}), -EINVAL);
    assert_int_equal(launched.count, 0);
}

/* Each kernel once; the first that fails is told, and taken off the runtime. */
static void test_load(void **state)
{
    (void)state;
    assert_int_equal(registered_count, KERNELS);
    memset(loads_of, 0, sizeof(loads_of));
    load_fails_at = loads = errors_taken = 0;
    assert_int_equal(kvt_kernels_cuda_load(), 0);
    for (uint32_t i = 0; i < KERNELS; i++)
        assert_int_equal(loads_of[i], 1);
    assert_int_equal(errors_taken, 0);
    for (uint32_t i = 1; i <= KERNELS; i++) {
        load_fails_at = i;
        loads = errors_taken = 0;
        assert_int_equal(kvt_kernels_cuda_load(), cudaErrorNoKernelImageForDevice);
        assert_int_equal(loads, i);
        assert_int_equal(errors_taken, 1);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_launches),
        cmocka_unit_test(test_not_launched),
        cmocka_unit_test(test_load),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
