/* The generated stubs. They are weak: what is written by hand takes the place of the function of that name. */
#pragma once

void stub_called(const char *);
int stub_refused(const char *, int);

#define STUB(name) __attribute__((weak)) long name(void) { stub_called(#name); return 0; }
#define REFUSED(name) __attribute__((weak)) long name(void) { return stub_refused(#name, 10); } /* an error in each */
