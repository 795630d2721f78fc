#include "tiers/disk/raw.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <time.h>

#include "daemon/base/alloc.h"
#include "daemon/base/bytes.h"
#include "daemon/base/clock.h"

#define BTRFS_MIRROR_BYTES (64ull << 20)
#define HELD_WAITS 40u /* a daemon that was killed lets go when its ring is gone */
#define HELD_WAIT_NS (50u * KVT_NS_PER_MS)

struct mark {
    const char *name, *magic;
    uint32_t at, magic_bytes;
};

/* Only for the message: whatever is not zero is refused. */
static const struct mark front_marks[] = {
    {"a damaged superblock of kvtierd", "KVTDISK1", 0, 8},
    {"an ext2, ext3 or ext4 file system", "\x53\xef", 1080, 2},
    {"an XFS file system", "XFSB", 0, 4},
    {"a btrfs file system", "_BHRfS_M", 65600, 8},
    {"an F2FS file system", "\x10\x20\xf5\xf2", 1024, 4},
    {"an encrypted volume (LUKS)", "LUKS\xba\xbe", 0, 6},
    {"a physical volume of LVM", "LABELONE", 512, 8},
    {"a member of a RAID (md)", "\xfc\x4e\x2b\xa9", 0, 4},
    {"a member of a RAID (md)", "\xfc\x4e\x2b\xa9", 4096, 4},
    {"swap space", "SWAPSPACE2", 4086, 10},
    {"a partition table (GPT)", "EFI PART", 512, 8},
    {"a partition table (GPT)", "EFI PART", 4096, 8},
    {"a boot sector or partition table", "\x55\xaa", 510, 2},
};

static int read_all(const struct kvt_disk_file *file, const struct kvt_disk_io *io, uint8_t *buffer,
                    uint32_t bytes, uint64_t offset_bytes)
{
    int64_t n = io->pread(io->ctx, file->hold_fd, buffer, bytes, offset_bytes);

    return n == (int64_t)bytes ? 0 : kvt_trace(n < 0 ? (int)n : -EIO);
}

/* The first byte of [from, to) that is not zero, or @to. */
static uint32_t first_used(const uint8_t *buffer, uint32_t from, uint32_t to)
{
    while (from < to && buffer[from] == 0)
        from++;
    return from;
}

static const char *front_name(const uint8_t *buffer)
{
    for (size_t i = 0; i < KVT_COUNT_OF(front_marks); i++)
        if (memcmp(buffer + front_marks[i].at, front_marks[i].magic, front_marks[i].magic_bytes) ==
            0)
            return front_marks[i].name;
    return NULL;
}

/* A first superblock that was torn: nothing was ever behind it. */
static int check_beginning(const struct kvt_disk_file *file, const struct kvt_disk_io *io,
                           uint8_t *buffer)
{
    int r;

    if (kvt_get_u64(buffer, KVT_DISK_SUPER_AT_MAGIC) != KVT_DISK_SUPER_MAGIC ||
        first_used(buffer, 2 * KVT_DISK_SUPER_BYTES, KVT_DISK_RAW_MARKS_BYTES) !=
            KVT_DISK_RAW_MARKS_BYTES)
        return KVT_DISK_E_FOREIGN;
    r = read_all(file, io, buffer, KVT_DISK_RAW_MARKS_BYTES, KVT_DISK_RAW_MARKS_BYTES);
    if (r < 0)
        return r;
    return first_used(buffer, 0, KVT_DISK_RAW_MARKS_BYTES) == KVT_DISK_RAW_MARKS_BYTES
               ? 0
               : KVT_DISK_E_FOREIGN;
}

static int check_front(const struct kvt_disk_file *file, const struct kvt_disk_io *io,
                       uint8_t *buffer, char *ret_why, size_t why_bytes)
{
    uint32_t at;
    const char *name;
    int r = read_all(file, io, buffer, KVT_DISK_RAW_MARKS_BYTES, 0);

    if (r < 0)
        return r;
    at = first_used(buffer, 0, KVT_DISK_RAW_MARKS_BYTES);
    if (at == KVT_DISK_RAW_MARKS_BYTES)
        return 0;
    name = front_name(buffer);
    r = check_beginning(file, io, buffer);
    if (r == KVT_DISK_E_FOREIGN && name != NULL)
        snprintf(ret_why, why_bytes, "there is %s on it", name);
    else if (r == KVT_DISK_E_FOREIGN)
        snprintf(ret_why, why_bytes, "there is something on it, from byte %u", at);
    return r;
}

static int check_back(const struct kvt_disk_file *file, const struct kvt_disk_io *io,
                      uint64_t bytes, uint8_t *buffer, char *ret_why, size_t why_bytes)
{
    uint64_t from = bytes - KVT_DISK_RAW_MARKS_BYTES;
    uint32_t at;
    int r = read_all(file, io, buffer, KVT_DISK_RAW_MARKS_BYTES, from);

    if (r < 0)
        return r;
    at = first_used(buffer, 0, KVT_DISK_RAW_MARKS_BYTES);
    if (at < KVT_DISK_RAW_MARKS_BYTES) {
        bool is_gpt = memcmp(buffer + KVT_DISK_RAW_MARKS_BYTES - 512, "EFI PART", 8) == 0 ||
                      memcmp(buffer + KVT_DISK_RAW_MARKS_BYTES - 4096, "EFI PART", 8) == 0;

        snprintf(ret_why, why_bytes, "there is %s at its end, from byte %llu",
                 is_gpt ? "a partition table (GPT)" : "something", (unsigned long long)(from + at));
        return KVT_DISK_E_FOREIGN;
    }
    if (bytes < BTRFS_MIRROR_BYTES + KVT_DISK_SUPER_BYTES)
        return 0;
    r = read_all(file, io, buffer, KVT_DISK_SUPER_BYTES, BTRFS_MIRROR_BYTES);
    if (r < 0 || memcmp(buffer + 64, "_BHRfS_M", 8) != 0)
        return r;
    snprintf(ret_why, why_bytes, "there is a btrfs file system on it");
    return KVT_DISK_E_FOREIGN;
}

int kvt_disk_raw_check_blank(const struct kvt_disk_file *file, const struct kvt_disk_io *io,
                             uint64_t bytes, char *ret_why, size_t why_bytes)
{
    kvt_autofree uint8_t *buffer = kvt_alloc_aligned(KVT_DIO_ALIGN_BYTES, KVT_DISK_RAW_MARKS_BYTES);
    int r;

    KVT_ASSERT(bytes > KVT_DISK_DATA_OFFSET_BYTES);
    if (buffer == NULL)
        return kvt_trace(-ENOMEM);
    r = check_front(file, io, buffer, ret_why, why_bytes);
    return r == 0 ? check_back(file, io, bytes, buffer, ret_why, why_bytes) : r;
}

int kvt_disk_raw_wipe(const struct kvt_disk_file *file, const struct kvt_disk_io *io,
                      uint64_t bytes)
{
    uint64_t end_bytes = kvt_round_down(bytes, KVT_DIO_ALIGN_BYTES);
    const uint64_t offsets[] = {0, KVT_DISK_RAW_MARKS_BYTES, end_bytes - KVT_DISK_RAW_MARKS_BYTES};
    kvt_autofree uint8_t *zeros = kvt_alloc_aligned(KVT_DIO_ALIGN_BYTES, KVT_DISK_RAW_MARKS_BYTES);

    KVT_ASSERT(bytes > KVT_DISK_DATA_OFFSET_BYTES);
    if (zeros == NULL)
        return kvt_trace(-ENOMEM);
    for (size_t i = 0; i < KVT_COUNT_OF(offsets); i++) {
        int64_t n = io->pwrite(io->ctx, file->fd, zeros, KVT_DISK_RAW_MARKS_BYTES, offsets[i]);

        if (n != KVT_DISK_RAW_MARKS_BYTES)
            return kvt_trace(n < 0 ? (int)n : -EIO);
    }
    return 0;
}

/* Where the device behind @fd is mounted; false: nowhere that this process sees. */
static bool mount_find(int fd, char *ret_why, size_t why_bytes)
{
    FILE *file = fopen("/proc/self/mountinfo", "re");
    char line[4096], place[256];
    unsigned int major_no, minor_no;
    bool is_found = false;
    struct stat st;

    while (file != NULL && !is_found && fgets(line, sizeof(line), file) != NULL)
        is_found = sscanf(line, "%*u %*u %u:%u %*s %255s", &major_no, &minor_no, place) == 3 &&
                   fstat(fd, &st) == 0 && major(st.st_rdev) == major_no &&
                   minor(st.st_rdev) == minor_no;
    if (is_found)
        snprintf(ret_why, why_bytes, "it is mounted at %.120s", place);
    if (file != NULL)
        (void)fclose(file);
    return is_found;
}

int kvt_disk_raw_open(struct kvt_disk_file *file, const struct kvt_disk_io *io, const char *path,
                      char *ret_why, size_t why_bytes)
{
    const struct timespec pause = {.tv_nsec = HELD_WAIT_NS};

    for (uint32_t i = 0; !mount_find(file->hold_fd, ret_why, why_bytes) && i < HELD_WAITS; i++) {
        int fd = io->open(io->ctx, path, O_RDWR | O_CLOEXEC | O_DIRECT | O_EXCL, 0);

        if (fd >= 0) {
            file->fd = fd;
            file->is_direct = true;
            return 0;
        }
        if (fd != -EBUSY)
            return kvt_trace(fd);
        (void)nanosleep(&pause, NULL);
    }
    return KVT_DISK_E_MOUNTED;
}
