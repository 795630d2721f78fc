/* The devices of L3 as the configuration names them: one list of paths, one size for each. Pure,
 * but for what looks at the machine (config_check.c does). */
#include <stdio.h>
#include <string.h>

#include "daemon/config_keys.h"

/* An index is a few hundred bytes a block, mostly tokens; blocks are megabytes or, for small
 * models, some ten KiB. */
#define INDEX_BYTES_MIN (16 * KVT_MIB)
#define INDEX_SHARE 32u

const char *kvt_config_paths_begin(const char *paths)
{
    return paths[strspn(paths, " \t")] == '\0' ? NULL : paths;
}

bool kvt_config_paths_next(const char **at, char ret_path[KVT_CONFIG_TEXT_BYTES], size_t *ret_bytes)
{
    const char *begin = *at;
    const char *end;

    if (begin == NULL)
        return false;
    end = begin + strcspn(begin, ",");
    *at = *end == ',' ? end + 1 : NULL; /* "a," has one more, empty path behind its comma */
    begin += strspn(begin, " \t");
    while (end > begin && (end[-1] == ' ' || end[-1] == '\t'))
        end--;
    *ret_bytes = (size_t)(end - begin);
    (void)snprintf(ret_path, KVT_CONFIG_TEXT_BYTES, "%.*s", (int)*ret_bytes, begin);
    return true;
}

/* "/dev/shm" is memory with a file system; everything else there is a device. */
static bool is_below_dev(const char *path)
{
    return strncmp(path, "/dev/", 5) == 0 && strncmp(path, "/dev/shm/", 9) != 0;
}

/* Beside the data; or in the directory for indexes under the data's whole path, so that /a/l3 and
 * /b/l3 do not meet there: "/index/a-l3.index". */
static void set_index_path(const struct kvt_config *config, struct kvt_config_device *device)
{
    const char *name = device->path + strspn(device->path, "/");
    size_t at;

    if (config->l3.index_dir[0] == '\0') {
        if (!device->is_raw)
            (void)snprintf(device->index_path, sizeof(device->index_path), "%s.index",
                           device->path);
        return;
    }
    at = (size_t)snprintf(device->index_path, sizeof(device->index_path), "%s/",
                          config->l3.index_dir);
    (void)snprintf(device->index_path + at, sizeof(device->index_path) - at, "%s.index", name);
    for (char *slash = device->index_path + at; (slash = strchr(slash, '/')) != NULL;)
        *slash = '-';
}

uint32_t kvt_config_devices(const struct kvt_config *config,
                            struct kvt_config_device ret_devices[KVT_ZONES_MAX])
{
    uint64_t index_bytes = config->l3.index_bytes;
    const char *at = kvt_config_paths_begin(config->l3.paths);
    uint32_t count = 0;
    size_t bytes;

    if (config->l3.bytes == 0)
        return 0;
    if (index_bytes == 0)
        index_bytes = KVT_MAX(INDEX_BYTES_MIN, config->l3.bytes / INDEX_SHARE);
    index_bytes = kvt_round_up(index_bytes, KVT_DIO_ALIGN_BYTES);
    for (; count < KVT_ZONES_MAX; count++) {
        struct kvt_config_device device = {.index_bytes = index_bytes};

        if (!kvt_config_paths_next(&at, device.path, &bytes))
            break;
        KVT_ASSERT(bytes > 0 && bytes < KVT_CONFIG_TEXT_BYTES); /* the parser saw to it */
        if (config->l3.bytes > index_bytes)
            device.data_bytes = kvt_round_down(config->l3.bytes - index_bytes, KVT_DIO_ALIGN_BYTES);
        device.is_raw = is_below_dev(device.path);
        set_index_path(config, &device);
        ret_devices[count] = device;
    }
    return count;
}
