/* libcupti: the profiler's eyes on a card. There is nothing to see: it subscribes, and no activity comes. */
#include "emulator.h"

enum { NO_MORE_RECORDS = 12 }; /* CUPTI_ERROR_MAX_LIMIT_REACHED */

int cuptiGetVersion(uint32_t *version) {
    *version = 130000;
    return SUCCESS;
}

int cuptiGetResultString(int status, const char **text) {
    *text = status ? "error of the emulated CUPTI" : "success";
    return SUCCESS;
}

int cuptiSubscribe(void **subscriber, void *callback, void *data) {
    (void)callback, (void)data;
    *subscriber = new_handle();
    return SUCCESS;
}

int cuptiGetCallbackName(int domain, uint32_t id, const char **name) {
    (void)domain, (void)id;
    *name = "a call on the emulated GPU";
    return SUCCESS;
}

int cuptiActivityGetNextRecord(uint8_t *buffer, size_t bytes, void **record) {
    (void)buffer, (void)bytes;
    *record = NULL;
    return NO_MORE_RECORDS;
}

int cuptiActivityGetNumDroppedRecords(void *context, uint32_t stream, size_t *count) {
    (void)context, (void)stream;
    *count = 0;
    return SUCCESS;
}

int cuptiActivityPopExternalCorrelationId(int kind, uint64_t *last) {
    (void)kind;
    if (last) *last = 0;
    return SUCCESS;
}
