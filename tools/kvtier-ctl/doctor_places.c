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

static void check_room(struct kvt_ctl_report *report, const char *folder, const char *path,
                       uint64_t want)
{
    char a[KVT_TEXT_BYTES], b[KVT_TEXT_BYTES];
    uint64_t have = 0, room;
    struct statvfs fs;
    struct stat st;

    if (statvfs(folder, &fs) != 0 || want == 0)
        return;
    if (stat(path, &st) == 0 && S_ISREG(st.st_mode))
        have = (uint64_t)st.st_blocks * 512;
    room = (uint64_t)fs.f_bavail * fs.f_frsize + have;
    (void)kvt_text_bytes(a, room);
    (void)kvt_text_bytes(b, want);
    if (room < want) {
        kvt_ctl_found(report, KVT_CTL_LEVEL_BAD, "L3 room", "%s free (with its own file), L3 is %s",
                      a, b);
        kvt_ctl_found_remedy(report,
                             "free some, or make L3 smaller: its file is allocated whole at "
                             "the start");
        return;
    }
    kvt_ctl_found(report, KVT_CTL_LEVEL_OK, "L3 room", "%s free (with its own file), L3 is %s", a,
                  b);
}

void kvt_ctl_check_l3(struct kvt_ctl_report *report, const struct kvt_ctl_pools *pools)
{
    char folder[KVT_CTL_PATH_BYTES];
    struct stat st;

    if (pools->source == NULL)
        return;
    if (pools->l3_bytes == 0) {
        kvt_ctl_found(report, KVT_CTL_LEVEL_OK, "L3 place", "L3 is off");
        return;
    }
    if (pools->l3_path[0] == '\0') {
        kvt_ctl_found(report, KVT_CTL_LEVEL_OK, "L3 place",
                      "in use; give --config FILE to look at its file system");
        return;
    }
    if (!existing_folder(folder, pools->l3_path)) {
        kvt_ctl_found(report, KVT_CTL_LEVEL_BAD, "L3 place", "%s is not an absolute path",
                      pools->l3_path);
        kvt_ctl_found_remedy(report, "give an absolute path");
        return;
    }
    check_type(report, folder);
    check_direct(report, folder);
    check_room(report, folder, pools->l3_path, pools->l3_bytes);
    if (stat(pools->l3_path, &st) == 0 && (st.st_mode & 077) != 0) {
        kvt_ctl_found(report, KVT_CTL_LEVEL_BAD, "L3 mode", "%s is open to others: mode %04o",
                      pools->l3_path, (unsigned)(st.st_mode & 07777));
        kvt_ctl_found_remedy(report, "prompts lie there in clear: chmod %s %s",
                             S_ISDIR(st.st_mode) ? "0700" : "0600", pools->l3_path);
    }
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
