#include "tests/common/loop_device.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/loop.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <unistd.h>

#define ATTEMPTS 20

/* Takes a free one; somebody else may take it first. */
static int loop_take(struct loop_device *device, int control, const struct loop_config *config)
{
    for (int i = 0; i < ATTEMPTS; i++) {
        int number = ioctl(control, LOOP_CTL_GET_FREE);

        if (number < 0)
            return -errno;
        snprintf(device->path, sizeof(device->path), "/dev/loop%d", number);
        device->fd = open(device->path, O_RDWR | O_CLOEXEC);
        if (device->fd < 0)
            return -errno;
        if (ioctl(device->fd, LOOP_CONFIGURE, config) == 0)
            return 0;
        if (errno != EBUSY)
            return -errno;
        loop_device_close(device);
    }
    return -EBUSY;
}

int loop_device_open(struct loop_device *device, const char *file, uint32_t block_bytes,
                     int is_read_only)
{
    struct loop_config config = {.block_size = block_bytes};
    int control, r;

    *device = (struct loop_device){.fd = -1};
    config.info.lo_flags = LO_FLAGS_AUTOCLEAR | (is_read_only ? LO_FLAGS_READ_ONLY : 0);
    control = open("/dev/loop-control", O_RDWR | O_CLOEXEC);
    if (control < 0)
        return -errno;
    r = open(file, (is_read_only ? O_RDONLY : O_RDWR) | O_CLOEXEC);
    if (r >= 0) {
        config.fd = (uint32_t)r;
        r = loop_take(device, control, &config);
        close((int)config.fd);
    } else {
        r = -errno;
    }
    close(control);
    if (r < 0)
        loop_device_close(device);
    return r;
}

void loop_device_close(struct loop_device *device)
{
    if (device->fd >= 0)
        close(device->fd);
    device->fd = -1;
}

int loop_device_probe(void)
{
    char file[] = "kvt-loop-XXXXXX";
    struct loop_device device;
    int fd = mkstemp(file), r;

    if (fd < 0)
        return -errno;
    r = ftruncate(fd, 1 << 20) < 0 ? -errno : loop_device_open(&device, file, 512, 0);
    if (r == 0)
        loop_device_close(&device);
    close(fd);
    (void)unlink(file);
    return r;
}
