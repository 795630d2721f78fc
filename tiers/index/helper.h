/* The helper process's side of one index: the database behind a socket.
 *
 * It answers HELLO with the walk (ROW, COPY, PROGRESS, at the end LOADED), or with BAD when the
 * database is not usable and one made anew was not asked for. Where there is none it makes it anew
 * from the slots, if a namespace says which slots to look for. Then it applies what it is sent and
 * answers COMMIT with COMMITTED. It ends when the socket does: what was not committed is lost. When
 * it cannot go on it says FAILED, for people, and ends. One thread. */
#pragma once

#include "daemon/base/def.h"

/* Serves @fd until it ends. The exit status of the process. */
int kvt_index_helper_serve(int fd);
