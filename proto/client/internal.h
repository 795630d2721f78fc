/* Inside of the client. */
#pragma once

#include <grpc/grpc.h>
#include <pthread.h>

#include "daemon/base/list.h"
#include "daemon/base/tsan.h"
#include "proto/client/client.h"

struct kvt_client {
    grpc_channel *channel;
    char *path;
    uint64_t deadline_ns;
    pthread_mutex_t mutex;   /* of what follows */
    struct kvt_list running; /* kvt_client_call.link */
    grpc_completion_queue *cqs[16];
    uint32_t cqs_count;
};

/* One call in progress; on the caller's stack, or in a session. */
struct kvt_client_call {
    struct kvt_client *client;
    struct kvt_op *op; /* for cancel; NULL once an Attach was answered */
    struct kvt_list link;
    grpc_call *grpc;
    grpc_completion_queue *cq;
    grpc_metadata_array initial, trailing;
    grpc_byte_buffer *received;
    grpc_status_code status;
    grpc_slice details;
    bool is_answer_bad;
    char tags[3]; /* 0 receive, 1 status, 2 half-close: only their addresses are used */
};

KVT_MUST_USE int kvt_client_connect(const char *path, int type, int *ret_fd);
void kvt_client_cq_destroy(grpc_completion_queue *cq);
grpc_byte_buffer *kvt_client_encode(struct kvt_op *op); /* NULL: op->code says why */

void kvt_call_begin(struct kvt_client_call *call, struct kvt_client *client, struct kvt_op *op,
                    const char *path, bool has_deadline);
void kvt_call_end(struct kvt_client_call *call);
/* Into op->code and op->message. */
void kvt_call_status(const struct kvt_client_call *call, struct kvt_op *op);
grpc_op kvt_status_op(struct kvt_client_call *call);
grpc_op kvt_receive_op(struct kvt_client_call *call);
grpc_op kvt_initial_op(struct kvt_client_call *call);
void kvt_call_batch(struct kvt_client_call *call, const grpc_op *ops, size_t count, void *tag);
bool kvt_call_wait(struct kvt_client_call *call, void *tag);
/* The message in one piece; it lives until @ret_slice is given back. */
const uint8_t *kvt_received_flat(struct kvt_client_call *call, grpc_slice *ret_slice,
                                 size_t *ret_bytes);
