/* The fake's memory. Each allocation is a memfd that this process sees at `alias`; what our code
 * gets is an address that is none of this machine, found again by search. So the CPU cannot touch
 * it, and another process can map the same bytes: a handle names process, descriptor and inode.
 * Addresses grow and are never given out again. Pinned memory has a device address of its own, too,
 * so that a pointer where an address belongs is found. */
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tests/common/fake_cuda_internal.h"

#define HANDLE_MAGIC 0x4b56544641414b45ull
#define ADDRESS_GAP_BYTES (4u << 20) /* between allocations: an overrun hits none */

struct handle {
    uint64_t magic, inode, bytes;
    uint32_t pid, fd, device, foreign_id;
    uint8_t pad[KVT_CUDA_IPC_HANDLE_BYTES - 40];
};
static_assert(sizeof(struct handle) == KVT_CUDA_IPC_HANDLE_BYTES, "as CUDA's");

static uint64_t next_address(enum fake_memory_kind kind, uint32_t device, uint64_t bytes)
{
    bool is_host = kind == FAKE_MEMORY_PINNED || kind == FAKE_MEMORY_REGISTERED;
    uint64_t *next = is_host ? &fake_cuda.next_mapped : &fake_cuda.devices[device].next_address;
    /* CUDA promises 256 bytes and no more; host memory keeps its place in a page. */
    uint64_t address = *next + (is_host ? 0 : 256 * fake_random(16));

    /* Mappings of large memory of others are often side by side. */
    if (kind == FAKE_MEMORY_IPC && bytes % KVT_HUGE_PAGE_BYTES == 0) {
        address = *next;
        *next += bytes;
    } else {
        *next += kvt_round_up(bytes, ADDRESS_GAP_BYTES) + ADDRESS_GAP_BYTES;
    }
    return address;
}

static void map_fd(struct fake_memory *memory)
{
    struct stat info;

    memory->alias = mmap(NULL, memory->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, memory->fd, 0);
    if (memory->alias == MAP_FAILED || fstat(memory->fd, &info) < 0) {
        perror("fake CUDA: mmap");
        abort();
    }
    memory->inode = (uint64_t)info.st_ino;
}

struct fake_memory *fake_memory_new(enum fake_memory_kind kind, uint32_t device, uint64_t bytes)
{
    struct fake_memory *memory = calloc(1, sizeof(*memory));

    if (memory == NULL)
        abort();
    *memory = (struct fake_memory){.next = fake_cuda.memories,
                                   .kind = kind,
                                   .device = device,
                                   .bytes = bytes,
                                   .fd = -1,
                                   .id = ++fake_cuda.next_id,
                                   .refs = 1};
    if (kind == FAKE_MEMORY_DEVICE || kind == FAKE_MEMORY_FOREIGN) {
        memory->fd = memfd_create("kvt-fake-cuda", MFD_CLOEXEC);
        if (memory->fd < 0 || ftruncate(memory->fd, (off_t)bytes) < 0) {
            perror("fake CUDA: memfd");
            abort();
        }
        map_fd(memory);
        memset(memory->alias, KVT_FAKE_CUDA_POISON,
               KVT_MIN(bytes, fake_cuda.config.poison_bytes_max));
        fake_cuda.devices[device].used_bytes += bytes;
    }
    if (kind != FAKE_MEMORY_FOREIGN)
        memory->address = next_address(kind, device, bytes);
    fake_cuda.memories = memory;
    return memory;
}

void fake_memory_drop(struct fake_memory *memory)
{
    struct fake_memory **at = &fake_cuda.memories;

    while (*at != memory)
        at = &(*at)->next;
    *at = memory->next;
    if (memory->kind == FAKE_MEMORY_DEVICE || memory->kind == FAKE_MEMORY_FOREIGN) {
        if (!memory->is_freed)
            fake_cuda.devices[memory->device].used_bytes -= memory->bytes;
        /* Importers see at once that it is nobody's any more. */
        memset(memory->alias, KVT_FAKE_CUDA_POISON,
               KVT_MIN(memory->bytes, fake_cuda.config.poison_bytes_max));
    }
    if (memory->kind != FAKE_MEMORY_REGISTERED)
        (void)munmap(memory->alias, memory->bytes);
    if (memory->fd >= 0)
        (void)close(memory->fd);
    free(memory);
}

static bool holds(uint64_t begin, uint64_t bytes, uint64_t address, uint64_t wanted_bytes)
{
    return address >= begin && wanted_bytes <= bytes && address - begin <= bytes - wanted_bytes;
}

struct fake_memory *fake_memory_find(uint64_t address, uint64_t bytes)
{
    for (struct fake_memory *memory = fake_cuda.memories; memory != NULL; memory = memory->next)
        if (memory->kind != FAKE_MEMORY_FOREIGN &&
            holds(memory->address, memory->bytes, address, bytes))
            return memory;
    return NULL;
}

struct fake_memory *fake_memory_find_host(const void *pointer, uint64_t bytes)
{
    for (struct fake_memory *memory = fake_cuda.memories; memory != NULL; memory = memory->next)
        if ((memory->kind == FAKE_MEMORY_PINNED || memory->kind == FAKE_MEMORY_REGISTERED) &&
            holds((uintptr_t)memory->alias, memory->bytes, (uintptr_t)pointer, bytes))
            return memory;
    return NULL;
}

struct fake_memory *fake_memory_at(uint64_t address)
{
    struct fake_memory *memory = fake_memory_find(address, 1);

    return memory != NULL && memory->address == address ? memory : NULL;
}

static bool is_host(const struct fake_memory *memory)
{
    return memory->kind == FAKE_MEMORY_PINNED || memory->kind == FAKE_MEMORY_REGISTERED;
}

static bool is_alive(const struct fake_memory *memory)
{
    return memory->foreign == NULL || !memory->foreign->is_freed;
}

uint8_t *fake_translate(uint32_t device, uint64_t address, uint64_t bytes, const char *what)
{
    struct fake_memory *memory = fake_memory_find(address, bytes);

    if (memory == NULL)
        fake_bug("%s: %" PRIu64 " bytes at 0x%" PRIx64 " of GPU %u are not allocated, or are of a "
                 "pointer and not of a mapped address",
                 what, bytes, address, device);
    if (is_host(memory) ? !memory->is_on[device] : memory->device != device)
        fake_bug("%s: 0x%" PRIx64 " is memory that GPU %u does not see", what, address, device);
    return is_alive(memory) ? memory->alias + (address - memory->address) : NULL;
}

uint8_t *fake_translate_end(uint32_t device, uint64_t address, uint64_t bytes, bool wants_host,
                            const char *what)
{
    struct fake_memory *memory = fake_memory_find(address, bytes);
    uint8_t *pointer;

    if (memory == NULL) {
        memory = fake_memory_find_host((const void *)(uintptr_t)address, bytes);
        if (memory == NULL)
            fake_bug("%s: %" PRIu64 " bytes at 0x%" PRIx64 " are neither allocated on a GPU nor "
                     "pinned",
                     what, bytes, address);
        pointer = memory->alias + (address - (uintptr_t)memory->alias);
    } else
        pointer = memory->alias + (address - memory->address);
    if (is_host(memory) != wants_host)
        fake_bug("%s: 0x%" PRIx64 " is not where the direction says", what, address);
    if (is_host(memory) && !memory->is_on[device])
        fake_bug("%s: 0x%" PRIx64 " is not pinned for GPU %u", what, address, device);
    return is_alive(memory) ? pointer : NULL;
}

uint8_t *kvt_fake_cuda_memory(uint64_t address, uint64_t bytes)
{
    struct fake_memory *memory;
    uint8_t *pointer;

    (void)pthread_mutex_lock(&fake_cuda.lock);
    memory = fake_memory_find(address, bytes);
    if (memory == NULL)
        fake_bug("a test looks at %" PRIu64 " bytes at 0x%" PRIx64, bytes, address);
    pointer = memory->alias + (address - memory->address);
    (void)pthread_mutex_unlock(&fake_cuda.lock);
    return pointer;
}

/* ---- host memory ----------------------------------------------------------------------------- */

int fake_alloc_pinned(uint32_t device, uint64_t bytes, void **ret_memory)
{
    void *pointer = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    struct fake_memory *memory;

    if (pointer == MAP_FAILED)
        return KVT_CUDA_NO_MEMORY;
    memory = fake_memory_new(FAKE_MEMORY_PINNED, device, bytes);
    memory->alias = pointer;
    memset(pointer, KVT_FAKE_CUDA_POISON, KVT_MIN(bytes, fake_cuda.config.poison_bytes_max));
    memset(memory->is_on, true, sizeof(memory->is_on));
    *ret_memory = pointer;
    return 0;
}

int fake_pin(uint32_t device, void *pointer, uint64_t bytes)
{
    struct fake_memory *memory = NULL;

    for (struct fake_memory *m = fake_cuda.memories; m != NULL; m = m->next)
        if (m->kind == FAKE_MEMORY_REGISTERED &&
            (uintptr_t)pointer < (uintptr_t)m->alias + m->bytes &&
            (uintptr_t)m->alias < (uintptr_t)pointer + bytes)
            memory = m;
    if (memory != NULL) {
        /* A context that was made anew has to ask for it, to be on the safe side. */
        if (memory->alias == pointer && memory->bytes == bytes)
            memory->is_on[device] = true;
        return KVT_CUDA_ALREADY_REGISTERED;
    }
    memory = fake_memory_new(FAKE_MEMORY_REGISTERED, device, bytes);
    memory->alias = pointer;
    memset(memory->is_on, true, sizeof(memory->is_on));
    return 0;
}

/* What was registered in its context is so no more, for whichever device; of another's context it
 * has forgotten it. */
void fake_device_forget(uint32_t device)
{
    struct fake_memory *next;

    for (struct fake_memory *memory = fake_cuda.memories; memory != NULL; memory = next) {
        bool is_of_device = memory->device == device && memory->kind != FAKE_MEMORY_FOREIGN;
        next = memory->next;
        memory->is_on[device] = memory->is_on[device] && memory->kind != FAKE_MEMORY_REGISTERED;
        if (is_of_device)
            fake_memory_drop(memory);
    }
}

/* ---- memory of other processes --------------------------------------------------------------- */

int fake_ipc_export(uint64_t address, uint8_t *ret_handle)
{
    struct fake_memory *memory = fake_memory_at(address);
    struct handle handle = {.magic = HANDLE_MAGIC, .pid = (uint32_t)getpid()};

    if (memory == NULL || memory->kind != FAKE_MEMORY_DEVICE)
        fake_bug("ipc_export: 0x%" PRIx64 " is no allocation", address);
    if (fake_cuda.devices[memory->device].config.has_no_ipc)
        return 801; /* cudaErrorNotSupported */
    handle.inode = memory->inode;
    handle.bytes = memory->bytes;
    handle.fd = (uint32_t)memory->fd;
    handle.device = memory->device;
    memcpy(ret_handle, &handle, sizeof(handle));
    return 0;
}

static struct fake_memory *foreign_of(const struct handle *handle)
{
    for (struct fake_memory *memory = fake_cuda.memories; memory != NULL; memory = memory->next)
        if (memory->kind == FAKE_MEMORY_FOREIGN && memory->id == handle->foreign_id)
            return memory;
    return NULL;
}

/* The memfd behind a handle, or -1. */
static int open_handle(const struct handle *handle, struct fake_memory **ret_foreign)
{
    char path[64];
    struct stat info;
    int fd;

    *ret_foreign = handle->foreign_id != 0 ? foreign_of(handle) : NULL;
    if (handle->foreign_id != 0 && (*ret_foreign == NULL || (*ret_foreign)->is_freed))
        return -1;
    (void)snprintf(path, sizeof(path), "/proc/%u/fd/%u", handle->pid, handle->fd);
    fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0)
        return -1;
    if (fstat(fd, &info) < 0 || (uint64_t)info.st_ino != handle->inode ||
        (uint64_t)info.st_size != handle->bytes) {
        (void)close(fd);
        return -1;
    }
    return fd;
}

int fake_ipc_open(uint32_t device, const uint8_t *bytes, uint64_t *ret_address)
{
    struct handle handle;
    struct fake_memory *memory, *foreign;
    int fd;

    memcpy(&handle, bytes, sizeof(handle));
    if (handle.magic != HANDLE_MAGIC || handle.device != device || handle.bytes == 0)
        return KVT_CUDA_INVALID_VALUE;
    if (handle.pid == (uint32_t)getpid() && handle.foreign_id == 0)
        return KVT_CUDA_INVALID_CONTEXT; /* CUDA: not in the process that made it */
    for (memory = fake_cuda.memories; memory != NULL; memory = memory->next)
        if (memory->kind == FAKE_MEMORY_IPC && memory->inode == handle.inode) {
            memory->refs++;
            *ret_address = memory->address;
            return 0;
        }
    fd = open_handle(&handle, &foreign);
    if (fd < 0)
        return KVT_CUDA_INVALID_VALUE;
    memory = fake_memory_new(FAKE_MEMORY_IPC, device, handle.bytes);
    memory->fd = fd;
    memory->foreign = foreign;
    map_fd(memory);
    *ret_address = memory->address;
    return 0;
}

int fake_ipc_close(uint64_t address)
{
    struct fake_memory *memory = fake_memory_at(address);

    if (memory == NULL || memory->kind != FAKE_MEMORY_IPC)
        fake_bug("ipc_close: 0x%" PRIx64 " is not open", address);
    if (--memory->refs == 0)
        fake_memory_drop(memory);
    return 0;
}

void kvt_fake_cuda_foreign_new(struct kvt_fake_cuda_foreign *ret_foreign, uint32_t device,
                               uint64_t bytes)
{
    struct fake_memory *memory;
    struct handle handle = {.magic = HANDLE_MAGIC, .pid = (uint32_t)getpid()};

    (void)pthread_mutex_lock(&fake_cuda.lock);
    memory = fake_memory_new(FAKE_MEMORY_FOREIGN, device, bytes);
    handle.inode = memory->inode;
    handle.bytes = bytes;
    handle.fd = (uint32_t)memory->fd;
    handle.device = device;
    handle.foreign_id = memory->id;
    *ret_foreign = (struct kvt_fake_cuda_foreign){
        .memory = memory->alias, .bytes = bytes, .device = device, .id = memory->id};
    memcpy(ret_foreign->handle, &handle, sizeof(handle));
    (void)pthread_mutex_unlock(&fake_cuda.lock);
}

void kvt_fake_cuda_foreign_free(struct kvt_fake_cuda_foreign *foreign)
{
    struct fake_memory *memory;

    (void)pthread_mutex_lock(&fake_cuda.lock);
    for (memory = fake_cuda.memories; memory != NULL; memory = memory->next)
        if (memory->kind == FAKE_MEMORY_FOREIGN && memory->id == foreign->id)
            break;
    if (memory == NULL || memory->is_freed)
        fake_bug("a test frees a client's memory twice");
    /* It stays in the list, seen by the test, until deinit: who opened it points here. */
    memory->is_freed = true;
    fake_cuda.devices[memory->device].used_bytes -= memory->bytes;
    (void)pthread_mutex_unlock(&fake_cuda.lock);
}
