/* For tests that are plain mains: a condition that does not hold ends the program with its place.
 */
#pragma once

#include <stdio.h>
#include <stdlib.h>

#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "%s:%d: FAILED: %s\n", __FILE__, __LINE__, #condition);                \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

#define CHECK_CODE(op, wanted)                                                                     \
    do {                                                                                           \
        if ((op)->code != (wanted)) {                                                              \
            fprintf(stderr, "%s:%d: FAILED: code %d (%s), not %s\n", __FILE__, __LINE__,           \
                    (int)(op)->code, (op)->message, #wanted);                                      \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)
