/* Client memory: what is accepted as a region, layouts that lie, copies of every shape against a
 * byte-by-byte oracle, and holes punched under a copy. */
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "daemon/base/guard.h"
#include "daemon/base/hash.h"
#include "tests/common/cmocka.h"
#include "tiers/client.h"

#define REGION_BYTES (1u << 20)

static int memfd_make(uint64_t bytes, bool is_allocated, int seals)
{
    int fd = memfd_create("kvt-test", MFD_CLOEXEC | MFD_ALLOW_SEALING);

    assert_true(fd >= 0);
    assert_int_equal(ftruncate(fd, (off_t)bytes), 0);
    if (is_allocated)
        assert_int_equal(fallocate(fd, 0, 0, (off_t)bytes), 0);
    if (seals != 0)
        assert_int_equal(fcntl(fd, F_ADD_SEALS, seals), 0);
    return fd;
}

static void test_region_results(void **state)
{
    const int seals = F_SEAL_SHRINK | F_SEAL_GROW;
    struct kvt_region region = {0};
    char path[64];
    int fd, read_only;

    (void)state;
    fd = memfd_make(REGION_BYTES, true, seals);
    assert_int_equal(kvt_region_open(&region, fd, REGION_BYTES + 1), KVT_REGION_E_TOO_SMALL);
    assert_int_equal(kvt_region_open(&region, fd, 0), KVT_REGION_E_TOO_SMALL);
    assert_null(region.base);
    snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
    read_only = open(path, O_RDONLY | O_CLOEXEC);
    assert_int_equal(kvt_region_open(&region, read_only, REGION_BYTES), KVT_REGION_E_READ_ONLY);
    close(read_only);
    assert_int_equal(kvt_region_open(&region, fd, REGION_BYTES), 0);
    close(fd);
    memset(region.base, 1, region.bytes); /* the mapping does not need the descriptor */
    kvt_region_close(&region);
    kvt_region_close(&region);
    assert_null(region.base);

    fd = memfd_make(REGION_BYTES, true, F_SEAL_SHRINK);
    assert_int_equal(kvt_region_open(&region, fd, REGION_BYTES), KVT_REGION_E_NOT_SEALED);
    close(fd);
    fd = memfd_make(REGION_BYTES, true, seals | F_SEAL_WRITE);
    assert_int_equal(kvt_region_open(&region, fd, REGION_BYTES), KVT_REGION_E_READ_ONLY);
    close(fd);
    fd = memfd_make(REGION_BYTES, false, seals);
    assert_int_equal(kvt_region_open(&region, fd, REGION_BYTES), KVT_REGION_E_SPARSE);
    close(fd);
    fd = open("/dev/null", O_RDWR | O_CLOEXEC);
    assert_int_equal(kvt_region_open(&region, fd, REGION_BYTES), KVT_REGION_E_NOT_MEMFD);
    close(fd);
    fd = open("/proc/self/exe", O_RDONLY | O_CLOEXEC);
    assert_int_equal(kvt_region_open(&region, fd, 10), KVT_REGION_E_NOT_MEMFD);
    close(fd);
    assert_int_equal(kvt_region_open(&region, -1, 10), -EBADF);
    for (int r = 1; r <= KVT_REGION_E_READ_ONLY; r++)
        assert_string_not_equal(kvt_region_error_text(r), "unknown result");
}

static void test_region_hugetlb(void **state)
{
    struct kvt_region region = {0};
    int fd = memfd_create("kvt-test", MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_HUGETLB);

    (void)state;
    if (fd < 0 || ftruncate(fd, KVT_HUGE_PAGE_BYTES) < 0 ||
        fallocate(fd, 0, 0, KVT_HUGE_PAGE_BYTES) < 0) {
        print_message("no hugetlb pages here: skipped\n");
        if (fd >= 0)
            close(fd);
        skip();
    }
    assert_int_equal(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW), 0);
    /* Fewer bytes than whole pages: close must still unmap whole pages. */
    assert_int_equal(kvt_region_open(&region, fd, KVT_HUGE_PAGE_BYTES - 4096), 0);
    memset(region.base, 1, region.bytes);
    kvt_region_close(&region);
    close(fd);
}

static void test_layout_lies(void **state)
{
    static uint8_t memory[10000];
    struct kvt_region regions[1] = {{.base = memory, .bytes = sizeof(memory)}};
    struct kvt_layout_piece good[2] = {
        {.region_idx = 0, .bytes = 100, .offset_bytes = 0, .stride_bytes = 100},
        {.region_idx = 0, .bytes = 50, .offset_bytes = 5000, .stride_bytes = 64}};
    struct kvt_layout_piece pieces[2];
    struct kvt_layout layout = {.pieces_count = 2, .engine_blocks_per_block = 3, .pieces = pieces};

#define EXPECT(result)                                                                             \
    do {                                                                                           \
        assert_int_equal(kvt_layout_resolve(&layout, regions, 1, 450), result);                    \
        assert_null(pieces[0].base);                                                               \
        memcpy(pieces, good, sizeof(good));                                                        \
    } while (0)
    (void)state;
    memcpy(pieces, good, sizeof(good));
    layout.pieces_count = 0;
    EXPECT(KVT_LAYOUT_E_EMPTY);
    layout.pieces_count = 2;
    pieces[1].bytes = 0;
    EXPECT(KVT_LAYOUT_E_EMPTY);
    pieces[1].region_idx = 1;
    EXPECT(KVT_LAYOUT_E_REGION);
    pieces[1].stride_bytes = 49;
    EXPECT(KVT_LAYOUT_E_STRIDE);
    pieces[1].offset_bytes = 9951;
    EXPECT(KVT_LAYOUT_E_BOUNDS);
    pieces[1].offset_bytes = UINT64_MAX - 10;
    EXPECT(KVT_LAYOUT_E_BOUNDS);
    pieces[1].bytes = 49;
    EXPECT(KVT_LAYOUT_E_PAYLOAD_BYTES);
    layout.engine_blocks_per_block = 0;
    EXPECT(KVT_LAYOUT_E_EMPTY);
    layout.engine_blocks_per_block = 3;
    pieces[1].stride_bytes = UINT64_MAX; /* block 0 only */
    assert_int_equal(kvt_layout_resolve(&layout, regions, 1, 450), 0);
    assert_int_equal(layout.engine_blocks_count, 1);
    memcpy(pieces, good, sizeof(good));
    assert_int_equal(kvt_layout_resolve(&layout, regions, 1, 450), 0);
    assert_int_equal(layout.payload_bytes, 450);
    /* Piece 1: the last block that fits begins at 5000 + n * 64 <= 9950. */
    assert_int_equal(layout.engine_blocks_count, 78);
    assert_ptr_equal(pieces[1].base, memory + 5000);
    for (int r = 1; r <= KVT_LAYOUT_E_ODD; r++)
        assert_string_not_equal(kvt_layout_error_text(r), "unknown result");
    assert_string_not_equal(kvt_layout_error_text(KVT_LAYOUT_E_OVERLAP), "unknown result");
#undef EXPECT
}

/* Pieces of one engine block that share bytes, found whatever their order and regions are. Others'
 * blocks may come between: pages with all layers, planes one behind the other, and room behind. */
static void test_layout_overlap(void **state)
{
    static uint8_t memory[40000];
    struct kvt_region regions[3] = {{.base = memory, .bytes = 40000},
                                    {.base = memory + 20000, .bytes = 20000},
                                    {.base = memory, .bytes = 10000}};
    struct kvt_layout_piece pieces[100];
    struct kvt_layout layout = {.engine_blocks_per_block = 1, .pieces = pieces};

#define EXPECT(result, payload_bytes)                                                              \
    do {                                                                                           \
        assert_int_equal(kvt_layout_resolve(&layout, regions, 3, payload_bytes), 0);               \
        assert_int_equal(kvt_layout_check_apart(&layout), result);                                 \
    } while (0)
    (void)state;
    for (uint32_t count = 2; count <= 100; count += 7) {
        layout.pieces_count = count;
        for (uint32_t i = 0; i < count; i++)
            pieces[i] = (struct kvt_layout_piece){
                .bytes = 8, .offset_bytes = i * 37 % count * 8, .stride_bytes = 800};
        EXPECT(count % 37 == 0 ? KVT_LAYOUT_E_OVERLAP : 0, 8 * count);
        for (uint32_t i = 0; i < count; i++)
            pieces[i].offset_bytes = i * 8; /* pages */
        for (uint32_t i = 0; i < count; i++) {
            pieces[i].offset_bytes += i == 0 ? 1 : UINT64_MAX; /* one byte over its neighbour */
            EXPECT(KVT_LAYOUT_E_OVERLAP, 8 * count);
            pieces[i].offset_bytes -= i == 0 ? 1 : UINT64_MAX;
        }
        EXPECT(0, 8 * count);
    }
    layout.pieces_count = 2;
    pieces[0] = (struct kvt_layout_piece){.bytes = 100, .stride_bytes = 100};
    pieces[1] = (struct kvt_layout_piece){.bytes = 100, .offset_bytes = 10000, .stride_bytes = 100};
    EXPECT(0, 200);
    assert_int_equal(layout.engine_blocks_count, 300); /* more than lie before the second's */
    /* One allocation, two regions of it. */
    pieces[0].offset_bytes = 20000;
    pieces[1] = (struct kvt_layout_piece){.region_idx = 1, .bytes = 100, .stride_bytes = 100};
    EXPECT(KVT_LAYOUT_E_OVERLAP, 200);
    pieces[0].offset_bytes = 19901;
    EXPECT(KVT_LAYOUT_E_OVERLAP, 200);
    pieces[0].offset_bytes = 19900;
    EXPECT(0, 200);
#undef EXPECT
}

/* Payload byte @at is which byte of client memory? By the definition in the header. NULL: it is not
 * written. */
static uint8_t *oracle_byte(const struct kvt_client_view *view, uint64_t at)
{
    for (uint32_t p = 0; p < view->layout->pieces_count; p++) {
        const struct kvt_layout_piece *piece = &view->layout->pieces[p];

        for (uint32_t b = 0; b < view->layout->engine_blocks_per_block; b++) {
            if (at < piece->bytes && view->engine_blocks[b] == KVT_ENGINE_BLOCK_NONE)
                return NULL;
            if (at < piece->bytes)
                return piece->base + view->engine_blocks[b] * piece->stride_bytes + at;
            at -= piece->bytes;
        }
    }
    fail();
    return NULL;
}

static uint64_t payload_bytes_until(const struct kvt_layout *layout, uint32_t piece)
{
    uint64_t bytes = 0;

    for (uint32_t p = 0; p < piece; p++)
        bytes += layout->pieces[p].bytes;
    return bytes * layout->engine_blocks_per_block;
}

static void copies_check(struct kvt_client_view *view, uint8_t *memory, size_t memory_bytes)
{
    const struct kvt_layout *layout = view->layout;
    uint64_t bytes = layout->payload_bytes, hash = 0, from, until;
    uint8_t *payload = malloc(bytes), *again = malloc(bytes);

    for (size_t i = 0; i < memory_bytes; i++)
        memory[i] = (uint8_t)(i * 31 + i / 251);
    view->first_piece = 0;
    view->end_piece = layout->pieces_count;
    assert_int_equal(kvt_client_gather(view, payload, &hash), 0);
    for (uint64_t at = 0; at < bytes; at++)
        assert_int_equal(payload[at], *oracle_byte(view, at));
    assert_int_equal(hash, kvt_hash64(payload, bytes, 0));
    memset(again, 0, bytes);
    assert_int_equal(kvt_client_gather(view, again, NULL), 0);
    assert_memory_equal(payload, again, bytes);
    /* One group of pieces back: exactly its bytes arrive, nothing else changes. */
    view->first_piece = layout->pieces_count / 2;
    from = payload_bytes_until(layout, view->first_piece);
    until = payload_bytes_until(layout, view->end_piece);
    memset(memory, 0xee, memory_bytes);
    assert_int_equal(kvt_client_scatter(view, payload), 0);
    for (uint64_t at = from; at < until; at++) {
        assert_int_equal(*oracle_byte(view, at), payload[at]);
        *oracle_byte(view, at) = 0xee;
    }
    for (size_t i = 0; i < memory_bytes; i++)
        assert_int_equal(memory[i], 0xee);
    free(payload);
    free(again);
}

static void test_copy_shapes(void **state)
{
    static uint8_t memory[400000];
    struct kvt_region region = {.base = memory, .bytes = sizeof(memory)};
    static const uint64_t dense[4] = {3, 4, 5, 6}, mixed[4] = {7, 2, 3, 0};
    struct kvt_layout_piece pieces[4];
    struct kvt_layout layout = {.engine_blocks_per_block = 4, .pieces = pieces};

    (void)state;
    for (int shape = 0; shape < 4; shape++) {
        struct kvt_client_view view = {.layout = &layout};
        uint64_t payload_bytes = 0;

        layout.pieces_count = 4;
        for (uint32_t p = 0; p < 4; p++) {
            uint32_t bytes = shape == 3 ? 10000 : 1000 + p * 8;

            /* 0: dense; 1: gaps; 2: pieces of a block side by side; 3: dense and bigger */
            pieces[p] = (struct kvt_layout_piece){.bytes = bytes};
            pieces[p].stride_bytes = shape == 1 ? bytes + 24 : shape == 2 ? 4048 : bytes;
            pieces[p].offset_bytes = shape == 2 ? p * 1000 + p * (p - (p > 0)) / 2 * 8 : p * 99000;
            payload_bytes += 4ull * bytes;
        }
        assert_int_equal(kvt_layout_resolve(&layout, &region, 1, payload_bytes), 0);
        view.engine_blocks = dense;
        copies_check(&view, memory, sizeof(memory));
        view.engine_blocks = mixed;
        copies_check(&view, memory, sizeof(memory));
    }
}

/* Every choice of blocks that are left alone, for all pieces and for each group of one: what is
 * written has its byte of the whole payload, everything else is as it was. */
static void scatter_check(const struct kvt_client_view *view, uint8_t *memory, size_t memory_bytes,
                          const uint8_t *payload)
{
    uint64_t from = payload_bytes_until(view->layout, view->first_piece);
    uint64_t until = payload_bytes_until(view->layout, view->end_piece), written = 0;

    memset(memory, 0xee, memory_bytes);
    assert_int_equal(kvt_client_scatter(view, payload), 0);
    for (uint64_t at = from; at < until; at++) {
        uint8_t *byte = oracle_byte(view, at);

        if (byte == NULL)
            continue;
        if (*byte != payload[at])
            fail_msg("payload byte %llu arrived as another", (unsigned long long)at);
        *byte = 0xee;
        written++;
    }
    for (size_t i = 0; i < memory_bytes; i++)
        if (memory[i] != 0xee)
            fail_msg("byte %zu was written", i);
    assert_int_equal(written, kvt_client_view_bytes(view));
}

static void test_blocks_left_alone(void **state)
{
    static uint8_t memory[16 * 3 * 264], payload[4 * 3 * 256];
    struct kvt_region region = {.base = memory, .bytes = sizeof(memory)};
    struct kvt_layout_piece pieces[3];
    struct kvt_layout layout = {.pieces_count = 3, .engine_blocks_per_block = 4, .pieces = pieces};

    (void)state;
    for (size_t i = 0; i < sizeof(payload); i++)
        payload[i] = (uint8_t)(i * 7 % 233);       /* never 0xee */
    for (uint32_t shape = 0; shape < 2; shape++) { /* dense by piece; by block, with gaps */
        for (uint32_t p = 0; p < 3; p++)
            pieces[p] = (struct kvt_layout_piece){.bytes = 256,
                                                  .offset_bytes = shape == 0 ? p * 4096 : p * 264,
                                                  .stride_bytes = shape == 0 ? 256 : 3 * 264};
        assert_int_equal(kvt_layout_resolve(&layout, &region, 1, sizeof(payload)), 0);
        for (uint32_t mask = 0; mask < 16; mask++) {
            uint64_t ids[4];
            struct kvt_client_view view = {.layout = &layout, .engine_blocks = ids};

            for (uint32_t b = 0; b < 4; b++)
                ids[b] = (mask >> b & 1) != 0 ? KVT_ENGINE_BLOCK_NONE : 5 + b;
            view.end_piece = 3;
            scatter_check(&view, memory, sizeof(memory), payload);
            for (uint32_t p = 0; p < 3; p++) {
                view.first_piece = p;
                view.end_piece = p + 1;
                scatter_check(&view, memory, sizeof(memory), payload);
            }
        }
    }
}

static void test_hole_under_copy(void **state)
{
    struct kvt_region region = {0};
    struct kvt_layout_piece piece = {.bytes = 65536, .stride_bytes = 65536};
    struct kvt_layout layout = {.pieces_count = 1, .engine_blocks_per_block = 2, .pieces = &piece};
    static const uint64_t blocks[2] = {4, 5};
    struct kvt_client_view view = {.layout = &layout, .engine_blocks = blocks, .end_piece = 1};
    uint8_t *payload = calloc(2, 65536);
    uint64_t hash = 1234;
    int fd = memfd_create("kvt-test", MFD_CLOEXEC | MFD_ALLOW_SEALING);

    (void)state;
    assert_int_equal(kvt_guard_install(), 0);
    assert_int_equal(ftruncate(fd, REGION_BYTES), 0);
    region.base = mmap(NULL, REGION_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    region.bytes = region.mapped_bytes = REGION_BYTES;
    region.is_mapped = true;
    assert_int_equal(kvt_layout_resolve(&layout, &region, 1, 2 * 65536), 0);
    for (int round = 0; round < 3; round++) {
        memset(region.base, 0x5a, REGION_BYTES);
        assert_int_equal(kvt_client_gather(&view, payload, &hash), 0);
        /* Not sealed here, so the file can end in the middle of block 5. */
        assert_int_equal(ftruncate(fd, 5 * 65536 + 4096), 0);
        hash = 1234;
        assert_int_equal(kvt_client_gather(&view, payload, &hash), -EFAULT);
        assert_int_equal(hash, 1234);
        assert_int_equal(kvt_client_gather(&view, payload, NULL), -EFAULT);
        assert_int_equal(kvt_client_scatter(&view, payload), -EFAULT);
        assert_int_equal(ftruncate(fd, REGION_BYTES), 0);
    }
    kvt_region_close(&region);
    free(payload);
    close(fd);
}

/* Outside a guarded section SIGBUS must still end the process: a bug of ours is not hidden. */
static void test_guard_lets_bugs_die(void **state)
{
    int status;
    pid_t pid = fork();

    (void)state;
    if (pid == 0) {
        int fd = memfd_create("kvt-test", MFD_CLOEXEC);
        volatile char *at;

        if (kvt_guard_install() < 0 || ftruncate(fd, 4096) < 0)
            _exit(2);
        at = mmap(NULL, 4096, PROT_READ, MAP_SHARED, fd, 0);
        if (ftruncate(fd, 0) < 0)
            _exit(2);
        _exit(at[0] != 0 ? 3 : 4);
    }
    assert_int_equal(waitpid(pid, &status, 0), pid);
    /* A sanitizer may turn the signal into an exit; it must not be a normal one of ours. */
    assert_true(WIFSIGNALED(status) || WEXITSTATUS(status) == 1);
    if (WIFSIGNALED(status))
        assert_int_equal(WTERMSIG(status), SIGBUS);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_region_results),  cmocka_unit_test(test_region_hugetlb),
        cmocka_unit_test(test_layout_overlap),  cmocka_unit_test(test_layout_lies),
        cmocka_unit_test(test_copy_shapes),     cmocka_unit_test(test_blocks_left_alone),
        cmocka_unit_test(test_hole_under_copy), cmocka_unit_test(test_guard_lets_bugs_die),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
