/* Reading the machine. Nothing here judges; what cannot be read stays unknown, for a doctor must
 * also work in a container that hides half of /proc. */
#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "tools/kvtier-ctl/doctor.h"

#include "daemon/base/alloc.h"

#define CAP_IPC_LOCK_BIT 14u
#define IO_URING_PARAMS_BYTES 256u /* the kernel's struct is 120 and may grow */

/* At most @bytes - 1 of a small file, terminated; false when it cannot be read. */
static bool read_text(const char *sysroot, const char *path, char *buf, size_t bytes)
{
    char full[KVT_CTL_PATH_BYTES];
    kvt_autoclose int fd = -1;
    size_t used = 0;
    ssize_t got;

    if ((size_t)snprintf(full, sizeof(full), "%s%s", sysroot, path) >= sizeof(full))
        return false;
    fd = open(full, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    while (used < bytes - 1 && (got = read(fd, buf + used, bytes - 1 - used)) > 0)
        used += (size_t)got;
    buf[used] = '\0';
    return used > 0;
}

static uint64_t number_at(const char *text)
{
    char *end;
    unsigned long long value;

    while (*text == ' ' || *text == '\t')
        text++;
    if (!isdigit((unsigned char)*text))
        return KVT_CTL_UNKNOWN;
    errno = 0;
    value = strtoull(text, &end, 10);
    return errno != 0 ? KVT_CTL_UNKNOWN : value;
}

/* The number behind @label at the beginning of a line. */
static uint64_t number_of(const char *text, const char *label)
{
    size_t length = strlen(label);

    for (const char *line = text; line != NULL; line = strchr(line, '\n')) {
        line += *line == '\n';
        if (strncmp(line, label, length) == 0)
            return number_at(line + length);
        if (*line == '\0')
            break;
    }
    return KVT_CTL_UNKNOWN;
}

static uint64_t times(uint64_t value, uint64_t by)
{
    return value == KVT_CTL_UNKNOWN ? value : value * by;
}

static void gather_meminfo(struct kvt_ctl_facts *facts, const char *sysroot)
{
    char text[8192];

    facts->memory_bytes = facts->hugepages_total = facts->hugepages_free = KVT_CTL_UNKNOWN;
    facts->hugepage_bytes = KVT_CTL_UNKNOWN;
    if (!read_text(sysroot, "/proc/meminfo", text, sizeof(text)))
        return;
    facts->memory_bytes = times(number_of(text, "MemTotal:"), KVT_KIB);
    facts->hugepages_total = number_of(text, "HugePages_Total:");
    facts->hugepages_free = number_of(text, "HugePages_Free:");
    facts->hugepage_bytes = times(number_of(text, "Hugepagesize:"), KVT_KIB);
}

/* "always [madvise] never": the word in brackets. */
static void gather_choice(const char *sysroot, const char *path, char *buf, size_t bytes)
{
    char text[256];
    char *open, *close;

    buf[0] = '\0';
    if (!read_text(sysroot, path, text, sizeof(text)))
        return;
    open = strchr(text, '[');
    close = open != NULL ? strchr(open, ']') : NULL;
    if (close == NULL)
        return;
    *close = '\0';
    (void)snprintf(buf, bytes, "%s", open + 1);
}

static uint64_t limit_of(const char *limits, const char *label)
{
    const char *line = strstr(limits, label);

    if (line == NULL)
        return KVT_CTL_UNKNOWN;
    line += strlen(label);
    while (*line == ' ')
        line++;
    return strncmp(line, "unlimited", 9) == 0 ? KVT_CTL_UNLIMITED : number_at(line);
}

static void gather_process(struct kvt_ctl_facts *facts, const char *sysroot, uint64_t pid)
{
    char path[64], text[8192];
    const char *caps;
    int length;

    facts->memlock_bytes = facts->nofile = KVT_CTL_UNKNOWN;
    length = pid == 0 ? snprintf(path, sizeof(path), "/proc/self")
                      : snprintf(path, sizeof(path), "/proc/%llu", (unsigned long long)pid);
    (void)snprintf(path + length, sizeof(path) - (size_t)length, "/limits");
    if (read_text(sysroot, path, text, sizeof(text))) {
        facts->memlock_bytes = limit_of(text, "Max locked memory");
        facts->nofile = limit_of(text, "Max open files");
    }
    (void)snprintf(path + length, sizeof(path) - (size_t)length, "/status");
    if (!read_text(sysroot, path, text, sizeof(text)))
        return;
    caps = strstr(text, "CapEff:");
    if (caps != NULL)
        facts->is_memlock_exempt = (strtoull(caps + 7, NULL, 16) >> CAP_IPC_LOCK_BIT & 1) != 0;
}

/* The last line of each key in a unit's text wins. */
static void scan_unit(struct kvt_ctl_facts *facts, const char *text)
{
    const struct {
        const char *key;
        char *value;
        size_t bytes;
    } keys[] = {
        {"LimitMEMLOCK=", facts->unit_memlock, sizeof(facts->unit_memlock)},
        {"PrivateDevices=", facts->unit_private_devices, sizeof(facts->unit_private_devices)},
    };

    for (const char *line = text; *line != '\0';) {
        size_t length = strcspn(line, "\n");

        for (size_t i = 0; i < KVT_COUNT_OF(keys); i++) {
            size_t key = strlen(keys[i].key);

            if (strncmp(line, keys[i].key, key) == 0)
                (void)snprintf(keys[i].value, keys[i].bytes, "%.*s",
                               (int)KVT_MIN(length - key, (size_t)60), line + key);
        }
        line += length + (line[length] == '\n');
    }
}

static int is_drop_in(const struct dirent *entry)
{
    size_t length = strlen(entry->d_name);

    return length > 5 && strcmp(entry->d_name + length - 5, ".conf") == 0;
}

static void gather_drop_ins(struct kvt_ctl_facts *facts, const char *sysroot, const char *folder)
{
    char path[KVT_CTL_PATH_BYTES], text[16384];
    struct dirent **entries = NULL;
    int count;

    (void)snprintf(path, sizeof(path), "%s%s/kvtierd.service.d", sysroot, folder);
    count = scandir(path, &entries, is_drop_in, alphasort);
    for (int i = 0; i < count; i++) {
        (void)snprintf(path, sizeof(path), "%s/kvtierd.service.d/%s", folder, entries[i]->d_name);
        if (read_text(sysroot, path, text, sizeof(text)))
            scan_unit(facts, text);
        free(entries[i]);
    }
    free(entries);
}

static void gather_unit(struct kvt_ctl_facts *facts, const char *sysroot)
{
    /* Highest precedence first, as systemd looks. */
    static const char *const folders[] = {"/etc/systemd/system", "/run/systemd/system",
                                          "/usr/local/lib/systemd/system",
                                          "/usr/lib/systemd/system", "/lib/systemd/system"};
    char path[256], text[16384];

    for (size_t i = 0; i < KVT_COUNT_OF(folders) && facts->unit_path[0] == '\0'; i++) {
        (void)snprintf(path, sizeof(path), "%s/kvtierd.service", folders[i]);
        if (!read_text(sysroot, path, text, sizeof(text)))
            continue;
        (void)snprintf(facts->unit_path, sizeof(facts->unit_path), "%s", path);
        scan_unit(facts, text);
    }
    for (size_t i = KVT_COUNT_OF(folders); i-- > 0;)
        gather_drop_ins(facts, sysroot, folders[i]);
}

/* Tries what the daemon will do. Any parameters do: a size of one entry is the smallest ring. */
static int try_io_uring(void)
{
    _Alignas(16) uint8_t params[IO_URING_PARAMS_BYTES] = {0};
    long fd = syscall(SYS_io_uring_setup, 1u, params);

    if (fd < 0)
        return errno;
    (void)close((int)fd);
    return 0;
}

/* The lowest limit from @path upwards; @root is where the hierarchy is mounted. */
static void walk_cgroup(struct kvt_ctl_facts *facts, const char *sysroot, const char *root,
                        const char *path, const char *file)
{
    char group[256], name[512], text[64];

    (void)snprintf(group, sizeof(group), "%s", strcmp(path, "/") == 0 ? "" : path);
    for (;;) {
        char *slash;

        (void)snprintf(name, sizeof(name), "%s%s/%s", root, group, file);
        if (read_text(sysroot, name, text, sizeof(text)) && strncmp(text, "max", 3) != 0) {
            uint64_t limit = number_at(text);

            /* v1 says "no limit" by a number near 2^63. */
            if (limit < (UINT64_C(1) << 60) && limit < facts->cgroup_limit_bytes) {
                facts->cgroup_limit_bytes = limit;
                (void)snprintf(facts->cgroup_path, sizeof(facts->cgroup_path), "%s",
                               group[0] == '\0' ? "/" : group);
            }
        }
        slash = strrchr(group, '/');
        if (slash == NULL)
            return;
        *slash = '\0';
    }
}

static void gather_cgroup(struct kvt_ctl_facts *facts, const char *sysroot, uint64_t pid)
{
    char path[64], text[4096];
    char *save = NULL;

    facts->cgroup_limit_bytes = KVT_CTL_UNLIMITED;
    if (pid == 0)
        (void)snprintf(path, sizeof(path), "/proc/self/cgroup");
    else
        (void)snprintf(path, sizeof(path), "/proc/%llu/cgroup", (unsigned long long)pid);
    if (!read_text(sysroot, path, text, sizeof(text)))
        return;
    for (char *line = strtok_r(text, "\n", &save); line != NULL;
         line = strtok_r(NULL, "\n", &save)) {
        const char *controllers = strchr(line, ':');
        const char *group = controllers != NULL ? strchr(controllers + 1, ':') : NULL;

        if (group == NULL)
            continue;
        if (controllers[1] == ':') {
            facts->cgroup_version = KVT_MAX(facts->cgroup_version, 2u);
            walk_cgroup(facts, sysroot, "/sys/fs/cgroup", group + 1, "memory.max");
        } else if (strncmp(controllers + 1, "memory:", 7) == 0) {
            facts->cgroup_version = KVT_MAX(facts->cgroup_version, 1u);
            walk_cgroup(facts, sysroot, "/sys/fs/cgroup/memory", group + 1,
                        "memory.limit_in_bytes");
        }
    }
}

void kvt_ctl_facts_gather(struct kvt_ctl_facts *ret_facts, const char *sysroot, uint64_t pid)
{
    struct kvt_ctl_facts *facts = ret_facts;
    char text[64];

    *facts = (struct kvt_ctl_facts){.daemon_pid = pid, .io_uring_disabled = KVT_CTL_UNKNOWN};
    gather_meminfo(facts, sysroot);
    gather_choice(sysroot, "/sys/kernel/mm/transparent_hugepage/enabled", facts->thp_enabled,
                  sizeof(facts->thp_enabled));
    gather_choice(sysroot, "/sys/kernel/mm/transparent_hugepage/shmem_enabled",
                  facts->shmem_enabled, sizeof(facts->shmem_enabled));
    gather_process(facts, sysroot, pid);
    gather_unit(facts, sysroot);
    if (read_text(sysroot, "/proc/sys/kernel/io_uring_disabled", text, sizeof(text)))
        facts->io_uring_disabled = number_at(text);
    facts->io_uring_error = try_io_uring();
    gather_cgroup(facts, sysroot, pid);
    kvt_ctl_gpu_facts_gather(&facts->gpu, sysroot, pid);
}
