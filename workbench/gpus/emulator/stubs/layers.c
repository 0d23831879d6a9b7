/* libcudnn: tensors as they are described to it, batch norm, dropout, and the older functions for convolutions.

   cuDNN's batch norm keeps no reserve, and needs no workspace but for channels that lie last: the formula was seen in
   46 cases on an H200 (cuDNN 9.19, data/reference/h200/README.md), fp32, and fp16 with fp32 weights. */
#include "cudnn.h"

int element_bytes(int data_type) {
    return data_type == DOUBLE ? 8 : data_type == HALF || data_type == BFLOAT16 ? 2 : 4;
}

int device_is_an_h200(void) { return strstr(card_name(), "H200") != NULL; }

static int kept(Tensor *tensor, int data_type, int dimensions, const int *sizes, const int *strides) {
    if (dimensions > MOST_DIMENSIONS) return stub_refused("cudnnSetTensorNdDescriptor of more than 8 dimensions", 3000);
    tensor->data_type = data_type;
    tensor->dimensions = dimensions;
    memcpy(tensor->sizes, sizes, sizeof *sizes * (size_t)dimensions);
    if (strides) memcpy(tensor->strides, strides, sizeof *strides * (size_t)dimensions);
    return SUCCESS;
}

static int told(const Tensor *tensor, int wanted, int *data_type, int *dimensions, int *sizes, int *strides) {
    int count = wanted < tensor->dimensions ? wanted : tensor->dimensions;
    *data_type = tensor->data_type;
    *dimensions = tensor->dimensions;
    memcpy(sizes, tensor->sizes, sizeof *sizes * (size_t)count);
    if (strides) memcpy(strides, tensor->strides, sizeof *strides * (size_t)count);
    return SUCCESS;
}

int cudnnSetTensorNdDescriptor(Tensor *tensor, int data_type, int dimensions, const int *sizes, const int *strides) {
    return kept(tensor, data_type, dimensions, sizes, strides);
}

int cudnnGetTensorNdDescriptor(const Tensor *tensor, int wanted, int *data_type, int *dimensions, int *sizes,
                               int *strides) {
    return told(tensor, wanted, data_type, dimensions, sizes, strides);
}

int cudnnSetFilterNdDescriptor(Tensor *filter, int data_type, int format, int dimensions, const int *sizes) {
    (void)format;
    return kept(filter, data_type, dimensions, sizes, NULL);
}

int cudnnGetFilterNdDescriptor(const Tensor *filter, int wanted, int *data_type, int *format, int *dimensions,
                               int *sizes) {
    *format = 0; /* one matrix or image after the other */
    return told(filter, wanted, data_type, dimensions, sizes, NULL);
}

/* ---- batch norm ---- */

/* Bytes, by how many rows of a channel a block adds up, and how much it writes for 64 channels. */
static size_t of_blocks(const Tensor *input, size_t fixed, size_t of_64_channels, size_t of_block,
                        size_t rows_of_block) {
    size_t rows = 1, channels = (size_t)(input->sizes[1] + 63) / 64;
    for (int i = 0; i < input->dimensions; i++) rows *= i == 1 ? 1 : (size_t)input->sizes[i];
    return fixed + of_64_channels * channels + of_block * channels * ((rows + rows_of_block - 1) / rows_of_block);
}

static int channels_lie_last(const Tensor *input) {
    size_t pixels = 1;
    for (int i = 2; i < input->dimensions; i++) pixels *= (size_t)input->sizes[i];
    return pixels > 1 && input->strides[1] == 1 && input->sizes[1] > 1;
}

static void say_if_not_tried(const Tensor *input) {
    int channels = input->sizes[1];
    if (channels < 32 || channels > 2048 || channels == 17 || !device_is_an_h200())
        not_measured("cuDNN's workspace of batch norm with channels last");
}

int cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(void *handle, int mode, int operations,
                                                             const Tensor *input, void *added, void *output,
                                                             void *weights, void *activation, size_t *bytes) {
    (void)handle, (void)mode, (void)operations, (void)added, (void)output, (void)weights, (void)activation;
    *bytes = 0;
    if (!channels_lie_last(input)) return SUCCESS;
    *bytes = of_blocks(input, 1072, 4, 516, input->data_type == HALF ? 160 : 64);
    say_if_not_tried(input);
    return SUCCESS;
}

int cudnnGetBatchNormalizationBackwardExWorkspaceSize(void *handle, int mode, int operations, const Tensor *input,
                                                      void *output, void *output_gradient, void *added_gradient,
                                                      void *input_gradient, void *weights, void *activation,
                                                      size_t *bytes) {
    (void)handle, (void)mode, (void)operations, (void)output, (void)output_gradient, (void)added_gradient;
    (void)input_gradient, (void)weights, (void)activation;
    *bytes = 0;
    if (!channels_lie_last(input)) return SUCCESS;
    *bytes = of_blocks(input, 1056, 4, 512, 96);
    say_if_not_tried(input);
    return SUCCESS;
}

int cudnnGetBatchNormalizationTrainingExReserveSpaceSize(void *handle, int mode, int operations, void *activation,
                                                         const Tensor *input, size_t *bytes) {
    (void)handle, (void)mode, (void)operations, (void)activation, (void)input;
    *bytes = 0;
    return SUCCESS;
}

/* ---- dropout, whose random states live on the card: 48 bytes for each of 1,024 threads of a multiprocessor ---- */

int cudnnDropoutGetStatesSize(void *handle, size_t *bytes) {
    (void)handle;
    *bytes = (size_t)card("sms") * 48 * 1024;
    return SUCCESS;
}

int cudnnSetDropoutDescriptor(Dropout *dropout, void *handle, float share, void *states, size_t bytes, uint64_t seed) {
    (void)handle, (void)states, (void)bytes, (void)seed;
    dropout->share = share;
    return SUCCESS;
}

int cudnnRestoreDropoutDescriptor(Dropout *dropout, void *handle, float share, void *states, size_t bytes,
                                  uint64_t seed) {
    return cudnnSetDropoutDescriptor(dropout, handle, share, states, bytes, seed);
}

/* ---- convolutions as PyTorch asks for them if it is told to leave the graph API alone ---- */

#define CONVOLUTIONS "cuDNN's workspace of convolutions"

typedef struct {
    int algorithm, status;
    float milliseconds;
    size_t workspace_bytes;
    int is_deterministic, math_type, reserved[3];
} Measured;

static int the_first_way(int *count, Measured *way) {
    *count = 1;
    *way = (Measured){.algorithm = 1, .milliseconds = 1};
    not_measured(CONVOLUTIONS);
    return SUCCESS;
}

static int no_workspace(size_t *bytes) {
    *bytes = 0;
    not_measured(CONVOLUTIONS);
    return SUCCESS;
}

#define WAYS(name)                                                                                                    \
    int name(void *handle, void *a, void *b, void *convolution, void *c, int wanted, int *count, Measured *ways) {    \
        (void)handle, (void)a, (void)b, (void)convolution, (void)c, (void)wanted;                                     \
        return the_first_way(count, ways);                                                                            \
    }
WAYS(cudnnGetConvolutionForwardAlgorithm_v7)
WAYS(cudnnGetConvolutionBackwardDataAlgorithm_v7)
WAYS(cudnnGetConvolutionBackwardFilterAlgorithm_v7)

#define TRIED(name)                                                                                                   \
    int name(void *handle, void *a, void *of_a, void *b, void *of_b, void *convolution, void *c, void *of_c,          \
             int wanted, int *count, Measured *ways, void *workspace, size_t bytes) {                                 \
        (void)handle, (void)a, (void)of_a, (void)b, (void)of_b, (void)convolution, (void)c, (void)of_c, (void)wanted; \
        (void)workspace, (void)bytes;                                                                                 \
        return the_first_way(count, ways);                                                                            \
    }
TRIED(cudnnFindConvolutionForwardAlgorithmEx)
TRIED(cudnnFindConvolutionBackwardDataAlgorithmEx)
TRIED(cudnnFindConvolutionBackwardFilterAlgorithmEx)

#define WORKSPACE(name)                                                                               \
    int name(void *handle, void *a, void *b, void *convolution, void *c, int algorithm, size_t *bytes) { \
        (void)handle, (void)a, (void)b, (void)convolution, (void)c, (void)algorithm;                  \
        return no_workspace(bytes);                                                                   \
    }
WORKSPACE(cudnnGetConvolutionForwardWorkspaceSize)
WORKSPACE(cudnnGetConvolutionBackwardDataWorkspaceSize)
WORKSPACE(cudnnGetConvolutionBackwardFilterWorkspaceSize)

int cudnnGetCTCLossWorkspaceSize(void *handle, void *scores, void *gradients, const int *labels, const int *lengths,
                                 const int *input_lengths, int algorithm, void *loss, size_t *bytes) {
    (void)handle, (void)scores, (void)gradients, (void)labels, (void)lengths, (void)input_lengths, (void)algorithm;
    (void)loss;
    *bytes = 0;
    not_measured("cuDNN's workspace of the CTC loss");
    return SUCCESS;
}

int cudnnGetCTCLossWorkspaceSize_v8(void *handle, int algorithm, void *loss, void *scores, void *gradients,
                                    size_t *bytes) {
    return cudnnGetCTCLossWorkspaceSize(handle, scores, gradients, NULL, NULL, NULL, algorithm, loss, bytes);
}

int cudnnGetProperty(int part, int *value) {
    size_t version = cudnnGetVersion();
    int parts[] = {(int)(version / 10000), (int)(version / 100 % 100), (int)(version % 100)};
    *value = parts[part];
    return SUCCESS;
}

void cudnnGetLastErrorString(char *message, size_t bytes) {
    if (bytes) snprintf(message, bytes, "%s", cudnnGetErrorString(1));
}

int cudnnGetStream(void *handle, void **stream) {
    (void)handle;
    *stream = NULL;
    return SUCCESS;
}
