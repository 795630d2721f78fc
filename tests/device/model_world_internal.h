/* Between the files of the model: life and time, bytes, transfers. */
#pragma once

#include <stdarg.h>

#include "tests/device/model_world.h"
#include "tiers/device/set.h"

#define WORLD_SLOT_BYTES 98304u /* of the arena: the largest payload */
#define WORLD_HOST_SLOT_BYTES 102400u

struct world_spec { /* of a component */
    uint32_t raw_bytes, stored_bytes, align_bytes;
    struct kvt_quant_spec quant;
};

__attribute__((noreturn)) void world_fail(const struct world *world, const char *format, ...)
    KVT_PRINTF(2, 3);

void world_places_init(struct world *world);
/* Worlds of several GPUs behind one tier: what it is opened with (threads
 * and times are the caller's to add), and its zones when it was. */
struct kvt_device_config world_set_config(struct world *world, const char *gpus);
void world_set_zones(struct world *world);

/* model_world_bytes.c */
const struct world_spec *world_spec(uint32_t idx);
void world_client_init(struct world *world, uint32_t idx);
/* Where the bytes of a slot's payload are; NULL: of an arena that is lost. By the table: a copy of
 * them, until the next call. */
uint8_t *world_bytes(const struct world *world, const struct world_place *place);
uint8_t *world_host_slot(const struct world *world, const struct world_place *place);
/* What nobody expects: for a client new content, for a slot garbage. */
void world_scribble(struct world *world, struct world_place *place);
/* A slot of an arena that was made anew: garbage is what is there. */
void world_forget(struct world *world, struct world_place *place);
/* Must be equal to its shadow. */
void world_check(const struct world *world, const struct world_place *place, const char *when);
/* The content of a place as a slot would hold it, and the other way: into the shadow of a place,
 * as far as the view of a transfer to a client goes. */
void world_shadow_read(const struct world *world, const struct world_place *place,
                       uint8_t *ret_stored);
void world_shadow_write(struct world *world, struct world_place *place, const uint8_t *stored,
                        const struct kvt_client_view *view);

/* model_world_table.c: nothing of it does anything unless is_by_table, but for what is of pools.
 * push and fetch are over after wait. attach: the layout of a pool on a GPU, for incarnation 0. */
void world_table_open(struct world *world);
void world_table_close(struct world *world);
void world_table_push(const struct world *world, uint32_t device, uint64_t address,
                      const uint8_t *mirror, uint64_t bytes);
void world_table_fetch(const struct world *world, uint32_t device, uint64_t address,
                       uint8_t *mirror, uint64_t bytes);
void world_table_wait(const struct world *world, uint32_t device);
void world_table_pool_new(struct world *world, struct world_client *client);
void world_table_attach(struct world *world, struct world_client *client);
void world_table_pool_free(struct world *world, struct world_client *client);

/* model_world_moves.c */
void world_finish(struct world *world, struct kvt_xfer *xfer);
