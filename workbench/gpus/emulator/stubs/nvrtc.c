/* libnvrtc: PyTorch compiles a few rare kernels (torch.special) while the program runs. They become one empty byte. */
#include "emulator.h"

int nvrtcVersion(int *major, int *minor) {
    *major = 13, *minor = 0;
    return SUCCESS;
}

int nvrtcCreateProgram(void **program, const char *source, const char *name) {
    (void)source, (void)name;
    *program = new_handle();
    return SUCCESS;
}

static int one(size_t *bytes) {
    *bytes = 1;
    return SUCCESS;
}

static int nothing(char *out) {
    *out = 0;
    return SUCCESS;
}

int nvrtcGetPTXSize(void *program, size_t *bytes) { return (void)program, one(bytes); }
int nvrtcGetCUBINSize(void *program, size_t *bytes) { return (void)program, one(bytes); }
int nvrtcGetProgramLogSize(void *program, size_t *bytes) { return (void)program, one(bytes); }
int nvrtcGetPTX(void *program, char *out) { return (void)program, nothing(out); }
int nvrtcGetCUBIN(void *program, char *out) { return (void)program, nothing(out); }
int nvrtcGetProgramLog(void *program, char *out) { return (void)program, nothing(out); }

int nvrtcGetLoweredName(void *program, const char *name, const char **lowered) {
    (void)program;
    *lowered = name;
    return SUCCESS;
}

const char *nvrtcGetErrorString(int status) { return status ? "error of the emulated compiler" : "success"; }
