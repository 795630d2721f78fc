/* An intrusive doubly linked list with a sentinel. The links live in the listed object, so putting
 * something on a list never allocates. An initialised link is either on one list or self-linked;
 * remove is idempotent. The owner of the list's thread only. */
#pragma once

#include "daemon/base/def.h"

struct kvt_list {
    struct kvt_list *next, *prev;
};

static inline void kvt_list_init(struct kvt_list *link)
{
    link->next = link->prev = link;
}

static inline bool kvt_list_is_empty(const struct kvt_list *list)
{
    return list->next == list;
}

static inline void kvt_list_insert_after(struct kvt_list *at, struct kvt_list *link)
{
    link->next = at->next;
    link->prev = at;
    at->next->prev = link;
    at->next = link;
}

static inline void kvt_list_push_front(struct kvt_list *list, struct kvt_list *link)
{
    kvt_list_insert_after(list, link);
}

static inline void kvt_list_push_back(struct kvt_list *list, struct kvt_list *link)
{
    kvt_list_insert_after(list->prev, link);
}

static inline void kvt_list_remove(struct kvt_list *link)
{
    link->prev->next = link->next;
    link->next->prev = link->prev;
    kvt_list_init(link);
}

#define kvt_list_for_each(pos, list)                                                               \
    for (struct kvt_list *pos = (list)->next, *pos##_next = pos->next; pos != (list);              \
         pos = pos##_next, pos##_next = pos->next)
