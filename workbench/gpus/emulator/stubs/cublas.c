/* libcublas, libcublasLt and libcusparse: matrix products. Their workspace is PyTorch's own, in its allocator. */
#include "emulator.h"

enum { VERSION = 130101 };

int cublasCreate_v2(void **handle) {
    *handle = new_handle();
    return SUCCESS;
}

int cublasGetVersion_v2(void *handle, int *version) {
    (void)handle;
    *version = VERSION;
    return SUCCESS;
}

int cublasGetProperty(int part, int *value) {
    int parts[] = {VERSION / 10000, VERSION / 100 % 100, VERSION % 100};
    *value = parts[part];
    return SUCCESS;
}

int cublasGetMathMode(void *handle, int *mode) {
    (void)handle;
    *mode = 0;
    return SUCCESS;
}

int cublasGetPointerMode_v2(void *handle, int *mode) {
    (void)handle;
    *mode = 0;
    return SUCCESS;
}

/* ---- cublasLt: one algorithm, which asks for nothing beyond the workspace it is offered ---- */

typedef struct {
    uint64_t algorithm[8];
    size_t workspace_bytes;
    int status;
    float waves;
    int reserved[4];
} Heuristic;

size_t cublasLtGetVersion(void) { return VERSION; }

int cublasLtCreate(void **handle) { return cublasCreate_v2(handle); }

int cublasLtMatmulDescCreate(void **description, int compute, int scale) {
    (void)compute, (void)scale;
    return cublasCreate_v2(description);
}

int cublasLtMatrixLayoutCreate(void **layout, int type, uint64_t rows, uint64_t columns, int64_t stride) {
    (void)type, (void)rows, (void)columns, (void)stride;
    return cublasCreate_v2(layout);
}

int cublasLtMatrixTransformDescCreate(void **description, int scale) {
    (void)scale;
    return cublasCreate_v2(description);
}

int cublasLtMatmulPreferenceCreate(void **preference) { return cublasCreate_v2(preference); }

int cublasLtMatmulAlgoGetHeuristic(void *handle, void *operation, void *a, void *b, void *c, void *d, void *preference,
                                   int asked, Heuristic *found, int *count) {
    (void)handle, (void)operation, (void)a, (void)b, (void)c, (void)d, (void)preference;
    memset(found, 0, sizeof *found * (size_t)asked);
    *count = 1;
    return SUCCESS;
}

/* ---- cuSPARSE ---- */

const char *cusparseGetErrorString(int status) { return status ? "error of the emulated cuSPARSE" : "success"; }
