/* Who uses a device. The lock that counts is on the data itself, so that two names of one file (a
 * symbolic link) do not make two of it; the file beside it carries the pid for people, and is
 * locked too, because daemons of format version 1 lock nothing else. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include "daemon/base/alloc.h"
#include "tiers/disk/file.h"

char *kvt_disk_lock_path(const char *path)
{
    size_t bytes = strlen(path) + sizeof(".lock");
    char *lock_path = kvt_alloc_zeroed(bytes, 1);

    if (lock_path != NULL)
        snprintf(lock_path, bytes, "%s.lock", path);
    return lock_path;
}

static int holder_read(int lock_fd)
{
    char text[24] = {0};

    if (lock_fd < 0 || pread(lock_fd, text, sizeof(text) - 1, 0) <= 0)
        return 0;
    return (int)strtol(text, NULL, 10);
}

/* Of a file that is held under another name: the kernel's list says by whom. 0: not known. */
static int holder_find(int fd)
{
    char line[256];
    struct stat file;
    FILE *locks = fopen("/proc/locks", "re");
    int found = 0;

    if (locks == NULL)
        return 0;
    if (fstat(fd, &file) < 0)
        file = (struct stat){0};
    while (found == 0 && fgets(line, sizeof(line), locks) != NULL) {
        unsigned int major_id, minor_id;
        unsigned long long inode;
        int pid;

        if (sscanf(line, "%*s FLOCK %*s %*s %d %x:%x:%llu", &pid, &major_id, &minor_id, &inode) ==
                4 &&
            inode == file.st_ino && makedev(major_id, minor_id) == file.st_dev)
            found = pid;
    }
    (void)fclose(locks);
    return found > 0 ? found : 0; /* of another container: -1 or 0 */
}

/* The pid is for people: a file system that has no room even for that refuses no device. */
static int holder_write(int lock_fd)
{
    char text[24];
    int bytes = snprintf(text, sizeof(text), "%d\n", (int)getpid());
    ssize_t n;

    if (ftruncate(lock_fd, 0) < 0)
        return kvt_trace(-errno);
    n = pwrite(lock_fd, text, (size_t)bytes, 0);
    if (n < 0 && errno != ENOSPC && errno != EDQUOT)
        return kvt_trace(-errno);
    return 0;
}

int kvt_disk_lock_take(struct kvt_disk_file *file, const struct kvt_disk_io *io,
                       const char *lock_path, int *ret_pid)
{
    int r;

    if (lock_path != NULL) {
        r = io->open(io->ctx, lock_path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
        if (r < 0)
            return kvt_trace(r);
        file->lock_fd = r;
    }
    r = io->lock(io->ctx, file->hold_fd);
    if (r == 0 && file->lock_fd >= 0)
        r = io->lock(io->ctx, file->lock_fd);
    if (r == -EWOULDBLOCK) {
        *ret_pid = holder_find(file->hold_fd);
        if (*ret_pid == 0)
            *ret_pid = holder_read(file->lock_fd);
        return KVT_DISK_E_BUSY;
    }
    if (r == 0 && file->lock_fd >= 0)
        r = holder_write(file->lock_fd);
    return r < 0 ? kvt_trace(r) : 0;
}
