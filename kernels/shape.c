/* Shapes. A unit is 2 KiB for 32 lanes: four loads of 16 bytes a thread cover the latency of memory
 * at half the threads that one load would need. Short pieces get fewer lanes, two loads each, so
 * that no lane is idle and a warp reads several descriptors at once. */
#include "kernels/shape.h"

#define LANES_MAX 32u
#define LANE_BYTES (KVT_LANE_VECS * 16u)

/* Fills in blocks: @units of a job shared by blocks of @a_block each, for @jobs_count jobs. */
static void share(struct kvt_shape *shape, uint64_t units, uint32_t a_block, uint64_t jobs_count,
                  uint32_t blocks_max)
{
    uint64_t wanted = kvt_div_up(units, a_block), most;

    shape->blocks_y = (uint32_t)KVT_MIN(jobs_count, (uint64_t)blocks_max);
    most = blocks_max / shape->blocks_y;
    shape->blocks_x = (uint32_t)KVT_MAX(KVT_MIN(wanted, most), 1);
}

static void cut(struct kvt_shape *shape, uint32_t longest_bytes)
{
    shape->threads = KVT_SHAPE_THREADS;
    shape->lanes = 1;
    while (shape->lanes < LANES_MAX && shape->lanes * LANE_BYTES / 2 < longest_bytes)
        shape->lanes *= 2;
    shape->chunk_bytes = shape->lanes * LANE_BYTES;
    shape->chunks = (uint32_t)kvt_div_up(longest_bytes, shape->chunk_bytes);
}

struct kvt_shape kvt_shape_copy(const struct kvt_copy_batch *batch, uint32_t blocks_max)
{
    struct kvt_shape shape = {0};

    cut(&shape, batch->piece_bytes_max);
    share(&shape, (uint64_t)batch->pieces_max * batch->blocks_max * shape.chunks,
          shape.threads / shape.lanes, batch->jobs_count, blocks_max);
    return shape;
}

struct kvt_shape kvt_shape_check(const struct kvt_check_batch *batch, uint32_t blocks_max)
{
    struct kvt_shape shape = {.threads = KVT_SHAPE_THREADS};

    share(&shape, kvt_div_up(batch->bytes_max, LANE_BYTES), shape.threads, batch->jobs_count,
          blocks_max);
    return shape;
}

struct kvt_shape kvt_shape_quant(const struct kvt_quant_batch *batch, uint32_t blocks_max)
{
    const struct kvt_quant_spec *spec = &batch->spec;
    uint64_t steps = kvt_div_up((uint64_t)spec->plane_tokens * spec->head_dim, 8);
    struct kvt_shape shape = {0};

    /* Whole warps, as many as have something to do. */
    shape.threads = (uint32_t)KVT_MIN(kvt_round_up(steps, 32), KVT_SHAPE_THREADS);
    share(&shape, (uint64_t)batch->planes_max * spec->heads, 1, batch->jobs_count, blocks_max);
    return shape;
}

/* Slowest first. */
static const char *const orders[] = {
    [KVT_LAYOUT_LAYER_FIRST] = "LBNH",      [KVT_LAYOUT_PAGE_FIRST] = "BLNH",
    [KVT_LAYOUT_HEAD_SPLIT] = "BHLN",       [KVT_LAYOUT_LAYER_FIRST_HEADS] = "LBHN",
    [KVT_LAYOUT_PAGE_FIRST_HEADS] = "BLHN", [KVT_LAYOUT_LAYER_SPLIT] = "LHBN",
    [KVT_LAYOUT_TOKEN_FIRST] = "BNLH",      [KVT_LAYOUT_PAGE_HEAD] = "BHNL",
};

static struct kvt_steps steps_of(const struct kvt_relayout *change, uint32_t order)
{
    struct kvt_steps steps = {0};
    uint64_t step = change->head_bytes;

    for (uint32_t i = 4; i-- > 0;) {
        switch (orders[order][i]) {
        case 'L':
            steps.layer = step;
            step *= change->layers;
            break;
        case 'B':
            steps.page = step;
            step *= change->pages;
            break;
        case 'N':
            steps.token = step;
            step *= change->tokens;
            break;
        default:
            steps.head = step;
            step *= change->heads;
            break;
        }
    }
    return steps;
}

/* What both orders have as one run: all heads of a token, all tokens of a head, or both, which
 * takes a second turn where tokens are the faster. */
static void cut_runs(struct kvt_shape *shape, const struct kvt_relayout *change)
{
    const struct kvt_steps *from = &shape->from, *to = &shape->to;
    uint64_t bytes = change->head_bytes;

    shape->run_tokens = change->tokens;
    shape->run_heads = change->heads;
    for (uint32_t turn = 0; turn < 2; turn++) {
        if (from->head == bytes && to->head == bytes) {
            bytes *= shape->run_heads;
            shape->run_heads = 1;
        }
        if (from->token == bytes && to->token == bytes) {
            bytes *= shape->run_tokens;
            shape->run_tokens = 1;
        }
    }
    shape->run_bytes = (uint32_t)bytes;
    shape->runs = shape->run_tokens * shape->run_heads;
}

struct kvt_shape kvt_shape_relayout(const struct kvt_relayout *change, uint32_t blocks_max)
{
    struct kvt_shape shape = {.from = steps_of(change, change->from),
                              .to = steps_of(change, change->to)};

    cut_runs(&shape, change);
    cut(&shape, shape.run_bytes);
    share(&shape, (uint64_t)shape.runs * shape.chunks, shape.threads / shape.lanes,
          (uint64_t)change->layers * change->pages, blocks_max);
    return shape;
}
