/* What the engine writes into slots' headers, read back from L2: whose bytes they are must be right
 * however the request said it. */
#include <string.h>

#include "tests/common/check.h"
#include "tests/common/engine_rig.h"

#define L2_BYTES (1u << 20)
#define HEADERS_MAX 16u

static const struct world_config one_rank = {
    .seed = 7, .l2_bytes = L2_BYTES, .delay_ns_max = 100000, .ranks = 1};

/* Every whole header in L2; nothing was freed in these worlds. */
static uint32_t headers(const struct rig *rig, struct kvt_slot_info ret_infos[HEADERS_MAX])
{
    uint32_t count = 0;

    for (uint32_t at = 0; at + KVT_DIO_ALIGN_BYTES <= L2_BYTES; at += KVT_DIO_ALIGN_BYTES) {
        const uint8_t *tokens;
        struct kvt_slot_info info;

        if (kvt_slot_header_read(rig->world.host_memory + at, L2_BYTES - at, &info, &tokens) !=
            KVT_SLOT_OK)
            continue;
        CHECK(count < HEADERS_MAX);
        ret_infos[count++] = info;
    }
    return count;
}

/* A request by cursor is below the cursor's root, whatever salt it carries. */
static void test_root_of_a_cursor(void)
{
    struct kvt_req_reserve *req;
    struct kvt_slot_info infos[HEADERS_MAX];
    struct kvt_handle cursor;
    struct rig rig;

    rig_begin(&rig, &one_rank);
    req = &rig.call.op.req.reserve;
    for (uint64_t first = 0; first < 8; first += 4) {
        call_begin(&rig.call, KVT_OP_RESERVE);
        req->session = rig.client.session;
        req->prefix = world_prefix(&rig.call, 0x101, first + 4);
        if (first == 0) {
            req->prefix.salt = (struct kvt_text){"tenant", 6};
        } else {
            req->prefix.tokens += first * WORLD_BLOCK_TOKENS;
            req->prefix.tokens_count -= first * WORLD_BLOCK_TOKENS;
            req->prefix.cursor = cursor;
        }
        req->wants_count = 1;
        req->wants[0] = (struct kvt_api_range){0, first, first + 4};
        call_run(&rig.call);
        CHECK_CODE(&rig.call.op, KVT_CODE_OK);
        cursor = rig.call.op.ans.reserve.cursor;
        rig_demote(&rig, &rig.client, rig.call.op.ans.reserve.ticket, first, 4);
    }
    CHECK(headers(&rig, infos) == 8);
    for (uint32_t i = 1; i < 8; i++)
        CHECK(memcmp(infos[i].root_digest, infos[0].root_digest, KVT_FINGERPRINT_BYTES) == 0);
    rig_end(&rig);
}

/* Moves that leave most of a long path out find their own blocks. */
static void test_sparse_moves(void)
{
    static const uint64_t wanted[] = {0, 3, 511, 512, 700, 1099};
    const uint32_t count = KVT_COUNT_OF(wanted);
    struct kvt_slot_info infos[HEADERS_MAX];
    struct rig rig;
    uint64_t seen = 0;

    rig_begin(&rig, &one_rank);
    for (uint32_t round = 0; round < 2; round++) {
        struct kvt_req_demote *req = &rig.call.op.req.demote;

        world_demote(&rig.call, &rig.client, KVT_HANDLE_NONE, 0, count, 0);
        req->prefix = world_prefix(&rig.call, 0x101, 1100);
        req->moves[0].block_idx = wanted;
        call_run(&rig.call);
        CHECK_CODE(&rig.call.op, KVT_CODE_OK);
        for (uint32_t i = 0; i < count; i++)
            CHECK(rig.call.op.ans.demote.moves.results[0][i] ==
                  (round == 0 ? KVT_MOVE_DONE : KVT_MOVE_PRESENT));
    }
    CHECK(headers(&rig, infos) == count);
    for (uint32_t i = 0; i < count; i++)
        for (uint32_t k = 0; k < count; k++)
            seen |= (uint64_t)(infos[i].block_idx == wanted[k]) << k;
    CHECK(seen == (1u << count) - 1);
    rig_end(&rig);
}

int main(void)
{
    test_root_of_a_cursor();
    test_sparse_moves();
    return 0;
}
