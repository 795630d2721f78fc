/* The fake's time: what is queued on streams, and when it happens. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "tests/common/fake_cuda_internal.h"

#define SPLIT_BYTES_MIN 64u

struct fake_stream *fake_stream_check(void *pointer)
{
    struct fake_stream *stream = pointer;

    if (stream == NULL || stream->magic != FAKE_STREAM_MAGIC)
        fake_bug("%p is no stream", pointer);
    if (stream->is_gone)
        fake_bug("a stream is used after %s", stream->why_gone);
    return stream;
}

struct fake_event *fake_event_check(void *pointer)
{
    struct fake_event *event = pointer;

    if (event == NULL || event->magic != FAKE_EVENT_MAGIC)
        fake_bug("%p is no event", pointer);
    if (event->is_gone)
        fake_bug("an event is used after %s", event->why_gone);
    return event;
}

void fake_marker_unref(struct fake_marker *marker)
{
    if (marker != NULL && --marker->refs == 0)
        free(marker);
}

void fake_queue(struct fake_stream *stream, const struct fake_op *model)
{
    struct fake_op *op = malloc(sizeof(*op));
    uint32_t delay_max = fake_cuda.config.delay_max;

    if (op == NULL)
        abort();
    *op = *model;
    op->next = NULL;
    /* Mostly at once, sometimes late, rarely so late that all the others have passed it. */
    switch (fake_random(16)) {
    case 0:
        op->delay = (uint32_t)fake_random(16u * delay_max + 1);
        break;
    case 1:
    case 2:
    case 3:
    case 4:
        op->delay = (uint32_t)fake_random(delay_max + 1);
        break;
    default:
        op->delay = 0;
        break;
    }
    *stream->tail = op;
    stream->tail = &op->next;
    fake_cuda.queued++;
}

static void pop(struct fake_stream *stream)
{
    struct fake_op *op = stream->head;

    stream->head = op->next;
    if (stream->head == NULL)
        stream->tail = &stream->head;
    if (op->kind == FAKE_OP_RECORD)
        fake_marker_unref(op->marker);
    free(op);
    fake_cuda.queued--;
}

void fake_stream_clear(struct fake_stream *stream, const char *why)
{
    while (stream->head != NULL) {
        /* Who waits for it on another device must not wait for ever. */
        if (stream->head->kind == FAKE_OP_RECORD)
            stream->head->marker->is_done = true;
        pop(stream);
    }
    stream->is_gone = true;
    stream->why_gone = why;
}

bool fake_is_damage_due(uint64_t *countdown)
{
    if (*countdown == 0 || --*countdown != 0)
        return false;
    fake_cuda.damaged++;
    return true;
}

static bool run_bytes(struct fake_stream *stream, struct fake_op *op)
{
    bool is_copy = op->kind == FAKE_OP_COPY;
    uint64_t bytes = op->bytes;
    uint8_t *dst =
        fake_translate_end(stream->device, op->dst, bytes, is_copy && op->direction == KVT_CUDA_D2H,
                           is_copy ? "copy to" : "fill");
    uint8_t *src = is_copy ? fake_translate_end(stream->device, op->src, bytes,
                                                op->direction == KVT_CUDA_H2D, "copy from")
                           : NULL;

    if (dst == NULL || (is_copy && src == NULL)) {
        fake_lose(stream->device, KVT_CUDA_ILLEGAL_ADDRESS);
        return true;
    }
    if (bytes >= SPLIT_BYTES_MIN && !fake_cuda.config.is_never_torn && fake_random(4) == 0)
        bytes = kvt_round_down(1 + fake_random(bytes - 1), 16);
    if (bytes == op->bytes && fake_is_damage_due(&fake_cuda.tear_in))
        memcpy(dst, is_copy ? src : dst, bytes / 2);
    else if (is_copy)
        memmove(dst, src, bytes);
    else
        memset(dst, op->value, bytes);
    if (bytes == op->bytes && fake_is_damage_due(&fake_cuda.flip_in))
        dst[fake_random(bytes)] ^= (uint8_t)(1u << fake_random(8));
    op->dst += bytes;
    op->src += is_copy ? bytes : 0;
    op->bytes -= bytes;
    return op->bytes == 0;
}

bool fake_stream_step(struct fake_stream *stream)
{
    struct fake_op *op = stream->head;

    if (op == NULL || stream->is_gone)
        return false;
    switch (op->kind) {
    case FAKE_OP_COPY:
    case FAKE_OP_FILL:
        if (!run_bytes(stream, op))
            return true;
        break;
    case FAKE_OP_LAUNCH:
        if (!fake_launch_run(stream->device, op))
            fake_lose(stream->device, KVT_CUDA_ILLEGAL_ADDRESS);
        break;
    case FAKE_OP_RECORD:
        op->marker->is_done = true;
        break;
    }
    /* A loss in it may have dropped the queue. */
    if (stream->head == op)
        pop(stream);
    return true;
}

/* Starts at a random stream, so that none is always first. */
bool fake_step_any(void)
{
    uint64_t count = 0, first;

    for (struct fake_stream *s = fake_cuda.streams; s != NULL; s = s->next)
        count += s->head != NULL;
    if (count == 0)
        return false;
    first = fake_random(count);
    for (uint32_t round = 0; round < 2; round++) {
        uint64_t idx = 0;

        for (struct fake_stream *s = fake_cuda.streams; s != NULL; s = s->next) {
            bool is_first_part;

            if (s->head == NULL)
                continue;
            is_first_part = idx++ < first;
            if (is_first_part == (round == 1) && fake_stream_step(s))
                return true;
        }
    }
    return false;
}

void fake_pump(uint32_t count)
{
    if (fake_cuda.is_frozen || fake_cuda.queued == 0)
        return;
    for (struct fake_stream *s = fake_cuda.streams; s != NULL; s = s->next) {
        if (s->head == NULL)
            continue;
        if (s->head->delay > 0) {
            s->head->delay--;
            continue;
        }
        for (uint32_t i = 0; i < count && s->head != NULL && s->head->delay == 0; i++)
            if (fake_random(2) == 0 && !fake_stream_step(s))
                break;
    }
}
