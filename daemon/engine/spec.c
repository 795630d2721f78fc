/* A namespace's spec as bytes: what its fingerprint is the SHA-256 of, and what L3's catalog keeps
 * so that the namespace comes back with its blocks. Every text carries its length, so that two
 * different specs never encode to the same bytes.
 *
 * There are two formats. A spec that quantises nothing is written as it was before there was
 * quantisation, so that the namespaces of then keep their fingerprints and their blocks. Any other
 * is written as format 2, which adds the six numbers of struct kvt_api_quant to each component. */
#include <string.h>

#include "daemon/base/bytes.h"
#include "daemon/engine/internal.h"

static const struct kvt_text formats[] = {{"kvtier namespace 1", 18}, {"kvtier namespace 2", 18}};

/* ---- encoding ---------------------------------------------------------------------------------
 */

struct encoder {
    uint8_t *at; /* NULL: only counts */
    size_t bytes;
};

static void put_bytes(struct encoder *encoder, const void *data, size_t bytes)
{
    if (encoder->at != NULL && bytes > 0)
        memcpy(encoder->at + encoder->bytes, data, bytes);
    encoder->bytes += bytes;
}

static void put_u64(struct encoder *encoder, uint64_t value)
{
    uint8_t le[8];

    kvt_put_u64(le, 0, value);
    put_bytes(encoder, le, sizeof(le));
}

static void put_text(struct encoder *encoder, const struct kvt_text *text)
{
    put_u64(encoder, text->bytes);
    put_bytes(encoder, text->at, text->bytes);
}

static void put_quant(struct encoder *encoder, const struct kvt_api_quant *quant)
{
    put_u64(encoder, quant->kind);
    put_u64(encoder, quant->elem);
    put_u64(encoder, quant->order);
    put_u64(encoder, quant->plane_tokens);
    put_u64(encoder, quant->heads);
    put_u64(encoder, quant->head_dim);
}

static bool is_quantised(const struct kvt_req_open_namespace *req)
{
    for (uint32_t i = 0; i < req->components_count; i++)
        if (req->components[i].quant.kind != 0)
            return true;
    return false;
}

size_t eng_spec_encode(const struct kvt_req_open_namespace *req, uint8_t *ret_bytes)
{
    struct encoder encoder = {.at = ret_bytes};
    bool has_quant = is_quantised(req);

    put_text(&encoder, &formats[has_quant]);
    put_u64(&encoder, req->block_tokens);
    put_u64(&encoder, req->ranks);
    put_u64(&encoder, req->components_count);
    for (uint32_t i = 0; i < req->components_count; i++) {
        const struct kvt_api_component *c = &req->components[i];

        put_u64(&encoder, c->kind);
        put_u64(&encoder, c->window_tokens);
        put_u64(&encoder, c->bytes_per_block);
        put_u64(&encoder, c->is_replicated);
        put_text(&encoder, &c->name);
        if (has_quant)
            put_quant(&encoder, &c->quant);
    }
    put_text(&encoder, &req->model);
    put_text(&encoder, &req->revision);
    put_text(&encoder, &req->dtype);
    put_text(&encoder, &req->layout);
    put_u64(&encoder, req->tags_count);
    for (uint32_t i = 0; i < req->tags_count; i++)
        put_text(&encoder, &req->tags[i]);
    return encoder.bytes;
}

/* ---- decoding: the bytes come from disk -------------------------------------------------------
 */

struct decoder {
    const uint8_t *at;
    size_t left;
    bool is_bad;
};

static uint64_t get_u64(struct decoder *decoder, uint64_t max)
{
    uint64_t value;

    if (decoder->left < 8) {
        decoder->is_bad = true;
        return 0;
    }
    value = kvt_get_u64(decoder->at, 0);
    decoder->at += 8;
    decoder->left -= 8;
    if (value <= max)
        return value;
    decoder->is_bad = true;
    return 0;
}

static struct kvt_text get_text(struct decoder *decoder)
{
    uint64_t bytes = get_u64(decoder, decoder->left);
    struct kvt_text text = {(const char *)decoder->at, (uint32_t)bytes};

    if (bytes > decoder->left) {
        decoder->is_bad = true;
        return (struct kvt_text){0};
    }
    decoder->at += bytes;
    decoder->left -= bytes;
    return text;
}

static void get_quant(struct decoder *decoder, struct kvt_api_quant *ret_quant)
{
    ret_quant->kind = (uint32_t)get_u64(decoder, UINT32_MAX);
    ret_quant->elem = (uint32_t)get_u64(decoder, UINT32_MAX);
    ret_quant->order = (uint32_t)get_u64(decoder, UINT32_MAX);
    ret_quant->plane_tokens = (uint32_t)get_u64(decoder, UINT32_MAX);
    ret_quant->heads = (uint32_t)get_u64(decoder, UINT32_MAX);
    ret_quant->head_dim = (uint32_t)get_u64(decoder, UINT32_MAX);
}

/* Which of the formats it is; their number if it is none of them. */
static uint32_t get_format(struct decoder *decoder)
{
    struct kvt_text magic = get_text(decoder);
    uint32_t i = 0;

    while (i < KVT_COUNT_OF(formats) &&
           (magic.bytes != formats[i].bytes || memcmp(magic.at, formats[i].at, magic.bytes) != 0))
        i++;
    return i;
}

bool eng_spec_decode(const uint8_t *bytes, size_t bytes_count,
                     struct kvt_req_open_namespace *ret_req, struct kvt_text *ret_tags,
                     uint32_t tags_max)
{
    struct decoder decoder = {bytes, bytes_count, bytes_count > UINT32_MAX};
    uint32_t format = get_format(&decoder);
    struct kvt_req_open_namespace req = {0};

    if (decoder.is_bad || format == KVT_COUNT_OF(formats))
        return false;
    req.block_tokens = (uint32_t)get_u64(&decoder, KVT_BLOCK_TOKENS_MAX);
    req.ranks = (uint32_t)get_u64(&decoder, KVT_RANKS_MAX);
    req.components_count = (uint32_t)get_u64(&decoder, KVT_COMPONENTS_MAX);
    for (uint32_t i = 0; i < req.components_count && !decoder.is_bad; i++) {
        struct kvt_api_component *c = &req.components[i];

        c->kind = (uint32_t)get_u64(&decoder, UINT32_MAX);
        c->window_tokens = (uint32_t)get_u64(&decoder, UINT32_MAX);
        c->bytes_per_block = get_u64(&decoder, UINT64_MAX);
        c->is_replicated = get_u64(&decoder, 1) == 1;
        c->name = get_text(&decoder);
        if (format == 1)
            get_quant(&decoder, &c->quant);
    }
    req.model = get_text(&decoder);
    req.revision = get_text(&decoder);
    req.dtype = get_text(&decoder);
    req.layout = get_text(&decoder);
    req.tags_count = (uint32_t)get_u64(&decoder, tags_max);
    for (uint32_t i = 0; i < req.tags_count && !decoder.is_bad; i++)
        ret_tags[i] = get_text(&decoder);
    req.tags = ret_tags;
    /* One spec has one encoding. */
    if (decoder.is_bad || decoder.left != 0 || is_quantised(&req) != (format == 1))
        return false;
    *ret_req = req;
    return true;
}
