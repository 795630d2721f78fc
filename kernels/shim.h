/* The dialect of the kernels' source for host threads: bodies.h compiled by the C compiler. What a
 * GPU would fault on (a wide access at an address that is not a multiple of its width) ends the
 * process here, every access is one that the address sanitizer sees, and all are counted. Only
 * shim.c includes this. */
#pragma once

#include <string.h>

#include "kernels/dialect_c.h"
#include "kernels/shim_tables.h"

#define KVT_UNROLL

static _Thread_local struct kvt_shim_traffic shim_traffic;

struct kvt_vec {
    uint64_t lo, hi;
};

KVT_FN struct kvt_vec kvt_load16(uint64_t address)
{
    struct kvt_vec vec;

    shim_traffic.loads[4]++;
    KVT_ASSERT(address % 16 == 0);
    memcpy(&vec, (const void *)(uintptr_t)address, sizeof(vec));
    return vec;
}

KVT_FN void kvt_store16(uint64_t address, struct kvt_vec vec)
{
    shim_traffic.stores[4]++;
    KVT_ASSERT(address % 16 == 0);
    memcpy((void *)(uintptr_t)address, &vec, sizeof(vec));
}

KVT_FN uint64_t kvt_load8(uint64_t address)
{
    uint64_t value;

    shim_traffic.loads[3]++;
    KVT_ASSERT(address % 8 == 0);
    memcpy(&value, (const void *)(uintptr_t)address, sizeof(value));
    return value;
}

KVT_FN void kvt_store8(uint64_t address, uint64_t value)
{
    shim_traffic.stores[3]++;
    KVT_ASSERT(address % 8 == 0);
    memcpy((void *)(uintptr_t)address, &value, sizeof(value));
}

KVT_FN uint32_t kvt_load4(uint64_t address)
{
    uint32_t value;

    shim_traffic.loads[2]++;
    KVT_ASSERT(address % 4 == 0);
    memcpy(&value, (const void *)(uintptr_t)address, sizeof(value));
    return value;
}

KVT_FN void kvt_store4(uint64_t address, uint32_t value)
{
    shim_traffic.stores[2]++;
    KVT_ASSERT(address % 4 == 0);
    memcpy((void *)(uintptr_t)address, &value, sizeof(value));
}

KVT_FN uint32_t kvt_load2(uint64_t address)
{
    uint16_t value;

    shim_traffic.loads[1]++;
    KVT_ASSERT(address % 2 == 0);
    memcpy(&value, (const void *)(uintptr_t)address, sizeof(value));
    return value;
}

KVT_FN void kvt_store2(uint64_t address, uint32_t value)
{
    const uint16_t narrow = (uint16_t)value;

    shim_traffic.stores[1]++;
    KVT_ASSERT(address % 2 == 0);
    memcpy((void *)(uintptr_t)address, &narrow, sizeof(narrow));
}

KVT_FN uint32_t kvt_load1(uint64_t address)
{
    shim_traffic.loads[0]++;
    return *(const uint8_t *)(uintptr_t)address;
}

KVT_FN void kvt_store1(uint64_t address, uint32_t value)
{
    shim_traffic.stores[0]++;
    *(uint8_t *)(uintptr_t)address = (uint8_t)value;
}

KVT_FN void kvt_add64(uint64_t address, uint64_t sum)
{
    (void)__atomic_fetch_add((uint64_t *)(uintptr_t)address, sum, __ATOMIC_RELAXED);
}
