/* The check of a part of a payload, for copies on the CPU that add up what they move. Any thread.
 */
#pragma once

#include "daemon/base/def.h"

/* Of @bytes at @data that begin with word @first_word of a payload: what kvt_check64 would add for
 * them. Parts of a payload (all but the last a multiple of 8 bytes) may be taken in any order. */
uint64_t kvt_check64_part(const void *data, uint64_t bytes, uint64_t first_word);
