/* One field of a walk: filled with a valid random value, or noted by name and hash. Private to
 * api_walk*.c. */
#pragma once

#include "tests/common/api_walk.h"

void walk_note(struct api_walk *walk, const char *name, const void *at, size_t bytes);
uint64_t walk_pick(struct api_walk *walk, uint64_t least, uint64_t most);
void walk_u64(struct api_walk *walk, const char *name, uint64_t *at, uint64_t least, uint64_t most);
void walk_u32(struct api_walk *walk, const char *name, uint32_t *at, uint64_t least, uint64_t most);
void walk_bool(struct api_walk *walk, const char *name, bool *at);
void walk_enum(struct api_walk *walk, const char *name, void *at, uint32_t most);
void walk_raw(struct api_walk *walk, const char *name, void *at, size_t bytes);
void *walk_take(struct api_walk *walk, size_t count, size_t bytes);
void walk_blob(struct api_walk *walk, const char *name, struct kvt_text *text, uint32_t bytes_max);
void walk_text(struct api_walk *walk, const char *name, struct kvt_text *text, uint32_t bytes_max);
void walk_handle(struct api_walk *walk, const char *name, struct kvt_handle *handle);

#define U64(name, at) walk_u64(walk, name, at, 0, UINT64_MAX)
#define U32(name, at) walk_u32(walk, name, at, 0, UINT32_MAX)

/* Of requests and of answers. */
void walk_component(struct api_walk *walk, struct kvt_api_component *c);
void walk_answer(struct api_walk *walk, struct kvt_op *op); /* op->ans, by op->kind */
