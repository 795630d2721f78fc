/* The loops for x86-64: SSE2, AVX2, and AVX-512 with its multiplication of 64 bits. The CPU is
 * asked at each call; a call is a payload or a row of a plane, the answer a load and a test. No
 * ifunc: sanitizers do not run that early. */
#include "kernels/loops.h"

#include "kernels/loops_body.h"

KVT_LOOPS_DEFINE(plain, );
KVT_LOOPS_DEFINE(avx2, __attribute__((target("avx2"))));
KVT_LOOPS_DEFINE(avx512, __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))));

static bool has_avx2(void)
{
    return __builtin_cpu_supports("avx2") != 0;
}

static bool has_avx512(void)
{
    return __builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("avx512bw") != 0 &&
           __builtin_cpu_supports("avx512dq") != 0 && __builtin_cpu_supports("avx512vl") != 0;
}

const struct kvt_loops *kvt_loops(void)
{
    if (has_avx512())
        return &loops_avx512;
    return has_avx2() ? &loops_avx2 : &loops_plain;
}

uint32_t kvt_loops_list(const struct kvt_loops *list[static 4])
{
    uint32_t count = 0;

    list[count++] = &loops_plain;
    if (has_avx2())
        list[count++] = &loops_avx2;
    if (has_avx512())
        list[count++] = &loops_avx512;
    return count;
}
