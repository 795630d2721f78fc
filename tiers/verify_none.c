/* For tests only, see verify.h: whatever the bytes are, they pass. */
#include "tiers/verify.h"

bool kvt_verify_is_on(void)
{
    return false;
}

bool kvt_verify_payload(const void *payload, uint64_t bytes, uint64_t hash)
{
    (void)payload;
    (void)bytes;
    (void)hash;
    return true;
}
