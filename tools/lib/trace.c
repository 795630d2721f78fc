/* A file is read in chunks, through zstd when it is compressed, into a line buffer; each whole line
 * is parsed on its own with cJSON, so that a bad one can be named. Sessions are numbered by the
 * hash of what the line calls them. */
#include "tools/lib/trace.h"

#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <zstd.h>

#include <cjson/cJSON.h>

#include "daemon/base/alloc.h"
#include "daemon/base/hash.h"

#define CHUNK_BYTES ((size_t)1 << 18)
#define LINE_BYTES_MAX ((size_t)64 << 20)
#define IDS_MAX (1u << 20)

struct reader {
    const struct kvt_trace_options *options;
    struct kvt_workload *workload;
    char *line;
    size_t line_bytes, line_room;
    uint64_t line_number;
    size_t zstd_left; /* 0 between frames */
    uint32_t *ids;
    char *why;
    size_t why_bytes;
};

static int bad(struct reader *reader, const char *what)
{
    (void)snprintf(reader->why, reader->why_bytes, "%s:%llu: %s", reader->options->path,
                   (unsigned long long)reader->line_number, what);
    return KVT_TRACE_E_BAD;
}

/* A whole number in [0, max], or -1. */
static int64_t whole_number(const cJSON *item, double max)
{
    double value;

    if (!cJSON_IsNumber(item))
        return -1;
    value = cJSON_GetNumberValue(item);
    if (!(value >= 0 && value <= max))
        return -1;
    return (int64_t)value;
}

static uint32_t session_of(const cJSON *item)
{
    if (cJSON_IsString(item)) {
        const char *text = cJSON_GetStringValue(item);

        return (uint32_t)kvt_hash64(text, strlen(text), 0) & 0x7FFFFFFFu;
    }
    if (cJSON_IsNumber(item)) {
        double value = cJSON_GetNumberValue(item);

        return (uint32_t)kvt_hash64(&value, sizeof(value), 0) & 0x7FFFFFFFu;
    }
    return KVT_SESSION_NONE;
}

static int parse_object(struct reader *reader, const cJSON *object)
{
    const cJSON *list = cJSON_GetObjectItemCaseSensitive(object, "hash_ids"), *item;
    int64_t timestamp = whole_number(cJSON_GetObjectItemCaseSensitive(object, "timestamp"), 0x1p50);
    int64_t input =
        whole_number(cJSON_GetObjectItemCaseSensitive(object, "input_length"), UINT32_MAX);
    int64_t output =
        whole_number(cJSON_GetObjectItemCaseSensitive(object, "output_length"), UINT32_MAX);
    struct kvt_request request = {0};
    uint64_t covered;

    if (timestamp < 0)
        return bad(reader, "timestamp is missing, or not milliseconds");
    if (input < 0 || output < 0)
        return bad(reader, "input_length or output_length is missing, or not a number of tokens");
    if (!cJSON_IsArray(list))
        return bad(reader, "hash_ids is missing, or not a list");
    cJSON_ArrayForEach(item, list)
    {
        int64_t id = whole_number(item, UINT32_MAX);

        if (id < 0 || request.ids_count == IDS_MAX)
            return bad(reader, "hash_ids holds what is no id, or too many of them");
        reader->ids[request.ids_count++] = (uint32_t)id;
    }
    covered = (uint64_t)request.ids_count * KVT_TRACE_ID_TOKENS;
    request.arrival_ms = (uint64_t)timestamp;
    request.input_tokens = (uint32_t)KVT_MIN((uint64_t)input, covered);
    request.output_tokens = (uint32_t)output;
    request.session = session_of(cJSON_GetObjectItemCaseSensitive(object, "session"));
    return kvt_workload_add(reader->workload, &request, reader->ids);
}

static int parse_line(struct reader *reader, const char *line, size_t bytes)
{
    cJSON *object;
    int r;

    reader->line_number++;
    if (bytes == 0)
        return 0;
    object = cJSON_ParseWithLength(line, bytes);
    if (!cJSON_IsObject(object)) {
        cJSON_Delete(object);
        return bad(reader, "not a JSON object");
    }
    r = parse_object(reader, object);
    cJSON_Delete(object);
    return r;
}

static bool is_full(const struct reader *reader)
{
    return reader->options->requests_max != 0 &&
           reader->workload->requests_count >= reader->options->requests_max;
}

static int keep_bytes(struct reader *reader, const char *data, size_t bytes)
{
    size_t wanted = reader->line_bytes + bytes;

    if (wanted > LINE_BYTES_MAX)
        return bad(reader, "a line is too long to be a request");
    if (wanted > reader->line_room) {
        size_t room = KVT_MAX(wanted * 2, CHUNK_BYTES);
        char *grown = realloc(reader->line, room);

        if (grown == NULL)
            return kvt_trace(-ENOMEM);
        reader->line = grown;
        reader->line_room = room;
    }
    if (bytes > 0) /* an empty rest before the first line has no buffer yet */
        memcpy(reader->line + reader->line_bytes, data, bytes);
    reader->line_bytes = wanted;
    return 0;
}

/* Takes @bytes of text: parses what lines it completes, keeps the rest. */
static int take_text(struct reader *reader, const char *data, size_t bytes)
{
    while (bytes > 0 && !is_full(reader)) {
        const char *end = memchr(data, '\n', bytes);
        size_t part = end == NULL ? bytes : (size_t)(end - data);
        int r = keep_bytes(reader, data, part);

        if (r != 0 || end == NULL)
            return r;
        r = parse_line(reader, reader->line, reader->line_bytes);
        if (r != 0)
            return r;
        reader->line_bytes = 0;
        data += part + 1;
        bytes -= part + 1;
    }
    return 0;
}

static int take_zstd(struct reader *reader, ZSTD_DStream *stream, char *out, const char *data,
                     size_t bytes)
{
    ZSTD_inBuffer in = {data, bytes, 0};
    bool has_more = true;

    while ((in.pos < in.size || has_more) && !is_full(reader)) {
        ZSTD_outBuffer to = {out, CHUNK_BYTES, 0};
        size_t left = ZSTD_decompressStream(stream, &to, &in);
        int r;

        if (ZSTD_isError(left))
            return bad(reader, ZSTD_getErrorName(left));
        reader->zstd_left = left;
        r = take_text(reader, out, to.pos);
        if (r != 0)
            return r;
        has_more = to.pos == to.size;
    }
    return 0;
}

static int read_chunks(struct reader *reader, int fd, char *in, char *out, ZSTD_DStream *stream)
{
    static const unsigned char zstd_magic[4] = {0x28, 0xB5, 0x2F, 0xFD};
    bool is_first = true, is_zstd = false;
    ssize_t got;
    int r = 0;

    while (r == 0 && !is_full(reader) && (got = read(fd, in, CHUNK_BYTES)) != 0) {
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return kvt_trace(-errno);
        if (is_first)
            is_zstd = got >= 4 && memcmp(in, zstd_magic, 4) == 0;
        is_first = false;
        r = is_zstd ? take_zstd(reader, stream, out, in, (size_t)got)
                    : take_text(reader, in, (size_t)got);
    }
    if (r == 0 && reader->zstd_left != 0 && !is_full(reader))
        return bad(reader, "the compressed file ends too early");
    if (r == 0 && reader->line_bytes > 0 && !is_full(reader)) /* no newline at the end */
        r = parse_line(reader, reader->line, reader->line_bytes);
    return r;
}

static int read_all(struct reader *reader, int fd)
{
    kvt_autofree char *in = kvt_alloc_zeroed(1, CHUNK_BYTES);
    kvt_autofree char *out = kvt_alloc_zeroed(1, CHUNK_BYTES);
    ZSTD_DStream *stream = ZSTD_createDStream();
    int r = -ENOMEM;

    reader->ids = calloc(IDS_MAX, sizeof(*reader->ids));
    if (in != NULL && out != NULL && stream != NULL && reader->ids != NULL) {
        (void)ZSTD_DCtx_setParameter(stream, ZSTD_d_windowLogMax, 27);
        r = read_chunks(reader, fd, in, out, stream);
    }
    (void)ZSTD_freeDStream(stream);
    free(reader->ids);
    free(reader->line);
    return r;
}

int kvt_trace_read(struct kvt_workload *ret_workload, const struct kvt_trace_options *options,
                   char *why, size_t why_bytes)
{
    struct kvt_workload workload = {.id_tokens = KVT_TRACE_ID_TOKENS, .seed = options->seed};
    struct reader reader = {
        .options = options, .workload = &workload, .why = why, .why_bytes = why_bytes};
    kvt_autoclose int fd = open(options->path, O_RDONLY | O_CLOEXEC);
    int r;

    if (why_bytes > 0)
        why[0] = '\0';
    r = fd < 0 ? -errno : read_all(&reader, fd);
    if (r == 0 && workload.requests_count == 0)
        r = bad(&reader, "no requests in it");
    if (r != 0) {
        if (r < 0)
            (void)snprintf(why, why_bytes, "%s: %s", options->path, strerror(-r));
        kvt_workload_deinit(&workload);
        return r;
    }
    *ret_workload = workload;
    return 0;
}
