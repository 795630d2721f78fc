/* Copies, checks and conversions of KV blocks: one table of functions, three ways to run them.
 *
 *   kvt_kernels_cuda   kernels on a GPU: asynchronous, in the order of their stream
 *   kvt_kernels_host   plain C, done when the call returns; the oracle, and the fallback
 *   (tests)            the source of the kernels on host threads, kernels/shim.h
 *
 * All three give the same bytes, bit for bit. An engine's pool is scattered: a block of the daemon
 * is `blocks_count` engine blocks of each of `pieces_count` pieces (layers x K, V). A slot holds
 * the same bytes in one run, piece by piece:
 *
 *   pool     base + id * stride: [bytes]  ..gap..  [bytes]      for each piece
 *   payload  piece 0: [block 0][block 1]..  piece 1: [block 0][block 1]..
 *
 * Addresses are uint64_t: of the device for CUDA (or of mapped pinned host memory), of this process
 * for the others. No CUDA type appears here; a stream is CUDA's handle, which the host ignores.
 *
 * Results: 0: queued (host: done). -EINVAL: the arguments make no sense, nothing was queued (also
 * of 2^31 jobs and more). Positive: CUDA's error number. Any thread, one at a time a stream. */
#pragma once

#include "daemon/base/def.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- gather and scatter ---------------------------------------------------------------------- */

/* An id of no engine block: its parts are not moved (a gather leaves those bytes of the payload as
 * they are) and are not in the check. */
#define KVT_KERNEL_BLOCK_NONE UINT64_MAX

#define KVT_COPY_PIECE_BYTES_MAX (1u << 30)

struct kvt_copy_piece {
    uint64_t base;         /* of engine block 0 */
    uint64_t stride_bytes; /* from one engine block to the next; >= bytes */
    uint64_t
        payload_offset_bytes; /* where this piece of the first listed block lies in the payload */
    uint32_t bytes;           /* of one engine block: 1 .. KVT_COPY_PIECE_BYTES_MAX */
    uint32_t pad;             /* 0 */
};

struct kvt_copy_job { /* one payload */
    uint64_t payload; /* address: gather writes it, scatter reads it */
    uint64_t pieces;  /* address of pieces_count struct kvt_copy_piece */
    uint64_t blocks;  /* address of blocks_count uint64_t: ids of engine blocks */
    uint64_t check;   /* address of a uint64_t to which the check of the bytes that were moved is
                         added; 0: none. Needs is_checkable of each piece */
    uint32_t pieces_count, blocks_count;
};

struct kvt_copy_batch { /* many small copies in one launch */
    uint64_t jobs;      /* address of jobs_count struct kvt_copy_job, readable by the stream until
                           the launch is over */
    uint32_t jobs_count;
    /* The greatest of all jobs: the shape of the launch. pieces_max * blocks_max * (piece_bytes_max
     * / 64, rounded up) is less than 2^31 (payloads of up to 128 GiB), or -EINVAL. */
    uint32_t pieces_max, blocks_max, piece_bytes_max;
};

/* A piece takes part in a check when its bytes and payload offset are multiples of 8. */
static inline bool kvt_copy_is_checkable(const struct kvt_copy_piece *piece)
{
    return piece->bytes % 8 == 0 && piece->payload_offset_bytes % 8 == 0;
}

enum {                        /* of kvt_copy_validate */
       KVT_COPY_E_EMPTY = 1,  /* no pieces, no blocks, or a piece without bytes */
       KVT_COPY_E_STRIDE = 2, /* a stride smaller than the bytes */
       KVT_COPY_E_RANGE = 3,  /* an address overflows, or the payload ends before a piece does */
       KVT_COPY_E_OVERLAP =
           4, /* two parts of the pool or of the payload, or pool and payload, share a byte */
       KVT_COPY_E_UNCHECKED = 5 /* a check is wanted of a piece that is not checkable */
};
/* Whether a job, whose addresses this process can read (all of them but `payload` and `base`), is
 * one that gather or scatter may be given. The launches themselves trust their jobs (the host
 * refuses those beyond the batch's maxima). O(n log n) in pieces x blocks; no allocation beyond
 * that many 16-byte entries (-ENOMEM, also of more than 2^32). -EINVAL: `pad` is not 0. */
KVT_MUST_USE int kvt_copy_validate(const struct kvt_copy_job *job, uint64_t payload_bytes);

/* ---- check ----------------------------------------------------------------------------------- */

/* Sum (mod 2^64) over the payload's little-endian 8-byte words w at word index i of mix(w, i); a
 * last part of less than 8 bytes counts as a word padded with zeros. With all arithmetic mod 2^64:
 *
 *   x = w ^ ((i + 1) * 0x9e3779b97f4a7c15)
 *   x = (x ^ (x >> 32)) * 0xbf58476d1ce4e5b9
 *   x = (x ^ (x >> 29)) * 0x94d049bb133111eb
 *   mix = x ^ (x >> 32)
 *
 * For one i that is a bijection of w: a single word that is wrong is always noticed. Several that
 * are wrong, missing (zero or old) or in each other's places change the sum with all but 2^-64
 * chance. Words may be summed in any order, so copies in flight can add up what they moved. It is
 * no defence against an adversary. */
struct kvt_check_job {
    uint64_t payload, bytes;
    uint64_t check; /* address of a uint64_t to which it is added */
};
struct kvt_check_batch {
    uint64_t jobs; /* address of struct kvt_check_job */
    uint32_t jobs_count;
    uint64_t bytes_max;
};
/* The same value, at once, of memory of this process. */
uint64_t kvt_check64(const void *payload, uint64_t bytes);

/* ---- quantisation ---------------------------------------------------------------------------- */

enum kvt_quant_kind { KVT_QUANT_NONE = 0, KVT_QUANT_FP8_E4M3 = 1, KVT_QUANT_INT8 = 2 };
enum kvt_quant_elem { KVT_ELEM_FP16 = 1, KVT_ELEM_BF16 = 2 };
enum kvt_quant_order {                             /* of a plane's elements */
                       KVT_ORDER_TOKENS_FIRST = 1, /* [token][head][dim] ("NHD") */
                       KVT_ORDER_HEADS_FIRST = 2,  /* [head][token][dim] ("HND") */
};
/* A raw payload is a run of planes: K or V of one layer of one engine block. Each (plane, head) has
 * one scale.
 *
 *   raw        plane 0: 2-byte elements | plane 1 | ...
 *   quantised  codes of plane 0, 1 byte an element, the same order | plane 1 | ... | zero to a
 *              multiple of 16 | scales: float32 [plane][head] | zero to a multiple of 16
 *
 * scale = greatest finite |x| / 448 (FP8 E4M3, no infinities) or / 127 (INT8), in float32; 1 where
 * all are zero or none is finite, or where the quotient is not a normal float32. code =
 * round-to-nearest-even(x / scale), saturated; an infinity is the greatest code of its sign; NaN is
 * 0x7f or 0xff (FP8), -128 (INT8, which x never gets). Back: code * scale in float32, rounded to
 * nearest even; NaN codes give the quiet NaN 0x7e00 / 0x7fc0 (sign of the FP8 code kept). */
struct kvt_quant_spec {
    uint8_t kind, elem, order; /* enums above */
    uint8_t pad;               /* 0 */
    uint32_t plane_tokens, heads, head_dim;
};
/* False: a value out of range (each of the three 1 .. 65,536; a plane at most 2^30 raw bytes). */
bool kvt_quant_is_valid(const struct kvt_quant_spec *spec);
uint64_t kvt_quant_plane_bytes(const struct kvt_quant_spec *spec); /* raw */
/* Of a raw payload of @raw_bytes, a multiple of a plane's; 0: it is not. */
uint64_t kvt_quant_bytes(const struct kvt_quant_spec *spec, uint64_t raw_bytes);
uint64_t kvt_quant_scales_offset(const struct kvt_quant_spec *spec, uint64_t raw_bytes);

struct kvt_quant_job {
    uint64_t raw;                    /* address of the raw bytes of planes [first, end); even */
    uint64_t quantised;              /* address of the whole quantised payload; % 4 == 0 */
    uint32_t planes_count;           /* of the whole payload */
    uint32_t first_plane, end_plane; /* those that this job converts; that of the last plane also
                                        writes the zeros (quantise) */
    uint32_t pad;                    /* 0 */
};
struct kvt_quant_batch {
    struct kvt_quant_spec spec; /* of all jobs */
    uint64_t jobs;              /* address of struct kvt_quant_job */
    uint32_t jobs_count, planes_max;
};

/* ---- change of layout ------------------------------------------------------------------------ */

/* The order of a pool or payload, slowest first: L layers (a K and a V that lie apart are two), B
 * pages, N tokens of a page, H heads; what lies together at each place is head_bytes. Whose names
 * these are (docs/kernels.md has the arguments):
 *
 *                                         vLLM        SGLang's host pool */
enum kvt_layout_order {
    KVT_LAYOUT_LAYER_FIRST = 1,       /* LBNH  LBNHC, NHD  layer_first */
    KVT_LAYOUT_PAGE_FIRST = 2,        /* BLNH  BLNHC       page_first_direct */
    KVT_LAYOUT_HEAD_SPLIT = 3,        /* BHLN  BHLNC */
    KVT_LAYOUT_LAYER_FIRST_HEADS = 4, /* LBHN  LBHNC, HND */
    KVT_LAYOUT_PAGE_FIRST_HEADS = 5,  /* BLHN  BLHNC */
    KVT_LAYOUT_LAYER_SPLIT = 6,       /* LHBN  LHBNC */
    KVT_LAYOUT_TOKEN_FIRST = 7,       /* BNLH              page_first */
    KVT_LAYOUT_PAGE_HEAD = 8,         /* BHNL              page_head */
};
struct kvt_relayout {
    uint64_t src, dst; /* addresses; the two may not overlap */
    uint32_t from, to; /* enum kvt_layout_order; the same one twice is a plain copy */
    uint32_t layers, pages, tokens, heads;
    uint32_t head_bytes; /* of one head of one token: head_dim x element size, twice that where a
                            head's K and V lie side by side (vLLM's C) */
};

/* ---- the table ------------------------------------------------------------------------------- */

struct kvt_kernels {
    const char *name; /* "cuda", "host" */
    int (*gather)(void *stream, const struct kvt_copy_batch *batch);
    int (*scatter)(void *stream, const struct kvt_copy_batch *batch);
    int (*check)(void *stream, const struct kvt_check_batch *batch);
    int (*quantise)(void *stream, const struct kvt_quant_batch *batch);
    int (*dequantise)(void *stream, const struct kvt_quant_batch *batch);
    int (*relayout)(void *stream, const struct kvt_relayout *change);
};

const struct kvt_kernels *kvt_kernels_host(void);
const struct kvt_kernels *kvt_kernels_cuda(void); /* NULL: this build has none */

/* Brings the CUDA kernels onto the current device, which the first launch of each would otherwise
 * do, and wait for. 0, CUDA's error number (209: this build has no code for that GPU), or -ENOTSUP:
 * this build has none. Not for a thread that may not wait. */
KVT_MUST_USE int kvt_kernels_cuda_load(void);

#ifdef __cplusplus
}
#endif
