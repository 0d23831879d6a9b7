/* libcudart: streams and events. Everything is done at once, so every wait is over before it begins. */
#include "cuda.h"
#include "emulator.h"

cudaError_t cudaStreamCreate(cudaStream_t *stream) {
    *stream = new_handle();
    return SUCCESS;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
    (void)flags;
    return cudaStreamCreate(stream);
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
    (void)flags, (void)priority;
    return cudaStreamCreate(stream);
}

cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
    (void)stream;
    *priority = 0;
    return SUCCESS;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0, *greatest = -5;
    return SUCCESS;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    (void)flags;
    *event = new_handle();
    return SUCCESS;
}

cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }

cudaError_t cudaEventDestroy(cudaEvent_t event) {
    free(event);
    return SUCCESS;
}

/* No time passes on a card that is not there; programs divide by it, so it is not zero. */
cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t from, cudaEvent_t to) {
    (void)from, (void)to;
    *milliseconds = 1;
    return SUCCESS;
}

/* ---- CUDA graphs: refused, since a graph's private memory pool lives by what capturing says ---- */

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, int *status) {
    (void)stream;
    *status = 0;
    return SUCCESS;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, int *status, unsigned long long *id) {
    (void)stream;
    *status = 0;
    if (id) *id = 0;
    return SUCCESS;
}

cudaError_t cudaStreamGetCaptureInfo_v2(cudaStream_t stream, int *status, unsigned long long *id) {
    return cudaStreamGetCaptureInfo(stream, status, id); /* the name that CUDA 12 gives it */
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, int mode) {
    (void)stream, (void)mode;
    return stub_refused("cudaStreamBeginCapture (CUDA graphs)", NOT_SUPPORTED);
}

/* PyTorch's allocator relaxes what may happen during a capture, and puts it back. */
cudaError_t cudaThreadExchangeStreamCaptureMode(int *mode) {
    static _Thread_local int before; /* global */
    int now = *mode;
    *mode = before;
    before = now;
    return SUCCESS;
}
