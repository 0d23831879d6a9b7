/* libcudnn: PyTorch describes an operation to the backend, asks for one way to do it and for the workspace of that.
   cuDNN does not publish its workspaces. Those of its attention were 256 bytes on an H100 (cuDNN 9.19), forward and
   backward; two more kinds, larger there, are not known here: of convolutions, and of the backward of grouped heads. */
#include "cudnn.h"

/* cudnn_graph.h: the numbers of the attributes and types that matter here */
enum { HEURISTIC_RESULTS = 202, KNOB_CHOICES = 302, WORKSPACE_SIZE = 402 };
enum { CONVOLUTION_FORWARD = 10, CONVOLUTION_BACKWARD_DATA = 12 }; /* the filter's is between them */
enum { TYPE_NUMERICAL_NOTE = 11, TYPE_DESCRIPTOR = 15, TYPE_BEHAVIOR_NOTE = 19 };

#define ATTENTION_WORKSPACE 256

static const size_t type_bytes[] = {8, 4, 4, 8, 4, 8, 8, 4, 4, 4, 4, 4, 4, 4, 4, 8, 4, 4, 4, 4, 4, 4, 4, 4, 1, 4, 16};

#ifndef LIBRARY_MAJOR
#define LIBRARY_MAJOR 9
#endif

/* PyTorch refuses another major version than that it was built with. */
size_t cudnnGetVersion(void) { return LIBRARY_MAJOR == 8 ? 8907 : 92000; }
size_t cudnnGetCudartVersion(void) { return 13000; }
const char *cudnnGetErrorString(int status) { return status ? "error of the emulated cuDNN" : "success"; }

int cudnnCreate(void **handle) {
    *handle = new_handle();
    return SUCCESS;
}

int cudnnBackendCreateDescriptor(int type, void **descriptor) {
    if (type >= CONVOLUTION_FORWARD && type <= CONVOLUTION_BACKWARD_DATA)
        not_measured("cuDNN's workspace of convolutions");
    return cudnnCreate(descriptor);
}

int cudnnBackendGetAttribute(void *descriptor, int attribute, int type, int64_t wanted, int64_t *found, void *out) {
    (void)descriptor;
    int64_t count = attribute == HEURISTIC_RESULTS ? 1 : wanted;
    if (type == TYPE_NUMERICAL_NOTE || type == TYPE_BEHAVIOR_NOTE || attribute == KNOB_CHOICES) count = 0;
    if (found) *found = count;
    int known = type >= 0 && (size_t)type < sizeof type_bytes / sizeof *type_bytes;
    if (out && known && type != TYPE_DESCRIPTOR && count > 0 && wanted > 0)
        memset(out, 0, type_bytes[type] * (size_t)(count < wanted ? count : wanted));
    if (out && attribute == WORKSPACE_SIZE) *(int64_t *)out = ATTENTION_WORKSPACE;
    return SUCCESS;
}
