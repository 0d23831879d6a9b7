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

/* ---- CUDA graphs: what is captured runs at once, and a replay does nothing ----
 *
 * PyTorch's allocator serves the streams of a capture from the graph's private pool, for which it asks of each stream
 * whether it takes part. A stream joins when it waits for an event that was recorded in the capture. One capture at a
 * time, of all threads: the backward pass has one of its own. */

enum { CAPTURING = 1, ILLEGAL_WHILE_CAPTURING = 900, MOST_STREAMS = 64 };
static struct { cudaStream_t streams[MOST_STREAMS]; int count; unsigned long long number; } capture;

static int is_captured(cudaStream_t stream) {
    for (int i = 0; i < capture.count; i++)
        if (capture.streams[i] == stream) return 1;
    return 0;
}

static void join(cudaStream_t stream) {
    if (!is_captured(stream) && capture.count < MOST_STREAMS) capture.streams[capture.count++] = stream;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, int mode) {
    (void)mode;
    if (capture.count) return ILLEGAL_WHILE_CAPTURING;
    capture.number++;
    join(stream);
    return SUCCESS;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, void **graph) {
    *graph = NULL;
    if (!is_captured(stream)) return INVALID_VALUE;
    capture.count = 0;
    *graph = new_handle();
    return SUCCESS;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, int *status) {
    *status = is_captured(stream) ? CAPTURING : 0;
    return SUCCESS;
}

/* CUDA 13 has one parameter more than CUDA 12's, between these two. */
static cudaError_t tell_capture(cudaStream_t stream, int *status, unsigned long long *number, void **graph,
                                void **dependencies, size_t *count) {
    cudaStreamIsCapturing(stream, status);
    if (number) *number = capture.number;
    if (graph) *graph = NULL;
    if (dependencies) *dependencies = NULL;
    if (count) *count = 0;
    return SUCCESS;
}

#if CUDA_MAJOR < 13
cudaError_t cudaStreamGetCaptureInfo_v2(cudaStream_t stream, int *status, unsigned long long *number, void **graph,
                                        void **dependencies, size_t *count) {
    return tell_capture(stream, status, number, graph, dependencies, count);
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, int *status, unsigned long long *number) {
    return tell_capture(stream, status, number, NULL, NULL, NULL);
}
#else
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, int *status, unsigned long long *number, void **graph,
                                     void **dependencies, void **edges, size_t *count) {
    if (edges) *edges = NULL;
    return tell_capture(stream, status, number, graph, dependencies, count);
}
#endif

/* An event knows in which capture it was recorded. */
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
    (void)flags;
    if (event) *(unsigned long long *)event = is_captured(stream) ? capture.number : 0;
    return SUCCESS;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    return cudaEventRecordWithFlags(event, stream, 0);
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
    (void)flags;
    if (capture.count && event && *(unsigned long long *)event == capture.number) join(stream);
    return SUCCESS;
}

/* A program that waits for the card in the middle of a capture fails on a card, too. */
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    return is_captured(stream) ? ILLEGAL_WHILE_CAPTURING : SUCCESS;
}

cudaError_t cudaDeviceSynchronize(void) { return capture.count ? ILLEGAL_WHILE_CAPTURING : SUCCESS; }

/* One node stands for all: PyTorch warns of a graph without any. */
cudaError_t cudaGraphGetNodes(void *graph, void **nodes, size_t *count) {
    if (nodes && *count) nodes[0] = graph;
    *count = 1;
    return SUCCESS;
}

cudaError_t cudaGraphInstantiate(void **executable, void *graph, unsigned long long flags) {
    (void)graph, (void)flags;
    *executable = new_handle();
    return SUCCESS;
}

cudaError_t cudaGraphInstantiateWithFlags(void **executable, void *graph, unsigned long long flags) {
    return cudaGraphInstantiate(executable, graph, flags);
}

/* PyTorch's allocator relaxes what may happen during a capture, and puts it back. */
cudaError_t cudaThreadExchangeStreamCaptureMode(int *mode) {
    static _Thread_local int before; /* global */
    int now = *mode;
    *mode = before;
    before = now;
    return SUCCESS;
}
