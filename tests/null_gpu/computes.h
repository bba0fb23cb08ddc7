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
void null_gpu_gives_up(const char *what);

/* c = alpha * a b + beta * c, of m rows, n columns and k products each. */
void compute_product(Matrix a, Matrix b, Matrix c, int m, int n, int k, float alpha, float beta);

typedef struct {
  int ranks, rank; /* how many, and which this is */
  long id;
} Communicator;

typedef enum { GATHER, REDUCE_SCATTER, REDUCE, SWAP } Collective;

/* Numbers of operations and types are NCCL's. Counts are of what a rank sends (GATHER, REDUCE), or of each of the parts
   that it sends or receives. */
void compute_collective(Collective which, const void *sent, void *received, size_t count, int type, int op,
                        const Communicator *communicator);
