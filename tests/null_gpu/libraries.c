/* cuBLAS, NCCL and CUPTI on the null GPU: products and collectives are logged, and do nothing. */
#include "log.h"

#include <cuda_runtime_api.h>
#include <library_types.h>
#include <stdlib.h>

/* cuBLAS. Its handles remember a stream. */

int cublasCreate_v2(void ***handle) {
  *handle = calloc(1, sizeof(void *));
  return 0;
}

int cublasSetStream_v2(void **handle, void *stream) {
  *handle = stream;
  return 0;
}

int cublasGetStream_v2(void **handle, void **stream) {
  *stream = *handle;
  return 0;
}

static int product(void **handle, const void *a, const void *b, const void *c, int type_c) {
  null_gpu_log("product %p %p %p %p %d", *handle, a, b, c, type_c);
  return 0;
}

int cublasGemmEx(void **handle, int turn_a, int turn_b, int m, int n, int k, const void *alpha, const void *a,
                 int type_a, int stride_a, const void *b, int type_b, int stride_b, const void *beta, void *c,
                 int type_c) {
  return product(handle, a, b, c, type_c);
}

int cublasSgemm_v2(void **handle, int turn_a, int turn_b, int m, int n, int k, const void *alpha, const void *a,
                   int stride_a, const void *b, int stride_b, const void *beta, void *c) {
  return product(handle, a, b, c, CUDA_R_32F);
}

static int description(void **handle) {
  *handle = calloc(1, 64);
  return 0;
}

int cublasLtCreate(void **handle) { return description(handle); }
int cublasLtMatmulDescCreate(void **handle) { return description(handle); }
int cublasLtMatrixLayoutCreate(void **handle) { return description(handle); }
int cublasLtMatmulPreferenceCreate(void **handle) { return description(handle); }

int cublasLtMatmulAlgoGetHeuristic(void *handle, void *product, void *a, void *b, void *c, void *d, void *preference,
                                   int wanted, void *results, int *found) {
  *found = wanted;
  return 0;
}

/* NCCL, whose header wants a C++ compiler with CUDA. A communicator is how many ranks it has, and which this is. */

typedef struct {
  char bytes[128];
} UniqueId;

static const int ITEM_BYTES[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1}; /* by data type */

static int new_communicator(int **communicator, int ranks, int rank) {
  *communicator = calloc(2, sizeof(int));
  (*communicator)[0] = ranks;
  (*communicator)[1] = rank;
  return 0;
}

int ncclGetVersion(int *version) {
  *version = 22807;
  return 0;
}

int ncclCommInitRankConfig(int **communicator, int ranks, UniqueId id, int rank, void *config) {
  return new_communicator(communicator, ranks, rank);
}

int ncclCommInitRank(int **communicator, int ranks, UniqueId id, int rank) {
  return new_communicator(communicator, ranks, rank);
}

int ncclCommSplit(int *whole, int color, int key, int **communicator, void *config) {
  return new_communicator(communicator, whole[0], whole[1]);
}

int ncclCommCount(const int *communicator, int *ranks) {
  *ranks = communicator[0];
  return 0;
}

int ncclCommUserRank(const int *communicator, int *rank) {
  *rank = communicator[1];
  return 0;
}

int ncclCommGetAsyncError(int *communicator, int *error) {
  *error = 0;
  return 0;
}

const char *ncclGetErrorString(int result) { return "the null GPU knows no errors"; }

const char *ncclGetLastError(int *communicator) { return "the null GPU knows no errors"; }

int ncclMemAlloc(void **address, size_t bytes) { return cudaMalloc(address, bytes); }

int ncclCommRegister(const int *communicator, void *address, size_t bytes, void **handle) {
  null_gpu_log("registered %p %zu", address, bytes);
  *handle = address;
  return 0;
}

int ncclAllGather(const void *sent, void *received, size_t count, int type, int *communicator, cudaStream_t stream) {
  size_t bytes = count * ITEM_BYTES[type];
  null_gpu_log("all_gather %p %p %zu %p %zu", (void *)stream, sent, bytes, received, communicator[0] * bytes);
  return 0;
}

int ncclReduceScatter(const void *sent, void *received, size_t count, int type, int op, int *communicator,
                      cudaStream_t stream) {
  size_t bytes = count * ITEM_BYTES[type];
  null_gpu_log("reduce_scatter %p %p %zu %p %zu", (void *)stream, sent, communicator[0] * bytes, received, bytes);
  return 0;
}

int ncclAllReduce(const void *sent, void *received, size_t count, int type, int op, int *communicator,
                  cudaStream_t stream) {
  size_t bytes = count * ITEM_BYTES[type];
  null_gpu_log("all_reduce %p %p %zu %p %zu", (void *)stream, sent, bytes, received, bytes);
  return 0;
}

int ncclAlltoAll(const void *sent, void *received, size_t count, int type, int *communicator, cudaStream_t stream) {
  size_t bytes = communicator[0] * count * ITEM_BYTES[type];
  null_gpu_log("all_to_all %p %p %zu %p %zu", (void *)stream, sent, bytes, received, bytes);
  return 0;
}

/* CUPTI has nothing to tell the profiler. */

int cuptiActivityGetNextRecord(void *buffer, size_t bytes, void **record) { return 12; /* no more records */ }
