/* The YAML side of the configuration: libcyaml's schema is made from the table of keys, every value
 * is taken as text, and libcyaml's backtraces become one line for people. Private to
 * daemon/config*.c; main thread. */
#pragma once

#include "daemon/config_keys.h"

struct kvt_config_yaml {
    char **values; /* one text a row of the table, NULL where the file has none; NULL: no keys */
    /* After -EINVAL: where and what, beginning with the key if one is known. */
    uint32_t line;
    char why[512];
    void *schema;
};

/* @text is terminated. 0; -EINVAL with line and why; -ENOMEM. */
KVT_MUST_USE int kvt_config_yaml_open(struct kvt_config_yaml *ret_yaml, const char *text,
                                      size_t bytes);
void kvt_config_yaml_close(struct kvt_config_yaml *yaml);

/* The line (from 1) on which block-style YAML sets @path, the last one if there are several; 0 when
 * it cannot be found. */
uint32_t kvt_config_yaml_line(const char *text, const char *path);
