/* Every limit of the daemon that is not configuration, in one place, with the relations between
 * them checked by the compiler. A request that passes one gets INVALID_ARGUMENT or
 * RESOURCE_EXHAUSTED with the number in its message; nothing grows past one. */
#pragma once

#include <assert.h>
#include <stdint.h>

#define KVT_COMPONENTS_MAX 8u
#define KVT_RANKS_MAX 16u
#define KVT_BLOCK_TOKENS_DEFAULT 64u
#define KVT_BLOCK_TOKENS_MAX 8192u
#define KVT_SHARD_BYTES_MAX (1u << 30) /* one shard of one block of one component */

#define KVT_QUANT_SIZE_MAX 65536u /* tokens, heads and dimension of a plane: each */

#define KVT_REQUEST_TOKENS_MAX (1u << 20)  /* in one message; 4 MiB */
#define KVT_PREFIX_TOKENS_MAX (1u << 24)   /* of one path in the tree: cursors go past a message */
#define KVT_MESSAGE_BYTES_MAX (8u << 20)   /* tokens, extra keys, block lists and slack */
#define KVT_OP_ARENA_BYTES_MAX (32u << 20) /* what one request may take while it is served */
#define KVT_INLINE_BYTES_MAX (4u << 20)    /* payload inside one message */

#define KVT_ROOT_TAG_BYTES_MAX 256u /* salt, LoRA: each */
#define KVT_EXTRA_KEY_BYTES 32u
#define KVT_FINGERPRINT_BYTES 32u
#define KVT_ENGINE_ID_BYTES 16u
#define KVT_REGION_TOKEN_BYTES 16u
#define KVT_CUDA_IPC_HANDLE_BYTES 64u /* cudaIpcMemHandle_t */
#define KVT_CUDA_UUID_BYTES 16u
#define KVT_MODEL_TEXT_BYTES_MAX 4096u

#define KVT_NAMESPACES_MAX 64u
#define KVT_STORE_ID_BYTES 16u
#define KVT_SESSIONS_MAX 256u
#define KVT_REGIONS_PER_SESSION_MAX 16u
#define KVT_PIECES_PER_COMPONENT_MAX 2048u /* layers x (K, V) and room */
#define KVT_ENGINE_BLOCKS_PER_BLOCK_MAX 512u
#define KVT_ENGINE_BLOCK_NONE UINT64_MAX /* an id that no engine block has */
#define KVT_MOVES_PER_REQUEST_MAX 65536u /* (component, block) pairs in one Promote or Demote */

#define KVT_CONNECTIONS_MAX 256u
#define KVT_STREAMS_PER_CONNECTION_MAX 64u

#define KVT_TOUCHES_MAX 7u /* reads of a block that are counted; more are not told apart */

#define KVT_ZONES_MAX 16u       /* failure domains of a tier: devices of L3 */
#define KVT_NUMA_NODES_MAX 1024 /* numbers of nodes are below */
#define KVT_DIO_ALIGN_BYTES 4096u
#define KVT_HUGE_PAGE_BYTES (2u << 20)

static_assert(KVT_REQUEST_TOKENS_MAX * 4u < KVT_MESSAGE_BYTES_MAX, "a message holds its tokens");
static_assert(KVT_INLINE_BYTES_MAX < KVT_MESSAGE_BYTES_MAX, "a message holds its payload");
static_assert(KVT_MESSAGE_BYTES_MAX * 2u < KVT_OP_ARENA_BYTES_MAX, "decode fits an op's arena");
