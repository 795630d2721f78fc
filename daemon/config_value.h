/* One configuration value as text: private to daemon/config*.c. Pure. */
#pragma once

#include "daemon/config_keys.h"

#define KVT_CONFIG_WHY_BYTES 256u

/* Parses @text for @key into @config. 0, or -EINVAL with a sentence in @ret_why that begins with
 * the offending text. */
KVT_MUST_USE int kvt_config_value_parse(struct kvt_config *config, const struct kvt_config_key *key,
                                        const char *text, char ret_why[KVT_CONFIG_WHY_BYTES]);
/* The value as parse reads it, without YAML quoting. */
void kvt_config_value_format(const struct kvt_config *config, const struct kvt_config_key *key,
                             char ret_text[KVT_CONFIG_PATHS_BYTES]);
/* What is accepted: "a size from 4MiB to 64TiB, or 0". */
void kvt_config_value_describe(const struct kvt_config_key *key,
                               char ret_text[KVT_CONFIG_WHY_BYTES]);
