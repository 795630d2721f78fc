/* Raw block devices for tests, where the machine allows it: a loop device over a file. It goes away
 * with its last descriptor, so a test that dies leaves none behind. */
#pragma once

#include <stdint.h>

struct loop_device {
    int fd; /* -1: none */
    char path[32];
};

/* 0, or -errno: this machine gives none (no privilege, no module, none free). */
int loop_device_open(struct loop_device *device, const char *file, uint32_t block_bytes,
                     int is_read_only);
/* Does this machine give any? 0 or -errno. Makes a file in the current directory for a moment. */
int loop_device_probe(void);
void loop_device_close(struct loop_device *device); /* idempotent */
