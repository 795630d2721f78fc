/* The small messages that are not an op's answer: progress, notices, health. They are read and
 * written in buffers of fixed size; a message that needs more than that is garbage. */
#include <string.h>

#include "proto/codec/wire.h"

#define SCRATCH_BYTES 4096u

/* protobuf-c memory for one small message, on the caller's stack. */
struct scratch {
    _Alignas(16) uint8_t at[SCRATCH_BYTES];
    size_t used_bytes;
};

static void *scratch_alloc(void *ctx, size_t bytes)
{
    struct scratch *scratch = ctx;
    void *ptr = scratch->at + scratch->used_bytes;

    if (bytes > SCRATCH_BYTES - scratch->used_bytes)
        return NULL;
    scratch->used_bytes =
        KVT_MIN((size_t)SCRATCH_BYTES, kvt_round_up(scratch->used_bytes + bytes, 16));
    return ptr;
}

static void scratch_free(void *ctx, void *ptr)
{
    (void)ctx;
    (void)ptr;
}

static ProtobufCAllocator scratch_allocator(struct scratch *scratch)
{
    scratch->used_bytes = 0;
    return (ProtobufCAllocator){
        .alloc = scratch_alloc, .free = scratch_free, .allocator_data = scratch};
}

int kvt_codec_encode_progress(struct kvt_arena *arena, const struct kvt_api_progress *progress,
                              struct kvt_codec_message *ret_message)
{
    Kvtier__V1__PromoteEvent *event = kvt_arena_alloc(arena, sizeof(*event));
    Kvtier__V1__Progress *out = kvt_arena_alloc(arena, sizeof(*out));

    if (event == NULL || out == NULL)
        return KVT_CODEC_E_BAD;
    kvtier__v1__promote_event__init(event);
    kvtier__v1__progress__init(out);
    event->event_case = KVTIER__V1__PROMOTE_EVENT__EVENT_PROGRESS;
    event->progress = out;
    out->group = progress->group;
    out->groups_count = progress->groups_count;
    *ret_message = (struct kvt_codec_message){
        .message = event, .bytes = protobuf_c_message_get_packed_size(&event->base)};
    return 0;
}

size_t kvt_codec_write_notice(const struct kvt_notice *notice,
                              uint8_t at[KVT_CODEC_NOTICE_BYTES_MAX])
{
    Kvtier__V1__AttachEvent event = KVTIER__V1__ATTACH_EVENT__INIT;
    Kvtier__V1__Notice out = KVTIER__V1__NOTICE__INIT;
    uint8_t handle[KVT_CODEC_HANDLE_BYTES];

    event.event_case = KVTIER__V1__ATTACH_EVENT__EVENT_NOTICE;
    event.notice = &out;
    out.kind = (Kvtier__V1__Notice__Kind)notice->kind;
    out.op_id = notice->op_id;
    out.epoch = notice->epoch;
    if (notice->kind == KVT_NOTICE_LEASE_ENDED) {
        kvt_codec_write_handle(&notice->handle, handle);
        out.handle = kvt_codec_put_bytes(handle, sizeof(handle));
    }
    KVT_ASSERT(protobuf_c_message_get_packed_size(&event.base) <= KVT_CODEC_NOTICE_BYTES_MAX);
    return protobuf_c_message_pack(&event.base, at);
}

int kvt_codec_read_notice(const uint8_t *at, size_t bytes, struct kvt_notice *ret_notice)
{
    struct scratch scratch;
    ProtobufCAllocator allocator = scratch_allocator(&scratch);
    struct kvt_notice notice = {0};
    Kvtier__V1__AttachEvent *event;

    event = kvtier__v1__attach_event__unpack(&allocator, bytes, at);
    if (event == NULL || event->event_case != KVTIER__V1__ATTACH_EVENT__EVENT_NOTICE)
        return kvt_trace(-EBADMSG);
    notice.kind = (enum kvt_notice_kind)event->notice->kind;
    notice.op_id = event->notice->op_id;
    notice.epoch = event->notice->epoch;
    if (event->notice->handle.len == KVT_CODEC_HANDLE_BYTES)
        kvt_codec_read_handle(event->notice->handle.data, &notice.handle);
    else if (event->notice->handle.len != 0)
        return kvt_trace(-EBADMSG);
    *ret_notice = notice;
    return 0;
}

int kvt_codec_read_health_request(const uint8_t *at, size_t bytes,
                                  char ret_name[KVT_CODEC_HEALTH_NAME_BYTES])
{
    struct scratch scratch;
    ProtobufCAllocator allocator = scratch_allocator(&scratch);
    Grpc__Health__V1__HealthCheckRequest *in =
        grpc__health__v1__health_check_request__unpack(&allocator, bytes, at);

    if (in == NULL || in->service.len >= KVT_CODEC_HEALTH_NAME_BYTES)
        return kvt_trace(-EBADMSG);
    /* An empty field has no data: memcpy from NULL is not allowed even for 0 bytes. */
    if (in->service.len > 0) {
        if (memchr(in->service.data, '\0', in->service.len) != NULL)
            return kvt_trace(-EBADMSG);
        memcpy(ret_name, in->service.data, in->service.len);
    }
    ret_name[in->service.len] = '\0';
    return 0;
}

size_t kvt_codec_write_health_request(const char *name, uint8_t at[KVT_CODEC_HEALTH_NAME_BYTES * 2])
{
    Grpc__Health__V1__HealthCheckRequest out = GRPC__HEALTH__V1__HEALTH_CHECK_REQUEST__INIT;

    out.service = kvt_codec_put_bytes(name, strnlen(name, (size_t)KVT_CODEC_HEALTH_NAME_BYTES - 1));
    return protobuf_c_message_pack(&out.base, at);
}

int kvt_codec_read_health_answer(const uint8_t *at, size_t bytes,
                                 enum kvt_health_status *ret_status)
{
    struct scratch scratch;
    ProtobufCAllocator allocator = scratch_allocator(&scratch);
    Grpc__Health__V1__HealthCheckResponse *in =
        grpc__health__v1__health_check_response__unpack(&allocator, bytes, at);

    if (in == NULL)
        return kvt_trace(-EBADMSG);
    *ret_status = (enum kvt_health_status)in->status;
    return 0;
}

size_t kvt_codec_write_health_answer(enum kvt_health_status status, uint8_t at[16])
{
    Grpc__Health__V1__HealthCheckResponse out = GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__INIT;

    out.status = (Grpc__Health__V1__HealthCheckResponse__ServingStatus)status;
    return protobuf_c_message_pack(&out.base, at);
}
