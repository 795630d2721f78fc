#include "tiers/disk/file.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

#include "daemon/base/alloc.h"
#include "daemon/base/bytes.h"
#include "daemon/base/clock.h"
#include "tiers/disk/catalog.h"
#include "tiers/disk/raw.h"

#define REQUESTS_WAIT_NS (30 * KVT_NS_PER_S)

/* One opening: what the steps below tell each other. */
struct opening {
    struct kvt_disk_file *file;
    const struct kvt_disk_io *io;
    const struct kvt_disk_config *config;
    struct kvt_disk_report *report;
    uint64_t there_bytes, allocated_bytes; /* of the file or device, now */
    uint64_t want_bytes;                   /* what it is to use */
};

/* ---- superblock ----------------------------------------------------------------------------- */

static int super_copy_write(struct kvt_disk_file *file, const struct kvt_disk_io *io, uint32_t copy)
{
    int64_t n = io->pwrite(io->ctx, file->fd, file->super, KVT_DISK_SUPER_BYTES,
                           copy * KVT_DISK_SUPER_BYTES);
    int r;

    if (n != KVT_DISK_SUPER_BYTES)
        return kvt_trace(n < 0 ? (int)n : -EIO);
    r = io->fdatasync(io->ctx, file->fd);
    return r < 0 ? kvt_trace(r) : 0;
}

/* What `about` says, first over the copy that does not count: a torn write leaves a whole one. */
static int super_write(struct kvt_disk_file *file, const struct kvt_disk_io *io)
{
    uint32_t first = !file->super_copy;
    int r;

    file->about.version = KVT_DISK_SUPER_VERSION;
    file->about.serial++;
    kvt_disk_super_encode(file->super, &file->about);
    r = super_copy_write(file, io, first);
    if (r == 0)
        r = super_copy_write(file, io, !first);
    return r;
}

/* Is @super to be believed rather than @other? */
static bool is_newer(const struct kvt_disk_super *super, const struct kvt_disk_super *other)
{
    return super->version != other->version ? super->version > other->version
                                            : super->serial > other->serial;
}

/* Finds the copy that counts. 0, KVT_DISK_E_FOREIGN, KVT_DISK_E_OTHER_VERSION or -errno. */
static int super_read(struct kvt_disk_file *file, const struct kvt_disk_io *io)
{
    uint8_t *blocks[2] = {file->super, file->probe};
    struct kvt_disk_super super;
    bool is_found = false, is_other_version = false;
    int error = 0, r;

    for (uint32_t copy = 0; copy < 2; copy++) {
        int64_t n = io->pread(io->ctx, file->fd, blocks[copy], KVT_DISK_SUPER_BYTES,
                              copy * KVT_DISK_SUPER_BYTES);

        if (n < 0)
            error = (int)n;
        if (n != KVT_DISK_SUPER_BYTES)
            continue;
        r = kvt_disk_super_decode(blocks[copy], &super);
        is_other_version |= r == KVT_DISK_SUPER_E_OTHER_VERSION;
        if (r != 0 || (is_found && !is_newer(&super, &file->about)))
            continue;
        is_found = true;
        file->about = super;
        file->super_copy = copy;
    }
    if (is_other_version)
        return KVT_DISK_E_OTHER_VERSION;
    if (!is_found)
        return error < 0 ? kvt_trace(error) : KVT_DISK_E_FOREIGN;
    if (file->super_copy == 1)
        memcpy(file->super, file->probe, KVT_DISK_SUPER_BYTES);
    return 0;
}

/* Makes the copy that does not count like the one that does. A device that refuses is not refused
 * for it: one copy is enough until the next write. */
static void super_heal(struct kvt_disk_file *file, const struct kvt_disk_io *io)
{
    uint32_t other = !file->super_copy;
    int64_t n = io->pread(io->ctx, file->fd, file->probe, KVT_DISK_SUPER_BYTES,
                          other * KVT_DISK_SUPER_BYTES);

    if (n != KVT_DISK_SUPER_BYTES || memcmp(file->probe, file->super, KVT_DISK_SUPER_BYTES) != 0)
        (void)!super_copy_write(file, io, other);
}

/* ---- making and recognising ----------------------------------------------------------------- */

static int id_make(uint8_t id[KVT_DISK_ID_BYTES])
{
    do {
        if (getrandom(id, KVT_DISK_ID_BYTES, 0) != KVT_DISK_ID_BYTES)
            return kvt_trace(-EIO);
    } while (kvt_bytes_are_zero(id, KVT_DISK_ID_BYTES));
    return 0;
}

/* A device without contents: its superblock claims no data yet. */
static int contents_make(struct opening *opening)
{
    struct kvt_disk_file *file = opening->file;
    const struct kvt_disk_io *io = opening->io;
    int r = 0;

    if (file->is_raw)
        r = kvt_disk_raw_wipe(file, io, opening->there_bytes);
    else if (opening->there_bytes > 0)
        r = io->truncate(io->ctx, file->fd, 0);
    if (r < 0)
        return kvt_trace(r);
    if (!file->is_raw)
        opening->there_bytes = opening->allocated_bytes = 0;
    file->about = (struct kvt_disk_super){.device_bytes = KVT_DISK_DATA_OFFSET_BYTES,
                                          .data_offset_bytes = KVT_DISK_DATA_OFFSET_BYTES,
                                          .created_real_ns = kvt_clock_real_ns()};
    file->super_copy = 1;
    opening->report->is_made = true;
    memcpy(file->about.store_id, opening->config->store_id, KVT_DISK_ID_BYTES);
    r = id_make(file->about.device_uuid);
    if (r == 0 && kvt_bytes_are_zero(file->about.store_id, KVT_DISK_ID_BYTES))
        r = id_make(file->about.store_id);
    return r == 0 ? super_write(file, io) : r;
}

/* A file that ends before its state would begin and has no superblock, but nothing else either, is
 * one whose making was interrupted (or that was cut off there): there are no contents to spare. */
static bool is_beginning(const struct opening *opening)
{
    const struct kvt_disk_file *file = opening->file;
    int64_t n;

    if (opening->there_bytes > 2 * KVT_DISK_SUPER_BYTES)
        return false;
    memset(file->super, 0, KVT_DISK_SUPER_BYTES);
    n = opening->io->pread(opening->io->ctx, file->fd, file->super, KVT_DISK_SUPER_BYTES, 0);
    return n >= 0 && (kvt_get_u64(file->super, KVT_DISK_SUPER_AT_MAGIC) == KVT_DISK_SUPER_MAGIC ||
                      kvt_bytes_are_zero(file->super, KVT_DISK_SUPER_BYTES));
}

/* What is there is not usable for the reason @result: 0 when it may be made ours all the same. */
static int contents_claim(struct opening *opening, int result)
{
    struct kvt_disk_report *report = opening->report;

    if (opening->config->is_format)
        return 0;
    if (result != KVT_DISK_E_FOREIGN)
        return result;
    if (opening->file->is_raw)
        return kvt_disk_raw_check_blank(opening->file, opening->io, opening->there_bytes,
                                        report->why, sizeof(report->why));
    return is_beginning(opening) ? 0 : result;
}

/* Whose it is. 0 and it has a superblock of this set, or why not. */
static int contents_recognise(struct opening *opening)
{
    struct kvt_disk_file *file = opening->file;
    const uint8_t *store_id = opening->config->store_id;
    int r;

    if (opening->there_bytes == 0)
        return contents_make(opening);
    r = super_read(file, opening->io);
    if (r < 0)
        return r;
    if (r == 0 && file->about.version < KVT_DISK_SUPER_VERSION) {
        opening->report->is_upgraded = true;
        return contents_make(opening);
    }
    if (r == 0 && !kvt_bytes_are_zero(store_id, KVT_DISK_ID_BYTES) &&
        memcmp(file->about.store_id, store_id, KVT_DISK_ID_BYTES) != 0)
        r = KVT_DISK_E_OTHER_STORE;
    if (r != 0) {
        r = contents_claim(opening, r);
        return r == 0 ? contents_make(opening) : r;
    }
    if (opening->there_bytes < file->about.device_bytes) {
        opening->report->is_truncated = file->about.device_bytes > KVT_DISK_DATA_OFFSET_BYTES;
        /* Without state and catalog nothing in the data can be named. */
        if (opening->there_bytes < KVT_DISK_DATA_OFFSET_BYTES)
            return contents_make(opening);
    }
    super_heal(file, opening->io);
    return 0;
}

/* ---- size ----------------------------------------------------------------------------------- */

/* Gives the file its size and all of its space; with no room for that, it keeps @have_bytes. */
static int space_take(struct opening *opening, uint64_t have_bytes)
{
    struct kvt_disk_file *file = opening->file;
    const struct kvt_disk_io *io = opening->io;
    uint64_t back_bytes = KVT_MAX(have_bytes, KVT_DISK_DATA_OFFSET_BYTES);
    int r = io->fallocate(io->ctx, file->fd, opening->want_bytes), undo;

    file->is_preallocated = r == 0;
    if (r == 0)
        return 0;
    if (r == -EOPNOTSUPP || r == -ENOSYS) {
        r = opening->there_bytes < opening->want_bytes
                ? io->truncate(io->ctx, file->fd, opening->want_bytes)
                : 0;
        return r < 0 ? kvt_trace(r) : 0;
    }
    /* Do not sit on the part that was got. */
    undo = io->truncate(io->ctx, file->fd, back_bytes);
    if ((r != -ENOSPC && r != -EDQUOT) || undo < 0 || back_bytes == KVT_DISK_DATA_OFFSET_BYTES)
        return kvt_trace(r);
    opening->there_bytes = opening->want_bytes = back_bytes;
    opening->report->is_no_space = true;
    file->is_preallocated = opening->allocated_bytes >= back_bytes;
    return 0;
}

/* Bigger: space first, then the superblock. Smaller: the superblock first. */
static int size_settle(struct opening *opening)
{
    struct kvt_disk_file *file = opening->file;
    const struct kvt_disk_io *io = opening->io;
    uint64_t have_bytes = kvt_round_down(KVT_MIN(opening->there_bytes, file->about.device_bytes),
                                         KVT_DIO_ALIGN_BYTES);
    int r = 0;

    file->is_preallocated = true;
    if (!file->is_raw && opening->want_bytes >= have_bytes &&
        (opening->there_bytes < opening->want_bytes ||
         opening->allocated_bytes < opening->want_bytes))
        r = space_take(opening, have_bytes);
    /* The superblock's bytes may be durable before its flush, and the size is not before one. */
    if (r == 0 && !file->is_raw && file->about.device_bytes < opening->want_bytes)
        r = io->fdatasync(io->ctx, file->fd);
    if (r == 0 && file->about.device_bytes != opening->want_bytes) {
        file->about.device_bytes = opening->want_bytes;
        r = super_write(file, io);
    }
    if (r == 0 && !file->is_raw && opening->there_bytes > opening->want_bytes)
        r = io->truncate(io->ctx, file->fd, opening->want_bytes);
    file->bytes = opening->want_bytes;
    return r < 0 ? kvt_trace(r) : 0;
}

/* ---- opening -------------------------------------------------------------------------------- */

static int file_make(struct opening *opening)
{
    const struct kvt_disk_io *io = opening->io;
    const char *path = opening->config->path;
    int r = io->open(io->ctx, path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);

    if (r < 0)
        return r == -EEXIST ? -ELOOP : r; /* never where a symbolic link points to */
    opening->file->hold_fd = r;
    r = io->sync_parent(io->ctx, path);
    return r == -EACCES ? 0 : r; /* a folder may be writable and not readable */
}

/* A device that is read-only answers like one without permission. */
static bool is_read_only_device(struct opening *opening)
{
    const struct kvt_disk_io *io = opening->io;
    kvt_autoclose int fd = io->open(io->ctx, opening->config->path, O_RDONLY | O_CLOEXEC, 0);
    struct kvt_disk_device_info device;
    struct kvt_disk_file_info info;

    return fd >= 0 && io->file_info(io->ctx, fd, &info) == 0 && info.is_block &&
           io->device_info(io->ctx, fd, &device) == 0 && device.is_read_only;
}

/* Opens what is there to hold it, or makes a file. */
static int hold_open(struct opening *opening)
{
    const struct kvt_disk_io *io = opening->io;
    int r = io->open(io->ctx, opening->config->path, O_RDWR | O_CLOEXEC, 0);

    if (r >= 0) {
        opening->file->hold_fd = r;
        return 0;
    }
    if (r == -ENOENT && opening->config->bytes > 0)
        r = file_make(opening);
    if (r == -EROFS || ((r == -EACCES || r == -EPERM) && is_read_only_device(opening)))
        return KVT_DISK_E_READ_ONLY;
    if (r == -EBUSY) /* newer kernels let nobody write to what is mounted */
        return KVT_DISK_E_MOUNTED;
    return r < 0 ? kvt_trace(r) : 0;
}

static int lock_take(struct opening *opening)
{
    const char *path = opening->config->lock_path;
    kvt_autofree char *own_path = NULL;
    int r;

    if (path == NULL && !opening->file->is_raw) {
        path = own_path = kvt_disk_lock_path(opening->config->path);
        if (own_path == NULL)
            return kvt_trace(-ENOMEM);
    }
    r = kvt_disk_lock_take(opening->file, opening->io, path, &opening->report->pid);
    return r == -EROFS ? KVT_DISK_E_READ_ONLY : r;
}

/* A daemon that was killed is gone, and its lock with it, before the device has done what it had
 * asked: a write of it that lands later would hit what this one has put there. Such requests keep
 * the file that they were made on open, and with it this lock. */
static int requests_wait(struct opening *opening)
{
    const struct kvt_disk_io *io = opening->io;
    const struct timespec pause = {.tv_nsec = 2 * KVT_NS_PER_MS};
    uint64_t end_ns = kvt_clock_mono_ns() + REQUESTS_WAIT_NS;
    int r;

    while ((r = io->lock_requests(io->ctx, opening->file->fd)) == -EAGAIN) {
        if (kvt_clock_mono_ns() >= end_ns) {
            snprintf(opening->report->why, sizeof(opening->report->why),
                     "requests of a daemon that is gone are still in progress");
            return KVT_DISK_E_BUSY;
        }
        (void)nanosleep(&pause, NULL);
    }
    return r < 0 ? kvt_trace(r) : 0;
}

static int data_open(struct opening *opening)
{
    struct kvt_disk_file *file = opening->file;
    const struct kvt_disk_io *io = opening->io;
    const char *path = opening->config->path;
    int fd;

    if (file->is_raw)
        return kvt_disk_raw_open(file, io, path, opening->report->why,
                                 sizeof(opening->report->why));
    fd = io->open(io->ctx, path, O_RDWR | O_CLOEXEC | O_DIRECT, 0);
    file->is_direct = fd != -EINVAL;
    if (fd == -EINVAL) /* the file system does not know O_DIRECT */
        fd = io->open(io->ctx, path, O_RDWR | O_CLOEXEC, 0);
    if (fd < 0)
        return kvt_trace(fd);
    file->fd = fd;
    return 0;
}

/* How much there is and how much of it is wanted. */
static int data_measure(struct opening *opening)
{
    struct kvt_disk_file *file = opening->file;
    const struct kvt_disk_io *io = opening->io;
    struct kvt_disk_report *report = opening->report;
    struct kvt_disk_file_info info;
    struct kvt_disk_device_info device;
    int r = file->is_raw ? io->device_info(io->ctx, file->fd, &device)
                         : io->file_info(io->ctx, file->fd, &info);

    if (r < 0)
        return kvt_trace(r);
    opening->there_bytes = file->is_raw ? device.bytes : info.bytes;
    opening->allocated_bytes = file->is_raw ? device.bytes : info.allocated_bytes;
    opening->want_bytes = opening->config->bytes;
    if (file->is_raw && device.is_read_only)
        return KVT_DISK_E_READ_ONLY;
    if (file->is_raw && device.logical_block_bytes > KVT_DIO_ALIGN_BYTES) {
        snprintf(report->why, sizeof(report->why), "its blocks of %u bytes are larger than %u",
                 device.logical_block_bytes, KVT_DIO_ALIGN_BYTES);
        return kvt_trace(-ENOTSUP);
    }
    if (file->is_raw && (opening->want_bytes == 0 || opening->want_bytes > device.bytes)) {
        report->is_no_space = opening->want_bytes > 0;
        opening->want_bytes = device.bytes;
    }
    opening->want_bytes = kvt_round_down(opening->want_bytes, KVT_DIO_ALIGN_BYTES);
    return opening->want_bytes <= KVT_DISK_DATA_OFFSET_BYTES ? KVT_DISK_E_TOO_SMALL : 0;
}

static int opening_run(struct opening *opening)
{
    struct kvt_disk_file *file = opening->file;
    const struct kvt_disk_io *io = opening->io;
    uint64_t bytes = opening->config->bytes;
    struct kvt_disk_file_info info;
    int r;

    if (bytes > 0 && bytes < KVT_DISK_DATA_OFFSET_BYTES + KVT_DIO_ALIGN_BYTES)
        return KVT_DISK_E_TOO_SMALL;
    r = hold_open(opening);
    if (r != 0)
        return r;
    r = io->file_info(io->ctx, file->hold_fd, &info);
    if (r < 0)
        return kvt_trace(r);
    if (!info.is_regular && !info.is_block)
        return KVT_DISK_E_FOREIGN;
    file->is_raw = info.is_block;
    r = lock_take(opening);
    if (r == 0)
        r = data_open(opening);
    if (r == 0)
        r = requests_wait(opening);
    if (r == 0)
        r = data_measure(opening);
    if (r == 0)
        r = contents_recognise(opening);
    if (r == 0)
        r = size_settle(opening);
    if (r == 0)
        r = io->fdatasync(io->ctx, file->fd);
    return r < 0 ? kvt_trace(r) : r;
}

int kvt_disk_file_open(struct kvt_disk_file *file, const struct kvt_disk_io *io,
                       const struct kvt_disk_config *config, struct kvt_disk_report *report)
{
    struct opening opening = {.file = file, .io = io, .config = config, .report = report};
    int r;

    memset(report, 0, sizeof(*report));
    *file = (struct kvt_disk_file){.fd = -1, .hold_fd = -1, .lock_fd = -1};
    file->super = kvt_alloc_aligned(KVT_DIO_ALIGN_BYTES, KVT_DISK_SUPER_BYTES);
    file->probe = kvt_alloc_aligned(KVT_DIO_ALIGN_BYTES, KVT_DISK_SUPER_BYTES);
    file->records = kvt_alloc_aligned(KVT_DIO_ALIGN_BYTES, 2 * KVT_DISK_RECORD_BYTES_MAX);
    r = file->super == NULL || file->probe == NULL || file->records == NULL ? -ENOMEM : 0;
    if (r == 0)
        r = opening_run(&opening);
    if (r != 0) {
        kvt_disk_file_close(file);
        return r;
    }
    report->bytes = file->bytes;
    report->is_raw = file->is_raw;
    memcpy(report->store_id, file->about.store_id, KVT_DISK_ID_BYTES);
    memcpy(report->device_uuid, file->about.device_uuid, KVT_DISK_ID_BYTES);
    return 0;
}

void kvt_disk_file_close(struct kvt_disk_file *file)
{
    const int fds[] = {file->fd, file->lock_fd, file->hold_fd};

    for (size_t i = 0; i < KVT_COUNT_OF(fds); i++)
        if (fds[i] >= 0)
            (void)close(fds[i]);
    kvt_free(file->super);
    kvt_free(file->probe);
    kvt_free(file->records);
    *file = (struct kvt_disk_file){.fd = -1, .hold_fd = -1, .lock_fd = -1};
}
