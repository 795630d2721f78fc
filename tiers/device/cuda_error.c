/* Which of CUDA's errors end a context. The runtime's manual says of each of these that "this
 * leaves the process in an inconsistent state and any further CUDA work will return the same
 * error"; those of a GPU that is gone or whose memory is damaged are of the same kind. */
#include "tiers/device/cuda_calls.h"

bool kvt_cuda_is_sticky(int error)
{
    switch (error) {
    case KVT_CUDA_INVALID_CONTEXT:
    case KVT_CUDA_ECC:
    case KVT_CUDA_NVLINK:
    case KVT_CUDA_CONTAINED:
    case KVT_CUDA_ILLEGAL_ADDRESS:
    case KVT_CUDA_LAUNCH_TIMEOUT:
    case KVT_CUDA_CONTEXT_DESTROYED:
    case KVT_CUDA_DEVICE_ASSERT:
    case KVT_CUDA_HARDWARE_STACK:
    case KVT_CUDA_ILLEGAL_INSTRUCTION:
    case KVT_CUDA_MISALIGNED:
    case KVT_CUDA_ADDRESS_SPACE:
    case KVT_CUDA_INVALID_PC:
    case KVT_CUDA_LAUNCH_FAILURE:
    case KVT_CUDA_UNKNOWN:
        return true;
    }
    return false;
}
