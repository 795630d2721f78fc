#include "daemon/config.h"

#include <dirent.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/un.h>
#include <unistd.h>

#include "daemon/base/alloc.h"
#include "daemon/base/footprint.h"
#include "daemon/base/limits.h"
#include "daemon/base/size.h"
#include "daemon/config_keys.h"

#define PLACE_PATH_BYTES sizeof(((struct kvt_config_device *)NULL)->index_path)
#define DATA_BYTES_MIN (4 * KVT_MIB) /* superblocks and catalog, and something to keep */

/* ---- what the machine has ------------------------------------------------------------------- */

/* The number after @name in a file of "Name:  123 kB" lines, in bytes; 0 when it is not there. */
static uint64_t meminfo_bytes(const char *name)
{
    char line[256];
    unsigned long long kib = 0;
    FILE *file = fopen("/proc/meminfo", "re");
    size_t name_bytes = strlen(name);

    if (file == NULL)
        return 0;
    while (fgets(line, sizeof(line), file) != NULL) {
        if (strncmp(line, name, name_bytes) == 0 &&
            sscanf(line + name_bytes, ": %llu kB", &kib) == 1)
            break;
    }
    (void)fclose(file);
    return kib * 1024;
}

/* UINT64_MAX when the file is not there or says "max". */
static uint64_t limit_in_file(const char *path)
{
    unsigned long long limit = UINT64_MAX;
    FILE *file = fopen(path, "re");

    if (file == NULL)
        return UINT64_MAX;
    if (fscanf(file, "%llu", &limit) != 1)
        limit = UINT64_MAX;
    (void)fclose(file);
    return limit;
}

/* The tightest memory.max from this process's cgroup up to the root (version 2), or version 1's. */
static uint64_t cgroup_limit_bytes(void)
{
    char line[512] = "", path[640];
    uint64_t limit = limit_in_file("/sys/fs/cgroup/memory/memory.limit_in_bytes");
    FILE *file = fopen("/proc/self/cgroup", "re");
    char *own = NULL;

    if (file == NULL)
        return limit;
    while (own == NULL && fgets(line, sizeof(line), file) != NULL) {
        if (strncmp(line, "0::/", 4) == 0)
            own = line + 3;
    }
    (void)fclose(file);
    if (own == NULL)
        return limit;
    own[strcspn(own, "\n")] = '\0';
    while (*own != '\0') {
        (void)snprintf(path, sizeof(path), "/sys/fs/cgroup%s/memory.max", own);
        limit = KVT_MIN(limit, limit_in_file(path));
        *strrchr(own, '/') = '\0';
    }
    return KVT_MIN(limit, limit_in_file("/sys/fs/cgroup/memory.max"));
}

uint64_t kvt_config_ram_bytes(void)
{
    return KVT_MIN(meminfo_bytes("MemTotal"), cgroup_limit_bytes());
}

/* statvfs of @path, or of its directory when it does not exist. */
static int statvfs_near(const char *path, struct statvfs *ret_fs, struct stat *ret_file)
{
    char directory[PLACE_PATH_BYTES];
    char *slash;

    if (path[0] == '\0')
        return -ENOENT;
    if (statvfs(path, ret_fs) == 0)
        return stat(path, ret_file) == 0 ? 0 : -errno;
    (void)snprintf(directory, sizeof(directory), "%s", path);
    slash = strrchr(directory, '/');
    if (slash == NULL)
        (void)snprintf(directory, sizeof(directory), ".");
    else
        slash[slash == directory ? 1 : 0] = '\0';
    return statvfs(directory, ret_fs) == 0 && stat(directory, ret_file) == 0 ? 0 : -errno;
}

/* 0 when it cannot be opened. */
static uint64_t block_device_bytes(const char *path)
{
    kvt_autoclose int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    off_t end = fd < 0 ? -1 : lseek(fd, 0, SEEK_END);

    return end < 0 ? 0 : (uint64_t)end;
}

static void look_at(const char *path, struct kvt_config_place *ret_place)
{
    struct kvt_config_place place = {.is_known = false};
    struct statvfs fs;
    struct stat file;

    if (statvfs_near(path, &fs, &file) == 0) {
        place.is_known = true;
        place.is_raw = S_ISBLK(file.st_mode);
        place.file_system = file.st_dev;
        if (!S_ISDIR(file.st_mode))
            place.file = file.st_ino;
        place.free_bytes = (uint64_t)fs.f_bavail * fs.f_frsize;
        place.own_bytes = place.file == 0 ? 0 : (uint64_t)file.st_blocks * 512;
    }
    if (place.is_raw) {
        place.file = file.st_rdev; /* two names of one device are two inodes */
        place.own_bytes = 0;
        place.free_bytes = block_device_bytes(path);
        place.is_known = place.free_bytes != 0;
    }
    *ret_place = place;
}

uint64_t kvt_config_disk_bytes(const char *paths)
{
    const char *at = kvt_config_paths_begin(paths);
    char path[KVT_CONFIG_TEXT_BYTES];
    uint64_t smallest = UINT64_MAX;
    size_t bytes;

    while (kvt_config_paths_next(&at, path, &bytes)) {
        struct statvfs fs;
        struct stat file;

        if (statvfs_near(path, &fs, &file) == 0)
            smallest =
                KVT_MIN(smallest, S_ISBLK(file.st_mode) ? block_device_bytes(path)
                                                        : (uint64_t)fs.f_blocks * fs.f_frsize);
    }
    return smallest == UINT64_MAX ? 0 : smallest;
}

/* What the driver's kernel module knows, without a call of CUDA. */
static uint32_t driver_gpus_count(void)
{
    DIR *folder = opendir("/proc/driver/nvidia/gpus");
    uint32_t count = 0;

    if (folder == NULL)
        return 0;
    for (const struct dirent *entry; (entry = readdir(folder)) != NULL;)
        count += entry->d_name[0] != '.';
    (void)closedir(folder);
    return KVT_MIN(count, KVT_ZONES_MAX);
}

void kvt_config_facts_read(const struct kvt_config *config, struct kvt_config_facts *ret_facts)
{
    struct kvt_config_facts facts = {.memory_bound = "MemAvailable"};
    struct kvt_config_device devices[KVT_ZONES_MAX];
    uint32_t devices_count = kvt_config_devices(config, devices);
    uint64_t limit = cgroup_limit_bytes();

    facts.memory_bytes = KVT_MIN(meminfo_bytes("MemTotal"), limit);
    facts.memory_available_bytes = meminfo_bytes("MemAvailable");
    facts.gpus_count = driver_gpus_count();
    if (limit < facts.memory_available_bytes) {
        facts.memory_available_bytes = limit;
        facts.memory_bound = "the cgroup's limit (memory.max)";
    }
    for (uint32_t i = 0; i < devices_count; i++) {
        look_at(devices[i].path, &facts.data[i]);
        look_at(devices[i].index_path, &facts.index[i]);
    }
    *ret_facts = facts;
}

/* ---- relations ------------------------------------------------------------------------------ */

struct check {
    const struct kvt_config_report *report;
    int result;
};

KVT_PRINTF(2, 3)
static void refuse(struct check *check, const char *format, ...)
{
    char line[512];
    va_list args;

    va_start(args, format);
    (void)vsnprintf(line, sizeof(line), format, args);
    va_end(args);
    check->report->problem(check->report->ctx, line);
    check->result = -EINVAL;
}

/* What L1 takes of the machine's memory: with host all of it, with cuda the pinned staging of each
 * GPU. A machine without a GPU needs none. */
static uint64_t l1_ram_bytes(const struct kvt_config *config, const struct kvt_config_facts *facts)
{
    uint32_t named = kvt_config_gpus_count(config);

    if (config->l1.backend == KVT_CONFIG_L1_HOST)
        return kvt_config_share_bytes(&config->l1.size, facts->memory_bytes);
    if (config->l1.backend != KVT_CONFIG_L1_CUDA)
        return 0;
    return config->l1.staging_bytes *
           (named == 0 ? facts->gpus_count : KVT_MIN(named, facts->gpus_count));
}

static void check_memory(struct check *check, const struct kvt_config *config,
                         const struct kvt_config_facts *facts)
{
    bool is_cuda = config->l1.backend == KVT_CONFIG_L1_CUDA;
    uint64_t l1_bytes = l1_ram_bytes(config, facts);
    uint64_t sum = l1_bytes + config->l2.bytes + config->index.memory_bytes;
    char sizes[5][KVT_SIZE_TEXT_BYTES];

    if (facts->memory_available_bytes == 0 ||
        sum + KVT_OWN_MEMORY_BYTES <= facts->memory_available_bytes)
        return;
    kvt_size_format_short(l1_bytes, sizes[0]);
    kvt_size_format_short(config->l2.bytes, sizes[1]);
    kvt_size_format_short(config->index.memory_bytes, sizes[2]);
    kvt_size_format_short(sum + KVT_OWN_MEMORY_BYTES, sizes[3]);
    kvt_size_format_short(facts->memory_available_bytes, sizes[4]);
    refuse(check,
           "memory: %s %s + L2 %s + index %s + %u MiB for the daemon itself = %s, but %s is %s: "
           "lower tiers.l2.bytes, %s or index.memory, or raise the limit",
           is_cuda ? "pinned staging of L1" : "L1", sizes[0], sizes[1], sizes[2],
           KVT_OWN_MEMORY_MIB, sizes[3], facts->memory_bound, sizes[4],
           is_cuda ? "tiers.l1.staging" : "tiers.l1.bytes");
}

/* What one file of L3 wants, and where. */
struct want {
    const char *path;
    uint64_t bytes;
    const struct kvt_config_place *place;
};

static bool is_on_file_system(const struct want *want)
{
    return want->place->is_known && !want->place->is_raw;
}

/* Files that share a file system share its room: each file system is looked at once, with all that
 * is to lie there. Where some of it is there already the daemon has run: a file system that became
 * full then is no wrong configuration, and the devices that find no room are out of service, or
 * stay as large as they are. */
static void check_room(struct check *check, const struct want *wants, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        const struct kvt_config_place *place = wants[i].place;
        uint64_t bytes = 0, room = place->free_bytes;
        char wanted[KVT_SIZE_TEXT_BYTES], have[KVT_SIZE_TEXT_BYTES];
        uint32_t files = 0;
        bool is_seen = false, is_there = false;

        if (place->is_known && place->is_raw) {
            bytes = wants[i].bytes;
            files = 1;
        }
        for (uint32_t k = 0; k < count && is_on_file_system(&wants[i]); k++) {
            if (!is_on_file_system(&wants[k]) || wants[k].place->file_system != place->file_system)
                continue;
            is_seen = is_seen || k < i;
            is_there = is_there || wants[k].place->own_bytes > 0;
            bytes += wants[k].bytes;
            room += wants[k].place->own_bytes;
            files++;
        }
        if (is_seen || is_there || bytes <= room)
            continue;
        kvt_size_format_short(bytes, wanted);
        kvt_size_format_short(room, have);
        if (place->is_raw)
            refuse(check, "tiers.l3.bytes wants %s of %s, which has %s: lower it", wanted,
                   wants[i].path, have);
        else
            refuse(check,
                   "tiers.l3.bytes: the file system of %s has room for %s, but %u files of L3 "
                   "there want %s: lower it, or free space",
                   wants[i].path, have, files, wanted);
    }
}

static bool is_same_file(const struct want *a, const struct want *b)
{
    if (strcmp(a->path, b->path) == 0)
        return true;
    return a->place->is_known && b->place->is_known && a->place->file != 0 &&
           a->place->file == b->place->file && a->place->is_raw == b->place->is_raw &&
           (a->place->is_raw || a->place->file_system == b->place->file_system);
}

static void check_duplicates(struct check *check, const struct want *wants, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        for (uint32_t k = 0; k < i; k++) {
            if (!is_same_file(&wants[k], &wants[i]))
                continue;
            if (strcmp(wants[k].path, wants[i].path) == 0)
                refuse(check, "tiers.l3.path: two files of L3 would be %s", wants[i].path);
            else
                refuse(check, "tiers.l3.path: %s and %s are the same", wants[k].path,
                       wants[i].path);
        }
    }
}

static void check_paths(struct check *check, const struct kvt_config_device *device, bool is_raw)
{
    const char *slash = strrchr(device->index_path, '/');

    if (device->path[0] != '/')
        refuse(check, "tiers.l3.path: %s is not an absolute path", device->path);
    if (is_raw && (device->index_path[0] == '\0' ||
                   strncmp(device->index_path, device->path, strlen(device->path)) == 0))
        refuse(check,
               "tiers.l3.path: %s is a raw device and its index needs a file system: set "
               "tiers.l3.index_dir",
               device->path);
    if (slash != NULL && strlen(slash + 1) > NAME_MAX)
        refuse(check,
               "tiers.l3.index_dir: the index of %s would have a name of %zu bytes, the "
               "system's limit is %d: use a shorter path",
               device->path, strlen(slash + 1), NAME_MAX);
}

static void check_devices(struct check *check, const struct kvt_config *config,
                          const struct kvt_config_facts *facts)
{
    struct kvt_config_device devices[KVT_ZONES_MAX];
    struct want wants[2 * KVT_ZONES_MAX];
    uint32_t count = kvt_config_devices(config, devices), wants_count = 0;
    char whole[KVT_SIZE_TEXT_BYTES], index[KVT_SIZE_TEXT_BYTES];

    if (count == 0)
        return;
    for (uint32_t i = 0; i < count; i++) {
        check_paths(check, &devices[i], devices[i].is_raw || facts->data[i].is_raw);
        wants[wants_count++] =
            (struct want){devices[i].path, devices[i].data_bytes, &facts->data[i]};
    }
    for (uint32_t i = 0; i < count; i++) {
        if (devices[i].index_path[0] != '\0')
            wants[wants_count++] =
                (struct want){devices[i].index_path, devices[i].index_bytes, &facts->index[i]};
    }
    check_duplicates(check, wants, wants_count);
    check_room(check, wants, wants_count);
    if (devices[0].data_bytes >= DATA_BYTES_MIN)
        return;
    kvt_size_format_short(config->l3.bytes, whole);
    kvt_size_format_short(devices[0].index_bytes, index);
    refuse(check,
           "tiers.l3.bytes is %s and the index takes %s of it: that leaves no room for data: raise "
           "it, or lower tiers.l3.index_bytes",
           whole, index);
}

static void check_disk(struct check *check, const struct kvt_config *config,
                       const struct kvt_config_facts *facts)
{
    bool has_path = kvt_config_paths_begin(config->l3.paths) != NULL;

    if (config->l3.bytes != 0 && !has_path)
        refuse(check, "tiers.l3.bytes is set but tiers.l3.path is not: say where, or set it to 0");
    if (config->l3.bytes == 0 && has_path)
        refuse(check, "tiers.l3.path is set but tiers.l3.bytes is 0: say how much, or unset it");
    if (config->l3.index_dir[0] != '\0' && config->l3.index_dir[0] != '/')
        refuse(check, "tiers.l3.index_dir: %s is not an absolute path", config->l3.index_dir);
    if (config->l3.retry_min_ns > config->l3.retry_max_ns)
        refuse(check, "tiers.l3.retry_min is above tiers.l3.retry_max");
    if (config->l3.lost_after_ns < config->l3.retry_min_ns)
        refuse(check, "tiers.l3.lost_after is below tiers.l3.retry_min: a device would be given up "
                      "before it is tried again");
    check_devices(check, config, facts);
}

#define GPU_PCT_MAX 95u

static void check_gpus(struct check *check, const struct kvt_config *config)
{
    const struct kvt_config_share *size = &config->l1.size;
    char text[2][KVT_SIZE_TEXT_BYTES];

    if (config->l1.backend != KVT_CONFIG_L1_CUDA)
        return;
    if (size->milli_pct % 1000 != 0 || size->milli_pct > GPU_PCT_MAX * 1000)
        refuse(check, "tiers.l1.bytes: of a GPU's memory a whole percentage up to %u%% can be had",
               GPU_PCT_MAX);
    kvt_size_format_short(config->l1.staging_bytes, text[0]);
    if (size->bytes != 0 && size->bytes < config->l1.staging_bytes) {
        kvt_size_format_short(size->bytes, text[1]);
        refuse(check,
               "tiers.l1.staging is %s, more than tiers.l1.bytes (%s): lower it, or raise the "
               "other",
               text[0], text[1]);
    }
    if (config->l1.inflight_bytes < config->l1.staging_bytes) {
        kvt_size_format_short(config->l1.inflight_bytes, text[1]);
        refuse(check,
               "tiers.l1.inflight is %s, less than tiers.l1.staging (%s), which could never be "
               "full: raise it, or lower the other",
               text[1], text[0]);
    }
    if (config->l1.retry_min_ns > config->l1.retry_max_ns)
        refuse(check, "tiers.l1.retry_min is above tiers.l1.retry_max");
}

static void check_tiers(struct check *check, const struct kvt_config *config)
{
    uint64_t unit = config->l2.slab_unit_bytes;
    bool has_size = config->l1.size.bytes != 0 || config->l1.size.milli_pct != 0;

    if (config->l1.backend == KVT_CONFIG_L1_NONE && has_size)
        refuse(check, "tiers.l1.bytes is set but tiers.l1.backend is none: choose cuda (or host), "
                      "or set it to 0");
    if (config->l1.backend != KVT_CONFIG_L1_NONE && !has_size)
        refuse(check, "tiers.l1.backend is set but tiers.l1.bytes is 0: say how much");
    check_gpus(check, config);
    if ((unit & (unit - 1)) != 0)
        refuse(check, "tiers.l2.slab_unit is not a power of two");
}

/* A socket's path, with what the server appends to it, has to fit the system's limit. */
static void check_socket(struct check *check, const char *key, const char *path)
{
    static const char suffix[] = ".regions";
    size_t bytes_max = sizeof(((struct sockaddr_un *)NULL)->sun_path) - sizeof(suffix);

    if (strlen(path) > bytes_max)
        refuse(check, "%s is longer than %zu bytes, which the system's limit leaves", key,
               bytes_max);
}

int kvt_config_check(const struct kvt_config *config, const struct kvt_config_facts *facts,
                     const struct kvt_config_report *report)
{
    struct check check = {.report = report};

    if (config->server.socket[0] == '\0')
        refuse(&check, "server.socket is empty: engines could not reach the daemon");
    else if (strcmp(config->server.socket, config->server.admin_socket) == 0)
        refuse(&check, "server.socket and server.admin_socket are the same path");
    check_socket(&check, "server.socket", config->server.socket);
    check_socket(&check, "server.admin_socket", config->server.admin_socket);
    check_tiers(&check, config);
    check_disk(&check, config, facts);
    check_memory(&check, config, facts);
    if (config->limits.lease_default_ns > config->limits.lease_max_ns)
        refuse(&check, "limits.lease_default is above limits.lease_max");
    if (config->limits.ticket_default_ns > config->limits.ticket_max_ns)
        refuse(&check, "limits.ticket_default is above limits.ticket_max");
    return check.result;
}
