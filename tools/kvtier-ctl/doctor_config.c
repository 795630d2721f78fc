/* The sizes and paths of a configuration, for the doctor alone. The daemon's own reader is strict
 * and knows every key; this one only finds the few keys that it needs in the plain nested maps that
 * a kvtierd.yaml consists of, so that a doctor can look at a machine where kvtierd does not even
 * start. "kvtierd --check-config" says whether a file is right. */
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include "tools/kvtier-ctl/view.h"

#include "daemon/base/alloc.h"
#include "daemon/base/size.h"

#define CONFIG_BYTES_MAX (256 * KVT_KIB)
#define GPU_STAGING_BYTES (64 * KVT_MIB) /* the default of tiers.l1.staging */

/* Copies a scalar without quotes, comment and blanks around it. */
static void clean_value(char value[KVT_CTL_YAML_BYTES], const char *at, size_t bytes)
{
    size_t used = 0, start = 0;
    char quote = '\0';

    while (start < bytes && (at[start] == ' ' || at[start] == '\t'))
        start++;
    if (start < bytes && (at[start] == '"' || at[start] == '\''))
        quote = at[start++];
    for (size_t i = start; i < bytes && used + 1 < KVT_CTL_YAML_BYTES; i++) {
        if (quote != '\0' && at[i] == quote)
            break;
        if (quote == '\0' && at[i] == '#' && (i == start || at[i - 1] == ' '))
            break;
        value[used++] = at[i];
    }
    while (quote == '\0' && used > 0 && (value[used - 1] == ' ' || value[used - 1] == '\r'))
        used--;
    value[used] = '\0';
}

bool kvt_ctl_yaml_next(struct kvt_ctl_yaml *yaml, char ret_value[KVT_CTL_YAML_BYTES])
{
    while (*yaml->at != '\0') {
        const char *line = yaml->at, *key = line + strspn(line, " ");
        size_t line_bytes = strcspn(line, "\n"), key_bytes = strcspn(key, ":\n");
        uint32_t indent = (uint32_t)(key - line), begin;
        const char *colon = key + key_bytes;

        yaml->at = line + line_bytes + (line[line_bytes] == '\n');
        if (*colon != ':' || key_bytes == 0 || *key == '#' || *key == '-')
            continue;
        while (yaml->depth > 0 && yaml->indent[yaml->depth - 1] >= indent)
            yaml->depth--;
        begin = yaml->depth > 0 ? yaml->key_bytes[yaml->depth - 1] : 0;
        if (yaml->depth == KVT_CTL_YAML_DEPTH || begin + key_bytes + 2 > KVT_CTL_YAML_BYTES)
            continue;
        if (begin > 0)
            yaml->key[begin++] = '.';
        memcpy(yaml->key + begin, key, key_bytes);
        yaml->key[begin + key_bytes] = '\0';
        yaml->indent[yaml->depth] = indent;
        yaml->key_bytes[yaml->depth++] = begin + (uint32_t)key_bytes;
        clean_value(ret_value, colon + 1, line_bytes - (size_t)(colon + 1 - line));
        if (ret_value[0] != '\0')
            return true;
    }
    return false;
}

static int read_config(const char *path, char *text)
{
    kvt_autoclose int owned_fd = -1;
    int fd = STDIN_FILENO;
    size_t used = 0;

    if (strcmp(path, "-") != 0) {
        owned_fd = open(path, O_RDONLY | O_CLOEXEC);
        if (owned_fd < 0)
            return -errno;
        fd = owned_fd;
    }
    while (used < CONFIG_BYTES_MAX) {
        ssize_t got = read(fd, text + used, CONFIG_BYTES_MAX - used);

        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return -errno;
        if (got == 0)
            return 0;
        used += (size_t)got;
    }
    return -EFBIG;
}

static int take(struct kvt_ctl_pools *pools, const char *key, const char *value, FILE *err)
{
    const struct {
        const char *key;
        uint64_t *bytes;
    } sizes[] = {{"tiers.l1.bytes", &pools->l1_bytes},
                 {"tiers.l2.bytes", &pools->l2_bytes},
                 {"tiers.l3.bytes", &pools->l3_bytes},
                 {"tiers.l1.staging", &pools->gpu_staging_bytes},
                 {"index.memory", &pools->index_bytes}};

    if (strcmp(key, "tiers.l1.backend") == 0)
        pools->is_cuda = strcmp(value, "cuda") == 0;
    if (strcmp(key, "tiers.l1.gpus") == 0)
        pools->has_gpus = strcmp(value, "all") != 0;
    if (strcmp(key, "tiers.l1.export") == 0)
        pools->is_export = strcmp(value, "true") == 0;
    if (strcmp(key, "tiers.l1.bytes") == 0 && strchr(value, '%') != NULL &&
        kvt_size_parse_share(value, 100000, &pools->l1_milli_pct) == 0)
        return KVT_CTL_OK; /* what it is a part of is known later */
    if (strcmp(key, "tiers.l3.path") == 0)
        (void)snprintf(pools->l3_paths, sizeof(pools->l3_paths), "%s", value);
    if (strcmp(key, "tiers.l3.index_dir") == 0)
        (void)snprintf(pools->l3_index_dir, sizeof(pools->l3_index_dir), "%s", value);
    for (size_t i = 0; i < KVT_COUNT_OF(sizes); i++) {
        int r;

        if (strcmp(key, sizes[i].key) != 0)
            continue;
        r = kvt_size_parse(value, sizes[i].bytes);
        if (r == 0)
            continue;
        (void)fprintf(err, "kvtier-ctl: %s: '%s' %s (units: %s)\n", key, value,
                      kvt_size_error_text(r), KVT_SIZE_UNITS_TEXT);
        return KVT_CTL_USAGE;
    }
    return KVT_CTL_OK;
}

int kvt_ctl_pools_load(struct kvt_ctl_pools *ret_pools, const char *path, FILE *err)
{
    struct kvt_ctl_pools pools = {.source = "configuration",
                                  .gpu_staging_bytes = GPU_STAGING_BYTES};
    struct kvt_ctl_yaml yaml = {0};
    char value[KVT_CTL_YAML_BYTES];
    kvt_autofree char *text = kvt_alloc_zeroed(CONFIG_BYTES_MAX + 1, 1);
    int r = text == NULL ? -ENOMEM : read_config(path, text);

    if (r < 0) {
        (void)fprintf(err, "kvtier-ctl: cannot read %s: %s\n", path, strerror(-r));
        return KVT_CTL_USAGE;
    }
    yaml.at = text;
    while (kvt_ctl_yaml_next(&yaml, value)) {
        r = take(&pools, yaml.key, value, err);
        if (r != KVT_CTL_OK)
            return r;
    }
    if (pools.is_cuda)
        pools.l1_bytes = pools.l1_milli_pct = 0;
    else
        pools.gpu_staging_bytes = 0;
    *ret_pools = pools;
    return KVT_CTL_OK;
}

void kvt_ctl_pools_from_stats(struct kvt_ctl_pools *ret_pools, const struct kvt_ans_stats *stats)
{
    struct kvt_ctl_pools pools = {.source = "running daemon",
                                  .index_bytes = stats->index_memory_bytes,
                                  .is_cuda = kvt_ctl_is_cuda(stats),
                                  .is_export = stats->l1.is_export_allowed};

    for (uint32_t i = 0; i < stats->gpus_count; i++)
        if (stats->gpus[i].state != KVT_API_GPU_REFUSED)
            pools.l1_bytes += stats->gpus[i].staging_bytes;
    for (uint32_t i = 0; i < stats->tiers_count; i++) {
        const struct kvt_api_tier_stats *tier = &stats->tiers[i];

        if (tier->tier == 1 && !pools.is_cuda)
            pools.l1_bytes = tier->capacity_bytes;
        if (tier->tier == 2) {
            pools.l2_bytes = tier->capacity_bytes;
            (void)snprintf(pools.l2_detail, sizeof(pools.l2_detail), "%.*s",
                           (int)KVT_MIN(tier->detail.bytes, sizeof(pools.l2_detail) - 1),
                           tier->detail.bytes > 0 ? tier->detail.at : "");
        }
        if (tier->tier == 3)
            pools.l3_bytes = tier->capacity_bytes;
    }
    *ret_pools = pools;
}
