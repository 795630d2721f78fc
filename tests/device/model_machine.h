/* The machine under the model's world. A program links one of
 *
 *   model_machine_fake.c   the fake of the CUDA runtime, with two GPUs: it loses contexts, fails
 * calls as planned, and lets the test look into device memory model_machine_real.c   the CUDA of
 * this build and the GPUs that there are: none of that, so the world reaches device memory through
 * the table alone (is_by_table) */
#pragma once

#include "tests/device/model_world.h"

/* Why there is no GPU @device that can be used; NULL: there is one. Before any other call. */
const char *world_machine_missing(int device);
/* Sets calls, and which of CUDA's devices are the world's. */
void world_machine_open(struct world *world);
/* Everything is given back. */
void world_machine_close(void);

/* The fake's only. */
void world_machine_plan(enum kvt_fake_cuda_call call, uint64_t nth, int error); /* nth 0: none */
bool world_machine_has_failed(void);
void world_machine_pause_plan(bool is_paused);
void world_machine_lose(int error); /* GPU 0 of the world */
void world_machine_pool_new(struct world_client *client);
/* Where the test sees [@address, + @bytes) of device memory. */
uint8_t *world_machine_memory(uint64_t address, uint64_t bytes);
