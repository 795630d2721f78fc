/* The dialect of the kernels' source for nvcc; only cuda.cu includes it. Addresses are of global
 * memory (a GPU's own, a peer's, or mapped pinned host memory), so that accesses need no look at
 * which space they are in. What a copy reads it reads once: those loads are marked as streaming and
 * leave the caches to others. */
#pragma once

#include <stdint.h>
#include <string.h>

#define KVT_FN static __device__ __forceinline__
#define KVT_UNROLL _Pragma("unroll")
#define KVT_SELECT(is_first, first, otherwise) ((is_first) ? (first) : (otherwise))
#define KVT_DIV_RN(a, b) __fdiv_rn(a, b)
#define KVT_MUL_RN(a, b) __fmul_rn(a, b)

#define KVT_WARP_THREADS 32
#define KVT_WARP_ALL 0xffffffffu

struct kvt_vec {
    uint64_t lo, hi;
};

KVT_FN kvt_vec kvt_load16(uint64_t address)
{
    const ulonglong2 pair = __ldcs(reinterpret_cast<const ulonglong2 *>(address));
    kvt_vec vec;

    vec.lo = pair.x;
    vec.hi = pair.y;
    return vec;
}

KVT_FN void kvt_store16(uint64_t address, kvt_vec vec)
{
    *reinterpret_cast<ulonglong2 *>(address) = make_ulonglong2(vec.lo, vec.hi);
}

KVT_FN uint64_t kvt_load8(uint64_t address)
{
    return __ldcs(reinterpret_cast<const unsigned long long *>(address));
}

KVT_FN void kvt_store8(uint64_t address, uint64_t value)
{
    *reinterpret_cast<uint64_t *>(address) = value;
}

KVT_FN uint32_t kvt_load4(uint64_t address)
{
    return __ldcs(reinterpret_cast<const unsigned int *>(address));
}

KVT_FN void kvt_store4(uint64_t address, uint32_t value)
{
    *reinterpret_cast<uint32_t *>(address) = value;
}

KVT_FN uint32_t kvt_load2(uint64_t address)
{
    return __ldcs(reinterpret_cast<const unsigned short *>(address));
}

KVT_FN void kvt_store2(uint64_t address, uint32_t value)
{
    *reinterpret_cast<uint16_t *>(address) = static_cast<uint16_t>(value);
}

KVT_FN uint32_t kvt_load1(uint64_t address)
{
    return __ldcs(reinterpret_cast<const unsigned char *>(address));
}

KVT_FN void kvt_store1(uint64_t address, uint32_t value)
{
    *reinterpret_cast<uint8_t *>(address) = static_cast<uint8_t>(value);
}

/* One atomic addition a warp: a sum has 32 bits in each shuffle, so two of them a step. All threads
 * of the warp are here. */
KVT_FN void kvt_add64(uint64_t address, uint64_t sum)
{
    for (int step = KVT_WARP_THREADS / 2; step > 0; step /= 2)
        sum += __shfl_xor_sync(KVT_WARP_ALL, static_cast<unsigned long long>(sum), step);
    if (threadIdx.x % KVT_WARP_THREADS == 0 && sum != 0)
        atomicAdd(reinterpret_cast<unsigned long long *>(address), sum);
}
