#pragma once
#include <library_types.h>
#include <stddef.h>

/* A matrix by columns, as cuBLAS has them. */
typedef struct {
  const void *start;
  cudaDataType type;
  int turned, stride;
} Matrix;

/* Whether what is launched is computed as well: where NULL_GPU_COMPUTES names a folder, in which ranks meet. */
int null_gpu_computes(void);

/* Says what it does not compute, and ends the process. */
__attribute__((noreturn, format(printf, 1, 2))) void null_gpu_gives_up(const char *what, ...);

/* c = alpha * a b + beta * c, of m rows, n columns and k products each. */
void compute_product(Matrix a, Matrix b, Matrix c, int m, int n, int k, float alpha, float beta);

typedef struct {
  int ranks, rank; /* how many, and which this is */
  long id;
  void *meeting; /* of its ranks, where they compute */
} Communicator;

typedef enum { GATHER, REDUCE_SCATTER, REDUCE, SWAP } Collective;

/* A count of numbers, of so many bytes, is what a rank sends (GATHER, REDUCE), or each part that it sends or receives.
   Types and operations are numbered as NCCL's. */
void compute_collective(Collective which, const void *sent, void *received, size_t bytes, size_t count, int type,
                        int op, Communicator *communicator);
