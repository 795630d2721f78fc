/* What one thread of each kernel does, written once: nvcc compiles it for GPUs (cuda.cu), the C
 * compiler for host threads (shim.c), so that the arithmetic of indexes which runs on a GPU also
 * runs under a sanitizer. The common part of C and C++; no CUDA name appears. What differs is the
 * dialect's, included before this file (dialect_cuda.h, shim.h):
 *
 *   KVT_FN, KVT_UNROLL, KVT_MUL_RN, KVT_DIV_RN
 *   struct kvt_vec {lo, hi}, kvt_load16, kvt_store16 (16-byte accesses, addresses % 16 == 0),
 *   kvt_load8/4/2/1 and kvt_store8/4/2/1
 *   kvt_add64(address, sum): adds @sum of each thread of the warp; all its threads call it together
 *
 * A thread learns where it is from `struct kvt_at` and what to do from the batch and the shape of
 * the launch (shape.h). No thread waits for another in here: what a block of threads has to agree
 * upon (the scale of a head) lies between two functions, and the dialects join them.
 *
 * Copies. `lanes` neighbouring threads, a power of two up to 32, move one unit: at most 64 bytes a
 * lane of one part. A part is one piece of one engine block, and its units are numbered with the
 * chunks of the longest piece of the batch:
 *
 *   unit = ((piece * blocks) + block) * chunks + chunk
 *
 * so that neighbouring units write (gather) or read (scatter) neighbouring bytes of the payload. A
 * lane first loads its up to four vectors, then stores them: four accesses in flight. Where the two
 * addresses are not both aligned to 16, the lanes take words of 8 bytes, put together from accesses
 * as wide as the alignment allows. */
#pragma once

#include "kernels/kvt_kernels.h"
#include "kernels/mix.h"
#include "kernels/number.h"
#include "kernels/shape.h"

struct kvt_at {
    uint32_t thread, threads;   /* in the block */
    uint32_t block_x, blocks_x; /* units of a job */
    uint32_t block_y, blocks_y; /* jobs */
};

/* The greatest power of two, up to 16, that divides both. */
KVT_FN uint32_t kvt_width_of(uint64_t a, uint64_t b)
{
    uint32_t bits = (uint32_t)((a | b) & 15u) | 16u;

    return bits & (~bits + 1u);
}

/* ---- words of 8 bytes at addresses that are multiples of @width (1, 2, 4; else 8) --------------
 */

KVT_FN uint64_t kvt_load_word(uint64_t address, uint32_t width)
{
    uint64_t word = 0;

    if (width >= 8)
        return kvt_load8(address);
    if (width == 4)
        return kvt_load4(address) | (uint64_t)kvt_load4(address + 4) << 32;
    for (uint32_t i = 0; i < 8; i += width) {
        uint64_t part = width == 2 ? kvt_load2(address + i) : kvt_load1(address + i);

        word |= part << (8 * i);
    }
    return word;
}

KVT_FN void kvt_store_word(uint64_t address, uint64_t word, uint32_t width)
{
    if (width >= 8) {
        kvt_store8(address, word);
        return;
    }
    for (uint32_t i = 0; i < 8; i += width) {
        uint64_t part = word >> (8 * i);

        if (width == 4)
            kvt_store4(address + i, (uint32_t)part);
        else if (width == 2)
            kvt_store2(address + i, (uint32_t)part);
        else
            kvt_store1(address + i, (uint32_t)part);
    }
}

/* ---- one unit ----------------------------------------------------------------------------------
 */

struct kvt_unit {
    uint64_t dst, src;
    uint64_t first_word; /* of the payload; only where is_checked */
    uint32_t bytes;      /* at most 64 * lanes */
    uint32_t lane, lanes;
    int is_checked;
};

/* Of the unit's whole 16 bytes; both addresses are multiples of 16. */
KVT_FN uint64_t kvt_move_vecs(const struct kvt_unit *unit)
{
    const uint32_t count = unit->bytes / 16;
    struct kvt_vec vecs[KVT_LANE_VECS];
    uint64_t sum = 0;

    KVT_UNROLL
    for (uint32_t i = 0; i < KVT_LANE_VECS; i++) {
        uint32_t v = unit->lane + i * unit->lanes;

        if (v < count)
            vecs[i] = kvt_load16(unit->src + (uint64_t)v * 16);
    }
    KVT_UNROLL
    for (uint32_t i = 0; i < KVT_LANE_VECS; i++) {
        uint32_t v = unit->lane + i * unit->lanes;

        if (v < count) {
            kvt_store16(unit->dst + (uint64_t)v * 16, vecs[i]);
            if (unit->is_checked) {
                sum += kvt_mix(vecs[i].lo, unit->first_word + 2 * v);
                sum += kvt_mix(vecs[i].hi, unit->first_word + 2 * v + 1);
            }
        }
    }
    return sum;
}

/* From byte @begin (a multiple of 8) on; both addresses are multiples of @width. A checked unit has
 * whole words only. */
KVT_FN uint64_t kvt_move_words(const struct kvt_unit *unit, uint32_t begin, uint32_t width)
{
    const uint32_t words_end = unit->bytes & ~7u;
    uint64_t sum = 0;

    for (uint32_t at = begin + unit->lane * 8; at < words_end; at += unit->lanes * 8) {
        uint64_t word = kvt_load_word(unit->src + at, width);

        kvt_store_word(unit->dst + at, word, width);
        if (unit->is_checked)
            sum += kvt_mix(word, unit->first_word + at / 8);
    }
    for (uint32_t at = words_end + unit->lane; at < unit->bytes; at += unit->lanes)
        kvt_store1(unit->dst + at, kvt_load1(unit->src + at));
    return sum;
}

/* Returns this lane's part of the check. */
KVT_FN uint64_t kvt_move_unit(const struct kvt_unit *unit)
{
    const uint32_t width = kvt_width_of(unit->dst, unit->src);
    uint64_t sum = 0;

    if (width < 16)
        return kvt_move_words(unit, 0, width);
    sum = kvt_move_vecs(unit);
    if (unit->bytes % 16 != 0)
        sum += kvt_move_words(unit, unit->bytes & ~15u, 8);
    return sum;
}

/* ---- gather and scatter ------------------------------------------------------------------------
 */

/* Unit @number of a job: false where it has nothing to move. */
KVT_FN int kvt_copy_unit(const struct kvt_copy_job *job, const struct kvt_shape *shape,
                         uint32_t number, int is_gather, struct kvt_unit *ret_unit)
{
    const uint32_t chunk = number % shape->chunks, part = number / shape->chunks;
    const uint32_t block = part % job->blocks_count;
    const struct kvt_copy_piece *piece =
        (const struct kvt_copy_piece *)(uintptr_t)job->pieces + part / job->blocks_count;
    const uint64_t id = ((const uint64_t *)(uintptr_t)job->blocks)[block];
    const uint32_t bytes = piece->bytes, begin = chunk * shape->chunk_bytes;
    uint64_t offset, payload, pool;

    if (id == KVT_KERNEL_BLOCK_NONE || begin >= bytes)
        return 0;
    offset = piece->payload_offset_bytes + (uint64_t)block * bytes + begin;
    payload = job->payload + offset;
    pool = piece->base + id * piece->stride_bytes + begin;
    ret_unit->dst = is_gather ? payload : pool;
    ret_unit->src = is_gather ? pool : payload;
    ret_unit->first_word = offset / 8;
    ret_unit->bytes = bytes - begin < shape->chunk_bytes ? bytes - begin : shape->chunk_bytes;
    ret_unit->is_checked = job->check != 0;
    return 1;
}

KVT_FN void kvt_copy_body(const struct kvt_at *at, const struct kvt_copy_batch *batch,
                          const struct kvt_shape *shape, int is_gather)
{
    const struct kvt_copy_job *jobs = (const struct kvt_copy_job *)(uintptr_t)batch->jobs;
    const uint32_t groups = at->threads / shape->lanes;
    const uint32_t first = at->block_x * groups + at->thread / shape->lanes;
    struct kvt_unit unit;

    unit.lane = at->thread % shape->lanes;
    unit.lanes = shape->lanes;
    for (uint32_t j = at->block_y; j < batch->jobs_count; j += at->blocks_y) {
        const struct kvt_copy_job *job = &jobs[j];
        const uint32_t units_count = job->pieces_count * job->blocks_count * shape->chunks;
        uint64_t sum = 0;

        for (uint32_t n = first; n < units_count; n += at->blocks_x * groups) {
            if (kvt_copy_unit(job, shape, n, is_gather, &unit))
                sum += kvt_move_unit(&unit);
        }
        if (job->check != 0)
            kvt_add64(job->check, sum);
    }
}

/* ---- check -------------------------------------------------------------------------------------
 */

/* This thread's part of @count vectors: @first, then every @step-th; four loads in flight. */
KVT_FN uint64_t kvt_check_vecs(uint64_t payload, uint64_t count, uint64_t first, uint64_t step)
{
    struct kvt_vec vecs[KVT_LANE_VECS];
    uint64_t sum = 0;

    for (uint64_t v = first; v < count; v += step * KVT_LANE_VECS) {
        KVT_UNROLL
        for (uint32_t i = 0; i < KVT_LANE_VECS; i++) {
            if (v + i * step < count)
                vecs[i] = kvt_load16(payload + (v + i * step) * 16);
        }
        KVT_UNROLL
        for (uint32_t i = 0; i < KVT_LANE_VECS; i++) {
            if (v + i * step < count) {
                sum += kvt_mix(vecs[i].lo, (v + i * step) * 2);
                sum += kvt_mix(vecs[i].hi, (v + i * step) * 2 + 1);
            }
        }
    }
    return sum;
}

/* The last word, of less than 8 bytes. */
KVT_FN uint64_t kvt_check_tail(uint64_t payload, uint64_t bytes)
{
    const uint64_t begin = bytes & ~7ull;
    uint64_t word = 0;

    if (begin == bytes)
        return 0;
    for (uint64_t i = begin; i < bytes; i++)
        word |= (uint64_t)kvt_load1(payload + i) << (8 * (i - begin));
    return kvt_mix(word, begin / 8);
}

KVT_FN void kvt_check_body(const struct kvt_at *at, const struct kvt_check_batch *batch)
{
    const struct kvt_check_job *jobs = (const struct kvt_check_job *)(uintptr_t)batch->jobs;
    const uint64_t first = (uint64_t)at->block_x * at->threads + at->thread;
    const uint64_t step = (uint64_t)at->blocks_x * at->threads;

    for (uint32_t j = at->block_y; j < batch->jobs_count; j += at->blocks_y) {
        const uint64_t payload = jobs[j].payload, bytes = jobs[j].bytes;
        const uint32_t width = kvt_width_of(payload, 0);
        uint64_t words_begin = 0, sum = 0;

        if (width == 16) {
            sum = kvt_check_vecs(payload, bytes / 16, first, step);
            words_begin = bytes / 16 * 2;
        }
        for (uint64_t w = words_begin + first; w < bytes / 8; w += step)
            sum += kvt_mix(kvt_load_word(payload + w * 8, width), w);
        if (first == 0)
            sum += kvt_check_tail(payload, bytes);
        kvt_add64(jobs[j].check, sum);
    }
}

/* ---- quantisation: one block of threads a (plane, head) ----------------------------------------
 */

/* Where the elements of one head of one plane lie: rows of @elems neighbours, as quant.c has them.
 * 32 bits suffice for a plane (2^29 elements). */
struct kvt_head {
    uint64_t halves, codes; /* addresses of the plane's first element and code */
    uint64_t scale;         /* address */
    uint32_t rows, elems;
    uint32_t first, row_step; /* in elements, from the plane's beginning */
    uint32_t step;            /* 8: whole vectors of 16 raw bytes everywhere; 1: not so */
    int is_bf16, is_int8;
};

KVT_FN uint64_t kvt_scales_offset(const struct kvt_quant_spec *spec, uint32_t planes_count)
{
    uint64_t elems = (uint64_t)spec->plane_tokens * spec->heads * spec->head_dim;

    return (elems * planes_count + 15u) & ~15ull;
}

/* Head @number of the job's planes, counted through; < (end_plane - first_plane) * heads. */
KVT_FN void kvt_head_of(const struct kvt_quant_spec *spec, const struct kvt_quant_job *job,
                        uint32_t number, struct kvt_head *ret_head)
{
    const uint32_t plane = number / spec->heads, head = number % spec->heads;
    const uint32_t head_elems = spec->plane_tokens * spec->head_dim;
    const uint64_t plane_elems = (uint64_t)head_elems * spec->heads;
    const uint64_t at = job->first_plane + (uint64_t)plane;
    int is_heads_first = spec->order == KVT_ORDER_HEADS_FIRST;

    ret_head->halves = job->raw + plane * plane_elems * 2;
    ret_head->codes = job->quantised + at * plane_elems;
    ret_head->scale =
        job->quantised + kvt_scales_offset(spec, job->planes_count) + (at * spec->heads + head) * 4;
    ret_head->rows = is_heads_first ? 1 : spec->plane_tokens;
    ret_head->elems = is_heads_first ? head_elems : spec->head_dim;
    ret_head->first = head * ret_head->elems;
    ret_head->row_step = is_heads_first ? 0 : spec->heads * spec->head_dim;
    ret_head->step = 1;
    if ((ret_head->elems | ret_head->first | ret_head->row_step) % 8 == 0 &&
        ret_head->halves % 16 == 0 && ret_head->codes % 8 == 0)
        ret_head->step = 8;
    ret_head->is_bf16 = spec->elem == KVT_ELEM_BF16;
    ret_head->is_int8 = spec->kind == KVT_QUANT_INT8;
}

/* The plane's element that the head's step @number begins with. */
KVT_FN uint32_t kvt_head_elem(const struct kvt_head *head, uint32_t number)
{
    const uint32_t row_steps = head->elems / head->step;

    return head->first + number / row_steps * head->row_step + number % row_steps * head->step;
}

KVT_FN uint32_t kvt_head_steps(const struct kvt_head *head)
{
    return head->rows * (head->elems / head->step);
}

/* Of four halves. */
KVT_FN uint32_t kvt_magnitude4(uint64_t halves, int is_bf16)
{
    uint32_t most = 0;

    KVT_UNROLL
    for (uint32_t i = 0; i < 4; i++) {
        uint32_t magnitude = kvt_elem_magnitude((uint32_t)(halves >> (16 * i)) & 0xffffu, is_bf16);

        most = magnitude > most ? magnitude : most;
    }
    return most;
}

/* The greatest magnitude among this thread's elements. */
KVT_FN uint32_t kvt_head_magnitude(const struct kvt_at *at, const struct kvt_head *head)
{
    const uint32_t steps = kvt_head_steps(head);
    uint32_t most = 0;

    for (uint32_t n = at->thread; n < steps; n += at->threads) {
        const uint64_t address = head->halves + (uint64_t)kvt_head_elem(head, n) * 2;
        uint32_t lo, hi = 0;

        if (head->step == 8) {
            const struct kvt_vec vec = kvt_load16(address);

            lo = kvt_magnitude4(vec.lo, head->is_bf16);
            hi = kvt_magnitude4(vec.hi, head->is_bf16);
        } else {
            lo = kvt_elem_magnitude(kvt_load2(address), head->is_bf16);
        }
        most = lo > most ? lo : most;
        most = hi > most ? hi : most;
    }
    return most;
}

KVT_FN uint64_t kvt_encode4(uint64_t halves, float scale, const struct kvt_head *head)
{
    uint64_t codes = 0;

    KVT_UNROLL
    for (uint32_t i = 0; i < 4; i++) {
        uint32_t half = (uint32_t)(halves >> (16 * i)) & 0xffffu;

        codes |= (uint64_t)kvt_quant_code(half, scale, head->is_bf16, head->is_int8) << (8 * i);
    }
    return codes;
}

KVT_FN uint64_t kvt_decode4(uint64_t codes, float scale, const struct kvt_head *head)
{
    uint64_t halves = 0;

    KVT_UNROLL
    for (uint32_t i = 0; i < 4; i++) {
        uint32_t code = (uint32_t)(codes >> (8 * i)) & 0xffu;

        halves |= (uint64_t)kvt_quant_value(code, scale, head->is_bf16, head->is_int8) << (16 * i);
    }
    return halves;
}

/* This thread's elements; the first thread also writes the scale. */
KVT_FN void kvt_head_encode(const struct kvt_at *at, const struct kvt_head *head, float scale)
{
    const uint32_t steps = kvt_head_steps(head);

    if (at->thread == 0)
        kvt_store4(head->scale, kvt_float_bits(scale));
    for (uint32_t n = at->thread; n < steps; n += at->threads) {
        const uint32_t elem = kvt_head_elem(head, n);
        const uint64_t address = head->halves + (uint64_t)elem * 2;

        if (head->step == 8) {
            const struct kvt_vec vec = kvt_load16(address);
            const uint64_t lo = kvt_encode4(vec.lo, scale, head);

            kvt_store8(head->codes + elem, lo | kvt_encode4(vec.hi, scale, head) << 32);
        } else {
            kvt_store1(head->codes + elem,
                       kvt_quant_code(kvt_load2(address), scale, head->is_bf16, head->is_int8));
        }
    }
}

KVT_FN void kvt_head_decode(const struct kvt_at *at, const struct kvt_head *head)
{
    const uint32_t steps = kvt_head_steps(head);
    const float scale = kvt_bits_float(kvt_load4(head->scale));

    for (uint32_t n = at->thread; n < steps; n += at->threads) {
        const uint32_t elem = kvt_head_elem(head, n);
        const uint64_t address = head->halves + (uint64_t)elem * 2;

        if (head->step == 8) {
            const uint64_t codes = kvt_load8(head->codes + elem);
            struct kvt_vec vec;

            vec.lo = kvt_decode4(codes, scale, head);
            vec.hi = kvt_decode4(codes >> 32, scale, head);
            kvt_store16(address, vec);
        } else {
            kvt_store2(address, kvt_quant_value(kvt_load1(head->codes + elem), scale, head->is_bf16,
                                                head->is_int8));
        }
    }
}

/* The zeros behind codes and scales, by the first block of the job that has the last plane. */
KVT_FN void kvt_quant_gaps(const struct kvt_at *at, const struct kvt_quant_spec *spec,
                           const struct kvt_quant_job *job)
{
    const uint64_t scales = kvt_scales_offset(spec, job->planes_count);
    const uint64_t scales_end = scales + (uint64_t)job->planes_count * spec->heads * 4;
    const uint64_t codes_end =
        (uint64_t)spec->plane_tokens * spec->heads * spec->head_dim * job->planes_count;

    if (at->block_x != 0 || job->end_plane != job->planes_count ||
        job->first_plane == job->end_plane)
        return;
    for (uint64_t i = codes_end + at->thread; i < scales; i += at->threads)
        kvt_store1(job->quantised + i, 0);
    for (uint64_t i = scales_end + at->thread; i < ((scales_end + 15u) & ~15ull); i += at->threads)
        kvt_store1(job->quantised + i, 0);
}

/* The kinds once more, so that a caller that knows them has loops of one kind. */
KVT_FN void kvt_dequantise_body(const struct kvt_at *at, const struct kvt_quant_batch *batch,
                                int is_bf16, int is_int8)
{
    const struct kvt_quant_job *jobs = (const struct kvt_quant_job *)(uintptr_t)batch->jobs;
    struct kvt_head head;

    for (uint32_t j = at->block_y; j < batch->jobs_count; j += at->blocks_y) {
        const uint32_t heads_count = (jobs[j].end_plane - jobs[j].first_plane) * batch->spec.heads;

        for (uint32_t n = at->block_x; n < heads_count; n += at->blocks_x) {
            kvt_head_of(&batch->spec, &jobs[j], n, &head);
            head.is_bf16 = is_bf16;
            head.is_int8 = is_int8;
            kvt_head_decode(at, &head);
        }
    }
}

/* ---- change of layout: a job is a (layer, page) -------------------------------------------------
 */

KVT_FN void kvt_relayout_page(const struct kvt_at *at, const struct kvt_shape *shape, uint64_t dst,
                              uint64_t src)
{
    const uint32_t groups = at->threads / shape->lanes;
    const uint32_t first = at->block_x * groups + at->thread / shape->lanes;
    /* Neighbouring runs are neighbours where they are written. */
    const int is_token_fast = shape->to.token < shape->to.head;
    struct kvt_unit unit;

    unit.lane = at->thread % shape->lanes;
    unit.lanes = shape->lanes;
    unit.is_checked = 0;
    unit.first_word = 0;
    for (uint32_t n = first; n < shape->runs * shape->chunks; n += at->blocks_x * groups) {
        const uint32_t run = n / shape->chunks, begin = n % shape->chunks * shape->chunk_bytes;
        const uint32_t rest = shape->run_bytes - begin;
        const uint32_t inner = is_token_fast ? shape->run_tokens : shape->run_heads;
        const uint32_t slow = run / inner, fast = run % inner;
        const uint32_t token = is_token_fast ? fast : slow, head = is_token_fast ? slow : fast;

        unit.dst = dst + token * shape->to.token + head * shape->to.head + begin;
        unit.src = src + token * shape->from.token + head * shape->from.head + begin;
        unit.bytes = rest < shape->chunk_bytes ? rest : shape->chunk_bytes;
        (void)kvt_move_unit(&unit);
    }
}

KVT_FN void kvt_relayout_body(const struct kvt_at *at, const struct kvt_relayout *change,
                              const struct kvt_shape *shape)
{
    const uint64_t count = (uint64_t)change->layers * change->pages;

    for (uint64_t n = at->block_y; n < count; n += at->blocks_y) {
        const uint64_t layer = n / change->pages, page = n % change->pages;

        kvt_relayout_page(at, shape, change->dst + layer * shape->to.layer + page * shape->to.page,
                          change->src + layer * shape->from.layer + page * shape->from.page);
    }
}
