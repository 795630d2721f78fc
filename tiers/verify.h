/* Whether a payload is what its checksum says: the one place where bytes that are about to be
 * served are compared. The program tests/integration/kvtierd-no-verify has verify_none.c instead,
 * where every payload passes: end-to-end tests prove with it that wrong bytes would be seen if
 * nothing in the daemon stopped them. It is never installed and not made in release builds, says
 * what it is in its version and complains at each start. Headers are checked in both.
 *
 * Pure; any thread. */
#pragma once

#include "daemon/base/def.h"

bool kvt_verify_is_on(void);
/* XXH3-64 of @payload is @hash. */
bool kvt_verify_payload(const void *payload, uint64_t bytes, uint64_t hash);
