/* What the files of libcudnn share. */
#pragma once
#include "emulator.h"

#define MOST_DIMENSIONS 8

enum { FLOAT = 0, DOUBLE = 1, HALF = 2, BFLOAT16 = 9 }; /* cudnnDataType_t */

/* What a descriptor of a tensor, or of a filter, was told. */
typedef struct {
    int data_type, dimensions, sizes[MOST_DIMENSIONS], strides[MOST_DIMENSIONS];
} Tensor;

typedef struct {
    float share;
} Dropout;

int cudnnCreate(void **handle);
size_t cudnnGetVersion(void);
const char *cudnnGetErrorString(int status);
int element_bytes(int data_type);
int device_is_an_h200(void); /* the card on which cuDNN's sizes were measured */
