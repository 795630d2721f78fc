/* What the commands share. One thread. */
#pragma once

#include "tools/kvtier-ctl/ctl.h"
#include "tools/kvtier-ctl/view.h"

struct kvt_ctl_view kvt_ctl_view_stdout(const struct kvt_ctl_args *args);
int kvt_ctl_out_of_memory(void); /* says so; returns an exit status */
/* Asks Stats into @op and picks the namespace that args->ns_prefix means. */
KVT_MUST_USE int kvt_ctl_find_ns(struct kvt_ctl_daemon *daemon, struct kvt_op *op,
                                 const struct kvt_api_ns_stats **ret_ns);
/* The tokens of the command line; none: count 0. */
KVT_MUST_USE int kvt_ctl_read_tokens(const struct kvt_ctl_args *args,
                                     struct kvt_ctl_tokens *ret_tokens, FILE *err);
struct kvt_text kvt_ctl_text(const char *text); /* NULL: empty */
