#include "tiers/device/gpu_hands.h"

#include <stdio.h>

#include "daemon/base/clock.h"
#include "tiers/worker.h"

int kvt_gpu_hands_init(struct kvt_gpu_hands *hands, uint32_t count, kvt_gpu_work_fn work, void *ctx,
                       struct kvt_doorbell *bell)
{
    int r = 0;

    KVT_ASSERT(count <= KVT_GPU_HANDS_MAX);
    hands->work = work;
    hands->ctx = ctx;
    hands->bell = bell;
    for (uint32_t i = 0; i < count; i++) {
        hands->hands[i].hands = hands;
        hands->hands[i].bell = KVT_DOORBELL_NULL;
        atomic_init(&hands->hands[i].is_stopping, false);
    }
    hands->count = count;
    if (count > 0)
        r = kvt_ring_init(&hands->back, count * KVT_GPU_HAND_PIECES);
    for (uint32_t i = 0; i < count && r == 0; i++) {
        r = kvt_doorbell_init(&hands->hands[i].bell);
        if (r == 0)
            r = kvt_ring_init(&hands->hands[i].given, KVT_GPU_HAND_PIECES);
    }
    return r;
}

bool kvt_gpu_hand_step(struct kvt_gpu_hands *hands, uint32_t idx)
{
    struct kvt_gpu_piece *piece;

    KVT_ASSERT(idx < hands->count);
    piece = kvt_ring_take(&hands->hands[idx].given);
    if (piece == NULL)
        return false;
    hands->work(hands->ctx, piece);
    KVT_ASSERT(kvt_ring_put(&hands->back, piece) == 0);
    kvt_doorbell_ring(hands->bell);
    return true;
}

static bool is_stopping(const struct kvt_gpu_hand *hand)
{
    return atomic_load_explicit(&hand->is_stopping, memory_order_seq_cst);
}

static void *hand_main(void *arg)
{
    struct kvt_gpu_hand *hand = arg;
    uint32_t idx = (uint32_t)(hand - hand->hands->hands);

    for (;;) {
        if (kvt_gpu_hand_step(hand->hands, idx))
            continue;
        if (is_stopping(hand))
            return NULL;
        kvt_doorbell_arm(&hand->bell);
        if (kvt_ring_is_empty(&hand->given) && !is_stopping(hand))
            kvt_doorbell_wait(&hand->bell, KVT_TIME_NEVER_NS);
        else
            kvt_doorbell_disarm(&hand->bell);
    }
}

int kvt_gpu_hands_start(struct kvt_gpu_hands *hands, int device)
{
    for (uint32_t i = 0; i < hands->count; i++) {
        struct kvt_gpu_hand *hand = &hands->hands[i];
        char name[16];
        int r;

        (void)snprintf(name, sizeof(name), "kvt-gpu%u-%u", (uint8_t)device, (uint8_t)i);
        r = kvt_worker_thread(&hand->thread, name, hand_main, hand);
        if (r < 0)
            return r;
        hand->is_started = true;
    }
    return 0;
}

void kvt_gpu_hands_deinit(struct kvt_gpu_hands *hands)
{
    KVT_ASSERT(hands->out_count == 0);
    for (uint32_t i = 0; i < hands->count; i++) {
        struct kvt_gpu_hand *hand = &hands->hands[i];

        if (hand->is_started) {
            atomic_store_explicit(&hand->is_stopping, true, memory_order_seq_cst);
            kvt_doorbell_ring(&hand->bell);
            KVT_ASSERT(pthread_join(hand->thread, NULL) == 0);
            hand->is_started = false;
        }
        kvt_ring_deinit(&hand->given);
        kvt_doorbell_deinit(&hand->bell);
    }
    kvt_ring_deinit(&hands->back);
    hands->count = 0;
}

bool kvt_gpu_hands_give(struct kvt_gpu_hands *hands, struct kvt_gpu_piece *piece)
{
    struct kvt_gpu_hand *free_hand = NULL;

    for (uint32_t i = 0; i < hands->count; i++) {
        struct kvt_gpu_hand *hand = &hands->hands[i];

        if (hand->pieces_count < KVT_GPU_HAND_PIECES &&
            (free_hand == NULL || hand->bytes < free_hand->bytes))
            free_hand = hand;
    }
    if (free_hand == NULL)
        return false;
    piece->hand = (uint32_t)(free_hand - hands->hands);
    free_hand->pieces_count++;
    free_hand->bytes += piece->bytes;
    hands->out_count++;
    KVT_ASSERT(kvt_ring_put(&free_hand->given, piece) == 0);
    kvt_doorbell_ring(&free_hand->bell);
    return true;
}

struct kvt_gpu_piece *kvt_gpu_hands_take(struct kvt_gpu_hands *hands)
{
    struct kvt_gpu_piece *piece = hands->out_count == 0 ? NULL : kvt_ring_take(&hands->back);
    struct kvt_gpu_hand *hand;

    if (piece == NULL)
        return NULL;
    KVT_ASSERT(piece->hand < hands->count);
    hand = &hands->hands[piece->hand];
    KVT_ASSERT(hand->pieces_count > 0 && hand->bytes >= piece->bytes);
    hand->pieces_count--;
    hand->bytes -= piece->bytes;
    hands->out_count--;
    return piece;
}

bool kvt_gpu_hands_are_waiting(const struct kvt_gpu_hands *hands)
{
    return hands->out_count > 0 && !kvt_ring_is_empty(&hands->back);
}
