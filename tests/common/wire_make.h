/* Frames of the index's wire with random content, for its tests and as seeds of its fuzzer. One
 * thread: what a message points to lives until the next one is made. */
#pragma once

#include "tiers/index/wire.h"

#define WIRE_MAKE_KINDS 14u

/* A message of the @which-th kind (0..13), every field a function of @seed. */
void wire_make(struct kvt_wire_message *message, uint32_t which, uint64_t seed);
