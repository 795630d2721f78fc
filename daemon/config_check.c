#include "daemon/config.h"

#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/un.h>

#include "daemon/base/limits.h"
#include "daemon/base/size.h"
#include "daemon/config_keys.h"

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
static int statvfs_near(const char *path, struct statvfs *ret_fs)
{
    char directory[KVT_CONFIG_TEXT_BYTES];
    char *slash;

    if (path[0] == '\0')
        return -ENOENT;
    if (statvfs(path, ret_fs) == 0)
        return 0;
    (void)snprintf(directory, sizeof(directory), "%s", path);
    slash = strrchr(directory, '/');
    if (slash == NULL)
        (void)snprintf(directory, sizeof(directory), ".");
    else
        slash[slash == directory ? 1 : 0] = '\0';
    return statvfs(directory, ret_fs) == 0 ? 0 : -errno;
}

uint64_t kvt_config_disk_bytes(const char *path)
{
    struct statvfs fs;

    return statvfs_near(path, &fs) == 0 ? (uint64_t)fs.f_blocks * fs.f_frsize : 0;
}

void kvt_config_facts_read(const struct kvt_config *config, struct kvt_config_facts *ret_facts)
{
    struct kvt_config_facts facts = {.memory_bound = "MemAvailable"};
    uint64_t limit = cgroup_limit_bytes();
    struct statvfs fs;
    struct stat file;

    facts.memory_bytes = KVT_MIN(meminfo_bytes("MemTotal"), limit);
    facts.memory_available_bytes = meminfo_bytes("MemAvailable");
    if (limit < facts.memory_available_bytes) {
        facts.memory_available_bytes = limit;
        facts.memory_bound = "the cgroup's limit (memory.max)";
    }
    if (config->l3.bytes != 0 && statvfs_near(config->l3.path, &fs) == 0) {
        facts.is_disk_known = true;
        facts.disk_free_bytes = (uint64_t)fs.f_bavail * fs.f_frsize;
        if (stat(config->l3.path, &file) == 0)
            facts.disk_free_bytes += (uint64_t)file.st_blocks * 512;
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

static void check_memory(struct check *check, const struct kvt_config *config,
                         const struct kvt_config_facts *facts)
{
    uint64_t l1_bytes = config->l1.backend == KVT_CONFIG_L1_HOST ? config->l1.bytes : 0;
    uint64_t sum = l1_bytes + config->l2.bytes + config->index.memory_bytes;
    char sizes[5][KVT_SIZE_TEXT_BYTES];

    if (facts->memory_available_bytes == 0 ||
        sum + KVT_CONFIG_OVERHEAD_BYTES <= facts->memory_available_bytes)
        return;
    kvt_size_format_short(l1_bytes, sizes[0]);
    kvt_size_format_short(config->l2.bytes, sizes[1]);
    kvt_size_format_short(config->index.memory_bytes, sizes[2]);
    kvt_size_format_short(sum + KVT_CONFIG_OVERHEAD_BYTES, sizes[3]);
    kvt_size_format_short(facts->memory_available_bytes, sizes[4]);
    refuse(check,
           "memory: L1 %s + L2 %s + index %s + 64 MiB for the daemon itself = %s, but %s is %s: "
           "lower tiers.l2.bytes, tiers.l1.bytes or index.memory, or raise the limit",
           sizes[0], sizes[1], sizes[2], sizes[3], facts->memory_bound, sizes[4]);
}

static void check_disk(struct check *check, const struct kvt_config *config,
                       const struct kvt_config_facts *facts)
{
    char wanted[KVT_SIZE_TEXT_BYTES], have[KVT_SIZE_TEXT_BYTES];

    if (config->l3.bytes != 0 && config->l3.path[0] == '\0')
        refuse(check, "tiers.l3.bytes is set but tiers.l3.path is not: say where, or set it to 0");
    if (config->l3.bytes == 0 && config->l3.path[0] != '\0')
        refuse(check, "tiers.l3.path is set but tiers.l3.bytes is 0: say how much, or unset it");
    if (config->l3.retry_min_ns > config->l3.retry_max_ns)
        refuse(check, "tiers.l3.retry_min is above tiers.l3.retry_max");
    if (!facts->is_disk_known || config->l3.bytes <= facts->disk_free_bytes)
        return;
    kvt_size_format_short(config->l3.bytes, wanted);
    kvt_size_format_short(facts->disk_free_bytes, have);
    refuse(check,
           "tiers.l3.bytes is %s, but the file system of %s has room for %s: lower it, or free "
           "space",
           wanted, config->l3.path, have);
}

static void check_tiers(struct check *check, const struct kvt_config *config)
{
    uint64_t unit = config->l2.slab_unit_bytes;

    if (config->l1.backend == KVT_CONFIG_L1_NONE && config->l1.bytes != 0)
        refuse(check, "tiers.l1.bytes is set but tiers.l1.backend is none: choose host, or set it "
                      "to 0");
    if (config->l1.backend != KVT_CONFIG_L1_NONE && config->l1.bytes == 0)
        refuse(check, "tiers.l1.backend is set but tiers.l1.bytes is 0: say how much");
    if (config->l1.backend == KVT_CONFIG_L1_CUDA)
        refuse(check, "tiers.l1.backend is cuda, which this build does not have: use host or none");
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
