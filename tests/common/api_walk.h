/* One walk over every field of every request and answer of daemon/base/api.h, for three uses: to
 * fill a struct with valid random values, to list its fields, and so to compare two structs exactly
 * with the name of the first field that differs. A field that the codec forgets is found, because
 * the walk does not know the codec. */
#pragma once

#include "daemon/base/api.h"

struct api_field {
    const char *name;
    uint64_t hash;
};

struct api_walk {
    bool is_filling;
    uint64_t random;         /* state of the generator */
    uint32_t size;           /* 0: small lists; 1: long lists; 2: some at their limits */
    struct kvt_arena *arena; /* filling: where lists go */
    struct api_field *fields;
    uint32_t fields_count, fields_room;
};

uint64_t api_random(uint64_t *state);

/* Fills op->req (and the other way round op->ans) for op->kind. */
void api_fill_request(struct kvt_op *op, uint64_t seed, uint32_t size);
/* op->req must be there: results of moves are as many as the moves. */
void api_fill_answer(struct kvt_op *op, uint64_t seed, uint32_t size);

/* NULL: equal; else the name of the first field that differs. */
const char *api_compare_requests(struct kvt_op *a, struct kvt_op *b);
const char *api_compare_answers(struct kvt_op *a, struct kvt_op *b);
