/* What all stub libraries share. It lives in libemulator.so, which each of them links. */
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MIB ((size_t)1 << 20)
#define PAGE_BYTES (2 * MIB) /* what the driver maps at a time */

/* Status codes of the runtime and of the driver, which agree here. */
enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_DEVICE = 101, NO_DEVICE = 100, NOT_SUPPORTED = 801 };

/* The card that plays, from the environment variable EMULATED_GPU (workbench/gpus/emulator/card.py writes it). */
long card(const char *field);
const char *card_name(void);

/* Address space that stands for device memory. Nothing may read or write it. */
int device_allocate(uintptr_t *address, size_t bytes, int device);
int device_free(uintptr_t address);
int device_reserve(uintptr_t *address, size_t bytes, size_t alignment); /* addresses alone, for expandable segments */
void device_unreserve(uintptr_t address);
int device_take(size_t bytes, int device); /* memory alone: behind no address, or behind reserved ones */
void device_give(size_t bytes, int device);
size_t device_left(int device);
int device_of(const void *pointer); /* -1: this is host memory */
extern _Thread_local int current_device;

/* A handle that a library may write into, never given back: there are few of them. */
void *new_handle(void);

/* What a program is told of a yes/no value on the device, after the last kernel was launched (see launch.c). */
typedef enum { OTHER, ALL, FINITE, SUM, INTEGERS_EQUAL } Question;
extern _Thread_local Question asked;
int answer(void);
void answer_is_passed_on(void); /* by a kernel that fills a byte, or a copy of one on the device */

/* What the host has sent to the card, small as a count: it reads that again, unless the card may have written since. */
void host_sends(const void *to, const void *from, size_t bytes);
int host_reads(void *to, const void *from, size_t bytes); /* whether it is known */
void card_writes(void);                                   /* anywhere */
void card_writes_at(const void *address);
unsigned long long writes_of_card(void); /* how often, so far */

void host_waits(void); /* for the card to finish, as what follows may take to be so (see streams.c) */

/* Called by every generated stub; the names of both are in the words about a crash. */
void stub_called(const char *function);
int stub_refused(const char *function, int status);

/* By its name, what takes memory of the card in amounts that nobody has measured: the report's peaks are then lower
   bounds. Whoever says so answers the least that is sure. */
void not_measured(const char *what);
const char *what_was_not_measured(void); /* names, one a line; for the report */
