/* The table of configuration keys: private to daemon/config*.c. Rows of one section are neighbours,
 * sections are in the order in which they are printed. Pure data. */
#pragma once

#include "daemon/config.h"

enum kvt_config_kind {
    KVT_CONFIG_TEXT,         /* char [KVT_CONFIG_TEXT_BYTES] */
    KVT_CONFIG_PATHS,        /* char [KVT_CONFIG_PATHS_BYTES], "/a/l3, /b/l3" */
    KVT_CONFIG_GPUS,         /* char [KVT_CONFIG_TEXT_BYTES], "all", "0, 2", "GPU-1b2c3d4e" */
    KVT_CONFIG_SIZE,         /* uint64_t, "4GiB" */
    KVT_CONFIG_SHARE,        /* struct kvt_config_share, "4GiB" or "60%" */
    KVT_CONFIG_SIZE_OF_RAM,  /* uint64_t, "4GiB" or "10%" of memory */
    KVT_CONFIG_SIZE_OF_DISK, /* uint64_t, "4GiB" or "10%" of what tiers.l3.path lies on */
    KVT_CONFIG_DURATION,     /* uint64_t ns, "250ms" */
    KVT_CONFIG_COUNT,        /* uint32_t */
    KVT_CONFIG_MODE,         /* uint32_t, octal: "0660" */
    KVT_CONFIG_CHOICE,       /* uint32_t, index into choices */
    KVT_CONFIG_BOOL,         /* bool, "true" or "false" */
};

#define KVT_CONFIG_CHOICES_MAX 5u

struct kvt_config_key {
    const char *path; /* "tiers.l2.bytes" */
    enum kvt_config_kind kind;
    size_t offset; /* into struct kvt_config */
    const char *standard;
    uint64_t min, max;    /* of SIZE*, DURATION (ns), COUNT, MODE */
    bool is_zero_allowed; /* 0 means "off" or "chosen by the daemon" although min is above it */
    const char *choices[KVT_CONFIG_CHOICES_MAX]; /* NULL-terminated when fewer */
};

extern const struct kvt_config_key kvt_config_keys[];
extern const uint32_t kvt_config_keys_count;

/* The size of the block device or of the file system that holds the path (its directory, when it
 * does not exist): the smallest known, where @paths are several; 0 when none is known. */
uint64_t kvt_config_disk_bytes(const char *paths);

/* What is wrong with a list of GPUs, to follow the offending text; NULL: nothing. */
const char *kvt_config_gpus_problem(const char *text);

/* Where to begin; NULL for none. */
const char *kvt_config_paths_begin(const char *paths);
/* The next of several paths, without the blanks around it; false at the end. *@at is moved on.
 * *@ret_bytes is its true length: what does not fit @ret_path is cut off. */
bool kvt_config_paths_next(const char **at, char ret_path[KVT_CONFIG_TEXT_BYTES],
                           size_t *ret_bytes);
