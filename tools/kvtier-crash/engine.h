/* What engine.c and read.c share: one call at a time on an engine's own op. Only for them. */
#pragma once

#include "tools/kvtier-crash/crash.h"

#define CRASH_PAYLOAD_BYTES_MAX (1u << 20)

/* The engine's op, empty; what the last one answered is gone. */
struct kvt_op *crash_op_begin(struct crash_engine *engine, enum kvt_op_kind kind);
enum crash_result crash_op_call(struct crash_engine *engine, struct kvt_client *client);
/* Makes tokens and chains of @place up to its end. */
void crash_tokens(struct crash_engine *engine, const struct crash_place *place);
/* The same, and as the prefix of a request. */
void crash_prefix(struct crash_engine *engine, const struct crash_place *place,
                  struct kvt_api_prefix *prefix);
/* All of [first, end) as moves; returns how many. */
uint32_t crash_moves(struct crash_engine *engine, const struct crash_place *place,
                     struct kvt_api_moves *moves);
/* The oracle's key of a shard; crash_tokens was called before. */
uint64_t crash_key(const struct crash_engine *engine, uint32_t space, uint32_t component,
                   uint32_t rank, uint64_t block_idx);
