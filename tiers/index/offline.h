/* What the helper program does for people, without a daemon: looks at an L3 device and never writes
 * to it (tiers/disk/inspect.h).
 *
 *     kvtierd-index inspect PATH [--json]
 *     kvtierd-index verify PATH [--json]
 */
#pragma once

/* @argv[0] is the subcommand. The exit status: 0 good; 1 something is damaged (verify); 2 wrong
 * usage; 4 PATH cannot be read, or is no device of L3. */
int kvt_index_offline(int argc, char **argv);
