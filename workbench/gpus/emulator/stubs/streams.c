/* libcudart: streams and events. Everything is done at once, and told as done later: see below. */
#include <stdatomic.h>

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

/* ---- what the host knows to be over ----
 *
 * On a card that is busy the host is ahead: it asks for work and goes on. An event that was recorded is therefore told
 * as over only once the host has waited for the card, which is the latest that it can be. What PyTorch keeps until then
 * is at the peak: blocks that two streams use, and what a collective of NCCL holds whose work nobody waited for.
 * Who does nothing but ask, as a loop around query() does, is told so in the end: by then the card has come to it.
 * (A thread of NCCL's asks every tenth of a second, beside a program that gives the card more to do.) */

enum { NOT_READY = 600, PATIENCE = 100 };

typedef struct {
    unsigned long long capture; /* the number of the capture in which it was recorded; 0: in none */
    unsigned long long waits;   /* how often the host had waited by then */
    unsigned long long writes;  /* of the card, when it was last asked for */
    int recorded, asked;
} Event;

static _Atomic unsigned long long waits;

void host_waits(void) { waits++; }

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    (void)flags;
    *event = calloc(1, sizeof(Event));
    return SUCCESS;
}

cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }

cudaError_t cudaEventDestroy(cudaEvent_t event) {
    free(event);
    return SUCCESS;
}

cudaError_t cudaEventQuery(cudaEvent_t handle) {
    Event *event = handle;
    if (!event || !event->recorded || event->waits < waits) return SUCCESS;
    if (event->writes != writes_of_card()) event->asked = 0;
    event->writes = writes_of_card();
    return ++event->asked < PATIENCE ? NOT_READY : SUCCESS;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    (void)event;
    host_waits();
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

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
    (void)flags;
    if (event) *(Event *)event = (Event){is_captured(stream) ? capture.number : 0, waits, writes_of_card(), 1, 0};
    return SUCCESS;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    return cudaEventRecordWithFlags(event, stream, 0);
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
    (void)flags;
    if (capture.count && event && ((Event *)event)->capture == capture.number) join(stream);
    return SUCCESS;
}

/* A program that waits for the card in the middle of a capture fails on a card, too. */
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    if (is_captured(stream)) return ILLEGAL_WHILE_CAPTURING;
    host_waits();
    return SUCCESS;
}

cudaError_t cudaDeviceSynchronize(void) {
    if (capture.count) return ILLEGAL_WHILE_CAPTURING;
    host_waits();
    return SUCCESS;
}

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
