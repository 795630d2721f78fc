/* What every way to run the kernels asks of its arguments before it starts. `kvt_args_` functions
 * look at the batch alone, as a launch on a GPU can; `kvt_jobs_` functions read the jobs too and
 * are for jobs in this process's memory. 0 or -EINVAL. Any thread. */
#pragma once

#include "kernels/kvt_kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

KVT_MUST_USE int kvt_args_copy(const struct kvt_copy_batch *batch);
KVT_MUST_USE int kvt_args_check(const struct kvt_check_batch *batch);
KVT_MUST_USE int kvt_args_quant(const struct kvt_quant_batch *batch);
KVT_MUST_USE int kvt_args_relayout(const struct kvt_relayout *change);

/* Also what the args functions ask. */
KVT_MUST_USE int kvt_jobs_copy(const struct kvt_copy_batch *batch);
KVT_MUST_USE int kvt_jobs_check(const struct kvt_check_batch *batch);
KVT_MUST_USE int kvt_jobs_quant(const struct kvt_quant_batch *batch);

/* Bytes of the whole pool or payload; the change was found in order. */
uint64_t kvt_relayout_bytes(const struct kvt_relayout *change);

#ifdef __cplusplus
}
#endif
