/* Reads a trace: one JSON object a line, plain or compressed with zstd (long windows up to 27
 * included; told apart by the file's first bytes).
 *
 *   {"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [id, ...],
 *    "session": text or number (optional)}
 *
 * Equal ids are the same 512 tokens after the same prefix; prompts are cut at input_length. */
#pragma once

#include "tools/lib/workload.h"

#define KVT_TRACE_ID_TOKENS 512u

struct kvt_trace_options {
    const char *path;
    uint64_t requests_max; /* 0: all */
    uint64_t seed;         /* of the tokens that ids stand for */
};

#define KVT_TRACE_E_BAD 1 /* not a trace; @why says where */

/* -errno of reading, KVT_TRACE_E_BAD, or 0 and a workload for kvt_workload_deinit. @why: text for
 * people when not 0. */
KVT_MUST_USE int kvt_trace_read(struct kvt_workload *ret_workload,
                                const struct kvt_trace_options *options, char *why,
                                size_t why_bytes);
