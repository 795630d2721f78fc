/* What kvtier-ctl prints, as text. */
#pragma once

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include "tools/kvtier-ctl/view.h"

#define TEXT(literal) ((struct kvt_text){literal, sizeof(literal) - 1})

struct page {
    char *text;
    size_t bytes;
    struct kvt_ctl_view view;
};

static inline void page_open(struct page *page)
{
    *page = (struct page){0};
    page->view.out = open_memstream(&page->text, &page->bytes);
    assert_non_null(page->view.out);
}

static inline void page_expect(struct page *page, const char *want)
{
    (void)fclose(page->view.out);
    assert_string_equal(page->text, want);
    free(page->text);
}
