/* Numbers of the formats on disk: little-endian, at any offset, never a cast of a struct. The
 * caller has bounded @at. Pure; any thread. */
#pragma once

#include <endian.h>
#include <string.h>

#include "daemon/base/def.h"

static inline void kvt_put_u16(uint8_t *bytes, size_t at, uint16_t value)
{
    value = htole16(value);
    memcpy(bytes + at, &value, sizeof(value));
}

static inline void kvt_put_u32(uint8_t *bytes, size_t at, uint32_t value)
{
    value = htole32(value);
    memcpy(bytes + at, &value, sizeof(value));
}

static inline void kvt_put_u64(uint8_t *bytes, size_t at, uint64_t value)
{
    value = htole64(value);
    memcpy(bytes + at, &value, sizeof(value));
}

static inline uint16_t kvt_get_u16(const uint8_t *bytes, size_t at)
{
    uint16_t value;

    memcpy(&value, bytes + at, sizeof(value));
    return le16toh(value);
}

static inline uint32_t kvt_get_u32(const uint8_t *bytes, size_t at)
{
    uint32_t value;

    memcpy(&value, bytes + at, sizeof(value));
    return le32toh(value);
}

static inline uint64_t kvt_get_u64(const uint8_t *bytes, size_t at)
{
    uint64_t value;

    memcpy(&value, bytes + at, sizeof(value));
    return le64toh(value);
}

static inline bool kvt_bytes_are_zero(const uint8_t *bytes, size_t count)
{
    for (size_t i = 0; i < count; i++)
        if (bytes[i] != 0)
            return false;
    return true;
}
