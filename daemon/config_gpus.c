/* tiers.l1.gpus as it is written: "all", or indices and UUIDs between commas. Pure: whether there
 * are such GPUs is found out when L1 is opened, on the machine that has them. */
#include <stdio.h>
#include <string.h>

#include "daemon/config_keys.h"

#define UUID_DIGITS_MIN 8u
#define UUID_DIGITS_MAX 32u
#define INDEX_DIGITS_MAX 3u

static bool is_one_of(char c, const char *set)
{
    return c != '\0' && strchr(set, c) != NULL;
}

/* Hexadecimal digits, with dashes between them as in nvidia-smi -L. */
static bool is_uuid(const char *at, size_t bytes)
{
    size_t digits = 0;

    for (size_t i = 0; i < bytes; i++) {
        if (at[i] != '-' && !is_one_of(at[i], "0123456789abcdefABCDEF"))
            return false;
        digits += at[i] != '-';
    }
    return digits >= UUID_DIGITS_MIN && digits <= UUID_DIGITS_MAX;
}

static bool is_index(const char *at, size_t bytes)
{
    return bytes > 0 && bytes <= INDEX_DIGITS_MAX && strspn(at, "0123456789") >= bytes;
}

static bool is_gpu(const char *at, size_t bytes)
{
    if (is_index(at, bytes))
        return true;
    return bytes > 4 && (strncmp(at, "GPU-", 4) == 0 || strncmp(at, "MIG-", 4) == 0) &&
           is_uuid(at + 4, bytes - 4);
}

/* The same index once with and once without a leading zero is found out when L1 is opened. */
static bool is_named_before(const char *list, const char *name)
{
    const char *at = kvt_config_paths_begin(list);
    char other[KVT_CONFIG_TEXT_BYTES];
    uint32_t seen = 0;
    size_t bytes;

    while (kvt_config_paths_next(&at, other, &bytes))
        seen += strcmp(other, name) == 0;
    return seen > 1;
}

const char *kvt_config_gpus_problem(const char *text)
{
    const char *at = kvt_config_paths_begin(text);
    char name[KVT_CONFIG_TEXT_BYTES];
    uint32_t count = 0;
    size_t bytes;

    if (at == NULL)
        return "names no GPU: all, or indices and UUIDs between commas";
    if (strlen(text) >= KVT_CONFIG_TEXT_BYTES)
        return "is longer than 255 bytes: the first 8 digits of each UUID will do";
    if (strcmp(text, "all") == 0)
        return NULL;
    while (kvt_config_paths_next(&at, name, &bytes)) {
        if (!is_gpu(name, bytes))
            return "is not all, nor indices (0) and UUIDs (GPU-1b2c3d4e-...; nvidia-smi -L shows "
                   "them) between commas";
        if (is_named_before(text, name))
            return "names a GPU twice";
        if (++count > KVT_ZONES_MAX)
            return "names more than 16 GPUs";
    }
    return NULL;
}
static_assert(KVT_ZONES_MAX == 16 && KVT_CONFIG_TEXT_BYTES == 256, "the texts above say so");

uint32_t kvt_config_gpus_count(const struct kvt_config *config)
{
    const char *at = kvt_config_paths_begin(config->l1.gpus);
    char name[KVT_CONFIG_TEXT_BYTES];
    uint32_t count = 0;
    size_t bytes;

    if (strcmp(config->l1.gpus, "all") == 0)
        return 0;
    while (kvt_config_paths_next(&at, name, &bytes))
        count++;
    return count;
}

bool kvt_config_idle_keys(const struct kvt_config *config, char ret_line[KVT_CONFIG_LINE_BYTES])
{
    bool has_gpus = strcmp(config->l1.gpus, "all") != 0, has_export = config->l1.is_export;

    if (config->l1.backend == KVT_CONFIG_L1_CUDA || (!has_gpus && !has_export))
        return false;
    (void)snprintf(
        ret_line, KVT_CONFIG_LINE_BYTES,
        "%s%s%s set, but tiers.l1.backend is %s: only cuda has GPUs, nothing comes of it",
        has_gpus ? "tiers.l1.gpus" : "", has_gpus && has_export ? " and " : "",
        has_export ? (has_gpus ? "tiers.l1.export are" : "tiers.l1.export is") : " is",
        config->l1.backend == KVT_CONFIG_L1_HOST ? "host" : "none");
    return true;
}

uint64_t kvt_config_share_bytes(const struct kvt_config_share *share, uint64_t whole_bytes)
{
    unsigned __int128 part = (unsigned __int128)whole_bytes * share->milli_pct;

    KVT_ASSERT(share->bytes == 0 || share->milli_pct == 0);
    KVT_ASSERT(share->milli_pct <= KVT_CONFIG_MILLI_PCT_ALL);
    return share->milli_pct == 0 ? share->bytes : (uint64_t)(part / KVT_CONFIG_MILLI_PCT_ALL);
}
