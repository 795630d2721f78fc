/* Quantised payloads between engines and slots, against an oracle that knows of no pieces: the raw
 * payload byte by byte as tiers/client.h defines it, and the kernels' conversion of it as a whole.
 * What the kernels do with a plane is proven in tests/kernels. */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "daemon/base/guard.h"
#include "daemon/base/hash.h"
#include "tests/common/cmocka.h"
#include "tiers/client.h"

#define PIECES_MAX 3u
#define BLOCKS 4u
#define MEMORY_BYTES (1u << 17)
#define UNTOUCHED 0xee

struct scene {
    uint8_t *memory;
    struct kvt_layout_piece pieces[PIECES_MAX];
    struct kvt_layout layout;
    uint64_t ids[BLOCKS];
    struct kvt_client_view view;
    uint8_t *raw, *stored; /* by the oracle */
};

static uint64_t random_next(uint64_t *random)
{
    *random = *random * 6364136223846793005ull + 1442695040888963407ull;
    return *random >> 33;
}

/* NULL: it is not written. */
static uint8_t *oracle_byte(const struct scene *scene, uint64_t at)
{
    for (uint32_t p = 0; p < scene->layout.pieces_count; p++) {
        const struct kvt_layout_piece *piece = &scene->pieces[p];

        for (uint32_t b = 0; b < scene->layout.engine_blocks_per_block; b++) {
            if (at < piece->bytes)
                return scene->ids[b] == KVT_ENGINE_BLOCK_NONE
                           ? NULL
                           : piece->base + scene->ids[b] * piece->stride_bytes + at;
            at -= piece->bytes;
        }
    }
    fail();
    return NULL;
}

/* Bytes of the payload before the piece. */
static uint64_t bytes_until(const struct scene *scene, uint32_t piece)
{
    uint64_t bytes = 0;

    for (uint32_t p = 0; p < piece; p++)
        bytes += scene->pieces[p].bytes;
    return bytes * scene->layout.engine_blocks_per_block;
}

static void convert_whole(const struct scene *scene, uint8_t *raw, uint8_t *stored, bool is_back)
{
    const struct kvt_quant_spec *spec = &scene->layout.quant;
    uint32_t planes = (uint32_t)(scene->layout.payload_bytes / kvt_quant_plane_bytes(spec));
    struct kvt_quant_job job = {.raw = (uintptr_t)raw,
                                .quantised = (uintptr_t)stored,
                                .planes_count = planes,
                                .end_plane = planes};
    struct kvt_quant_batch batch = {
        .spec = *spec, .jobs = (uintptr_t)&job, .jobs_count = 1, .planes_max = planes};

    assert_int_equal(
        (is_back ? kvt_kernels_host()->dequantise : kvt_kernels_host()->quantise)(NULL, &batch), 0);
}

/* Numbers that differ in size from plane to plane, with what is not finite here and there. */
static void fill_memory(struct scene *scene, uint64_t *random)
{
    for (uint32_t at = 0; at < MEMORY_BYTES; at += 2) {
        uint16_t bits = (uint16_t)(random_next(random) & 0xffff);

        if ((bits & 0x7c00) == 0x7c00 && random_next(random) % 64 != 0)
            bits &= 0xbfff;
        memcpy(scene->memory + at, &bits, 2);
    }
}

/* Pieces of 1, 2, .. planes, dense or with gaps that keep elements even; planes so small that codes
 * and scales need zeros behind them, too. */
static void scene_init(struct scene *scene, uint64_t seed)
{
    struct kvt_region region = {.base = scene->memory, .bytes = MEMORY_BYTES};
    uint64_t random = seed, plane_bytes, payload_bytes = 0;
    struct kvt_quant_spec spec = {.kind = (uint8_t)(1 + seed % 2),
                                  .elem = (uint8_t)(1 + seed / 2 % 2),
                                  .order = (uint8_t)(1 + seed / 4 % 2),
                                  .plane_tokens = 1 + (uint32_t)random_next(&random) % 5,
                                  .heads = 1 + (uint32_t)random_next(&random) % 3,
                                  .head_dim = 1 + (uint32_t)random_next(&random) % 40};

    plane_bytes = kvt_quant_plane_bytes(&spec);
    scene->layout =
        (struct kvt_layout){.pieces_count = 1 + (uint32_t)random_next(&random) % PIECES_MAX,
                            .engine_blocks_per_block = 1 + (uint32_t)random_next(&random) % BLOCKS,
                            .quant = spec,
                            .pieces = scene->pieces};
    for (uint32_t p = 0; p < scene->layout.pieces_count; p++) {
        uint32_t bytes = (uint32_t)(plane_bytes * (1 + random_next(&random) % 2));

        scene->pieces[p] = (struct kvt_layout_piece){
            .bytes = bytes,
            .offset_bytes = p * (MEMORY_BYTES / PIECES_MAX / 2 * 2) + random_next(&random) % 9 * 2,
            .stride_bytes = bytes + random_next(&random) % 3 * 2};
        payload_bytes += bytes;
    }
    payload_bytes *= scene->layout.engine_blocks_per_block;
    assert_int_equal(kvt_layout_resolve(&scene->layout, &region, 1, payload_bytes), 0);
    assert_int_equal(scene->layout.payload_bytes, payload_bytes);
    assert_int_equal(scene->layout.stored_bytes, kvt_quant_bytes(&spec, payload_bytes));
    for (uint32_t b = 0; b < BLOCKS; b++)
        scene->ids[b] = (7 * b + 3) % 9;
    scene->view = (struct kvt_client_view){.layout = &scene->layout,
                                           .engine_blocks = scene->ids,
                                           .end_piece = scene->layout.pieces_count};
    fill_memory(scene, &random);
    scene->raw = malloc(payload_bytes);
    scene->stored = malloc(scene->layout.stored_bytes);
    assert_true(scene->raw != NULL && scene->stored != NULL);
    for (uint64_t at = 0; at < payload_bytes; at++)
        scene->raw[at] = *oracle_byte(scene, at);
    convert_whole(scene, scene->raw, scene->stored, false);
    convert_whole(scene, scene->raw, scene->stored, true); /* what has to come back */
}

static void scene_deinit(struct scene *scene)
{
    free(scene->raw);
    free(scene->stored);
}

/* Exactly the bytes of the view arrive, and they are what the codes stand for. */
static void scatter_check(struct scene *scene)
{
    uint64_t from = bytes_until(scene, scene->view.first_piece);
    uint64_t until = bytes_until(scene, scene->view.end_piece), written = 0;

    memset(scene->memory, UNTOUCHED, MEMORY_BYTES);
    assert_int_equal(kvt_client_scatter(&scene->view, scene->stored), 0);
    for (uint64_t at = from; at < until; at++) {
        uint8_t *byte = oracle_byte(scene, at);

        if (byte == NULL)
            continue;
        if (*byte != scene->raw[at])
            fail_msg("payload byte %llu arrived as another", (unsigned long long)at);
        *byte = UNTOUCHED;
        written++;
    }
    for (uint32_t i = 0; i < MEMORY_BYTES; i++)
        if (scene->memory[i] != UNTOUCHED)
            fail_msg("byte %u was written", i);
    assert_int_equal(written, kvt_client_view_bytes(&scene->view));
}

static void gather_check(struct scene *scene)
{
    uint64_t bytes = scene->layout.stored_bytes, hash = 0;
    uint8_t *whole = malloc(bytes + 64), *parts = malloc(bytes);

    assert_true(whole != NULL && parts != NULL);
    memset(whole, UNTOUCHED, bytes + 64);
    assert_int_equal(kvt_client_gather(&scene->view, whole, &hash), 0);
    assert_memory_equal(whole, scene->stored, bytes);
    assert_int_equal(hash, kvt_hash64(scene->stored, bytes, 0));
    for (uint32_t i = 0; i < 64; i++)
        assert_int_equal(whole[bytes + i], UNTOUCHED);
    /* Piece by piece, the last first. */
    memset(parts, UNTOUCHED, bytes);
    for (uint32_t p = scene->layout.pieces_count; p > 0; p--) {
        scene->view.first_piece = p - 1;
        scene->view.end_piece = p;
        assert_int_equal(kvt_client_gather(&scene->view, parts, NULL), 0);
    }
    assert_memory_equal(parts, scene->stored, bytes);
    free(whole);
    free(parts);
}

static void test_copies(void **state)
{
    static uint8_t memory[MEMORY_BYTES] __attribute__((aligned(16)));

    (void)state;
    for (uint64_t seed = 0; seed < 200; seed++) {
        struct scene scene = {.memory = memory};
        uint32_t pieces;

        scene_init(&scene, seed);
        pieces = scene.layout.pieces_count;
        gather_check(&scene);
        for (uint32_t mask = 0; mask < 1u << scene.layout.engine_blocks_per_block; mask++) {
            for (uint32_t b = 0; b < BLOCKS; b++)
                scene.ids[b] = (mask >> b & 1) != 0 ? KVT_ENGINE_BLOCK_NONE : (7 * b + 3) % 9;
            scene.view.first_piece = 0;
            scene.view.end_piece = pieces;
            scatter_check(&scene);
            scene.view.first_piece = (uint32_t)seed % pieces;
            scene.view.end_piece = scene.view.first_piece + 1;
            scatter_check(&scene);
        }
        scene_deinit(&scene);
    }
}

static void test_layouts_that_lie(void **state)
{
    static uint8_t memory[4096] __attribute__((aligned(16)));
    struct kvt_region region = {.base = memory, .bytes = sizeof(memory)};
    const struct kvt_layout_piece good[2] = {
        {.bytes = 128, .stride_bytes = 128},
        {.bytes = 64, .offset_bytes = 2048, .stride_bytes = 64},
    };
    struct kvt_layout_piece pieces[2];
    struct kvt_layout layout = {.pieces_count = 2, .engine_blocks_per_block = 2, .pieces = pieces};
    const struct kvt_quant_spec spec = {.kind = KVT_QUANT_INT8,
                                        .elem = KVT_ELEM_FP16,
                                        .order = KVT_ORDER_TOKENS_FIRST,
                                        .plane_tokens = 2,
                                        .heads = 2,
                                        .head_dim = 8};

#define EXPECT(wanted, result)                                                                     \
    do {                                                                                           \
        assert_int_equal(kvt_layout_resolve(&layout, &region, 1, wanted), result);                 \
        assert_null(pieces[0].base);                                                               \
        assert_int_equal(layout.stored_bytes, 0);                                                  \
        memcpy(pieces, good, sizeof(good));                                                        \
        layout.quant = spec;                                                                       \
    } while (0)
    (void)state;
    memcpy(pieces, good, sizeof(good));
    layout.quant = spec;
    layout.quant.heads = 0;
    EXPECT(384, KVT_LAYOUT_E_PLANES);
    layout.quant.kind = 3;
    EXPECT(384, KVT_LAYOUT_E_PLANES);
    pieces[0].bytes = 96; /* the payload alone would be whole planes */
    pieces[1].bytes = 96;
    pieces[1].stride_bytes = 96;
    EXPECT(384, KVT_LAYOUT_E_PLANES);
    pieces[1].offset_bytes = 2049;
    EXPECT(384, KVT_LAYOUT_E_ODD);
    pieces[0].stride_bytes = 129;
    EXPECT(384, KVT_LAYOUT_E_ODD);
    region.base = memory + 1;
    region.bytes--;
    EXPECT(384, KVT_LAYOUT_E_ODD);
    region.base = memory;
    /* Planes of one element, 2^31 of them, were too many for a launch. Nothing is looked at. */
    region.bytes = 8 * KVT_GIB;
    layout.quant.plane_tokens = layout.quant.heads = layout.quant.head_dim = 1;
    pieces[0].bytes = pieces[1].bytes = KVT_GIB;
    pieces[0].stride_bytes = pieces[1].stride_bytes = KVT_GIB;
    EXPECT(4 * KVT_GIB, KVT_LAYOUT_E_LONG);
    region.bytes = sizeof(memory);
    EXPECT(383, KVT_LAYOUT_E_PAYLOAD_BYTES);
    assert_int_equal(kvt_layout_resolve(&layout, &region, 1, 384), 0);
    assert_int_equal(layout.payload_bytes, 384);
    assert_int_equal(layout.stored_bytes, 192 + 6 * 2 * 4);
    assert_string_not_equal(kvt_layout_error_text(KVT_LAYOUT_E_PLANES), "unknown result");
    assert_string_not_equal(kvt_layout_error_text(KVT_LAYOUT_E_ODD), "unknown result");
    assert_string_not_equal(kvt_layout_error_text(KVT_LAYOUT_E_LONG), "unknown result");
#undef EXPECT
}

/* Holes under a copy that converts: the guard jumps out of the kernels. */
static void test_hole_under_copy(void **state)
{
    struct kvt_region region = {.is_mapped = true, .bytes = 1u << 20, .mapped_bytes = 1u << 20};
    struct kvt_layout_piece piece = {.bytes = 65536, .stride_bytes = 65536};
    struct kvt_layout layout = {.pieces_count = 1,
                                .engine_blocks_per_block = 2,
                                .pieces = &piece,
                                .quant = {.kind = KVT_QUANT_FP8_E4M3,
                                          .elem = KVT_ELEM_BF16,
                                          .order = KVT_ORDER_TOKENS_FIRST,
                                          .plane_tokens = 64,
                                          .heads = 4,
                                          .head_dim = 128}};
    static const uint64_t blocks[2] = {4, 5};
    struct kvt_client_view view = {.layout = &layout, .engine_blocks = blocks, .end_piece = 1};
    uint64_t hash = 1234;
    uint8_t *payload;
    int fd = memfd_create("kvt-test", MFD_CLOEXEC | MFD_ALLOW_SEALING);

    (void)state;
    assert_int_equal(kvt_guard_install(), 0);
    assert_int_equal(ftruncate(fd, 1 << 20), 0);
    region.base = mmap(NULL, 1u << 20, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    assert_ptr_not_equal(region.base, MAP_FAILED);
    assert_int_equal(kvt_layout_resolve(&layout, &region, 1, 2 * 65536), 0);
    payload = calloc(1, layout.stored_bytes);
    assert_non_null(payload);
    for (int round = 0; round < 3; round++) {
        memset(region.base, 0x3c, 1u << 20);
        assert_int_equal(kvt_client_gather(&view, payload, &hash), 0);
        /* The file ends in the middle of block 5. */
        assert_int_equal(ftruncate(fd, 5 * 65536 + 4096), 0);
        hash = 1234;
        assert_int_equal(kvt_client_gather(&view, payload, &hash), -EFAULT);
        assert_int_equal(hash, 1234);
        assert_int_equal(kvt_client_scatter(&view, payload), -EFAULT);
        assert_int_equal(ftruncate(fd, 1 << 20), 0);
    }
    kvt_region_close(&region);
    free(payload);
    close(fd);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_copies),
        cmocka_unit_test(test_layouts_that_lie),
        cmocka_unit_test(test_hole_under_copy),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
