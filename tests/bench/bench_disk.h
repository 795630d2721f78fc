/* Rows about one device of L3 that are not its bandwidth: neighbours in one request, what makes a
 * batch durable, foreground reads beside background writes, a set of devices. */
#pragma once

#include "tests/bench/bench.h"

void bench_disk_paths(struct bench *bench);
