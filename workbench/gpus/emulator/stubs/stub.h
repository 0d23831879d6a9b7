/* The generated stubs. They are weak: what is written by hand takes the place of the function of that name. */
#pragma once
#include <stddef.h>

void stub_called(const char *);
int stub_refused(const char *, int);
void *new_handle(void);
void not_measured(const char *);

#define STUB(name) __attribute__((weak)) long name(void) { stub_called(#name); return 0; }
#define REFUSED(name) __attribute__((weak)) long name(void) { return stub_refused(#name, 10); } /* an error in each */

/* What a caller hands over as pointers and integers, in this order. What it does not hand over is never looked at. */
#define ARGUMENTS                                                                                                     \
    void *a0, void *a1, void *a2, void *a3, void *a4, void *a5, void *a6, void *a7, void *a8, void *a9, void *a10,    \
        void *a11, void *a12, void *a13, void *a14, void *a15, void *a16, void *a17, void *a18, void *a19, void *a20, \
        void *a21, void *a22, void *a23

/* A new handle, put where the argument of this number points to. */
#define CREATES(name, number)                          \
    __attribute__((weak)) long name(ARGUMENTS) {       \
        stub_called(#name);                            \
        *(void **)a##number = new_handle();            \
        return 0;                                      \
    }

/* No scratch is asked for, where nobody knows how much it would be: `whose`, for the report. */
#define SIZE(type, number) *(type *)a##number = 0;
#define SIZES(name, whose, answers)                    \
    __attribute__((weak)) long name(ARGUMENTS) {       \
        stub_called(#name);                            \
        not_measured(whose);                           \
        answers;                                       \
        return 0;                                      \
    }
