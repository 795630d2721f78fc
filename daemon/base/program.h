/* Finds a program that is shipped beside the one that runs, and is not meant for people's PATH:
 * helpers such as kvtierd-index.
 *
 * Looked for, in this order: what the environment's KVTIER_HELPER says (a path, for tests and
 * trials); beside the running program; in its ../libexec/kvtierd; where a build tree has it
 * (PARENT/tiers/index/NAME, up to two folders above the running program's); in the libexec
 * directory that was configured. The first that may be executed is it. Any thread. */
#pragma once

#include "daemon/base/def.h"

#define KVT_PROGRAM_PATH_BYTES 4096u

/* 0; -ENOENT: nowhere; or the -errno of a KVTIER_HELPER that cannot be executed. */
KVT_MUST_USE int kvt_program_find(const char *name, char ret_path[KVT_PROGRAM_PATH_BYTES]);

/* The same for a program at @exe_path and a configured directory @libexec, without environment. */
KVT_MUST_USE int kvt_program_find_near(const char *name, const char *exe_path, const char *libexec,
                                       char ret_path[KVT_PROGRAM_PATH_BYTES]);
