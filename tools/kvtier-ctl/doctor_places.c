/* Places: the file system that L3 lies on, and the sockets. These look at the real system, so they
 * leave nothing behind: what they create to try O_DIRECT has no name. */
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/un.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "tools/kvtier-ctl/doctor.h"

#include "daemon/base/alloc.h"
#include "tools/lib/table.h"

#define TMPFS_TYPE 0x01021994l
#define OVERLAY_TYPE 0x794c7630l
#define NFS_TYPE 0x6969l

/* The nearest folder that exists: L3's path may be a file, a folder, or not there yet. */
static bool existing_folder(char folder[KVT_CTL_PATH_BYTES], const char *path)
{
    struct stat st;

    (void)snprintf(folder, KVT_CTL_PATH_BYTES, "%s", path);
    for (;;) {
        char *slash;

        if (stat(folder, &st) == 0 && S_ISDIR(st.st_mode))
            return true;
        slash = strrchr(folder, '/');
        if (slash == NULL)
            return false;
        if (slash == folder) {
            folder[1] = '\0';
            return true;
        }
        *slash = '\0';
    }
}

static void check_type(struct kvt_ctl_report *report, const char *folder)
{
    struct statfs fs;

    if (statfs(folder, &fs) != 0)
        return;
    if (fs.f_type == TMPFS_TYPE) {
        kvt_ctl_found(report, KVT_CTL_LEVEL_WARN, "L3 place", "%s is a tmpfs: it is memory",
                      folder);
        kvt_ctl_found_remedy(report, "put L3 on a local NVMe file system (ext4, xfs)");
    } else if (fs.f_type == NFS_TYPE) {
        kvt_ctl_found(report, KVT_CTL_LEVEL_WARN, "L3 place", "%s is on NFS", folder);
        kvt_ctl_found_remedy(report,
                             "a server away is slower than computing: put L3 on local NVMe");
    } else if (fs.f_type == OVERLAY_TYPE) {
        kvt_ctl_found(report, KVT_CTL_LEVEL_WARN, "L3 place",
                      "%s is a container's overlay: slow, and gone with the container", folder);
        kvt_ctl_found_remedy(report, "mount a volume of local NVMe there");
    }
}

static void check_direct(struct kvt_ctl_report *report, const char *folder)
{
    kvt_autoclose int fd = open(folder, O_TMPFILE | O_RDWR | O_DIRECT | O_CLOEXEC, 0600);

    if (fd >= 0) {
        kvt_ctl_found(report, KVT_CTL_LEVEL_OK, "L3 O_DIRECT", "works in %s", folder);
    } else if (errno == EOPNOTSUPP) {
        kvt_ctl_found(report, KVT_CTL_LEVEL_WARN, "L3 O_DIRECT",
                      "cannot be tried in %s: no unnamed files there", folder);
    } else if (errno == EINVAL) {
        kvt_ctl_found(report, KVT_CTL_LEVEL_BAD, "L3 O_DIRECT", "not supported in %s", folder);
        kvt_ctl_found_remedy(report, "use a file system that has it: ext4 or xfs on local NVMe");
    } else {
        bool is_denied = errno == EACCES || errno == EPERM;

        kvt_ctl_found(report, is_denied ? KVT_CTL_LEVEL_WARN : KVT_CTL_LEVEL_BAD, "L3 O_DIRECT",
                      "cannot create a file in %s: %s", folder, strerror(errno));
        kvt_ctl_found_remedy(report, is_denied
                                         ? "run the doctor as the daemon's user or as root: its "
                                           "folder is closed to others, as it should be"
                                         : "the daemon's user must be able to write there");
    }
}

/* One file of L3 and where it is to lie. */
struct place {
    char path[KVT_CTL_PATH_BYTES];
    char folder[KVT_CTL_PATH_BYTES]; /* "" there is none: the path is not absolute */
    uint64_t file_system;            /* of the folder */
    uint64_t own_bytes;              /* what the file takes already */
};

static void check_room(struct kvt_ctl_report *report, const char *folder, uint64_t own_bytes,
                       uint64_t want)
{
    char a[KVT_TEXT_BYTES], b[KVT_TEXT_BYTES];
    struct statvfs fs;
    uint64_t room;

    if (statvfs(folder, &fs) != 0)
        return;
    room = (uint64_t)fs.f_bavail * fs.f_frsize + own_bytes;
    (void)kvt_text_bytes(a, room);
    (void)kvt_text_bytes(b, want);
    if (room < want) {
        kvt_ctl_found(report, KVT_CTL_LEVEL_BAD, "L3 room",
                      "%s free in %s (with its own files), L3 is %s", a, folder, b);
        kvt_ctl_found_remedy(report,
                             "free some, or make L3 smaller: its files are allocated whole at "
                             "the start");
        return;
    }
    kvt_ctl_found(report, KVT_CTL_LEVEL_OK, "L3 room",
                  "%s free in %s (with its own files), L3 is %s", a, folder, b);
}

/* A raw device, which is its own room. */
static void check_raw(struct kvt_ctl_report *report, const struct kvt_ctl_pools *pools,
                      const char *path)
{
    kvt_autoclose int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    char a[KVT_TEXT_BYTES], b[KVT_TEXT_BYTES];
    struct stat st;
    off_t end;

    if (pools->l3_index_dir[0] == '\0') {
        kvt_ctl_found(report, KVT_CTL_LEVEL_BAD, "L3 index",
                      "%s is raw, its index needs a file "
                      "system",
                      path);
        kvt_ctl_found_remedy(report, "set tiers.l3.index_dir to a folder on local NVMe");
    }
    if (fd < 0) {
        kvt_ctl_found(report, KVT_CTL_LEVEL_WARN, "L3 device", "%s: %s", path, strerror(errno));
        kvt_ctl_found_remedy(report, "the daemon's user must be able to read and write it: a udev "
                                     "rule with GROUP=\"kvtierd\"");
        return;
    }
    if (fstat(fd, &st) != 0 || !S_ISBLK(st.st_mode)) {
        kvt_ctl_found(report, KVT_CTL_LEVEL_BAD, "L3 device", "%s is no block device", path);
        kvt_ctl_found_remedy(report, "name one (/dev/disk/by-id/...), or a file elsewhere");
        return;
    }
    end = lseek(fd, 0, SEEK_END);
    kvt_ctl_found(
        report,
        end >= 0 && (uint64_t)end >= pools->l3_bytes ? KVT_CTL_LEVEL_OK : KVT_CTL_LEVEL_WARN,
        "L3 device", "%s has %s, tiers.l3.bytes is %s", path,
        kvt_text_bytes(a, end < 0 ? 0 : (uint64_t)end), kvt_text_bytes(b, pools->l3_bytes));
}

static void check_mode(struct kvt_ctl_report *report, const char *path)
{
    struct stat st;

    if (stat(path, &st) != 0 || S_ISBLK(st.st_mode) || (st.st_mode & 077) == 0)
        return;
    kvt_ctl_found(report, KVT_CTL_LEVEL_BAD, "L3 mode", "%s is open to others: mode %04o", path,
                  (unsigned)(st.st_mode & 07777));
    kvt_ctl_found_remedy(report, "prompts lie there in clear: chmod %s %s",
                         S_ISDIR(st.st_mode) ? "0700" : "0600", path);
}

/* What a file takes; 0 when it is not there. */
static uint64_t file_bytes(const char *path, const char *suffix)
{
    char name[KVT_CTL_PATH_BYTES + 8];
    struct stat st;

    (void)snprintf(name, sizeof(name), "%s%s", path, suffix);
    return stat(name, &st) == 0 && S_ISREG(st.st_mode) ? (uint64_t)st.st_blocks * 512 : 0;
}

/* The paths of @pools that are files, in @places; raw devices are looked at on the way. */
static uint32_t take_places(struct kvt_ctl_report *report, const struct kvt_ctl_pools *pools,
                            struct place *places)
{
    const char *at = pools->l3_paths;
    uint32_t count = 0;

    while (at[0] != '\0' && count < KVT_ZONES_MAX) {
        struct place *place = &places[count];
        size_t bytes = strcspn(at, ","), lead = strspn(at, " ");
        struct stat st;

        (void)snprintf(place->path, sizeof(place->path), "%.*s",
                       (int)(bytes - KVT_MIN(lead, bytes)), at + lead);
        for (size_t end = strlen(place->path); end > 0 && place->path[end - 1] == ' ';)
            place->path[--end] = '\0';
        at += bytes + (at[bytes] == ',');
        if (strncmp(place->path, "/dev/", 5) == 0 && strncmp(place->path, "/dev/shm/", 9) != 0) {
            check_raw(report, pools, place->path);
            continue;
        }
        if (!existing_folder(place->folder, place->path) || stat(place->folder, &st) != 0) {
            kvt_ctl_found(report, KVT_CTL_LEVEL_BAD, "L3 place", "%s is not an absolute path",
                          place->path);
            kvt_ctl_found_remedy(report, "give an absolute path");
            continue;
        }
        place->file_system = st.st_dev;
        place->own_bytes = file_bytes(place->path, "");
        if (pools->l3_index_dir[0] == '\0')
            place->own_bytes += file_bytes(place->path, ".index");
        count++;
    }
    return count;
}

/* Each file system once, with all that is to lie there. */
static void check_places(struct kvt_ctl_report *report, const struct kvt_ctl_pools *pools,
                         const struct place *places, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        uint64_t own_bytes = 0, want = 0;
        bool is_seen = false;

        for (uint32_t k = 0; k < count; k++) {
            if (places[k].file_system != places[i].file_system)
                continue;
            is_seen = is_seen || k < i;
            own_bytes += places[k].own_bytes;
            want += pools->l3_bytes;
        }
        if (is_seen)
            continue;
        check_type(report, places[i].folder);
        check_direct(report, places[i].folder);
        check_room(report, places[i].folder, own_bytes, want);
    }
    for (uint32_t i = 0; i < count; i++)
        check_mode(report, places[i].path);
}

void kvt_ctl_check_l3(struct kvt_ctl_report *report, const struct kvt_ctl_pools *pools)
{
    kvt_autofree struct place *places = NULL;

    if (pools->source == NULL)
        return;
    if (pools->l3_bytes == 0) {
        kvt_ctl_found(report, KVT_CTL_LEVEL_OK, "L3 place", "L3 is off");
        return;
    }
    if (pools->l3_paths[0] == '\0') {
        kvt_ctl_found(report, KVT_CTL_LEVEL_OK, "L3 place",
                      "in use; give --config FILE to look at its file system");
        return;
    }
    places = kvt_alloc_zeroed(KVT_ZONES_MAX, sizeof(*places));
    if (places != NULL)
        check_places(report, pools, places, take_places(report, pools, places));
}

static void socket_refused(struct kvt_ctl_report *report, const char *what, const char *path,
                           int error)
{
    if (error == ECONNREFUSED) {
        kvt_ctl_found(report, KVT_CTL_LEVEL_WARN, what, "%s is there, but nobody listens", path);
        kvt_ctl_found_remedy(report, "left over from a daemon that was killed; the next start "
                                     "replaces it: systemctl start kvtierd");
    } else if (error == EACCES || error == EPERM) {
        kvt_ctl_found(report, KVT_CTL_LEVEL_WARN, what, "%s: this user may not connect", path);
        kvt_ctl_found_remedy(report, "join the socket's group (ls -l %s), or run as root", path);
    } else {
        kvt_ctl_found(report, KVT_CTL_LEVEL_BAD, what, "%s: %s", path, strerror(error));
    }
}

void kvt_ctl_check_socket(struct kvt_ctl_report *report, const char *what, const char *path,
                          uint64_t *ret_pid)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    kvt_autoclose int fd = -1;
    struct ucred peer = {0};
    socklen_t bytes = sizeof(peer);
    struct stat st;

    *ret_pid = 0;
    if (strlen(path) >= sizeof(address.sun_path)) {
        kvt_ctl_found(report, KVT_CTL_LEVEL_BAD, what,
                      "%s is longer than the %zu bytes of a "
                      "socket's path",
                      path, sizeof(address.sun_path) - 1);
        kvt_ctl_found_remedy(report, "choose a shorter path");
        return;
    }
    memcpy(address.sun_path, path, strlen(path) + 1);
    if (stat(path, &st) != 0) {
        kvt_ctl_found(report, KVT_CTL_LEVEL_WARN, what, "%s: %s", path,
                      errno == ENOENT ? "not there: no daemon runs with this path"
                                      : strerror(errno));
        kvt_ctl_found_remedy(report, "systemctl status kvtierd; or give --socket");
        return;
    }
    if (!S_ISSOCK(st.st_mode)) {
        kvt_ctl_found(report, KVT_CTL_LEVEL_BAD, what, "%s is not a socket", path);
        kvt_ctl_found_remedy(report, "move it away: the daemon replaces sockets only");
        return;
    }
    fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0 || connect(fd, (const struct sockaddr *)&address, sizeof(address)) != 0) {
        socket_refused(report, what, path, errno);
        return;
    }
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &bytes) == 0 && peer.pid > 0)
        *ret_pid = (uint64_t)peer.pid;
    kvt_ctl_found(report, (st.st_mode & 07) != 0 ? KVT_CTL_LEVEL_WARN : KVT_CTL_LEVEL_OK, what,
                  "%s: process %llu listens, mode %04o", path, (unsigned long long)*ret_pid,
                  (unsigned)(st.st_mode & 07777));
    if ((st.st_mode & 07) != 0)
        kvt_ctl_found_remedy(report, "every local user may connect: a mode of 0660 and a group for "
                                     "the engines is safer");
}
