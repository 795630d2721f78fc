/* The region socket's two messages (SOCK_SEQPACKET, little-endian): the request comes with exactly
 * one descriptor by SCM_RIGHTS. Described in docs/api.md. */
#pragma once

#include <assert.h>

#include "daemon/base/limits.h"

#define KVT_REGION_MAGIC 0x31524b4bu /* "KKR1" */

struct kvt_region_request {
    uint32_t magic;
    uint32_t reserved; /* 0 */
    uint64_t bytes;    /* of the memfd that the daemon may use */
};
static_assert(sizeof(struct kvt_region_request) == 16, "on the wire");

struct kvt_region_answer {
    uint32_t magic;
    uint32_t status; /* 0, or an errno: EINVAL (what the text says), EAGAIN (too many unused) */
    uint8_t token[KVT_REGION_TOKEN_BYTES];
    char text[232]; /* terminated */
};
static_assert(sizeof(struct kvt_region_answer) == 256, "on the wire");
