/* cuBLAS, NCCL and CUPTI on the null GPU: products and collectives are logged, and do nothing unless it computes. */
#include "computes.h"
#include "log.h"

#include <cuda_runtime_api.h>
#include <library_types.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

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

static size_t bytes_of(int type) { return type == CUDA_R_32F ? 4 : 2; }

static int product(void **handle, Matrix a, Matrix b, Matrix c, int m, int n, int k, float alpha, float beta) {
  null_gpu_log("product %p %p %p %p %d", *handle, a.start, b.start, c.start, c.type);
  if (null_gpu_computes())
    compute_product(a, b, c, m, n, k, alpha, beta);
  return 0;
}

/* Factors are fp32 in the products of a model's matrices. */
int cublasGemmStridedBatchedEx(void **handle, int turn_a, int turn_b, int m, int n, int k, const float *alpha,
                               const char *a, int type_a, int stride_a, long long next_a, const char *b, int type_b,
                               int stride_b, long long next_b, const float *beta, const char *c, int type_c,
                               int stride_c, long long next_c, int count) {
  for (int each = 0; each < count; each++)
    product(handle, (Matrix){a + each * next_a * bytes_of(type_a), type_a, turn_a, stride_a},
            (Matrix){b + each * next_b * bytes_of(type_b), type_b, turn_b, stride_b},
            (Matrix){c + each * next_c * bytes_of(type_c), type_c, 0, stride_c}, m, n, k, *alpha, *beta);
  return 0;
}

int cublasSgemmStridedBatched(void **handle, int turn_a, int turn_b, int m, int n, int k, const float *alpha,
                              const char *a, int stride_a, long long next_a, const char *b, int stride_b,
                              long long next_b, const float *beta, const char *c, int stride_c, long long next_c,
                              int count) {
  return cublasGemmStridedBatchedEx(handle, turn_a, turn_b, m, n, k, alpha, a, CUDA_R_32F, stride_a, next_a, b,
                                    CUDA_R_32F, stride_b, next_b, beta, c, CUDA_R_32F, stride_c, next_c, count);
}

int cublasGemmEx(void **handle, int turn_a, int turn_b, int m, int n, int k, const float *alpha, const void *a,
                 int type_a, int stride_a, const void *b, int type_b, int stride_b, const float *beta, const void *c,
                 int type_c, int stride_c) {
  return product(handle, (Matrix){a, type_a, turn_a, stride_a}, (Matrix){b, type_b, turn_b, stride_b},
                 (Matrix){c, type_c, 0, stride_c}, m, n, k, *alpha, *beta);
}

int cublasSgemm_v2(void **handle, int turn_a, int turn_b, int m, int n, int k, const float *alpha, const void *a,
                   int stride_a, const void *b, int stride_b, const float *beta, const void *c, int stride_c) {
  return cublasGemmEx(handle, turn_a, turn_b, m, n, k, alpha, a, CUDA_R_32F, stride_a, b, CUDA_R_32F, stride_b, beta,
                      c, CUDA_R_32F, stride_c);
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

int cublasLtMatmul(void *handle) {
  if (null_gpu_computes())
    null_gpu_gives_up("products of cuBLASLt");
  return 0;
}

/* NCCL, whose header wants a C++ compiler with CUDA. */

typedef struct {
  char bytes[128];
} UniqueId;

static const int ITEM_BYTES[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1}; /* by data type */

static int new_communicator(Communicator **communicator, int ranks, int rank, long id) {
  *communicator = calloc(1, sizeof(Communicator));
  **communicator = (Communicator){ranks, rank, id};
  return 0;
}

int ncclGetUniqueId(UniqueId *id) {
  static int made;
  long number = ((long)getpid() << 16) + ++made;
  memcpy(id->bytes, &number, sizeof number);
  return 0;
}

int ncclGetVersion(int *version) {
  *version = 22807;
  return 0;
}

int ncclCommInitRank(Communicator **communicator, int ranks, UniqueId id, int rank) {
  long number;
  memcpy(&number, id.bytes, sizeof number);
  return new_communicator(communicator, ranks, rank, number);
}

int ncclCommInitRankConfig(Communicator **communicator, int ranks, UniqueId id, int rank, void *config) {
  return ncclCommInitRank(communicator, ranks, id, rank);
}

int ncclCommSplit(Communicator *whole, int color, int key, Communicator **communicator, void *config) {
  if (null_gpu_computes())
    null_gpu_gives_up("on communicators that are split off");
  return new_communicator(communicator, whole->ranks, whole->rank, 0);
}

int ncclCommCount(const Communicator *communicator, int *ranks) {
  *ranks = communicator->ranks;
  return 0;
}

int ncclCommUserRank(const Communicator *communicator, int *rank) {
  *rank = communicator->rank;
  return 0;
}

int ncclCommGetAsyncError(Communicator *communicator, int *error) {
  *error = 0;
  return 0;
}

const char *ncclGetErrorString(int result) { return "the null GPU knows no errors"; }

const char *ncclGetLastError(Communicator *communicator) { return "the null GPU knows no errors"; }

int ncclMemAlloc(void **address, size_t bytes) { return cudaMalloc(address, bytes); }

int ncclCommRegister(const Communicator *communicator, void *address, size_t bytes, void **handle) {
  null_gpu_log("registered %p %zu", address, bytes);
  *handle = address;
  return 0;
}

int ncclAllGather(const void *sent, void *received, size_t count, int type, Communicator *communicator,
                  cudaStream_t stream) {
  size_t bytes = count * ITEM_BYTES[type];
  null_gpu_log("all_gather %p %p %zu %p %zu", (void *)stream, sent, bytes, received, communicator->ranks * bytes);
  if (null_gpu_computes())
    compute_collective(GATHER, sent, received, bytes, count, type, 0, communicator);
  return 0;
}

int ncclReduceScatter(const void *sent, void *received, size_t count, int type, int op, Communicator *communicator,
                      cudaStream_t stream) {
  size_t bytes = count * ITEM_BYTES[type];
  null_gpu_log("reduce_scatter %p %p %zu %p %zu", (void *)stream, sent, communicator->ranks * bytes, received, bytes);
  if (null_gpu_computes())
    compute_collective(REDUCE_SCATTER, sent, received, bytes, count, type, op, communicator);
  return 0;
}

int ncclAllReduce(const void *sent, void *received, size_t count, int type, int op, Communicator *communicator,
                  cudaStream_t stream) {
  size_t bytes = count * ITEM_BYTES[type];
  null_gpu_log("all_reduce %p %p %zu %p %zu", (void *)stream, sent, bytes, received, bytes);
  if (null_gpu_computes())
    compute_collective(REDUCE, sent, received, bytes, count, type, op, communicator);
  return 0;
}

int ncclAlltoAll(const void *sent, void *received, size_t count, int type, Communicator *communicator,
                 cudaStream_t stream) {
  size_t bytes = count * ITEM_BYTES[type], all = communicator->ranks * bytes;
  null_gpu_log("all_to_all %p %p %zu %p %zu", (void *)stream, sent, all, received, all);
  if (null_gpu_computes())
    compute_collective(SWAP, sent, received, bytes, count, type, 0, communicator);
  return 0;
}

/* CUPTI has nothing to tell the profiler. */

int cuptiActivityGetNextRecord(void *buffer, size_t bytes, void **record) { return 12; /* no more records */ }
