/* list.h: lists through a member `next` of their items (and `prev`, where items leave long lists often). A list is a pointer to its first
 * item, NULL if it is empty. */
#pragma once

/* Takes x out, if it is in the list that begins at *first. */
#define list_remove(first, x)                                \
	do {                                                 \
		__typeof__(first) at_ = (first);             \
		while (*at_ && *at_ != (x))                  \
			at_ = &(*at_)->next;                 \
		if (*at_)                                    \
			*at_ = (x)->next;                    \
	} while (0)

/* Walks from x on, each item in turn in `i`, which the body may free. */
#define list_each(i, x) \
	for (__typeof__(*(x)) *i = (x), *i##_next = i ? i->next : NULL; i; i = i##_next, i##_next = i ? i->next : NULL)

/* Lists with `prev`: puts x first; takes x out. */
#define list2_add(first, x)                                  \
	do {                                                 \
		(x)->prev = NULL;                            \
		(x)->next = *(first);                        \
		if ((x)->next)                               \
			(x)->next->prev = (x);               \
		*(first) = (x);                              \
	} while (0)
#define list2_remove(first, x)                               \
	do {                                                 \
		*((x)->prev ? &(x)->prev->next : (first)) = (x)->next; \
		if ((x)->next)                               \
			(x)->next->prev = (x)->prev;         \
		(x)->prev = (x)->next = NULL;                \
	} while (0)
