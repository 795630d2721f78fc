/* GPUs for the doctor: what the kernel says of the driver, whether the daemon may open its device
 * nodes, and what a running daemon says of its L1. Nothing here calls CUDA: the doctor runs where
 * there is none. */
#include <dirent.h>
#include <errno.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tools/kvtier-ctl/view.h"
#include "tools/lib/table.h"

#define DROP_IN "deploy/kvtierd-gpu.conf as /etc/systemd/system/kvtierd.service.d/gpu.conf"

/* ---- gathering --------------------------------------------------------------------------------
 */

struct ids { /* of who opens the nodes */
    unsigned uid, gid;
    unsigned groups[64];
    uint32_t groups_count;
};

static FILE *open_below(const char *sysroot, const char *path)
{
    char full[KVT_CTL_PATH_BYTES];

    if ((size_t)snprintf(full, sizeof(full), "%s%s", sysroot, path) >= sizeof(full))
        return NULL;
    return fopen(full, "re");
}

/* "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul ...": the first word that is
 * a number with points. */
static void gather_version(struct kvt_ctl_gpu_facts *facts, const char *sysroot)
{
    FILE *file = open_below(sysroot, "/proc/driver/nvidia/version");
    char line[512], *save = NULL;

    if (file == NULL)
        return;
    facts->has_driver = true;
    if (fgets(line, sizeof(line), file) != NULL)
        for (char *word = strtok_r(line, " \t\n", &save);
             word != NULL && facts->driver_version[0] == '\0';
             word = strtok_r(NULL, " \t\n", &save))
            if (word[0] >= '0' && word[0] <= '9' && strchr(word, '.') != NULL)
                (void)snprintf(facts->driver_version, sizeof(facts->driver_version), "%s", word);
    (void)fclose(file);
}

static struct ids ids_of(const char *sysroot, uint64_t pid)
{
    struct ids ids = {.uid = geteuid(), .gid = getegid()};
    char path[64], line[1024];
    FILE *file;

    if (pid == 0)
        (void)snprintf(path, sizeof(path), "/proc/self/status");
    else
        (void)snprintf(path, sizeof(path), "/proc/%llu/status", (unsigned long long)pid);
    file = open_below(sysroot, path);
    if (file == NULL)
        return ids;
    while (fgets(line, sizeof(line), file) != NULL) {
        char *save = NULL, *word;

        (void)sscanf(line, "Uid: %*u %u", &ids.uid); /* real, effective, ... */
        (void)sscanf(line, "Gid: %*u %u", &ids.gid);
        if (strncmp(line, "Groups:", 7) != 0)
            continue;
        for (word = strtok_r(line + 7, " \t\n", &save);
             word != NULL && ids.groups_count < KVT_COUNT_OF(ids.groups);
             word = strtok_r(NULL, " \t\n", &save))
            ids.groups_count += sscanf(word, "%u", &ids.groups[ids.groups_count]) == 1;
    }
    (void)fclose(file);
    return ids;
}

static bool may_open(const struct ids *ids, const struct stat *node)
{
    bool is_group = node->st_gid == ids->gid;

    for (uint32_t i = 0; i < ids->groups_count; i++)
        is_group = is_group || node->st_gid == ids->groups[i];
    if (ids->uid == 0)
        return true;
    if (node->st_uid == ids->uid)
        return (node->st_mode & 0600) == 0600;
    return (node->st_mode & (is_group ? 0060 : 0006)) == (is_group ? 0060 : 0006);
}

static void gather_node(struct kvt_ctl_gpu_facts *facts, const char *sysroot, const struct ids *ids,
                        const char *name)
{
    struct kvt_ctl_gpu_node *node = &facts->nodes[facts->nodes_count];
    char full[KVT_CTL_PATH_BYTES];
    struct stat found;

    if (facts->nodes_count == KVT_COUNT_OF(facts->nodes))
        return;
    (void)snprintf(node->path, sizeof(node->path), "/dev/%s", name);
    if ((size_t)snprintf(full, sizeof(full), "%s%s", sysroot, node->path) >= sizeof(full))
        return;
    facts->nodes_count++;
    if (stat(full, &found) != 0) {
        node->error = errno;
        return;
    }
    node->mode = found.st_mode & 0777;
    node->error = may_open(ids, &found) ? 0 : EACCES;
}

/* /proc/driver/nvidia/gpus/0000:3b:00.0/information: "Device Minor: 	 0" is /dev/nvidia0. */
static void gather_gpu(struct kvt_ctl_gpu_facts *facts, const char *sysroot, const struct ids *ids,
                       const char *pci)
{
    char path[KVT_CTL_PATH_BYTES], line[256], name[24];
    FILE *file;
    unsigned minor;

    facts->gpus_count++;
    (void)snprintf(path, sizeof(path), "/proc/driver/nvidia/gpus/%.64s/information", pci);
    file = open_below(sysroot, path);
    if (file == NULL)
        return;
    while (fgets(line, sizeof(line), file) != NULL) {
        if (sscanf(line, "Device Minor: %u", &minor) != 1)
            continue;
        (void)snprintf(name, sizeof(name), "nvidia%u", minor);
        gather_node(facts, sysroot, ids, name);
    }
    (void)fclose(file);
}

void kvt_ctl_gpu_facts_gather(struct kvt_ctl_gpu_facts *ret_facts, const char *sysroot,
                              uint64_t pid)
{
    struct kvt_ctl_gpu_facts facts = {.has_driver = false};
    struct ids ids = ids_of(sysroot, pid);
    char path[KVT_CTL_PATH_BYTES];
    struct dirent *entry;
    DIR *folder;

    gather_version(&facts, sysroot);
    if (facts.has_driver) {
        gather_node(&facts, sysroot, &ids, "nvidiactl");
        gather_node(&facts, sysroot, &ids, "nvidia-uvm");
        (void)snprintf(path, sizeof(path), "%s/proc/driver/nvidia/gpus", sysroot);
        folder = opendir(path);
        while (folder != NULL && (entry = readdir(folder)) != NULL)
            if (entry->d_name[0] != '.')
                gather_gpu(&facts, sysroot, &ids, entry->d_name);
        if (folder != NULL)
            (void)closedir(folder);
    }
    *ret_facts = facts;
}

/* ---- the machine ------------------------------------------------------------------------------
 */

static void check_nodes(struct kvt_ctl_report *report, const struct kvt_ctl_gpu_facts *gpu)
{
    uint32_t fine = 0;

    for (uint32_t i = 0; i < gpu->nodes_count; i++) {
        const struct kvt_ctl_gpu_node *node = &gpu->nodes[i];

        if (node->error == 0) {
            fine++;
        } else if (node->error == EACCES) {
            kvt_ctl_found(report, KVT_CTL_LEVEL_BAD, "GPU nodes",
                          "%s (mode %04o) may not be opened by the daemon's user", node->path,
                          node->mode);
            kvt_ctl_found_remedy(report, "put the user into the node's group, or let the driver "
                                         "make it for all (NVreg_DeviceFileMode=0666)");
        } else {
            kvt_ctl_found(report, KVT_CTL_LEVEL_BAD, "GPU nodes", "%s: %s", node->path,
                          strerror(node->error));
            kvt_ctl_found_remedy(report,
                                 "before kvtierd starts: nvidia-modprobe -c 0 -u, or enable "
                                 "nvidia-persistenced; in a container: --gpus all");
        }
    }
    if (fine == gpu->nodes_count)
        kvt_ctl_found(report, KVT_CTL_LEVEL_OK, "GPU nodes", "the %u that it needs may be opened",
                      fine);
}

void kvt_ctl_check_gpu_machine(struct kvt_ctl_report *report, const struct kvt_ctl_facts *facts,
                               const struct kvt_ctl_pools *pools)
{
    const struct kvt_ctl_gpu_facts *gpu = &facts->gpu;

    if (!pools->is_cuda && (pools->has_gpus || pools->is_export)) {
        kvt_ctl_found(report, KVT_CTL_LEVEL_WARN, "L1 keys",
                      "%s%s%s set, but tiers.l1.backend is not cuda: nothing comes of it",
                      pools->has_gpus ? "tiers.l1.gpus" : "",
                      pools->has_gpus && pools->is_export ? " and " : "",
                      !pools->is_export ? " is"
                      : pools->has_gpus ? "tiers.l1.export are"
                                        : "tiers.l1.export is");
        kvt_ctl_found_remedy(report, "set tiers.l1.backend to cuda, or take them out");
    }
    if (!gpu->has_driver && !pools->is_cuda)
        return;
    if (!gpu->has_driver) {
        kvt_ctl_found(report, KVT_CTL_LEVEL_BAD, "GPU driver",
                      "L1 is to be on GPUs, but no NVIDIA driver is loaded (no "
                      "/proc/driver/nvidia/version)");
        kvt_ctl_found_remedy(report, "install it (nvidia-smi works then), modprobe nvidia; in a "
                                     "container: the nvidia runtime. Meanwhile L1 is off, L2 and "
                                     "L3 serve");
        return;
    }
    kvt_ctl_found(report, KVT_CTL_LEVEL_OK, "GPU driver", "%s, %u GPU%s%s",
                  gpu->driver_version[0] != '\0' ? gpu->driver_version : "of unknown version",
                  gpu->gpus_count, gpu->gpus_count == 1 ? "" : "s",
                  pools->source == NULL || pools->is_cuda
                      ? ""
                      : "; L1 does not use them (tiers.l1.backend is not cuda)");
    if (!pools->is_cuda)
        return;
    check_nodes(report, gpu);
    if (facts->unit_path[0] != '\0' && strcmp(facts->unit_private_devices, "yes") == 0) {
        kvt_ctl_found(report, KVT_CTL_LEVEL_BAD, "GPU unit",
                      "PrivateDevices=yes in %s hides /dev/nvidia*", facts->unit_path);
        kvt_ctl_found_remedy(report, "install " DROP_IN ", then systemctl daemon-reload");
    }
}

/* ---- what a running daemon says ---------------------------------------------------------------
 */

static void check_gpu(struct kvt_ctl_report *report, const struct kvt_api_gpu_stats *gpu)
{
    char name[KVT_CTL_TEXT_BYTES], text[KVT_CTL_TEXT_BYTES], a[KVT_TEXT_BYTES];

    (void)kvt_ctl_gpu_name(name, gpu);
    if (gpu->state == KVT_API_GPU_LOST) {
        kvt_ctl_found(report, KVT_CTL_LEVEL_BAD, "GPU", "%.80s is lost for %s", name,
                      kvt_ctl_duration(text, gpu->lost_ns));
        kvt_ctl_found_remedy(report,
                             "%s. dmesg (Xid) says what happened; it is tried again by itself, "
                             "L2 and L3 serve",
                             gpu->why.bytes > 0 ? kvt_ctl_clean(text, gpu->why)
                                                : "its context was lost");
    } else if (gpu->state != KVT_API_GPU_OK) {
        kvt_ctl_found(report, KVT_CTL_LEVEL_BAD, "GPU", "%.80s is not used: %s", name,
                      kvt_ctl_clean(text, gpu->why));
        kvt_ctl_found_remedy(report, "mend it and restart kvtierd, or leave the GPU out of "
                                     "tiers.l1.gpus");
    } else if (gpu->bad_checks > 0 || gpu->losses > 0) {
        kvt_ctl_found(report, KVT_CTL_LEVEL_WARN, "GPU",
                      "%.80s: lost %llu times, %s copies had wrong bytes (each was a miss)", name,
                      (unsigned long long)gpu->losses, kvt_text_count(a, gpu->bad_checks));
        kvt_ctl_found_remedy(report, "dmesg (Xid), nvidia-smi -q (ECC errors, retired pages); an "
                                     "importer that writes into L1 makes wrong bytes, too");
    } else {
        kvt_ctl_found(report, KVT_CTL_LEVEL_OK, "GPU", "%.80s is in service, arena of %s", name,
                      kvt_text_bytes(a, gpu->arena_bytes));
    }
    if (gpu->state != KVT_API_GPU_REFUSED && !gpu->has_ipc) {
        kvt_ctl_found(report, KVT_CTL_LEVEL_WARN, "GPU IPC",
                      "%.80s has no CUDA IPC: engines cannot lend its memory, they register memfds",
                      name);
        kvt_ctl_found_remedy(report, "nothing is broken: Attach refuses its memory with that "
                                     "reason, and L1 is not read in place there. Virtual GPUs and "
                                     "WSL have none");
    }
}

/* L2 is pinned in the context of one GPU, and so until that is back through none. */
static bool has_lost_gpu(const struct kvt_ans_stats *stats)
{
    for (uint32_t i = 0; i < stats->gpus_count; i++)
        if (stats->gpus[i].state == KVT_API_GPU_LOST)
            return true;
    return false;
}

void kvt_ctl_check_gpus(struct kvt_ctl_report *report, const struct kvt_ans_stats *stats)
{
    const struct kvt_api_l1_stats *l1 = &stats->l1;
    char text[KVT_CTL_TEXT_BYTES];

    if (!kvt_ctl_is_cuda(stats))
        return;
    if (l1->why.bytes > 0) {
        kvt_ctl_found(report, KVT_CTL_LEVEL_BAD, "L1", "off: %s", kvt_ctl_clean(text, l1->why));
        kvt_ctl_found_remedy(report, "%s",
                             l1->has_cuda
                                 ? "docs/operations.md, GPUs, says what each reason means; then "
                                   "restart kvtierd. L2 and L3 serve meanwhile"
                                 : "build it with CUDA (meson -Dcuda=enabled), or set "
                                   "tiers.l1.backend to none");
    } else if (!l1->is_host_pinned) {
        kvt_ctl_found(report, KVT_CTL_LEVEL_WARN, "L1", "L2 is not pinned for the GPUs: %s",
                      l1->pin_why.bytes > 0 ? kvt_ctl_clean(text, l1->pin_why) : "unknown why");
        kvt_ctl_found_remedy(report,
                             "copies between L1 and L2 go through staging, at about half "
                             "the speed: %s",
                             has_lost_gpu(stats)
                                 ? "it is pinned again when the GPU that is lost is back"
                                 : "LimitMEMLOCK=infinity, and a smaller L2 where the driver "
                                   "cannot map all of it");
    }
    for (uint32_t i = 0; i < stats->gpus_count; i++)
        check_gpu(report, &stats->gpus[i]);
}
