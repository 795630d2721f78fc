/* A session's memory and geometry as the input of fuzz_attach describes them, and a model of what
 * they mean: byte by byte, from the definition in docs/api.md, with arithmetic that cannot
 * overflow. It knows nothing of the daemon's code, but for the kernels that convert what is
 * quantised.
 *
 * Regions lie in memory of exactly their declared size between guards: poisoned for ASan, and
 * compared where there is no sanitizer. */
#pragma once

#include "daemon/base/api.h"

#define SCENE_REGIONS_MAX 4u
#define SCENE_COMPONENTS_MAX 3u
#define SCENE_PIECES_MAX 12u
#define SCENE_BLOCKS_MAX 4u
#define SCENE_ENGINE_BLOCKS_MAX 12u /* a block; more than fit into a job of the engine */

/* What is left of the input; past its end everything is 0. */
struct scene_input {
    const uint8_t *at;
    size_t left;
    bool was_wild; /* a number was taken that nothing bounds */
};
uint8_t scene_u8(struct scene_input *input);
uint64_t scene_below(struct scene_input *input, uint64_t bound); /* 0 when @bound is 0 */
/* As scene_below, but now and then at the bound, a little beyond it, or anything. */
uint64_t scene_wild(struct scene_input *input, uint64_t bound);

/* A scene on GPUs: whether the daemon has any, and when one of them is lost. */
#define SCENE_GPUS 2u
#define SCENE_NO_SUCH_GPU SCENE_GPUS
enum scene_loss {
    SCENE_LOSS_NONE,
    SCENE_LOSS_BEFORE,        /* before the session attaches */
    SCENE_LOSS_WHILE_OPENING, /* behind the back of who opens its memory */
    SCENE_LOSS_ATTACHED,      /* when it has attached */
    SCENE_LOSS_DEMOTING,      /* while its blocks are stored */
    SCENE_LOSS_DEMOTED,       /* when they are */
    SCENE_LOSS_PROMOTING,     /* while they come back */
    SCENE_LOSSES
};

struct scene_region {
    uint8_t *block; /* with its guards */
    uint8_t *memory;
    uint64_t bytes;
    enum kvt_region_kind kind;
    uint32_t gpu;          /* of a KVT_REGION_CUDA_IPC: its number, or SCENE_NO_SUCH_GPU */
    uint64_t offset_bytes; /* likewise: in an allocation; beyond it if not 0 */
    uint8_t *expected;     /* what a byte must be after a Promote, if it was written once */
    uint8_t *writers;      /* how many moves may have written it; 2: or more */
};

struct scene {
    uint32_t regions_count, components_count, layouts_count;
    struct scene_region regions[SCENE_REGIONS_MAX];
    struct kvt_api_layout layouts[SCENE_COMPONENTS_MAX]; /* as the request has them */
    struct kvt_api_piece pieces[SCENE_COMPONENTS_MAX][SCENE_PIECES_MAX];
    uint64_t bytes_per_block[SCENE_COMPONENTS_MAX];
    struct kvt_api_quant quant[SCENE_COMPONENTS_MAX];
    uint8_t *payload[SCENE_COMPONENTS_MAX][SCENE_BLOCKS_MAX]; /* stored; NULL: not */
    uint32_t blocks;
    bool is_on_gpus;        /* most of its memory is */
    bool has_gpus;          /* the daemon */
    uint32_t gpu, lost_gpu; /* where its memory is, but for now and then; and which one is lost */
    enum scene_loss loss;
};

void scene_init(struct scene *scene, struct scene_input *input);
void scene_deinit(struct scene *scene);

/* What the daemon has to answer an Attach with because of memory on GPUs: KVT_CODE_OK when nothing
 * is wrong with that, and another layout or request than an honest one may be refused still. */
enum kvt_code scene_gpu_code(const struct scene *scene);
/* A layout whose pieces lie on two GPUs, or on one and in the host's memory. */
bool scene_is_mixed(const struct scene *scene);
/* A layout of which two pieces share bytes in one engine block: no honest one. */
bool scene_has_overlap(const struct scene *scene);

/* The layout of a component whose pieces lie in mapped regions; NULL: there is none. */
const struct kvt_api_layout *scene_layout(const struct scene *scene, uint32_t component);
/* Ids below this are inside every region. */
uint64_t scene_ids(const struct scene *scene, const struct kvt_api_layout *layout);

void scene_fill(struct scene *scene, uint8_t seed);     /* regions hold bytes that all differ */
void scene_scribble(struct scene *scene, uint8_t byte); /* and expect to stay so */
/* Ends the program when a guard was written over. */
void scene_check_guards(const struct scene *scene);
/* Keeps the payload that the regions hold for a block, as it has to come back. */
void scene_store(struct scene *scene, const struct kvt_api_layout *layout, uint64_t block_idx,
                 const uint64_t *ids);
void scene_store_inline(struct scene *scene, uint32_t component, uint64_t block_idx,
                        const uint8_t *payload);
/* A Promote wrote, or may have written, this block. Ends the program when an id leads outside. */
void scene_expect(struct scene *scene, const struct kvt_api_layout *layout, uint64_t block_idx,
                  const uint64_t *ids, bool is_done);
/* Ends the program when the regions are not what is expected. */
void scene_check(const struct scene *scene);
