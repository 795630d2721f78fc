/* What the daemon takes of the machine's memory beside its pools and its index: code, threads,
 * gRPC, connections, requests in progress. Measured: 27 MiB after the start, 51 MiB at most with 24
 * engines that have 480 requests in progress at a time, L3 in use; docs/performance.md holds the
 * start to it. The check of the configuration and the doctor count with the same number. */
#pragma once

#include <stdint.h>

#define KVT_OWN_MEMORY_MIB 64u
#define KVT_OWN_MEMORY_BYTES ((uint64_t)KVT_OWN_MEMORY_MIB << 20)
