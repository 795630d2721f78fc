/* A module for LD_PRELOAD that writes down what a program asks of the files below one directory, so
 * that the state after a power cut can be made of it (tools/lib/powercut.py; the format is there
 * and here). Every call is still made as it was asked.
 *
 *   KVT_POWERCUT_DIR           the directory; its real path
 *   KVT_POWERCUT_JOURNAL       where it is written; appended by all processes
 *   KVT_POWERCUT_IGNORE_SYNC   "name:name": syncs of these files are made and not written down, as
 * if the program had left them out. For the proof that this is found.
 *
 * A call has two records: one before it is made, with all its bytes, and one with its result. One
 * record is one append, which no other can cut in two; a process that is killed in it never made
 * the call. io_uring is refused with EPERM, which sends the program to plain calls: what a ring
 * does is not seen from here. Writes by a shared mapping are not seen either (LMDB makes none but
 * to its lock file, which it resets).
 *
 * Stateless: what a descriptor is, /proc says at each call, so that descriptors may be duplicated,
 * inherited and passed on. */
#include <assert.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#define RECORD_MAGIC 0x5743574f50766b21ull
#define JOURNAL_FD_MIN 900 /* out of the way of programs that count on low numbers */
#define IOV_MAX_SEEN 64

enum kind {
    KIND_WRITE = 1,
    KIND_SYNC = 2, /* of a directory: of the names in it */
    KIND_SIZE = 3,
    KIND_CREATE = 4,
    KIND_RENAME = 5, /* path and, behind a NUL, the new path */
    KIND_UNLINK = 6,
    KIND_END = 16, /* the call with this id came back */
};
enum flag { FLAG_DSYNC = 1, FLAG_DIRECTORY = 2, FLAG_NO_DATA = 4 };

struct record {
    uint64_t magic, id, inode;
    int64_t offset, result; /* SIZE: the new size is in offset */
    uint32_t kind, flags, path_bytes, data_bytes;
};
static_assert(sizeof(struct record) == 56, "the reader's struct says the same");
static_assert(sizeof(off_t) == 8, "one implementation for both names of each call");

struct target { /* what a descriptor is, when it is one of ours */
    uint64_t inode;
    uint32_t flags;
    char path[PATH_MAX];
};

static int journal_fd = -1;
static char directory[PATH_MAX];
static size_t directory_bytes;
static _Atomic uint32_t calls;

static void *real_of(const char *name)
{
    void *found = dlsym(RTLD_NEXT, name);

    if (found == NULL)
        abort();
    return found;
}

/* ISO C has no cast between object and function pointers; POSIX has. */
#define REAL(name, type) (*(type *)(void *)&(void *){real_of(name)})

__attribute__((constructor)) static void start(void)
{
    const char *dir = getenv("KVT_POWERCUT_DIR"), *path = getenv("KVT_POWERCUT_JOURNAL");
    long fd;

    if (dir == NULL || path == NULL || realpath(dir, directory) == NULL)
        return;
    directory_bytes = strlen(directory);
    fd = syscall(SYS_openat, AT_FDCWD, path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0)
        abort();
    journal_fd = fcntl((int)fd, F_DUPFD_CLOEXEC, JOURNAL_FD_MIN);
    (void)syscall(SYS_close, fd);
    if (journal_fd < 0)
        abort();
}

static bool is_ours(const char *path)
{
    return strncmp(path, directory, directory_bytes) == 0 &&
           (path[directory_bytes] == '/' || path[directory_bytes] == '\0');
}

static bool is_ignored(const char *path)
{
    const char *name = strrchr(path, '/') + 1, *at = getenv("KVT_POWERCUT_IGNORE_SYNC");
    size_t bytes = strlen(name);

    while (at != NULL && *at != '\0') {
        size_t length = strcspn(at, ":");

        if (length == bytes && memcmp(at, name, bytes) == 0)
            return true;
        at += length + (at[length] == ':');
    }
    return false;
}

static bool find(int fd, struct target *ret)
{
    int saved = errno;
    struct stat st;
    char link[64];
    ssize_t bytes;
    long flags;

    if (journal_fd < 0 || fstat(fd, &st) != 0 || (!S_ISREG(st.st_mode) && !S_ISDIR(st.st_mode))) {
        errno = saved;
        return false;
    }
    (void)snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
    bytes = readlink(link, ret->path, sizeof(ret->path) - 1);
    flags = fcntl(fd, F_GETFL);
    errno = saved;
    if (bytes <= 0)
        return false;
    ret->path[bytes] = '\0';
    ret->inode = st.st_ino;
    ret->flags =
        (S_ISDIR(st.st_mode) ? FLAG_DIRECTORY : 0u) | ((flags & O_DSYNC) != 0 ? FLAG_DSYNC : 0u);
    return is_ours(ret->path);
}

static void append(struct record *record, const char *path, const struct iovec *data, int count)
{
    struct iovec parts[IOV_MAX_SEEN + 2];
    int saved = errno, used = 0;

    record->magic = RECORD_MAGIC;
    record->data_bytes = 0;
    parts[used++] = (struct iovec){record, sizeof(*record)};
    parts[used++] = (struct iovec){(void *)(uintptr_t)path, record->path_bytes};
    for (int i = 0; i < count; i++) {
        record->data_bytes += (uint32_t)data[i].iov_len;
        parts[used++] = data[i];
    }
    if (syscall(SYS_writev, journal_fd, parts, used) < (long)sizeof(*record))
        abort(); /* without its journal the whole run means nothing */
    errno = saved;
}

static uint64_t begin(enum kind kind, const struct target *target, int64_t offset,
                      const struct iovec *data, int count)
{
    struct record record = {.id = (uint64_t)getpid() << 32 | atomic_fetch_add(&calls, 1),
                            .inode = target->inode,
                            .offset = offset,
                            .kind = (uint32_t)kind,
                            .flags = target->flags,
                            .path_bytes = (uint32_t)strlen(target->path)};

    if (count > IOV_MAX_SEEN)
        abort();
    append(&record, target->path, data, count);
    return record.id;
}

static void end(uint64_t id, int64_t result)
{
    struct record record = {.id = id, .result = result, .kind = KIND_END};

    append(&record, "", NULL, 0);
}

/* ---- writes -----------------------------------------------------------------------------------
 */

typedef ssize_t (*write_fn)(int, const void *, size_t);
typedef ssize_t (*writev_fn)(int, const struct iovec *, int);
typedef ssize_t (*pwrite_fn)(int, const void *, size_t, off_t);
typedef ssize_t (*pwritev_fn)(int, const struct iovec *, int, off_t);

static int64_t position(int fd)
{
    int64_t at = lseek(fd, 0, (fcntl(fd, F_GETFL) & O_APPEND) != 0 ? SEEK_END : SEEK_CUR);

    return at < 0 ? 0 : at;
}

#define AROUND_WRITE(iov, count, offset, call)                                                     \
    do {                                                                                           \
        struct target target;                                                                      \
        uint64_t id;                                                                               \
        ssize_t done;                                                                              \
                                                                                                   \
        if (!find(fd, &target))                                                                    \
            return call;                                                                           \
        id = begin(KIND_WRITE, &target, offset, iov, count);                                       \
        done = call;                                                                               \
        end(id, done);                                                                             \
        return done;                                                                               \
    } while (0)

ssize_t write(int fd, const void *data, size_t bytes)
{
    struct iovec iov = {(void *)(uintptr_t)data, bytes};

    AROUND_WRITE(&iov, 1, position(fd), REAL("write", write_fn)(fd, data, bytes));
}

ssize_t writev(int fd, const struct iovec *iov, int count)
{
    AROUND_WRITE(iov, count, position(fd), REAL("writev", writev_fn)(fd, iov, count));
}

ssize_t pwrite(int fd, const void *data, size_t bytes, off_t offset)
{
    struct iovec iov = {(void *)(uintptr_t)data, bytes};

    AROUND_WRITE(&iov, 1, offset, REAL("pwrite64", pwrite_fn)(fd, data, bytes, offset));
}

ssize_t pwritev(int fd, const struct iovec *iov, int count, off_t offset)
{
    AROUND_WRITE(iov, count, offset, REAL("pwritev64", pwritev_fn)(fd, iov, count, offset));
}

/* ---- syncs ------------------------------------------------------------------------------------
 */

typedef int (*sync_fn)(int);

static int around_sync(int fd, const char *name)
{
    struct target target;
    uint64_t id;
    int r;

    if (!find(fd, &target))
        return REAL(name, sync_fn)(fd);
    if (is_ignored(target.path))
        target.flags |= FLAG_NO_DATA;
    id = begin(KIND_SYNC, &target, 0, NULL, 0);
    r = REAL(name, sync_fn)(fd);
    end(id, r);
    return r;
}

int fsync(int fd)
{
    return around_sync(fd, "fsync");
}

int fdatasync(int fd)
{
    return around_sync(fd, "fdatasync");
}

/* ---- sizes ------------------------------------------------------------------------------------
 */

typedef int (*truncate_fn)(int, off_t);
typedef int (*fallocate_fn)(int, int, off_t, off_t);
typedef int (*posix_fallocate_fn)(int, off_t, off_t);

int ftruncate(int fd, off_t bytes)
{
    struct target target;
    uint64_t id;
    int r;

    if (!find(fd, &target))
        return REAL("ftruncate64", truncate_fn)(fd, bytes);
    id = begin(KIND_SIZE, &target, bytes, NULL, 0);
    r = REAL("ftruncate64", truncate_fn)(fd, bytes);
    end(id, r);
    return r;
}

/* Room alone changes nothing that a reader sees; a larger size does. Holes and shifts are not known
 * here. */
static bool find_growth(int fd, int mode, off_t bytes, struct target *target)
{
    struct stat st;

    if (!find(fd, target))
        return false;
    if ((mode & ~FALLOC_FL_KEEP_SIZE) != 0)
        abort();
    return mode == 0 && fstat(fd, &st) == 0 && st.st_size < bytes;
}

int fallocate(int fd, int mode, off_t offset, off_t bytes)
{
    struct target target;
    uint64_t id;
    int r;

    if (!find_growth(fd, mode, offset + bytes, &target))
        return REAL("fallocate64", fallocate_fn)(fd, mode, offset, bytes);
    id = begin(KIND_SIZE, &target, offset + bytes, NULL, 0);
    r = REAL("fallocate64", fallocate_fn)(fd, mode, offset, bytes);
    end(id, r);
    return r;
}

int posix_fallocate(int fd, off_t offset, off_t bytes)
{
    struct target target;
    uint64_t id;
    int r;

    if (!find_growth(fd, 0, offset + bytes, &target))
        return REAL("posix_fallocate64", posix_fallocate_fn)(fd, offset, bytes);
    id = begin(KIND_SIZE, &target, offset + bytes, NULL, 0);
    r = REAL("posix_fallocate64", posix_fallocate_fn)(fd, offset, bytes);
    end(id, -r);
    return r;
}

/* ---- names ------------------------------------------------------------------------------------
 */

typedef int (*openat_fn)(int, const char *, int, ...);
typedef int (*renameat_fn)(int, const char *, int, const char *);
typedef int (*unlinkat_fn)(int, const char *, int);

/* Is @path, relative to @at, in our directory: its real place in @ret. The file need not exist. */
static bool place_of(int at, const char *path, char ret[PATH_MAX])
{
    char parent[PATH_MAX], full[PATH_MAX];
    const char *slash = strrchr(path, '/');

    if (journal_fd < 0)
        return false;
    if (path[0] == '/')
        (void)snprintf(parent, sizeof(parent), "%.*s", (int)(slash - path) + 1, path);
    else if (at == AT_FDCWD)
        (void)snprintf(parent, sizeof(parent), "./%.*s", slash == NULL ? 0 : (int)(slash - path),
                       path);
    else
        (void)snprintf(parent, sizeof(parent), "/proc/self/fd/%d/%.*s", at,
                       slash == NULL ? 0 : (int)(slash - path), path);
    if (realpath(parent, full) == NULL)
        return false;
    return snprintf(ret, PATH_MAX, "%s/%s", full, slash == NULL ? path : slash + 1) < PATH_MAX &&
           is_ours(ret);
}

/* A name that appears and a content that is cut off are written down when they were there: nothing
 * can have been written to a file before its open came back. */
static int around_open(int at, const char *path, int flags, mode_t mode)
{
    struct target target = {0};
    int saved = errno, fd;
    struct stat st;
    bool was_there;

    if ((flags & (O_CREAT | O_TRUNC)) == 0 || (flags & O_TMPFILE) == O_TMPFILE ||
        !place_of(at, path, target.path))
        return REAL("openat64", openat_fn)(at, path, flags, mode);
    was_there = fstatat(at, path, &st, 0) == 0 && S_ISREG(st.st_mode);
    errno = saved;
    fd = REAL("openat64", openat_fn)(at, path, flags, mode);
    if (fd < 0 || !find(fd, &target) || (target.flags & FLAG_DIRECTORY) != 0)
        return fd;
    if (!was_there)
        end(begin(KIND_CREATE, &target, 0, NULL, 0), 0);
    else if ((flags & O_TRUNC) != 0)
        end(begin(KIND_SIZE, &target, 0, NULL, 0), 0);
    return fd;
}

static mode_t mode_of(int flags, va_list args)
{
    return (flags & (O_CREAT | O_TMPFILE)) != 0 ? va_arg(args, mode_t) : 0;
}

#define WITH_MODE(call)                                                                            \
    do {                                                                                           \
        va_list args;                                                                              \
        mode_t mode;                                                                               \
                                                                                                   \
        va_start(args, flags);                                                                     \
        mode = mode_of(flags, args);                                                               \
        va_end(args);                                                                              \
        return call;                                                                               \
    } while (0)

int open(const char *path, int flags, ...)
{
    WITH_MODE(around_open(AT_FDCWD, path, flags, mode));
}

int openat(int at, const char *path, int flags, ...)
{
    WITH_MODE(around_open(at, path, flags, mode));
}

int renameat(int from_at, const char *from, int to_at, const char *to)
{
    struct target target = {0};
    char new_path[PATH_MAX];
    struct iovec iov = {new_path, 0};
    uint64_t id;
    int r;

    if (!place_of(from_at, from, target.path) || !place_of(to_at, to, new_path))
        return REAL("renameat", renameat_fn)(from_at, from, to_at, to);
    iov.iov_len = strlen(new_path);
    id = begin(KIND_RENAME, &target, 0, &iov, 1);
    r = REAL("renameat", renameat_fn)(from_at, from, to_at, to);
    end(id, r);
    return r;
}

int rename(const char *from, const char *to)
{
    return renameat(AT_FDCWD, from, AT_FDCWD, to);
}

int unlinkat(int at, const char *path, int flags)
{
    struct target target = {0};
    uint64_t id;
    int r;

    if ((flags & AT_REMOVEDIR) != 0 || !place_of(at, path, target.path))
        return REAL("unlinkat", unlinkat_fn)(at, path, flags);
    id = begin(KIND_UNLINK, &target, 0, NULL, 0);
    r = REAL("unlinkat", unlinkat_fn)(at, path, flags);
    end(id, r);
    return r;
}

int unlink(const char *path)
{
    return unlinkat(AT_FDCWD, path, 0);
}

/* ---- what would take the journal away ---------------------------------------------------------
 */

/* Programs close what they did not open; the journal is not theirs to close. */
int close_range(unsigned int first, unsigned int last, int flags)
{
    unsigned int journal = (unsigned int)journal_fd;

    if (journal_fd < 0 || journal < first || journal > last)
        return (int)syscall(SYS_close_range, first, last, flags);
    if (first < journal && syscall(SYS_close_range, first, journal - 1, flags) < 0)
        return -1;
    return last == journal ? 0 : (int)syscall(SYS_close_range, journal + 1, last, flags);
}

/* ---- the names that large files have, and the rings that are refused --------------------------
 */

ssize_t pwrite64(int fd, const void *data, size_t bytes, off64_t offset)
{
    return pwrite(fd, data, bytes, offset);
}

ssize_t pwritev64(int fd, const struct iovec *iov, int count, off64_t offset)
{
    return pwritev(fd, iov, count, offset);
}

int ftruncate64(int fd, off64_t bytes)
{
    return ftruncate(fd, bytes);
}

int fallocate64(int fd, int mode, off64_t offset, off64_t bytes)
{
    return fallocate(fd, mode, offset, bytes);
}

int posix_fallocate64(int fd, off64_t offset, off64_t bytes)
{
    return posix_fallocate(fd, offset, bytes);
}

int open64(const char *path, int flags, ...)
{
    WITH_MODE(around_open(AT_FDCWD, path, flags, mode));
}

int openat64(int at, const char *path, int flags, ...)
{
    WITH_MODE(around_open(at, path, flags, mode));
}

struct io_uring;
struct io_uring_params;
int io_uring_queue_init(unsigned int entries, struct io_uring *ring, unsigned int flags);
int io_uring_queue_init_params(unsigned int entries, struct io_uring *ring,
                               struct io_uring_params *params);

int io_uring_queue_init(unsigned int entries, struct io_uring *ring, unsigned int flags)
{
    (void)entries;
    (void)ring;
    (void)flags;
    return -EPERM;
}

int io_uring_queue_init_params(unsigned int entries, struct io_uring *ring,
                               struct io_uring_params *params)
{
    (void)entries;
    (void)ring;
    (void)params;
    return -EPERM;
}
